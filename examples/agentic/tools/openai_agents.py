"""The same agent, written with OpenAI's Agents SDK: `pip install openai-agents`, agent.fn=.../openai_agents.py."""

from contextlib import suppress
from typing import Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from moves import SYSTEM

from areno.api.agentic import Recorder


@function_tool
def choose_move(direction: Literal["up", "down", "left", "right"]) -> str:
    """Move one step."""
    return f"You went {direction}."


mover = Agent(name="mover", instructions=SYSTEM, tools=[choose_move], tool_use_behavior="stop_on_first_tool")


async def run_agent(ctx, batch):
    trajectories = []
    for item in batch.iter_samples():  # a run gives one sample to each call
        async with Recorder(ctx) as recorder:
            model = OpenAIChatCompletionsModel("policy", recorder.client)
            with suppress(MaxTurnsExceeded, ModelBehaviorError):  # such as a call of an unknown tool
                await Runner.run(mover, item.prompt, run_config=RunConfig(model=model, tracing_disabled=True))
            trajectories.append(recorder.trajectory(item))
    return trajectories

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
from openai import AsyncOpenAI


@function_tool
def choose_move(direction: Literal["up", "down", "left", "right"]) -> str:
    """Move one step."""
    return f"You went {direction}."


mover = Agent(name="mover", instructions=SYSTEM, tools=[choose_move], tool_use_behavior="stop_on_first_tool")


async def run_agent(ctx, batch):
    [item] = batch  # a run gives one sample to each call
    async with AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0, timeout=None) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        with suppress(MaxTurnsExceeded, ModelBehaviorError):  # such as a call of an unknown tool
            await Runner.run(mover, item.prompt, run_config=RunConfig(model=model, tracing_disabled=True))
    # Nothing is returned: the session of the sample has recorded the turns.

"""Agents that run an environment from the verifiers package.

A rollout of the environment sends its requests to the policy, and the environment's rubric computes the reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from areno.agents.trajectories import AgentItem, AgentTrajectory, AgentTrajectoryTurn, BadTrajectory
from areno.config.agent import VERIFIERS
from areno.data.sources import load_environment
from areno.files.user_code import load_function


def load_agent(file: str, name: str, key: str) -> Callable[..., Any]:
    """Load an agent function. `verifiers` or `verifiers:NAME` as `file` selects an environment of verifiers.

    Errors are about the setting `key`.
    """
    spec = f"{file}:{name}" if f"{file}:" == VERIFIERS else file
    if spec.startswith(VERIFIERS):
        return environment_agent(load_environment(spec, key))
    return load_function(file, name, key)


def environment_agent(environment: Any) -> Callable[[Any, Any], Any]:
    """Return an agent function `run_agent(ctx, batch)` that runs a verifiers environment for each item."""

    async def run_agent(ctx: Any, batch: Any) -> list[AgentTrajectory]:
        from openai import AsyncOpenAI

        found = []
        url = ctx.get_base_url()
        # timeout=None: the server limits the time of each request.
        async with AsyncOpenAI(base_url=url, api_key=ctx.api_key, max_retries=0, timeout=None) as client:
            for item in batch.iter_samples():
                state = await environment.rollout(_rollout_input(environment, item), client, "policy", {})
                found.append(await _trajectory_of_state(environment, item, state))
        return found

    return run_agent


def _rollout_input(environment: Any, item: AgentItem) -> dict[str, Any]:
    """Return prompt, answer, info, task and example_id, with defaults for fields that the item's row lacks.

    A prompt that is text becomes a user message after the environment's system prompt and examples.
    """
    row = item.record
    prompt = row.get("prompt") if item.messages is None else item.messages
    if not isinstance(prompt, list):
        system = [{"role": "system", "content": environment.system_prompt}] if environment.system_prompt else []
        prompt = [*system, *(environment.few_shot or []), {"role": "user", "content": item.prompt}]
    found = {"prompt": prompt, "answer": row.get("answer", row.get("solutions")) or "", "info": row.get("info") or {}}
    return found | {
        "task": row.get("task") or environment.env_id,
        "example_id": row.get("example_id", item.prompt_index),
    }


async def _trajectory_of_state(environment: Any, item: AgentItem, state: Mapping[str, Any]) -> AgentTrajectory:
    """Convert the final state of a rollout to a trajectory, with the reward that the environment's rubric computes.

    If an exception ended the rollout early, it is raised here. Raises BadTrajectory if the rollout has no turns, if the
    rubric has no reward function, or if a reward function compares several samples.
    """
    error = state["error"]
    if error is not None:
        raise error.__cause__ or error
    if not state["trajectory"]:
        raise BadTrajectory("the environment ended before its first request to the policy")
    try:
        await environment.rubric.score_rollout(state)
    except AssertionError as error:
        text = (
            "its rubric has no reward function, or one that compares samples of a group; each is scored by itself here"
        )
        raise BadTrajectory(text) from error
    tools = state["oai_tools"] or None
    turns = [AgentTrajectoryTurn(item, step["prompt"], step["response"], tools) for step in state["trajectory"]]
    parts = {name: float(value) for name, value in state["metrics"].items() if math.isfinite(value)}
    return AgentTrajectory(turns, reward=state["reward"], parts=parts)

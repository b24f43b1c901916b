"""Environments of the verifiers package, which have their own loop, rows and rubric."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from areno.environments.package import TRAIN, EnvironmentPackage, RunAgent
from areno.errors import ArenoError, DataError
from areno.files.user_code import describe_error


class Verifiers(EnvironmentPackage):
    """`verifiers:NAME`, an installed environment."""

    scheme = extra = distribution = "verifiers"
    versions = ">=0.1.10,<0.2"
    has_agent = True

    def rows(self, split: str, options: Mapping[str, Any]) -> Sequence[Any]:
        """Return the training rows of the environment for "train", else its evaluation rows."""
        self.check_options(options, ())
        environment = self._environment
        try:
            found = environment.get_dataset() if split == TRAIN else environment.get_eval_dataset()
        except ArenoError:
            raise
        except Exception as error:
            raise self.problem("has rows that cannot be read: {}", describe_error(error)) from error
        shared = {"tools": environment.oai_tools} if environment.oai_tools else {}
        return [{"solutions": row.get("answer"), **shared, **row} for row in found]

    def agent(self) -> RunAgent:
        """Return an agent that runs the environment, and scores the sample by its rubric."""
        environment = self._environment

        async def run_agent(ctx: Any, batch: Any) -> dict[str, float]:
            from openai import AsyncOpenAI

            [item] = batch
            # timeout=None: the server limits the time of each request.
            async with AsyncOpenAI(
                base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0, timeout=None
            ) as client:
                state = await environment.rollout(_rollout_input(environment, item), client, "policy", {})
            return await _reward_of_state(environment, state)

        return run_agent

    @cached_property
    def _environment(self) -> Any:
        self.check_installed()
        import verifiers

        # Loading an environment replaces the handlers of these signals, so they are restored.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            environment: Any = verifiers.load_environment(self.name)
        except (Exception, SystemExit) as error:  # the package of the environment may raise any error
            cause = error.__cause__ or error
            raise self.problem("does not load: {}; its package has to be installed", describe_error(cause)) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if environment.message_type != "chat":
            raise self.problem("uses text completions; only environments with chat messages can be trained on")
        return environment


def _rollout_input(environment: Any, item: Any) -> dict[str, Any]:
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


async def _reward_of_state(environment: Any, state: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward that the rubric computes for the final state of a rollout, with its metrics.

    If an exception ended the rollout early, it is raised here.
    """
    error = state["error"]
    if error is not None:
        raise error.__cause__ or error
    try:
        await environment.rubric.score_rollout(state)
    except AssertionError as error:
        text = "the rubric has no reward function, or one that compares samples of a group; each is scored by itself"
        raise DataError(text) from error
    parts = {name: float(value) for name, value in state["metrics"].items() if math.isfinite(value)}
    return {**parts, "reward": state["reward"]}

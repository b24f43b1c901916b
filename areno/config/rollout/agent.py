"""Settings of agents. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areno.config.schema.fields import Section, build_check, setting
from areno.config.schema.values import show
from areno.errors import Problem

VERIFIERS = "verifiers:"
"""What stands before the name of an environment of the verifiers package."""


@dataclass(kw_only=True)
class AgentConfig(Section):
    """An agent that samples by itself: it asks the policy through an OpenAI-compatible endpoint."""

    fn: str | None = setting(
        None,
        help="Agent, as file.py[:function] (default: run_agent). It is called with (ctx, batch) and returns "
        "trajectories. verifiers:NAME is an installed environment of the verifiers package; it brings its data and its "
        "reward. null: each sample is a single completion",
        flag="--agent-fn",
    )
    timeout_s: float = setting(
        300.0,
        help="Time limit for the agent of one sample, and for each of its requests, in seconds",
        gt=0,
        le=86400,
        flag="--agent-timeout-s",
    )
    workers: int = setting(2, help="Number of processes that run agents. Each runs many at once", gt=0, le=512)
    train_tool_results: bool = setting(False, help="Also train the tokens of tool results", flag="--train-tool-results")

    @property
    def is_environment(self) -> bool:
        """Whether it is an environment of the verifiers package."""
        return self.fn is not None and self.fn.startswith(VERIFIERS)

    @build_check
    def settings_of_no_agent(self) -> Iterator[Problem]:
        for name in ("timeout_s", "workers", "train_tool_results"):
            if self.fn is None and not self.is_default(name):
                yield Problem(name, f"is {show(vars(self)[name])}, but fn is null, so there is no agent; leave it out")

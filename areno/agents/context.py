"""What an agent is told of its session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AgentContext:
    """The `ctx` of an agent in a process of its own. timeout_s: of the agent, and of each of its requests."""

    base_url: str
    api_key: str
    session: str
    timeout_s: float

    def get_base_url(self) -> str:
        """Where the policy is served, as OpenAI clients want it."""
        return self.base_url

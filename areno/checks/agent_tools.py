"""Checks of the tools of agents: a scripted model calls each tool once in an episode, and the results are read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areno.agents.inline import InlineAgents
from areno.agents.pool import AgentPool
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentContext, AgentItem
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.inputs.scripted_endpoint import ScriptedEndpoint, has_free_text
from areno.checks.inputs.subject import Subject
from areno.config.agent import COMMAND, ONLINE
from areno.config.policy_experiments import PolicyExperimentConfig

_EPISODES = 3
_SECONDS = 30.0
_SHOWN = 3
# An error of the program, which no argument explains. Text may be unknown to a tool, so that it answers with an error.
_KINDS = ("Type", "Attribute", "UnboundLocal", "NotImplemented", "Import", "ModuleNotFound", "Name")
_BUGS = {f"{kind}Error" for kind in _KINDS}
_FAILED = {"error", "exception", "failed", "failure", "traceback"}  # as the first word of a result


def agent_tools(subject: Subject) -> Iterator[Finding]:
    """Let agents work with a scripted model, which calls each tool with arguments that are made from its schema."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or config.agent.fn in (None, COMMAND, ONLINE):
        return
    if config.agent.whole_batch:
        return  # requests of all samples have one key
    if subject.options.offline:
        raise NotChecked("--offline: an agent may ask a server")
    subject.doing = "agents whose model is scripted to call their tools"
    with ScriptedEndpoint() as server:
        _run(subject, config, server)
        tools, results = server.tools, server.results
    if not tools:
        return
    wrong, n_called = list[Finding](), 0
    for name, tool in tools.items():
        given = [text.strip() for text in results.get(name, ())]
        if given:
            n_called += 1
            wrong += _fault(name, tool, given)
    if wrong:
        yield from wrong
    elif n_called:
        yield green("agent-tools", f"a call of each of {n_called} tools has a result: {', '.join(list(tools)[:8])}")
    else:
        text = "agents send no message with the role tool after a call: they end with it, or fail"
        yield not_checked("agent-tools", text)


def _fault(name: str, tool: Mapping[str, Any], given: Sequence[str]) -> Iterator[Finding]:
    what, details = f"each call of `{name}`", [*dict.fromkeys(given)][:_SHOWN]
    if not any(given):
        yield red("agent-tools", f"{what} returned nothing")
    elif all(map(_is_bug, given)) or (all(map(_is_error, given)) and not has_free_text(tool)):
        yield red("agent-tools", f"{what} returned {_short(given[0])}", details)
    elif all(map(_is_error, given)):
        text = f"{what} returned {_short(given[0])}; its arguments here are made from its schema, so this may be right"
        yield not_checked("agent-tools", text, details)


def _is_bug(result: str) -> bool:
    return not _BUGS.isdisjoint(_words(result))


def _is_error(result: str) -> bool:
    words = _words(result)
    return any(word.endswith(("Error", "Exception")) for word in words) or [*words, ""][0].lower() in _FAILED


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else " " for char in text).split()


def _run(subject: Subject, config: PolicyExperimentConfig, server: ScriptedEndpoint) -> None:
    """Run a few episodes against the endpoint. Their outcomes do not count: no response has the tokens of a model."""
    dataset = subject.training_rows[0]
    rows = [row.item for row in subject.sample_of(dataset, _EPISODES) if row.item is not None][:_EPISODES]
    items = [
        AgentItem(row.prompt, row.record, row.tokens, number, 0, row.messages, row.source)
        for number, row in enumerate(rows)
    ]
    names = {item.key: f"scripted-{item.prompt_index}" for item in items}
    agents = {
        name: replace(config.agent_of(name), timeout_s=min(_SECONDS, config.agent_of(name).timeout_s))
        for name in ("", *(config.train_dataset.sources or {}))
    }
    ended = set[int]()
    ends = time.monotonic() + _SECONDS

    def context(of_call: Sequence[AgentItem]) -> AgentContext:
        key = names[of_call[0].key]
        return AgentContext(server.url, key, "scripted", _SECONDS, None, names, server.url)

    def done(index: int, outcome: AgentOutcome) -> None:
        ended.add(index)

    with InlineAgents(agents) if config.agent.mode == "inline" else AgentPool(agents, 1) as runner:
        runner.wait_ready()
        runner.submit(items, context, done)
        runner.run_until(lambda: len(ended) == len(items) or time.monotonic() > ends, lambda: None)
        runner.restart_busy_workers()


def _short(text: str) -> str:
    line = " ".join((text.strip().splitlines()[-1] if "Traceback" in text else text).split())
    return f"`{line if len(line) <= 120 else f'{line[:117]}...'}`"

"""Checks of the tools of agents: a scripted model calls each tool once in an episode, and the results are read."""

from __future__ import annotations

import ast
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.agents.inline import InlineAgents
from areno.agents.pool import AgentPool
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentContext, AgentItem
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red, shortened
from areno.checks.inputs.scripted_endpoint import Result, ScriptedEndpoint, has_free_text
from areno.checks.inputs.subject import Subject
from areno.config.agent import COMMAND, ONLINE, AgentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.files.paths import existing_path

_EPISODES = 3
_SECONDS = 30.0
_SHOWN = 3
# An error of the program, which no argument explains. Text may be unknown to a tool, so that it answers with an error.
_KINDS = ("Type", "Attribute", "UnboundLocal", "NotImplemented", "Import", "ModuleNotFound", "Name")
_BUGS = {f"{kind}Error" for kind in _KINDS}
_FAILED = {"error", "exception", "failed", "failure", "traceback"}  # as the first word of a result
_NOTHING = {"", "None", "null", "undefined"}
_ROUND = {50, 64, 80, 100, 120, 128, 150, 200, 250, 256, 300, 400, 500, 512}  # and multiples of 500 and 512
_ENDS = tuple(".!?:;)]}\"'`>")


def agent_tools(subject: Subject) -> Iterator[Finding]:
    """Let agents work with a scripted model, which calls each tool with arguments that are made from its schema."""
    config = subject.config
    if not isinstance(config, PolicyExperimentConfig) or config.agent.fn in (None, ONLINE):
        return
    if config.agent.train_tool_results:
        text = "agent.train_tool_results=true trains what tools return as if the model had written it: its rewards"
        yield red("agent-tools", f"{text} push the probabilities of texts that it never samples. Leave it out")
    if config.agent.whole_batch:
        return  # requests of all samples have one key
    if subject.options.offline:
        raise NotChecked("--offline: an agent may ask a server")
    subject.doing = "agents whose model is scripted to call their tools"
    with ScriptedEndpoint() as server:
        _run(subject, config, server)
    if not server.tools or server.n_forbidden >= server.n_with_tools:
        yield from _unused_tools(subject, config, server)
        return
    wrong = [fault for name, given in server.results.items() for fault in _faults(name, server.tools[name], given)]
    if wrong:
        yield from wrong
    elif server.results:
        n, names = len(server.results), ", ".join(list(server.results)[:8])
        yield green("agent-tools", f"a call of each of {n} tools has a result: {names}")
    else:
        text = "agents send no request after a call of a tool: they end with it, or fail"
        yield not_checked("agent-tools", text)


def _unused_tools(subject: Subject, config: PolicyExperimentConfig, server: ScriptedEndpoint) -> Iterator[Finding]:
    """Look for tools that the user has defined, and that no request lets the model call."""
    if not server.texts:
        return
    if server.tools:
        names = ", ".join(f"`{name}`" for name in server.tools)
        yield red("agent-tools", f"requests of the agent have the tools {names}, but tool_choice none: none is called")
        return
    defined = {name: f"the file {path.name}" for path in _python_files(config.agent) for name in _tool_names(path)}
    for dataset in subject.training_rows:
        for row in subject.sample_of(dataset, _EPISODES):
            tools = row.row.get("tools") if isinstance(row.row, Mapping) else None
            functions = [each.get("function") or each for each in tools or () if isinstance(each, Mapping)]
            defined |= {str(each["name"]): f"the rows of {dataset.key}" for each in functions if each.get("name")}
    said = "\n".join(server.texts)
    lost = {name: where for name, where in defined.items() if name not in said}  # else the prompt describes them
    if lost:
        names = ", ".join(f"`{name}`" for name in lost)
        text = f"{next(iter(lost.values()))} has tools ({names}), but none of the agent's requests: the model cannot"
        yield red("agent-tools", f"{text} call them")


def _python_files(agent: AgentConfig) -> list[Path]:
    words = shlex.split(agent.command or "") if agent.fn == COMMAND else [str(agent.fn).partition(":")[0]]
    paths = [existing_path(word) for word in words if word.endswith(".py")]
    return [path for path in paths if path is not None and path.is_file()]


def _tool_names(path: Path) -> list[str]:
    """Return the names of the tool definitions in a Python file: dictionaries with a name and a schema."""
    found = list[str]()
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                given = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
                name = given.get("name")
                if isinstance(name, ast.Constant) and ("parameters" in given or "input_schema" in given):
                    found.append(str(name.value))
    return found


def _faults(name: str, tool: Mapping[str, Any], results: Sequence[Result]) -> Iterator[Finding]:
    what, given = f"each call of `{name}`", [result.text.strip() for result in results]
    details, roles = [*dict.fromkeys(given)][:_SHOWN], {result.role for result in results}
    if roles == {""}:
        text = f"after {what}, the next request has nothing for it: the result of the tool never reaches the model"
        yield red("agent-tools", text)
    elif roles == {"assistant"}:
        text = f"the result of {what} is sent as a message of the assistant: the model believes that it has said it"
        yield red("agent-tools", text, details)
    elif not any(given):
        yield red("agent-tools", f"{what} returned nothing")
    elif set(given) <= _NOTHING:
        yield not_checked("agent-tools", f"{what} returned `{given[0]}`: is it meant to return nothing?")
    elif all(map(_is_bug, given)) or (all(map(_is_error, given)) and not has_free_text(tool)):
        yield red("agent-tools", f"{what} returned {_short(given[0])}", details)
    elif all(map(_is_error, given)):
        text = f"{what} returned {_short(given[0])}; its arguments here are made from its schema, so this may be right"
        yield not_checked("agent-tools", text, details)
    elif _are_cut(given):
        text = f"the result of {what} ends within a text, as if it were cut: ...`{given[0][-40:]}`"
        yield red("agent-tools", f"{text} ({len(given[0])} characters)", details)


def _are_cut(results: Sequence[str]) -> bool:
    """Whether all results are JSON without its end, or have one round number of characters and no end of a sentence."""
    if all(_opens_json(result) and not result.endswith(("}", "]")) for result in results):
        return True
    n = len(results[0])
    is_round = n in _ROUND or (n > max(_ROUND) and (n % 500 == 0 or n % 512 == 0))
    several = len(set(results)) > 1  # one text may have this length by chance
    return is_round and several and all(len(result) == n and not result.endswith(_ENDS) for result in results)


def _opens_json(result: str) -> bool:
    return result.startswith(("{", "[")) and result[1:].lstrip().startswith(('"', "'", "{", "["))


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
        socket = server.open_socket(key) if config.agent.fn == COMMAND and config.agent.box else None
        return AgentContext(server.url, key, "scripted", _SECONDS, socket, names, server.url)

    def done(index: int, outcome: AgentOutcome) -> None:
        ended.add(index)

    with InlineAgents(agents) if config.agent.mode == "inline" else AgentPool(agents, 1) as runner:
        runner.wait_ready()
        runner.submit(items, context, done)
        runner.run_until(lambda: len(ended) == len(items) or time.monotonic() > ends, lambda: None)
        runner.restart_busy_workers()


def _short(text: str) -> str:
    line = " ".join((text.strip().splitlines()[-1] if "Traceback" in text else text).split())
    return f"`{shortened(line, 120)}`"

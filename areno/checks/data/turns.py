"""Checks of the turns of conversations: who speaks after whom, and what the assistant cannot have said."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, not_checked, quoted, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import answers_of, rendered, squeezed, text_of, tool_names
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.dataset_formats import similar_columns

_MOST = 0.05  # of the conversations
_LEAST = 3
_EXAMPLES = 3
_SHOWN = 70  # characters
_short = functools.partial(quoted, most=_SHOWN)
_RESULTS = ("<tool_response>", "[TOOL_RESULTS]", "<function_results>", "<|observation|>", "FUNCTION RESPONSE:")
_RESULTS += ("<tool_result>", "<function_response>", "\nObservation:", "<|start_header_id|>ipython", "[/TOOL_RESULTS]")
_CALL_KEYS = ({"name", "arguments"}, {"name", "parameters"}, {"function"}, {"tool_calls"}, {"action", "action_input"})
_CALL_TEXTS = ("<tool_call>", "[TOOL_CALLS]", "<functioncall>", "<function=", "\nAction:", "<|python_tag|>")
_DESCRIBED = '"arguments"'
_WRONG = {
    "tool": "a result of a tool is trained as the assistant's own words, so that the model learns to make it up",
    "again": "a message of the assistant follows directly on a message of the assistant",
    "swapped": "the assistant begins the conversation and the user ends it: the roles seem to be swapped",
    "asked": "no message of a user is before the first answer",
    "system": "a system message is after the messages of users or the assistant, and not at the beginning",
    "doubled": "a message of a user is there twice",
    "twice": "two messages of a user follow each other, which the chat template joins",
    "missing": "the system message is missing that all others begin with",
}
_COMMON = 0.75  # of the conversations begin with one system message
_ALL = 0.95
_FEW_CALLS = 0.01  # of the conversations with calls: models invent a tool now and then


def turn_order(subject: Subject) -> Iterator[Finding]:
    """Look for conversations in which the assistant speaks for a tool or a user, or twice in a row."""
    for dataset in subject.datasets:
        faults: dict[str, dict[int, str]] = {}
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        talks = [(row.index, *talk) for row in rows for talk in _talks(subject.kind, row.row)]
        for index, talk, trained in talks:
            for name, message in _faults(talk, trained):
                faults.setdefault(name, {}).setdefault(index, f"row {index}: {_short(message)}")
        least = max(_LEAST, _MOST * len(rows))
        if (missing := _without_system([(index, talk) for index, talk, _ in talks])) is not None:
            faults["missing"] = missing
        if len(faults.get("twice", ())) > _ALL * len(rows) or _keeps_users_apart(subject.tokenizer):
            faults.pop("twice", None)  # it is meant, or as people write in a chat
        wrong = [name for name in _WRONG if len(faults.get(name, ())) > (_LEAST if name == "missing" else least)]
        for name in wrong:
            text = f"{dataset.key}: in {len(faults[name])} of {len(rows)} rows, {_WRONG[name]}"
            if name == "missing" and _are_of_one_source(rows, faults[name]):
                why = "they lie together, or a column marks them: right for a source without one"
                yield not_checked("turn-order", f"{text}; {why}", list(faults[name].values())[:_EXAMPLES])
                continue
            yield red("turn-order", text, list(faults[name].values())[:_EXAMPLES])
        if not wrong and talks:
            forms = Counter(" ".join(str(message.get("role")) for message in talk)[:_SHOWN] for _, talk, _ in talks)
            shown = [f"{count}: {roles}" for roles, count in forms.most_common(2 * _EXAMPLES)]
            yield green("turn-order", f"{dataset.key}: users, tools and the assistant speak in turn", shown)


def written_calls(subject: Subject) -> Iterator[Finding]:
    """Look for calls of tools that stand as JSON in answers, where the template writes calls otherwise."""
    for dataset in subject.datasets:
        faults, n_calls, asked = dict[int, str](), 0, 0
        for row in subject.sample_of(dataset):
            for talk, _ in _talks(subject.kind, row.row) if row.item is not None else ():
                names, has_results = tool_names(row.row.get("tools")), any(each.get("role") == "tool" for each in talk)
                asked += bool(names) or has_results
                if any(message.get("tool_calls") for message in talk) or not (names or has_results):
                    continue
                if not names and any(_DESCRIBED in text_of(each) for each in talk if each.get("role") != "assistant"):
                    continue  # the prompt asks for this form
                found = [call for each in talk if each.get("role") == "assistant" for call in _calls_in(text_of(each))]
                found = [call for call in found if not names or call["name"] in names]
                if found and not _is_own_form(subject, row.row, found[0]):
                    n_calls += len(found)
                    faults.setdefault(row.index, f"row {row.index}: {_short(json.dumps(found[0], ensure_ascii=False))}")
        if len(faults) >= _LEAST:
            text = f"{dataset.key}: {n_calls} calls of tools in {len(faults)} rows stand as JSON in the text of the"
            text += " assistant, not in tool_calls: the model learns a form that no parser of calls reads"
            yield red("written-calls", text, list(faults.values())[:_EXAMPLES])
        elif asked:
            text = f"{dataset.key}: of {asked} conversations with tools, {len(faults)} have calls as JSON in a text"
            yield green("written-calls", text, list(faults.values()))


def undeclared_calls(subject: Subject) -> Iterator[Finding]:
    """Look for calls of tools that the prompt of their row does not declare."""
    if isinstance(subject.config, PolicyExperimentConfig) and subject.config.agent.fn:
        return  # the agent sends the tools
    for dataset in subject.datasets:
        faults, n_calling, n_declared = dict[int, str](), 0, 0
        for row in subject.sample_of(dataset):
            if row.item is None:
                continue
            names, column = tool_names(row.row.get("tools")), ""
            if isinstance(row.given, Mapping):
                column = similar_columns(subject.kind, row.given).get("tools", "")
            for talk, _ in _talks(subject.kind, row.row):
                called = {name: None for each in talk for name in _called(each)}
                told = "\n".join(text_of(each) for each in talk if each.get("role") not in ("assistant", "tool"))
                n_calling += bool(called)
                n_declared += bool(called and names)
                lost = [name for name in called if name not in names and name not in told]
                if lost:
                    has = f"declared are {', '.join(sorted(names))}" if names else "none is declared"
                    has += f", and the column {column!r} is not read" * bool(column)
                    faults.setdefault(row.index, f"row {row.index}: calls {', '.join(lost)}; {has}")
        text = f"{dataset.key}: in {len(faults)} of {n_calling} conversations with calls, a tool is called that their"
        text += " prompt does not declare"
        if not n_declared and len(faults) >= _LEAST:
            why = "no prompt declares one. This is right if the model is to know its tools without being told"
            yield not_checked("undeclared-calls", f"{text}, and {why}", list(faults.values())[:_EXAMPLES])
        elif len(faults) >= max(_LEAST, _FEW_CALLS * n_calling):
            yield red("undeclared-calls", f"{text}: the model learns to make it up", list(faults.values())[:_EXAMPLES])
        elif n_calling:
            yield green("undeclared-calls", text, list(faults.values())[:_EXAMPLES])


def _called(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the tools that a message calls."""
    for call in message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else ()):
        function = call.get("function") or call
        if isinstance(function, Mapping) and function.get("name"):
            yield str(function["name"])


def _calls_in(text: str) -> Iterator[dict[str, Any]]:
    """Yield the calls that stand in a text as plain JSON, not in marks of calls."""
    if any(mark in text for mark in _CALL_TEXTS):
        return
    at = text.find("{")
    while at >= 0:
        end = at + 1
        with suppress(ValueError, RecursionError):
            found, end = json.JSONDecoder().raw_decode(text, at)
            for keys in _CALL_KEYS[:2]:
                if keys <= found.keys() and isinstance(found["name"], str):
                    arguments = found[(keys - {"name"}).pop()]
                    if isinstance(arguments if isinstance(arguments, dict) else _json(str(arguments)), dict):
                        yield found
                        break
        at = text.find("{", end)


def _is_own_form(subject: Subject, row: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether the chat template itself writes a call as such a text."""
    arguments = call.get("arguments", call.get("parameters"))
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    function = {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
    asked = {"role": "user", "content": "?"}
    texts = [
        rendered(subject.tokenizer, [asked, {"role": "assistant", **said}], None, False)
        for said in ({"content": "", "tool_calls": [function]}, {"content": json.dumps(call, ensure_ascii=False)})
    ]
    return texts[0] is not None and squeezed(texts[0]) == squeezed(texts[1] or "")


def _talks(kind: str, row: Mapping[str, Any]) -> Iterator[tuple[Sequence[Any], list[Any]]]:
    """Yield (messages, those that are trained) of each conversation of a row."""
    if kind in ("prompt", "prm"):
        prompt = row.get("prompt")
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            yield list(prompt), []
        return
    for turns in answers_of(kind, row):
        if turns:
            yield turns[0].talk, [turn.message for turn in turns]


def _faults(talk: Sequence[Mapping[str, Any]], trained: Sequence[Any]) -> Iterator[tuple[str, str]]:
    roles = [message.get("role") for message in talk if message.get("role") not in ("system", "developer")]
    if trained and "user" in roles and roles[0] == "assistant" and roles[-1] == "user":
        yield "swapped", text_of(next(message for message in talk if message.get("role") == "assistant"))
    before: Mapping[str, Any] = {}
    for message in talk:
        if message.get("role") == "system" and before.get("role") in ("user", "assistant"):
            yield "system", text_of(message)
        if message.get("role") == "user" and before.get("role") == "user":
            name = "doubled" if text_of(before) == text_of(message) else "twice"
            yield name, f"{text_of(before)[: _SHOWN // 2]} | {text_of(message)}"
        if message.get("role") == "assistant":
            said = text_of(message)
            if message in trained and (any(mark in said for mark in _RESULTS) or _is_result(before, said)):
                yield "tool", said
            if before.get("role") == "assistant" and not (before.get("tool_calls") and message.get("tool_calls")):
                yield "again", f"{text_of(before)[: _SHOWN // 2]} | {said}"
        before = message
    if trained and "user" not in roles and len(roles) > 1:
        yield "asked", text_of(talk[0])


def _keeps_users_apart(tokenizer: Any) -> bool:
    """Whether the chat template writes marks between two messages of a user."""
    words = ("first areno question", "second areno question")
    text = rendered(tokenizer, [{"role": "user", "content": word} for word in words], None, True) or ""
    between = text.partition(words[0])[2].partition(words[1])
    return bool(between[1] and between[0].strip())


def _without_system(talks: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]) -> dict[int, str] | None:
    """Return row -> its first message, of those without the system message that most others begin with."""
    firsts = [(index, talk[0]) for index, talk in talks if talk]
    texts = Counter(text_of(message) for _, message in firsts if message.get("role") == "system")
    if not texts or texts.most_common(1)[0][1] < _COMMON * len(firsts):
        return None
    return {
        index: f"row {index}: {_short(text_of(message))}" for index, message in firsts if message["role"] != "system"
    }


def _are_of_one_source(rows: Sequence[EncodedRow], indices: Collection[int]) -> bool:
    """Whether these rows lie beside each other in the file, or a column has values of its own for them."""
    is_own = [row.index in indices for row in rows]
    if sum(one != other for one, other in itertools.pairwise(is_own)) <= 2:
        return True
    names = {name for row in rows if isinstance(row.given, Mapping) for name in row.given}
    for name in names:
        values = [row.given.get(name) for row in rows]
        sides = [{str(each) for each, own in zip(values, is_own, strict=True) if own == side} for side in (True, False)]
        if not sides[0] & sides[1] and len(sides[0]) <= len(indices) / 3:
            return True
    return False


def _is_result(before: Mapping[str, Any], said: str) -> bool:
    """Whether the assistant answers its own call of a tool with bare JSON."""
    if before.get("role") != "assistant" or not (before.get("tool_calls") or _is_call(text_of(before))):
        return False
    return isinstance(_json(said), dict | list) and not _is_call(said)


def _is_call(text: str) -> bool:
    found = _json(text)
    first = found[0] if isinstance(found, list) and found else found
    is_json = isinstance(first, dict) and any(keys <= first.keys() for keys in _CALL_KEYS)
    return is_json or any(mark in text for mark in _CALL_TEXTS)


def _json(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None

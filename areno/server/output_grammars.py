"""Grammars that constrain a completion to a JSON schema (`response_format`) or to tool calls (`tool_choice`)."""

from __future__ import annotations

import json
import logging
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from areno.engine.decoder.grammar import MAX_GRAMMARS, Grammar, GrammarCompiler, GrammarState
from areno.errors import GrammarError
from areno.server.parsers.json_rules import JsonRules, Style
from areno.server.parsers.lark import Lark
from areno.server.parsers.message import END_THINK, THINK, ToolCallParser
from areno.server.parsers.schemas import Document, arguments_of

__all__ = ["Constraint", "Grammar", "GrammarState", "Reasoning", "compile_grammar", "reasoning_after"]

logger = logging.getLogger(__name__)

Reasoning = Literal["none", "open", "optional"]

_known: weakref.WeakKeyDictionary[GrammarCompiler, OrderedDict[str, str]] = weakref.WeakKeyDictionary()
_compilers: weakref.WeakKeyDictionary[Any, dict[Any, GrammarCompiler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The required form of a completion. The fields have the values of OpenAI's API.

    Properties that a schema does not list are forbidden unless it sets `additionalProperties`. A keyword that
    cannot be enforced is an error if the schema is strict. Otherwise it is left out, with a warning.
    """

    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True  # a named function is called only once
    parser: ToolCallParser | None = None  # None: the family is unknown
    reasoning: Reasoning = "none"  # before the answer: none, the rest of what the prompt opened, or optional

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """Return the text of the grammar, None if nothing is constrained. Raises GrammarError naming a wrong field."""
        lark = Lark(special_tokens)
        return None if (answer := self.rules(lark)) is None else lark.text(answer)

    def key(self) -> str:
        parser = None if self.parser is None else self.parser.name
        how = [self.tool_choice, self.parallel_tool_calls, parser, self.reasoning]
        return json.dumps([self.response_format, self.tools, how], default=repr)

    def rules(self, lark: Lark) -> str | None:
        """Add the rules of the answer to a grammar and return its expression, None for any text."""
        try:
            return self._rules(lark)
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply for a grammar") from error

    def _rules(self, lark: Lark) -> str | None:
        document, functions = self._schema(), dict[str, Document]()
        wants_call = not isinstance(self.tool_choice, str) or self.tool_choice not in ("auto", "none")
        if document is None and not wants_call:
            return None
        has_calls = bool(self.tools) and self.tool_choice == "auto" and self.parser is not None and self.parser.tags
        if wants_call or has_calls:
            functions = self._functions()
        if wants_call or document is None:
            answer = self._calls(lark, functions)
        else:
            answer = JsonRules(lark, document, Style(is_free=True)).root()
            answer = f"({answer} | {self._calls(lark, functions)})" if has_calls else answer
        for where, each in (("response_format", document), *functions.items()):
            if each is not None and each.relaxed:
                _warn(where, tuple(each.relaxed), json.dumps(each.root[0], sort_keys=True, default=str))
        if self.reasoning != "none":
            thought = f"{lark.until(END_THINK)} /\\n{{0,2}}/"
            answer = (
                f"{thought} {answer}" if self.reasoning == "open" else f"({lark.literal(THINK)} {thought})? {answer}"
            )
        return answer

    def _schema(self) -> Document | None:
        form = self.response_format
        kind = "text" if form is None else form.get("type") if isinstance(form, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return Document({"type": "object"})
        if kind != "json_schema" or form is None:
            raise GrammarError("response_format has type {!r}; expected text, json_object or json_schema", kind)
        described = form.get("json_schema")
        schema = described.get("schema", {}) if isinstance(described, Mapping) else None
        if not isinstance(described, Mapping) or not isinstance(schema, dict | bool):
            raise GrammarError("response_format.json_schema must be an object with a schema, which is an object itself")
        return Document(schema, bool(described.get("strict")))

    def _calls(self, lark: Lark, functions: dict[str, Document]) -> str:
        if self.parser is None:
            raise GrammarError("tool_choice asks for a call, but the format of this model's calls is not known")
        named = not isinstance(self.tool_choice, str)
        return self.parser.call_grammar(lark, functions, many=self.parallel_tool_calls and not named)

    def _functions(self) -> dict[str, Document]:
        functions: dict[str, Document] = {}
        for number, tool in enumerate(self.tools or ()):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            schema = (function.get("parameters") or {}) if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name or not isinstance(schema, dict):
                raise GrammarError("tools[{}] is not a function with a name and an object of parameters", number)
            functions[name] = arguments_of(schema, bool(isinstance(function, Mapping) and function.get("strict")))
        if not functions:
            raise GrammarError("tool_choice asks for a call, but there are no tools")
        if isinstance(self.tool_choice, str):
            if self.tool_choice not in ("required", "auto"):
                raise GrammarError("tool_choice is {!r}; expected none, auto, required or a function", self.tool_choice)
            return functions
        chosen = self.tool_choice.get("function")
        name = chosen.get("name") if isinstance(chosen, Mapping) else None
        if name not in functions:
            raise GrammarError("tool_choice names {!r}; the tools are {}", name, ", ".join(functions))
        return {name: functions[name]}


@lru_cache(4096)
def _warn(where: str, relaxed: tuple[str, ...], schema: str) -> None:
    logger.warning("the schema of %s is enforced without %s, because strict is not set", where, ", ".join(relaxed))


def reasoning_after(prompt: str, chat_template: str | None) -> Reasoning:
    """Return whether reasoning follows a prompt. It is "open" if the prompt ends with `<think>`."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "open"
    return "optional" if THINK in (chat_template or "") and not end.endswith(END_THINK) else "none"


def compiler_for(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()) -> GrammarCompiler:
    of_tokenizer = _compilers.setdefault(tokenizer, {})
    key = (vocab_size, frozenset(eos_token_ids))
    if key not in of_tokenizer:
        of_tokenizer[key] = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return of_tokenizer[key]


def compile_grammar(
    constraint: Constraint | Mapping[str, Any] | str,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
) -> Grammar | None:
    """Compile a constraint, a `response_format` object or the text of a grammar. None if nothing is constrained.

    A server calls this before it submits a request, so that a wrong grammar is an error of the client
    (GrammarError).
    """
    compiler = compiler_for(tokenizer, vocab_size, eos_token_ids)
    if isinstance(constraint, str):
        return compiler.compile(constraint)
    if isinstance(constraint, Mapping):
        constraint = Constraint(response_format=constraint)
    # Agents send the same schemas with every request.
    known, key = _known.setdefault(compiler, OrderedDict()), constraint.key()
    if key in known:
        known.move_to_end(key)
        return compiler.compile(known[key])
    lark = Lark(compiler.special_tokens(tokenizer))
    if (answer := constraint.rules(lark)) is None:
        return None
    if missing := [text for text in lark.literals if not compiler.has_tokens_for(text)]:
        raise GrammarError("the tokenizer cannot write {!r}, which the answer must contain", missing[0])
    known[key] = lark.text(answer)
    if len(known) > MAX_GRAMMARS:
        known.popitem(last=False)
    return compiler.compile(known[key])

"""Grammars that constrain a completion to a JSON schema (`response_format`) or to tool calls (`tool_choice`)."""

from __future__ import annotations

import json
import logging
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from areno.data.chat_template import opens_reasoning
from areno.engine.decoder.grammar import MAX_GRAMMARS, Grammar, GrammarCompiler, GrammarState
from areno.errors import GrammarError
from areno.server.parsers.json_rules import JsonRules, JsonStyle
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import END_THINK, THINK, ToolCallParser
from areno.server.parsers.schemas import SchemaDocument, arguments_schema

__all__ = ["Constraint", "Grammar", "GrammarState", "Reasoning", "compile_grammar", "reasoning_after"]

logger = logging.getLogger(__name__)

Reasoning = Literal["none", "open", "optional"]

_known: weakref.WeakKeyDictionary[GrammarCompiler, OrderedDict[str, str]] = weakref.WeakKeyDictionary()
_compilers: weakref.WeakKeyDictionary[Any, dict[Any, GrammarCompiler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The required form of a completion, from the checked fields of a request.

    Properties that a schema does not list are forbidden unless it sets `additionalProperties`. A keyword that cannot be
    enforced is an error if the schema is strict. Otherwise it is left out, with a warning.
    """

    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    requires_call: bool = False
    parallel_tool_calls: bool = True  # False: at most one call
    parser: ToolCallParser = field(default_factory=ToolCallParser)
    reasoning: Reasoning = "none"  # before the answer: none, the rest of what the prompt opened, or optional

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """Return the text of the grammar, or None if nothing is constrained. Raises GrammarError for a wrong field."""
        lark = LarkBuilder(special_tokens)
        return None if (answer := self.add_rules(lark)) is None else lark.grammar_text(answer)

    def key(self) -> str:
        how = [self.requires_call, self.parallel_tool_calls, self.parser.name, self.reasoning]
        return json.dumps([self.response_format, self.tools, how], default=repr)

    def add_rules(self, lark: LarkBuilder) -> str | None:
        """Add the rules of the answer to a grammar and return their expression, or None if any text is allowed."""
        try:
            return self._add_rules(lark)
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply for a grammar") from error

    def _add_rules(self, lark: LarkBuilder) -> str | None:
        document = self._schema()
        if document is None and not self.requires_call:
            return None
        has_calls = self.requires_call or (self.tools and self.parser.tags)
        functions = self._functions() if has_calls else {}
        content = calls = None
        if document is not None and not self.requires_call:
            content = JsonRules(lark, document, JsonStyle(is_free=True)).root()
        if has_calls:
            calls = self.parser.calls_rule(lark, functions, many=self.parallel_tool_calls)
        for where, each in (("response_format", document), *functions.items()):
            if each is not None and each.relaxed:
                _warn_of_relaxed_schema(
                    where, tuple(each.relaxed), json.dumps(each.root[0], sort_keys=True, default=str)
                )
        return self.parser.answer_rule(lark, content, calls, self.reasoning)

    def _schema(self) -> SchemaDocument | None:
        if self.response_format is None:
            return None
        if self.response_format["type"] == "json_object":
            return SchemaDocument({"type": "object"})
        described = self.response_format["json_schema"]
        return SchemaDocument(described["schema"], bool(described.get("strict")))

    def _functions(self) -> dict[str, SchemaDocument]:
        functions = [tool["function"] for tool in self.tools]
        return {
            function["name"]: arguments_schema(function.get("parameters") or {}, bool(function.get("strict")))
            for function in functions
        }


@lru_cache(4096)
def _warn_of_relaxed_schema(where: str, relaxed: tuple[str, ...], schema: str) -> None:
    logger.warning("the schema of %s is enforced without %s, because strict is not set", where, ", ".join(relaxed))


def reasoning_after(prompt: str, chat_template: str | None) -> Reasoning:
    """Return whether reasoning follows a prompt: "open" if the prompt ends with `<think>`, "optional" or "none"."""
    if opens_reasoning(prompt):
        return "open"
    return "optional" if THINK in (chat_template or "") and not prompt.rstrip().endswith(END_THINK) else "none"


def compiler_for(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()) -> GrammarCompiler:
    of_tokenizer = _compilers.setdefault(tokenizer, {})
    key = (vocab_size, frozenset(eos_token_ids))
    if key not in of_tokenizer:
        of_tokenizer[key] = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return of_tokenizer[key]


def compile_grammar(
    constraint: Constraint, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> Grammar | None:
    """Compile a constraint. Returns None if nothing is constrained.

    A server calls this before it submits a request, so that the client gets the GrammarError for a wrong schema.
    """
    compiler = compiler_for(tokenizer, vocab_size, eos_token_ids)
    # Agents send the same schemas with every request.
    known, key = _known.setdefault(compiler, OrderedDict()), constraint.key()
    if key in known:
        known.move_to_end(key)
        return compiler.compile(known[key])
    lark = LarkBuilder(compiler.special_tokens(tokenizer))
    if (answer := constraint.add_rules(lark)) is None:
        return None
    if missing := [text for text in lark.literals if not compiler.can_encode(text)]:
        raise GrammarError("the tokenizer cannot write {!r}, which the answer must contain", missing[0])
    known[key] = lark.grammar_text(answer)
    if len(known) > MAX_GRAMMARS:
        known.popitem(last=False)
    return compiler.compile(known[key])

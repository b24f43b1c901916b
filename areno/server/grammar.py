"""Grammars of what a request asks for: JSON of a schema, tool calls that must come."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.engine.decoder.grammar import Grammar, GrammarCompiler, GrammarState
from areno.errors import GrammarError
from areno.server.parsers.lark import Lark, closed, parameters_of
from areno.server.parsers.message import END_THINK, THINK, ToolCallParser
from areno.server.parsers.reading import Schema

__all__ = ["Constraint", "Grammar", "GrammarState", "Reasoning", "compile_grammar", "reasoning_after"]

Reasoning = Literal["none", "open", "optional"]
"""Before the answer: no reasoning, the rest of reasoning that the prompt opened, or reasoning if the model wants."""

_compilers: weakref.WeakKeyDictionary[Any, dict[Any, GrammarCompiler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a request says about the form of the answer, in OpenAI's terms.

    response_format: {"type": "text"}, "json_object", or "json_schema" with {"schema": ..., "strict": ...}. With strict,
    a feature of JSON Schema that cannot be enforced is an error; else it is left out.
    tool_choice: "auto" and "none" constrain nothing; "required"; {"type": "function", "function": {"name": ...}}.
    parallel_tool_calls: whether several calls may follow. A named function is called once.
    parser: of the model's family. reasoning: see `reasoning_after`.

    Objects whose schema names properties, and does not say whether others are allowed, get no others.
    """

    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    parser: ToolCallParser | None = None
    reasoning: Reasoning = "none"

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """The text of the grammar, for `GenerationRequest.grammar`; None where nothing is constrained.

        special_tokens: from `GrammarCompiler.special_tokens`. Raises GrammarError that names the field of the request.
        """
        lark = Lark(special_tokens)
        wants_call = not isinstance(self.tool_choice, str) or self.tool_choice not in ("auto", "none")
        if wants_call:
            answer = self._calls(lark)
        else:
            schema, strict = self._schema()
            if schema is None:
                return None
            answer = lark.json(schema, one_line=False, strict=strict)
            if self.tools and self.tool_choice == "auto" and self.parser is not None and self.parser.tags:
                answer = f"({answer} | {self._calls(lark)})"
        if self.reasoning != "none":
            thought = f"{lark.until(END_THINK)} /\\n{{0,2}}/"
            answer = (
                f"{thought} {answer}" if self.reasoning == "open" else f"({lark.literal(THINK)} {thought})? {answer}"
            )
        return lark.text(answer)

    def _schema(self) -> tuple[Schema | None, bool]:
        """The schema of the answer and whether it is strict."""
        form = self.response_format
        kind = "text" if form is None else form.get("type") if isinstance(form, Mapping) else None
        if kind == "text":
            return None, False
        if kind == "json_object":
            return {"type": "object"}, True
        if kind != "json_schema" or form is None:
            raise GrammarError("response_format has type {!r}; expected text, json_object or json_schema", kind)
        described = form.get("json_schema")
        schema = described.get("schema", {}) if isinstance(described, Mapping) else None
        if not isinstance(described, Mapping) or not isinstance(schema, dict):
            raise GrammarError("response_format.json_schema must be an object with a schema, which is an object itself")
        return closed(schema), bool(described.get("strict"))

    def _calls(self, lark: Lark) -> str:
        functions = self._functions()
        if self.parser is None:
            raise GrammarError("tool_choice asks for a call, but it is not known how the model writes calls")
        named = not isinstance(self.tool_choice, str)
        return self.parser.call_grammar(lark, functions, many=self.parallel_tool_calls and not named)

    def _functions(self) -> dict[str, Schema]:
        """Name -> schema of the functions that may be called."""
        functions: dict[str, Schema] = {}
        for number, tool in enumerate(self.tools or ()):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            schema = (function.get("parameters") or {}) if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name or not isinstance(schema, dict):
                raise GrammarError("tools[{}] is no function with a name and parameters that are an object", number)
            functions[name] = parameters_of(schema)
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


def reasoning_after(prompt: str, chat_template: str | None) -> Reasoning:
    """What reasoning may come after a rendered prompt: of a template that knows `<think>` and did not close it."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "open"
    return "optional" if THINK in (chat_template or "") and not end.endswith(END_THINK) else "none"


def compiler_for(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()) -> GrammarCompiler:
    """The compiler of a tokenizer, which is made once. Raises GrammarError without llguidance."""
    of_tokenizer = _compilers.setdefault(tokenizer, {})
    key = (vocab_size, frozenset(eos_token_ids))
    if key not in of_tokenizer:
        of_tokenizer[key] = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return of_tokenizer[key]


def compile_grammar(
    what: Constraint | Mapping[str, Any] | str, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> Grammar | None:
    """The grammar of a constraint, a response_format, or a text; None where nothing is constrained.

    Raises GrammarError where it is none or the library is missing, so a server that compiles a request's grammar before
    it submits the request has told its client. `Grammar.text` is what the request carries.
    """
    compiler = compiler_for(tokenizer, vocab_size, eos_token_ids)
    if isinstance(what, Mapping):
        what = Constraint(response_format=what)
    text = what.grammar(compiler.special_tokens(tokenizer)) if isinstance(what, Constraint) else what
    return None if text is None else compiler.compile(text)

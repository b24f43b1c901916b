"""Grammars that constrain a completion.

A `Constraint` describes the form of the completion that a request asks for: a JSON schema (`response_format`) or a
tool call (`tool_choice`). `compile_grammar` compiles the constraint to a grammar for the tokenizer. The decoder then
samples only tokens that the grammar allows.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.engine.decoder.grammar import Grammar, GrammarCompiler, GrammarState
from areno.errors import GrammarError
from areno.server.parsers.lark import Lark, close_objects, parameters_of
from areno.server.parsers.message import END_THINK, THINK, ToolCallParser
from areno.server.parsers.reading import Schema

__all__ = ["Constraint", "Grammar", "GrammarState", "Reasoning", "compile_grammar", "reasoning_after"]

Reasoning = Literal["none", "open", "optional"]
"""Reasoning before the answer: none, the rest of the reasoning that the prompt has opened, or optional reasoning."""

_compilers: weakref.WeakKeyDictionary[Any, dict[Any, GrammarCompiler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The required form of a completion, in the terms of OpenAI's API.

    If a schema lists the properties of an object but does not set `additionalProperties`, other properties are
    forbidden.

    Attributes:
        response_format: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema":
            ..., "strict": ...}}. If `strict` is true, a feature of JSON Schema that cannot be enforced is an error. If
            `strict` is false or absent, the feature is ignored. None means {"type": "text"}.
        tools: Tools that the model may call, in OpenAI's form.
        tool_choice: "auto" and "none" force no call. "required" forces a call of any tool, and {"type": "function",
            "function": {"name": ...}} forces a call of the named function.
        parallel_tool_calls: Whether the completion may have several calls. A named function is called only once.
        parser: Tool-call parser of the model's family. None if the family is unknown.
        reasoning: Whether the model may ("optional"), must ("open") or cannot ("none") write reasoning before the
            answer, as returned by `reasoning_after`.
    """

    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    parser: ToolCallParser | None = None
    reasoning: Reasoning = "none"

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """Return the text of the grammar, for `GenerationRequest.grammar`.

        Args:
            special_tokens: Special tokens and their ids, from `GrammarCompiler.special_tokens`.

        Returns:
            The grammar, or None if nothing is constrained.

        Raises:
            GrammarError: If a field has a wrong value. The message names the field.
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
        """Return (JSON schema of the answer, strict), according to `response_format`.

        The schema is None if the answer is text. If `strict` is True, a feature of JSON Schema that cannot be
        enforced is an error. Raises GrammarError if `response_format` is wrong.
        """
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
        return close_objects(schema), bool(described.get("strict"))

    def _calls(self, lark: Lark) -> str:
        """Return the grammar expression that matches the tool calls. Its rules are added to `lark`.

        Raises GrammarError if the format of the model's calls is unknown, or if the tools or `tool_choice` are
        wrong.
        """
        functions = self._functions()
        if self.parser is None:
            raise GrammarError("tool_choice asks for a call, but the format of this model's calls is not known")
        named = not isinstance(self.tool_choice, str)
        return self.parser.call_grammar(lark, functions, many=self.parallel_tool_calls and not named)

    def _functions(self) -> dict[str, Schema]:
        """Return the functions that may be called, as name -> JSON schema of the arguments."""
        functions: dict[str, Schema] = {}
        for number, tool in enumerate(self.tools or ()):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            schema = (function.get("parameters") or {}) if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name or not isinstance(schema, dict):
                raise GrammarError("tools[{}] is not a function with a name and an object of parameters", number)
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
    """Determine whether the model writes reasoning after a rendered prompt.

    Args:
        prompt: The rendered prompt.
        chat_template: The chat template. A model whose template does not contain `<think>` does not reason.

    Returns:
        "open" if the prompt ends with `<think>`, so that reasoning must follow. "optional" if the template contains
        `<think>` and the prompt does not end with `</think>`. Otherwise "none".
    """
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "open"
    return "optional" if THINK in (chat_template or "") and not end.endswith(END_THINK) else "none"


def compiler_for(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()) -> GrammarCompiler:
    """Return the grammar compiler for a tokenizer. The compiler is cached after the first call.

    Args:
        tokenizer: Tokenizer of transformers.
        vocab_size: Size of the model's logits.
        eos_token_ids: Ids of the tokens that end a completion.

    Raises:
        GrammarError: If llguidance is not installed, or cannot use the tokenizer.
    """
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
    """Compile a constraint for a tokenizer.

    A server calls this before it submits a request, so that a wrong grammar becomes an error for the client.

    Args:
        constraint: A `Constraint`, a `response_format` object, or the text of a grammar.
        tokenizer: Tokenizer of transformers.
        vocab_size: Size of the model's logits.
        eos_token_ids: Ids of the tokens that end a completion.

    Returns:
        The compiled grammar, whose `text` goes into the request, or None if nothing is constrained.

    Raises:
        GrammarError: If the grammar is invalid or llguidance is not installed.
    """
    compiler = compiler_for(tokenizer, vocab_size, eos_token_ids)
    if isinstance(constraint, Mapping):
        constraint = Constraint(response_format=constraint)
    is_text = isinstance(constraint, str)
    text = constraint if is_text else constraint.grammar(compiler.special_tokens(tokenizer))
    return None if text is None else compiler.compile(text)

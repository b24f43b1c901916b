"""Random JSON schemas, the tokens that a grammar allows, and grammars over bytes."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from areno.engine.decoder.grammar import GrammarState, new_matcher
from areno.server.output_grammars import Constraint
from areno.server.parsers import PARSERS


@functools.cache
def _bytes() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


class ByteGrammar:
    """A grammar whose tokens are bytes. It needs no tokenizer, and every text can be written."""

    def __init__(self, text: str):
        self._matcher = new_matcher(_bytes(), text)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        state, tokens = self._matcher.deep_copy(), _bytes().tokenize_str(text)
        return state.validate_tokens(tokens) == len(tokens) and state.consume_tokens(tokens) and state.is_accepting()

    def drawn(self, rng: random.Random, most: int = 200) -> str | None:
        """A text that the grammar allows, drawn byte by byte. None if it does not end soon."""
        eos = _bytes().eos_token
        state, text = GrammarState(self._matcher.deep_copy(), _bytes().vocab_size, frozenset([eos])), bytearray()
        for _ in range(most):
            tokens = allowed(state.allowed_token_mask())
            assert not state.matcher.is_error(), f"nothing can follow {bytes(text)!r}"
            if eos in tokens and (len(tokens) == 1 or rng.randrange(2)):
                return text.decode()
            tokens = [token for token in tokens if token != eos]
            ends = [token for token in tokens if chr(token) in '"}]'] if rng.randrange(3) == 0 else []
            plain = [token for token in tokens if token < 128] if rng.randrange(5) else []
            text.append(rng.choice(ends or plain or tokens))
            state.accept(text[-1])
            assert not state.error, (bytes(text), state.error)
        return None


def allowed(mask: np.ndarray) -> list[int]:
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


def random_schema(rng: random.Random, size: int) -> dict[str, Any]:
    """A schema of about `size` parts, of whose values models with random weights reach the end."""
    if size <= 1:
        return rng.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"type": "integer", "minimum": -5, "maximum": 300},
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
                {"type": "string", "maxLength": 4},
                {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
                {"type": "string", "format": "date"},
                {"enum": ["red", 7, None, ["x"], "\u00e9\n"]},
                {"const": {"k": [1, 2]}},
            ]
        )
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "array", "items": random_schema(rng, size // 2), "minItems": rng.randrange(2), "maxItems": 2}
    if kind == 1:
        return {
            "type": "array",
            "prefixItems": [random_schema(rng, size // 2) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    if kind == 2:
        return {"anyOf": [random_schema(rng, size // 2), random_schema(rng, size // 2)]}
    parts = min(5, size)
    properties = {f'p{i} \u00e9"': random_schema(rng, size // parts) for i in range(parts)}
    return {
        "type": "object",
        "properties": properties,
        "required": rng.sample(sorted(properties), rng.randrange(parts)),
    }


def schemas() -> Iterator[dict[str, Any]]:
    """50 of growing size."""
    rng = random.Random(5)
    for size in range(1, 51):
        yield random_schema(rng, size)


def response_format(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def answers(schema: Any, strict: bool = True) -> ByteGrammar:
    return ByteGrammar(Constraint(response_format=response_format(schema, strict)).grammar({}) or "")


def calls(family: str, parameters: Any, **function: Any) -> ByteGrammar:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}
    how: Any = {"tools": [tool], "requires_call": True, "parallel_tool_calls": False}
    return ByteGrammar(Constraint(parser=PARSERS[family], **how).grammar({}) or "")


def call(family: str, **arguments: Any) -> str:
    """A call of f as a model of the family writes it."""
    shown = {name: json.dumps(value) for name, value in arguments.items()}
    if family == "hermes":
        return f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"
    if family == "llama3_json":
        return json.dumps({"name": "f", "parameters": arguments})
    if family == "pythonic":
        return f"[f({', '.join(f'{name}={text}' for name, text in shown.items())})]"
    texts = {name: value if isinstance(value, str) else shown[name] for name, value in arguments.items()}
    if family == "glm4_moe":
        pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n" for name, text in texts.items())
        return f"<tool_call>f\n{''.join(pairs)}</tool_call>"
    parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def accepted(grammar: ByteGrammar, texts: list[str]) -> list[str]:
    return [text for text in texts if grammar.accepts(text)]

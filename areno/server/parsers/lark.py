"""Composition of grammars in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from areno.engine.decoder.grammar import has_empty_language
from areno.errors import GrammarError

MAX_CHARACTERS = 2_000_000  # of a grammar; larger ones take many seconds to compile
MAX_SYMBOLS = 65_000  # two for each name, and one for each group and alternative; llguidance has 16 bits
MAX_DEPTH = 800  # rules inside each other; llguidance overflows the stack of the process at about 1,200

_AS_SPACE = str.maketrans("()|?*", "     ")
_HEADER = '%llguidance {"ignore_once": true}'


class LarkBuilder:
    """A grammar under construction, in llguidance's variant of Lark.

    Methods return expressions, which match one after the other when joined by spaces. Only `literal` and `until` can
    match special tokens. `literals` are texts that the tokenizer must be able to write, because an answer may have to
    contain them.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        self.literals: dict[str, None] = {}
        self._rules: dict[str, str] = {}  # name with options -> body
        self._names: dict[tuple[str, str], str] = {}
        self._n_names = self._n_symbols = self._size = 0  # characters of the rules
        self._depths: dict[str, int] = {}

    def reserve_name(self, initial: str = "r") -> str:
        """Return an unused name, which `define` must give a body. A capital `initial` makes it a terminal."""
        self._n_names += 1
        return f"{initial}{self._n_names - 1}"

    def define(self, name: str, body: str) -> None:
        """Define a rule or terminal. Raises GrammarError if the grammar gets too large or too deep."""
        self._size += len(body)
        if self._size > MAX_CHARACTERS:
            raise GrammarError("the grammar has more than {:,} characters; use smaller schemas", MAX_CHARACTERS)
        self._n_symbols += 2 + (body.count("(") + body.count("|") if name[0] == "r" else 0)
        if self._n_symbols > MAX_SYMBOLS:
            raise GrammarError("the grammar has more than {:,} symbols; use smaller schemas", MAX_SYMBOLS)
        self._rules[name] = body
        names = body.translate(_AS_SPACE).split()
        depth = 1 + max((self._depths.get(each, 0) for each in names), default=0)  # 0: a rule around this one
        if depth > MAX_DEPTH:
            raise GrammarError("the schema is nested too deeply, or has too long a list of items, for a grammar")
        self._depths[name.partition("[")[0]] = depth

    def rule(self, body: str, option: str = "") -> str:
        """Return the name of a rule with this body. `option` is an attribute, such as "[lazy]"."""
        return self._define_once("r", body, option)

    def terminal(self, body: str) -> str:
        """Return the name of a terminal with this body, which may contain regular expressions, "&" and "~"."""
        return self._define_once("T", body, "")

    def _define_once(self, initial: str, body: str, option: str) -> str:
        key = (initial + option, body)
        if key not in self._names:
            name = self._names[key] = self.reserve_name(initial)
            self.define(name + option, body)
        return self._names[key]

    def literal(self, text: str) -> str:
        """Match exactly this text. Special tokens in it match as token ids."""
        parts, at = [], 0
        index_of_tag = {tag: index for tag in self._special if (index := text.find(tag)) >= 0}
        while index_of_tag:
            index, _, tag = min((index, -len(tag), tag) for tag, index in index_of_tag.items())
            parts += [self._quoted_literal(text[at:index])] if index > at else []
            parts.append(f"<[{self._special[tag]}]>")
            at = index + len(tag)
            found = {tag: index if index >= at else text.find(tag, at) for tag, index in index_of_tag.items()}
            index_of_tag = {tag: index for tag, index in found.items() if index >= 0}
        parts += [self._quoted_literal(text[at:])] if at < len(text) else []
        return " ".join(parts) or '""'

    def _quoted_literal(self, text: str) -> str:
        self.literals.setdefault(text)
        return json.dumps(text)

    def until(self, tag: str) -> str:
        """Match any text up to and including a tag, such as "</think>"."""
        if tag in self._special:
            return self.rule(f"/(?s:.*)/ {self.literal(tag)}")
        escaped = "".join(f"\\{char}" if char in "\\/.*+?()[]{}|^$" else char for char in tag)
        return self.rule(f"/(?s:.*){escaped}/", "[lazy]")

    def term_before_tag(self, term: str, tag: str) -> str:
        """Match a text that `term` matches, and then a tag. `term` must match no text that ends with the tag.

        The text and the tag form one terminal. As two terminals, the lexer could take the tag as a part of the text.
        """
        special = min((tag.find(each) for each in self._special if each in tag), default=len(tag))
        start = self.terminal(f"{term} {json.dumps(tag[:special])}" if special else term)
        return f"{start} {self.literal(tag[special:])}" if tag[special:] else start

    def union_terminal(self, terms: Iterable[str]) -> str | None:
        """Return a terminal that matches what any of the terms matches, or None if they match nothing."""
        body = " | ".join(terms)
        return None if not body or ("&" in body and has_empty_language(body)) else self.terminal(body)

    def grammar_text(self, start: str) -> str:
        """Return the whole grammar, in which an answer must match `start`."""
        return "\n".join([_HEADER, f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])

"""Regular expressions of strings: formats of JSON Schema, and patterns as terms of a terminal in llguidance's Lark."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from areno.engine.decoder.grammar import accepts_completion, grammar_error
from areno.errors import GrammarError

_HEX, _OCTET = "[0-9a-fA-F]", "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
# Days that exist, in years from 1 on, because readers refuse others. The same holds for leap seconds.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?([zZ]|[+-]{_CLOCK})"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = [f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{1,7}}:", f":((:{_GROUP}){{1,7}}|:)"]
_IPV6 += [f"({_GROUP}:){{1,{7 - after}}}(:{_GROUP}){{1,{after}}}" for after in range(1, 7)]
_PATH = f"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%{_HEX}{{2}})*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_HOURS})?|{_HOURS})",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": "|".join(_IPV6),
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//([a-zA-Z0-9._~!$&'()*+,;=:-]|%{_HEX}{{2}})*(@?{_HOST}(:[0-9]*)?)?"
    rf"((/{_PATH})?)|{_PATH})(\?(\?|{_PATH})*)?(#(\?|{_PATH})*)?",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
}
"""Format of a string -> regex of the whole string. Such a string needs no escapes in JSON."""

_NO_SIGN_ALONE = "^(?!^[-+.]*$)"  # pydantic's Decimal begins with it
_SYNTAX = frozenset("\\.*+?()[]{}|^$-&~#")
_ASCII = {"d": "0-9", "w": "a-zA-Z0-9_"}  # as in JavaScript, whose patterns JSON Schema uses


def escape_regex(text: str) -> str:
    return "".join(f"\\{char}" if char in _SYNTAX else char for char in text)


def lark_literal(regex: str) -> str:
    pieces, at = list[str](), 0
    while at < len(regex):
        piece = regex[at : at + 2] if regex[at] == "\\" else regex[at]
        pieces.append(r"\/" if piece == "/" else piece)
        at += len(piece)
    return f"/{''.join(pieces)}/" if pieces else '""'


def text_schema_fault(words: dict[str, Any]) -> str:
    """Return why the schema keywords of a string cannot be enforced, or "" if they can, even if no string matches."""
    return grammar_error(_nullable_string_grammar(words))


def _nullable_string_grammar(words: dict[str, Any]) -> str:
    """Return a grammar of strings with these keywords, or null, so that it compiles even if there is no such string."""
    return f"start: {json_expression({'anyOf': [{'type': 'string', **words}, {'type': 'null'}]})}"


def json_expression(schema: dict[str, Any]) -> str:
    """Return an expression that matches the JSON values of a schema. llguidance itself enforces the schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


def pattern_fault(pattern: str) -> str:
    return "" if decimal_term(pattern) else text_schema_fault({"pattern": pattern})


@lru_cache(4096)
def pattern_matches(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text. Raises GrammarError if the pattern cannot be enforced."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half of a pair is no character there
    if term := decimal_term(pattern):
        return accepts_completion(f"start: T\nT: {term}", text)
    if fault := pattern_fault(pattern):
        raise GrammarError("the schema cannot be compiled: pattern {!r}: {}", pattern, fault)
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which llguidance always escapes
    return accepts_completion(_nullable_string_grammar({"pattern": pattern}), quoted)


def decimal_term(pattern: str) -> str | None:
    """Return the term of a pattern with look-aheads that pydantic writes for `Decimal`, or None for another pattern."""
    if not pattern.startswith(_NO_SIGN_ALONE) or "|" in pattern[: pattern.find("(?:")]:
        return None
    head, choice, tail = pattern[len(_NO_SIGN_ALONE) :].partition("(?:")
    if not choice:
        term = whole_text_term(f"^{head}")
    else:
        plain, _, rest = tail.removesuffix(")").partition("|(?=")
        ahead, _, body = rest.partition("$)")
        terms = [whole_text_term(f"^{part.removesuffix('$')}$") for part in (head, plain, ahead, body)]
        term = None if None in terms or not body else f"({terms[0]} ({terms[1]} | ({terms[2]} & {terms[3]})))"
    return None if term is None else f"({term} & ~/[-+.]*/)"


def whole_text_term(pattern: str) -> str | None:
    """Return a term that matches exactly the texts in which a pattern is found.

    Returns None if the pattern has an anchor other than at its start or end, or a negated class within brackets.
    """
    parts, body, in_class, depth, at = list[str](), "", False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            escape = pattern[at : at + 2]
            body += _escape(escape, in_class)
            if in_class and escape[1:] in ("D", "W"):
                return None
            at += 2
            continue
        if in_class:
            in_class = char != "]"
            char = "\\[" if char == "[" else char
        elif char == "[":
            in_class = True
            char = "[^" if pattern.startswith("[^", at) else char
            at += len(char) - 1
        elif char == "|" and depth == 0:
            parts.append(body)
            at, body = at + 1, ""
            continue
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif (char == "^" and body) or (char == "$" and (depth or pattern[at + 1 : at + 2] not in ("", "|"))):
            return None
        body += char
        at += 1
    return f"({' | '.join(map(_search_term, [*parts, body]))})"


def _escape(escape: str, in_class: bool) -> str:
    known = _ASCII.get(escape[1:].lower())
    if known is None:
        return escape
    return known if in_class else f"[{'^' if escape[1:].isupper() else ''}{known}]"


def _search_term(part: str) -> str:
    """Return the term of a pattern without `|` outside of groups."""
    starts, ends = part.startswith("^"), part.endswith("$") and not part.endswith(r"\$")
    body = part.removeprefix("^")
    body = body.removesuffix("$") if ends else body
    regex = f"{'' if starts else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}"
    return lark_literal(regex) if regex != "()" else '""'

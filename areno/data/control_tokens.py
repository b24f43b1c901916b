"""Keep control tokens inside messages from acting as control tokens.

A chat template writes control tokens, such as turn markers, as text, and the tokenizer finds them anywhere in the
rendered text. So a user or a tool could end its own turn and begin another turn. `ControlTokens.escape` puts a break
(a random text) into each control token of a message before the message is rendered. `ControlTokens.encode` encodes
the rendered text. Only control tokens without a break, which the template wrote, get the ids of control tokens. All
breaks are removed.
"""

from __future__ import annotations

import logging
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

logger = logging.getLogger("areno")

_SHOWN_CHARS = 40
_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant"), ("user", "assistant", "tool"))


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """Return {token id: added token}. The tokenizer recognises added tokens anywhere in a text."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def control_token_texts(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the control tokens of a tokenizer and its chat template, sorted.

    These are bos, eos, pad, all special tokens, and the added tokens in brackets that the template writes. Tags that
    come in pairs, such as `<think>` and `</think>`, do not count as control tokens, even if they are flagged as
    special. The exception is a pair that the tokenizer names itself, such as `<s>` and `</s>` for bos and eos.
    """
    added = [token for token in added_tokens(tokenizer).values() if len(str(token)) > 1]
    names, named = {str(token) for token in added}, set(getattr(tokenizer, "special_tokens_map", {}).values())
    special = named | {str(token) for token in added if token.special}
    special |= set(getattr(tokenizer, "all_special_tokens", ()))
    markers = {name for name in names - special if re.fullmatch(r"[<\[{(].*\w.*[>\]})]", name)}
    written = _template_text(tokenizer) if markers else ""
    special |= {name for name in markers if name in written}
    found = []
    for name in sorted(names):
        partner = f"<{name[2:]}" if name.startswith("</") else f"</{name[1:]}"
        is_tag = name.startswith("<") and name.endswith(">") and partner in names
        if {name, partner} & named if is_tag else name in special:
            found.append(name)
    return tuple(found)


def _template_text(tokenizer: Any) -> str:
    """Return the chat template and example conversations that it renders, as one text to search for control tokens."""
    texts = [str(tokenizer.chat_template)]
    for roles in _ROLES:
        messages = [{"role": role, "content": "a"} for role in roles]
        with suppress(Exception):  # a template may raise any error for roles that it does not know
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return "\n".join(texts)


def first_characters_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression that matches the first character of each name in a text.

    It also matches the first character of a name that the end of the text cuts off.
    """
    heads = sorted(_names_by_first_character(names).items())
    return re.compile("|".join(f"{re.escape(first)}(?={_prefix_tree_pattern(rests)})" for first, rests in heads))


def whole_names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression that matches whole names, the longest if several match."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _prefix_tree_pattern(names: set[str]) -> str:
    """Return the source of a regular expression that matches any name, or the start of a name at the end of the text.

    It is a prefix tree, which is fast for many names.
    """
    if "" in names:
        return ""
    branches = [
        f"{re.escape(first)}{_prefix_tree_pattern(rests)}"
        for first, rests in sorted(_names_by_first_character(names).items())
    ]
    return f"(?:{'|'.join(branches)}|\\s*\\Z)"


def _names_by_first_character(names: Iterable[str]) -> dict[str, set[str]]:
    rests: dict[str, set[str]] = {}
    for name in names:
        rests.setdefault(name[0], set()).add(name[1:])
    return rests


def random_mark() -> str:
    """Return a text that nobody can guess. Templates neither trim, escape nor upper-case digits."""
    return str(secrets.randbits(80) + 10**25)


BREAK = random_mark()
_ALIAS = random_mark()  # another number, so that removing breaks from a text cannot produce it
_OF_ASSISTANT = frozenset({"content", "reasoning_content", "reasoning", "thinking"})
SLICE_CHARACTERS = 50_000  # characters, which take at most some milliseconds to search
_CACHED = "_control_tokens"  # attribute of a tokenizer

Offsets = list[tuple[int, int]]


class ControlTokens:
    """The control tokens of a tokenizer and its chat template, cached by `control_tokens`.

    `names` are the texts of the control tokens, empty after `allow_control_tokens`. `made_of` is the cache key.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.made_of = tokenizer, _cache_key(tokenizer)
        self.names = () if getattr(tokenizer, "allows_control_tokens", False) else control_token_texts(tokenizer)
        self._found = first_characters_pattern(self.names) if self.names else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without cached values: they contain BREAK, which differs in each process."""
        cached = {name for name, value in vars(type(self)).items() if isinstance(value, cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}

    @cached_property
    def adds_no_space(self) -> bool:
        """Whether a string gets the same tokens at the start of a text as in its middle.

        False for tokenizers that add a space at the start of a text, as many SentencePiece tokenizers do.
        """
        alone, inside = (self._tokenizer.encode(text, add_special_tokens=False) for text in ("a1", "\na1"))
        return bool(alone) and inside[-len(alone) :] == alone

    def escape(self, value: Any) -> Any:
        """Return a copy of a JSON value in which each control token is split by a break, at any depth.

        An incomplete control token at the end of a text gets a break, too, because the template may write the rest of
        the token after it.
        """
        if self._found is None:
            return value
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(each) for key, each in value.items()}
        return [self.escape(each) for each in value] if isinstance(value, list | tuple) else value

    def _escape_text(self, text: str) -> str:
        slices = [text[at : at + SLICE_CHARACTERS] for at in range(0, len(text), SLICE_CHARACTERS)]
        assert self._found is not None
        if not any(map(self._found.search, slices)):
            return text
        return "".join([self._found.sub(rf"\g<0>{BREAK}", each) for each in slices])

    def escape_messages(self, messages: Sequence[Any]) -> list[Any]:
        """Return escaped copies of messages. Only the content and the reasoning of the assistant are not escaped."""
        escaped = []
        for message in messages:
            own = _OF_ASSISTANT if message["role"] == "assistant" else frozenset()
            escaped.append({key: value if key in own else self.escape(value) for key, value in message.items()})
        return escaped

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text without its breaks. A control token with a break is encoded as ordinary text."""
        if BREAK not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._encode_escaped(text)[0] if self._tokenizer.is_fast else self._encode_with_slow_tokenizer(text)

    def encode_with_spans(self, text: str) -> tuple[list[int], Callable[[int], tuple[int, int]]]:
        """Return the token ids of a rendered text, and a function: index of a token -> its (start, end) in `text`.

        The tokenizer must be a fast one. Offsets are looked up one by one, because computing all at once would block
        other threads: 50 ms for 200,000 tokens.
        """
        if BREAK in text:
            tokens, offsets = self._encode_escaped(text)
            return tokens, offsets.__getitem__
        found = self._tokenizer(text, add_special_tokens=False)
        return found["input_ids"], found.encodings[0].token_to_chars

    def _encode_escaped(self, text: str) -> tuple[list[int], Offsets]:
        """Encode a text that contains breaks, with the second tokenizer and the aliases of `_plain_tokenizer`.

        Control tokens without a break are first replaced by their aliases, which the second tokenizer recognises.
        Control tokens with a break stay ordinary text.
        """
        tokenizer, aliases, ids = self._plain_tokenizer
        pieces, starts, origins, size = list[str](), list[int](), list[int](), 0
        for piece, origin in self._split_escaped(text):
            starts.append(size)
            origins.append(origin)
            pieces.append(aliases.get(piece, piece))
            size += len(pieces[-1])
        whole = "".join(pieces)
        found = tokenizer.encode(whole, add_special_tokens=False)

        def original_index(at: int) -> int:
            number = bisect_right(starts, at) - 1
            return origins[number] + at - starts[number]

        tokens, offsets = list[int](), Offsets()
        for token, (first, last) in zip(found.ids, found.offsets, strict=True):
            name, own = ids.get(token, ("", [token]))
            if name and whole[first:last] != name:  # the unknown token, which stands for a letter here
                own = [token]
            tokens += own
            offsets += [(original_index(first), original_index(last))] * len(own)
        return tokens, offsets

    def _encode_with_slow_tokenizer(self, text: str) -> list[int]:
        ids = {str(token): number for number, token in added_tokens(self._tokenizer).items()}
        tokens, words = list[int](), ""
        for piece, _ in self._split_escaped(text):
            words += "" if piece in ids else piece
            if words and (piece in ids or piece == ""):
                tokens += self._tokenizer.encode(words, add_special_tokens=False, split_special_tokens=True)
                words = ""
            tokens += [ids[piece]] if piece in ids else []
        return tokens

    def _split_escaped(self, text: str) -> Iterator[tuple[str, int]]:
        """Split a text at its breaks and at the tokens that must be encoded apart. Yield (substring, start in `text`).

        These tokens are the control tokens or, for a slow tokenizer, all added tokens. Each is a substring by itself.
        Breaks are left out. The last substring is empty.
        """
        at = 0
        for match in self._split_pattern.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], at
            if match.group() != BREAK:
                yield match.group(), match.start()
            at = match.end()
        if at < len(text):
            yield text[at:], at
        yield "", len(text)

    @cached_property
    def _split_pattern(self) -> Any:
        names = self.names if self._tokenizer.is_fast else map(str, added_tokens(self._tokenizer).values())
        return whole_names_pattern([BREAK, *names])

    @cached_property
    def _plain_tokenizer(self) -> tuple[Any, dict[str, str], dict[int, tuple[str, list[int]]]]:
        """Make a second tokenizer that encodes the texts of control tokens as ordinary text.

        It shares the vocabulary of the original tokenizer, so it takes little memory. Returns (second tokenizer,
        aliases, ids):
        aliases: text of a control token -> alias, a text that the second tokenizer encodes as this token
        ids: id in the second tokenizer -> (text, ids in the original tokenizer), for ids that must be replaced. Aliases
            and other added tokens have the text "". If the text of a control token is also a word of the vocabulary,
            the id of the word maps to (text, ids of its letters).
        """
        from tokenizers import AddedToken, Tokenizer

        backend = self._tokenizer.backend_tokenizer
        plain: Any = Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        n_words, aliases, added = backend.get_vocab_size(with_added_tokens=False), dict[str, str](), dict[int, Any]()
        ids: dict[int, tuple[str, list[int]]] = {}
        for number, token in sorted(added_tokens(self._tokenizer).items()):
            added[number], name = token, str(token)
            if name in self.names:
                aliases[name] = f"{_ALIAS}:{number};"
                added[number] = AddedToken(aliases[name], normalized=False, lstrip=token.lstrip, rstrip=token.rstrip)
                if number < n_words:  # some vocabularies have it as a word, too, so that it must be split into letters
                    ids[number] = name, [part.id for letter in name for part in backend.model.tokenize(letter)]
        plain.add_tokens(list(added.values()))
        return plain, aliases, ids | {plain.token_to_id(str(token)): ("", [number]) for number, token in added.items()}


def warn_of_unknown_tokens(tokenizer: Any, text: str, tokens: Sequence[int]) -> None:
    """Log a warning if a text is encoded to `tokens` with the unknown token. A tokenizer gets only one warning."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown not in tokens or getattr(tokenizer, "told_of_unknown", False):
        return
    if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return
    tokenizer.told_of_unknown = True
    words = (word for word in text.replace(BREAK, "").split() if unknown in tokenizer.encode(word))
    told = "the vocabulary lacks a part of %r in a prompt, an answer or the name of a tool: the model reads %s there"
    logger.warning(told, next(words, text)[:_SHOWN_CHARS], tokenizer.unk_token)


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the control tokens of a tokenizer. The tokenizer caches them until its template or vocabulary changes."""
    cached = vars(tokenizer).get(_CACHED)
    if cached is None or cached.made_of != _cache_key(tokenizer):
        cached = vars(tokenizer)[_CACHED] = ControlTokens(tokenizer)
    return cached


def allow_control_tokens(tokenizer: Any) -> None:
    """Let control tokens inside messages act as control tokens in all later encoding with this tokenizer."""
    tokenizer.allows_control_tokens = True
    vars(tokenizer).pop(_CACHED, None)


def _cache_key(tokenizer: Any) -> tuple[Any, int]:
    return tokenizer.chat_template, len(tokenizer) if hasattr(tokenizer, "__len__") else 0

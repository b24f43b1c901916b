"""Tokenizers and end tokens of models, and constrained decoding: masks of the tokens that a grammar allows next.

A grammar is a text in the syntax of llguidance (https://github.com/guidance-ai/llguidance, docs/syntax.md). llguidance
parses the text. Each worker receives the text, compiles it for the tokenizer, and keeps the compiled grammar for later
requests. A completion ends with an end-of-sequence token. When the grammar is complete and cannot continue, the mask
allows only such a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from areno.errors import EngineError, GrammarError, Key
from areno.models.config import TransformerConfig

MAX_GRAMMARS = 128  # compiled ones that are kept
MAX_ITEMS = 20_000  # of the parser after one text: an object needs about two for each optional property


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(
            "constrained decoding needs llguidance, which is not installed: pip install 'areno[grammar]'"
        ) from error
    return llguidance


class GrammarState:
    """The parser state of one completion in its grammar, after the tokens accepted so far.

    `finished` is set by an end-of-sequence token. `error` says why decoding cannot continue, such as a grammar that
    became too complex.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]):
        self.matcher, self.vocab_size, self._eos = matcher, vocab_size, eos_token_ids
        self.finished = False
        self.error = ""

    def allowed_token_mask(self) -> np.ndarray:
        return allowed_token_masks([self])[0]

    def accept(self, token: int) -> None:
        if not self.matcher.consume_token(token) or self.matcher.is_error():
            self.error = _error_reason(self.matcher.get_error()) or f"token {token} is not allowed"
        self.finished = not self.error and token in self._eos

    def n_allowed(self, draft: Sequence[int]) -> int:
        """Return how many leading tokens of a draft the grammar allows. The state does not change."""
        return int(self.matcher.validate_tokens(list(draft)))


class Grammar:
    """A compiled grammar, which any number of completions can use."""

    def __init__(self, text: str, matcher: Any, vocab_size: int, eos_token_ids: frozenset[int]):
        self.text, self._matcher, self._vocab_size, self._eos = text, matcher, vocab_size, eos_token_ids

    def start(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos)


def allowed_token_masks(states: Sequence[GrammarState]) -> np.ndarray:
    """Return the masks of tokens that may come next, int32 (states, ceil(vocab / 32)).

    Token t is allowed if bit t % 32 of entry t // 32 is set. All states must have the same vocabulary.
    """
    out_KW = np.zeros((len(states), -(-states[0].vocab_size // 32)), dtype=np.int32)
    for row, state in zip(out_KW, states, strict=True):
        state.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return out_KW


def allowed_token_masks_along_draft(state: GrammarState, draft: Sequence[int]) -> np.ndarray:
    """Return the mask of the next token, and the mask after each token of a draft that the grammar allows."""
    out_KW = np.zeros((1 + len(draft), -(-state.vocab_size // 32)), dtype=np.int32)
    matcher = state.matcher.deep_copy() if draft else state.matcher
    for row, token in zip(out_KW, [*draft, None], strict=True):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if token is not None:
            matcher.consume_token(token)
    return out_KW


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Construction takes about a second for a vocabulary of 150,000 tokens.

    Ids that the tokenizer lacks are never allowed. Raises GrammarError if llguidance is not installed or cannot use the
    tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int] = ()):
        own = tokenizer.eos_token_id
        self._eos = frozenset(eos_token_ids) or frozenset([own] if own is not None else [])
        if not self._eos:
            raise GrammarError("a grammar needs an end-of-sequence token, and the tokenizer has none")
        self.vocab_size = max(vocab_size, len(tokenizer))
        self.ll_tokenizer = _ll_tokenizer(tokenizer, self.vocab_size, sorted(self._eos))
        self.compile = lru_cache(MAX_GRAMMARS)(self._compile)
        """Compile a grammar in Lark syntax, or a JSON object of llguidance. The last 128 results are kept."""

    def _compile(self, text: str) -> Grammar:
        matcher = new_matcher(self.ll_tokenizer, text)
        if matcher.is_error():
            raise GrammarError("the grammar cannot be compiled: {}", _error_reason(matcher.get_error()))
        grammar = Grammar(text, matcher, self.vocab_size, self._eos)
        start = grammar.start()
        start.allowed_token_mask()
        if start.matcher.is_error():
            why = _error_reason(start.matcher.get_error())
            raise GrammarError("the grammar allows no token of this tokenizer at the start of an answer ({})", why)
        return grammar

    def allows_start(self, grammar: Grammar, text: str) -> bool:
        """Return whether a grammar allows a completion to begin with a text, as the tokenizer encodes it."""
        tokens = self.ll_tokenizer.tokenize_str(text)
        return grammar.start().n_allowed(tokens) == len(tokens)

    def can_encode(self, text: str) -> bool:
        """Return whether the tokenizer can write a text. If not, it writes another, such as "<unk>"."""
        return self.ll_tokenizer.decode_bytes(self.ll_tokenizer.tokenize_str(text)) == text.encode()

    def special_tokens(self, tokenizer: Any) -> dict[str, int]:
        """Return text -> id for each special token. A grammar matches special tokens only by id, not by text."""
        added = tokenizer.get_added_vocab()
        return {text: token for text, token in added.items() if self.ll_tokenizer.is_special_token(token)}


TextRanges = tuple[tuple[int, int], ...]


def find_ids_with_text(tokenizer: Any, eos_token_ids: Iterable[int]) -> TextRanges:
    """Return the token ids that have a text or end a completion, as ranges (first, end).

    The embedding of a model may have more rows than its tokenizer has texts. Ids without a text are not sampled.
    """
    return to_ranges([*tokenizer.get_vocab().values(), *eos_token_ids])


def to_ranges(ids: Sequence[int]) -> TextRanges:
    found = np.unique(np.array(ids, dtype=np.int64))
    parts = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if len(part))


class Vocabulary:
    """Tokenizer, end tokens and grammars of a model, loaded when they are first used.

    A completion ends with a token in the files of the model or in `more_eos_token_ids`. If `more_eos_token_ids` is
    None, it also ends with the end-of-sequence token of the tokenizer.
    """

    def __init__(
        self,
        folder: str,
        config: TransformerConfig,
        more_eos_token_ids: Iterable[int] | None = None,
        tokenizer: Any = None,
        texts: TextRanges | None = None,
    ):
        self._texts = texts
        self._folder, self._config, self._more, self._given = folder, config, more_eos_token_ids, tokenizer

    @property
    def context_len(self) -> int:
        return self._config.max_position_embeddings

    @cached_property
    def tokenizer(self) -> Any:
        if self._given is not None:
            return self._given
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder)
        except (OSError, ValueError) as error:
            raise EngineError(
                "stop strings and grammars need a tokenizer, and {} has none that loads; set {}, or use stop_token_ids",
                self._folder,
                Key("tokenizer_path"),
            ) from error

    @cached_property
    def eos_token_ids(self) -> set[int]:
        more = [self.tokenizer.eos_token_id] if self._more is None else self._more
        return {*self._config.eos_token_ids, *(token for token in more if token is not None)}

    @cached_property
    def ids_with_text(self) -> TextRanges:
        return find_ids_with_text(self.tokenizer, self.eos_token_ids) if self._texts is None else self._texts

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._config.vocab_size, self.eos_token_ids)


def _error_reason(message: str) -> str:
    """Return an error message of llguidance as one line, without the parser state and the quoted grammar lines."""
    lines = []
    for line in message.strip().splitlines():
        number, bar, _ = line.partition(" | ")
        if line.startswith("<state>") or (bar and number.strip().isdecimal()):
            break
        lines.append(line.strip())
    place, _, rest = " ".join(lines).partition(": ")
    return rest if place.startswith("at ") else " ".join(lines)


@cache
def _byte_tokenizer() -> Any:
    return _import_llguidance().LLTokenizer("byte")


def new_matcher(ll_tokenizer: Any, text: str) -> Any:
    """Return an LLMatcher of llguidance for a grammar. It has an error if the grammar cannot be compiled."""
    library = _import_llguidance()
    form = text if text.startswith("{") else library.LLMatcher.grammar_from_lark(text)
    limits = library.LLParserLimits(max_items_in_row=MAX_ITEMS, step_max_items=10 * MAX_ITEMS)
    return library.LLMatcher(ll_tokenizer, form, log_level=0, limits=limits)


@lru_cache(1024)
def _byte_matcher(text: str) -> Any:
    return new_matcher(_byte_tokenizer(), text)


def grammar_error(text: str) -> str:
    """Return why a grammar cannot be compiled, "" if it can. No tokenizer is needed."""
    matcher = _byte_matcher(text)
    return _error_reason(matcher.get_error()) if matcher.is_error() else ""


def accepts_completion(grammar: str, answer: str) -> bool:
    """Return whether `answer` is a whole completion in the grammar `grammar`, which has no special tokens."""
    state, tokens = _byte_matcher(grammar).deep_copy(), _byte_tokenizer().tokenize_str(answer)
    return state.validate_tokens(tokens) == len(tokens) and state.consume_tokens(tokens) and state.is_accepting()


def has_empty_language(term: str) -> bool:
    """Return whether a terminal of a grammar matches no text. `term` is its body, which must compile."""
    return _is_dead_end(f"start: T\nT: {term}") and not _is_dead_end(f'start: T | "a"\nT: {term}')


def _is_dead_end(text: str) -> bool:
    state = GrammarState(_byte_matcher(text).deep_copy(), _byte_tokenizer().vocab_size, frozenset())
    state.allowed_token_mask()
    return state.matcher.is_error()


def _ll_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Return the LLTokenizer of llguidance. Raises GrammarError if llguidance cannot use the tokenizer."""
    library = _import_llguidance()
    try:
        import llguidance.hf

        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
    except ValueError:  # not byte-level, or without one of the decoders that the library knows
        words = library.TokenizerWrapper(_TokenizerAdapter(tokenizer, vocab_size, eos_token_ids[0]))
        try:
            return library.LLTokenizer(words, eos_token=eos_token_ids)
        except (ValueError, RuntimeError) as error:
            raise GrammarError("constrained decoding cannot use this tokenizer: {}", error) from error


class _TokenizerAdapter:
    """Gives a tokenizer that is not byte-level the interface that llguidance expects."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [tokenizer.decode([token]).encode() for token in range(len(tokenizer))]
        self.tokens += [b""] * (vocab_size - len(tokenizer))
        self.special_token_ids = sorted(tokenizer.all_special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)

"""The vocabulary of a model of the engine: its tokenizer, the tokens that end a completion, and compiled grammars."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from areno.engine.decoder.grammar import GrammarCompiler
from areno.errors import EngineError, Key
from areno.models.config import TransformerConfig


class Vocabulary:
    """Tokenizer, end tokens and grammars of a model. They are loaded when they are first used.

    Args:
        folder: Folder of the tokenizer.
        config: Shape of the model.
        more_eos_token_ids: Tokens that end a completion, in addition to those in the files of the model. None adds the
            end-of-sequence token of the tokenizer.
        tokenizer: The tokenizer, if it is loaded already.
    """

    def __init__(
        self,
        folder: str,
        config: TransformerConfig,
        more_eos_token_ids: Iterable[int] | None = None,
        tokenizer: Any = None,
    ):
        self._folder, self._config, self._more, self._given = folder, config, more_eos_token_ids, tokenizer

    @property
    def context_len(self) -> int:
        """Context length of the model in tokens."""
        return self._config.max_position_embeddings

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises EngineError if the folder has none that loads."""
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
        """Tokens that end a completion."""
        more = [self.tokenizer.eos_token_id] if self._more is None else self._more
        return {*self._config.eos_token_ids, *(token for token in more if token is not None)}

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Return the compiler of grammars for this vocabulary, which caches compiled grammars."""
        return GrammarCompiler(self.tokenizer, self._config.vocab_size, self.eos_token_ids)

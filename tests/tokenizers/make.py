"""Writes the tests' tokenizers: a byte-level BPE of some 400 tokens, `tiny` with a chat template, `plain` without.

    python tests/tokenizers/make.py

The chat template is not made here; it is tiny/chat_template.jinja.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = "user assistant system tool tools name arguments function row hello hi you the answer is a b c d e f g x y"


def tokenizer() -> Tokenizer:
    """All bytes, then words and all their prefixes (a merge joins two tokens), with a blank in front and without."""
    vocab = {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in [blank + word for word in WORDS.split() for blank in ("", "Ġ")]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return made


def main() -> None:
    for name, eos in (("tiny", "<|im_end|>"), ("plain", "<|endoftext|>")):
        folder = FOLDER / name
        tokenizer().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

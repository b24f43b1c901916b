"""A small judge whose tokens are characters, and its replies by brute force: transformers, and a matcher by hand."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.helpers.tiny_decoder import random_qwen3

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
PAD, EOS = "<pad>", "</s>"


def char_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokens = [PAD, EOS, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def char_judge(folder: Path, seed: int = 0, context: int = 2048) -> Path:
    """A random model with its tokenizer."""
    tokenizer = char_tokenizer()
    random_qwen3(folder, len(tokenizer), context, 0.3, tokenizer.eos_token_id, seed)
    tokenizer.save_pretrained(folder)
    return folder


def allowed_after(said: str, labels: Sequence[str], n_reason: int) -> set[str]:
    """The next characters of a reply, or the end token, after the characters so far. By hand: of no grammar library."""
    begin = '{"reason": "'
    ends = [f'", "verdict": {json.dumps(label)}}}' for label in labels]
    if len(said) < len(begin):
        return {begin[len(said)]}
    rest = said[len(begin) :]
    reason, quote, _ = rest.partition('"')
    if quote:
        after = rest[len(reason) :]
        return {end[len(after)] if len(after) < len(end) else EOS for end in ends if end.startswith(after)}
    more = set(CHARACTERS) - {'"', "\\", "\n"} if len(reason) < n_reason else set()
    return more | {'"'}


def written_by_hand(folder: Path, question: str, labels: Sequence[str], max_tokens: int) -> str:
    """The greedy reply to a question: at each character the most likely one of those that may follow."""
    model, tokenizer = _loaded(folder)
    n_frame = max(len(f'{{"reason": "", "verdict": {json.dumps(label)}}}'.encode()) for label in labels) + 1
    tokens, said, before = tokenizer.encode(question), "", None
    while True:
        with torch.no_grad():
            found = model(torch.tensor([tokens]), past_key_values=before, use_cache=True)
        logits, before = found.logits[0, -1], found.past_key_values
        ids = tokenizer.convert_tokens_to_ids(sorted(allowed_after(said, labels, max_tokens - n_frame)))
        token = max(ids, key=lambda each: float(logits[each]))
        if token == tokenizer.eos_token_id:
            return said
        tokens = [token]
        said += tokenizer.decode([token])


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)

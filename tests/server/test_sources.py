"""Where the tokens of a row come from."""

from __future__ import annotations

import itertools
import random

import pytest

from areno.server.token_sources import expand_runs, source_runs
from tests.helpers.tokenizers import shared_tokenizer


@pytest.mark.parametrize("start", [0, 7])
def test_sources_are_found_by_bisection_as_one_token_after_the_other_finds_them(start: int) -> None:
    rng = random.Random(start)
    for name in ("tiny", "plain", "qwen3"):
        tokenizer = shared_tokenizer(name)
        for _ in range(30):
            words = ["hello", " ", "\n", "\u00e9", "\U0001f600", "<|im_end|>", "12", "  a"]
            text = "".join(rng.choices(words, k=rng.randint(0, 40))) + "end of text"
            cuts = sorted(rng.sample(range(len(text) + 1), 6))
            places = [(cuts[0], cuts[1], 2), (cuts[2], cuts[3], 3), (cuts[4], cuts[5], 1)]
            found = tokenizer(text[start:], add_special_tokens=False, return_offsets_mapping=True)
            spans = found["offset_mapping"]
            sources = [
                next((source for begin, end, source in places if start + last > begin and start + first < end), 0)
                for first, last in spans
            ]
            runs = source_runs(places, len(spans), spans.__getitem__, start)
            assert expand_runs(runs).tolist() == sources
            assert all(n > 0 for _, n in runs)
            assert all(one != other for (one, _), (other, _) in itertools.pairwise(runs))

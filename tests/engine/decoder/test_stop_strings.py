"""Stop strings: the token that completes one is found, whatever the tokenizer, and most tokens are decoded once."""

from __future__ import annotations

import random

import pytest

from areno.engine.decoder.sequence import StopStrings

STRINGS = ("</answer>", "\n\n", "done", " the", "é", "。", "\nObservation:")
TEXT = (
    "So 3 + 4 = 7.\n\nThen the answer is <answer>7</answer>, and it is done. Naïve café 日本語。 The\nObservation: "
    "none the other one, </ answer > not yet </answer"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "phi3-v", "minimind"])
def test_every_completion_ends_where_its_text_first_has_the_string(tokenizer_of, name: str) -> None:
    tokenizer = tokenizer_of(name)
    rng = random.Random(3)
    rows = [tokenizer.encode(TEXT, add_special_tokens=False)]
    rows += [rng.choices(rows[0], k=60) for _ in range(20)]
    rows += [[rng.randrange(len(tokenizer)) for _ in range(60)] for _ in range(20)]
    for string in STRINGS:
        stop_strings = StopStrings((string,), tokenizer.decode)
        for tokens in rows:
            expected = [string in tokenizer.decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
            end = expected.index(True) + 1 if True in expected else len(tokens)
            for n in range(1, end + 1):
                found = stop_strings.can_end_with(tokens[n - 1]) and stop_strings.are_in(tokens[:n])
                assert found == expected[n - 1]


def test_a_token_that_cannot_end_a_string_is_decoded_once() -> None:
    decoded: list[list[int]] = []

    def detokenize(tokens: list[int]) -> str:
        decoded.append(tokens)
        return "".join("abc"[token] for token in tokens)

    stop_strings = StopStrings(("ab",), detokenize)
    assert [stop_strings.can_end_with(token) for token in (0, 1, 2, 0, 1, 2)] == [False, True, False] * 2
    assert decoded == [[0], [0, 0], [1], [1, 1], [2], [2, 2]]

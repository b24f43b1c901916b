"""Rows to batches: order, limits, what is kept."""

from __future__ import annotations

import json

import pytest

from areno.api.batches import prompt_loader, sft_loader
from areno.config.run import DatasetConfig
from areno.errors import DataError


def config_of(**settings) -> DatasetConfig:
    return DatasetConfig(**{"path": "rows", "batch_size": 4, "max_length": 64, **settings})


def prompts(n: int):
    return [{"prompt": f"row {i}"} for i in range(n)]


def test_every_epoch_has_a_new_seeded_order(gpt2):
    def epoch_of(loader):
        return [item.index for batch in loader.batches() for item in batch.items]

    loader = prompt_loader(prompts(10), gpt2, config_of(), seed=3)
    first, second = epoch_of(loader), epoch_of(loader)
    assert len(first) == len(set(first)) == 8  # the last two rows are no batch
    assert first != second
    assert first != sorted(first)
    again = prompt_loader(prompts(10), gpt2, config_of(), seed=3)
    assert [epoch_of(again), epoch_of(again)] == [first, second]
    assert epoch_of(prompt_loader(prompts(10), gpt2, config_of(), seed=4)) != first
    ordered = prompt_loader(prompts(10), gpt2, config_of(shuffle=False, drop_last=False))
    assert [len(batch) for batch in ordered.batches()] == [4, 4, 2]
    assert [batch.epoch for batch in ordered.batches()] == [1, 1, 1]


def test_loader_goes_on_where_its_state_was_taken(gpt2):
    def take(loader, n):
        taken = []
        while True:
            for batch in loader.batches():
                taken.append([item.index for item in batch.items])
                if len(taken) == n:
                    return taken

    whole = take(prompt_loader(prompts(11), gpt2, config_of(), seed=1), 6)
    for n in range(1, 6):
        loader = prompt_loader(prompts(11), gpt2, config_of(), seed=1)
        taken = take(loader, n)
        resumed = prompt_loader(prompts(11), gpt2, config_of(), seed=1)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert taken + take(resumed, 6 - n) == whole


def test_long_rows_are_skipped_and_counted(gpt2, caplog):
    rows = [{"prompt": "a " * (100 if i % 3 == 0 else 5)} for i in range(9)]
    loader = prompt_loader(rows, gpt2, config_of(shuffle=False, batch_size=3))
    with caplog.at_level("WARNING", logger="areno"):
        batches = list(loader.batches())
    assert [[item.index for item in batch.items] for batch in batches] == [[1, 2, 4], [5, 7, 8]]
    assert [batch.skipped_long for batch in batches] == [2, 1]
    assert [batch.total_skipped_long for batch in batches] == [2, 3]  # of a batch, however far the loader has read on
    assert loader.total_skipped_long == 3
    assert caplog.text.count("rows row 0 has") == 1
    assert "train_dataset.max_length" in caplog.text


def test_prompt_must_leave_room_in_the_context(gpt2):
    rows = [{"prompt": "a" + " a" * n} for n in range(8)]  # n + 1 tokens
    loader = prompt_loader(rows, gpt2, config_of(shuffle=False, batch_size=1), context_len=6)
    assert max(len(item.tokens) for batch in loader.batches() for item in batch.items) == 5
    assert loader.total_skipped_long == 3


def test_nothing_left_is_an_error(gpt2):
    rows = [{"prompt": "a " * 100}] * 4
    with pytest.raises(DataError, match=r"every row of rows has more than 64 tokens \(train_dataset\.max_length\)"):
        list(prompt_loader(rows, gpt2, config_of()).batches())
    with pytest.raises(
        DataError, match=r"every row of rows has more than 9 tokens \(gconfig\.max_tokens\), the shortest"
    ):
        list(prompt_loader(rows, gpt2, config_of(), context_len=10).batches())
    with pytest.raises(DataError, match=r"train_dataset\.batch_size: is 4, but rows has only 3 usable rows"):
        prompt_loader(prompts(3), gpt2, config_of())


def test_error_in_a_row_names_it(gpt2):
    rows = [{"prompt": "x"}, {"prompt": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(DataError, match="rows row 1: messages need a tokenizer with a chat template"):
        list(prompt_loader(rows, gpt2, config_of(shuffle=False, batch_size=1)).batches())
    with pytest.raises(DataError, match="rows row 0: messages need"):  # at the start, where it can be
        prompt_loader(rows[::-1], gpt2, config_of(batch_size=1))


def test_rows_are_encoded_once(gpt2):
    class Counting:
        chat_template = None
        calls = 0

        def encode(self, text, add_special_tokens):
            self.calls += 1
            return gpt2.encode(text)

    tokenizer = Counting()
    loader = prompt_loader(prompts(8), tokenizer, config_of())
    assert len(list(loader.batches()) + list(loader.batches())) == 4
    assert tokenizer.calls == 8


def test_sft_batches(qwen3):
    rows = [{"prompt": "hi", "response": "x " * n} for n in range(1, 50)]
    loader = sft_loader(rows, qwen3, config_of(max_length=20))
    batches = list(loader.batches())
    assert all(len(sequence.tokens) <= 20 for batch in batches for sequence in batch.items)
    assert all(len(batch) == 4 for batch in batches)
    assert loader.total_skipped_long > 0

"""Rows to batches: order, limits, what is kept."""

from __future__ import annotations

import itertools
import json

import pytest

from areno.config.datasets import DatasetConfig
from areno.errors import DataError
from tests.helpers.row_loaders import row_loader


def config_of(**settings) -> DatasetConfig:
    return DatasetConfig(**{"path": "rows", "batch_size": 4, "max_length": 64, **settings})


def prompts(n: int):
    return [{"prompt": f"row {i}"} for i in range(n)]


def test_every_epoch_has_a_new_seeded_order(plain):
    def epoch_of(loader):
        return [item.index for batch in loader.batches() for item in batch.items]

    loader = row_loader("prompt", prompts(10), plain, config_of(), seed=3)
    first, second = epoch_of(loader), epoch_of(loader)
    assert len(first) == len(set(first)) == 8  # the last two rows are no batch
    assert first != second
    assert first != sorted(first)
    again = row_loader("prompt", prompts(10), plain, config_of(), seed=3)
    assert [epoch_of(again), epoch_of(again)] == [first, second]
    assert epoch_of(row_loader("prompt", prompts(10), plain, config_of(), seed=4)) != first
    ordered = row_loader("prompt", prompts(10), plain, config_of(shuffle=False, drop_last=False))
    assert [len(batch) for batch in ordered.batches()] == [4, 4, 2]
    assert [batch.epoch for batch in ordered.batches()] == [1, 1, 1]


def seen(batch):
    """Everything about a batch but the rows' texts."""
    return (
        [item.index for item in batch.items],
        batch.skipped_long,
        batch.total_skipped_long,
        batch.epoch,
        batch.ends_epoch,
    )


LONG = "a " * 100
# Which of the rows are too long: none, some anywhere, some in front and (in an order that is not shuffled) at the end.
ROWS = {
    "all fit": prompts(11),
    "all fit and fill batches": prompts(8),
    "long ones": [{"prompt": LONG if i % 3 == 0 else f"row {i}"} for i in range(14)],
    "long ones at the end": [{"prompt": LONG if i in (0, 1, 9, 10, 11) else f"row {i}"} for i in range(12)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_points_right_behind_the_batch_given_last(plain, rows, drop_last, shuffle):
    def fresh():
        return row_loader("prompt", rows, plain, config_of(shuffle=shuffle, drop_last=drop_last), seed=1)

    whole = [seen(batch) for batch in fresh().batches_until_epoch(3)]
    n_fit = sum(row["prompt"] != LONG for row in rows)
    assert len(whole) == 3 * (n_fit // 4 if drop_last else -(-n_fit // 4))
    assert [epoch for *_, epoch, ends in whole if ends] == [0, 1, 2]
    for n in range(1, len(whole) + 1):
        loader = fresh()
        taken = [seen(batch) for batch in itertools.islice(loader.batches_until_epoch(3), n)]
        resumed = fresh()
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert taken + [seen(batch) for batch in resumed.batches_until_epoch(3)] == whole


def test_a_pass_that_is_left_and_begun_again_misses_no_batch(plain):
    loader = row_loader("prompt", prompts(11), plain, config_of(), seed=1)
    [first] = itertools.islice(loader.batches(), 1)
    again = row_loader("prompt", prompts(11), plain, config_of(), seed=1)
    assert [seen(first), *map(seen, loader.batches())] == list(map(seen, again.batches()))


def test_long_rows_are_skipped_and_counted(plain, caplog):
    rows = [{"prompt": "a " * (100 if i % 3 == 0 else 5)} for i in range(9)]
    loader = row_loader("prompt", rows, plain, config_of(shuffle=False, batch_size=3))
    with caplog.at_level("WARNING", logger="areno"):
        batches = list(loader.batches())
    assert [[item.index for item in batch.items] for batch in batches] == [[1, 2, 4], [5, 7, 8]]
    assert [batch.skipped_long for batch in batches] == [2, 1]
    assert [batch.total_skipped_long for batch in batches] == [2, 3]  # of a batch, however far the loader has read on
    assert loader.total_skipped_long == 3
    assert caplog.text.count("rows row 0 has") == 1
    assert "train_dataset.max_length" in caplog.text


def test_prompt_must_leave_room_in_the_context(plain):
    rows = [{"prompt": "a" + " a" * n} for n in range(8)]  # n + 1 tokens
    loader = row_loader("prompt", rows, plain, config_of(shuffle=False, batch_size=1), (6, "the model's context"))
    assert max(len(item.tokens) for batch in loader.batches() for item in batch.items) == 5
    assert loader.total_skipped_long == 3


def test_nothing_left_is_an_error(plain):
    rows = [{"prompt": "a " * 100}] * 4
    with pytest.raises(DataError, match=r"every row of rows has more than 64 tokens \(train_dataset\.max_length\)"):
        list(row_loader("prompt", rows, plain, config_of()).batches())
    with pytest.raises(
        DataError, match=r"every row of rows has more than 9 tokens \(gconfig\.max_tokens\), the shortest"
    ):
        list(row_loader("prompt", rows, plain, config_of(), (10, "gconfig.max_tokens")).batches())
    with pytest.raises(DataError, match=r"train_dataset\.batch_size: is 4, but rows has only 3 usable rows"):
        row_loader("prompt", prompts(3), plain, config_of())


def test_error_in_a_row_names_it(plain):
    rows = [{"prompt": "x"}, {"prompt": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(DataError, match="rows row 1: messages need a tokenizer with a chat template"):
        list(row_loader("prompt", rows, plain, config_of(shuffle=False, batch_size=1)).batches())
    with pytest.raises(DataError, match="rows row 0: messages need"):  # at the start, where it can be
        row_loader("prompt", rows[::-1], plain, config_of(batch_size=1))


def test_rows_are_encoded_once(plain):
    class Counting:
        chat_template = unk_token_id = None
        calls = 0

        def encode(self, text):
            self.calls += 1
            return plain.encode(text)

    tokenizer = Counting()
    loader = row_loader("prompt", prompts(8), tokenizer, config_of())
    assert len(list(loader.batches()) + list(loader.batches())) == 4
    assert tokenizer.calls == 8


def test_sft_batches(tiny):
    rows = [{"prompt": "hi", "response": "x " * n} for n in range(1, 50)]
    loader = row_loader("sft", rows, tiny, config_of(max_length=30))
    batches = list(loader.batches())
    assert all(len(sequence.tokens) <= 30 for batch in batches for sequence in batch.items)
    assert all(len(batch) == 4 for batch in batches)
    assert loader.total_skipped_long > 0

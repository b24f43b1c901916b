"""Preference rows: which messages are the prompt, what is trained on, which pairs are too long; rows of a script."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from areno.config.datasets import DatasetConfig
from areno.data.row_schema import parse_preference_row
from areno.data.sources import load_rows, prepare_script_rows
from areno.errors import ConfigError, DataError
from tests.helpers.encoded_rows import pair_item
from tests.helpers.row_loaders import row_loader
from tests.helpers.tokenizers import load_tokenizer, plain_values

PREFERENCES = Path(__file__).parents[3] / "shared/data/preference/dpo_en_demo.messages.jsonl"


TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [SYSTEM, user("1+1?"), assistant("2"), user("2+2?")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, ("2+2?", "4", "5")),
        ({"prompt": EARLIER, "chosen": "4", "rejected": "5"}, (EARLIER, "4", "5")),
        (
            {"prompt": "2+2?", "chosen": [assistant("4")], "rejected": [assistant("5")]},
            ([user("2+2?")], [assistant("4")], [assistant("5")]),
        ),
        (
            {"prompt": EARLIER, "chosen": [assistant("4")], "rejected": [assistant("5")]},
            (EARLIER, [assistant("4")], [assistant("5")]),
        ),
        (
            {"chosen": [*EARLIER, assistant("4")], "rejected": [*EARLIER, assistant("5"), user("No."), assistant("4")]},
            (EARLIER, [assistant("4")], [assistant("5"), user("No."), assistant("4")]),
        ),
        (  # the prompt once more at the start of the answers
            {
                "prompt": "2+2?",
                "chosen": [user("2+2?"), assistant("4")],
                "rejected": [user("2+2?"), assistant("5")],
                "score": 3,
            },
            ([user("2+2?")], [assistant("4")], [assistant("5")]),
        ),
    ],
)
def test_forms_of_a_pair(row, expected):
    assert parse_preference_row(row) == expected
    assert prepare_script_rows([row], "dpo") == [row]


HI, BYE = [user("hi"), assistant("a")], [user("bye"), assistant("a")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "field rejected is missing; text or messages are expected"),
        ({"prompt": "x", "chosen": 3, "rejected": "b"}, "field chosen is int 3, not text or messages"),
        ({"chosen": "a", "rejected": "b"}, "field prompt is missing; text or messages are expected"),
        ({"prompt": "x", "chosen": "a", "rejected": [assistant("b")]}, "one is text and one is messages; give both in"),
        ({"chosen": HI, "rejected": BYE}, "begin with different messages; give a prompt, or conversations that share"),
        ({"chosen": HI, "rejected": HI[:1]}, "field rejected has nothing after the 1 messages that both begin with"),
        (
            {"chosen": [*HI, user("b")], "rejected": [*HI, user("c")]},
            "field chosen continues the prompt with a message of role 'user'; the first message in which the two",
        ),
        ({"prompt": "x", "chosen": [user("y"), assistant("a")], "rejected": [assistant("b")]}, "role 'user'"),
        ({"prompt": "x", "chosen": [], "rejected": [assistant("b")]}, "field chosen is an empty list of messages"),
        ({"prompt": HI, "chosen": "a", "rejected": "b"}, "field prompt ends with an assistant message"),
        (
            {"prompt": "x", "chosen": [{"role": "assistant"}], "rejected": [assistant("b")]},
            r"field chosen \[0\]\.conten",
        ),
    ],
)
def test_what_is_no_pair_is_named(tmp_path, row, message):
    good = {"prompt": "x", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=rf"^train_dataset row 1: .*{message}.*; expected {{prompt, chosen, rejected}}"):
        prepare_script_rows([good, row], "dpo")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"train_dataset\.path: .*rows\.jsonl row 0: .*{message}"):
        load_rows(DatasetConfig(path=str(path)), "dpo")


def trained_text(tokenizer, sequence):
    """Each run of trained tokens as text."""
    runs, before = [], True
    for token, masked in zip(sequence.tokens, sequence.prompt_mask, strict=True):
        if not masked:
            runs = [*runs, []] if before else runs
            runs[-1].append(token)
        before = masked
    return [tokenizer.decode(run) for run in runs]


def test_text_answers_end_as_responses_of_supervised_rows_do(chatml, plain):
    row = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
    item = pair_item(plain, row, 7)
    assert item.index == 7
    assert plain.decode(item.chosen.tokens) == "hihello<|endoftext|>"
    assert trained_text(plain, item.rejected) == ["no<|endoftext|>"]
    item = pair_item(chatml, row, 0)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert chatml.decode(item.chosen.tokens) == chatml.apply_chat_template(messages, tokenize=False)
    for answer, sequence in (("hello", item.chosen), ("no", item.rejected)):
        [batch] = row_loader(
            "sft", [{"prompt": "hi", "response": answer}], chatml, DatasetConfig(path="rows", batch_size=1)
        ).batches()
        assert [plain_values(item.rows[0]) for item in batch.items] == [plain_values(sequence)]


def test_only_turns_after_the_shared_messages_are_trained_on(chatml, tokenizer_of):
    row = {"chosen": [*EARLIER, assistant("4")], "rejected": [*EARLIER, assistant("5"), user("No."), assistant("6")]}
    marking = tokenizer_of("tiny")  # a template that itself marks what the assistant says
    marking.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for tokenizer in (chatml, marking):
        item = pair_item(tokenizer, row, 0)
        chosen, rejected = trained_text(tokenizer, item.chosen), trained_text(tokenizer, item.rejected)
        assert [text.split("</think>\n\n")[-1] for text in chosen] == ["4<|im_end|>"]
        assert [text.split("</think>\n\n")[-1] for text in rejected] == ["5<|im_end|>", "6<|im_end|>"]
        first = int(np.argmin(item.chosen.prompt_mask))
        assert item.rejected.tokens[:first].tolist() == item.chosen.tokens[:first].tolist()
        assert "Be brief." in tokenizer.decode(item.chosen.tokens[:first])


def test_a_prompt_of_one_text_is_one_user_message(chatml):
    as_text = pair_item(chatml, {"prompt": "hi", "chosen": [assistant("a")], "rejected": [assistant("b")]}, 0)
    as_list = pair_item(chatml, {"chosen": [user("hi"), assistant("a")], "rejected": [user("hi"), assistant("b")]}, 0)
    assert plain_values(as_text) == plain_values(as_list)


def test_messages_need_a_template(plain):
    rows = [{"chosen": HI, "rejected": [HI[0], assistant("b")]}]
    with pytest.raises(DataError, match="rows row 0: messages need a tokenizer with a chat template"):
        row_loader("dpo", rows, plain, DatasetConfig(path="rows", batch_size=1))


def test_real_pairs(chatml):
    if not PREFERENCES.is_file():
        pytest.skip(f"{PREFERENCES} is not there")
    rows = load_rows(DatasetConfig(path=str(PREFERENCES)), "dpo")
    for index in range(0, len(rows), 10):
        item = pair_item(chatml, rows[index], index)
        for name, sequence in (("chosen", item.chosen), ("rejected", item.rejected)):
            [text] = trained_text(chatml, sequence)
            answer = rows[index][name][0]["content"]
            assert text.removeprefix("<think>\n\n</think>\n\n") == f"{answer}<|im_end|>"


def test_the_longer_row_decides_whether_a_pair_fits(plain, caplog):
    rows = [{"prompt": "x", "chosen": "a " * n, "rejected": "b " * m} for n, m in ((3, 4), (40, 2), (2, 40), (5, 5))]
    config = DatasetConfig(path="rows", batch_size=2, max_length=20, shuffle=False)
    [batch] = row_loader("dpo", rows, plain, config).batches()
    assert [item.index for item in batch.items] == [0, 3]
    assert batch.skipped_long == 2
    assert all(len(item.tokens) == max(len(item.chosen.tokens), len(item.rejected.tokens)) for item in batch.items)
    assert "such rows are skipped and counted" in caplog.text
    assert [item.index for item in row_loader("dpo", rows, plain, config).items()] == [0, 3]


TIES = [
    {"prompt": "x", "chosen": "a", "rejected": "a"},
    {"prompt": "x", "chosen": [assistant("4")], "rejected": [assistant("4 ")]},  # alike for a template that trims
    {"chosen": [user("x"), assistant("a")], "rejected": [user("x"), assistant("a")]},
    {"prompt": [user("x")], "chosen": [assistant("4")], "rejected": [assistant(" 4")]},
]


@pytest.mark.parametrize("kind", ["dpo", "rw"])
def test_pairs_without_a_difference_are_skipped_and_counted(caplog, kind):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TRIMMING
    good = [{"prompt": "x", "chosen": "a", "rejected": "b"}, {"prompt": "y", "chosen": "b", "rejected": "c"}]
    ties = (
        TIES
        if kind == "dpo"
        else [*TIES[:3], {"prompt": "x", "answers": [[assistant(x)] for x in ("4", " 4", "4 ")], "ratings": [1, 2, 2]}]
    )
    rows = prepare_script_rows([ties[0], good[0], *ties[1:], good[1]], kind)
    config = DatasetConfig(path="rows", batch_size=1, shuffle=False)
    loader = row_loader(kind, rows, tokenizer, config)
    batches = list(loader.batches())
    assert [item.index for batch in batches for item in batch.items] == [1, 5]
    assert [(batch.skipped_ties, batch.total_skipped_ties) for batch in batches] == [(1, 1), (3, 4)]
    assert {batch.total_skipped_long for batch in batches} == {0}
    assert loader.n_batches(1) == 2
    assert caplog.text.count("such rows are skipped and counted") == 1
    state = loader.state_dict()
    again = row_loader(kind, rows, tokenizer, config)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict({name: value for name, value in state.items() if "ties" not in name})  # an older state
    with pytest.raises(DataError, match="no row of rows can be trained on: in 4 no answer is preferred"):
        list(row_loader(kind, prepare_script_rows(ties, kind), tokenizer, config).batches())


def test_equal_ratings_are_a_tie(plain):
    rows = [{"prompt": "x", "answers": ["a", "b"], "ratings": [2, ratings]} for ratings in (2, 3)]
    [batch] = row_loader(
        "rw", prepare_script_rows(rows, "rw"), plain, DatasetConfig(path="rows", batch_size=1)
    ).batches()
    assert (batch.items[0].index, batch.total_skipped_ties) == (1, 1)


# Rows that a script holds --------------------------------------------------------------------------------------------


class Indexed:
    """The least that a dataset can be."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def test_rows_of_a_script(plain):
    import datasets

    given = [{"prompt": f"{n}", "response": "x"} for n in range(3)]
    for rows in (given, tuple(given), Indexed(given), datasets.Dataset.from_list(given)):
        assert prepare_script_rows(rows, "sft") is rows
        [batch] = row_loader("sft", rows, plain, DatasetConfig(batch_size=3)).batches()
        assert len(batch) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("rows.jsonl", "train_dataset: is str 'rows.jsonl'; a list of dictionaries, or a dataset, is expected"),
        ({"prompt": ["a"]}, "train_dataset: is dict"),
        (iter([]), "train_dataset: is list_iterator"),
        ([], "train_dataset has no rows"),
        ([{"prompt": "x"}], "train_dataset row 0: field response is missing, not text; expected"),
        (Indexed(["x"]), "train_dataset row 0: is str 'x', not a dictionary"),
    ],
)
def test_what_are_no_rows_of_a_script(rows, message):
    with pytest.raises(DataError, match=message):
        prepare_script_rows(rows, "sft")


def test_messages_about_a_script_s_rows_name_no_path(plain):
    config = DatasetConfig(batch_size=2, max_length=4)
    with pytest.raises(DataError, match=r"^train_dataset row 0: messages need a tokenizer with a chat template"):
        row_loader("sft", [{"messages": HI}] * 2, plain, config)
    long = [{"prompt": "x " * 9, "response": "y"}] * 2
    with pytest.raises(DataError, match=r"^train_dataset: every row of the data given has more than 4 tokens"):
        list(row_loader("sft", long, plain, config).batches())
    with pytest.raises(DataError, match=r"^train_dataset\.batch_size: is 2, but the data given has only 1 usable"):
        row_loader("sft", long[:1], plain, config)
    with pytest.raises(ConfigError, match=r"train_dataset\.path: missing; set it, or pass rows to the trainer"):
        load_rows(config, "sft")

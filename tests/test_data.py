"""Files, folders, loaders and hub names to rows; rows to tokens; tokens to batches."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from areno.api.batches import prompt_loader, sft_loader
from areno.api.chat import assistant_spans, encode_generation_prompt, prompt_item, sft_sequence
from areno.api.data import load_rows, read_rows
from areno.config.run import DatasetConfig, ValidDatasetConfig
from areno.errors import ConfigError, DataError

DATA = Path(__file__).parents[2] / "shared/data"
ROWS = [{"prompt": f"What is {n}+{n}?", "solutions": str(2 * n), "level": n} for n in range(5)]


def tokenizer_of(name: str):
    folder = DATA / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3():
    return tokenizer_of("qwen3")


@pytest.fixture(scope="module")
def minimind():
    return tokenizer_of("minimind")


@pytest.fixture(scope="module")
def gpt2():
    return tokenizer_of("gpt2")


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# Sources -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "data.json", "split.json", "lines.json", "jsonl", "parquet", "csv", "tsv"])
def test_file_formats(tmp_path, form):
    path = tmp_path / f"rows.{form}"
    if form == "json":
        path.write_text(json.dumps(ROWS))
    elif form == "data.json":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif form == "split.json":
        path.write_text(json.dumps({"train": ROWS, "test": ROWS[:1]}))
    elif form in ("lines.json", "jsonl"):
        path.write_text("\ufeff" + "\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    else:
        import pandas

        frame = pandas.DataFrame(ROWS)
        if form == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, sep="\t" if form == "tsv" else ",", index=False)
    rows = load_rows(DatasetConfig(path=str(path)), "prompt")
    assert len(rows) == 5
    assert rows[3]["prompt"] == "What is 3+3?"
    assert int(rows[3]["solutions"]) == 6
    is_text = form in ("csv", "tsv")
    assert [row["level"] for row in rows] == [str(level) if is_text else level for level in range(5)]


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files(tmp_path, form):
    import pyarrow as pa

    table = pa.Table.from_pylist(ROWS)
    path = str(tmp_path / "rows.arrow")
    with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)
    assert list(load_rows(DatasetConfig(path=path), "prompt")) == ROWS


def test_save_to_disk_folders(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "two")
    assert list(read_rows(str(tmp_path / "one"), "train")) == ROWS
    assert list(read_rows(str(tmp_path / "two"), "test")) == [ROWS[1]]
    with pytest.raises(DataError, match=r"train_dataset\.split.*no split 'dev'; it has train, test"):
        read_rows(str(tmp_path / "two"), "dev")


def test_folder_of_data_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repo"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    assert [row["prompt"] for row in read_rows(str(folder), "train")] == [row["prompt"] for row in ROWS]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"train_dataset\.path: cannot read folder .*empty"):
        read_rows(str(tmp_path / "empty"))


def test_hub_name_without_network(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    for path in ("openai/gsm8k:main", "gsm8k", "org/repo:config:split"):
        with pytest.raises(DataError, match=r"hub cannot be reached.*set train_dataset\.path to a file or folder"):
            load_rows(DatasetConfig(path=path), "prompt")
    assert time.monotonic() - start < 20.0  # the import of `datasets` included


@pytest.mark.parametrize("path", ["nowhere.jsonl", "/no/such/folder", "./here", "a/b/c"])
def test_missing_files(path):
    with pytest.raises(DataError, match=r"valid_dataset\.path: there is no file or folder"):
        load_rows(ValidDatasetConfig(path=path), "prompt", "valid_dataset")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.txt", "hello", "has no known format"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "a.jsonl line 2: not JSON"),
        ("a.json", '[{"prompt": "x"', "not JSON"),
        ("a.json", '{"rows": []}', "expected a list of rows"),
        ("a.parquet", "no parquet", "not a readable parquet file"),
        ("a.arrow", "no arrow", "not a readable arrow file"),
        ("a.csv", 'prompt,x\n"a,1\n', "csv"),
    ],
)
def test_unreadable_files(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        load_rows(DatasetConfig(path=write(tmp_path / name, text)), "prompt")


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            "prompt",
            {"question": "x", "answer": "y"},
            r"prompt is missing, not text or messages.*has question, answer.*loader",
        ),
        ("prompt", {"prompt": ""}, "prompt is empty"),
        ("prompt", {"prompt": 3}, "prompt is int 3"),
        ("prompt", {"prompt": None}, "prompt is null"),
        ("prompt", {"prompt": []}, "prompt is an empty list of messages"),
        ("prompt", {"prompt": [{"role": "user"}]}, r"prompt \[0\].content is missing"),
        ("prompt", {"prompt": ["hello"]}, r"prompt \[0\] is str 'hello', not a message"),
        ("prompt", {"prompt": [{"role": "assistant", "content": "x"}]}, "ends with an assistant message"),
        ("prompt", "text", "is str 'text', not a dictionary"),
        ("sft", {"prompt": "x"}, "response is missing"),
        ("sft", {"prompt": "x", "response": 3}, "response is int 3"),
        ("sft", {"response": "x"}, "prompt is missing"),
        ("sft", {"messages": "x"}, "messages is str 'x', not a list of messages"),
        ("sft", {"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ],
)
def test_row_that_does_not_fit(tmp_path, kind, row, message):
    good = {"prompt": "x", "response": "y"}
    path = write(tmp_path / "rows.jsonl", json.dumps(good) + "\n" + json.dumps(row))
    with pytest.raises(DataError, match=f"rows.jsonl row 1: .*{message}"):
        load_rows(DatasetConfig(path=path), kind)


def test_columns_of_a_table_are_checked_too(tmp_path):
    import datasets

    rows = [{"prompt": "x", "n": 1}] * 1500 + [{"prompt": None, "n": 2}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 1500: field prompt is null.*has prompt, n"):
        load_rows(DatasetConfig(path=str(tmp_path / "rows.parquet")), "prompt")
    with pytest.raises(DataError, match=r"row 0: field response is missing"):
        load_rows(DatasetConfig(path=str(tmp_path / "rows.parquet")), "sft")


# Loaders -------------------------------------------------------------------------------------------------------------


def test_loader_makes_rows(tmp_path):
    loader = write(
        tmp_path / "loader.py",
        "from areno.api.data import read_rows\n"
        "def load_dataset(path, split):\n"
        "    return ({'prompt': row['q'] + split} for row in read_rows(path, split))\n"
        "def made(path, split):\n"
        "    return [{'prompt': f'{path} {split} {n}'} for n in range(3)]\n",
    )
    path = write(tmp_path / "rows.jsonl", '{"q": "a"}\n{"q": "b"}')
    rows = load_rows(DatasetConfig(path=path, loader=loader), "prompt")
    assert list(rows) == [{"prompt": "atrain"}, {"prompt": "btrain"}]
    rows = load_rows(ValidDatasetConfig(path="arithmetic?seed=1", loader=f"{loader}:made"), "prompt")
    assert rows[2]["prompt"] == "arithmetic?seed=1 test 2"


@pytest.mark.parametrize(
    ("source", "suffix", "error", "message"),
    [
        ("def load_datasets(p, s): return []", "", ConfigError, r"no function load_dataset; did you mean"),
        ("def f(p, s): return []", ":g", ConfigError, "no function g; it has f"),
        ("import nowhere_at_all", "", ConfigError, "ModuleNotFoundError.*loader.py:1"),
        ("x = (", "", ConfigError, "SyntaxError"),
        ("def load_dataset(p, s): return None", "", DataError, "returned null; expected a list of rows"),
        ("def load_dataset(p, s): return 'rows'", "", DataError, "returned str 'rows'"),
        ("def load_dataset(p, s):\n    return {}['x']", "", DataError, "KeyError: 'x' .loader.py:2"),
        ("def load_dataset(p): return []", "", DataError, "takes 1 positional argument"),
        ("def load_dataset(p, s): return []", "", DataError, "has no rows"),
        ("def load_dataset(p, s): return [1]", "", DataError, "row 0: is int 1"),
    ],
)
def test_bad_loader(tmp_path, source, suffix, error, message):
    loader = write(tmp_path / "loader.py", source) + suffix
    with pytest.raises(error, match=f"{message}"):
        load_rows(DatasetConfig(path="x.jsonl", loader=loader), "prompt")


def test_missing_loader():
    with pytest.raises(ConfigError, match=r"train_dataset\.loader"):
        load_rows(DatasetConfig(path="x", loader="nowhere.py"), "prompt")


# Prompts to tokens ---------------------------------------------------------------------------------------------------


def test_text_goes_through_the_template_as_one_user_message(qwen3, gpt2):
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "hi"}]
    assert qwen3.decode(encode_generation_prompt(qwen3, "hi")) == text
    assert qwen3.decode(encode_generation_prompt(qwen3, messages)) == text
    assert qwen3.decode(encode_generation_prompt(qwen3, "hi", enable_thinking=True)) == text
    assert (
        qwen3.decode(encode_generation_prompt(qwen3, "hi", enable_thinking=False)) == text + "<think>\n\n</think>\n\n"
    )
    assert encode_generation_prompt(gpt2, "hi there") == gpt2("hi there")["input_ids"]
    with pytest.raises(DataError, match=r"need a tokenizer with a chat template.*tokenizer_path"):
        encode_generation_prompt(gpt2, messages)


def test_tokenizer_that_does_not_know_enable_thinking(minimind):
    class Plain:
        chat_template = "there is one"
        encode = staticmethod(minimind.encode)

        def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt):
            return f"[{messages[-1]['content']}]"

    assert minimind.decode(encode_generation_prompt(Plain(), "hi", enable_thinking=False)) == "[hi]"


def test_prompt_items(qwen3):
    item = prompt_item(qwen3, ROWS[3], 3)
    assert (item.prompt, item.solutions, item.index, item.messages) == ("What is 3+3?", "6", 3, None)
    assert (
        item.text == qwen3.decode(item.tokens) == f"<|im_start|>user\n{item.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert item.record["level"] == 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    item = prompt_item(qwen3, {"prompt": messages}, 0)
    assert item.prompt == item.text == qwen3.decode(item.tokens)
    assert "Be brief." in item.text
    assert item.messages == messages


# Supervised rows -----------------------------------------------------------------------------------------------------


def trained_text(tokenizer, row, **options) -> list[str]:
    """The trained stretches of a row, decoded."""
    sequence = sft_sequence(tokenizer, row, **options)
    assert len(sequence.tokens) == len(sequence.prompt_mask)
    stretches: list[list[int]] = []
    last = True
    for token, masked in zip(sequence.tokens, sequence.prompt_mask, strict=True):
        if not masked:
            if last:
                stretches.append([])
            stretches[-1].append(token)
        last = masked
    return [tokenizer.decode(stretch) for stretch in stretches]


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def test_prompt_response_trains_on_the_response_and_its_end(qwen3, gpt2):
    row = {"prompt": "hi", "response": "hello you"}
    assert trained_text(qwen3, row) == ["hello you<|im_end|>"]
    sequence = sft_sequence(qwen3, row)
    assert sequence.tokens[: -len(qwen3.encode("hello you")) - 1] == encode_generation_prompt(qwen3, "hi")
    assert trained_text(gpt2, row) == ["hello you<|endoftext|>"]
    assert gpt2.decode(sft_sequence(gpt2, row).tokens) == "hihello you<|endoftext|>"


def test_conversation_trains_on_assistant_turns_only(qwen3):
    messages = [{"role": "system", "content": "Be brief."}, *turns("a b", "c d", "e f", "g h")]
    # Qwen3 writes an empty block of reasoning before the last answer only; a model that thinks would have to write it.
    assert trained_text(qwen3, {"messages": messages}) == ["c d<|im_end|>", "<think>\n\n</think>\n\ng h<|im_end|>"]
    assert trained_text(qwen3, {"messages": messages}, enable_thinking=False) == ["c d<|im_end|>", "g h<|im_end|>"]
    text = qwen3.apply_chat_template(messages, tokenize=False)
    assert qwen3.decode(sft_sequence(qwen3, {"messages": messages}).tokens) == text


def test_reasoning_of_earlier_turns(qwen3, minimind):
    messages = turns("a", "<think>\nearly\n</think>\n\nb", "c", "<think>\nlate\n</think>\n\nd")
    assert trained_text(qwen3, {"messages": messages}) == ["b<|im_end|>", "<think>\nlate\n</think>\n\nd<|im_end|>"]
    # minimind keeps all reasoning; its generation prompt opens with a block, of which the first line is shared.
    assert trained_text(minimind, {"messages": messages}) == [
        "early\n</think>\n\nb<|im_end|>",
        "late\n</think>\n\nd<|im_end|>",
    ]
    assert trained_text(minimind, {"messages": turns("a", "b", "c", "d")}) == ["b<|im_end|>", "d<|im_end|>"]


def test_tool_calls_are_trained_and_results_are_not(qwen3):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    first, second = trained_text(qwen3, {"messages": messages, "tools": [call]})
    assert first == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert second == "<think>\n\n</think>\n\nTwo.<|im_end|>"


def test_template_that_marks_generation(qwen3):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    assert trained_text(tokenizer, {"messages": turns("a", "b c", "d", "e f")}) == ["b c<|im_end|>", "e f<|im_end|>"]


def test_template_without_end_of_turn_token(gpt2):
    gpt2 = tokenizer_of("gpt2")
    opened = "{% if add_generation_prompt %}assistant: {% endif %}"
    gpt2.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}\n{% endfor %}" + opened
    assert trained_text(gpt2, {"messages": turns("a ", "b", "c", "d ")}) == ["b", "d"]


def test_end_of_turn_that_is_not_the_end_token():
    base = tokenizer_of("qwen2.5")
    base.eos_token = "<|endoftext|>"  # as in the base models, whose template ends turns with <|im_end|>
    messages = turns("a", "b c", "d", "e f")
    assert trained_text(base, {"messages": messages}) == ["b c<|im_end|>", "e f<|im_end|>"]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [*messages, {"role": "user", "content": "g"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained_text(base, {"messages": asked})[2].endswith("</tool_call><|im_end|>")
    # A template that also closes the whole conversation: the turn ends before that.
    base.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
    )
    assert trained_text(base, {"messages": messages}) == ["b c<|im_end|>", "e f<|im_end|>"]
    with pytest.raises(DataError, match=r"leaves out the tool calls of messages\[5\]"):  # and would train on silence
        sft_sequence(base, {"messages": asked})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ messages|length }}{% for m in messages %}<{{ m.content }}>{% endfor %}",
            r"where messages\[1\] begins cannot be found",
        ),
        ("{% for m in messages %}<{{ m.content|upper }}>{% endfor %}", "rewrites assistant messages"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages.*roles must alternate"),
    ],
)
def test_template_in_which_turns_cannot_be_found(template, message):
    tokenizer = tokenizer_of("gpt2")
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        sft_sequence(tokenizer, {"messages": turns("a", "b", "c", "d")})


def test_conversation_needs_a_template(gpt2):
    with pytest.raises(DataError, match="need a tokenizer with a chat template"):
        sft_sequence(gpt2, {"messages": turns("a", "b")})


def test_spans_of_real_conversations(qwen3):
    path = DATA / "toolcall/reason_tool_use_demo_50.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    for row in read_rows(str(path)):
        messages = [{"role": m["role"], "content": "".join(map(part_text, m["content"]))} for m in row["messages"]]
        text = qwen3.apply_chat_template(messages, tokenize=False)
        spans = assistant_spans(qwen3, messages, text)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert len(spans) == len(answers) > 0
        for (start, end), answer in zip(spans, answers, strict=True):
            assert text[:start].endswith("<|im_start|>assistant\n")
            assert text[start:end].endswith("<|im_end|>")
            assert text[start:end].count("<|im_") == 1
            assert answer.split("</think>")[-1].strip() in text[start:end]


def part_text(part: dict) -> str:
    return f"<think>\n{part['value']}\n</think>\n\n" if part["type"] == "reasoning" else part["value"]


# Batches -------------------------------------------------------------------------------------------------------------


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
    rows = [{"prompt": "x"}, {"prompt": turns("hi")}]
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


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,solutions\n1+9=,10\n2+9=,011\n3,\n", encoding="utf-8")
    rows = read_rows(str(tmp_path / "a.csv"))
    assert [row["solutions"] for row in rows] == ["10", "011", ""]


def test_tools_may_be_json_text(qwen3):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    row = {"prompt": "Go", "response": "Gone"}
    as_list = sft_sequence(qwen3, {**row, "tools": [tool]})
    assert sft_sequence(qwen3, {**row, "tools": json.dumps([tool])}) == as_list
    assert as_list != sft_sequence(qwen3, row)
    with pytest.raises(DataError, match="tools is text, but not JSON"):
        sft_sequence(qwen3, {**row, "tools": "[look"})

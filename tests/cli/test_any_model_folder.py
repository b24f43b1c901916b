"""Whatever bytes lie in a model folder, reading it ends with a model or with printable lines that say what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from areno.cli.__main__ import main
from areno.errors import CheckpointError, printable
from areno.models.adapters import read_adapter_config
from areno.models.registry import load_config
from tests.helpers.damaged_files import damaged, examples

MODEL = Path(__file__).parents[2] / "examples/quickstart/model"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
HEADER = json.loads((MODEL / WEIGHTS).read_bytes()[8 : 8 + struct.unpack("<Q", (MODEL / WEIGHTS).read_bytes()[:8])[0]])
VALUES = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        -1,
        3,
        2**31,
        2**63,
        2**64,
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\x1b[2J\n",
        "\ud800",
        [],
        [1],
        ["x"],
        [[]],
        [None] * 3,
        {},
        {"": {}},
        {"x": "\n"},
        json.loads("[" * 500 + "]" * 500),
    ]
)
FIELDS = [*CONFIG, "rope_scaling", "sliding_window", "layer_types", "quantization_config", "text_config", "num_labels"]
FILES = st.sampled_from(["a.safetensors", "../a.safetensors", "\0.safetensors", ".safetensors"])
PLACES = st.sampled_from(["F8_E4M3", "I64", "F4", [0, 2**62], [10, 5], [0, 0]])
ADAPTERS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def check(name: str, data: bytes) -> None:
    """Check a copy of the model with other bytes in one file. Fails for a traceback and for lines of other kinds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for file in MODEL.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)
        if name == INDEX:
            (folder / WEIGHTS).rename(folder / "a.safetensors")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["check", str(folder)])
        lines = out.getvalue().splitlines()
        assert code == any(line.startswith("FAIL ") for line in lines)
        assert all(line.startswith(("ok ", "FAIL ")) and printable(line) == line for line in lines), lines


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS]
)
def test_damaged_files(name):
    data = (MODEL / name).read_bytes() if (MODEL / name).exists() else b'{"eos_token_id": [1, 2]}'

    @given(damaged(data[:3000]))
    @settings(examples, max_examples=20)
    def run(data: bytes) -> None:
        check(name, data)

    run()


@pytest.mark.slow
@given(st.sampled_from(FIELDS), VALUES)
@settings(examples, max_examples=80)
def test_any_field_of_the_config(field, value):
    check("config.json", json.dumps(CONFIG | {field: value}).encode())


@given(st.dictionaries(st.text(max_size=3), FILES | VALUES) | VALUES)
@settings(examples, max_examples=40)
def test_any_index(weight_map):
    check(INDEX, json.dumps({"weight_map": weight_map}).encode())


@pytest.mark.slow
@given(st.sampled_from(sorted(HEADER)), st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES | PLACES)
@settings(examples, max_examples=60)
def test_any_header(name, field, value):
    header = json.dumps(HEADER | {name: HEADER[name] | {field: value}}).encode()
    check(WEIGHTS, struct.pack("<Q", len(header)) + header + bytes(1_200_000))


@given(st.sampled_from([*ADAPTERS, "bias", "rank_pattern", "use_dora", "task_type", "x"]), VALUES)
@settings(examples, max_examples=60)
def test_any_field_of_adapters(field, value):
    with tempfile.TemporaryDirectory() as place:
        save_file(
            {f"{MODULE}.lora_{name}.weight": torch.zeros(1) for name in "AB"}, f"{place}/adapter_model.safetensors"
        )
        (Path(place) / "adapter_config.json").write_text(json.dumps(ADAPTERS | {field: value}))
        problems = []
        try:
            read_adapter_config(place, load_config(MODEL))
        except CheckpointError as error:
            problems = list(map(str, error.problems))
        assert list(map(printable, problems)) == problems

"""python -m areno.bench sft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.bench.__main__ import main
from areno.bench.work import model_folder
from areno.cost.flops import Cost
from areno.models.registry import load_config
from areno.user_processes.pool import usable_cores

TOKENIZER = Path(__file__).parents[1] / "tokenizers/tiny"
TINY = f"sft --shape tiny --device cpu --rows 6 --repeats 2 --tokenizer {TOKENIZER} --prompt-len 5 --new-tokens 4"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "--messages"])
def test_a_step_and_the_share_that_the_device_waits(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert main([*TINY.split(), *form.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["device_s"] < found["step_s"]
    assert 0 < found["outside_share"] <= found["worst_outside_share"] < 1
    parts = found["train_outside_s"], found["other_s"], found["between_s"]
    assert min(parts) > 0
    assert found["row_tokens"] > 9
    assert found["n_encoders"] == 0  # so few rows take no time


@pytest.mark.slow
def test_the_page_names_the_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY.split()) == 0
    page = capsys.readouterr().out
    assert "% of a step" in page
    assert "a thread of the driver" in page


@pytest.mark.gpu
def test_a_small_model_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"sft --shape 25m --device cuda:0 --rows 256 --repeats 5 --tokenizer {TOKENIZER} --json"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["device_s"] < found["step_s"]


@pytest.mark.gpu
def test_processes_render_conversations_for_a_small_model_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"sft --shape 25m --device cuda:0 --messages --repeats 5 --tokenizer {TOKENIZER} --json"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n_encoders"] > 0) == (usable_cores() > 2)


def test_the_shape_with_the_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    folder, random_init = model_folder("25m", tmp_path, vocab_size=20_000, eos_token_id=0)
    assert random_init
    assert Cost.of(load_config(folder), 2).n_params == pytest.approx(25e6, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sft", "--tokenizer: is missing; sft needs one"),
        (f"sft --tokenizer {TOKENIZER} --prompts 3", "--rows: is the number of rows of sft"),
        ("train --messages", "--messages: is for sft, not for train"),
    ],
)
def test_arguments_that_do_not_fit(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main([*arguments.split(), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err

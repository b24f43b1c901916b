"""areno bench: the command and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.bench import __main__ as bench
from tests.helpers.bench_runs import TINY, found
from tests.helpers.tiny_engine import model_folder as tiny_folder


@pytest.mark.parametrize("kind", ["rollout", "train", "step", "logprob"])
def test_each_work_runs_on_a_cpu_and_tells_everything_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = found(f"{kind} --shape {tiny_folder(tmp_path)} --no-recompute {TINY}", capsys)
    ours, floor = out["areno"], out["floors"]
    assert out["kind"] == kind
    assert out["work"] == "2 x 3, prompt 6, 5 new tokens"
    assert out["rates"]["copy_gb_s"] > 0.1
    assert out["rates"]["matmul_tflop_s"] > 1e-4
    assert out["params"] == 64 * 32 + 2 * (32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16) + 32
    phases = {"rollout": ["rollout"], "train": ["train"], "step": ["rollout", "train", "step"], "logprob": ["logprob"]}
    tokens = {"rollout": 2 * 3 * 5, "train": 66, "step": 66, "logprob": 66}
    for phase in phases[kind]:
        assert len(ours["repeats_s"][phase]) == 2
        assert ours[f"{phase}_tok_s"] == pytest.approx(tokens[phase] / ours[f"{phase}_s"])
        assert ours[f"{phase}_spread"] >= 0
    assert ours["start_s"] > 0
    assert ours["peak_memory_gib"] > 0
    if kind in ("rollout", "step"):
        assert ours["logp_abs_diff_mean"] < 1e-5
        assert ours["start_s"] < ours["first_token_s"] < ours["second_token_s"]
        assert ours["decode_s"] == pytest.approx(max(0.0, ours["rollout_s"] - ours["prefill_s"]))
        assert ours["rollout_percent_of_ordinary_floor"] == pytest.approx(
            100 * floor["rollout_ordinary_s"] / ours["rollout_s"]
        )
        assert floor["rollout_shared_s"] <= floor["rollout_ordinary_s"]
        assert ours["kv_cache_gib"] * 2**30 >= 6 * 11 * 2 * 2 * 2 * 16 * 4
    if kind in ("train", "step"):
        assert ours["mfu"] == pytest.approx(floor["train_s"] / ours["train_s"])
        assert ours["needed_mfu"] < ours["mfu"]
    assert out["ratio"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sampled_reverse_kl", "jsd"])
def test_a_step_with_a_teacher_is_compared_with_one_without(
    loss_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = found(f"step --shape {tiny_folder(tmp_path)} --teacher {loss_type} --against plain {TINY}", capsys)
    assert out["areno"]["distill_loss"] == pytest.approx(0.0, abs=1e-3)  # both have the same weights at first
    assert "distill_loss" not in out["plain"]
    assert set(out["ratio"]["plain"]) == {"rollout", "train", "step"}
    assert out["settings"]["teacher"] == loss_type


def test_a_step_that_is_recorded_is_compared_with_one_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"step --shape {tiny_folder(tmp_path)} --record {TINY}"
    out = found(f"{command} --against plain", capsys)
    ours, plain = out["areno"], out["plain"]
    assert len(ours["repeats_s"]["record"]) == 2
    assert 0 < ours["record_s"] < ours["step_s"]
    assert ours["record_written_s"] > 0
    assert 0 < ours["record_mib"] < 0.1
    assert not [name for name in plain if name.startswith("record")]
    assert out["settings"]["record"] is True
    assert set(out["ratio"]["plain"]) == {"rollout", "train", "step"}
    assert bench.main(command.split()) == 0
    assert "written in" in capsys.readouterr().out
    assert bench.main(["train", "--record"]) == 2
    assert "--record: is for step, not for train" in capsys.readouterr().err


def test_the_page_names_every_figure_that_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path)
    assert bench.main(f"step --shape {folder} --no-recompute --uniform 3 9 --prompts 4 --repeats 1".split()) == 0
    out, err = capsys.readouterr()
    for words in (
        "4 x 1, prompt and new tokens uniform in 3..9",
        "GB/s",
        "floor, ordinary",
        "floor, shared",
        "floor, train",
        "% of the ordinary floor",
        "prefill",
        "MFU",
        "first token of all",
        "apart from the KV cache",
        "logp_abs_diff_mean",
    ):
        assert words in out
    assert "areno step warm-up" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rollout --prompts 0", "--prompts: is '0'"),
        ("rollout --uniform 9 3", "--uniform: is 9 3"),
        ("rollout --shape qwen9", "--shape: is 'qwen9'; expected a model folder or one of qwen3-0.6b"),
        ("rollout --device gpu", "--device: is 'gpu'; here are cpu"),
        ("rollout --mem-fraction 1.5", "--mem-fraction: is '1.5'"),
        ("rollout --mem-fraction all", "--mem-fraction: is 'all'"),
        ("rollout --offload", "--offload: is for train and step, not for rollout"),
        ("train --offload", "--offload: is for a CUDA device, and --device is cpu"),
        (
            "rollout --shape tiny --new-tokens 5000",
            "--new-tokens: makes rows of 5256 tokens, the model's context is 2048",
        ),
        ("rollout --shape tiny --uniform 2000 3000", "--uniform: makes rows of "),
        (
            "rollout --against plain",
            "--against: plain is for --exact, --deterministic, --share-prefixes, --kv-cache-dtype, --fp8, --teacher",
        ),
        ("rollout --teacher jsd", "--teacher: is for step and train, not for rollout"),
        ("sleep", "work: invalid choice"),
        ("rollout --prompt 5", "ambiguous option"),
        ("rollout 7", "unrecognized arguments: 7"),
    ],
)
def test_a_bad_argument_is_one_line(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*command.split(), "--device", "cpu"] if "--device" not in command else command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_bad_arguments_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["rollout", "--device", "cpu", "--offload", "--uniform", "9", "3"]) == 2
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "error: 2 problems in the configuration:",
        "--offload: is for train and step, not for rollout",
        "--uniform: is 9 3; the first must not be above the second",
    ]

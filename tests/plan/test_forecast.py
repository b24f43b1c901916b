"""The memory and time predicted for a run, against peaks and times that were measured on an H100 and an H200."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.cli.__main__ import main
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.models.known_shapes import published_config
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import hardware_names, hardware_of, local_devices
from areno.plan.settings_that_fit import FittingChange, fitting_changes
from tests.helpers.pages import ROOT, blocks

WORK = [
    *("train_dataset.batch_size=32", "gconfig.n_samples=8", "gconfig.max_new_tokens=256", "valid_dataset=null"),
    *("train_dataset.max_length=256", "actor.gradient_checkpointing=true"),
    "actor.share_prefixes=off",  # as it was measured
]
KL = ["ref=default", "actor.kl_ctl=0.1"]
CRITIC = ["critic.gradient_checkpointing=true", "critic.ppo_n_minibatches=1"]


def config(recipe: str, *settings: str) -> Any:
    return load(get_algorithm(recipe).config, "quickstart", [*WORK, *settings])


def predicted(recipe: str, *settings: str, device: str = "h100-80gb", n: int = 1) -> Forecast:
    return forecast(config(recipe, *settings), hardware_of(device), n, 256, 256)


@pytest.mark.parametrize(
    ("recipe", "settings", "device", "peak", "seconds"),
    [
        ("grpo", ["actor.path=Qwen/Qwen3-0.6B"], "h100-80gb", 70.31, {"rollout": 1.019, "train actor": 1.198}),
        (
            "grpo",
            ["actor.path=Qwen/Qwen3-1.7B", *KL],
            "h100-80gb",
            67.19,
            {"rollout": 1.211, "score ref": 0.872, "train actor": 2.699},
        ),
        (
            "grpo",
            ["actor.path=Qwen/Qwen3-4B", "actor.optimizer.type=adam_8bit"],
            "h100-80gb",
            71.71,
            {"rollout": 2.192, "train actor": 7.032},
        ),
        (
            "grpo",
            ["actor.path=Qwen/Qwen3-8B", "actor.use_lora=true"],
            "h100-80gb",
            67.00,
            {"rollout": 3.262, "train actor": 8.561},
        ),
        (
            "ppo",
            ["actor.path=Qwen/Qwen3-0.6B", *KL, *CRITIC],
            "h100-80gb",
            69.16,
            {
                "rollout": 0.934,
                "score ref": 0.388,
                "score critic": 0.302,
                "train critic": 1.161,
                "train actor": 1.205,
            },
        ),
    ],
    ids=["0.6b", "1.7b with ref", "4b", "8b adapters", "ppo"],
)
def test_against_measurements(
    recipe: str, settings: list[str], device: str, peak: float, seconds: dict[str, float]
) -> None:
    found = predicted(recipe, *settings, device=device)
    assert found.fits
    assert 0.98 <= found.peak_memory_bytes / 2**30 / peak <= 1.05
    assert found.step_seconds == pytest.approx(sum(seconds.values()), rel=0.15)
    assert {phase.name: phase.seconds for phase in found.phases} == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        (["actor.path=Qwen/Qwen3-8B"], (1.63, None)),
        (["actor.path=Qwen/Qwen3-4B"], (1.218, None)),
        (["actor.path=Qwen/Qwen3-4B", "train_dataset.batch_size=8"], (0.82, 0.82)),
        (
            ["actor.path=Qwen/Qwen3-14B", "train_dataset.batch_size=8", "actor.optimizer.type=adam_8bit"],
            (1.65, 2.94),
        ),
    ],
    ids=["8b", "4b", "4b, few samples", "14b"],
)
def test_tensor_parallel_against_measurements_on_two_gpus(
    settings: list[str], seconds: tuple[float, float | None]
) -> None:
    found = predicted("grpo", "engine.tp_size=2", *settings, device="h200", n=2)
    for phase, measured in zip(found.phases, seconds, strict=True):
        assert measured is None or phase.seconds == pytest.approx(measured, rel=0.12)


def ways_of(found: Forecast) -> list[FittingChange]:
    return fitting_changes(found, lambda config, n: forecast(config, found.hardware, n, 256, 256))


def test_drafts_take_memory_for_logits() -> None:
    """A step with drafts computes up to 8 tokens of each of few samples."""

    def peak(*settings: str) -> int:
        found = predicted("grpo", "actor.path=Qwen/Qwen3-0.6B", "rollout.max_concurrent_rollouts=64", *settings)
        return next(phase.terms["activations"] for phase in found.phases if phase.name == "rollout")

    assert peak("rollout.speculation=on") - peak() == (512 - 64) * 151936 * 4


def test_a_run_that_does_not_fit_gets_ways_that_fit() -> None:
    found = predicted("grpo", "actor.path=Qwen/Qwen3-8B")
    assert not found.fits
    ways = ways_of(found)
    assert all(way.forecast.fits for way in ways)
    on_one = [way for way in ways if way.forecast.n_devices == 1]
    assert ways[: len(on_one)] == on_one
    assert [dict(way.changes) for way in on_one] == [
        {"actor.optimizer.type": "adam_8bit", "actor.offload": True},
        {"actor.offload": True},
        {"actor.use_lora": True},
    ]
    assert [way.learns_otherwise for way in on_one] == [False, False, True]
    with_8_bits, offloaded, adapters = on_one
    assert with_8_bits.forecast.step_seconds < offloaded.forecast.step_seconds
    assert "92 GiB of host memory" in offloaded.price
    assert "host" not in adapters.price
    assert all(way.changes["engine.world_size"] > 1 for way in ways[len(on_one) :])


def test_what_the_checks_of_a_section_refuse_is_no_way() -> None:
    """A reward model trains all its weights."""
    whole = load(get_algorithm("rw").config, "quickstart_rw", ["actor.path=Qwen/Qwen3-8B"])
    ways = ways_of(forecast(whole, hardware_of("h100-80gb"), 1, 256, 256))
    assert ways
    assert not any("actor.use_lora" in way.changes for way in ways)


def test_ways_keep_the_devices_if_there_are_any() -> None:
    """A run with three models on two devices fits with `enable_offload`, however many other pairs need more devices."""
    found = predicted("ppo", "actor.path=Qwen/Qwen3-8B", *KL, *CRITIC, n=2)
    ways = ways_of(found)
    assert {"enable_offload": True} in [dict(way.changes) for way in ways if way.forecast.n_devices == 2]


def test_a_pair_is_listed_only_if_it_is_faster_than_one_of_its_changes() -> None:
    ways = ways_of(predicted("ppo", "actor.path=Qwen/Qwen3-8B", *KL, *CRITIC))
    for one, other in itertools.permutations(ways, 2):
        if one.changes.items() < other.changes.items():
            assert other.forecast.step_seconds < 0.97 * one.forecast.step_seconds


def test_a_model_that_needs_many_devices_and_a_change_gets_both() -> None:
    ways = ways_of(predicted("grpo", "actor.path=Qwen/Qwen2.5-72B", device="h200"))
    assert {"engine.world_size", "engine.tp_size", "actor.optimizer.type"} in [set(way.changes) for way in ways]


def test_settings_in_effect_are_no_way() -> None:
    settings = ["actor.path=Qwen/Qwen3-32B", "actor.optimizer.type=adam_8bit", "rollout.drop_rollout_state=true"]
    found = predicted("grpo", *settings)
    ways = ways_of(found)
    assert ways
    keys = {key for way in ways for key in way.changes}
    assert not keys & {"actor.optimizer.type", "rollout.drop_rollout_state"}


AUTO_AND_OFF = ("actor.share_prefixes=auto", "actor.share_prefixes=off")


def test_shared_prompts_shorten_training_and_scoring() -> None:
    """Of 8 samples with 256 prompt tokens and 256 new ones, 9 of 16 halves are computed."""
    settings = [
        "actor.path=Qwen/Qwen3-4B",
        "actor.optimizer.type=adam_8bit",
        *KL,
        "actor.mb_spec.max_tokens_per_mb=4096",
    ]
    apart = predicted("grpo", *settings)
    shared = predicted("grpo", *settings, "actor.share_prefixes=auto")
    assert shared.phases[0].seconds == apart.phases[0].seconds
    for one, other in zip(shared.phases[1:], apart.phases[1:], strict=True):
        assert 9 / 16 * 0.9 < one.seconds / other.seconds < 0.75
    short = [forecast(config("grpo", *settings, f), hardware_of("h200"), 1, 16, 256) for f in AUTO_AND_OFF]
    assert short[0].step_seconds == short[1].step_seconds  # it would save less than a tenth


def test_several_teachers_divide_the_rows() -> None:
    """Two teachers of equal size score as many rows together as one, and have twice its weights."""
    path = ROOT / "examples/countdown/model"
    settings = [f"actor.path={path}_student", "teacher=default"]
    one = predicted("gspo", *settings, f"teacher.path={path}")
    two = predicted("gspo", *settings, f"teacher.models={{a: {path}, b: {path}}}", "teacher.by=skill")
    whole, *halves = (phase for found in (one, two) for phase in found.phases if phase.name.startswith("score teacher"))
    assert [half.name for half in halves] == ["score teacher.a", "score teacher.b"]
    assert sum(half.n_tokens for half in halves) == whole.n_tokens
    assert sum(half.seconds for half in halves) < 1.5 * whole.seconds  # twice the overhead of a pass
    alone = predicted("gspo", settings[0]).footprint.total_resident_bytes
    assert two.footprint.total_resident_bytes - alone == pytest.approx(
        2 * (one.footprint.total_resident_bytes - alone), rel=0.01
    )


def test_teachers_of_whole_distributions_are_in_the_training_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("qwen3-1.7b")))
    path = "actor.path=Qwen/Qwen3-0.6B"
    plain = predicted("gspo", path)
    other = predicted("gspo", path, "teacher=default", f"teacher.path={tmp_path}", "teacher.loss_type=reverse_kl")
    itself = ["teacher=default", "teacher.follows_actor=true", "teacher.prompt_key=hint", "teacher.loss_type=jsd"]
    own = predicted("gspo", path, *itself)
    for found in (other, own):
        assert [phase.name for phase in found.phases] == ["rollout", "train actor"]
    [without, with_other, with_own] = (found.phases[-1] for found in (plain, other, own))
    # A forward pass is at most a third of a step. The other model has three times the parameters.
    assert 1.15 < with_own.seconds / without.seconds < 1.45
    assert 1.5 < with_other.seconds / without.seconds < 2.3
    assert with_own.budget < without.budget  # the logits of two models
    shared = [predicted("gspo", path, "actor.share_prefixes=on", *more) for more in ([], itself)]
    assert shared[0].phases[-1].seconds < 0.7 * shared[1].phases[-1].seconds  # the teacher reads other prompts


def test_more_memory_and_devices_lower_the_need() -> None:
    settings = ["actor.path=Qwen/Qwen3-8B", "engine.zero_stage=2"]
    four, eight = (predicted("grpo", *settings, n=n) for n in (4, 8))
    assert four.footprint.total_resident_bytes > eight.footprint.total_resident_bytes
    assert four.step_seconds > eight.step_seconds
    with pytest.raises(ConfigError, match="does not divide the number of devices"):
        predicted("grpo", "actor.path=Qwen/Qwen3-8B", "engine.tp_size=2", n=3)


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_runs_without_a_rollout(recipe: str) -> None:
    settings = ["train_dataset.max_length=512", "valid_dataset=null", "actor.path=Qwen/Qwen3-0.6B"]
    found = forecast(
        load(get_algorithm(recipe).config, get_algorithm(recipe).default, settings), hardware_of("h200"), 1
    )
    assert [phase.name for phase in found.phases] == ["train actor"]
    assert "KV cache" not in found.phases[0].terms


@pytest.mark.parametrize("device", hardware_names())
def test_every_device_can_be_planned_for(device: str) -> None:
    assert predicted("gspo", "actor.path=Qwen/Qwen3-0.6B", device=device).step_seconds > 0
    assert local_devices()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["h100-80gb", "h200"]),
        ("1", ["h200"]),
        ("1,0", ["h200", "h100-80gb"]),
        ("GPU-aa", ["h100-80gb"]),
        ("0,7,1", ["h100-80gb"]),
        ("", ["cpu"]),
        ("-1", ["cpu"]),
    ],
)
def test_only_visible_devices_are_planned_for(
    visible: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "nvidia-smi"
    lists.write_text(
        "#!/bin/sh\necho 'GPU-aa1, NVIDIA H100 80GB HBM3, 81559, 9.0'\necho 'GPU-bb2, NVIDIA H200, 143771, 9.0'\n"
    )
    lists.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.name for device in local_devices()] == expected


def test_a_driver_that_fails_leaves_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [device.name for device in local_devices()] == ["cpu"]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_phases_a_picture_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "256", "--answer-tokens", "256"]
    run = ["python", "-m", "areno.recipes.gspo", "--config-name=gsm8k", "actor.path=Qwen/Qwen3-0.6B"]
    assert main(["plan", "--device", "h100-80gb", *lengths, *run]) == 0
    told = capsys.readouterr().out
    assert told.startswith("gspo, Qwen/Qwen3-0.6B, on H100 80 GB (79.2 GiB, of which 73.7 can be used)")
    assert "models: actor (trained by adam)\na step: " in told
    assert "prompts of 256 tokens, answers of 256 tokens\n" in told
    assert "rollout " in told
    assert "WG" in told
    assert "It fits. A step takes about" in told
    assert re.search(r"The record of a step for areno replay takes about [\d.]+ MiB on disk: 1 GiB", told)
    assert main(["plan", "--device", "h100-80gb", "areno", "train", "--ckpt", "Qwen/Qwen3-8B"]) == 1
    told = capsys.readouterr().out
    assert "It does not fit: train actor needs " in told
    assert "answers of 3,071 tokens (the limit; see --answer-tokens)" in told
    assert "actor.use_lora=true" in told
    assert "--device h100-80gb" not in told
    assert main(["plan", "--device", "h100", "--ckpt", "Qwen/Qwen3-8B", "actor.offload=true"]) == 0
    assert "It also takes 92 GiB of host memory for offload." in capsys.readouterr().out


def test_the_line_of_a_bar_is_where_usable_memory_ends(capsys: pytest.CaptureFixture[str]) -> None:
    for model, fits in (("Qwen/Qwen3-8B", False), ("Qwen/Qwen3-0.6B", True)):
        main(["plan", "--device", "h100", "--ckpt", model])
        lines = capsys.readouterr().out.splitlines()
        bars = [line for line in lines if re.fullmatch(r"(rollout|train actor) +[A-Z |]+", line)]
        assert len(bars) == 2
        assert len({bar.index("|") for bar in bars}) == 1
        assert all(bar.endswith("|") == fits for bar in bars)


def test_a_plan_for_this_machine_names_the_option_for_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areno.plan.hardware.local_devices", lambda: [hardware_of("cpu")])
    main(["plan", "--ckpt", "Qwen/Qwen3-8B"])
    assert capsys.readouterr().out.endswith("For a GPU, give its kind, such as --device h100-80gb.\n")


def test_the_commands_of_the_guide_work(capsys: pytest.CaptureFixture[str]) -> None:
    """The first one prints what the page shows after it."""
    page = ROOT / "docs/planning.md"
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("areno plan --")]
    printed = []
    for line in lines:
        assert main(shlex.split(line)[1:]) in (0, 1)
        printed.append(capsys.readouterr().out)
    assert len(printed) == 2
    assert all(" fits" in each or "not fit" in each for each in printed)
    _, (_, shown) = blocks(page)[:2]
    assert [line.rstrip() for line in printed[0].splitlines()] == shown.splitlines()


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "h200", "--json", "--ckpt", "Qwen/Qwen3-8B", "--algo", "grpo"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["algorithm"] == "grpo"
    assert found["peak_bytes"] == max(sum(phase["terms"].values()) for phase in found["phases"])
    assert found["step_seconds"] is None
    assert {phase["seconds"] for phase in found["phases"]} == {None}
    assert main(["plan", "--device", "h200", "--json", "--ckpt", "Qwen/Qwen3-8B", "enable_offload=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(sum(phase["seconds"] for phase in found["phases"]))
    assert found["host_bytes"] == pytest.approx(91.5 * 2**30, rel=0.01)
    assert found["usable_bytes"] < found["device_bytes"]
    assert found["rows"] == 256


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device h30 --ckpt Qwen/Qwen3-8B", "--device: is 'h30'"),
        ("--device a100 --ckpt Qwen/Qwen3-8B", "--device: is 'a100'; did you mean a100-80gb or a100-40gb?"),
        ("--device h200 Qwen/Qwen3-8B", "did you mean --ckpt Qwen/Qwen3-8B?"),
        ("--device h200 --ckpt Qwen/Qwen3-8B-unheard-of", "is not a local folder"),
        ("--device h200 --ckpt Qwen/Qwen3-8B --answer-tokens 4000", "--answer-tokens: is 4000, but an answer has at"),
        ("--device h200 --ckpt Qwen/Qwen3-8B --answer-tokens 4000", "at most 3071 tokens (--max-new-tokens)"),
        (
            "--device h200 --ckpt Qwen/Qwen3-8B --prompt-tokens 2000",
            "is 2000, but a prompt has at most 1024 tokens (--max",
        ),
        (
            "--device h200 --ckpt Qwen/Qwen3-8B --prompt-tokens 50000",
            "tokens of the model's context (--prompt-tokens 50000)",
        ),
        ("--device h200 sft --prompt-tokens 40", "is 40, with answers of 40 tokens, but a row has at most 64 tokens"),
        ("--devices 2 --ckpt Qwen/Qwen3-8B engine.world_size=4", "--devices: is 2, but engine.world_size=4"),
        ("--device h200 --ckpt Qwen/Qwen3-8B engine.tp_size=2", "engine.tp_size: is 2, which does not divide the"),
        ("--devices 0 --ckpt Qwen/Qwen3-8B", "--devices: is 0; it must be at least 1"),
        ("--device h200 gsp", "COMMAND: there is no 'gsp'; did you mean gspo?"),
        ("--device h200 --devices 3 --ckpt Qwen/Qwen3-8B engine.tp_size=2", "does not divide the number of devices"),
        (
            "--device h200 --ckpt Qwen/Qwen3-8B --tp-size 2",
            "--tp-size: is 2, which does not divide the number of devices",
        ),
        ("--device h200 --ckpt nowhere/at-all", "nowhere/at-all is not a local folder"),
        ("--device h200 --ckpt nowhere/at-all", "name a local model folder in --ckpt"),
        ("--device h200 gspo --config-name=nothing", "nothing"),
    ],
)
def test_bad_input_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) in (1, 2)
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


def test_a_damaged_config_is_named(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert main(["plan", "--device", "h200", "--ckpt", str(tmp_path)]) == 1
    assert "hidden_size" in capsys.readouterr().err


def test_passes_before_updates_and_epochs_of_a_critic_take_time() -> None:
    def seconds(recipe: str, *settings: str) -> dict[str, float]:
        path = "actor.path=Qwen/Qwen3-0.6B"
        return {phase.name: phase.seconds for phase in predicted(recipe, path, *settings).phases}

    plain = seconds("grpo")
    assert seconds("grpo", "variant=otb").keys() - plain.keys() == {"score actor again"}
    assert seconds("grpo", "variant=top_entropy").keys() - plain.keys() == {"score actor again"}
    two = "actor.ppo_n_minibatches=2"
    assert seconds("grpo", two, "variant=real")["train actor"] > seconds("grpo", two)["train actor"]
    once, twice = (seconds("ppo", *KL, *CRITIC, f"critic.epochs={n}")["train critic"] for n in (1, 2))
    assert 1.8 * once < twice < 2.1 * once


def test_frozen_attention_of_a_critic_takes_less_memory_and_time() -> None:
    path = "actor.path=Qwen/Qwen3-0.6B"
    full, frozen = (
        predicted("ppo", path, *KL, *CRITIC, f"critic.freeze_attention={value}") for value in ("false", "true")
    )
    n_layers, of_attention = 28, 1024 * (4096 + 2048) + 256
    saved = {phase.name: phase.seconds - other.seconds for phase, other in zip(full.phases, frozen.phases, strict=True)}
    assert {name for name, seconds in saved.items() if seconds} == {"train critic"}
    assert full.peak_memory_bytes - frozen.peak_memory_bytes == n_layers * of_attention * (4 + 4 + 8)

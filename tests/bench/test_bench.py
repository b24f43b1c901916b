"""python -m areno.bench: the command, its page and its profile."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from areno.bench import __main__ as bench
from areno.bench.profile import GROUPS, OWN_FOLDERS, Span, busy_s, group_of, idle_share, phase_table
from areno.errors import ConfigError
from tests.helpers.bench_runs import TINY, found, settings
from tests.helpers.tiny_engine import model_folder as tiny_folder


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("_split_kernel", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("_adam_8bit_kernel", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_draw_kernel", "sampling"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", "sampling"),
        ("_logprob_gradient_kernel", "head"),
        ("_qk_norm_rope_backward_kernel", "norm/rope/activation"),
        ("_states_kernel", "recurrent state"),
        ("_conv_and_gates_kernel", "recurrent state"),
        ("_gated_norm_backward_kernel", "recurrent state"),
        ("triton_poi_fused_mul_silu_0", "norm/rope/activation"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", "small torch kernels"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS


def test_a_name_of_our_kernels_is_in_one_group() -> None:
    """A profile knows no more of a kernel than its name."""
    folder, groups = Path(bench.__file__).parents[1] / "kernels", defaultdict(set)
    for file in [*folder.glob("*/**/triton*.py"), *folder.glob("*/**/gluon*.py")]:
        for name in re.findall(r"^ *def (\w+_kernel)\(", file.read_text(encoding="utf-8"), re.M):
            groups[name].add(OWN_FOLDERS[file.relative_to(folder).parts[0]])
    assert {name: found for name, found in groups.items() if len(found) > 1} == {}
    assert {name: group_of(name) for name in groups} == {name: min(found) for name, found in groups.items()}
    assert group_of("_all_reduce_norm_kernel") == "between GPUs"
    assert group_of("_gluon_few_rows_kernel") == "gemm"


def test_every_folder_of_our_kernels_has_a_group() -> None:
    folder = Path(bench.__file__).parents[1] / "kernels"
    assert {file.relative_to(folder).parts[0] for file in folder.glob("*/**/triton*.py")} == set(OWN_FOLDERS)
    assert set(OWN_FOLDERS.values()) < set(GROUPS)


def test_the_device_is_busy_while_any_kernel_runs() -> None:
    spans = [Span("b", 5_000, 9_000), Span("a", 0, 4_000), Span("c", 6_000, 7_000), Span("d", 8_000, 10_000)]
    assert busy_s(spans) == pytest.approx(9e-6)
    assert busy_s([]) == 0.0
    assert idle_share(9e-6, 12e-6) == pytest.approx(0.25)
    assert idle_share(2.0, 1.0) == 0.0


def test_a_profile_shows_groups_and_the_longest_kernels() -> None:
    ms = 1_000_000
    spans = [Span("nvjet_x", 0, 3 * ms), Span("nvjet_y", 3 * ms, 4 * ms), Span("_swiglu_kernel", 4 * ms, 5 * ms)]
    text = phase_table("train", spans, wall_s=0.011, plain_wall_s=0.01)
    lines = text.splitlines()
    assert "train: 0.0100 s" in lines[0]
    assert "idle 50.0 %" in lines[0]
    assert lines[2].split() == ["gemm", "0.00400", "80.00", "2", "2000.00"]
    assert lines[3].split()[:3] == ["norm/rope/activation", "0.00100", "20.00"]
    assert lines[5].endswith("[gemm] nvjet_x")


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
        ("rollout --profile file", "--profile: traces a CUDA device"),
        ("rollout --offload", "--offload: is for train, step, state, grid, not for rollout"),
        ("train --offload", "--offload: is for a CUDA device, and --device is cpu"),
        (
            "rollout --shape tiny --new-tokens 5000",
            "--new-tokens: makes rows of 5256 tokens, the model's context is 2048",
        ),
        ("rollout --shape tiny --uniform 2000 3000", "--uniform: makes rows of "),
        ("train --against vllm", "--against: vllm does rollout only, not train"),
        ("rollout --against vllm", "--against: vllm takes the first GPU"),
        ("rollout --against plain", "--against: plain is for --exact, --deterministic, --share-prefixes and --teacher"),
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


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.bench.arguments.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--against: transformers is not installed here"):
        settings("train --against transformers --device cpu")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/file", "--profile: the folder missing does not exist"),
        (".", "--profile: . is a folder; expected the path of a file"),
        ("file", "--profile: traces a CUDA device, and --device is cpu"),
    ],
)
def test_bad_arguments_are_reported_together(path: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["rollout", "--device", "cpu", "--profile", path, "--uniform", "9", "3"]) == 2
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "error: 2 problems in the configuration:",
        message,
        "--uniform: is 9 3; the first must not be above the second",
    ]


@pytest.mark.gpu
def test_a_profile_of_a_step_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.txt"
    out = found(f"step --shape tiny --profile {file} {TINY.replace('cpu', 'cuda:0')}", capsys)
    text = file.read_text()
    assert "== rollout" in text
    assert "== train" in text
    assert "gemm" in text
    assert 0 <= out["areno"]["train_idle_share"] < 1

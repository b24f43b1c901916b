"""The profile of a phase."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from areno import kernels
from benchmarks.__main__ import main
from benchmarks.profile import GROUPS, OWN_FOLDERS, KernelSpan, busy_s, idle_share, kernel_group, phase_table
from tests.helpers.bench_runs import TINY


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
    assert kernel_group(name) == group
    assert group in GROUPS


def test_a_name_of_our_kernels_is_in_one_group() -> None:
    """A profile knows no more of a kernel than its name."""
    folder, groups = Path(kernels.__file__).parent, defaultdict(set)
    for file in [*folder.glob("*/**/triton*.py"), *folder.glob("*/**/gluon*.py")]:
        for name in re.findall(r"^ *def (\w+_kernel)\(", file.read_text(encoding="utf-8"), re.M):
            groups[name].add(OWN_FOLDERS[file.relative_to(folder).parts[0]])
    assert {name: found for name, found in groups.items() if len(found) > 1} == {}
    assert {name: kernel_group(name) for name in groups} == {name: min(found) for name, found in groups.items()}
    assert kernel_group("_all_reduce_norm_kernel") == "between GPUs"
    assert kernel_group("_gluon_few_rows_kernel") == "gemm"


def test_every_folder_of_our_kernels_has_a_group() -> None:
    folder = Path(kernels.__file__).parent
    assert {file.relative_to(folder).parts[0] for file in folder.glob("*/**/triton*.py")} == set(OWN_FOLDERS)
    assert set(OWN_FOLDERS.values()) < set(GROUPS)


def test_the_device_is_busy_while_any_kernel_runs() -> None:
    spans = [
        KernelSpan("b", 5_000, 9_000),
        KernelSpan("a", 0, 4_000),
        KernelSpan("c", 6_000, 7_000),
        KernelSpan("d", 8_000, 10_000),
    ]
    assert busy_s(spans) == pytest.approx(9e-6)
    assert busy_s([]) == 0.0
    assert idle_share(9e-6, 12e-6) == pytest.approx(0.25)
    assert idle_share(2.0, 1.0) == 0.0


def test_a_profile_shows_groups_and_the_longest_kernels() -> None:
    ms = 1_000_000
    spans = [
        KernelSpan("nvjet_x", 0, 3 * ms),
        KernelSpan("nvjet_y", 3 * ms, 4 * ms),
        KernelSpan("_swiglu_kernel", 4 * ms, 5 * ms),
    ]
    text = phase_table("train", spans, wall_s=0.01)
    lines = text.splitlines()
    assert "train: 0.0100 s" in lines[0]
    assert "idle 50.0 %" in lines[0]
    assert lines[2].split() == ["gemm", "0.00400", "80.00", "2", "2000.00"]
    assert lines[3].split()[:3] == ["norm/rope/activation", "0.00100", "20.00"]
    assert lines[5].endswith("[gemm] nvjet_x")


@pytest.mark.gpu
def test_a_profile_of_a_step_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.txt"
    command = f"step --shape tiny --profile {file} {TINY.replace('cpu', 'cuda:0')} --json"
    assert main(command.split()) == 0
    out = json.loads(capsys.readouterr().out)
    text = file.read_text()
    assert "== rollout" in text
    assert "== train" in text
    assert "gemm" in text
    assert 0 <= out["areno"]["train_idle_share"] < 1

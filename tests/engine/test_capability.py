"""What runs on a GPU by its compute capability: simulated, from a T4 to the newest."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.config.experiments import ExperimentConfig
from areno.config.fp8 import FP8Config
from areno.config.models import ModelConfig
from areno.config.rollout import DecoderConfig
from areno.engine.processes.process_groups import ParallelContext
from areno.engine.worker import Worker
from areno.errors import ConfigError
from areno.kernels import backend
from areno.kernels.attention import choose_backend, has_flash_backward, varlen_attention
from areno.kernels.padding import CuSeqlens
from areno.layers.parallel import ParallelGroup
from areno.plan.plan import plan_of_actor
from areno.plan.startup_log import log_model
from tests.helpers.attention_rows import run_and_compare
from tests.helpers.tiny_engine import spec

pytest.importorskip("triton")
MODEL = Path(__file__).parents[2] / "examples/agentic/small_model/model"
Gpus = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Give this machine GPUs of these compute capabilities, as far as torch says so."""

    def of(*found: tuple[int, int]) -> None:
        def capability(device: Any = None) -> tuple[int, int]:
            return found[torch.device(device).index or 0]

        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {torch.device(device).index}")
        forget()

    def forget() -> None:
        from areno.kernels.jit import supports_pdl

        backend.can_compile_triton.cache_clear()
        supports_pdl.cache_clear()

    yield of
    forget()


@pytest.mark.parametrize(
    ("capability", "dtype", "attention", "triton", "early"),
    [
        ((6, 1), torch.float32, "sdpa", False, False),
        ((7, 0), torch.float32, "sdpa", True, False),
        ((7, 5), torch.float32, "sdpa", True, False),
        ((8, 0), torch.bfloat16, "varlen", True, False),
        ((8, 6), torch.bfloat16, "varlen", True, False),
        ((8, 9), torch.bfloat16, "varlen", True, False),
        ((9, 0), torch.bfloat16, "varlen", True, True),
        ((10, 0), torch.bfloat16, "varlen", True, True),
        ((12, 0), torch.bfloat16, "varlen", True, True),
    ],
)
def test_what_runs_where(
    gpus: Gpus, capability: tuple[int, int], dtype: torch.dtype, attention: str, triton: bool, early: bool
) -> None:
    from areno.kernels.jit import supports_pdl
    from areno.kernels.matmul.triton import dot_precision

    gpus(capability)
    device = torch.device("cuda:0")
    assert backend.default_dtype([device]) == dtype
    assert choose_backend("auto", device, dtype) == attention
    assert choose_backend("native", device, torch.float16) == attention
    assert choose_backend("native", device, torch.float32) == "sdpa"
    assert choose_backend("auto", device, dtype, exact=True) == "fixed_order"
    assert backend.supports_triton(device) is triton
    assert supports_pdl(device) is early
    on_cuda: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=device)
    assert dot_precision(on_cuda, "tf32") == ("tf32x3" if attention == "varlen" else "ieee")
    on_cuda.dtype = torch.float16
    assert has_flash_backward(on_cuda) is (attention == "varlen")


def test_gpus_of_other_machines_are_taken_for_new_ones() -> None:
    """The driver of a run on nodes may have none. The workers look at theirs."""
    assert backend.compute_capability("cpu") is None
    assert backend.compute_capability("cuda:63") is None
    assert backend.default_dtype(["cuda:63"]) == torch.bfloat16


@pytest.mark.parametrize("requested", ["auto", "native", "flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flash_is_native_before_ampere(gpus: Gpus, requested: Any, dtype: torch.dtype) -> None:
    gpus((9, 0), (7, 5))
    assert choose_backend(requested, "cuda:1", dtype) == "sdpa"


@pytest.mark.parametrize(
    ("requested", "attention", "warns"), [("flash", "sdpa", True), ("flash", "flash", False), ("auto", "sdpa", False)]
)
def test_flash_that_cannot_run_is_warned_of(
    caplog: pytest.LogCaptureFixture, requested: str, attention: str, warns: bool
) -> None:
    info = SimpleNamespace(
        cost=SimpleNamespace(experts=None), tp_sums="", n_params=1, dtype="float32", attn_backend=attention
    )
    sections = {
        "actor": SimpleNamespace(lora=None, fp8=None, fp8_kv=False),
        "engine": SimpleNamespace(attn_backend=requested),
    }
    spec = SimpleNamespace(**sections, addresses=["cuda:0"], share_prefixes="off")
    engine: Any = SimpleNamespace(info=info, spec=spec, memory_table=lambda: ("", ""))
    with caplog.at_level(logging.WARNING):
        log_model(engine)
    told = "engine.attn_backend is flash, which needs a GPU of compute capability 8.0 or more; native runs instead"
    assert caplog.messages == [told] * warns


def plan(dtype: Any, devices: list[str]) -> str:
    actor = ModelConfig(path=str(MODEL), dtype=dtype)
    return plan_of_actor(ExperimentConfig(experiment_name="e", actor=actor), lambda: devices).spec.dtype


def test_the_type_of_a_run_is_that_of_its_oldest_gpu(gpus: Gpus) -> None:
    gpus((9, 0), (7, 5))
    assert plan("auto", ["cuda:0"]) == "bfloat16"
    assert plan("auto", ["cuda:0", "cuda:1"]) == "float32"
    assert plan("auto", ["cpu"]) == "float32"
    assert plan("bfloat16", ["cpu"]) == "bfloat16"
    with pytest.raises(ConfigError) as caught:
        plan("bfloat16", ["cuda:0", "cuda:1"])
    told = "actor.dtype: is bfloat16, which GPU 1 (compute capability 7.5) does not have; set it to float32"
    assert str(caught.value) == told


def test_fp8_needs_units_for_it_or_a_cpu(gpus: Gpus, tmp_path: Path) -> None:
    gpus((8, 9), (8, 0))
    actor = ModelConfig(path=str(MODEL), fp8_config=FP8Config())
    for devices in (["cpu"], ["cuda:0"]):
        plan_of_actor(ExperimentConfig(experiment_name="e", actor=actor), lambda devices=devices: devices)
    told = r"^actor\.fp8_config: is set, but GPU 1 \(compute capability 8\.0\) has no FP8 units"
    with pytest.raises(ConfigError, match=told):
        plan_of_actor(ExperimentConfig(experiment_name="e", actor=actor), lambda: ["cuda:0", "cuda:1"])
    alone = ParallelGroup()
    context = ParallelContext(0, torch.device("cuda:1"), alone, alone, alone, alone)
    with pytest.raises(ConfigError, match=told):
        Worker(spec(tmp_path, fp8=FP8Config()), context)
    told = r"^rollout\.kv_cache_dtype: is set, but GPU 1 \(compute capability 8\.0\) has no FP8 units"
    with pytest.raises(ConfigError, match=told):
        Worker(spec(tmp_path, fp8_kv=True), context)
    config, decoder = ExperimentConfig(experiment_name="e", actor=actor), DecoderConfig(kv_cache_dtype="fp8")
    assert plan_of_actor(config, lambda: ["cuda:0"], decoder).spec.actor.fp8_kv
    with pytest.raises(ConfigError, match=told):
        plan_of_actor(replace(config, actor=replace(actor, fp8_config=None)), lambda: ["cuda:1"], decoder)


def test_a_worker_looks_at_its_own_gpu(gpus: Gpus, tmp_path: Path) -> None:
    gpus((7, 5))
    alone = ParallelGroup()
    context = ParallelContext(0, torch.device("cuda:0"), alone, alone, alone, alone)
    with pytest.raises(ConfigError, match=r"^actor\.dtype: is bfloat16, which GPU 0 \(compute capability 7\.5\)"):
        Worker(spec(tmp_path, dtype="bfloat16"), context)


@pytest.mark.parametrize("case", ["one", "ragged", "tails", "mixed"])
@pytest.mark.parametrize("window", [None, 4])
def test_sdpa_on_a_gpu_never_holds_all_scores(monkeypatch: pytest.MonkeyPatch, case: str, window: int | None) -> None:
    """Each query head gets its key head, since the kernel that holds no scores knows no groups. Checked on the CPU."""
    real, calls = F.scaled_dot_product_attention, []

    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        calls.append(how)
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return real(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    run_and_compare(case, (4, 2), 8, "sdpa", torch.float32, "cpu", window)
    assert calls
    assert not any(how["enable_gqa"] for how in calls)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_in_float32_holds_no_scores() -> None:
    """Of a row of 8,192 tokens and eight heads they would take 2 GiB."""
    q, k, v = (torch.randn(8192, heads, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2))
    rows = torch.tensor([0, 8192], dtype=torch.int32, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    varlen_attention(q, k, v, CuSeqlens(rows, rows, 8192, 8192), "sdpa").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe", "tiny-qwen3.5"])
def test_a_step_as_on_a_t4(shape: str, tmp_path: Path) -> None:
    """With the kernels that a T4 gets, rollout and training agree."""
    sizes = "--prompts 2 --samples 4 --prompt-len 200 --new-tokens 20 --repeats 1 --json"
    command = [sys.executable, "-m", "tests.as_turing", "step", "--shape", shape, *sizes.split()]
    command += ["--profile", str(tmp_path / "trace.json")]  # in this one process
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, cwd=MODEL.parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["dtype"], found["areno"]["attention"]) == ("float32", "sdpa")
    assert found["areno"]["logp_abs_diff_max"] < 1e-3

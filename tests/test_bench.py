from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine import model_folder as tiny_folder
from tiny_engine import spec

from areno.bench import __main__ as bench
from areno.bench.against.with_transformers import WithTransformers
from areno.bench.against.with_vllm import WithVllm
from areno.bench.arguments import Settings, parse
from areno.bench.floors import Rates, decode_s, floors, prefill_s
from areno.bench.profile import GROUPS, OWN_FOLDERS, Span, busy_s, group_of, idle_share, phase_table
from areno.bench.shapes import model_folder
from areno.bench.timing import Timed, measure
from areno.bench.work import Work, row
from areno.engine.engine import Engine
from areno.errors import ConfigError, EngineError
from areno.models.cost import Cost, forward_flops, pairs, train_flops
from areno.models.registry import load_config
from areno.types import TrainSequence

TINY = "--device cpu --prompts 2 --samples 3 --prompt-len 6 --new-tokens 5 --tokens-per-mb 64 --repeats 2"
H200 = Rates(copy_bytes_s=4.3e12, matmul_flops_s=770e12)


def settings(command: str) -> Settings:
    return parse(command.split())


def found(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert bench.main([*command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cost_of(shape: str, folder: Path, itemsize: int = 2) -> Cost:
    return Cost.of(load_config(model_folder(shape, folder / shape)[0]), itemsize)


# -- floors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "n_params"),  # as the model cards and the safetensors indices on the hub say
    [
        ("qwen3-0.6b", 596_049_920),
        ("1.7b", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
        ("30b-a3b", 30_532_122_624),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_named_shapes_have_the_published_sizes(shape: str, n_params: int, tmp_path: Path) -> None:
    assert cost_of(shape, tmp_path).n_params == n_params


def test_a_token_of_keys_and_values_takes_what_the_config_says(tmp_path: Path) -> None:
    cost = cost_of("0.6b", tmp_path)
    assert cost.kv_bytes == 28 * 2 * 8 * 128 * 2
    assert cost.attn_flops == 28 * 16 * 128 * 2 * 2  # q.k and p.v, a multiplication and an addition each
    untied = cost_of("8b", tmp_path)
    assert untied.n_params - untied.active_params == 151936 * 4096  # the table that is only looked up into


COST = Cost(n_params=100, body_params=70, head_params=30, kv_bytes=10, attn_flops=4, itemsize=2)


def test_decode_floors_of_a_small_batch_worked_by_hand() -> None:
    work = Work.fixed(n_prompts=2, n_samples=2, prompt_len=10, new_tokens=3)
    moving = Rates(copy_bytes_s=100.0, matmul_flops_s=1e12)
    # Two steps. Weights 200 bytes each; keys of 4 samples: 4 * 11 and 4 * 12 tokens; together 2 * 10 + 4 * 1 and 4 * 2.
    assert decode_s(COST, work, moving, shared=False) == pytest.approx((200 + 440 + 200 + 480) / 100)
    assert decode_s(COST, work, moving, shared=True) == pytest.approx((200 + 240 + 200 + 280) / 100)
    multiplying = Rates(copy_bytes_s=1e12, matmul_flops_s=10.0)
    by_hand = (2 * 100 * 4 + 4 * 44 + 2 * 100 * 4 + 4 * 48) / 10
    for shared in (False, True):  # what is read together is multiplied apart all the same
        assert decode_s(COST, work, multiplying, shared=shared) == pytest.approx(by_hand)


def test_decode_floors_count_only_samples_that_still_run() -> None:
    work = Work(prompt_lens=(7, 20, 3), new_lens=(4, 1, 9), n_samples=2, name="")
    rates = Rates(copy_bytes_s=50.0, matmul_flops_s=300.0)
    for shared in (False, True):
        total = 0.0
        for j in range(1, 9):
            read = flops = 0.0
            for prompt_len, new_len in zip(work.prompt_lens, work.new_lens, strict=True):
                if new_len > j:
                    read += (prompt_len + 2 * j) if shared else 2 * (prompt_len + j)
                    flops += 2 * (2 * 100 + 4 * (prompt_len + j))
            total += max((200 + 10 * read) / 50, flops / 300)
        assert decode_s(COST, work, rates, shared=shared) == pytest.approx(total)


def test_prefill_is_of_every_prompt_once_with_a_head_for_its_last_token() -> None:
    work = Work.fixed(n_prompts=2, n_samples=5, prompt_len=3, new_tokens=4)
    flops = 2 * 70 * 6 + 2 * 30 * 2 + 4 * 2 * (1 + 2 + 3)
    assert prefill_s(COST, work, Rates(copy_bytes_s=1e12, matmul_flops_s=10.0)) == pytest.approx(flops / 10)


def test_training_flops_are_six_for_each_parameter_and_causal_attention() -> None:
    assert pairs([1, 3]) == 1 + 6
    assert train_flops(COST, [4, 4]) == 6 * 100 * 8 + 3 * 4 * 2 * (4 * 5 / 2)
    assert train_flops(COST, [4, 4], head_tokens=2) == 6 * 70 * 8 + 6 * 30 * 2 + 3 * 4 * 20
    assert forward_flops(COST, [4, 4]) == train_flops(COST, [4, 4]) / 3


def test_floors_are_those_that_others_worked_out(tmp_path: Path) -> None:
    """The design's table, made for one H200 by hand: decode without prefill, the lengths' mean times the steps."""
    work = Work.fixed(32, 8, 256, 256)
    for shape, tok_s in (("0.6b", 88_000), ("4b", 49_000), ("8b", 37_000)):
        ordinary = decode_s(cost_of(shape, tmp_path), work, H200, shared=False)
        assert work.n_new / ordinary == pytest.approx(tok_s, rel=0.02)
    train = floors(cost_of("0.6b", tmp_path), work, H200, "train")
    assert train["train_tok_s"] == pytest.approx(205_000, rel=0.01)
    step = floors(cost_of("0.6b", tmp_path), work, H200, "step")
    assert step["step_s"] == pytest.approx(1.4, rel=0.02)
    long = Work.uniform(256, 1, 100, 1024)
    assert floors(cost_of("0.6b", tmp_path), long, H200, "rollout")["rollout_ordinary_tok_s"] == pytest.approx(
        36_000, rel=0.05
    )


# -- work and timing ---------------------------------------------------------------------------------------------------


def test_uniform_work_draws_both_lengths_from_the_range() -> None:
    work = Work.uniform(500, 1, 100, 1024)
    assert work == Work.uniform(500, 1, 100, 1024)
    for lens in (work.prompt_lens, work.new_lens):
        assert min(lens) >= 100
        assert max(lens) <= 1024
        assert sum(lens) / 500 == pytest.approx(562, rel=0.06)
    assert work.prompt_lens != work.new_lens


def test_rows_are_prompts_with_their_completions() -> None:
    work = Work(prompt_lens=(2, 5), new_lens=(3, 1), n_samples=2, name="")
    rows = work.random_rows(50, seed=1)
    prompts = work.prompts(50, seed=1)
    assert work.row_lens == [5, 5, 6, 6] == [len(item.tokens or []) for item in rows]
    assert [len(prompt) for prompt in prompts] == [2, 5]
    assert (rows[3].tokens or [])[:5] == prompts[1]
    assert rows[0].prompt_mask == [True, True, False, False, False]
    assert (rows[0].tokens or [])[2:] != (rows[1].tokens or [])[2:]
    assert work.n_new == 8


class Counting:
    """A contender that does nothing."""

    name, vocab_size = "counting", 10

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def rollout(self, work: Work, prompts: list[list[int]]) -> list[TrainSequence]:
        self.calls.append(("rollout", work.n_new))
        return [row(prompt, [1] * 2, [0.0] * 2, 0) for prompt in prompts]

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        self.calls.append(("train", len(rows)))
        return {"n": len(self.calls)}

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[list[float]]:
        self.calls.append(("logprobs", len(rows)))
        return []


def test_repeats_come_after_a_warm_up_that_is_not_counted() -> None:
    counting, work = Counting(), Work.fixed(2, 1, 3, 4)
    timed = measure(counting, "step", work, repeats=2, warm_up=work.with_new_at_most(2))
    assert counting.calls == [
        *(("rollout", 4), ("train", 2), ("rollout", 2)),
        *(("rollout", 8), ("train", 2), ("rollout", 2)) * 2,
    ]
    assert {name: len(times) for name, times in timed.seconds.items()} == {
        "rollout": 2, "train": 2, "step": 2, "prefill": 2,
    }  # fmt: skip
    assert timed.stats == [{"n": 5}, {"n": 8}]


def test_figures_are_medians_with_their_spread() -> None:
    work = Work.fixed(2, 2, 6, 4)
    seconds = {"rollout": [1.0, 2.0, 1.5], "train": [4.0, 2.0], "step": [6.0, 4.0], "prefill": [0.25]}
    figures = Timed(seconds=seconds).figures(work)
    assert figures["rollout_s"] == 1.5
    assert figures["rollout_spread"] == pytest.approx(1 / 1.5)
    assert figures["rollout_tok_s"] == pytest.approx(16 / 1.5)
    assert figures["train_tok_s"] == pytest.approx(40 / 3)
    assert figures["decode_s"] == 1.25
    assert figures["other_s"] == 0.5


# -- profile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("_piece_kernel", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("_adam_8bit_kernel", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_draw_kernel", "sampling"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", "sampling"),
        ("_logprob_gradient_kernel", "head"),
        ("_qk_norm_rope_backward_kernel", "norm/rope/activation"),
        ("triton_poi_fused_mul_silu_0", "norm/rope/activation"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", "small torch kernels"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS


def test_every_folder_of_our_kernels_has_a_group() -> None:
    folder = Path(bench.__file__).parents[1] / "kernels"
    assert {file.parent.name for file in folder.glob("*/triton*.py")} == set(OWN_FOLDERS)
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


# -- the command -------------------------------------------------------------------------------------------------------


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
        assert ours["prefill_s"] + ours["decode_s"] == pytest.approx(ours["rollout_s"])
        assert ours["rollout_percent_of_ordinary_floor"] == pytest.approx(
            100 * floor["rollout_ordinary_s"] / ours["rollout_s"]
        )
        assert floor["rollout_shared_s"] <= floor["rollout_ordinary_s"]
        assert ours["kv_cache_gib"] * 2**30 >= 6 * 11 * 2 * 2 * 2 * 16 * 4
    if kind in ("train", "step"):
        assert ours["mfu"] == pytest.approx(floor["train_s"] / ours["train_s"])
        assert ours["needed_mfu"] < ours["mfu"]
    assert out["ratio"] == {}


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
        (
            "rollout --shape tiny --new-tokens 5000",
            "--new-tokens: makes rows of 5256 tokens, the model's context is 2048",
        ),
        ("rollout --shape tiny --uniform 2000 3000", "--uniform: makes rows of "),
        ("train --against vllm", "--against: vllm does rollout only, not train"),
        ("rollout --against vllm", "--against: vllm takes the first GPU"),
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


# -- the others --------------------------------------------------------------------------------------------------------


def test_transformers_does_the_same_work_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"step --shape {tiny_folder(tmp_path)} --no-recompute {TINY} --against transformers --against-repeats 1"
    out = found(command, capsys)
    assert set(out["ratio"]["transformers"]) == {"rollout", "train", "step"}
    for phase, ratio in out["ratio"]["transformers"].items():
        assert ratio == pytest.approx(out["areno"][f"{phase}_tok_s"] / out["transformers"][f"{phase}_tok_s"])
    assert out["transformers"]["parts"] == 1


@pytest.fixture
def same_weights(tmp_path: Path) -> str:
    """A folder with random weights in it."""
    with Engine(spec(tiny_folder(tmp_path / "shape"))) as engine:
        engine.save(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def test_transformers_gives_the_log_probabilities_of_what_it_drew(same_weights: str) -> None:
    """Prompts of several lengths are padded on the left; the engine scores the very same rows."""
    work = Work(prompt_lens=(3, 9, 5), new_lens=(6, 2, 4), n_samples=2, name="")
    theirs = WithTransformers(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, False)
    torch.manual_seed(0)
    rows = theirs.rollout(work, work.prompts(theirs.vocab_size, 0))
    assert [len(item.tokens or []) for item in rows] == work.row_lens
    assert rows[0].tokens != rows[1].tokens
    with Engine(spec(Path(same_weights), random_init=False)) as engine:
        scored = engine.logprobs("actor", [item.tokens or [] for item in rows])
    again = theirs.logprobs(rows)
    for item, ours, hf in zip(rows, scored, again, strict=True):
        n_prompt = (item.prompt_mask or []).count(True)
        assert (item.logprobs or [])[n_prompt:] == pytest.approx(ours[n_prompt:], abs=2e-4)
        assert hf[: len(ours) - 1] == pytest.approx(ours[1:], abs=2e-4)


def test_transformers_trains_towards_rows_of_positive_advantage(same_weights: str) -> None:
    work = Work(prompt_lens=(3, 7), new_lens=(6, 2), n_samples=2, name="")
    theirs = WithTransformers(settings("train --device cpu --tokens-per-mb 30"), same_weights, False)
    theirs._optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-3, fused=True)
    rows = work.random_rows(theirs.vocab_size, 0)

    def worth() -> float:
        """The sum that a step raises: advantage times log-probability."""
        return sum(
            advantage * logprob
            for item, scored in zip(rows, theirs.logprobs(rows), strict=True)
            for advantage, logprob in zip((item.advantages or [])[1:], scored, strict=False)
        )

    before = worth()
    theirs.train(rows)
    assert worth() > before + 0.1


def test_transformers_does_in_parts_what_memory_has_no_room_for(
    same_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(prompt_lens=(3, 4, 5, 6, 7), new_lens=(2, 2, 2, 2, 2), n_samples=2, name="")
    theirs = WithTransformers(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, False)
    generate, tried = theirs._generate, []

    def generate_up_to_two(prompts: list[list[int]], n_new: int, n_samples: int) -> Any:
        tried.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("too much")
        return generate(prompts, n_new, n_samples)

    monkeypatch.setattr(theirs, "_generate", generate_up_to_two)
    theirs.prompts_at_once = 5
    prompts = work.prompts(theirs.vocab_size, 0)
    rows = theirs.rollout(work, prompts)
    assert tried == [5, 2, 2, 1]
    assert [(item.tokens or [])[: len(prompt)] for item, prompt in zip(rows[::2], prompts, strict=True)] == prompts
    monkeypatch.setattr(theirs, "_generate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(EngineError, match="out of device memory with a single row"):
        theirs.rollout(work, prompts)


def test_vllm_is_asked_for_log_probabilities_and_all_lengths(
    same_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class LLM:
        def __init__(self, **options: Any):
            asked.append(options)

        def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
            asked.extend(params)
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            token_ids=[sample] * one.max_tokens,
                            logprobs=[{sample: SimpleNamespace(logprob=-float(t))} for t in range(one.max_tokens)],
                        )
                        for sample in range(one.n)
                    ]
                )
                for one in params
            ]

    module = ModuleType("vllm")
    module.__dict__.update(LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", module)
    work = Work(prompt_lens=(3, 4), new_lens=(2, 5), n_samples=2, name="")
    theirs = WithVllm(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, True)
    rows = theirs.rollout(work, work.prompts(theirs.vocab_size, 0))
    assert asked[0]["load_format"] == "dummy"
    assert [one.max_tokens for one in asked[1:]] == [2, 5]
    assert all(one.logprobs == 0 and one.ignore_eos for one in asked[1:])
    assert [len(item.tokens or []) for item in rows] == work.row_lens
    assert (rows[3].logprobs or [])[-2:] == [-3.0, -4.0]
    assert math.isclose(theirs.start_s, 0.0, abs_tol=1.0)
    with pytest.raises(EngineError, match="vllm does not train"):
        theirs.train(rows)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_profile_of_a_step_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.txt"
    out = found(f"step --shape tiny --profile {file} {TINY.replace('cpu', 'cuda:0')}", capsys)
    text = file.read_text()
    assert "== rollout" in text
    assert "== train" in text
    assert "gemm" in text
    assert 0 <= out["areno"]["train_idle_share"] < 1

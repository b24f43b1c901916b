"""Floors of the benchmark, worked out by hand; its work, its repeats and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.bench.device import min_decode_s, min_prefill_s, phase_floors
from areno.bench.timing import PhaseTimes, measure
from areno.bench.work import Workload, model_folder, rows_of_outputs, synthetic_row
from areno.cost.flops import TokenCost, attention_pairs, forward_flops, train_flops
from areno.cost.time import Rates
from areno.models.registry import load_config
from areno.trainers.rows import token_rows
from areno.types import GenerationOutput, TrainSequence
from tests.helpers.bench_runs import H200


def cost_of(shape: str, folder: Path, itemsize: int = 2) -> TokenCost:
    return TokenCost.from_config(load_config(model_folder(shape, folder / shape)[0]), itemsize)


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


COST = TokenCost(n_params=100, body_params=70, head_params=30, kv_bytes=10, attn_flops=4, itemsize=2)


def test_decode_floors_of_a_small_batch_worked_by_hand() -> None:
    work = Workload.fixed(n_prompts=2, n_samples=2, prompt_len=10, new_tokens=3)
    moving = Rates(copy_bytes_s=100.0, matmul_flops_s=1e12)
    # Two steps. Weights 200 bytes each; keys of 4 samples: 4 * 11 and 4 * 12 tokens; together 2 * 10 + 4 * 1 and 4 * 2.
    assert min_decode_s(COST, work, moving, shared=False) == pytest.approx((200 + 440 + 200 + 480) / 100)
    assert min_decode_s(COST, work, moving, shared=True) == pytest.approx((200 + 240 + 200 + 280) / 100)
    multiplying = Rates(copy_bytes_s=1e12, matmul_flops_s=10.0)
    by_hand = (2 * 100 * 4 + 4 * 44 + 2 * 100 * 4 + 4 * 48) / 10
    for shared in (False, True):  # what is read together is multiplied apart all the same
        assert min_decode_s(COST, work, multiplying, shared=shared) == pytest.approx(by_hand)


def test_decode_floors_count_only_samples_that_still_run() -> None:
    work = Workload(prompt_lens=(7, 20, 3), new_lens=(4, 1, 9), n_samples=2, name="")
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
        assert min_decode_s(COST, work, rates, shared=shared) == pytest.approx(total)


def test_prefill_is_of_every_prompt_once_with_a_head_for_its_last_token() -> None:
    work = Workload.fixed(n_prompts=2, n_samples=5, prompt_len=3, new_tokens=4)
    flops = 2 * 70 * 6 + 2 * 30 * 2 + 4 * 2 * (1 + 2 + 3)
    assert min_prefill_s(COST, work, Rates(copy_bytes_s=1e12, matmul_flops_s=10.0)) == pytest.approx(flops / 10)


def test_adapters_are_read_and_multiplied_beside_the_weights() -> None:
    work, adapted = (
        Workload.fixed(n_prompts=1, n_samples=2, prompt_len=3, new_tokens=2),
        replace(COST, adapter_params=8),
    )
    moving, multiplying = Rates(copy_bytes_s=1.0, matmul_flops_s=1e12), Rates(copy_bytes_s=1e12, matmul_flops_s=1.0)
    for floor, n_rows in ((min_decode_s, 2), (min_prefill_s, 3)):
        how: dict[str, Any] = {"shared": True} if floor is min_decode_s else {}
        assert floor(adapted, work, moving, **how) == pytest.approx(floor(COST, work, moving, **how) + 2 * 8)
        more = floor(adapted, work, multiplying, **how) - floor(COST, work, multiplying, **how)
        assert more == pytest.approx(2 * 8 * n_rows)


def test_training_flops_are_six_for_each_parameter_and_causal_attention() -> None:
    assert attention_pairs([1, 3]) == 1 + 6
    assert train_flops(COST, [4, 4]) == 6 * 100 * 8 + 3 * 4 * 2 * (4 * 5 / 2)
    assert train_flops(COST, [4, 4], head_tokens=2) == 6 * 70 * 8 + 6 * 30 * 2 + 3 * 4 * 20
    assert forward_flops(COST, [4, 4]) == train_flops(COST, [4, 4]) / 3


def test_floors_are_those_that_others_worked_out(tmp_path: Path) -> None:
    """The design's table, made for one H200 by hand: decode without prefill, the lengths' mean times the steps."""
    work = Workload.fixed(32, 8, 256, 256)
    for shape, tok_s in (("0.6b", 88_000), ("4b", 49_000), ("8b", 37_000)):
        ordinary = min_decode_s(cost_of(shape, tmp_path), work, H200, shared=False)
        assert work.n_new_tokens / ordinary == pytest.approx(tok_s, rel=0.02)
    train = phase_floors(cost_of("0.6b", tmp_path), work, H200, "train")
    assert train["train_tok_s"] == pytest.approx(205_000, rel=0.01)
    step = phase_floors(cost_of("0.6b", tmp_path), work, H200, "step")
    assert step["step_s"] == pytest.approx(1.4, rel=0.02)
    long = Workload.uniform(256, 1, 100, 1024)
    assert phase_floors(cost_of("0.6b", tmp_path), long, H200, "rollout")["rollout_ordinary_tok_s"] == pytest.approx(
        36_000, rel=0.05
    )


def test_uniform_work_draws_both_lengths_from_the_range() -> None:
    work = Workload.uniform(500, 1, 100, 1024)
    assert work == Workload.uniform(500, 1, 100, 1024)
    for lens in (work.prompt_lens, work.new_lens):
        assert min(lens) >= 100
        assert max(lens) <= 1024
        assert sum(lens) / 500 == pytest.approx(562, rel=0.06)
    assert work.prompt_lens != work.new_lens


def test_rows_are_prompts_with_their_completions() -> None:
    work = Workload(prompt_lens=(2, 5), new_lens=(3, 1), n_samples=2, name="")
    rows = work.random_rows(50, seed=1)
    tokens = [each.tolist() for each in token_rows(rows)]
    prompts = work.random_prompts(50, seed=1)
    assert work.row_lens == [5, 5, 6, 6] == list(map(len, tokens))
    assert [len(prompt) for prompt in prompts] == [2, 5]
    assert tokens[3][:5] == prompts[1]
    assert np.asarray(rows[0].prompt_mask).tolist() == [True, True, False, False, False]
    assert tokens[0][2:] != tokens[1][2:]
    assert work.n_new_tokens == 8


class Counting:
    """A contender that does nothing."""

    name, vocab_size = "counting", 10

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def rollout(self, work: Workload, prompts: list[list[int]]) -> list[TrainSequence]:
        self.calls.append(("rollout", work.n_new_tokens))
        return [synthetic_row(prompt, [1] * 2, [0.0] * 2, 0) for prompt in prompts]

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        self.calls.append(("train", len(rows)))
        return {"n": len(self.calls)}

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[list[float]]:
        self.calls.append(("logprobs", len(rows)))
        return []


def test_repeats_come_after_a_warm_up_that_is_not_counted() -> None:
    counting, work = Counting(), Workload.fixed(2, 1, 3, 4)
    timed = measure(counting, "step", work, repeats=2, warm_up=work.with_max_new_tokens(2))
    assert counting.calls == [
        *(("rollout", 4), ("train", 2), ("rollout", 2)),
        *(("rollout", 8), ("train", 2), ("rollout", 2)) * 2,
    ]
    assert {name: len(times) for name, times in timed.seconds.items()} == {
        "rollout": 2,
        "train": 2,
        "step": 2,
        "prefill": 2,
    }
    assert timed.stats == [{"n": 5}, {"n": 8}]


def test_figures_are_medians_with_their_spread() -> None:
    work = Workload.fixed(2, 2, 6, 4)
    seconds = {"rollout": [1.0, 2.0, 1.5], "train": [4.0, 2.0], "step": [6.0, 4.0], "prefill": [0.25]}
    figures = PhaseTimes(seconds=seconds).phase_figures(work)
    assert figures["rollout_s"] == 1.5
    assert figures["rollout_spread"] == pytest.approx(1 / 1.5)
    assert figures["rollout_tok_s"] == pytest.approx(16 / 1.5)
    assert figures["train_tok_s"] == pytest.approx(40 / 3)
    assert figures["decode_s"] == 1.25
    assert figures["other_s"] == 0.5


def test_rows_of_many_outputs_are_those_of_each_output() -> None:
    def output(request_id: int, sample: int, n_tokens: int) -> GenerationOutput:
        tokens, logprobs = np.arange(n_tokens, dtype=np.int32), -np.arange(n_tokens) / 7
        given = {"tokens": tokens, "logprobs": logprobs, "versions": [0] * n_tokens, "finish_reason": "stop"}
        return GenerationOutput(request_id=request_id, sample=sample, **given)

    prompts = [[5, 6, 7], [8]]
    outputs = {0: [output(0, 0, 4), output(0, 1, 1)], 1: [output(1, 0, 0), output(1, 1, 3)]}
    expected = [
        synthetic_row(prompts[index], vars(each)["tokens"], vars(each)["logprobs"], each.sample)
        for index, of_prompt in outputs.items()
        for each in of_prompt
    ]
    found = rows_of_outputs(prompts, outputs)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "prompt_mask", "logprobs", "advantages"):
            np.testing.assert_array_equal(vars(one)[name], vars(other)[name])
            assert vars(one)[name].dtype == vars(other)[name].dtype
    assert rows_of_outputs(prompts, {0: []}) == []

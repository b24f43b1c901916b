"""What the decoder samples from each family: the log-probabilities of a training pass, and the same tokens whatever is
shared, cut, preempted or released."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.cost.kv_layout import KVGroup, KVLayout
from areno.engine.decoder.attention_split import split_attention
from areno.engine.decoder.block_manager import BlockManager, BlockTables
from areno.engine.decoder.scheduler import Scheduler
from areno.engine.decoder.sequence import Sequence
from areno.layers.parallel import ParallelGroup
from areno.types import GenerationRequest, SamplingParams
from tests.helpers.drafters import KnownDrafter
from tests.helpers.family_cases import CASES, DENSE, EXPERTS, random_model
from tests.helpers.family_rollouts import REQUESTS, decode, prompt, trained_logprobs
from tests.helpers.two_ranks import load, on_two_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "cut prompts": {"max_prefill_tokens": 7},
    "few blocks": {"n_blocks": 14},
}


SHORT = [  # for rows that run alone, each of which takes as many steps as it has tokens: at least as long as a block
    dataclasses.replace(each, n_samples=n_samples, params=dataclasses.replace(each.params, max_new_tokens=n_new))
    for each, n_samples, n_new in zip(REQUESTS, (1, 1, 1, 2), (5, 5, 9, 4), strict=True)
]


ALL = [*CASES, *DENSE, *EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_rollout_agrees_with_training_however_it_is_run(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    model = load(tmp_path)
    found = {name: decode(model, **settings) for name, settings in SETTINGS.items()}
    outputs, _ = found["roomy"]
    completions = {key: out.tokens for key, out in outputs.items()}
    for wrong in () if model.config.delta else (0.0, 0.5):  # models with recurrent states have no drafts
        found[f"drafts, {wrong} wrong"] = decode(model, drafter=KnownDrafter(completions, 101, wrong), n_blocks=40)
    assert sum(map(len, (out.tokens for out in outputs.values()))) == 3 * 10 + 2 * 12 + 16 + 2 * 6
    for out, expected in zip(outputs.values(), trained_logprobs(model, outputs), strict=True):
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
    for name, (others, decoder) in found.items():
        for key, out in outputs.items():
            assert others[key].tokens == out.tokens, f"{name} {key}"
            torch.testing.assert_close(
                torch.tensor(others[key].logprobs), torch.tensor(out.logprobs), atol=1e-4, rtol=0
            )
            if model.config.experts:
                assert out.routes is not None
                assert np.array_equal(others[key].routes, out.routes), f"{name} {key}"
        if name == "few blocks":
            assert decoder.stats.preemptions > 0
        if name.startswith("drafts"):
            assert decoder.stats.accepted_tokens > 20
    alone, _ = decode(model, SHORT, max_running=1)
    assert len(alone) == 5
    for key, out in alone.items():
        n_new = len(out.tokens)
        assert out.tokens == outputs[key].tokens[:n_new], f"alone {key}"
        torch.testing.assert_close(
            torch.tensor(out.logprobs), torch.tensor(outputs[key].logprobs[:n_new]), atol=1e-4, rtol=0
        )


@pytest.mark.slow
def test_two_ranks_sample_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for case in ALL:
        random_model(case, tmp_path / case)
    on_two_ranks(compare_decoders, *(tmp_path / case for case in ALL))


def compare_decoders(folder: Path, tp: ParallelGroup) -> None:
    """With prompts that are cut and rows that are preempted, and both against training on two ranks."""
    model = load(folder, tp)
    expected, _ = decode(load(folder))
    found, _ = decode(model, max_prefill_tokens=7, n_blocks=14)
    trained = trained_logprobs(model, found)
    for (key, out), of_training in zip(found.items(), trained, strict=True):
        assert out.tokens == expected[key].tokens, f"{folder.name} {key}"
        torch.testing.assert_close(torch.tensor(out.logprobs), of_training, atol=1e-4, rtol=0, msg=folder.name)


# Blocks behind the window ---------------------------------------------------------------------------------------------


def sequence(request: GenerationRequest, sample: int = 0) -> Sequence:
    return Sequence(
        request=request, sample=sample, key=0, max_new=100, stop_ids=frozenset(), tokens=list(request.prompt)
    )


def advance(scheduler: Scheduler) -> list[Sequence]:
    """One step whose tokens arrive at once."""
    plan = scheduler.schedule()
    stepped = [*plan.decode, *(each for chunk in plan.chunks if chunk.is_last for each in chunk.prefill.sequences)]
    for each in stepped:
        each.accept(7, 0.0, 0)
        scheduler.register(each, len(each.tokens) - 1)
    return stepped


def test_blocks_behind_the_window_are_released() -> None:
    """A row of any length keeps the blocks of its window, and what is shared stays until nobody sees it."""
    blocks = BlockManager(40, 4, [KVGroup(9)])
    scheduler = Scheduler(blocks, 4, 64)
    request = GenerationRequest(request_id=0, prompt=prompt(0, 18), n_samples=2, seed=0, params=SamplingParams())
    scheduler.waiting.extend([sequence(request), sequence(request, 1)])
    first, second = advance(scheduler)
    assert blocks.n_available == 40 - 6  # four shared blocks, and the last one of each
    for _ in range(60):
        advance(scheduler)
        for each in (first, second):  # what lies behind is released when the next block is taken
            assert each.block_tables.n_skipped[0] >= min((each.n_kv - 9) // 4, each.block_tables.n_registered) - 1
            assert len(each.block_tables.group_blocks[0]) - each.block_tables.n_skipped[0] <= 4
    assert blocks.n_available >= 40 - 2 * 4  # a window of nine positions lies in four blocks at most
    scheduler.abort(0)
    assert blocks.n_available == 40


def test_a_released_block_groups_nobody() -> None:
    """Another row may have it as the last block of its own prompt by now."""
    request = GenerationRequest(request_id=0, prompt=prompt(0, 64), n_samples=2, seed=0, params=SamplingParams())
    rows = [sequence(request, sample) for sample in range(3)]
    for each in rows:
        each.block_tables = BlockTables(BlockManager(17, 4))
        each.block_tables.group_blocks = [list(range(17))]
    options: dict[str, Any] = {"group_size": 8, "max_groups": 2, "n_heads": 2, "n_multiprocessors": 1}
    options["lengths_B"] = np.full(3, 65)
    assert split_attention(rows, 4, **options).shared_lens_B.tolist() == [64, 64, 64]
    rows[1].block_tables.n_skipped = [16]
    assert split_attention(rows, 4, **options).shared_lens_B.tolist() == [64, 0, 64]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mistral-window", "qwen3-window", "gemma3-tied"])
def test_windows_let_more_rows_run_in_the_same_blocks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(case, tmp_path)
    model = load(tmp_path)
    with_release, decoder = decode(model, n_blocks=21)
    of = KVLayout.from_config
    monkeypatch.setattr(KVLayout, "from_config", lambda *given, by_window: of(*given, by_window=False))
    without, other = decode(model, n_blocks=21)
    assert decoder.stats.preemptions < other.stats.preemptions
    assert {key: out.tokens for key, out in without.items()} == {key: out.tokens for key, out in with_release.items()}

"""Two ranks on one machine (gloo): tensor or data parallel, everything is as with one."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.engine.processes.local import LocalProcesses
from areno.engine.reports import RolloutStats
from areno.errors import DataError, EngineError
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.processes import worker_pids
from tests.helpers.tiny_engine import (
    MIXED,
    finish,
    logprobs_of,
    model_folder,
    request,
    rollout,
    scored,
    spec,
    tokens_of,
)

ROWS = [[3, 4, 5, 6], [7, 8], [9] * 30, [10, 11, 12], [13]]
ENDLESS = 10_000  # tokens: half a minute, in which the driver does something
TP_SIZE = {"tp": 2, "dp": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), 65, ENDLESS + 10)  # a vocabulary that two ranks do not divide


@pytest.fixture(scope="module", params=["tp", "dp"])
def two(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    with Engine(spec(folder, devices=2, tp_size=TP_SIZE[request.param])) as engine:
        yield engine


def test_scoring_and_sampling_are_those_of_one_rank(folder: Path, two: Engine) -> None:
    with Engine(spec(folder), "inline") as one:
        for row, expected in zip(scored(two, "actor", ROWS), scored(one, "actor", ROWS), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
        assert scored(two, "actor", ROWS[:1]) == [pytest.approx(scored(one, "actor", ROWS[:1])[0], abs=1e-4)]
        expected, outputs = rollout(one), rollout(two)
        assert two.info.tp_sums == ("gloo" if two.spec.layout.is_sharded else "")
        info = dataclasses.replace(two.info, memory_gib=0.0, tp_sums="", device_bytes=2 * two.info.device_bytes)
        device_bytes = one.info.device_bytes // 2 * 2  # the ranks of a CPU share its memory
        assert info == dataclasses.replace(one.info, memory_gib=0.0, device_bytes=device_bytes)
    assert tokens_of(outputs) == tokens_of(expected)
    assert logprobs_of(outputs) == pytest.approx(logprobs_of(expected), abs=1e-4)


def test_settings_of_a_sample_follow_it_through_the_batch(folder: Path, two: Engine) -> None:
    """As samples end, the others move up in the batch, and another tensor-parallel rank may draw their next token."""
    settings = {"frequency_penalty": 1.5, "min_new_tokens": 8, "top_p": 0.9}
    requests = [request(i, max_new_tokens=4 + 5 * i, **settings) for i in range(5)]
    requests += [request(5, max_new_tokens=9), request(6, length=20, presence_penalty=0.5)]
    with Engine(spec(folder), "inline") as one:
        assert tokens_of(rollout(two, requests)) == tokens_of(rollout(one, requests))


@pytest.mark.slow
def test_requests_join_and_end_while_others_decode(two: Engine) -> None:
    alone = rollout(two, [request(7, n_samples=2, max_new_tokens=5, ignore_eos=True)])[7]
    two.begin_rollout(RolloutSpec(max_running=6, max_len=ENDLESS + 10))
    two.submit([request(i, max_new_tokens=ENDLESS, ignore_eos=True) for i in range(4)])
    assert two.poll(0.0) == []
    two.submit([request(7, n_samples=2, max_new_tokens=5, ignore_eos=True)])
    two.abort(2)
    outputs = finish(two, 3)
    assert [outputs[7, sample].tokens for sample in (0, 1)] == [output.tokens for output in alone]
    assert outputs[2, 0].finish_reason == "abort"
    two.end_rollout()  # the others are under way
    assert len(rollout(two)) == len(MIXED)


def test_requests_are_spread_over_the_model_copies(two: Engine) -> None:
    seen: list[RolloutStats] = []
    two.begin_rollout(RolloutSpec(max_running=12, max_len=64))
    requests = [request(0, n_samples=6), *(request(i, n_samples=2) for i in (1, 2, 3))]
    for item in requests:
        item.params.ignore_eos = True
    two.generate(requests, lambda _, stats: seen.__setitem__(slice(None), stats))
    two.end_rollout()
    assert [stats.generated_tokens for stats in seen] == [144 // two.spec.layout.dp_size] * two.spec.layout.dp_size


def test_an_error_of_all_ranks_leaves_the_engine_whole(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalProcesses, "death_grace_s", 0.2)  # in which nobody is seen to have been killed
    expected = scored(two, "actor", ROWS)
    for _ in range(2):
        with pytest.raises(DataError, match="row 0: tokens is empty"):
            two.train([TrainSequence([], [])] * 2, sft_loss_fn)
        with pytest.raises(EngineError, match="ValueError: everywhere"):
            two.train([TrainSequence([True, False], [3, 4])] * 2, _raises)
    assert scored(two, "actor", ROWS) == expected


def _raises(*_: Any) -> Any:
    raise ValueError("everywhere")


def test_more_copies_than_rows(two: Engine) -> None:
    """A copy without a row takes part with one that trains nothing; the rows of a pair are not divided."""
    row = TrainSequence([True, False, False], [3, 4, 5])
    two.train([row], sft_loss_fn)
    expected = two.train([row, TrainSequence([True, True], [7, 8])], sft_loss_fn)
    assert expected["skipped_steps"] == 0
    assert two.train([row], sft_loss_fn)["response_len"] == expected["response_len"] == 2
    if two.spec.layout.dp_size > 1:
        with pytest.raises(
            DataError, match="has 2 rows, in units of 2, for 2 copies of the model; each needs one: raise"
        ):
            two.train([row, row], sft_loss_fn, UpdateSpec(MicroBatchSpec(), rows_per_unit=2))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tp", "dp"])
def test_an_error_of_one_rank_ends_the_engine(folder: Path, form: str) -> None:
    def raises_on_one(pack: Any, logprobs_N: torch.Tensor) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("here only")
        return sft_loss_fn(pack, logprobs_N)

    with Engine(spec(folder, devices=2, tp_size=TP_SIZE[form])) as engine:
        with pytest.raises(EngineError, match="worker 1 failed: ValueError: here only"):
            engine.train([TrainSequence([True, False], [3, 4])] * 2, raises_on_one)
        with pytest.raises(EngineError, match="the engine is closed"):
            scored(engine, "actor", ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tp", "dp"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all(folder: Path, form: str, victim: int) -> None:
    with Engine(spec(folder, devices=2, tp_size=TP_SIZE[form])) as engine:
        pids = worker_pids(engine)
        engine.begin_rollout(RolloutSpec(max_running=8, max_len=ENDLESS + 10))
        engine.submit([request(i, max_new_tokens=ENDLESS, ignore_eos=True) for i in range(8)])
        engine.poll(0.1)
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"worker {victim} \(cpu\) was killed by SIGKILL"):
            finish(engine, 9)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

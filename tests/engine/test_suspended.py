"""A rollout phase that is suspended while models are trained: its requests continue under the new weights."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.engine.engine import Engine
from areno.engine.output_streams import Consumer, RunningClock, TimeLimit
from areno.errors import EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest
from tests.helpers.tiny_engine import model_folder, request, rollout, spec, train_rows
from tests.helpers.waiting import until

LONG = 300
ROOMY = RolloutSpec(max_running=16, max_len=LONG + 20)


def long(request_id: int) -> GenerationRequest:
    return request(request_id, n_samples=2, max_new_tokens=LONG, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["inline", "spawn"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(spec(folder, exact=True), request.param) as engine:
        yield engine


def streamed(engine: Engine, items: list[GenerationRequest], found: dict[int, list[GenerationOutput]]) -> None:
    async def one(item: GenerationRequest) -> None:
        found[item.request_id] = [output async for output in engine.generate_stream(item, timeout_s=60.0)]

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, items))

    asyncio.run(all_of_them())


@pytest.mark.slow
def test_requests_go_on_under_new_weights(engine: Engine) -> None:
    plain = [request(number, n_samples=2) for number in range(3)]
    trained = train_rows(rollout(engine, plain), plain)
    engine.begin_rollout(ROOMY)
    found: dict[int, list[GenerationOutput]] = {}
    thread = threading.Thread(target=streamed, args=(engine, [long(100), long(101)], found))
    thread.start()
    until(lambda: sum(stats.generated_tokens for stats in engine.rollout_stats()) > 100)  # the rollout before had fewer
    engine.suspend_rollout()
    n_tokens = sum(stats.generated_tokens for stats in engine.rollout_stats())
    engine.train(trained, grpo_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=700)))
    late = threading.Thread(target=streamed, args=(engine, [long(102)], found))
    late.start()  # a request that arrives while the phase is suspended
    time.sleep(0.3)
    assert not found
    engine.resume_rollout()
    thread.join()
    late.join()
    engine.end_rollout()
    for number in (100, 101):
        for output in found[number]:
            assert len(output.tokens) == LONG
            n_old = output.versions.count(0)
            assert output.versions == [0] * n_old + [1] * (LONG - n_old)
            assert 0 < n_old < LONG
    assert sum(output.versions.count(0) for number in (100, 101) for output in found[number]) >= n_tokens > 100
    assert {version for output in found[102] for version in output.versions} == {1}


@pytest.mark.slow
def test_the_thread_of_the_streams_waits_while_the_phase_is_suspended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(spec(folder), "inline") as engine:
        engine.begin_rollout(ROOMY)
        poll, n_polls = engine.workers.poll, itertools.count()

        def counted(timeout: float) -> list[GenerationOutput]:
            next(n_polls)
            return poll(timeout)

        found: dict[int, list[GenerationOutput]] = {}
        thread = threading.Thread(target=streamed, args=(engine, [long(100)], found))
        thread.start()
        until(lambda: engine.rollout_stats()[0].generated_tokens > 0)
        engine.suspend_rollout()
        monkeypatch.setattr(engine.workers, "poll", counted)
        time.sleep(0.5)
        assert next(n_polls) <= 20
        engine.resume_rollout()
        thread.join()
        assert len(found[100]) == 2
        engine.end_rollout()


@pytest.mark.slow
def test_nothing_changes_if_the_weights_do_not(folder: Path) -> None:
    frozen = OptimizerConfig(lr=0.0, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    with Engine(spec(folder, exact=True, optimizer=frozen), "inline") as engine:
        engine.begin_rollout(ROOMY)
        expected = engine.generate([long(0), long(1)])
        engine.end_rollout()
        engine.begin_rollout(ROOMY)
        engine.submit([long(0), long(1)])
        found = []
        while len(found) < 4:
            found += engine.poll(0.005)
            engine.suspend_rollout()
            assert engine.poll(0.01) == []
            engine.resume_rollout()
        engine.end_rollout()
    for output in found:
        other = expected[output.request_id][output.sample]
        assert (output.tokens, output.logprobs) == (other.tokens, other.logprobs)


def test_outside_of_a_rollout_nothing_is_suspended(folder: Path) -> None:
    with Engine(spec(folder), "inline") as engine:
        engine.suspend_rollout()
        engine.resume_rollout()
        with pytest.raises(EngineError, match="outside a rollout phase"):
            engine.submit([long(0)])


def test_time_limits_do_not_count_the_time_in_which_the_clock_is_paused() -> None:
    async def timed() -> tuple[bool, bool]:
        clock = RunningClock()
        consumer = Consumer()
        limit = TimeLimit(consumer, clock, 0.1)
        clock.pause()
        clock.pause()
        await asyncio.sleep(0.3)
        early = consumer.queue.is_empty()
        clock.resume()
        await asyncio.sleep(0.2)
        limit.cancel()
        return early, consumer.queue.is_empty()

    assert asyncio.run(timed()) == (True, False)


def test_a_limit_that_is_cancelled_says_nothing() -> None:
    async def timed() -> bool:
        consumer = Consumer()
        limit = TimeLimit(consumer, RunningClock(), 0.05)
        limit.cancel()
        TimeLimit(consumer, RunningClock(), None).cancel()
        await asyncio.sleep(0.1)
        return consumer.queue.is_empty()

    assert asyncio.run(timed())

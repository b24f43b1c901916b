"""Requests awaited from asyncio: outputs as they come, beside other streams, beside generate(), and when things end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from areno.engine.engine import Engine
from areno.engine.output_streams import FairLock, join_outputs
from areno.errors import ConfigError, DataError, EngineError
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationOutput, GenerationRequest
from tests.helpers import warm_python
from tests.helpers.processes import worker_pids
from tests.helpers.tiny_engine import MIXED, ROLLOUT, finish, model_folder, request, rollout, spec, tokens_of
from tests.helpers.waiting import until

LONG = 150  # tokens: a fifth of a second at least
LONG_ROLLOUT = RolloutSpec(max_running=16, max_len=LONG + 10)
# Takes a minute if nobody ends it: what a test does meanwhile comes before its end, however late the test gets to it.
ENDLESS = 20_000  # tokens
ENDLESS_ROLLOUT = RolloutSpec(max_running=4, max_len=ENDLESS + 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), context=ENDLESS + 10)


def long(request_id: int, **params: Any) -> GenerationRequest:
    return request(request_id, max_new_tokens=LONG, ignore_eos=True, **params)


def endless(request_id: int, **params: Any) -> GenerationRequest:
    return request(request_id, max_new_tokens=ENDLESS, ignore_eos=True, **params)


async def collect(engine: Engine, item: GenerationRequest) -> list[GenerationOutput]:
    outputs = [output async for output in engine.generate_stream(item)]
    return sorted(outputs, key=lambda output: output.sample)


def test_streams_give_what_generate_gives(engine: Engine) -> None:
    expected = rollout(engine)

    async def all_of_them() -> dict[int, list[GenerationOutput]]:
        outputs = await asyncio.gather(*(collect(engine, item) for item in MIXED))
        return {item.request_id: each for item, each in zip(MIXED, outputs, strict=True)}

    engine.begin_rollout(ROLLOUT)
    assert tokens_of(asyncio.run(all_of_them())) == tokens_of(expected)
    engine.submit([request(0)])  # the id is free again, and polling is as without streams
    assert list(finish(engine, 1)) == [(0, 0)]
    engine.end_rollout()


@pytest.mark.slow
def test_streams_run_beside_generate_and_the_loop_stays_free(engine: Engine) -> None:
    requests = [request(i, n_samples=2) for i in range(4)]
    expected = tokens_of(rollout(engine, requests))
    found: list[Any] = []

    async def main() -> list[GenerationOutput]:
        beside = threading.Thread(target=lambda: found.append(engine.generate(requests)))
        under_way = asyncio.create_task(collect(engine, endless(11)))
        stream = asyncio.create_task(collect(engine, long(10)))
        await asyncio.sleep(0)
        beside.start()
        outputs = await stream
        await asyncio.to_thread(beside.join)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not under_way.done(), "the loop waited for it"
        return outputs

    engine.begin_rollout(ENDLESS_ROLLOUT)
    (output,) = asyncio.run(main())
    engine.end_rollout()
    assert tokens_of(found[0]) == expected
    assert len(output.tokens) == LONG


def test_a_consumer_that_stops_aborts_its_request_and_no_other(engine: Engine) -> None:
    async def main() -> list[GenerationOutput]:
        other = asyncio.create_task(collect(engine, long(1)))
        cancelled = asyncio.create_task(collect(engine, endless(2, n_samples=2)))
        async with aclosing(engine.generate_stream(request(3, max_new_tokens=1, n_samples=2))) as left:
            async for _ in left:
                break
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        return await other

    engine.begin_rollout(ENDLESS_ROLLOUT)
    (output,) = asyncio.run(main())
    assert len(output.tokens) == LONG
    deadline = time.monotonic() + 60
    while engine.dispatcher.n_unfinished_by_request and time.monotonic() < deadline:
        assert engine.poll(0.1) == []  # what an abandoned request still gives is nobody's
    assert not engine.dispatcher.n_unfinished_by_request
    assert not engine.streams.has_consumers
    engine.end_rollout()


def test_a_stream_that_ended_long_ago_leaves_the_next_one_of_its_id_alone(engine: Engine) -> None:
    async def main() -> list[GenerationOutput]:
        engine.begin_rollout(ENDLESS_ROLLOUT)
        stale = engine.generate_stream(dataclasses.replace(endless(0), stream=True))
        await anext(stale)
        engine.end_rollout()
        engine.begin_rollout(LONG_ROLLOUT)
        good = asyncio.create_task(collect(engine, long(0)))
        await asyncio.sleep(0)
        await stale.aclose()
        return await asyncio.wait_for(good, 60)

    (output,) = asyncio.run(main())
    assert len(output.tokens) == LONG
    engine.end_rollout()


def test_a_script_that_ends_within_a_stream_has_its_own_exit_status(folder: Path) -> None:
    code = f"""
import asyncio, dataclasses, sys
from tests.engine.test_streams import ENDLESS_ROLLOUT, Engine, Path, endless, spec
async def main():
    engine = Engine(spec(Path({str(folder)!r})), "inline")
    engine.begin_rollout(ENDLESS_ROLLOUT)
    async for output in engine.generate_stream(dataclasses.replace(endless(0, n_samples=8), stream=True)):
        sys.exit(3)
asyncio.run(main())
"""
    done = warm_python.commands().run(["-c", code], Path(__file__).parents[2], os.environ, timeout=120)
    assert done.returncode == 3, done.stderr


@pytest.mark.slow
def test_a_bad_request_is_refused_by_its_stream_alone(engine: Engine) -> None:
    async def main() -> list[GenerationOutput]:
        good = asyncio.create_task(collect(engine, long(1)))
        under_way = asyncio.create_task(collect(engine, endless(3)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="n_samples is 0"):
            await collect(engine, request(2, n_samples=0))
        with pytest.raises(EngineError, match="request id 3 is already under way"):
            await collect(engine, request(3))
        with pytest.raises(ConfigError, match=r"SamplingParams\.temperature"):
            await collect(engine, request(2, temperature=float("nan")))
        with pytest.raises(DataError, match=r"prompt holds 1\.5; token ids are ints"):
            await collect(engine, dataclasses.replace(request(2), prompt=[1.5]))
        outputs = await good
        assert not under_way.done()
        return outputs

    engine.begin_rollout(ENDLESS_ROLLOUT)
    assert len(asyncio.run(main())[0].tokens) == LONG
    engine.end_rollout()
    with pytest.raises(EngineError, match="outside a rollout phase"):
        asyncio.run(collect(engine, request(0)))


@pytest.mark.slow
def test_the_end_of_the_phase_is_raised_in_every_stream(engine: Engine) -> None:
    async def main() -> list[Any]:
        streams = [asyncio.create_task(collect(engine, endless(i, n_samples=4))) for i in range(3)]
        await asyncio.sleep(0.05)
        engine.end_rollout()
        return await asyncio.gather(*streams, return_exceptions=True)

    expected = tokens_of(rollout(engine))
    engine.begin_rollout(ENDLESS_ROLLOUT)
    ends = asyncio.run(main())
    assert [type(end) for end in ends] == [EngineError] * 3
    assert "the rollout phase has ended" in str(ends[0])
    assert tokens_of(rollout(engine)) == expected


def test_a_dead_worker_is_raised_in_every_stream(folder: Path) -> None:
    async def main() -> list[Any]:
        streams = [asyncio.create_task(collect(engine, endless(i, n_samples=4))) for i in range(3)]
        await asyncio.sleep(0.1)
        os.kill(worker_pids(engine)[0], signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 60)

    with Engine(spec(folder), "spawn") as engine:
        engine.begin_rollout(ENDLESS_ROLLOUT)
        ends = asyncio.run(main())
        assert [str(end) for end in ends] == [str(ends[0])] * 3
        with pytest.raises(EngineError, match="was killed by SIGKILL"):
            engine.poll(1.0)
    assert "worker 0 (cpu) was killed by SIGKILL" in str(ends[0])


# --- partial outputs, of workers that are made up ---


class Scripted:
    """Workers whose polls return what was written down, beginning when so many requests were submitted."""

    def __init__(self, polls: list[list[GenerationOutput]], n_requests: int = 1):
        self.polls, self.n_requests, self.sent = polls, n_requests, []

    def call_nowait(self, dp_rank: int, method: str, *args: Any) -> None:
        self.sent.append((method, *args))

    def poll(self, timeout: float) -> list[GenerationOutput]:
        n_submitted = sum(len(sent[1]) for sent in self.sent if sent[0] == "submit")
        return self.polls.pop(0) if self.polls and n_submitted >= self.n_requests else []

    def call(self, method: str, *args: Any) -> list[Any]:
        return []

    def stats(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def piece(tokens: list[int], finish_reason: Any = None, request_id: int = 0) -> GenerationOutput:
    logprobs = [-1.0] * len(tokens)
    return GenerationOutput(
        request_id=request_id,
        sample=0,
        tokens=tokens,
        logprobs=logprobs,
        versions=[0] * len(tokens),
        finish_reason=finish_reason,
    )


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """It returns two partial outputs, one that finishes another request, and the whole of the first."""
    with Engine(spec(folder), "inline") as engine:
        engine.begin_rollout(ROLLOUT)
        polls = [[piece([5])], [piece([6, 7])], [piece([3], "stop", request_id=1)], [piece([5, 6, 7, 1], "stop")]]
        monkeypatch.setattr(engine, "workers", Scripted(polls, n_requests=2))
        yield engine


def test_poll_passes_partial_outputs_on(scripted: Engine) -> None:
    scripted.submit([request(0), request(1)])
    partial = [scripted.poll(0.0) for _ in range(2)]
    assert [[output.tokens for output in outputs] for outputs in partial] == [[[5]], [[6, 7]]]
    assert (scripted.dispatcher.n_samples, scripted.dispatcher.n_unfinished_by_request) == (
        [2],
        {0: 1, 1: 1},
    )  # they finish nothing
    assert [output.request_id for _ in range(2) for output in scripted.poll(0.0)] == [1, 0]
    assert (scripted.dispatcher.n_samples, scripted.dispatcher.n_unfinished_by_request) == ([0], {})


def test_generate_returns_finished_samples_only(scripted: Engine) -> None:
    outputs = scripted.generate([request(0), request(1)])
    assert tokens_of(outputs) == {0: [[5, 6, 7, 1]], 1: [[3]]}


def test_a_stream_gives_partial_outputs_and_then_the_whole(scripted: Engine) -> None:
    async def main() -> tuple[list[GenerationOutput], list[GenerationOutput]]:
        return await asyncio.gather(collect(scripted, request(0)), collect(scripted, request(1)))

    first, second = asyncio.run(main())
    *partial, whole = first
    assert (whole.tokens, whole.finish_reason) == ([5, 6, 7, 1], "stop")
    assert [token for output in partial for token in output.tokens] in ([], [5], [5, 6, 7])
    assert [output.tokens for output in second] == [[3]]


def test_a_slow_reader_gets_what_has_come_as_one_output() -> None:
    partial = [piece([5]), piece([6, 7])]
    [both] = join_outputs(partial)
    assert (both.tokens, both.logprobs, both.versions, both.finish_reason) == ([5, 6, 7], [-1.0] * 3, [0] * 3, None)
    assert [output.tokens for output in partial] == [[5], [6, 7]]  # others may hold them
    whole = piece([5, 6, 7, 1], "stop")
    other = dataclasses.replace(piece([9]), sample=1)
    assert join_outputs([*partial, other, whole]) == [whole, other]


def test_a_stream_out_of_time_aborts_its_request(engine: Engine) -> None:
    engine.begin_rollout(ENDLESS_ROLLOUT)

    async def main() -> None:
        async for _ in engine.generate_stream(endless(0, n_samples=3), timeout_s=0.01):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    deadline = time.monotonic() + 60
    while engine.dispatcher.n_unfinished_by_request and time.monotonic() < deadline:
        engine.poll(0.1)
    assert not engine.dispatcher.n_unfinished_by_request
    engine.end_rollout()


def test_an_aborted_stream_tells_the_workers(scripted: Engine) -> None:
    async def main() -> None:
        async with aclosing(scripted.generate_stream(request(0))) as stream:
            async for _ in stream:
                break

    workers: Any = scripted.workers
    workers.polls, workers.n_requests = [[piece([5])]], 1
    asyncio.run(main())
    assert workers.sent[-1] == ("abort", [0])


def test_an_output_of_no_request_is_raised_in_every_stream(scripted: Engine) -> None:
    workers: Any = scripted.workers
    workers.polls, workers.n_requests = [[piece([5], request_id=7)]], 1

    async def main() -> None:
        await asyncio.wait_for(collect(scripted, request(0)), 60)

    with pytest.raises(KeyError, match="7"):
        asyncio.run(main())


@pytest.mark.slow
def test_a_request_streams_its_tokens(engine: Engine) -> None:
    async def begins() -> list[GenerationOutput]:
        async with aclosing(engine.generate_stream(dataclasses.replace(endless(1), stream=True))) as stream:
            return [await anext(stream) for _ in range(2)]

    engine.begin_rollout(ENDLESS_ROLLOUT)
    assert [output.finish_reason for output in asyncio.run(begins())] == [None, None]
    outputs = asyncio.run(collect(engine, dataclasses.replace(long(0), stream=True)))
    engine.end_rollout()
    *partial, whole = outputs  # one that reads slowly may get the whole alone
    assert {output.finish_reason for output in partial} == {None}
    tokens = [token for output in partial for token in output.tokens]
    assert tokens == whole.tokens[: len(tokens)]
    assert len(whole.tokens) == LONG


def test_a_fair_lock_serves_in_the_order_of_arrival() -> None:
    lock, order = FairLock(), []

    def wait(name: int) -> None:
        with lock:
            order.append(name)

    threads = [threading.Thread(target=wait, args=(name,)) for name in range(5)]
    with lock:
        for n, thread in enumerate(threads, 2):
            thread.start()
            until(lambda n=n: len(lock._arrivals) >= n)
    for thread in threads:
        thread.join()
    assert order == list(range(5))

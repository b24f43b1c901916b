"""Requests that follow each other closely reach the workers together."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from areno.engine import output_streams
from areno.engine.engine import Engine
from areno.engine.output_streams import Consumer, RequestBatcher
from areno.errors import EngineError, WorkerLost
from areno.types import GenerationRequest
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, spec


class PlayedTime(asyncio.SelectorEventLoop):
    """An event loop whose time passes while all wait, at once, and in `works`: however busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self._now, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self.works(timeout or 0.0)
            return select(timeout and 0.0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def works(self, seconds: float) -> None:
        """Something holds the loop for so long."""
        self._now += seconds


def play(main: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives in an event loop of its own, whose time is played."""
    with closing(PlayedTime()) as loop:
        return loop.run_until_complete(main)


def loop() -> PlayedTime:
    """That of the coroutine."""
    running = asyncio.get_running_loop()
    assert isinstance(running, PlayedTime)
    return running


class Workers:
    """What a RequestBatcher submits to: the ids of each batch. refuses: ids, any of which makes it refuse a batch."""

    def __init__(self, refuses: Sequence[int] = (), error: type[EngineError] = EngineError):
        self.batches: list[list[int]] = []
        self.refuses, self.error, self.is_idle = refuses, error, True
        self.batcher = RequestBatcher(self.submit, lambda: self.is_idle)

    def submit(self, streams: Sequence[tuple[GenerationRequest, Consumer]]) -> None:
        ids = [item.request_id for item, _ in streams]
        if set(ids) & set(self.refuses):
            raise self.error(f"{ids} refused")
        self.batches.append(ids)
        self.is_idle = not ids

    async def one(self, number: int, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        await self.batcher.submit(request(number), Consumer())


def test_a_burst_is_one_batch_and_what_comes_later_does_not_wait() -> None:
    workers = Workers()

    async def all_of_them() -> None:
        await asyncio.gather(*(workers.one(number, number * 0.0005) for number in range(6)))
        started = loop().time()
        await workers.one(6)  # the workers are busy now
        assert loop().time() == started
        workers.is_idle = True
        await workers.one(7)

    play(all_of_them())
    assert workers.batches == [[0, 1, 2, 3, 4, 5], [6], [7]]


def test_a_client_that_is_alone_soon_waits_for_nobody() -> None:
    workers = Workers()

    async def waited(*numbers: int) -> float:
        workers.is_idle, started = True, loop().time()
        await asyncio.gather(*map(workers.one, numbers))
        return loop().time() - started

    async def all_of_them() -> None:
        pauses = [await waited(number) for number in range(4)]
        assert [pause > 0 for pause in pauses] == [True, True, False, False]
        loop().works(1.0)
        assert await waited(4, 5) == 0  # two clients: the first request was expected to be alone
        assert await waited(6, 7) > 0
        assert await waited(8) > 0
        assert await waited(9) > 0
        assert await waited(10) == 0
        loop().works(1.0)
        await workers.one(11)  # long after the request before, while the workers are busy
        assert await waited(12) == 0
        workers.batcher.announce(2)
        assert await waited(13, 14) == 0
        assert await waited(15) > 0

    play(all_of_them())
    assert workers.batches == [[0], [1], [2], [3], [4], [5], [6, 7], [8], [9], [10], [11], [12], [13, 14], [15]]


def test_a_burst_waits_for_requests_that_are_being_made_but_not_for_ever() -> None:
    workers = Workers()

    async def made(number: int, takes_s: float) -> None:
        with workers.batcher.expecting():
            await asyncio.sleep(takes_s)
        await workers.one(number)

    async def all_of_them() -> None:
        await asyncio.gather(workers.one(0), made(1, 0.01), made(2, 0.02))
        workers.is_idle = True
        await asyncio.gather(workers.one(3), made(4, 0.1))

    play(all_of_them())
    assert workers.batches == [[0, 1, 2], [3], [4]]


def test_a_busy_loop_does_not_cut_a_burst() -> None:
    workers = Workers()

    async def slow(number: int) -> None:
        await asyncio.sleep(0)
        loop().works(0.004)  # longer than the pause that ends a burst
        await workers.one(number)

    async def all_of_them() -> None:
        await asyncio.gather(*map(slow, range(5)))

    play(all_of_them())
    assert workers.batches == [[0, 1, 2, 3, 4]]


def test_requests_without_end_do_not_hold_the_first_one_back() -> None:
    workers = Workers()

    async def all_of_them() -> None:
        await asyncio.gather(*(workers.one(number, number * 0.001) for number in range(300)))

    play(all_of_them())
    assert 40 < len(workers.batches[0]) < 60, "those of 0.05 s"
    assert sorted(number for batch in workers.batches for number in batch) == list(range(300))


@pytest.mark.parametrize(("error", "accepted"), [(EngineError, [[0], [2]]), (WorkerLost, [])])
def test_a_refused_request_takes_no_other_with_it(error: type[EngineError], accepted: list[list[int]]) -> None:
    workers = Workers(refuses=[1], error=error)

    async def all_of_them() -> list[BaseException | None]:
        return await asyncio.gather(*map(workers.one, range(3)), return_exceptions=True)

    found = play(all_of_them())
    assert workers.batches == accepted
    assert [isinstance(one, error) for one in found] == [not accepted, True, not accepted]


def test_a_request_that_is_cancelled_while_it_waits_is_not_submitted() -> None:
    workers = Workers()

    async def all_of_them() -> None:
        tasks = [asyncio.ensure_future(workers.one(number)) for number in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(all_of_them())
    assert workers.batches == [[0, 2]]


@pytest.mark.parametrize("when", ["waiting", "just submitted"])
def test_an_engine_keeps_nothing_of_a_stream_that_is_cancelled_at_its_beginning(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(engine: Engine, until: Callable[[], bool]) -> None:
        async def read() -> None:
            async with aclosing(engine.generate_stream(request(0, max_new_tokens=20, ignore_eos=True))) as stream:
                async for _ in stream:
                    pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        while not until():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.streams.has_consumers or engine.batcher._pending:
            await asyncio.sleep(0.001)

    with Engine(spec(model_folder(tmp_path)), "inline") as engine:
        engine.batcher.waits = True  # as on a GPU
        submitted, submit = [], engine.submit  # the request itself may be done before anybody looks
        monkeypatch.setattr(engine, "submit", lambda requests: submitted.append(submit(requests)))
        engine.begin_rollout(ROLLOUT)
        asyncio.run(cancelled(engine, lambda: when == "waiting" or bool(submitted)))
        assert engine.dispatcher.is_idle
        assert engine.generate([request(0)])[0]


def test_an_announced_burst_begins_when_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()

    async def all_of_them() -> None:
        monkeypatch.setattr(output_streams, "PAUSE_S", 5.0)
        workers.batcher.announce(3)
        started = loop().time()
        await asyncio.gather(*map(workers.one, range(3)))
        assert loop().time() == started
        workers.is_idle = True
        monkeypatch.setattr(output_streams, "PAUSE_S", 0.03)
        await asyncio.gather(*map(workers.one, range(3, 7)))  # the announcement was of the first burst
        workers.is_idle = True
        workers.batcher.announce(3)  # one of which never comes
        await asyncio.gather(*map(workers.one, range(7, 9)))
        workers.is_idle = True
        await asyncio.gather(*map(workers.one, range(9, 13)))

    play(all_of_them())
    assert workers.batches == [[0, 1, 2], [3, 4, 5, 6], [7, 8], [9, 10, 11, 12]]


def test_nothing_keeps_a_loop_whose_announced_requests_never_came() -> None:
    workers = Workers()

    async def announced() -> weakref.ref[asyncio.AbstractEventLoop]:
        workers.batcher.announce(3)
        return weakref.ref(asyncio.get_running_loop())

    ended = asyncio.run(announced())
    gc.collect()
    assert ended() is None

"""Work beside an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from areno.server.threads import ThreadPool
from tests.helpers.waiting import until


def test_results_and_errors_come_to_those_who_asked() -> None:
    threads = ThreadPool(2, "work")

    async def all_of_them() -> list[object]:
        work = [partial(int, str(number)) for number in range(20)] + [partial(int, "a")]
        return await asyncio.gather(*map(threads.run, work), return_exceptions=True)

    *numbers, error = asyncio.run(all_of_them())
    assert numbers == list(range(20))
    assert isinstance(error, ValueError)
    until(lambda: not any(thread.name == "work" for thread in threading.enumerate()))
    assert asyncio.run(threads.run(lambda: 1)) == 1


def test_so_many_run_at_once_and_what_nobody_waits_for_is_dropped() -> None:
    threads, begun, done = ThreadPool(2, "work"), list[int](), list[int]()
    at_once, go_on = threading.BoundedSemaphore(2), threading.Event()

    def work(number: int) -> None:
        assert at_once.acquire(blocking=False)
        begun.append(number)
        assert go_on.wait(60)
        at_once.release()
        done.append(number)

    async def some_leave() -> None:
        asked = [asyncio.ensure_future(threads.run(partial(work, number))) for number in range(8)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        for left in asked[:6]:
            left.cancel()
        go_on.set()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(some_leave())
    until(lambda: len(done) == 4)
    assert sorted(done) == [0, 1, 6, 7]  # two had begun


def test_a_loop_that_has_ended_does_not_harm_the_thread() -> None:
    threads, go_on = ThreadPool(1, "work"), threading.Event()

    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(threads.run(lambda: go_on.wait(60)), 0.01)

    asyncio.run(leave())
    go_on.set()
    assert asyncio.run(threads.run(lambda: 2)) == 2


def test_an_error_keeps_nothing_of_the_work_in_memory() -> None:
    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise ValueError(id(large))

    async def ask() -> None:
        with pytest.raises(ValueError):
            await threads.run(fail)

    threads = ThreadPool(1, "work")
    gc.collect()
    gc.disable()
    try:
        asyncio.run(ask())
        until(lambda: kept[0]() is None)
    finally:
        gc.enable()

"""The clock of a node: named and bounded waits, and shares of time that add up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from arriero.engine.runtime import waits
from arriero.engine.runtime.waits import NodeClock, WaitTimeout


async def test_a_wait_that_is_too_long_names_the_node_what_for_and_how_long() -> None:
    clock = NodeClock("trainer", bound_s=0.02)
    with pytest.raises(WaitTimeout, match=r"^trainer waited 0\.02 s for a record of collect$"):
        await clock.wait(asyncio.Event().wait(), "a record of collect")
    assert clock.status().waits_for == ""


async def test_a_timeout_of_what_is_waited_for_is_not_taken_for_ours() -> None:
    async def fail() -> None:
        raise TimeoutError("the engine's own")

    with pytest.raises(TimeoutError, match="the engine's own"):
        await NodeClock("trainer", bound_s=5).wait(fail(), "a record")


class Time:
    """Passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def passes(self, seconds: float) -> None:
        """Whoever is ready goes on, before and after."""
        await asyncio.sleep(0)
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stands_in = Time()
    monkeypatch.setattr(waits, "time", stands_in)
    return stands_in


class Waiting:
    """An open wait of a node, until the test ends it."""

    def __init__(self, clock: NodeClock, what: str) -> None:
        self._over = asyncio.Event()
        self._task = asyncio.create_task(clock.wait(self._over.wait(), what))

    async def ends(self) -> None:
        self._over.set()
        await self._task


async def test_overlapping_waits_count_once(time: Time) -> None:
    clock = NodeClock("reward", bound_s=5)
    clock.start()
    first = Waiting(clock, "one thing")
    await time.passes(2)
    second = Waiting(clock, "another")
    await time.passes(1)
    third = Waiting(clock, "a third")
    await time.passes(1)
    await third.ends()
    await first.ends()
    await time.passes(3)
    await second.ends()
    await time.passes(5)
    status = clock.status()
    assert (status.idle_s, status.busy_s) == (2 + 1 + 1 + 3, 5)


async def test_busy_and_idle_time_count_from_the_first_record_to_the_end(time: Time) -> None:
    clock = NodeClock("reward", bound_s=5)
    waiting = Waiting(clock, "its first record")
    await time.passes(7)
    await waiting.ends()
    assert (clock.status().busy_s, clock.status().idle_s) == (0, 0)
    clock.start()
    await time.passes(4)
    waiting = Waiting(clock, "a record")
    await time.passes(3)
    await waiting.ends()
    clock.stop()
    await time.passes(2)
    status = clock.status()
    assert (status.busy_s, status.idle_s) == (4, 3)
    assert status.ended


async def test_an_open_wait_is_told_while_it_lasts(time: Time) -> None:
    clock = NodeClock("trainer", bound_s=5)
    clock.start()
    waiting = Waiting(clock, "a record of collect")
    await time.passes(6)
    status = clock.status()
    assert status.waits_for == "a record of collect"
    assert (status.waits_s, status.idle_s) == (6, 6)
    await waiting.ends()


async def test_the_heartbeat_may_read_while_all_else_writes() -> None:
    clock = NodeClock("generator", bound_s=5)
    clock.start()
    errors: list[Exception] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                status = clock.status()
                assert status.busy_s >= 0
                assert status.idle_s >= 0
            except Exception as error:  # noqa: BLE001  # shown below
                errors.append(error)

    def write() -> None:
        for k in range(2000):
            clock.count(f"kind{k % 50}", 1)

    threads = [threading.Thread(target=read), threading.Thread(target=write), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        await asyncio.gather(*(clock.wait(asyncio.sleep(0), f"{k}") for k in range(5)))
    for thread in threads[1:]:
        thread.join()
    over.set()
    threads[0].join()
    assert errors == []
    assert sum(clock.status().counts.values()) == 4000

"""The clock of a node: named and bounded waits, and shares of time that add up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

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


async def test_overlapping_waits_count_once() -> None:
    clock = NodeClock("reward", bound_s=5)
    clock.start()
    began = time.monotonic()

    async def wait(delay_s: float, length_s: float) -> None:
        await asyncio.sleep(delay_s)
        await clock.wait(asyncio.sleep(length_s), "something")

    await asyncio.gather(wait(0, 0.10), wait(0.05, 0.10), wait(0.02, 0.01))
    status = clock.status()
    assert status.idle_s == pytest.approx(time.monotonic() - began, abs=0.02)
    assert status.idle_s >= 0.15
    assert status.busy_s < 0.02


async def test_busy_and_idle_time_count_from_the_first_record_and_add_up_to_the_whole() -> None:
    clock = NodeClock("reward", bound_s=5)
    await clock.wait(asyncio.sleep(0.05), "its first record")
    assert (clock.status().busy_s, clock.status().idle_s) == (0, 0)
    began = time.monotonic()
    clock.start()
    await asyncio.sleep(0.04)
    await clock.wait(asyncio.sleep(0.03), "a record")
    clock.stop()
    whole = time.monotonic() - began
    await asyncio.sleep(0.02)
    status = clock.status()
    assert status.busy_s == pytest.approx(0.04, abs=0.02)
    assert status.idle_s == pytest.approx(0.03, abs=0.02)
    assert status.busy_s + status.idle_s == pytest.approx(whole, abs=0.002)
    assert status.ended


async def test_an_open_wait_is_told_while_it_lasts() -> None:
    clock = NodeClock("trainer", bound_s=5)
    clock.start()
    waiting = asyncio.create_task(clock.wait(asyncio.sleep(0.1), "a record of collect"))
    await asyncio.sleep(0.05)
    status = clock.status()
    assert status.waits_for == "a record of collect"
    assert status.waits_s == pytest.approx(0.05, abs=0.03)
    assert status.idle_s == pytest.approx(status.waits_s, abs=0.01)
    await waiting


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

"""A store that doesn't answer costs what depends on it, within a bound, and is named."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from arriero.engine.broker import BrokerError
from arriero.engine.claim_stores import UrlStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.lineage import files
from arriero.engine.memory import MemoryBroker
from arriero.engine.patience import HELD_UP, Patience
from arriero.engine.runtime.waits import NodeClock
from arriero.launchers.cli import main
from tests.brokers import edge, take
from tests.hanging_store import HangingStore, hanging_at
from tests.inline_runs import tiny_model

LARGE, WITHIN_S = b"x" * 1000, 10  # the bound is 0.2 s, and the store hangs for 60


async def claims(url: str, patience_s: float = 0.2) -> ClaimChecked:
    broker = ClaimChecked(MemoryBroker(), UrlStore(url), above_bytes=0, patience_s=patience_s)
    await broker.declare([edge()], [])
    return broker


async def test_a_payload_that_no_store_takes_is_an_error_which_names_both() -> None:
    with hanging_at("rollouts") as url:
        broker = await claims(url)
        producer = broker.producer("rollouts", 0)
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(
                BrokerError, match=rf"can't write 1000 bytes to {url}/.*/[0-9a-f]+: .* didn't take"
            ):
                await producer.put("a", LARGE)
            with pytest.raises(
                BrokerError, match=r"hasn't answered for 0 s \(take [0-9a-f]+\), so it isn't asked"
            ):
                await producer.put("b", LARGE)
        assert len(HangingStore.asked) == 1, "it is asked again only when it has answered"
        HangingStore.goes_on.set()
        async with asyncio.timeout(WITHIN_S):
            while True:  # the late answer comes in a moment
                try:
                    assert await producer.put("c", LARGE)
                    break
                except BrokerError:
                    await asyncio.sleep(0.01)
        assert (await take(broker.consumer("rollouts", "reward"))).payload == LARGE


async def test_a_payload_that_no_store_gives_is_an_error_and_comes_again_when_it_does() -> None:
    with hanging_at("rollouts") as url:
        HangingStore.goes_on.set()
        broker = await claims(url)
        assert await broker.producer("rollouts", 0).put("a", LARGE)
        HangingStore.goes_on.clear()
        consumer = broker.consumer("rollouts", "reward")
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(
                BrokerError, match=rf"message a in {url}/.* can't be read: .* didn't give .* 0.2 s"
            ):
                await consumer.lease(wait_s=5)
            HangingStore.goes_on.set()
            while any(t.name.startswith("give ") for t in threading.enumerate()):  # noqa: ASYNC110  # the late one
                await asyncio.sleep(0.01)
            while (lease := await consumer.lease(wait_s=5)) is None:
                pass
        assert lease.payload == LARGE


async def test_the_status_of_a_node_says_what_holds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.engine.patience._TOLD_S", 0.05)
    clock, goes_on = NodeClock("generator", bound_s=5), threading.Event()
    HELD_UP.set(clock.held_up)
    patience = Patience("the store of payloads", 30)
    asking = asyncio.create_task(patience.answer("take abc", goes_on.wait))
    async with asyncio.timeout(WITHIN_S):
        while not clock.status().waits_for:  # noqa: ASYNC110  # another task's work
            await asyncio.sleep(0.01)
    assert clock.status().waits_for == "the store of payloads to take abc"
    assert clock.status().idle_s == 0
    goes_on.set()
    assert await asking
    assert not clock.status().waits_for


def test_calls_beside_each_other_are_no_hindrance_to_each_other() -> None:
    patience, first, second = Patience("it", 5), threading.Event(), threading.Event()

    def meet() -> bool:
        first.set()
        return second.wait(5)

    other = threading.Thread(target=patience.call, args=("meet", meet))
    other.start()
    assert first.wait(5)
    patience.call("go on", second.set)
    other.join()


def test_a_run_whose_record_hangs_ends_within_the_bound_and_says_which_file_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.5)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    words = [
        "run", "grpo", "--model", tiny_model(tmp_path / "tiny"), "--data", str(tmp_path / "rows.jsonl"),
        "--reward", "contains", "--reward.text", "3", "--sampling.max-new-tokens", "3", "--steps", "2",
        "--groups-per-step", "2", "--samples", "2", "--slots", "4", "--inline", "--quiet",
        "--checkpoints.every", "0", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    with hanging_at("rollouts/") as url:
        began = time.monotonic()
        assert main([*words, "--record-url", f"{url}/record"]) == 1
        assert time.monotonic() - began < 55  # the store hangs for 60
    told = capsys.readouterr().err
    assert "the record of the run can't be written" in told
    assert f"the store of the record {url}/record didn't" in told
    assert "rollouts" in told

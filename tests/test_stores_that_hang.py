"""A store that doesn't answer costs what depends on it, within a bound, and is named."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from arriero.engine.broker import BrokerError
from arriero.engine.claim_stores import UrlStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.lineage import files, writer
from arriero.engine.memory import MemoryBroker
from arriero.engine.patience import HELD_UP, Patience
from arriero.engine.runtime.waits import NodeClock
from arriero.launchers import recording
from arriero.launchers.cli import main
from arriero.schemas.lineage import Opened, RunEntry
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


def words(folder: Path, *more: str) -> list[str]:
    """Of a run of two steps in this process."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    return [
        "run", "grpo", "--model", tiny_model(folder / "tiny"), "--data", str(folder / "rows.jsonl"),
        "--reward", "contains", "--reward.text", "3", "--sampling.max-new-tokens", "3", "--steps", "2",
        "--groups-per-step", "2", "--samples", "2", "--slots", "4", "--inline", "--quiet",
        "--checkpoints.every", "0", "--run-dir", str(folder / "run"), *more,
    ]  # fmt: skip


def test_a_run_whose_record_hangs_ends_within_the_bound_and_says_which_file_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.5)
    with hanging_at("rollouts/") as url:
        began = time.monotonic()
        assert main(words(tmp_path, "--record-url", f"{url}/record")) == 1
        assert time.monotonic() - began < 55  # the store hangs for 60
    told = capsys.readouterr().err
    assert "the record of the run can't be written" in told
    assert f"the store of the record {url}/record didn't" in told
    assert "rollouts" in told


def test_ctrl_c_does_not_wait_for_a_record_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "_STOPPED_S", 0.2)
    with hanging_at("rollouts/") as url:

        def press_when_it_hangs() -> None:
            while not any(url.rpartition("/")[2] in path for path in HangingStore.asked):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=press_when_it_hangs, daemon=True)
        pressing.start()
        assert main(words(tmp_path, "--record-url", f"{url}/record")) == 130
        assert not HangingStore.goes_on.is_set(), "it was left behind"
        assert any(url in t.name for t in threading.enumerate()), "and still hangs"
    assert "the record in" in capsys.readouterr().err


def test_a_commit_to_a_file_system_of_this_host_that_hangs_is_given_up_and_so_is_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.3)
    record = writer.LineageWriter(str(tmp_path), Opened(run_id="r", graph_digest="0" * 64))
    (segment,) = (tmp_path / "chain").glob("*.jsonl")
    segment.unlink()
    os.mkfifo(segment)  # to open it for writing takes until somebody reads it
    with pytest.raises(
        TimeoutError, match=f"the store of the record {tmp_path} didn't take a commit within 0.3"
    ):
        record.commit([RunEntry(what="a", detail="b")])
    with segment.open("rb") as reader:
        while any(t.name.startswith("take a commit") for t in threading.enumerate()):
            time.sleep(0.01)
        reader.close()
    with pytest.raises(TimeoutError, match="hasn't answered before, so it isn't asked to be closed"):
        record.close("finished")


def test_who_is_in_a_hurry_waits_no_longer_than_he_says_also_for_what_was_asked_before() -> None:
    patience, never = Patience("it", 600), threading.Event()
    threading.Timer(0.1, patience.hurry, (0.1,)).start()
    with pytest.raises(TimeoutError, match="it didn't answer within"):
        patience.call("answer", lambda: never.wait(60))
    with pytest.raises(TimeoutError, match="isn't asked to answer"):
        patience.call("answer", lambda: never.wait(60))
    never.set()

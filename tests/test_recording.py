"""A recorder in trouble: the run hears of it, nobody waits for it, and how the run ended is told anyway."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from arriero.engine.broker import Broker
from arriero.engine.claim_stores import FolderStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.codec import encode
from arriero.engine.errors import UserError
from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.writer import LineageWriter
from arriero.engine.memory import MemoryBroker
from arriero.launchers.failures import Failure
from arriero.launchers.hub import declare
from arriero.launchers.launch import inline
from arriero.launchers.local import Process
from arriero.launchers.options import LaunchOptions
from arriero.launchers.progress import Quiet
from arriero.launchers.recording import Recording
from arriero.launchers.reporter import Reporter
from arriero.launchers.restarts import Restarts
from arriero.launchers.rundir import create
from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.lineage import Opened
from arriero.schemas.messages import ScoredGroup
from arriero.schemas.run import RunOptions
from tests.lineage_runs import scored_group
from tests.toys import toy_graph

OPTIONS = RunOptions(run_id="run", record=True)


def small_edges(num_bytes: int) -> GraphSpec:
    """The toy graph, with edges of 64 messages and so many bytes."""
    spec = toy_graph().check()
    room = Capacity(messages=64, bytes=num_bytes)
    return spec.model_copy(
        update={"nodes": tuple(n.model_copy(update={"capacity": room}) for n in spec.nodes)}
    )


async def started(
    path: Path, broker: Broker, spec: GraphSpec, fail: Callable[[Failure], None] = lambda failure: None
) -> Recording:
    await declare(broker, spec, OPTIONS)
    recording = Recording(spec, OPTIONS, create(path / "run"), fail=fail)
    recording.start(broker)
    return recording


async def put(broker: Broker, groups: Sequence[ScoredGroup]) -> None:
    """Onto the edge of the reward; whoever else was to take them has done so."""
    for group in groups:
        await broker.producer("reward", 0).put(group.id, encode(group))
        lease = await broker.consumer("reward", "collect-scored").lease(wait_s=1)
        assert lease is not None
        await lease.ack()


async def test_a_payload_that_is_gone_ends_the_run_and_not_the_record_in_silence(tmp_path: Path) -> None:
    broker = ClaimChecked(MemoryBroker(), FolderStore(tmp_path / "claims"))
    spec = toy_graph().check()
    await declare(broker, spec, OPTIONS)
    group = scored_group(0, length=20_000)
    await broker.producer("reward", 0).put(group.id, encode(group))
    for payload in (tmp_path / "claims").rglob("*.record"):
        payload.unlink()
    told: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
    recording = await started(tmp_path, broker, spec, told.set_result)
    failure = await asyncio.wait_for(told, 5)
    assert recording.failure == failure
    assert "edge reward: payload of message p-0>generator>reward" in failure.message
    began = time.monotonic()
    await recording.close(broker, finished=True, interrupted=asyncio.Event())
    assert time.monotonic() - began < 5  # nothing more will be stored
    await broker.close()


async def test_a_group_that_is_larger_than_those_before_it_finds_room(tmp_path: Path) -> None:
    broker = MemoryBroker()
    recording = await started(tmp_path, broker, small_edges(1 << 20))
    async with asyncio.timeout(10):
        await put(broker, [scored_group(k, length=3_000) for k in range(8)])  # 80 kB each
        await put(broker, [scored_group(8, length=19_000)])
    await recording.close(broker, finished=False, interrupted=asyncio.Event())
    await broker.close()


async def test_what_could_not_be_stored_in_time_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arriero.launchers.recording._FINISHED_S", 0.2)
    broker = MemoryBroker()
    recording = await started(tmp_path, broker, toy_graph().check())
    await recording.close(broker, finished=True, interrupted=asyncio.Event())  # its edges have no end
    assert recording.failure is not None
    assert "the record isn't whole" in recording.failure.message
    await broker.close()


async def test_how_a_run_ended_is_told_though_its_record_is_broken(tmp_path: Path) -> None:
    broker, spec = MemoryBroker(), toy_graph().check()
    await declare(broker, spec, OPTIONS)
    run = create(tmp_path / "run")
    failures = list[Failure]()
    recording = Recording(spec, OPTIONS, run, fail=failures.append)
    reporter = Reporter(
        spec, OPTIONS, run, vitals=Vitals(()), display=Quiet(), fail=failures.append, recording=recording
    )
    (run.lineage / "chain").rename(run.lineage / "chained")
    (run.lineage / "chain").write_text("no folder")
    summary = reporter.finish("finished", "", {})
    assert (summary.state, summary.lineage) == ("failed", None)
    assert "can't be completed" in summary.error
    assert run.read_summary() == summary
    await broker.close()


async def test_no_replica_starts_again_when_the_run_has_come_to_its_end(tmp_path: Path) -> None:
    names = list[str]()
    own = subprocess.Popen(["true"])  # noqa: ASYNC220  # it is there at once

    def start(name: str) -> Process:
        names.append(name)
        return p

    p = Process(role="generator", replica=0, process=own, log=tmp_path / "log")
    restarts = Restarts(toy_graph().check(), OPTIONS, start)
    assert restarts.may(p)
    restarts.over = True  # while the broker was asked to evict it
    assert await restarts.again(p, MemoryBroker(), 9) is None
    assert (names, dict(restarts.counts)) == ([], {})
    own.wait()


async def test_two_runs_have_two_records(tmp_path: Path) -> None:
    url = str(tmp_path / "record")
    LineageWriter(url, Opened(run_id="one", graph_digest="graph"))
    with pytest.raises(ChainError, match="holds the record of run one"):
        LineageWriter(url, Opened(run_id="two", graph_digest="graph"))


@pytest.mark.parametrize(
    ("url", "why"), [("foo://bar", "Protocol not known: foo"), ("/proc/nothing", "No such file")]
)
def test_a_place_that_can_not_hold_a_record_is_refused(tmp_path: Path, url: str, why: str) -> None:
    options, run = OPTIONS.model_copy(update={"record_url": url}), create(tmp_path / "run")
    with pytest.raises(UserError, match=f"can't be recorded at {url}: .*{why}.*choose another --record-url"):
        inline(toy_graph().check(), options, run, LaunchOptions())

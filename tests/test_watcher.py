"""A run that is watched over its broker alone: what is seen, and that nothing else can be done."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from arriero.engine.broker import BrokerError
from arriero.engine.errors import UserError
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access, Account
from arriero.engine.nats_link import Link
from arriero.engine.nats_names import Names
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers.cli import main
from arriero.launchers.seen import SEEN, Seen
from arriero.launchers.watcher import WATCHER, WATCHER_FILE, Pass, pass_for, read_pass, watching
from tests.brokers import edge, take
from tests.crashes import Crashing

RUN = "run"
NAMES = Names(RUN)
GENERATOR = Account(name="generator", fills=("rollouts",), writes=("ledger",))
ACCESS = Access(run=RUN, accounts=(GENERATOR, WATCHER))


@pytest.fixture
def server(folder: Path) -> Iterator[NatsServer]:
    server = start_server(folder, access=ACCESS)
    yield server
    server.stop()


@pytest_asyncio.fixture
async def owner(server: NatsServer) -> AsyncIterator[NatsBroker]:
    broker = await NatsBroker.connect(server.url, server.token, run=RUN)
    await broker.declare([edge("rollouts")], ["ledger"])
    await broker.producer("rollouts", 0).put("a", b"x")
    yield broker
    await broker.close()


def passed(server: NatsServer) -> Pass:
    return pass_for(server.url, server.token, RUN)


async def intruder(server: NatsServer) -> Link:
    return await Link.open(server.url, passed(server).credential, name="intruder", timeout_s=2)


SUBJECTS = (
    NAMES.view_subject,
    NAMES.edge_subject("rollouts"),
    NAMES.log_subject("ledger", "one"),
    f"{RUN}.end.rollouts.0",
    NAMES.beat_subject("generator-0-0"),
    NAMES.beat_subject("the=2Dwatchers-0-0"),
    "$JS.API.STREAM.INFO.run-rollouts",
    "$JS.API.STREAM.DELETE.run-rollouts",
    "$JS.API.STREAM.PURGE.run-rollouts",
    "$JS.API.STREAM.MSG.GET.run-rollouts",
    "$JS.API.DIRECT.GET.run-rollouts",
    "$JS.API.CONSUMER.CREATE.run-log-ledger",
    "$JS.API.CONSUMER.MSG.NEXT.run-rollouts.reward",
    "$JS.ACK.run-rollouts.reward.1.1.1.1.0",
    "$SYS.REQ.SERVER.PING",
    "_INBOX_generator.x",
)


async def test_a_watcher_can_send_nothing(server: NatsServer, owner: NatsBroker) -> None:
    link = await intruder(server)
    for subject in SUBJECTS:
        with pytest.raises(BrokerError, match="allows it to other roles only"):
            await link.request(subject, b"{}", what="break in")
    await link.close()
    lease = await take(owner.consumer("rollouts", "reward"))  # still there, for whom it is for
    assert (lease.id, lease.payload, lease.deliveries) == ("a", b"x", 1)


async def test_a_watcher_hears_the_view_and_nothing_else(server: NatsServer, owner: NatsBroker) -> None:
    heard: list[str] = []
    link = await intruder(server)

    async def hear(msg: Msg) -> None:
        heard.append(msg.subject)

    everything = (">", "_INBOX.>", "_INBOX_generator.>", f"{RUN}.>", f"{RUN}.edge.>", f"{RUN}.log.>", "$JS.>")
    for subject in (*everything, NAMES.view_subject):
        await link.subscribe(subject, hear)
    await link.flush()
    await owner.producer("rollouts", 0).put("b", b"x")
    await owner.append("ledger", "one", b"1")
    await owner.show(b"how things are")
    while not heard:  # noqa: ASYNC110  # another connection
        await asyncio.sleep(0.01)
    assert {*heard} == {NAMES.view_subject}
    await link.close()


async def test_a_copy_of_the_pass_opens_a_broker_with_tls_elsewhere(folder: Path) -> None:
    server = start_server(folder / "server", public="localhost", access=ACCESS)
    try:
        owner = await NatsBroker.connect(server.url, server.token, run=RUN)
        given = passed(server)
        (folder / "server" / "broker.crt").unlink()  # a watcher sees no file of the run
        shown = SEEN.dump_json(Seen(now=None, curves={"reward": (0.5,)}, rollouts=()))
        async with watching(given, f"nats://127.0.0.1:{server.port}") as (watcher, _):
            while (seen := watcher.seen()) is None:
                await owner.show(shown)
                await asyncio.sleep(0.01)
        assert seen.curves == {"reward": (0.5,)}
        await owner.close()
    finally:
        server.stop()


def test_what_is_no_pass_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--credentials", str(tmp_path / "none.json")]) == 2
    assert "a run that goes on has watcher.json" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert main(["top", "--credentials", str(tmp_path / "bad.json")]) == 2
    assert "is no watcher.json" in capsys.readouterr().err
    assert main(["top", "one", "two", "--credentials", "x"]) == 2


async def test_the_pass_of_another_run_is_refused(server: NatsServer) -> None:
    other = Pass(url=server.url, run="earlier", credential=f"{WATCHER.name}:{'0' * 64}")
    with pytest.raises(UserError, match="these credentials are of run earlier"):
        async with watching(other):
            pass


@pytest.mark.timeout(180)
def test_a_run_is_watched_to_its_end_with_nothing_but_the_pass(tmp_path: Path) -> None:
    run = Crashing(tmp_path, "--staleness", "1", steps=12)
    made = run.path / WATCHER_FILE
    run.until(made.exists)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    copy = tmp_path / "elsewhere" / "pass.json"
    copy.parent.mkdir()
    copy.write_bytes(made.read_bytes())

    async def watch() -> list[Seen]:
        seen: list[Seen] = []
        async with watching(read_pass(copy)) as (watcher, listening):
            while not (seen and seen[-1].now and seen[-1].now.state != "goes on"):
                await asyncio.wait({listening}, timeout=0.1)
                assert watcher.silent_s < 60
                if (word := watcher.seen()) is not None:
                    seen.append(word)
        return seen

    command = [sys.executable, "-m", "arriero", "top", "--credentials", str(copy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching_too:
        seen = asyncio.run(watch())
        shown, _ = watching_too.communicate(timeout=60)
    assert run.wait() == 0, run.errors
    last = seen[-1]
    assert last.now is not None
    assert (last.now.run, last.now.state, last.now.step) == ("run", "finished", 12)
    assert [n.name for n in last.now.nodes] == ["prompts", "generator", "reward", "advantage", "trainer"]
    readers = {e.name: e.to for e in last.now.edges}
    assert readers["prompts"] == ("generator",)
    assert any(n.does.startswith("waits") for s in seen if s.now for n in s.now.nodes)
    assert any(n.tokens_per_s for s in seen if s.now for n in s.now.nodes if n.name == "trainer")
    assert len(last.curves["reward"]) == len(last.curves["staleness_mean"]) == 12
    assert len(last.rollouts) == 5
    assert {r.outcome for r in last.rollouts} <= {"ok", "wrong"}
    assert all("->" in r.text and r.tokens >= 1 for r in last.rollouts)
    told = SEEN.dump_json(last).decode()
    assert str(tmp_path) not in told, "who watches isn't told where things lie"
    assert watching_too.returncode == 0
    assert "finished  step 12" in shown
    assert not made.exists(), "the pass goes with the run"

"""What each account of a run's broker may do, on a real server; and that secrets are nowhere to be read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from arriero.engine.broker import BrokerError
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access, Account, credential, derived
from arriero.engine.nats_cluster import Cluster
from arriero.engine.nats_link import Link
from arriero.engine.nats_names import Names
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers.hub import access
from arriero.launchers.watcher import WATCHER_FILE, read_pass
from arriero.schemas.run import RunOptions
from tests.brokers import edge, take
from tests.crashes import Crashing
from tests.toys import toy_graph

RUN = "run"
NAMES = Names(RUN)
REWARD = Account(name="reward", fills=("scored",), empties=(("rollouts", "reward"),), writes=("ledger",))
GENERATOR = Account(name="generator", fills=("rollouts",), writes=("ledger",), reads=("loop",))


@pytest.fixture
def server(folder: Path) -> Iterator[NatsServer]:
    server = start_server(folder, access=Access(run=RUN, accounts=(REWARD, GENERATOR)))
    yield server
    server.stop()


@pytest_asyncio.fixture
async def owner(server: NatsServer) -> AsyncIterator[NatsBroker]:
    broker = await NatsBroker.connect(server.url, server.token, run=RUN)
    await broker.declare([edge("rollouts"), edge("scored", groups=("collect",))], ["ledger", "loop"])
    yield broker
    await broker.close()


async def member(server: NatsServer, name: str) -> NatsBroker:
    return await NatsBroker.connect(server.url, credential(server.token, name), run=RUN, timeout_s=5)


async def test_a_role_does_its_work_with_its_account(server: NatsServer, owner: NatsBroker) -> None:
    generator, reward = await member(server, "generator"), await member(server, "reward")
    for broker, key in ((generator, "generator-0-0"), (reward, "reward-1-0")):
        broker.start_pulse(key, lambda: b"well", interval_s=0.05)
    await generator.producer("rollouts", 0).put("a", b"x")
    await generator.producer("rollouts", 0).put("b", b"x")
    await generator.producer("rollouts", 0).end()
    consumer = reward.consumer("rollouts", "reward")
    await (await take(consumer)).ack()
    for _ in range(3):
        await (await take(consumer)).nack("it fails")
    assert [dead.id for dead in await reward.dead_letters()] == ["b"]
    assert await reward.producer("scored", 1).put("a>reward", b"y")
    assert await reward.append("ledger", "one", b"1")
    assert await generator.appended("ledger", "one")
    assert await anext(generator.follow("ledger")) == b"1"
    await owner.append("loop", "v0", b"version 0")
    assert await anext(generator.follow("loop")) == b"version 0"
    while (await owner.beats()).keys() != {"generator-0-0", "reward-1-0"}:  # noqa: ASYNC110  # other threads
        await asyncio.sleep(0.02)
    for broker in (generator, reward):
        await broker.close()


async def test_what_is_another_roles_is_refused_at_once(server: NatsServer, owner: NatsBroker) -> None:
    await owner.producer("rollouts", 0).put("a", b"x")
    reward, generator = await member(server, "reward"), await member(server, "generator")
    began = time.monotonic()
    with pytest.raises(
        BrokerError, match=r"allows it to other roles only: \$JS\.API\.STREAM\.INFO\.run-log-loop"
    ):
        await reward.append("loop", "v9", b"forged")
    with pytest.raises(BrokerError, match="allows it to other roles only"):
        await generator.producer("scored", 0).put("forged", b"y")
    with pytest.raises(BrokerError, match="allows it to other roles only"):
        await generator.consumer("rollouts", "reward").lease(wait_s=1)
    assert time.monotonic() - began < 10  # of a bound of 20 s
    for broker in (reward, generator):
        await broker.close()


@pytest.mark.parametrize(
    ("subject", "payload"),
    [
        (NAMES.edge_subject("rollouts"), b"a record"),
        (NAMES.log_subject("loop", "v9"), b"a version"),
        (NAMES.end_subject("rollouts", "0"), b"an end"),
        (NAMES.beat_subject("generator-0-0"), b"a heartbeat"),
        ("$JS.API.STREAM.DELETE.run-rollouts", b""),
        ("$JS.API.STREAM.PURGE.run-log-ledger", b""),
        ("$JS.API.CONSUMER.CREATE.run-rollouts.more", b"{}"),
        ("$JS.API.STREAM.MSG.GET.run-rollouts", b'{"seq": 1}'),
        ("$JS.API.STREAM.UPDATE.run-rollouts", b"{}"),
    ],
)
async def test_a_reward_that_was_taken_over_reaches_nothing_else(
    server: NatsServer, owner: NatsBroker, subject: str, payload: bytes
) -> None:
    link = await Link.open(server.url, credential(server.token, "reward"), name="intruder", timeout_s=5)
    with pytest.raises(BrokerError, match="allows it to other roles only"):
        await link.request(subject, payload, what="break in")
    await link.close()
    assert (await owner.depth("rollouts")).messages == 0


async def test_nobody_overhears_the_answers_to_others(server: NatsServer, owner: NatsBroker) -> None:
    heard: list[bytes] = []
    intruder = await Link.open(server.url, credential(server.token, "reward"), name="intruder", timeout_s=5)

    async def hear(msg: object) -> None:
        heard.append(b"something")

    for subject in (">", "_INBOX.>", "_INBOX_generator.>", f"{RUN}.>", f"{RUN}.log.>"):
        await intruder.subscribe(subject, hear)
    await intruder.flush()
    generator = await member(server, "generator")
    await generator.producer("rollouts", 0).put("a", b"x")
    await owner.append("ledger", "one", b"1")
    await intruder.flush()
    assert heard == []
    await generator.close()
    await intruder.close()


async def test_the_password_of_one_role_opens_no_other(server: NatsServer) -> None:
    known = credential(server.token, "reward").partition(":")[2]
    for stolen in (known, f"generator:{known}", f"nobody:{known}", derived(known, "account generator")):
        with pytest.raises(BrokerError, match="refused the token"):
            await NatsBroker.connect(server.url, stolen, run=RUN, timeout_s=5)


def test_a_graphs_accounts_name_what_its_roles_work_with() -> None:
    options = RunOptions(run_id="r", record=True)
    accounts = {a.name: a for a in access(toy_graph().check(), options).accounts}
    assert accounts["reward"] == Account(
        name="reward",
        fills=("reward",),
        empties=(("generator", "reward-records"),),
        writes=("ledger", "control"),
    )
    assert accounts["trainer"].writes == ("ledger", "control", "loop-weights")
    assert (accounts["trainer"].fills, accounts["prompts"].empties) == ((), ())
    assert accounts["generator"].reads == ("loop-weights",)


# --- beyond loopback --------------------------------------------------------------------------------------


def test_a_server_for_other_hosts_speaks_tls_alone(folder: Path) -> None:
    server = start_server(folder, public="localhost")
    try:
        listening = [
            c.laddr for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"
        ]
        assert [at.port for at in listening] == [server.port]
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            said = plain.recv(4096)
            assert json.loads(said.removeprefix(b"INFO "))["tls_required"]
            # Who goes on without TLS is not listened to, whatever he says.
            options = {"user": "the-owner", "pass": server.token, "verbose": True}
            plain.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
            plain.settimeout(5)
            with suppress(ConnectionResetError):
                assert b"PONG" not in plain.recv(4096)
    finally:
        server.stop()


async def test_roles_keep_to_their_accounts_under_tls(folder: Path) -> None:
    server = start_server(folder, public="localhost", access=Access(run=RUN, accounts=(REWARD, GENERATOR)))
    try:
        owner = await NatsBroker.connect(server.url, server.token, run=RUN)
        await owner.declare([edge("rollouts")], ["ledger"])
        generator = await member(server, "generator")
        assert await generator.producer("rollouts", 0).put("a", b"x")
        with pytest.raises(BrokerError, match="allows it to other roles only"):
            await generator.consumer("rollouts", "reward").lease(wait_s=1)
        for broker in (generator, owner):
            await broker.close()
    finally:
        server.stop()


def test_a_server_beyond_loopback_without_tls_is_refused(folder: Path) -> None:
    with pytest.raises(BrokerError, match=r"0\.0\.0\.0 isn't on loopback, and would be served without TLS"):
        start_server(folder, host="0.0.0.0")
    others = Cluster(name="hub-0", route="127.0.0.1:6222", others=("10.0.0.7:6222",))
    with pytest.raises(BrokerError, match=r"10\.0\.0\.7:6222 isn't on loopback"):
        start_server(folder, cluster=others)


# --- secrets ----------------------------------------------------------------------------------------------

GIVEN = {
    "HF_TOKEN": "hf_cbd71c2a4e",
    "WANDB_API_KEY": "wandb-0be85d04",
    "AWS_SECRET_ACCESS_KEY": "aws-91f3aa17",
}


@pytest.mark.timeout(300)
def test_no_secret_of_a_run_is_in_its_files_or_in_a_process_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    run = Crashing(tmp_path, "--staleness", "1", steps=4)
    run.until(lambda: run.steps() >= 1)
    processes = [run.of("--role", role) for role in ("prompts", "generator", "reward", "trainer")]
    processes += [run.of("launchers.hub"), run.of("nats-server.conf")]
    words = [" ".join(p.cmdline()) for p in psutil.process_iter() if _readable(p)]
    named = ("ARRIERO_TOKEN", "ARRIERO_WEIGHTS_SECRET")
    made = {value for p in processes[:-1] for name, value in p.environ().items() if name in named}
    assert len(made) == 6, "the hub's token, one of each role, and the weights' secret"
    made.add(read_pass(run.path / WATCHER_FILE).credential)
    secrets = [text.rpartition(":")[2] for text in made]
    root = processes[-2].environ()["ARRIERO_TOKEN"]
    assert not any(root in f"{p.environ()}" for p in processes[:4]), "a role knows the token of all"
    assert not any("ARRIERO_TOKEN" in p.environ() for p in processes[-1:])
    assert not any(secret in said for secret in (*secrets, *GIVEN.values()) for said in words)
    readable = [p for p in run.path.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    during = [(str(p), p.read_bytes()) for p in readable]
    assert run.wait() == 0, run.errors
    after = [(str(p), p.read_bytes()) for p in run.path.rglob("*") if p.is_file()]
    names = {Path(name).name for name, _ in after}
    assert {
        "manifest.json",
        "graph.json",
        "options.json",
        "ledger.jsonl",
        "summary.json",
        "trainer-0.log",
    } <= names
    told = [*during, *after, ("what the command said", run.errors.encode())]
    found = [(name, s) for s in (*secrets, *GIVEN.values()) for name, text in told if s.encode() in text]
    assert found == []


def _readable(process: psutil.Process) -> bool:
    try:
        return bool(process.cmdline())
    except psutil.Error:
        return False

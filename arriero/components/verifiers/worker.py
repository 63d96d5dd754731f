"""A worker: builds one reward, then answers jobs until its input ends. The pool kills it, also in mid-job.

Standard output belongs to the protocol; what the reward's code prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from arriero.components.verifiers.reward import Isolated, describe, no_verdict
from arriero.components.verifiers.wire import HEADER_BYTES, Done, Job, Ready, Setup, frame
from arriero.engine.codec import decode
from arriero.engine.errors import UserError
from arriero.engine.portable import from_json
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the pool at the other end of the pipes."""
    _die_with_the_pool()
    source, sink = _pipes()
    setup = _read(source, Setup)
    if setup is None:
        return
    try:
        reward = from_json(json.loads(setup.reward))
        assert isinstance(reward, Isolated)
        reward.prepare()
    except Exception as error:  # noqa: BLE001  # told to the pool, which tells the user
        sink.write(frame(Ready(str(error) if isinstance(error, UserError) else describe(error))))
        return
    _limit_memory(setup.memory_mb)
    sink.write(frame(Ready("")))
    if reward.width > 1:
        asyncio.run(_serve_many(reward, source, sink, setup.time_s))
    else:
        _serve(reward, source, sink)


def _serve(reward: Isolated, source: BinaryIO, sink: BinaryIO) -> None:
    while (job := _read(source, Job)) is not None:
        found = _answer(reward, job)
        done = found if isinstance(found, Done) else asyncio.run(_finished(job.id, found))
        sink.write(frame(done))


async def _serve_many(reward: Isolated, source: BinaryIO, sink: BinaryIO, time_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    async def one(job: Job) -> None:
        found = _answer(reward, job)
        sink.write(frame(found if isinstance(found, Done) else await _in_time(job.id, found, time_s)))

    while (job := await loop.run_in_executor(None, _read, source, Job)) is not None:
        task = asyncio.create_task(one(job))
        running.add(task)
        task.add_done_callback(running.discard)


def _answer(reward: Isolated, job: Job) -> Done | Awaitable[Score]:
    try:
        prompt = decode(job.prompt, Prompt)
        if not job.rollout:
            return Done(job.id, detail=reward.unscorable(prompt))
        found = reward.score(prompt, decode(job.rollout, Rollout))
        return _done(job.id, found) if isinstance(found, Score) else found
    except BaseException as error:  # noqa: BLE001  # libraries raise BaseException on their own time limits
        return _failed(job.id, error)


async def _finished(id: int, found: Awaitable[Score]) -> Done:
    try:
        return _done(id, await found)
    except Exception as error:  # noqa: BLE001  # as above
        return _failed(id, error)


async def _in_time(id: int, found: Awaitable[Score], time_s: float) -> Done:
    try:
        async with asyncio.timeout(time_s):
            return await _finished(id, found)
    except TimeoutError:
        return Done(id, outcome=Outcome.TIMEOUT, detail=f"over {time_s:g} s")


def _done(id: int, score: Score) -> Done:
    return Done(id, score.value, score.outcome, score.detail, score.raw)


def _failed(id: int, error: BaseException) -> Done:
    # After memory ran out nothing in this process can be relied on.
    traceback.print_exception(error)
    score = no_verdict(describe(error))
    return Done(id, score.value, score.outcome, score.detail, None, isinstance(error, MemoryError))


def _read(source: BinaryIO, kind: type[T]) -> T | None:
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return msgspec.msgpack.decode(source.read(int.from_bytes(header, "big")), type=kind)


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return source, sink


def _limit_memory(memory_mb: int) -> None:
    pages = (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) if sys.platform == "linux" else 0
    )
    most = pages * resource.getpagesize() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_the_pool() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()

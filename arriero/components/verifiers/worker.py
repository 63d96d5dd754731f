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
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from arriero.components.verifiers.reward import Isolated, no_verdict
from arriero.components.verifiers.wire import HEADER_BYTES, Done, Job, Ready, Setup, Verdict, frame
from arriero.engine.codec import decode
from arriero.engine.errors import UserError, describe
from arriero.engine.portable import from_json
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_LONG_S = 0.01  # a rollout that takes longer is answered for by itself


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
    """Of a job's rollouts as many as take no longer than `_LONG_S` together, and one that does."""
    while (job := _read(source, Job)) is not None:
        found = _begun(reward, job)
        if isinstance(found, Done):
            sink.write(frame(found))
            continue
        scores: list[Verdict] = []
        spent, until = False, time.monotonic() + _LONG_S
        for rollout in job.rollouts:
            score, spent = _scored(reward, found, rollout)
            verdict, spent = (score, spent) if isinstance(score, Verdict) else asyncio.run(_finished(score))
            scores.append(verdict)
            if spent or time.monotonic() > until:
                break
        sink.write(frame(Done(job.id, tuple(scores), spent=spent)))


async def _serve_many(reward: Isolated, source: BinaryIO, sink: BinaryIO, time_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    async def one(job: Job) -> None:
        found = _begun(reward, job)
        if not isinstance(found, Done):
            score, spent = _scored(reward, found, job.rollouts[0])
            if not isinstance(score, Verdict):
                score, spent = await _in_time(score, time_s)
            found = Done(job.id, (score,), spent=spent)
        sink.write(frame(found))

    while (job := await loop.run_in_executor(None, _read, source, Job)) is not None:
        task = asyncio.create_task(one(job))
        running.add(task)
        task.add_done_callback(running.discard)


def _begun(reward: Isolated, job: Job) -> Prompt | Done:
    """The prompt whose rollouts are to be scored, or the answer already."""
    try:
        prompt = decode(job.prompt, Prompt)
        return prompt if job.rollouts else Done(job.id, unscorable=reward.unscorable(prompt))
    except BaseException as error:  # noqa: BLE001  # libraries raise BaseException on their own time limits
        verdict, spent = _failed(error)
        if job.rollouts:
            return Done(job.id, (verdict,) * len(job.rollouts), spent=spent)
        return Done(job.id, unscorable=verdict.detail, spent=spent)


def _scored(reward: Isolated, prompt: Prompt, rollout: bytes) -> tuple[Verdict | Awaitable[Score], bool]:
    """The verdict, or what it is awaited from; and whether this process is of no further use."""
    try:
        found = reward.score(prompt, decode(rollout, Rollout))
        return (_verdict(found), False) if isinstance(found, Score) else (found, False)
    except BaseException as error:  # noqa: BLE001  # as above
        return _failed(error)


async def _finished(found: Awaitable[Score]) -> tuple[Verdict, bool]:
    try:
        return _verdict(await found), False
    except Exception as error:  # noqa: BLE001  # as above
        return _failed(error)


async def _in_time(found: Awaitable[Score], time_s: float) -> tuple[Verdict, bool]:
    try:
        async with asyncio.timeout(time_s):
            return await _finished(found)
    except TimeoutError:
        return Verdict(0.0, Outcome.TIMEOUT, f"over {time_s:g} s"), False


def _verdict(score: Score) -> Verdict:
    return Verdict(score.value, score.outcome, score.detail, score.raw)


def _failed(error: BaseException) -> tuple[Verdict, bool]:
    # After memory ran out nothing in this process can be relied on.
    traceback.print_exception(error)
    return _verdict(no_verdict(describe(error))), isinstance(error, MemoryError)


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

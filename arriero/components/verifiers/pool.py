"""`Pool`: the workers of one reward. A hung or crashed one is killed and replaced; the others go on.

| who waits | for what        | unblocked by                                             |
|-----------|-----------------|----------------------------------------------------------|
| a job     | a free place    | another job's end, or a replacement's start (`start_s`)   |
| a job     | its own answer  | the worker, its death, or the time limit (then SIGKILL)   |

An answer names its job, so that a late or lost one can't become another one's. The rollouts of a group go to
a worker together, or in as many parts as there are workers. It answers for those it has scored as soon as one
has taken long, and the others are asked again, so that a job lasts hardly longer than its slowest rollout. Of
a job that ends badly every rollout is asked again alone.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from arriero.components.verifiers.canaries import response
from arriero.components.verifiers.process import Overdue, WorkerDied, WorkerProcess
from arriero.components.verifiers.reward import Isolated, RolloutReward, Scorer, no_verdict, side_by_side
from arriero.components.verifiers.wire import Done, Job, Setup
from arriero.engine.codec import encode
from arriero.engine.errors import UserError
from arriero.engine.portable import to_json
from arriero.engine.runtime.context import count
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

_STARTS = 3  # in a row that may fail


class Pool(Scorer):
    """Open it with `async with`. Raises UserError where a worker can't build the reward."""

    def __init__(self, reward: Isolated) -> None:
        self._reward = reward
        self._checks = type(reward).unscorable is not RolloutReward.unscorable
        limits = reward.limits
        self._setup = Setup(json.dumps(to_json(reward)).encode(), limits.memory_mb, limits.time_s)
        # Coroutines are ended by their own worker; this one kills it if it can't even do that.
        self._patience_s = limits.time_s if reward.width == 1 else 1.5 * limits.time_s + 1
        self._free: asyncio.Queue[WorkerProcess | UserError] = asyncio.Queue()
        self._alive: set[WorkerProcess] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Lock()
        self._first: bytes | None = None  # a prompt to warm workers with
        self._jobs = 0
        self.replaced = 0

    async def __aenter__(self) -> Self:
        for _ in range(self._reward.workers):
            self._start()
        try:
            await asyncio.gather(*self._starting)
            self._raise_if_broken()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        """The score, or how it came that there is none."""
        return (await self.scores(prompt, (rollout,)))[0]

    async def scores(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        asked, found = encode(prompt), dict[int, Score]()
        left = deque((k, encode(self._read(rollout))) for k, rollout in enumerate(rollouts))
        lanes = len(rollouts) if self._reward.width > 1 else self._reward.workers

        async def lane() -> None:
            while left:
                share = [left.popleft() for _ in range(math.ceil(len(left) / lanes))]
                scores = await self._scored(asked, tuple(data for _, data in share))
                found.update((k, score) for (k, _), score in zip(share, scores, strict=False))
                left.extendleft(reversed(share[len(scores) :]))

        await side_by_side(lane() for _ in range(min(lanes, len(rollouts))))
        return [found[k] for k in range(len(rollouts))]

    def _read(self, rollout: Rollout) -> Rollout:
        """What the reward reads of it."""
        return response(rollout.text, finish=rollout.finish) if self._reward.text_only else rollout

    async def _scored(self, prompt: bytes, rollouts: tuple[bytes, ...]) -> list[Score]:
        """The scores of the first rollouts, at least one."""
        try:
            done = await self._ask(prompt, rollouts)
        except (Overdue, WorkerDied) as error:
            if len(rollouts) > 1:  # one of them was the cause
                return [score for r in rollouts for score in await self._scored(prompt, (r,))]
            if isinstance(error, Overdue):
                return [no_verdict(f"over {self._reward.limits.time_s:g} s", Outcome.TIMEOUT)]
            return [no_verdict(str(error))]
        return [Score(value=v.value, outcome=v.outcome, detail=v.detail, raw=v.raw) for v in done.scores]

    async def unscorable(self, prompt: Prompt) -> str:
        """Why no response to `prompt` can be scored; a prompt whose check hangs or crashes is unscorable."""
        if not self._checks and not self._reward.slow_start:
            return ""
        data = encode(prompt)
        try:
            if self._reward.slow_start and self._first is None:
                await self._warm_all(data)
            done = await self._ask(data, ())
        except (Overdue, WorkerDied) as error:
            return f"the check of its answer failed: {error}"
        return done.unscorable

    async def _ask(self, prompt: bytes, rollouts: tuple[bytes, ...]) -> Done:
        """The answer to one job. Raises Overdue and WorkerDied for this job alone."""
        worker = await self._place()
        self._jobs += 1
        job = Job(self._jobs, prompt, rollouts)
        try:
            done = await worker.ask(job, self._patience_s)
        except (Overdue, WorkerDied):
            await self._replace(worker)
            if self._reward.width == 1:
                raise
            return await self._ask_alone(job)  # another of the worker's jobs may have been the cause
        except BaseException:
            await self._replace(worker)  # cancelled in mid-job: the answer would come too late
            raise
        if done.spent:
            await self._replace(worker)
        else:
            self._free.put_nowait(worker)
        return done

    async def _ask_alone(self, job: Job) -> Done:
        """The answer of a worker that has no other job."""
        async with self._alone:
            worker = WorkerProcess()
            try:
                if problem := await worker.start(self._setup, self._reward.limits.start_s):
                    raise WorkerDied(problem)
                return await worker.ask(job, self._patience_s)
            finally:
                await worker.kill()

    async def _warm_all(self, prompt: bytes) -> None:
        """Let every worker meet its first prompt without hurry."""
        self._first = prompt
        workers = [await self._place() for _ in range(self._reward.workers)]
        try:
            await asyncio.gather(*(self._warm(w) for w in workers))
        except (Overdue, WorkerDied):
            await asyncio.gather(*(self._replace(w) for w in workers))
            raise
        for worker in workers:
            self._free.put_nowait(worker)

    async def _warm(self, worker: WorkerProcess) -> None:
        if self._reward.slow_start and self._first is not None:
            self._jobs += 1
            await worker.ask(Job(self._jobs, self._first), self._reward.limits.start_s)

    async def _place(self) -> WorkerProcess:
        while True:
            worker = await self._free.get()
            if isinstance(worker, UserError):
                self._free.put_nowait(worker)
                raise worker
            if worker in self._alive:
                return worker

    async def _replace(self, worker: WorkerProcess) -> None:
        if worker not in self._alive:  # another of its jobs has done so
            return
        self._alive.discard(worker)
        self._start()
        self.replaced += 1
        count("workers_replaced")
        await worker.kill()

    def _start(self) -> None:
        task = asyncio.create_task(self._started())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _started(self) -> None:
        limits, problem = self._reward.limits, ""
        for _ in range(_STARTS):
            worker = WorkerProcess()
            try:
                problem = await worker.start(self._setup, limits.start_s)
                if not problem:
                    await self._warm(worker)
            except (WorkerDied, Overdue) as error:
                await worker.kill()
                problem = f"its worker died at the start: {error}"
                continue
            except BaseException:
                await worker.kill()
                raise
            if problem:
                await worker.kill()
                break
            self._alive.add(worker)
            for _ in range(self._reward.width):
                self._free.put_nowait(worker)
            return
        self._free.put_nowait(UserError(f"reward {self._reward.label} can't run in a worker: {problem}"))

    def _raise_if_broken(self) -> None:
        kept = [self._free.get_nowait() for _ in range(self._free.qsize())]
        for item in kept:
            if isinstance(item, UserError):
                raise item
            self._free.put_nowait(item)

    async def _close(self) -> None:
        for task in tuple(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(w.kill() for w in self._alive))
        self._alive.clear()

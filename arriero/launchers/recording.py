"""The lineage of a run, recorded by the process that launched it, beside the reporter."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from arriero.engine.broker import Broker, BrokerError
from arriero.engine.lineage.recorder import Recorder
from arriero.engine.lineage.writer import LineageWriter
from arriero.launchers.failures import Failure, raised
from arriero.launchers.resuming import read_history
from arriero.launchers.rundir import RunDir
from arriero.launchers.stamping import model_sha256, stamp
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Event
from arriero.schemas.lineage import Anchor, Opened, RunEntry, RunState
from arriero.schemas.messages import ScoredGroup
from arriero.schemas.run import RunOptions

_FINISHED_S, _BROKEN_S = 60.0, 0.5  # to store what stands on the edges; a stopped run is over soon
_STOPPED_S = 30.0  # that the store may take for a call when the user wants to be off: closing imports pyarrow


class Recording:
    """`event` takes the events of the ledger; `start` and `close` stand around the life of the broker."""

    def __init__(
        self, spec: GraphSpec, options: RunOptions, run: RunDir, *, fail: Callable[[Failure], None]
    ) -> None:
        self._run, self._fail = run, fail
        self.failure: Failure | None = None  # why the record isn't whole
        opened = Opened(
            run_id=options.run_id,
            graph_digest=spec.digest,
            manifest_sha256=_sha256(run.manifest),
            options_sha256=_sha256(run.options),
            health=True,
        )
        resumed, _ = read_history(run)
        self._writer = LineageWriter(options.record_url or str(run.lineage), opened, resumed)
        self._recorder = Recorder(spec, self._writer, lease_s=options.lease_s)
        self.event: Callable[[Event], None] = self._recorder.event
        self.newest: Sequence[ScoredGroup] = self._recorder.newest  # the last that came
        self._task: asyncio.Task[None] | None = None

    def start(self, broker: Broker) -> None:
        self._task = asyncio.create_task(self._guarded(broker))

    async def close(self, broker: Broker, *, finished: bool, interrupted: asyncio.Event) -> None:
        """When nobody sends any more: store what still stands on the edges, and stop.

        A store that hangs is given up at once if the run isn't `finished`, and else when it is `interrupted`.
        """
        if not finished:
            self._recorder.hurry(_STOPPED_S)
        hurrying = asyncio.create_task(self._hurry_when(interrupted))
        try:
            await self._close(broker, finished=finished)
        finally:
            hurrying.cancel()

    async def _hurry_when(self, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        self._recorder.hurry(_STOPPED_S)

    async def _close(self, broker: Broker, *, finished: bool) -> None:
        if self._task is None:
            return
        bound_s = _FINISHED_S if finished else _BROKEN_S
        draining = asyncio.create_task(self._recorder.drain(broker, bound_s=bound_s))
        await asyncio.wait({draining, self._task}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, self._task):
            task.cancel()
        whole, _ = await asyncio.gather(draining, self._task, return_exceptions=True)
        if finished and whole is not True and self.failure is None:
            told = f"the record isn't whole: what stood on the edges wasn't stored within {bound_s:g} s"
            self._failed(Failure(message=told))

    def note(self, what: str, detail: str) -> None:
        """Something that happened to the run itself."""
        self._recorder.note(RunEntry(what=what, detail=detail))

    def seal(self, state: RunState) -> Anchor:
        """The last entry; the head of the chain, in the model's files too. OSError if it can't be written."""
        anchor = self._recorder.seal(state, model_sha256(self._run.model))
        stamp(self._run.model, anchor.head)
        return anchor

    async def _guarded(self, broker: Broker) -> None:
        try:
            await self._recorder.run(broker)
        except OSError as error:
            told = f"the record of the run can't be written: {error}; run with --record false to go without"
            self._failed(Failure(message=told, weight=0))
        except BrokerError as error:  # a broker that is lost is told by others, who see it first
            self._failed(Failure(message=f"the record lost the edges: {error}", weight=4))
        except Exception as error:  # noqa: BLE001  # a run without its record must not go on
            self._failed(raised(error))

    def _failed(self, failure: Failure) -> None:
        self.failure = failure
        self._fail(failure)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

"""Where the measures of a run go besides its own files, step by step: TensorBoard, Weights & Biases, MLflow.

The last two are other people's programs, may be slow or fail, and so work in threads of their own: a step
waits for none of them, and one that fails is told of once and left out; `arriero export` writes it later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from arriero.engine.errors import UserError, one_line
from arriero.launchers.board import Board
from arriero.launchers.exports.subject import Subject, subject
from arriero.launchers.rundir import RunDir
from arriero.launchers.step_lines import Scalars
from arriero.schemas.run import SinkName

_log = logging.getLogger(__name__)
_MOST_STEPS = 1000  # that wait to be written
_FINISH_S = 30.0
_NEEDS: dict[SinkName, tuple[str, ...]] = {
    "tensorboard": (), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}  # fmt: skip
_MODULES: dict[SinkName, str] = {"wandb": "weights_and_biases", "mlflow": "ml_flow"}
Step = tuple[int, float, Scalars]


class Sink(Protocol):
    """Takes steps as they are made: version, seconds since 1970, numbers by tag; then how the run ended."""

    def step(self, step: int, time_s: float, found: Scalars) -> None: ...
    def finish(self, about: Subject) -> str: ...


def can_write(names: Collection[SinkName], *, prometheus: bool) -> None:
    """Raises UserError if a sink needs what isn't installed."""
    if absent := [f"--sinks {n} needs {m}" for n in names for m in _NEEDS[n] if find_spec(m) is None]:
        raise UserError(f"{absent[0]}: pip install 'arriero[export]'")
    if prometheus and find_spec("prometheus_client") is None:
        raise UserError("--metrics-port needs prometheus_client: pip install 'arriero[metrics]'")


class Sinks:
    """All sinks of a run. Methods raise OSError where TensorBoard's file can't be written."""

    def __init__(self, names: Collection[SinkName], run: RunDir) -> None:
        self._board = Board(run.tensorboard) if "tensorboard" in names else None
        self._others = [_Aside(name, run) for name in dict.fromkeys(names) if name != "tensorboard"]

    def step(self, step: int, time_s: float, found: Scalars) -> None:
        if self._board is not None:
            for tag, value in found:
                self._board.add_scalar(tag, value, step, time_s)
        for other in self._others:
            other.put((step, time_s, found))

    def close(self) -> None:
        """When the summary is written."""
        for other in self._others:
            other.end()
        by = time.monotonic() + _FINISH_S  # of all together
        for other in self._others:
            other.join(by)
        if self._board is not None:
            self._board.close()


class _Aside:
    """A sink in its thread, from the first step on."""

    def __init__(self, name: SinkName, run: RunDir) -> None:
        self._name: SinkName = name
        self._run = run
        self._steps: queue.Queue[Step | None] = queue.Queue(_MOST_STEPS)
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        if self._failed:
            return
        try:
            self._steps.put_nowait(step)
        except queue.Full:
            self._behind()

    def end(self) -> None:
        """No step comes any more."""
        try:
            self._steps.put_nowait(None)
        except queue.Full:
            self._behind()

    def join(self, by: float) -> None:
        """Until it has finished or failed, or `time.monotonic` says `by`."""
        if self._failed:
            return
        self._thread.join(max(by - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._fail(f"it didn't finish within {_FINISH_S:g} s")

    def _work(self) -> None:
        try:
            sink: Sink | None = None
            while (step := self._steps.get()) is not None:
                sink = sink or self._opened()
                sink.step(*step)
            if sink is not None:
                sink.finish(subject(str(self._run.path)))
        except Exception as error:  # noqa: BLE001  # whatever it is, the run goes on without this sink
            self._fail(one_line(error) or type(error).__name__)

    def _opened(self) -> Sink:
        module = import_module(f"arriero.launchers.exports.{_MODULES[self._name]}")
        made: Sink = module.Live(subject(str(self._run.path)), self._run.path / self._name)
        return made

    def _behind(self) -> None:
        if not self._failed:
            self._fail(f"it is {_MOST_STEPS} steps behind")

    def _fail(self, why: str) -> None:
        self._failed = True
        _log.warning(
            "the sink %s has failed and is left out: %s; when the run is over: arriero export %s --to %s",
            self._name, why, self._run.path, self._name,
        )  # fmt: skip

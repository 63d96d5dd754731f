"""Steps of a run taken again from its record: the trainer at any version, and every step after it.

    model directory, or the newest checkpoint before -> recorded batches -> version K - 1 -> step K, compared

On one rank and the same kind of device all is as it was, bit for bit: measures, and the weights by their
fingerprint. Sums over several ranks, or on another device, are rounded otherwise; then measures are compared
within a tolerance, and weights aren't.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.components.publisher import Publisher, WeightPlane
from arriero.components.trainer import Trainer
from arriero.engine.checkpoints import CheckpointStore
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph, StoresParts
from arriero.engine.lineage.reader import Lineage
from arriero.engine.runtime.context import Context, weights_url
from arriero.launchers.appdef import thread_counts
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import Trained
from arriero.schemas.messages import Batch

if TYPE_CHECKING:
    from arriero.components.training import TrainState

TOLERANCE = 1e-3  # relative, of measures: float32 sums in another order over a batch
_SECONDS = "_s"  # measures of time: no two are equal


@dataclass(frozen=True, kw_only=True)
class Retaken:
    """A step as it was recorded and as it came out again. A fingerprint is empty if there is none."""

    version: int
    recorded: Mapping[str, float]
    now: Mapping[str, float]
    recorded_weights: str
    weights: str

    def differences(self, tolerance: float) -> dict[str, tuple[float | str, float | str]]:
        """Measures that differ by more than `tolerance`, relatively, and a thousandth of it absolutely.

        With 0: by any bit, and weights too.
        """
        found: dict[str, tuple[float | str, float | str]] = {}
        for name in self.recorded:
            then, now = self.recorded[name], self.now.get(name, math.nan)
            if not name.endswith(_SECONDS) and not _equal(then, now, tolerance):
                found[name] = (then, now)
        if not tolerance and self.recorded_weights and self.weights != self.recorded_weights:
            found["weights"] = (self.recorded_weights, self.weights)
        return found


def _equal(a: float, b: float, tolerance: float) -> bool:
    return (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


class RecordedTrainer:
    """The trainer of a recorded run, on this machine. Raises UserError for what can't be replayed."""

    def __init__(self, place: str, *, threads: int = 0) -> None:
        run = RunDir(Path(place))
        if not run.graph.exists():
            raise UserError(f"{place} is no run directory: there is no graph.json in it")
        self._run, self._spec, self._options = run, run.read_graph(), run.read_options()
        from arriero.launchers.lineage import opened

        self.record: Lineage = opened(self._options.record_url or place)
        self._graph = Graph.from_spec(self._spec)
        self.node, self.trainer = self._only_trainer()
        self.steps: dict[int, Trained] = {s.version: s for s in self.record.steps if s.node == self.node}
        self.threads = threads or thread_counts(self._spec, self._options, _cores(run))[self._role]

    @property
    def _role(self) -> str:
        return self._spec.node(self.node).role

    def _only_trainer(self) -> tuple[str, Trainer]:
        found = {n: c for n, node in self._graph.nodes.items() if isinstance(c := node.component, Trainer)}
        if len(found) != 1:
            raise UserError(
                f"{self._run.path}: {len(found)} of its components are a Trainer; one can be replayed"
            )
        return next(iter(found.items()))

    @property
    def loose(self) -> str:
        """Why bits can't be expected to be the same; empty if they can."""
        import torch

        if (ranks := self._spec.node(self.node).ranks) > 1:
            return f"{ranks} ranks summed then, one does now"
        then = self._run.read_manifest().hardware.gpus if self._run.manifest.exists() else ()
        if bool(then) != torch.cuda.is_available():
            return f"it ran on {then[0] if then else 'a CPU'}, this is {'a GPU' if not then else 'a CPU'}"
        return ""

    def step(self, version: int) -> Trained:
        """The step to `version`. Raises UserError if it isn't on record."""
        step = self.steps.get(version)
        if step is None or step.batch not in self.record.batches:
            known = f"there are {min(self.steps)} to {max(self.steps)}" if self.steps else "there is none"
            raise UserError(f"no step {version} of {self.node} is recorded; {known}")
        return step

    def batch(self, version: int) -> Batch:
        """What that was made from. Raises UserError if it isn't on record, or redacted."""
        step = self.step(version)
        entry = self.record.batches[step.batch]
        if gone := self.record.redacted & {*entry.groups, entry.id}:
            raise UserError(f"step {version} can't be taken again: {min(gone)} in it was redacted")
        return self.record.trained_batch(step)

    def load(self, version: int) -> TrainState:
        """The policy in training, at `version` or at the newest version before it that a checkpoint has."""
        import torch

        from arriero.components.checkpoints import restore

        torch.set_num_threads(self.threads)
        whole = replace(self.trainer, training=replace(self.trainer.training, shards=1))
        state = whole.load(1, self.followed)
        store = CheckpointStore(
            self.trainer.checkpoints.place(self._run.path, self._options.run_id, self.node)
        )
        if (found := store.newest(at_most=version)) is not None:
            restore(state, store, found)
        return state

    @property
    def followed(self) -> bool:
        """Whether generators sampled with what it trained."""
        return self._loop != ""

    @property
    def _loop(self) -> str:
        return next((loop.name for loop in self._spec.loops if loop.producer == self.node), "")

    def weights_of(self, version: int) -> str:
        """The fingerprint on record; empty where nobody followed the trainer."""
        found = [w.fingerprint for w in self.record.weights if (w.loop, w.version) == (self._loop, version)]
        return found[-1] if found else ""

    @contextmanager
    def publisher(self, state: TrainState) -> Generator[Publisher]:
        """What gives the weights of `state` their fingerprint, as the run's own did; nobody receives them."""
        from arriero.engine.weights import destroy

        run_id = f"replay-{os.getpid()}-{self._options.run_id}"
        publish = Publisher(state, WeightPlane(), self._context(run_id))
        try:
            yield publish
        finally:
            publish.close()
            if self._loop:
                destroy(weights_url(run_id, self._loop))

    def _context(self, run_id: str) -> Context:
        nodes = [self._graph.nodes[n.name] for n in self._spec.nodes if self._follows(n.name)]
        parts = {c.weight_ranks() for node in nodes if isinstance(c := node.component, StoresParts)}
        return Context(
            run_id=run_id, run_dir=self._run.path, node=self.node, replica=0, rank=0, ranks=1,
            seed=self._options.seed, deterministic=self._options.deterministic, staleness=0, loop=self._loop,
            parts=tuple(sorted(n for n in parts if n > 1)),
        )  # fmt: skip

    def _follows(self, node: str) -> bool:
        return any(i.loop and i.source == self._loop for i in self._spec.node(node).inputs)


def retaken(run: RecordedTrainer, first: int, last: int) -> Generator[Retaken]:
    """The steps to the versions `first` to `last`, one after the other; those before are taken unseen.

    If the weights it all begins with aren't those of the run, that comes first, as a step without measures.
    """
    state = run.load(first - 1)
    with run.publisher(state) as publish:
        begun = publish(state.version, {}).manifest
        if not run.loose and begun is not None and begun.fingerprint != run.weights_of(state.version):
            yield Retaken(
                version=state.version, recorded={}, now={}, weights=begun.fingerprint,
                recorded_weights=run.weights_of(state.version),
            )  # fmt: skip
        while state.version < last:
            metrics = state.step(run.batch(state.version + 1))
            version = state.version
            if version >= first:
                made = publish(version, metrics).manifest
                yield Retaken(
                    version=version, recorded=run.steps[version].metrics, now=metrics,
                    recorded_weights=run.weights_of(version), weights=made.fingerprint if made else "",
                )  # fmt: skip


def _cores(run: RunDir) -> int:
    return run.read_manifest().hardware.cpus if run.manifest.exists() else os.cpu_count() or 1

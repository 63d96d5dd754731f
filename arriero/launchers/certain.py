"""Where a run that has ended can go on: the newest version that all that learns can come back to.

    with a record         any step whose batches are whole on it
    without, or changed   a checkpoint of the trainer, and one of each critic at the step that goes with it

A critic's step goes with a version if it gave what the version was made from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import takewhile

from arriero.engine.checkpoints import CheckpointStore
from arriero.engine.component import Recovers
from arriero.engine.graph import Graph
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.recorder import recorded
from arriero.engine.portable import resolve
from arriero.engine.rates import ancestors
from arriero.launchers.rundir import RunDir
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Event, Learned, Step, Trained
from arriero.schemas.messages import RolloutGroup, ScoredGroup, Weights
from arriero.schemas.run import RunOptions

Versions = dict[str, int]
_log = logging.getLogger(__name__)


def certain(
    spec: GraphSpec,
    history: Sequence[Event],
    options: RunOptions,
    run: RunDir,
    kept: Lineage | None,
    *,
    changed: bool,
) -> tuple[Versions, Versions]:
    """The version of each trainer, and the step of each critic with it; newer checkpoints are removed.

    A run of which something has `changed` comes back to checkpoints: its recorded steps would be taken again
    as it is now, and make weights that there never were.
    """
    stores = _stores(spec, options, run)
    trainers = [name for name in stores if issubclass(resolve(spec.node(name).output), Weights)]
    versions: Versions = {}
    learned: Versions = {}
    for name in trainers:
        before = ancestors(spec, name) & stores.keys() - {*trainers}
        past = _Past(history, name, sorted(before))
        newest = past.newest if kept is None else past.on_record(kept, grouped=_grouped(spec))
        if kept is None or changed:
            newest = past.in_checkpoints(stores, newest)
        versions[name] = newest
        learned |= {c: min(step, learned.get(c, step)) for c, step in (past.beside(newest) or {}).items()}
    for name, newest in (versions | learned).items():
        if (store := stores[name]) is not None:
            store.forget_after(newest)
    return versions, learned


class _Past:
    """The steps of one trainer, and of the critics before it."""

    def __init__(self, history: Sequence[Event], trainer: str, critics: Sequence[str]) -> None:
        self._trainer = trainer
        self._steps = [e for e in history if isinstance(e, Trained) and e.node == trainer]
        self._learned = {c: [e for e in history if isinstance(e, Learned) and e.node == c] for c in critics}
        self._step_of = {
            c: {o: e.version for e in made for o in e.origins} for c, made in self._learned.items()
        }
        self._origins = {s.version: s.origins for s in self._steps}

    @property
    def newest(self) -> int:
        return self._newest_of(s.version for s in reversed(self._steps))

    def beside(self, version: int) -> Versions | None:
        """The steps of the critics that go with a version; None if the ledger lacks one."""
        found: Versions = {}
        for critic, step_of in self._step_of.items():
            behind = [step_of[o] for o in self._origins.get(version, ()) if o in step_of]
            if version and not behind:
                return None
            found[critic] = max(behind, default=0)
        return found

    def on_record(self, kept: Lineage, *, grouped: bool) -> int:
        """The newest version up to which all steps are on record."""

        def whole(step: Step) -> bool:
            names = (step.batch, *(step.inputs if isinstance(step, Learned) else ()))
            return all(_on_record(kept, name, grouped=grouped) for name in names)

        there = {c: sum(1 for _ in takewhile(whole, made)) for c, made in self._learned.items()}
        steps = [s.version for s in takewhile(whole, self._steps)]
        return self._newest_of(reversed(steps), there)

    def _newest_of(self, descending: Iterable[int], there: Versions | None = None) -> int:
        """The first of them that goes with steps that the critics have taken, and are `there`."""
        for version in descending:
            beside = self.beside(version)
            if beside is not None and all(there is None or n <= there[c] for c, n in beside.items()):
                return version
        return 0

    def in_checkpoints(self, stores: dict[str, CheckpointStore | None], at_most: int) -> int:
        """The newest version, up to `at_most`, that trainer and critics have whole checkpoints of."""
        own = stores[self._trainer]
        version = own.newest(at_most=at_most) if own is not None else None
        while own is not None and version:
            beside = self.beside(version)
            lacking = [c for c, step in (beside or {}).items() if not _has(stores[c], step)]
            if beside is not None and not lacking:
                return version
            names = ", ".join(lacking) or "what learns before it"
            _log.warning(
                "the checkpoint of version %d of %s is passed over: %s has none that goes with it",
                version, self._trainer, names,
            )  # fmt: skip
            version = own.newest(at_most=version - 1)
        return 0


def _stores(spec: GraphSpec, options: RunOptions, run: RunDir) -> dict[str, CheckpointStore | None]:
    """Of each node that learns; None for one that needs none."""
    stores: dict[str, CheckpointStore | None] = {}
    for name, node in Graph.from_spec(spec).nodes.items():
        if isinstance(node.component, Recovers):
            place = node.component.checkpoint_place(run.path, options.run_id, name)
            stores[name] = CheckpointStore(place) if place else None
    return stores


def _has(store: CheckpointStore | None, step: int) -> bool:
    return store is None or step == 0 or not store.problem(step)


def _grouped(spec: GraphSpec) -> bool:
    edges = [resolve(spec.node(edge).output) for edge in recorded(spec)]
    return any(issubclass(kind, RolloutGroup | ScoredGroup) for kind in edges)


def _on_record(kept: Lineage, batch: str, *, grouped: bool) -> bool:
    """Whether a batch is there with all groups that it names; a broker that was lost may have had some."""
    entry = kept.batches.get(batch)
    return entry is not None and not (grouped and any(group not in kept.groups for group in entry.groups))

"""How what learns comes back to where it was: a checkpoint, then the recorded batches.

    the newest whole checkpoint that is old enough -> recorded batches after it -> the ledger's newest step

The record is the log that was written ahead: a batch stands in it before the broker lets go of it. Nothing is
generated twice. Without a record the run goes on from the checkpoint itself, and the launcher sees to it that
the ledger says so.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from arriero.components.checkpoints import Checkpoints, restore
from arriero.engine.checkpoints import CheckpointStore
from arriero.engine.runtime.context import Context
from arriero.schemas.ledger import Learned, Step, Trained
from arriero.schemas.messages import Batch, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from arriero.components.learner import Kept
    from arriero.engine.lineage.reader import Lineage
    from arriero.engine.weights.ranks import Ranks

_log = logging.getLogger(__name__)
_PAUSE_S, _LATE_S = 0.5, 120.0  # for the recorder to store a batch that was trained a moment ago


class RecoveryError(RuntimeError):
    """The steps of the ledger can't be taken again: their batches aren't on record."""


class RecordedSteps:
    """What earlier steps of a node were made from, as the record has it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.record: Lineage | None = None  # as it was read last

    def batches(self, step: Step) -> tuple[Batch, ...]:
        """What the step was made from, as the node took it. Raises RecoveryError."""
        names = (step.batch, *(step.inputs if isinstance(step, Learned) else ()))
        record = self._with(names, step)
        if isinstance(step, Trained):
            return (record.trained_batch(step),)
        return record.learned_batches(step)

    def _with(self, names: Collection[str], step: Step) -> Lineage:
        """The record, once these batches stand in it."""
        if not self._context.record_url:
            raise RecoveryError(
                f"version {step.version} was made after the last checkpoint, and there is no record of it; "
                "go on with --resume, which trains on its prompts again"
            )
        from arriero.engine.lineage.chain import ChainError
        from arriero.engine.lineage.reader import Lineage

        deadline = time.monotonic() + _LATE_S
        while self.record is None or not self.record.batches.keys() >= {*names}:
            try:
                self.record = Lineage(self._context.record_url)
            except ChainError as error:
                _log.warning("the record can't be read: %s", error)
            if self.record is not None and self.record.batches.keys() >= {*names}:
                break
            if time.monotonic() > deadline:
                raise RecoveryError(f"batch {step.batch} of version {step.version} isn't on record")
            time.sleep(_PAUSE_S)
        return self.record


class Recovery:
    """What `context.made` asks of a learner; all ranks make it, and call it, together.

    `step` takes one step of it on the batches that the step was made from.
    """

    def __init__(
        self,
        state: Kept,
        checkpoints: Checkpoints,
        context: Context,
        ranks: Ranks,
        step: Callable[..., object],
    ) -> None:
        self._state, self._context, self._take = state, context, step
        self._recorded = RecordedSteps(context)
        self._steps = {step.version: step for step in context.made}
        self.version = context.made[-1].version if context.made else 0
        if not context.made:
            return
        store = checkpoints.store(context)
        if (found := _agreed(store, self._oldest_needed, self.version, ranks)) is not None:
            restore(state, store, found)
        _log.warning(
            "%s goes on from version %d: a checkpoint of version %d and %d recorded batches",
            context.node, self.version, state.version, self.version - state.version,
        )  # fmt: skip

    @property
    def _oldest_needed(self) -> int:
        """A deterministic run samples with versions as old as the bound; a new loop has none of them."""
        behind = self._context.staleness if self._context.deterministic and self._context.announced < 0 else 0
        return max(0, self.version - behind)

    def wanted(self, version: int) -> bool:
        """Whether this version is to be published once more."""
        return version >= (self.version if self._context.announced == self.version else self._oldest_needed)

    def metrics(self, version: int) -> dict[str, float]:
        """What was said of the step that made a version; nothing of the first."""
        step = self._steps.get(version)
        return dict(step.metrics) if isinstance(step, Trained) else {}

    def step(self) -> bool:
        """Take the first step that `state` lacks once more; False if it lacks none. Raises RecoveryError."""
        step = self._steps.get(self._state.version + 1)
        if step is not None:
            self._take(*self._recorded.batches(step))
        return step is not None

    def catch_up(self) -> None:
        """Take all of them. Raises RecoveryError."""
        while self.step():
            pass

    def check(self, weights: Weights) -> None:
        """Warn and count if the newest version was published with other bits than these."""
        record = self._recorded.record
        if weights.version != self.version or record is None or weights.manifest is None:
            return
        known = [w.fingerprint for w in record.weights if w.version == self.version]
        if known and known[-1] and known[-1] != weights.manifest.fingerprint:
            self._context.count("recovered_to_other_bits", 1)
            _log.warning(
                "version %d has fingerprint %s, it had %s: this machine doesn't compute the same bits twice",
                self.version, weights.manifest.fingerprint, known[-1],
            )  # fmt: skip


def _agreed(store: CheckpointStore, at_most: int, newest: int, ranks: Ranks) -> int | None:
    """The newest checkpoint that is old enough, as the first rank finds it; None: begin with the model.

    One after the `newest` version of the ledger is removed: that version will be made anew.
    """
    from arriero.engine.weights.ranks import first_says

    def look() -> bytes:
        store.forget_after(newest)
        found = store.newest(at_most=at_most)
        return b"" if found is None else str(found).encode()

    said = first_says(ranks, look)
    return int(said) if said else None

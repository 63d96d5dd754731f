"""The versions that earlier lives of a node have made: known by their steps, announced again as they were."""

from __future__ import annotations

from collections.abc import Sequence

from arriero.engine.broker import Broker
from arriero.engine.runtime.history import History
from arriero.engine.runtime.provenance import child_id
from arriero.schemas.ledger import Step, Trained
from arriero.schemas.messages import Weights


class MadeBefore:
    """What `node` has made before this life; whole once `history` is read. `carried`: by an edge, too."""

    def __init__(self, node: str, history: History, *, carried: bool) -> None:
        self._node, self._history, self._carried = node, history, carried
        self._steps: dict[int, Step] = {}

    def recall(self) -> tuple[Step, ...]:
        """The steps of earlier lives, from what is read of the ledger."""
        self._steps = {step.version: step for step in self._history.made}
        return tuple(self._history.made)

    @property
    def newest(self) -> int:
        """The last version; 0 for none."""
        return max(self._steps, default=0)

    @property
    def life(self) -> str:
        """Behind the ids of versions, which are announced anew after a crash: what carries them is new."""
        return f"~{self._history.lives}" if self._history.lives and not self._carried else ""

    def holds(self, output: Weights) -> bool:
        """Whether an earlier life gave this version; the first one is begun with, and has no step."""
        return output.version in self._steps or (output.version == 0 and self._history.lives > 0)

    def again(self, output: Weights) -> Weights:
        """A version that the ledger has already, as it was: with its parents and what was said of it."""
        name, parents = self._id_of(output.version)
        step = self._steps.get(output.version)
        if isinstance(step, Trained):
            output = output.model_copy(update={"metrics": step.metrics})
        return output.stamped(id=name + self.life, parents=parents, origins=step.origins if step else ())

    async def announced(self, broker: Broker, logs: Sequence[str], *, staleness: int) -> int:
        """The newest of the last few versions that the first of `logs` carries already; -1 for none."""
        for version in range(self.newest, max(self.newest - staleness - 2, -1), -1) if logs else ():
            name, _ = self._id_of(version)
            lives = [name, *(f"{name}~{life}" for life in range(1, self._history.lives + 1))]
            if any([await broker.appended(logs[0], each) for each in lives]):
                return version
        return -1

    def _id_of(self, version: int) -> tuple[str, tuple[str, ...]]:
        """What a version of an earlier life was called, and its parents."""
        step = self._steps.get(version)
        parents = (step.batch,) if step else ()
        return child_id(self._node, parents, 0) if step else f"{self._node}-{version}", parents

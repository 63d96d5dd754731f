"""The record of a run as rows of data: its scored training groups, read where they stand when used."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from arriero.components.datasets import COMPRESSED, FORMATS
from arriero.components.formats import Row
from arriero.engine.errors import UserError, one_line
from arriero.schemas.messages import Outcome, Prompt, Rollout, ScoredGroup

if TYPE_CHECKING:
    from arriero.engine.lineage.reader import Lineage

_VERDICTS = (Outcome.OK, Outcome.WRONG)


def names_a_run(path: str) -> bool:
    """Whether `path` means a run or the URL of a record: whatever isn't called like a file of data."""
    name = path.partition("?")[0].lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return not name.endswith(FORMATS)


class RecordedRun:
    """The groups of a run that were scored for training and have a verdict, as `Blocks` of names.

    One block in all, or with `by_step` one per batch of the run, so that what is read together lies together.
    Raises UserError if there is no record, or nothing in it to learn from.
    """

    def __init__(self, path: str, *, by_step: bool) -> None:
        self._path, self._record = path, _opened(path)
        opened = self._record.opened
        self.run_id = opened.run_id if opened else ""
        self._lock = Lock()
        usable = [name for name in self._record.groups if self._usable(name)]
        if not usable:
            raise UserError(f"{path}: the record holds no scored training group; give a run that has trained")
        self._blocks = self._by_step(usable) if by_step else [usable]
        self.sizes: Sequence[int] = [len(block) for block in self._blocks]

    def read(self, block: int) -> Sequence[Row]:
        return [Row(where=f"{self._path}: group {n}", values={"group": n}) for n in self._blocks[block]]

    def group(self, row: Row) -> ScoredGroup:
        """What was recorded, as data of another run: it names where it comes from, and has version 0.

        The versions of the policy that sampled it aren't versions of the run that learns from it.
        """
        name = str(row.values["group"])
        with self._lock:
            try:
                what, scored = self._record.changed(name), self._record.group(name)
            except (KeyError, ValueError, OSError) as error:
                raise UserError(f"{self._path}: group {name} can't be read: {one_line(error)}") from error
        if what:
            raise UserError(f"{self._path}: group {name} isn't what was recorded: {what}; see arriero audit")
        assert isinstance(scored, ScoredGroup)
        group = scored.group
        prompt = group.prompt
        return ScoredGroup(
            group=group.model_copy(
                update={
                    "parents": (),
                    "origins": (),
                    "recorded": f"{self.run_id}:{group.id}",
                    "rollouts": tuple(map(_of_no_version, group.rollouts)),
                    "prompt": Prompt(
                        text=prompt.text, answer=prompt.answer, metadata=prompt.metadata, source=prompt.source
                    ),
                }
            ),
            scores=scored.scores,
            reward_version=scored.reward_version,
        )

    def _usable(self, name: str) -> bool:
        entry = self._record.groups[name]
        if entry.prompt.split != "train" or entry.scores is None or name in self._record.redacted:
            return False
        return any(outcome in _VERDICTS for outcome in entry.scores.outcomes)

    def _by_step(self, usable: list[str]) -> list[list[str]]:
        """The groups of each batch, then those of none."""
        left = dict.fromkeys(usable)
        found: list[list[str]] = []
        for batch in self._record.batches.values():
            if block := [name for name in batch.groups if name in left]:
                found.append(block)
                for name in block:
                    del left[name]
        return [*found, [*left]] if left else found


def _opened(path: str) -> Lineage:
    from arriero.engine.lineage.chain import ChainError
    from arriero.engine.lineage.reader import Lineage

    try:
        record = Lineage(path)
    except (ChainError, OSError, ImportError, ValueError) as error:
        raise UserError(
            f"{path}: neither a run with a record nor a file of data: {one_line(error)}"
        ) from error
    if record.broken:
        raise UserError(
            f"{path}: nothing is learned from a damaged record: {record.broken}; see arriero audit"
        )
    return record


def _of_no_version(rollout: Rollout) -> Rollout:
    versions = np.where(rollout.mask, np.int32(0), np.int32(-1))
    return rollout.model_copy(update={"versions": versions})

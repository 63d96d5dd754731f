"""What one commit is made of: content gathered by space, and entries made when its place is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from arriero.engine.lineage.content import (
    OF_ROLLOUT,
    OF_SAMPLE,
    PRIVATE,
    SALT_BYTES,
    SHAPE,
    Columns,
    arrays_sha256,
    batch_sha256,
    batch_tokens_sha256,
    columns,
    group_text,
    joined,
    key_of,
    more,
    prompt_entry,
    prompt_text,
    scores_entry,
    sha256,
    some,
)
from arriero.schemas.lineage import BatchEntry, Entry, GroupEntry, Place, RecordEntry, WeightsEntry
from arriero.schemas.messages import Batch, Record, RolloutGroup, Sample, ScoredGroup, Weights

Starts = Mapping[str, tuple[int, int]]  # space -> part and start of what this commit appends there
Make = Callable[[Starts], Entry]


@dataclass
class Known:
    """The rollouts of a group that is recorded, or is about to be (`offset` in its commit)."""

    keys: tuple[bytes, ...]
    salt: bytes
    shape_sha256: str
    tokens_sha256: str
    offset: int
    size: int
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    place: Place | None = None

    def at(self, starts: Starts) -> Place:
        return self.place or _place(starts, "rollouts", self.offset, self.size)


@dataclass
class _Space:
    arrays: list[Columns] = field(default_factory=list[Columns])
    size: int = 0


class Gathering:
    """`known` are the groups recorded before, by the ids under which a sample may name them."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._before = known
        self._spaces: dict[str, _Space] = {}
        self.makers: list[Make] = []
        self.fresh: dict[str, Known] = {}

    def add(self, edge: str, record: Record) -> None:
        """Take a record apart."""
        match record:
            case ScoredGroup():
                self.makers.append(self._group(edge, record.group, record))
            case RolloutGroup():
                self.makers.append(self._group(edge, record, None))
            case Batch():
                self.makers.append(self._batch(edge, record))
            case Weights():
                self.makers.append(_weights(edge, record))
            case _:
                self.makers.append(self._record(edge, record))

    def add_entry(self, entry: Entry) -> None:
        """One that names no content."""
        self.makers.append(lambda starts: entry)

    def content(self) -> Iterator[tuple[str, Columns]]:
        """What is to be appended, space by space; `rollouts` before anything that could point into it."""
        for name in sorted(self._spaces, key=lambda n: n != "rollouts"):
            parts = self._spaces[name].arrays
            yield name, {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}

    def index(self, starts: Starts) -> Columns | None:
        """Rows and rewards of the rollouts that are new; None if there are none."""
        new = dict.fromkeys(map(id, self.fresh.values()))
        groups = [k for k in self.fresh.values() if new.pop(id(k), 0) is None and k.place is None]
        rows: list[tuple[int, int, int]] = []
        for group in groups:
            place = group.at(starts)
            start = place.start
            for length in group.lengths:
                rows.append((place.part, start, length))
                start += length
        if not rows:
            return None
        rewards = [r for group in groups for r in group.rewards]
        return {"rows": np.array(rows, np.int64), "rewards": np.array(rewards, np.float64)}

    # --- kinds of records ---------------------------------------------------------------------------------

    def _group(self, edge: str, group: RolloutGroup, scored: ScoredGroup | None) -> Make:
        rollouts = group.rollouts
        found = self._rollouts(group, scored)
        text = found.salt + group_text(group, scored.scores if scored else ())
        text_at = self._text(text)
        fields: dict[str, Any] = {
            "edge": edge,
            "id": group.id,
            "parents": group.parents,
            "origins": group.origins,
            "chat_digest": group.chat_digest,
            "recorded": group.recorded,
            "prompt": prompt_entry(group.prompt),
            "lengths": found.lengths,
            "sampled": tuple(int(r.mask.sum()) for r in rollouts),
            "oldest": tuple(-1 if (v := r.oldest_version) is None else v for r in rollouts),
            "newest": tuple(int(r.versions.max(initial=-1)) for r in rollouts),
            "finishes": tuple(r.finish for r in rollouts),
            "temperatures": tuple(r.temperature for r in rollouts),
            "seeds": tuple(r.seed for r in rollouts),
            "more": more(rollouts, OF_ROLLOUT),
            "scores": scores_entry(scored) if scored else None,
            "shape_sha256": found.shape_sha256,
            "tokens_sha256": found.tokens_sha256,
            "prompt_sha256": sha256(found.salt + prompt_text(group.prompt)),
            "text_sha256": sha256(text),
        }
        return lambda starts: GroupEntry(**fields, arrays=found.at(starts), text=text_at(starts))

    def _rollouts(self, group: RolloutGroup, scored: ScoredGroup | None) -> Known:
        """Where its rollouts stand: stored once, however many edges the group passes."""
        keys = tuple(key_of(r) for r in group.rollouts)
        found = self._known(group.id)
        if found is None or found.keys != keys:
            arrays = columns(group.rollouts)
            lengths = tuple(len(r.tokens) for r in group.rollouts)
            rewards = tuple(s.value for s in scored.scores) if scored else (float("nan"),) * len(lengths)
            salt = os.urandom(SALT_BYTES)
            found = Known(
                keys=keys, salt=salt, shape_sha256=arrays_sha256(some(arrays, SHAPE)),
                tokens_sha256=arrays_sha256(some(arrays, PRIVATE), salt),
                offset=self._add("rollouts", arrays), size=sum(lengths), lengths=lengths, rewards=rewards,
            )  # fmt: skip
        self.fresh[group.id] = found
        if scored is not None:
            self.fresh[scored.id] = found
        return found

    def _batch(self, edge: str, batch: Batch) -> Make:
        samples = batch.samples
        groups = tuple(dict.fromkeys(s.group for s in samples))
        numbers = {name: k for k, name in enumerate(groups)}
        rollout = self._matched(samples)
        own = [s for s, k in zip(samples, rollout, strict=True) if k < 0]
        read = [s.reference for s in samples if s.reference is not None]
        read += [s.policy for s in samples if s.policy is not None]
        own_columns, values, of_reference = (
            columns(own),
            joined([s.advantages for s in samples]),
            joined(read),
        )
        own_place = self._stored("rollouts", own_columns)
        advantages = self._stored("advantages", {"values": values})
        reference = self._stored("reference", {"values": of_reference})
        salt = os.urandom(SALT_BYTES) if own or read else b""
        salt_place = self._text(salt)
        hashes = [self._hashes(name) for name in groups]
        fields: dict[str, Any] = {
            "edge": edge,
            "id": batch.id,
            "parents": batch.parents,
            "origins": batch.origins,
            "groups": groups,
            "group": tuple(numbers[s.group] for s in samples),
            "rollout": rollout,
            "lengths": tuple(len(s.tokens) for s in samples),
            "temperatures": tuple(s.temperature for s in samples),
            "rewards": tuple(s.reward for s in samples),
            "truncated": tuple(s.truncated for s in samples),
            "origin": tuple(s.origin for s in samples),
            "behaviour": tuple(s.logprobs is not None for s in samples),
            "referenced": tuple(s.reference is not None for s in samples),
            "reread": tuple(s.policy is not None for s in samples),
            "more": more(samples, OF_SAMPLE),
            "sha256": batch_sha256(hashes, own_columns, values),
            "tokens_sha256": batch_tokens_sha256(own_columns, of_reference, salt),
        }
        return lambda starts: BatchEntry(
            **fields, own=own_place(starts), advantages=advantages(starts), reference=reference(starts),
            salt=salt_place(starts),
        )  # fmt: skip

    def _hashes(self, name: str) -> str:
        """Of a group: what binds its arrays; empty for one that isn't known."""
        known = self._known(name)
        return known.shape_sha256 + known.tokens_sha256 if known else ""

    def _matched(self, samples: tuple[Sample, ...]) -> tuple[int, ...]:
        """For each sample the number of the rollout in its group that it is, each once; -1 for none."""
        left: dict[str, dict[bytes, list[int]]] = {}
        found: list[int] = []
        for sample in samples:
            if sample.group not in left:
                known = self._known(sample.group)
                left[sample.group] = {}
                for k, key in enumerate(known.keys if known else ()):
                    left[sample.group].setdefault(key, []).append(k)
            numbers = left[sample.group].get(key_of(sample))
            found.append(numbers.pop(0) if numbers else -1)
        return tuple(found)

    def _record(self, edge: str, record: Record) -> Make:
        text = b""
        if not any(isinstance(v, np.ndarray) for v in record.__dict__.values()):
            text = os.urandom(SALT_BYTES) + record.model_dump_json().encode()
        at = self._text(text)
        fields: dict[str, Any] = {
            "edge": edge,
            "record": type(record).__name__,
            "id": record.id,
            "parents": record.parents,
            "origins": record.origins,
            "text_sha256": sha256(text),
        }
        return lambda starts: RecordEntry(**fields, text=at(starts))

    # --- content ------------------------------------------------------------------------------------------

    def _known(self, name: str) -> Known | None:
        return self.fresh.get(name) or self._before.get(name)

    def _text(self, text: bytes) -> Callable[[Starts], Place]:
        return self._stored("text", {"bytes": np.frombuffer(text, np.uint8)})

    def _stored(self, space: str, arrays: Columns) -> Callable[[Starts], Place]:
        """Append `arrays`; where they will stand."""
        size, at = len(next(iter(arrays.values()))), self._add(space, arrays)
        return lambda starts: _place(starts, space, at, size)

    def _add(self, space: str, arrays: dict[str, npt.NDArray[Any]]) -> int:
        """The offset of `arrays` in what this commit appends to `space`."""
        size = len(next(iter(arrays.values())))
        if not size:
            return 0
        held = self._spaces.setdefault(space, _Space())
        held.arrays.append(arrays)
        held.size += size
        return held.size - size


def _weights(loop: str, weights: Weights) -> Make:
    entry = WeightsEntry(
        loop=loop, id=weights.id, parents=weights.parents, origins=weights.origins, version=weights.version,
        fingerprint=weights.manifest.fingerprint if weights.manifest else "", metrics=weights.metrics,
    )  # fmt: skip
    return lambda starts: entry


def _place(starts: Starts, space: str, offset: int, size: int) -> Place:
    if not size:
        return Place(part=0, start=0, size=0)
    part, start = starts[space]
    return Place(part=part, start=start + offset, size=size)

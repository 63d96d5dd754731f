"""The sending end: weights of the ranks of a trainer, over any transport.

    consumes    its shards, a plan
    produces    a manifest, the same on all ranks
    waits for   leases on the slot, bounded; the other ranks

All ranks of a trainer publish together. Each packs and hashes its cells; the fingerprints are gathered, so
that every rank makes the same manifest; only then is it announced, by the first rank last. An error on one
rank is an error on all, and nothing is announced.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from torch import Tensor

from arriero.engine.weights.copying import Bytes, Staging, held, store
from arriero.engine.weights.layout import WeightError
from arriero.engine.weights.plan import Cell, Plan
from arriero.engine.weights.ranks import OneRank, Ranks
from arriero.engine.weights.shards import Remembered, check_shards
from arriero.engine.weights.transport import Outlet, SyncReport, await_outcomes, lease_timeout
from arriero.schemas.layouts import WorldLayout
from arriero.schemas.weights import WeightManifest, cells_fingerprint

_T = TypeVar("_T")
TASK_BYTES = 16 << 20  # that one thread packs or unpacks at a time


def default_threads() -> int:
    """Threads that copy and hash: more than a few only wait for the memory."""
    return min(len(os.sched_getaffinity(0)), 4)


def all_results(tasks: Sequence[Future[_T]]) -> list[_T]:
    """All results in order; an error only after every task has ended, so that none writes behind our back."""
    wait(tasks)
    return [task.result() for task in tasks]


class ShardSender:
    """One source rank's end of what `plan_weights(layout)` plans; all ranks call `publish` together."""

    def __init__(
        self,
        outlet: Outlet,
        plan: Plan,
        layout: WorldLayout,
        ranks: Ranks | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        self._outlet, self._plan, self._ranks = outlet, plan, ranks or OneRank()
        if self._ranks.size != plan.num_sources:
            raise ValueError(f"{self._ranks.size} ranks, but the plan has {plan.num_sources} source ranks")
        self._layout = layout.ranks[self._ranks.rank]
        self._held = plan.sources_of(self._layout, self._ranks.rank)
        self._shares = Remembered(self._to_pack)
        self._threads = ThreadPoolExecutor(threads or default_threads(), "arriero-pack")
        self._staging = Staging()
        self._last: WeightManifest | None = None

    @property
    def overtaken(self) -> tuple[str, ...]:
        """Receivers that the last publish no longer waited for."""
        return self._outlet.overtaken

    def publish(
        self, version: int, tensors: Mapping[str, Tensor], *, must_change: bool = True
    ) -> WeightManifest:
        """Pack, hash and announce this rank's shards; the manifest, the same on all ranks. Blocks.

        Raises ValueError if versions don't increase; WeightError, on every rank, if a rank's tensors are not
        those of the plan, or if no bit of any tensor has changed since the last version: an optimizer step
        that changes nothing, or a publish of something else than what was trained. `must_change=False` is
        for a step that is known to change nothing (learning rate 0, all gradients 0).
        """
        if self._last is not None and version <= self._last.version:
            raise ValueError(f"version {version} after version {self._last.version}; versions only increase")
        slot, said = self._pack(version, tensors)
        told: list[dict[str, str | list[str]]] = [json.loads(data) for data in self._ranks.gather(said)]
        errors = [f"rank {rank}: {saying['error']}" for rank, saying in enumerate(told) if "error" in saying]
        if errors:
            raise WeightError(f"version {version} is not announced: {'; '.join(errors)}")
        manifest = self._manifest(version, slot, told)
        if must_change and self._last is not None and manifest.fingerprint == self._last.fingerprint:
            raise WeightError(
                f"version {version} is not announced: all {len(manifest.cells)} parts of it are bit-identical"
                f" to version {self._last.version}; must_change=False if that step could change nothing"
            )
        failures = [said.decode() for said in self._ranks.gather(self._announce_part(manifest))]
        if any(failures):
            raise WeightError(f"version {version} is not announced: {'; '.join(filter(None, failures))}")
        if not self._ranks.rank:
            self._outlet.announce(manifest)
        self._last = manifest
        return manifest

    def report(
        self, version: int, *, expected: Sequence[str] = (), timeout_s: float | None = None
    ) -> SyncReport:
        """Which receivers have verified `version`, and which failed and why; on the first rank.

        Waits up to `timeout_s`, by default what the bytes may take; meanwhile the trainer may go on.
        """
        nbytes = sum(self._plan.part_bytes(rank) for rank in range(self._plan.num_sources))
        return await_outcomes(
            version, self._outlet.outcomes, expected=expected, timeout_s=lease_timeout(nbytes, timeout_s)
        )

    def failures(self) -> dict[str, str]:
        """Receivers whose last version ended in an error, or that died, each with why; on the first rank."""
        outcomes = self._outlet.outcomes().items()
        return {name: o.error or "its process has died" for name, o in outcomes if o.error or o.gone}

    def close(self) -> None:
        self._threads.shutdown()
        self._outlet.close()

    def _pack(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[int, bytes]:
        """The slot, and as JSON the fingerprints of this rank's cells, or its error."""
        slot = -1
        try:
            # First, since other ranks may wait in it for us.
            slot, part = self._outlet.begin(version)
            tasks = [self._threads.submit(self._store, share, part) for share in self._shares(tensors)]
            prints = [fingerprint for prints in all_results(tasks) for fingerprint in prints]
            return slot, json.dumps({"cells": prints, "slot": str(slot)}).encode()
        except Exception as error:  # noqa: BLE001  # told to all ranks, which raise it
            return slot, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()

    def _to_pack(self, tensors: Mapping[str, Tensor]) -> list[list[tuple[Cell, Tensor | Bytes]]]:
        """Runs of cells of about TASK_BYTES each: to hand over every small one would cost as much as it."""
        check_shards(self._layout, tensors, "published", cast=False)
        shares: list[list[tuple[Cell, Tensor | Bytes]]] = []
        nbytes = TASK_BYTES
        for cell, place in self._held:
            if nbytes >= TASK_BYTES:
                shares.append([])
                nbytes = 0
            shares[-1].append((cell, held(place.of(tensors))))
            nbytes += cell.nbytes
        return shares

    def _store(self, share: Sequence[tuple[Cell, Tensor | Bytes]], part: Bytes) -> list[str]:
        return [
            store(source, part[cell.offset : cell.offset + cell.nbytes], self._staging)
            for cell, source in share
        ]

    def _announce_part(self, manifest: WeightManifest) -> bytes:
        """Announce on all ranks but the first, which receivers ask; the error, if there is one."""
        try:
            if self._ranks.rank:
                self._outlet.announce(manifest)
        except Exception as error:  # noqa: BLE001  # told to all ranks, which raise it
            return f"rank {self._ranks.rank}: {type(error).__name__}: {error}".encode()
        return b""

    def _manifest(
        self, version: int, slot: int, told: Sequence[Mapping[str, str | list[str]]]
    ) -> WeightManifest:
        assert all(saying["slot"] == str(slot) for saying in told), "ranks publish in lockstep"
        cells = [""] * len(self._plan.cells)
        for rank, saying in enumerate(told):
            for cell, fingerprint in zip(self._plan.packed(rank), saying["cells"], strict=True):
                cells[cell.index] = fingerprint
        return WeightManifest(
            version=version,
            url=self._outlet.url,
            session=self._outlet.session,
            plan=self._plan.digest,
            slot=slot,
            cells=tuple(cells),
            fingerprint=cells_fingerprint(self._plan.digest, cells),
        )

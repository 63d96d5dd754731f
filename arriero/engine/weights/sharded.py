"""Sharded weights from the ranks of a trainer to the ranks of generators, over any transport.

    consumes                              produces                  waits for
    sender     its shards, a plan         a manifest, on all ranks  leases on the slot, bounded; its ranks
    receiver   a manifest, the same plan  its shards, in place      the transport, bounded

All ranks of a trainer publish together. Each packs and hashes its cells; the fingerprints are gathered, so
that every rank makes the same manifest; only then is it announced, by the first rank last. An error on one
rank is an error on all, and nothing is announced.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from typing import TypeVar

from torch import Tensor

from arriero.engine.weights.copying import Bytes, Staging, held, store
from arriero.engine.weights.layout import StaleWeights, WeightError
from arriero.engine.weights.plan import Cell, Landing, Plan
from arriero.engine.weights.ranks import OneRank, Ranks
from arriero.engine.weights.shards import Remembered, check_shards, landing_spans, receive_span
from arriero.engine.weights.transport import (
    Inlet,
    Outlet,
    Span,
    SyncReport,
    await_outcomes,
    lease_timeout,
)
from arriero.schemas.weights import ShardManifest, cells_fingerprint

_T = TypeVar("_T")
TASK_BYTES = 16 << 20  # that one thread packs or unpacks at a time


def default_threads() -> int:
    """Threads that copy and hash: more than a few only wait for the memory."""
    return min(len(os.sched_getaffinity(0)), 4)


class ShardSender:
    """One source rank's end. `publish` is called by all ranks of the trainer together."""

    def __init__(
        self, outlet: Outlet, plan: Plan, ranks: Ranks | None = None, *, threads: int | None = None
    ) -> None:
        self._outlet, self._plan, self._ranks = outlet, plan, ranks or OneRank()
        if self._ranks.size != plan.num_sources:
            raise ValueError(f"{self._ranks.size} ranks, but the plan has {plan.num_sources} source ranks")
        self._shares = Remembered(self._to_pack)
        self._threads = ThreadPoolExecutor(threads or default_threads(), "arriero-pack")
        self._staging = Staging()
        self._last: ShardManifest | None = None

    @property
    def overtaken(self) -> tuple[str, ...]:
        """Receivers that the last publish no longer waited for."""
        return self._outlet.overtaken

    def publish(
        self, version: int, tensors: Mapping[str, Tensor], *, must_change: bool = True
    ) -> ShardManifest:
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
            prints = [fingerprint for prints in _results(tasks) for fingerprint in prints]
            return slot, json.dumps({"cells": prints, "slot": str(slot)}).encode()
        except Exception as error:  # noqa: BLE001  # told to all ranks, which raise it
            return slot, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()

    def _to_pack(self, tensors: Mapping[str, Tensor]) -> list[list[tuple[Cell, Tensor | Bytes]]]:
        """Runs of cells of about TASK_BYTES each: to hand over every small one would cost as much as it."""
        check_shards(self._plan.source.ranks[self._ranks.rank], tensors, "published")
        shares: list[list[tuple[Cell, Tensor | Bytes]]] = []
        nbytes = TASK_BYTES
        for cell in self._plan.packed(self._ranks.rank):
            if nbytes >= TASK_BYTES:
                shares.append([])
                nbytes = 0
            shares[-1].append((cell, held(cell.held.of(tensors))))
            nbytes += cell.nbytes
        return shares

    def _store(self, share: Sequence[tuple[Cell, Tensor | Bytes]], part: Bytes) -> list[str]:
        return [
            store(source, part[cell.offset : cell.offset + cell.nbytes], self._staging)
            for cell, source in share
        ]

    def _announce_part(self, manifest: ShardManifest) -> bytes:
        """Announce on all ranks but the first, which receivers ask; the error, if there is one."""
        try:
            if self._ranks.rank:
                self._outlet.announce(manifest)
        except Exception as error:  # noqa: BLE001  # told to all ranks, which raise it
            return f"rank {self._ranks.rank}: {type(error).__name__}: {error}".encode()
        return b""

    def _manifest(
        self, version: int, slot: int, told: Sequence[Mapping[str, str | list[str]]]
    ) -> ShardManifest:
        assert all(saying["slot"] == str(slot) for saying in told), "ranks publish in lockstep"
        cells = [""] * len(self._plan.cells)
        for rank, saying in enumerate(told):
            for cell, fingerprint in zip(self._plan.packed(rank), saying["cells"], strict=True):
                cells[cell.index] = fingerprint
        return ShardManifest(
            version=version,
            url=self._outlet.url,
            session=self._outlet.session,
            plan=self._plan.digest,
            slot=slot,
            cells=tuple(cells),
            fingerprint=cells_fingerprint(self._plan.digest, cells),
        )


class ShardReceiver:
    """One receiver rank's end: rank `rank` of a receiver of the plan's kind `kind`."""

    def __init__(
        self, inlet: Inlet, plan: Plan, kind: str, rank: int = 0, *, threads: int | None = None
    ) -> None:
        self._inlet, self._plan = inlet, plan
        self._landings = plan.landings(kind, rank)
        self._layout = plan.kinds[kind].ranks[rank]
        self._threads = ThreadPoolExecutor(threads or default_threads(), "arriero-land")
        self._staging = Staging()
        self._spans = Remembered(self._to_land)

    def newest(self, after: int = -1, wait_s: float = 0.0) -> ShardManifest | None:
        """The newest version beyond `after`, also for a receiver that has just joined; None if none comes."""
        return self._inlet.newest(after, wait_s)

    def receive(self, manifest: ShardManifest, into: Mapping[str, Tensor]) -> None:
        """Fill existing tensors, in place, and read every one of them back.

        Floats are cast to the dtype of `into`. Raises StaleWeights if the version was overwritten: take the
        newest; WeightError, naming the tensor or the count, for everything else. Nothing is written if names
        or shapes don't fit; after an error in the middle, `into` is a mix of versions.
        """
        try:
            self._receive(manifest, into)
        except StaleWeights:
            raise  # no outcome: it takes the newest version next
        except Exception as error:
            self.failed(manifest.version, f"{type(error).__name__}: {error}")
            raise
        self._inlet.report(manifest.version, "")

    def catch_up(
        self, into: Mapping[str, Tensor], after: int = -1, wait_s: float = 0.0
    ) -> ShardManifest | None:
        """Receive the newest version beyond `after`, the next one if it is overwritten meanwhile.

        None if there is none within `wait_s`, or if the sender was faster for so long.
        """
        until = time.monotonic() + wait_s
        while True:
            manifest = self.newest(after, max(until - time.monotonic(), 0))
            if manifest is None:
                return None
            try:
                self.receive(manifest, into)
            except StaleWeights:
                if time.monotonic() >= until:
                    return None
            else:
                return manifest

    def failed(self, version: int, error: str) -> None:
        """Tell the sender that this receiver could not take a version; `receive` does so itself."""
        self._inlet.report(version, error)

    def _receive(self, manifest: ShardManifest, into: Mapping[str, Tensor]) -> None:
        if manifest.plan != self._plan.digest or len(manifest.cells) != len(self._plan.cells):
            raise WeightError(
                f"version {manifest.version} was packed by plan {manifest.plan}, but this receiver "
                f"has plan {self._plan.digest}: both sides need the same layouts"
            )
        spans = self._spans(into)
        with ExitStack() as stack:
            stack.enter_context(self._inlet.lease(manifest, [span for span, _ in spans]))
            arriving = stack.enter_context(closing(self._inlet.fetch(manifest, [span for span, _ in spans])))
            tasks: list[Future[None]] = []
            bundle: list[tuple[Span, tuple[Landing, ...], Bytes]] = []
            try:
                for (span, landings), data in zip(spans, arriving, strict=True):
                    if not self._inlet.stable and data is not span.into:
                        self._land(manifest, into, [(span, landings, data)])
                        continue
                    bundle.append((span, landings, data))
                    # What is there already goes in large parts, what arrives is verified at once.
                    if not self._inlet.stable or sum(s.nbytes for s, _, _ in bundle) >= TASK_BYTES:
                        tasks.append(self._threads.submit(self._land, manifest, into, bundle))
                        bundle = []
                tasks.append(self._threads.submit(self._land, manifest, into, bundle))
            finally:
                wait(tasks)  # none writes behind our back
            _results(tasks)

    def _land(
        self,
        manifest: ShardManifest,
        into: Mapping[str, Tensor],
        arrived: Sequence[tuple[Span, tuple[Landing, ...], Bytes]],
    ) -> None:
        for span, landings, data in arrived:
            receive_span(manifest, span, landings, data, into, self._staging)

    def _to_land(self, into: Mapping[str, Tensor]) -> list[tuple[Span, tuple[Landing, ...]]]:
        check_shards(self._layout, into, "received")
        return landing_spans(self._landings, into)

    def close(self) -> None:
        self._threads.shutdown()
        self._inlet.close()


def _results(tasks: Sequence[Future[_T]]) -> list[_T]:
    """All results in order; an error only after every task has ended, so that none writes behind our back."""
    wait(tasks)
    return [task.result() for task in tasks]


class Standby:
    """A second set of parameters: a version arrives in it while the first one is used, and then they change.

    `prepare` may run in another thread than the model. `switch` only exchanges the memory of each parameter
    (microseconds), so the generator stands still for that long; parameters that something else holds by
    address, a captured graph for instance, need `receive` into themselves instead.
    """

    def __init__(self, receiver: ShardReceiver, parameters: Mapping[str, Tensor]) -> None:
        self._receiver, self._parameters = receiver, dict(parameters)
        self._spare = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._ready: int | None = None

    def prepare(self, manifest: ShardManifest) -> None:
        """Receive and verify a version; the parameters in use are not touched, also by an error."""
        self._ready = None
        self._receiver.receive(manifest, self._spare)
        self._ready = manifest.version

    def switch(self) -> int:
        """Use the prepared version; its number. AssertionError if `prepare` has not succeeded."""
        assert self._ready is not None, "prepare a version before each switch"
        for name, parameter in self._parameters.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data
        version, self._ready = self._ready, None
        return version

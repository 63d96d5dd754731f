"""Weights from a trainer to generators on the same host, through shared memory.

    consumes                            produces                  waits for
    sender     the trainer's tensors    a manifest, when ready    leases on the slot to overwrite, bounded
    receiver   a manifest               parameters, in place      nothing

A sync is a transaction: the sender copies a version into the slot that isn't the newest, hashing each tensor
at its source, and only then announces it; a receiver leases the slot, copies, and reads every tensor back.
With two slots a trainer writes version v + 1 while generators read v.
"""

import logging
import time
from collections.abc import Mapping

from torch import Tensor

from arriero.engine.weights.copying import Staging, fingerprint, load, state_fingerprints, store, verify
from arriero.engine.weights.layout import Layout, StaleWeights, WeightError, match, overlapping, some
from arriero.engine.weights.shm import MAX_NAME_BYTES, MAX_SLOTS, Segment
from arriero.schemas.weights import TensorSpec, WeightManifest, weights_fingerprint

log = logging.getLogger(__name__)

_SLOWEST_BYTES_PER_S = 100e6  # a receiver below this is taken for stuck, if no timeout is given


class WeightSender:
    """The trainer's end. Buffers are allocated here, once, and reused for every version.

    `lease_timeout_s`: how long a receiver may keep reading a version that is to be overwritten; without it,
    30 s or what its bytes take at 100 MB/s, whichever is longer. A publish that meets a stuck receiver goes
    on without it and names it in `overtaken`; one call waits for all of them together.
    """

    def __init__(
        self, url: str, tensors: Mapping[str, Tensor], *, slots: int = 2, lease_timeout_s: float | None = None
    ) -> None:
        if not 2 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots is {slots}; from 2 (write one while the other is read) to {MAX_SLOTS}")
        self.url = url
        self.overtaken: tuple[str, ...] = ()  # receivers that the last publish no longer waited for
        self._layout = Layout.of(tensors)
        self._staging = Staging()
        self._segment = Segment.create(url, self._layout.fingerprint(), slots, self._layout.nbytes)
        written = [(self._segment.state(slot), slot) for slot in range(slots)]
        # A restarted trainer keeps the version that its predecessor announced last.
        newest = max((state.version, slot) for state, slot in written)[1]
        self._slot = newest if any(state.written for state, _ in written) else slots - 1
        self._version: int | None = None
        self._fingerprint: str = ""
        if lease_timeout_s is None:
            lease_timeout_s = max(30.0, self._layout.nbytes / _SLOWEST_BYTES_PER_S)
        self._lease_timeout_s = lease_timeout_s

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copy and hash all tensors; the manifest to announce. Blocks: call it from a thread under asyncio.

        Raises WeightError if names, shapes, dtypes or ties changed, ValueError if versions don't increase.
        """
        if self._version is not None and version <= self._version:
            raise ValueError(f"version {version} after version {self._version}; versions only increase")
        self._layout.check(tensors)
        slot = (self._slot + 1) % self._segment.num_slots
        self.overtaken = self._drain(slot)
        self._segment.begin(slot)
        named = self._store(slot, tensors)
        manifest = WeightManifest(
            version=version,
            url=self.url,
            segment=self._segment.id,
            slot=slot,
            nbytes=self._layout.nbytes,
            tensors=named,
            fingerprint=weights_fingerprint((s.name, s.dtype, s.shape, s.fingerprint) for s in named),
        )
        self._segment.commit(slot, version, manifest.fingerprint)
        if manifest.fingerprint == self._fingerprint:
            log.warning(
                "weights of version %d are bit-identical to those of version %s", version, self._version
            )
        self._slot, self._version, self._fingerprint = slot, version, manifest.fingerprint
        return manifest

    def close(self) -> None:
        """Unmap. Published versions stay readable until the run's owner calls `destroy`."""
        self._segment.close()

    def _store(self, slot: int, tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
        specs: dict[int, TensorSpec] = {}  # by offset: tied tensors are stored once
        named: list[TensorSpec] = []
        for place in self._layout.places:
            spec = specs.get(place.offset) if place.nbytes else None
            if spec is None:
                target = self._segment.slot(slot, place.offset, place.nbytes)
                spec = TensorSpec(
                    name=place.name,
                    dtype=place.dtype,
                    shape=place.shape,
                    offset=place.offset,
                    nbytes=place.nbytes,
                    fingerprint=store(tensors[place.name], target, self._staging),
                )
            if place.nbytes:
                specs[place.offset] = spec
            named.append(spec.model_copy(update={"name": place.name}))
        return tuple(named)

    def _drain(self, slot: int) -> tuple[str, ...]:
        """Wait until nobody reads the slot; names of those that had their time and still do."""
        self._segment.close_slot(slot)
        pause_s = 50e-6
        while readers := self._segment.readers(slot):
            now_ns = time.monotonic_ns()
            if all(now_ns - reader.since_ns >= self._lease_timeout_s * 1e9 for reader in readers):
                for reader in readers:
                    held_s = (now_ns - reader.since_ns) / 1e9
                    log.warning(
                        "receiver %s (pid %d) has read slot %d of %s for %.1f s; going on without it",
                        *(reader.receiver, reader.pid, slot, self.url, held_s),
                    )
                return tuple(reader.receiver for reader in readers)
            # A stopped or dead process can't wake us, so a condition would need the same period.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 10e-3)
        return ()


class WeightReceiver:
    """A generator's end. `name` is what the sender reports if this receiver gets stuck, e.g. generator-0."""

    def __init__(self, name: str) -> None:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"receiver name {name!r} must have 1 to {MAX_NAME_BYTES} bytes")
        self.name = name
        self._staging = Staging()
        self._attached: dict[str, tuple[Segment, int]] = {}

    def receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None:
        """Copy a version into existing parameters, in place, and read every one of them back.

        Floats are cast to the parameter's dtype. Raises StaleWeights if the version was overwritten: take the
        newest manifest; WeightError, naming the tensor or the count, for everything else. Nothing is written
        if names, shapes or dtypes don't fit; after an error in the middle, `into` is a mix of versions.
        """
        pairs = match(manifest, into)
        segment, entry = self._attach(manifest)
        shared = overlapping({name: tensor for name, (_, tensor) in pairs.items()})
        with segment.leased(entry, manifest.slot, manifest.version) as state:
            self._check(manifest, segment)
            try:
                for spec, tensor in pairs.values():
                    load(spec, segment.slot(manifest.slot, spec.offset, spec.nbytes), tensor, self._staging)
                    self._check_overtaken(manifest, segment, state.sequence)
                for name in sorted(shared):
                    spec, tensor = pairs[name]
                    verify(spec, segment.slot(manifest.slot, spec.offset, spec.nbytes), tensor, self._staging)
                for name, (_, tensor) in pairs.items():
                    if into[name].data_ptr() != tensor.data_ptr():
                        raise WeightError(f"{name} is a new tensor at each access: what it received is lost")
            except WeightError as error:
                # Torn bytes fail their fingerprint first; the cause is that the slot was overwritten.
                self._check_overtaken(manifest, segment, state.sequence)
                raise WeightError(f"{self.name}, version {manifest.version}: {error}") from error
            self._check_overtaken(manifest, segment, state.sequence)

    def close(self) -> None:
        """Unmap all segments and give back their leases."""
        for segment, _ in self._attached.values():
            segment.close()
        self._attached.clear()

    def _attach(self, manifest: WeightManifest) -> tuple[Segment, int]:
        attached = self._attached.get(manifest.url)
        if attached is None or attached[0].id != manifest.segment:
            segment = Segment.open(manifest.url)
            if segment.id != manifest.segment:
                found = segment.id
                segment.close()
                raise WeightError(
                    f"{self.name}: manifest of version {manifest.version} is of another run: "
                    f"{manifest.url} is segment {found}, the manifest's was {manifest.segment}"
                )
            if attached is not None:
                attached[0].close()
            attached = self._attached[manifest.url] = segment, segment.claim(self.name)
        return attached

    def _check(self, manifest: WeightManifest, segment: Segment) -> None:
        if manifest.slot >= segment.num_slots or manifest.nbytes != segment.slot_bytes:
            raise WeightError(
                f"{self.name}: manifest says slot {manifest.slot} of {manifest.nbytes} bytes, but "
                f"{manifest.url} has {segment.num_slots} of {segment.slot_bytes}"
            )
        state = segment.state(manifest.slot)
        if state.sequence == 0:
            raise WeightError(f"{self.name}: slot {manifest.slot} of {manifest.url} was never written")
        if state.closed or not state.written or state.version != manifest.version:
            raise StaleWeights(
                f"{self.name}: version {manifest.version} is no longer in slot {manifest.slot}"
            )
        if state.fingerprint != manifest.fingerprint:
            raise WeightError(
                f"{self.name}: version {manifest.version} at {manifest.url} is {state.fingerprint}, but "
                f"the manifest says {manifest.fingerprint}: it is of another run"
            )

    def _check_overtaken(self, manifest: WeightManifest, segment: Segment, sequence: int) -> None:
        if segment.state(manifest.slot).sequence != sequence:
            raise StaleWeights(
                f"{self.name} was overtaken: version {manifest.version} was overwritten as it was read"
            )


def verify_weights(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
    """Prove, at any time and without the buffers, that these tensors are the manifest's, byte by byte.

    WeightError names the tensors that differ and how many of how many; one that was cast counts as different.
    """
    staging = Staging()
    pairs = match(manifest, tensors)
    wrong = [name for name, (spec, held) in pairs.items() if fingerprint(held, staging) != spec.fingerprint]
    if wrong:
        raise WeightError(
            f"{len(wrong)} of {len(pairs)} tensors are not those of version {manifest.version}: {some(wrong)}"
        )


def fingerprint_weights(tensors: Mapping[str, Tensor]) -> str:
    """Fingerprint of these weights, equal to that of the manifest that would announce them."""
    return weights_fingerprint(state_fingerprints(dict(tensors), Staging()))

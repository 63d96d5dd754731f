"""Weights from a trainer to generators on the same host, through shared memory.

    consumes                            produces                  waits for
    sender     the trainer's tensors    a manifest, when ready    leases on the slot to overwrite, bounded
    receiver   a manifest               parameters, in place      nothing

A sync is a transaction: the sender copies a version into the slot that isn't the newest, hashing each tensor
at its source, and only then announces it; a receiver leases the slot, copies, and reads every tensor back.
With two slots a trainer writes version v + 1 while generators read v.
"""

import logging
from collections.abc import Mapping

from torch import Tensor

from arriero.engine.weights.copying import (
    Bytes,
    Staging,
    fingerprint,
    load,
    state_fingerprints,
    store,
    verify,
)
from arriero.engine.weights.layout import Layout, WeightError, match, overlapping, some
from arriero.engine.weights.shm import MAX_SLOTS, Segment
from arriero.engine.weights.shm_slots import SlotReader, Ticket, drain, last_slot
from arriero.engine.weights.transport import lease_timeout
from arriero.schemas.weights import TensorSpec, WeightManifest, weights_fingerprint

log = logging.getLogger(__name__)


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
        self._slot = last_slot(self._segment)
        self._version: int | None = None
        self._fingerprint: str = ""
        self._lease_timeout_s = lease_timeout(self._layout.nbytes, lease_timeout_s)

    def publish(
        self, version: int, tensors: Mapping[str, Tensor], *, must_change: bool = False
    ) -> WeightManifest:
        """Copy and hash all tensors; the manifest to announce. Blocks: call it from a thread under asyncio.

        Raises WeightError if names, shapes, dtypes or ties changed, ValueError if versions don't increase.
        With `must_change` (after a step that has changed something) weights that are bit-identical to the
        last version's are a WeightError and not announced; without it they are only logged.
        """
        if self._version is not None and version <= self._version:
            raise ValueError(f"version {version} after version {self._version}; versions only increase")
        self._layout.check(tensors)
        slot = (self._slot + 1) % self._segment.num_slots
        self.overtaken = drain(self._segment, slot, self._lease_timeout_s)
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
        if manifest.fingerprint == self._fingerprint:
            if must_change:
                raise WeightError(
                    f"version {version} is not announced: bit-identical to version {self._version}"
                )
            log.warning(
                "weights of version %d are bit-identical to those of version %s", version, self._version
            )
        self._segment.commit(slot, version, manifest.fingerprint)
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


class WeightReceiver:
    """A generator's end. `name` is what the sender reports if this receiver gets stuck, e.g. generator-0."""

    def __init__(self, name: str) -> None:
        self._reader = SlotReader(name)
        self.name = name
        self._staging = Staging()

    def receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None:
        """Copy a version into existing parameters, in place, and read every one of them back.

        Floats are cast to the parameter's dtype. Raises StaleWeights if the version was overwritten: take the
        newest manifest; WeightError, naming the tensor or the count, for everything else. Nothing is written
        if names, shapes or dtypes don't fit; after an error in the middle, `into` is a mix of versions.
        """
        pairs = match(manifest, into)
        shared = overlapping({name: tensor for name, (_, tensor) in pairs.items()})
        ticket = Ticket(
            url=manifest.url,
            segment=manifest.segment,
            slot=manifest.slot,
            slot_bytes=manifest.nbytes,
            version=manifest.version,
            fingerprint=manifest.fingerprint,
        )
        with self._reader.leased(ticket) as use:

            def sent(spec: TensorSpec) -> Bytes:
                return use.segment.slot(manifest.slot, spec.offset, spec.nbytes)

            for spec, tensor in pairs.values():
                load(spec, sent(spec), tensor, self._staging)
                use.check()
            for spec, tensor in (pairs[name] for name in sorted(shared)):
                verify(spec, sent(spec), tensor, self._staging)
            for name, (_, tensor) in pairs.items():
                if into[name].data_ptr() != tensor.data_ptr():
                    raise WeightError(f"{name} is a new tensor at each access: what it received is lost")

    def close(self) -> None:
        """Unmap all segments and give back their leases."""
        self._reader.close()


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

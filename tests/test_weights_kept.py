"""Versions that stay on the weight plane for longer than the newest few: who evaluates reads them late."""

from __future__ import annotations

from pathlib import Path
from typing import get_args
from uuid import uuid4

import pytest
import torch

from arriero.engine.weights import StaleWeights, WeightReceiver, WeightSender, destroy, nixl_transport
from arriero.engine.weights.ring import SlotRing
from arriero.schemas.weights import TransportName

MISSING = nixl_transport.unavailable()


def test_kept_versions_have_places_of_their_own() -> None:
    ring = SlotRing(3, keep_every=4)
    slots = list[int]()
    for version in range(13):
        slots.append(ring.slot(version))
        ring.written(slots[-1])
    assert [slots[v] for v in (0, 4, 8, 12)] == [3, 4, 3, 4]
    assert [s for v, s in enumerate(slots) if v % 4] == [0, 1, 2] * 3
    assert ring.total == 5


def test_without_kept_versions_it_is_a_ring() -> None:
    ring = SlotRing(2)
    for version, slot in enumerate([0, 1, 0, 1]):
        assert ring.slot(version) == slot
        ring.written(slot)
    assert ring.total == 2
    with pytest.raises(ValueError, match="slots is 1; at least 2"):
        SlotRing(1)


def test_what_a_predecessor_wrote_last_is_not_overwritten_first() -> None:
    for newest in range(5):
        ring = SlotRing(3, keep_every=4)
        ring.written(newest)
        assert newest not in {ring.slot(5), ring.slot(8)}


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(t, marks=pytest.mark.skipif(t == "nixl" and bool(MISSING), reason=MISSING))
        for t in get_args(TransportName)
        if t != "nccl"
    ],
)
def test_a_kept_version_is_there_until_the_second_one_after_it(
    transport: TransportName, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}" if transport == "store" else f"shm://test-{uuid4().hex}"
    sender = WeightSender(
        url, {"w": torch.zeros(64)}, transport=transport, keep_every=4, secret=b"run", lease_timeout_s=5
    )
    receiver, into = WeightReceiver("evaluator", b"run"), {"w": torch.zeros(64)}
    try:
        manifests = [sender.publish(v, {"w": torch.full((64,), float(v + 1))}) for v in range(8)]
        for kept in (0, 4, 6, 7):
            receiver.receive(manifests[kept], into)
            assert torch.equal(into["w"], torch.full((64,), float(kept + 1)))
        for gone in (1, 5):
            with pytest.raises(StaleWeights):
                receiver.receive(manifests[gone], into)
        sender.publish(8, {"w": torch.full((64,), 9.0)})
        with pytest.raises(StaleWeights):
            receiver.receive(manifests[0], into)
        receiver.receive(manifests[4], into)
        assert torch.equal(into["w"], torch.full((64,), 5.0))
    finally:
        receiver.close()
        sender.close()
        if transport == "shm":
            destroy(url)

"""Sharded weights by NIXL (UCX): receivers read one-sided from the slots of the source ranks.

The same code runs over TCP and shared memory on a CPU and over RDMA between hosts. Slots, parameters and
staging buffers are registered once. While one batch of spans is verified, the next one is under way.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# NIXL's Python API is annotated only in part.

import importlib
import logging
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
import numpy as np

from arriero.engine.weights.copying import Bytes, warm_buffer
from arriero.engine.weights.layout import SenderGone, WeightError
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import Ranks
from arriero.engine.weights.served import ServedInlet, ServedOutlet, Serving
from arriero.engine.weights.shards import SPAN_BYTES
from arriero.engine.weights.transport import BATCH_BYTES, Span, batches
from arriero.schemas.weights import WeightManifest

_IDLE_S, _BUSY_S = 20e-3, 50e-6  # between two looks at the network
_AGENTS = ("nixl_cu13", "nixl_cu12")


class _Offer(msgspec.Struct, frozen=True):
    """A source rank's agent, and where its slots begin."""

    metadata: bytes
    address: int
    slot_bytes: int


def unavailable() -> str:
    """Why NIXL can't be used here; empty if it can."""
    errors: list[str] = []
    for name in _AGENTS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
        else:
            return ""
    return f"{'; '.join(errors)}: install arriero[nixl]"


# The class of NIXL's agent is known only where NIXL is installed.
def make_agent(name: str) -> Any:
    """An agent on UCX; WeightError if NIXL is not installed."""
    missing = unavailable()
    if missing:
        raise WeightError(f"NIXL is not available: {missing}")
    for package in _AGENTS:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it would print to our output
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    raise AssertionError("one of them was there a moment ago")


class NixlOutlet(ServedOutlet):
    """A source rank's end of nixl://."""

    scheme = "nixl"

    def __init__(self, plan: Plan, serving: Serving, ranks: Ranks | None = None) -> None:
        super().__init__(plan, serving, ranks, lambda join: (self._offer, lambda: None))
        self._agent = make_agent(f"source-{self._ranks.rank}-{self.session}")
        self._registered = self._agent.register_memory([_region(self.slots)], "DRAM")
        self._offer = msgspec.msgpack.encode(
            _Offer(self._agent.get_agent_metadata(), self.slots.ctypes.data, self.slots.shape[1])
        )
        self._ranks.gather(b"")
        self._closing = False
        self._progress = Thread(target=self._make_progress, name="arriero-nixl", daemon=True)
        self._progress.start()

    def _make_progress(self) -> None:
        """Connections, and reads over TCP, need this end too. NIXL's own thread never rests, ours does."""
        while not self._closing:
            self._agent.get_new_notifs()
            if self._server.somebody_reads(within_s=_IDLE_S):
                time.sleep(_BUSY_S)

    def close(self) -> None:
        super().close()
        self._closing = True
        self._progress.join()
        self._agent.deregister_memory(self._registered)


class NixlInlet(ServedInlet):
    """A receiver rank's end."""

    def __init__(self, url: str, name: str, secret: bytes, bound_s: float = 60.0) -> None:
        self._agent = make_agent(f"receiver-{name}-{time.monotonic_ns()}")
        self._offers: dict[int, tuple[_Offer, str]] = {}
        self._regions: dict[tuple[int, int], Any] = {}
        # Two halves: one is being filled while the other is read.
        self._staging: Bytes = warm_buffer(2 * (BATCH_BYTES + SPAN_BYTES)).reshape(2, -1)
        self._register(self._staging)
        super().__init__(url, name, secret, bound_s)

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        groups = batches(spans)
        under_way: list[tuple[Any, list[Bytes]]] = []
        try:
            for number, batch in enumerate(groups):
                under_way.append(self._post(manifest.slot, batch, self._staging[number % 2]))
                if number:
                    yield from self._arrived(groups[number - 1], *under_way.pop(0))
            for handle, places in under_way:
                yield from self._arrived(groups[-1], handle, places)
            under_way.clear()
        finally:
            for handle, _ in under_way:
                with suppress(Exception):  # a transfer to a dead peer can't be aborted; NIXL keeps the handle
                    handle.release()

    def welcomed(self, rank: int, extra: bytes) -> None:
        offer = msgspec.msgpack.decode(extra, type=_Offer)
        name = self._agent.add_remote_agent(offer.metadata)
        self._offers[rank] = offer, name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, rank: int) -> None:
        super().disconnect(rank)
        if rank in self._offers:
            with suppress(Exception):  # the peer may be dead
                self._agent.remove_remote_agent(self._offers.pop(rank)[1])

    def close(self) -> None:
        super().close()
        for region in self._regions.values():
            self._agent.deregister_memory(region)
        self._regions.clear()

    def _post(self, slot: int, batch: Sequence[Span], staging: Bytes) -> tuple[Any, list[Bytes]]:
        """Begin to read a batch of one source; where each span will be."""
        offer, agent = self._offers[batch[0].source]
        places: list[Bytes] = []
        used = 0
        for span in batch:
            if span.into is None:
                places.append(staging[used : used + span.nbytes])
                used += span.nbytes
            else:
                self._register(span.into)
                places.append(span.into)
        base = offer.address + slot * offer.slot_bytes
        here = np.array([(p.ctypes.data, p.size, 0) for p in places], dtype=np.uint64)
        there = np.array([(base + span.offset, span.nbytes, 0) for span in batch], dtype=np.uint64)
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, "DRAM"),
            self._agent.get_xfer_descs(there, "DRAM"),
            agent,
        )
        if self._agent.transfer(handle) == "ERR":
            raise SenderGone(f"source rank {batch[0].source}: NIXL can't begin to read")
        return handle, places

    def _arrived(self, batch: Sequence[Span], handle: Any, places: Sequence[Bytes]) -> Iterator[Bytes]:
        source = batch[0].source
        until = time.monotonic() + self._bound_s
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR" or self.sources[source].gone:
                raise SenderGone(f"source rank {source} is gone while its weights are read")
            if time.monotonic() > until:
                raise SenderGone(f"source rank {source}: no bytes for {self._bound_s:.0f} s")
            time.sleep(50e-6)  # NIXL gives nothing to wait on
        handle.release()
        yield from places

    def _register(self, memory: Bytes) -> None:
        key = memory.ctypes.data, memory.size
        if key not in self._regions:
            self._regions[key] = self._agent.register_memory([_region(memory)], "DRAM")


def _region(memory: Bytes) -> tuple[int, int, int, str]:
    return memory.ctypes.data, memory.nbytes, 0, ""

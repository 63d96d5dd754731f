"""SPMD roles: rank 0 takes records from the broker, all ranks get them, rank 0's outputs count.

The bytes of a record go over a gloo group of their own, as a tensor: no pickling, and no interference with the
component's collectives. A wait of the other ranks is bounded like any other.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from arriero.engine.codec import decode, encode
from arriero.engine.runtime.node import NodeRunner
from arriero.engine.stream import Stream
from arriero.schemas.messages import Record

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class World:
    """The torch.distributed world of one replica; with one rank there is none, and torch isn't imported."""

    def __init__(self, rank: int, ranks: int, bound_s: float) -> None:
        self.rank, self.ranks, self._bound = rank, ranks, timedelta(seconds=2 * bound_s)
        self._group: ProcessGroup | None = None

    def open(self) -> None:
        """Join the world (NCCL where there are GPUs, else gloo) and make the group for records."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=self._bound)
        self._group = dist.new_group(backend="gloo", timeout=self._bound)

    def share(self, payload: bytes | None) -> bytes | None:
        """Rank 0's payload, on every rank; None stands for the end of the stream."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload) if payload is not None else -1])
        dist.broadcast(size, src=0, group=self._group)
        if (length := int(size)) < 0:
            return None
        data = torch.frombuffer(bytearray(payload or bytes(length)), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def close(self) -> None:
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._group = None


class SharedSource:
    """A stream's source on every rank: rank 0 reads `inner`, the others receive what it took."""

    def __init__(self, inner: Any, kind: type[Record], world: World) -> None:
        self._inner, self._kind, self._world = inner, kind, world

    async def next(self) -> Record | None:
        record = await self._inner.next() if self._world.rank == 0 else None
        payload = encode(record) if record is not None else None
        received = await asyncio.to_thread(self._world.share, payload)
        if received is None:
            return None
        return record if record is not None else decode(received, self._kind)

    def poll(self) -> Record | None:
        raise TypeError("a component on several ranks waits for its records together: use next()")

    async def at(self, version: int) -> Record:
        raise TypeError("a component on several ranks doesn't follow loops")


class RankRunner(NodeRunner):
    """Runs a node on one of several ranks."""

    async def run(self) -> None:
        await asyncio.to_thread(self.world.open)
        await super().run()

    def _stream(self, port: str, stream: Stream[Any]) -> Stream[Any]:
        inner = super()._stream(port, stream)
        return Stream(stream.source, stream.record, SharedSource(inner, stream.record, self.world))

    async def emit(self, output: Record) -> None:
        if self.world.rank == 0:
            await super().emit(output)

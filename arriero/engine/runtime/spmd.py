"""SPMD roles: rank 0 takes records from the broker, all ranks get them, rank 0's outputs count.

The bytes of a record go over a gloo group of their own, as a tensor: no pickling, and no interference with
the component's collectives. A wait of the other ranks is bounded like any other. Collectives block, so they
run in threads that don't keep the process alive: a rank whose peers are gone must be able to leave.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter

from arriero.engine.codec import decode, encode
from arriero.engine.runtime.node import NodeRunner
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Source, Stream
from arriero.schemas.ledger import Step
from arriero.schemas.messages import Record

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_STEPS = TypeAdapter(tuple[Step, ...], config=ConfigDict(ser_json_inf_nan="strings"))


class World:
    """The torch.distributed world of one replica; with one rank there is none, and torch isn't imported."""

    def __init__(self, rank: int, ranks: int, bound_s: float) -> None:
        self.rank, self.ranks, self.bound_s = rank, ranks, 2 * bound_s  # longer than rank 0 waits itself
        self._groups: dict[str, ProcessGroup] = {}
        self._joining = asyncio.Lock()

    async def join(self, node: str) -> None:
        """Join the world (NCCL where there are GPUs, else gloo), with a group for this node's records."""
        async with self._joining:  # all ranks make their groups in the order of the graph
            await in_thread(lambda: self._open(node))

    def _open(self, node: str) -> None:
        import torch
        import torch.distributed as dist

        bound = timedelta(seconds=self.bound_s)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=bound)
        untyped: Any = dist
        self._groups[node] = untyped.new_group(backend="gloo", timeout=bound)

    def share(self, node: str, payload: bytes | None) -> bytes | None:
        """Rank 0's payload, on every rank; None stands for the end of the stream."""
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload) if payload is not None else -1])
        dist.broadcast(size, src=0, group=self._groups[node])
        if (length := int(size)) < 0:
            return None
        data = torch.frombuffer(bytearray(payload or bytes(length)), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._groups[node])
        return data.numpy().tobytes()

    def close(self) -> None:
        """Leave the world, after a good end only: with a collective under way it would block."""
        if self._groups:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._groups.clear()


class SharedSource:
    """A stream's source on every rank: rank 0 reads `inner`, the others receive what it took."""

    def __init__(
        self, inner: Stream[Any], kind: type[Record], world: World, node: str, clock: NodeClock
    ) -> None:
        self._inner, self._kind, self._world, self._node, self._clock = inner, kind, world, node, clock

    async def next(self) -> Record | None:
        if self._world.rank == 0:
            record = cast("Record | None", await self._inner.next())
            payload = encode(record) if record is not None else None
            await in_thread(lambda: self._world.share(self._node, payload))
            return record
        received = await self._clock.wait(
            in_thread(lambda: self._world.share(self._node, None)),
            f"a record of {self._inner.source} from rank 0",
            bound_s=self._world.bound_s,
        )
        if received is None:
            return None
        self._clock.start()
        self._clock.taken += 1
        return decode(received, self._kind)

    def poll(self) -> Record | None:
        raise TypeError("a component on several ranks waits for its records together: use next()")

    async def at(self, version: int) -> Record:
        raise TypeError("a component on several ranks doesn't follow loops")


class RankRunner(NodeRunner):
    """Runs a node on one of several ranks; only rank 0 leases, publishes and acknowledges."""

    async def _recall(self) -> tuple[Step, ...]:
        await self.world.join(self.node.name)
        steps = _STEPS.dump_json(await super()._recall()) if self.world.rank == 0 else None
        shared = await in_thread(lambda: self.world.share(self.node.name, steps))
        return _STEPS.validate_json(shared or b"[]")

    def _stream(self, port: str, stream: Stream[Any]) -> Stream[Any]:
        inner = super()._stream(port, stream)
        live: Source[Any] = SharedSource(inner, stream.record, self.world, self.node.name, self.clock)
        return Stream(stream.source, stream.record, live)

    async def emit(self, output: Record) -> None:
        if self.world.rank == 0:
            await super().emit(output)


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work` from a daemon thread. Cancelled, the wait ends and the thread is left behind."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001  # raised again where it is waited for
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await result

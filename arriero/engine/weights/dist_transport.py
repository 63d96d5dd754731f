"""Sharded weights by torch.distributed, point to point: gloo between hosts without RDMA, NCCL between GPUs.

Each pair of a source rank and a receiver rank has a process group of its own, made when the receiver joins,
and the source serves it in a thread of its own: a receiver that hangs or dies breaks its own group, no other.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# torch.distributed exports its stores and groups without saying so, and annotates some functions in part.

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from threading import Lock
from typing import Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from arriero.engine.weights.copying import Bytes, warm_buffer
from arriero.engine.weights.layout import SenderGone, WeightError
from arriero.engine.weights.lease_messages import Join, Send
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import Ranks
from arriero.engine.weights.served import ServedInlet, ServedOutlet, Serving
from arriero.engine.weights.shards import SPAN_BYTES
from arriero.engine.weights.transport import Span
from arriero.schemas.weights import WeightManifest

Backend = Literal["gloo", "nccl"]
_SOURCE, _RECEIVER = 0, 1
_AHEAD_BYTES = 4 * SPAN_BYTES  # under way while what has arrived is verified
_TURN_BYTES = (
    SPAN_BYTES  # waited for together: to wake a thread for each message costs as much as a small one
)


class _Pair(Protocol):
    """A process group of two, as far as we use it."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], of: int, tag: int, /) -> dist.Work: ...


class _Meeting(msgspec.Struct, frozen=True):
    """Where a receiver meets a source rank: a store, and a prefix of its own in it."""

    host: str
    port: int
    prefix: str
    backend: Backend


class DistOutlet(ServedOutlet):
    """A source rank's end of gloo:// or nccl://. `device` holds what NCCL sends; gloo sends host memory."""

    def __init__(
        self,
        plan: Plan,
        serving: Serving,
        ranks: Ranks | None = None,
        *,
        backend: Backend = "gloo",
        device: torch.device | None = None,
    ) -> None:
        self.scheme = backend
        self._backend: Backend = backend
        self._device = device
        self._host, self._met, self._lock = serving.host, 0, Lock()
        self._store = TCPStore(serving.host, 0, is_master=True, wait_for_workers=False)
        super().__init__(plan, serving, ranks, self._meet)

    @property
    def _send_timeout_s(self) -> float:
        """Longer than a lease: that one ends by its bound, and only then is the receiver cut off."""
        return 2 * self._lease_timeout_s + 10

    def _meet(self, join: Join) -> tuple[bytes, Callable[[], Callable[[int, Send], None] | None]]:
        with self._lock:
            self._met += 1
            meeting = _Meeting(self._host, self._store.port, f"pair-{self._met}", self._backend)

        def serve() -> Callable[[int, Send], None]:
            pair = _pair(self._store, meeting, _SOURCE, self._send_timeout_s)
            return lambda slot, send: self._send(pair, slot, send.spans)

        return msgspec.msgpack.encode(meeting), serve

    def _send(self, pair: _Pair, slot: int, spans: Sequence[tuple[int, int]]) -> None:
        """Send the spans in turn; an error ends with the receiver's connection."""
        part, bound = torch.from_numpy(self.slots[slot]), timedelta(seconds=self._send_timeout_s)
        works: deque[tuple[int, dist.Work]] = deque()
        ahead = 0

        def wait(most: int) -> None:
            """Until at most so many bytes are under way; the last message first, for they go in turn."""
            nonlocal ahead
            turn: list[dist.Work] = []
            while works and ahead > most:
                size, work = works.popleft()
                ahead -= size
                turn.append(work)
            for work in reversed(turn):
                work.wait(bound)

        for offset, nbytes in spans:
            if offset < 0 or nbytes < 0 or offset + nbytes > self.part_bytes:
                raise WeightError(f"bytes {offset} to {offset + nbytes} of {self.part_bytes} asked for")
            data = part[offset : offset + nbytes]
            data = data if self._device is None else data.to(self._device)
            works.append((nbytes, pair.send([data], _RECEIVER, 0)))
            ahead += nbytes
            if ahead > _AHEAD_BYTES:
                wait(_AHEAD_BYTES - _TURN_BYTES)
        wait(0)


class DistInlet(ServedInlet):
    """A receiver rank's end. `device` is where NCCL receives; the bytes are then verified on the host."""

    carried = True

    def __init__(
        self,
        url: str,
        name: str,
        secret: bytes,
        bound_s: float = 60.0,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._pairs: dict[int, _Pair] = {}
        self._device = device
        self._staging = warm_buffer(_AHEAD_BYTES + 3 * SPAN_BYTES)
        self._staged_to = 0
        super().__init__(url, name, secret, bound_s)

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for span in spans:
            wanted.setdefault(span.source, []).append((span.offset, span.nbytes))
        for source, places in wanted.items():
            self.source(source).ask(Send(places))
        under_way: deque[_Posted] = deque()
        ahead = 0
        for span in spans:
            under_way.append(self._post(span))
            ahead += span.nbytes
            if ahead > _AHEAD_BYTES:
                turn = _turn(under_way)
                ahead -= sum(posted.span.nbytes for posted in turn)
                yield from self._arrived(turn)
        while under_way:
            yield from self._arrived(_turn(under_way))

    def welcomed(self, rank: int, extra: bytes) -> None:
        meeting = msgspec.msgpack.decode(extra, type=_Meeting)
        timeout = timedelta(seconds=self._bound_s)
        try:
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            self._pairs[rank] = _pair(store, meeting, _RECEIVER, self._bound_s)
        except RuntimeError as error:
            self.disconnect(rank)
            raise SenderGone(f"source rank {rank} has left as we met it: {error}") from error

    def disconnect(self, rank: int) -> None:
        super().disconnect(rank)
        self._pairs.pop(rank, None)

    def _post(self, span: Span) -> "_Posted":
        place = self._staged(span.nbytes) if span.into is None else span.into
        target = torch.from_numpy(place)
        buffer = target if self._device is None else torch.empty_like(target, device=self._device)
        return _Posted(span, self._pairs[span.source].recv([buffer], _SOURCE, 0), place, buffer)

    def _staged(self, nbytes: int) -> Bytes:
        """The next bytes of a ring that is larger than what may be under way."""
        if nbytes > SPAN_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        if self._staged_to + nbytes > self._staging.size:
            self._staged_to = 0
        self._staged_to += nbytes
        return self._staging[self._staged_to - nbytes : self._staged_to]

    def _arrived(self, turn: Sequence["_Posted"]) -> Iterator[Bytes]:
        bound = timedelta(seconds=self._bound_s)
        for posted in reversed(turn):  # those of one source come in turn: when the last is there, all are
            try:
                posted.work.wait(bound)
            except RuntimeError as error:
                source = posted.span.source
                raise SenderGone(f"source rank {source} is gone while it sends: {error}") from error
        for posted in turn:
            if self._device is not None:
                torch.from_numpy(posted.place).copy_(posted.buffer)
            yield posted.place


class _Posted(NamedTuple):
    """What is to arrive; `buffer` is where, on the device of the transport."""

    span: Span
    work: dist.Work
    place: Bytes
    buffer: Tensor


def _turn(under_way: deque[_Posted]) -> list[_Posted]:
    """The next of them, of _TURN_BYTES or all."""
    turn: list[_Posted] = []
    size = 0
    while under_way and size < _TURN_BYTES:
        turn.append(under_way.popleft())
        size += turn[-1].span.nbytes
    return turn


def _pair(store: TCPStore, meeting: _Meeting, rank: int, timeout_s: float) -> _Pair:
    """The process group of two; both ends make it at the same time."""
    own, timeout = PrefixStore(meeting.prefix, store), timedelta(seconds=timeout_s)
    # The stubs lack send and recv of these classes.
    if meeting.backend == "gloo":
        return cast("_Pair", dist.ProcessGroupGloo(own, rank, 2, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("_Pair", dist.ProcessGroupNCCL(own, rank, 2, options))

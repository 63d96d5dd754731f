"""What torch.distributed and NIXL do alone: bytes of one buffer into another, nothing packed or verified."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false
# NIXL and torch.distributed are annotated only in part.

import base64
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from arriero.engine.weights import nixl_transport
from arriero.engine.weights.copying import Bytes

PART_BYTES = 8 << 20
_AHEAD = 4


class RawGloo:
    """Parts of 8 MB, a few under way at a time, as the transport does."""

    def __init__(self, store: TCPStore, rank: int, nbytes: int) -> None:
        self._store, self._rank = store, rank
        self.at = f"127.0.0.1:{store.port}"
        self._buffer = torch.ones(nbytes, dtype=torch.uint8)
        self._group: Any = None

    @classmethod
    def sender(cls, nbytes: int) -> "RawGloo":
        return cls(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, nbytes)

    @classmethod
    def receiver(cls, at: str, nbytes: int) -> "RawGloo":
        raw = cls(TCPStore("127.0.0.1", int(at.split(":")[1]), is_master=False), 1, nbytes)
        raw.connect()
        return raw

    def connect(self) -> None:
        store = PrefixStore("raw", self._store)
        self._group = dist.ProcessGroupGloo(store, self._rank, 2, timedelta(seconds=60))

    def send(self, done: Callable[[], bool]) -> None:
        self._each(self._group.send, 1)

    def receive(self) -> None:
        self._each(self._group.recv, 0)

    def _each(self, post: Callable[[list[Tensor], int, int], Any], other: int) -> None:
        works: list[Any] = []
        for part in torch.split(self._buffer, PART_BYTES):
            works.append(post([part], other, 0))
            if len(works) > _AHEAD:
                works.pop(0).wait()
        for work in works:
            work.wait()


class RawNixl:
    """One read of the whole buffer, as a list of parts of 8 MB."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._agent = nixl_transport.make_agent(name)
        # Memory as parameters have it: numpy's own would have large pages, which are pinned much faster.
        self._buffer: Bytes = torch.ones(nbytes, dtype=torch.uint8).numpy()
        self._agent.register_memory([(self._buffer.ctypes.data, nbytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.at = f"{metadata}:{self._buffer.ctypes.data}"
        self._from: tuple[str, int] = ("", 0)

    @classmethod
    def sender(cls, nbytes: int) -> "RawNixl":
        return cls("raw-sender", nbytes)

    @classmethod
    def receiver(cls, at: str, nbytes: int) -> "RawNixl":
        raw = cls("raw-receiver", nbytes)
        metadata, _, address = at.partition(":")
        name = raw._agent.add_remote_agent(base64.b64decode(metadata))
        raw._from = name.decode() if isinstance(name, bytes) else str(name), int(address)
        return raw

    def connect(self) -> None:
        """Nothing: a read is one-sided. Setting up the connection takes both ends, see `send`."""

    def send(self, done: Callable[[], bool]) -> None:
        """Answer what the other end asks until it is done."""
        while not done():
            self._agent.get_new_notifs()

    def receive(self) -> None:
        name, address = self._from
        mine = self._buffer.ctypes.data
        cuts = [(i, min(PART_BYTES, self._buffer.size - i)) for i in range(0, self._buffer.size, PART_BYTES)]
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs([(mine + i, n, 0) for i, n in cuts], "DRAM"),
            self._agent.get_xfer_descs([(address + i, n, 0) for i, n in cuts], "DRAM"),
            name,
        )
        state = self._agent.transfer(handle)
        while state != "DONE":
            assert state != "ERR", "the bare transfer failed"
            time.sleep(50e-6)
            state = self._agent.check_xfer_state(handle)
        handle.release()

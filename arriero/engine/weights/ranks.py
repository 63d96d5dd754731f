"""The ranks of a trainer, as far as a publish needs them: every rank says something, all hear all of it."""

# pyright: reportUnknownMemberType=false
# Some functions of torch are annotated only in part.

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arriero.engine.weights.layout import WeightError


class Ranks(Protocol):
    """All ranks call `gather` equally often; it is also a barrier."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank said, by rank."""
        ...


class OneRank:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


def first_says(ranks: Ranks, work: Callable[[], bytes]) -> bytes:
    """What `work` gives on the first rank, on all ranks; its error is a WeightError on the others."""
    said, failure = b"", None
    if not ranks.rank:
        try:
            said = b"+" + work()
        except Exception as error:  # noqa: BLE001  # told to the others, which wait, then raised
            said, failure = b"-" + f"{type(error).__name__}: {error}".encode(), error
    answer = ranks.gather(said)[0]
    if failure is not None:
        raise failure
    if answer[:1] == b"-":
        raise WeightError(f"rank 0: {answer[1:].decode()}")
    return answer[1:]


class GroupRanks:
    """The ranks of a process group; nothing is pickled."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group, self._device = group, device or torch.device("cpu")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, data: bytes) -> list[bytes]:
        mine = torch.tensor([len(data)], device=self._device)
        sizes = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(sizes, mine, group=self._group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        said: list[Tensor] = [torch.empty_like(padded, device=self._device) for _ in range(self.size)]
        dist.all_gather(said, padded.to(self._device), group=self._group)
        return [
            bytes(part.cpu().numpy()[:length].tobytes()) for part, length in zip(said, lengths, strict=True)
        ]

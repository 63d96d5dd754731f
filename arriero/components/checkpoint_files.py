"""A checkpoint of what learns as safetensors: every rank writes its part, any number reads them.

Through torch.distributed.checkpoint, in its safetensors form: nothing in the files is pickled.
"""

# pyright: reportUnknownMemberType=false
# torch and safetensors annotate only a part of what is called here.

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arriero.components.random_state import RANDOM, restore_random_state

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from arriero.components.learner import Kept

_COUNTERS = ("updates", "version")
_FILE_BYTES = 256 << 20  # of one file, about: it is made in memory, twice over, before it is written


def write_checkpoint(state: Kept, directory: Path) -> None:
    """Write all that `read_checkpoint` needs; all ranks call it together. FileExistsError if not empty."""
    if directory.is_dir() and any(directory.glob("*.safetensors")):
        raise FileExistsError(f"{directory} holds a checkpoint already; write into an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(state.checkpoint(), directory, state.group)


def write_tensors(tensors: Mapping[str, Tensor], directory: Path, group: dist.ProcessGroup | None) -> None:
    """The same for tensors that `state.checkpoint()` gave, and others beside them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    untyped: tuple[Any, Any] = (dcp, HuggingFaceStorageWriter)
    stored = _stored(tensors)
    files = _files(stored, 1 if group is None else group.size())
    writer = untyped[1](path=str(directory), save_distributed=True, fqn_to_index_mapping=files)
    with _quiet():
        untyped[0].save(stored, storage_writer=writer, process_group=group, no_dist=group is None)


def num_files(tensors: Mapping[str, Tensor]) -> int:
    """How many files tensors that one rank alone holds become, about."""
    return 1 + sum(t.numel() * t.element_size() for t in tensors.values()) // _FILE_BYTES


def _files(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """The number, from 1 on, of the file that each tensor of any rank goes to; rank 0's answer counts."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        if name.startswith(RANDOM):  # of each rank alone, under a name of its own
            kind = name.removeprefix(RANDOM).partition(".")[2]
            numbers |= {f"{RANDOM}{rank}.{kind}": 1 for rank in range(ranks)}
            continue
        nbytes = tensor.numel() * tensor.element_size() // ranks
        if filled and filled + nbytes > _FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += nbytes
    return numbers


def written_by(rank: int, directory: Path) -> list[str]:
    """The names of the files that `rank` has written."""
    return sorted(path.name for path in directory.glob(f"shard-{rank + 1:05}-*.safetensors"))


def read_checkpoint(state: Kept, directory: Path) -> None:
    """Take over what was written, by as many ranks and shards as there were; all ranks call it together.

    FileNotFoundError for a directory without a checkpoint; ValueError, naming a tensor, for one of another
    model or optimizer. The states of random generators are those of this rank; a rank that there wasn't
    keeps its own.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not any(directory.glob("*.safetensors")):
        raise FileNotFoundError(f"{directory} holds no checkpoint: no *.safetensors in it")
    untyped: Any = HuggingFaceStorageReader
    held = untyped(path=str(directory)).read_metadata().state_dict_metadata
    counted = _stored({name: torch.tensor(0) for name in _COUNTERS})
    _read(counted, directory, state.group)
    tensors = _stored(state.blank(int(counted["updates"])))
    if missing := sorted(tensors.keys() - held.keys()):
        raise ValueError(
            f"the checkpoint {directory} lacks {len(missing)} of {len(tensors)} tensors: {missing[:3]}"
        )
    rank = 0 if state.group is None else state.group.rank()
    random = {
        name: torch.empty(held[name].size, dtype=held[name].properties.dtype)
        for name in held
        if name.startswith(f"{RANDOM}{rank}.")
    }
    _read(tensors | random, directory, state.group)
    state.restore(tensors)
    restore_random_state(random, rank)


def _read(tensors: dict[str, Tensor], directory: Path, group: dist.ProcessGroup | None) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    untyped: tuple[Any, Any] = (dcp, HuggingFaceStorageReader)
    reader = untyped[1](path=str(directory))
    with _quiet():
        untyped[0].load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Counters as vectors of one number: the files hold no scalars."""
    return {name: t.reshape(1) if name in _COUNTERS else t for name, t in tensors.items()}


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """One process alone is meant, and no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

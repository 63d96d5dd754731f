"""A checkpoint of a policy in training as safetensors: every rank writes its part, any number reads them.

Through torch.distributed.checkpoint, in its safetensors form: nothing in the files is pickled.
"""

# pyright: reportUnknownMemberType=false
# torch and safetensors annotate only a part of what is called here.

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.training import TrainState

_COUNTERS = ("updates", "version")


def write_checkpoint(state: TrainState, directory: Path) -> None:
    """Write all that `read_checkpoint` needs; all ranks call it together. FileExistsError if not empty."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    if directory.is_dir() and any(directory.glob("*.safetensors")):
        raise FileExistsError(f"{directory} holds a checkpoint already; write into an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    untyped: tuple[Any, Any] = (dcp, HuggingFaceStorageWriter)
    writer = untyped[1](path=str(directory), save_distributed=True)
    with _quiet():
        untyped[0].save(_stored(state.checkpoint()), storage_writer=writer)


def read_checkpoint(state: TrainState, directory: Path) -> None:
    """Take over what was written, by as many ranks and shards as there were; all ranks call it together.

    FileNotFoundError for a directory without a checkpoint; ValueError, naming a tensor, for one of another
    model or optimizer.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not any(directory.glob("*.safetensors")):
        raise FileNotFoundError(f"{directory} holds no checkpoint: no *.safetensors in it")
    untyped: tuple[Any, Any] = (dcp, HuggingFaceStorageReader)
    reader = untyped[1](path=str(directory))
    counted = _stored({name: torch.tensor(0) for name in _COUNTERS})
    with _quiet():
        untyped[0].load(counted, storage_reader=reader)
    tensors = _stored(state.blank(int(counted["updates"])))
    held = set(reader.read_metadata().state_dict_metadata)
    if missing := sorted(tensors.keys() - held):
        raise ValueError(
            f"the checkpoint {directory} lacks {len(missing)} of {len(tensors)} tensors: {missing[:3]}"
        )
    with _quiet():
        untyped[0].load(tensors, storage_reader=untyped[1](path=str(directory)))
    state.restore(tensors)


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Counters as vectors of one number: the files hold no scalars."""
    return {name: t.reshape(1) if name in _COUNTERS else t for name, t in tensors.items()}


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """One process alone is meant, and no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

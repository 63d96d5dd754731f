"""Checkpoints while something learns: a copy in memory at once, the files from a thread of their own.

    weights, moments, average, random states -> copied into buffers that are kept -> (the next step goes on)
    (thread) files of all ranks -> hashes gathered -> the mark -> older ones removed

| who waits    | for what                                     | unblocked by                    |
|--------------|----------------------------------------------|---------------------------------|
| the trainer  | its own copy; at the end the last checkpoint | the memory; the disk, its bound |
| a checkpoint | nobody: while one is written none is begun   |                                 |

A store that hangs costs the checkpoints, not the run: each file may take `patience_s`, and the store isn't
asked again before it has answered.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.checkpoints import PATIENCE_S, CheckpointStore
from arriero.engine.runtime.context import Context
from arriero.schemas.checkpoints import CheckpointFile, CheckpointMark

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.learner import Kept
    from arriero.engine.weights.ranks import Ranks

_log = logging.getLogger(__name__)
_PAUSE_S = 0.01  # the interpreter is shared: the trainer's thread goes on first


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Checkpoints:
    """A checkpoint after every `every` steps and after the last one; 0: none. The newest `keep` stay.

    They stand in `checkpoints/` of the run directory, or in a folder named after the run at `url`, any URL of
    fsspec, by node. All ranks must reach the same place. `patience_s` bounds the wait for each file.
    """

    every: NonNegativeInt = 20
    keep: PositiveInt = 2
    url: str = ""
    patience_s: PositiveFloat = PATIENCE_S

    def problems(self) -> Iterable[str]:
        if not self.every and self.url:
            yield f"checkpoints.url={self.url} with every=0, so that none is written; leave one of them out"

    def place(self, run_dir: Path, run_id: str, node: str) -> str:
        """The URL of the checkpoints of one node of a run."""
        return f"{self.url.rstrip('/')}/{run_id}/{node}" if self.url else str(run_dir / "checkpoints" / node)

    def store(self, context: Context) -> CheckpointStore:
        """Those of the node whose context this is. Raises TimeoutError."""
        return CheckpointStore(self.place(context.run_dir, context.run_id, context.node), self.patience_s)


class Checkpointer:
    """Writes checkpoints of `state`; all ranks make it, and call it, together. `close` waits for the last."""

    def __init__(self, state: Kept, config: Checkpoints, context: Context) -> None:
        self._state, self._config, self._context = state, config, context
        self._store = config.store(context)
        self._group, self.ranks, self._writers = _groups(context.ranks)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._buffers: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._last = -1

    def __call__(self) -> None:
        """After a step: begin a checkpoint if one is due. Returns as soon as the copy is made."""
        version, every = self._state.version, self._config.every
        if not every or version % every:
            return
        if any(said == b"busy" for said in self.ranks.gather(b"busy" if self._busy() else b"free")):
            self._context.count("checkpoints_skipped", 1)
            return
        self._begin()

    def close(self, *, last: bool) -> None:
        """Wait for what is being written; `last`: and write one of the weights of now."""
        self._settle()
        if last and self._config.every and self._last != self._state.version:
            self._begin()
            self._settle()
        self._thread.shutdown()

    def _begin(self) -> None:
        from arriero.components.random_state import random_state

        self._last = self._state.version
        tensors = self._state.checkpoint() | random_state(self.ranks.rank)
        mark = CheckpointMark(
            run_id=self._context.run_id, node=self._context.node, version=self._last, ranks=self.ranks.size,
            files=(), frontier=self._context.frontier(),
        )  # fmt: skip
        self._writing = self._thread.submit(self._write, self._copied(tensors), mark)

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In memory of this machine, split as they are; buffers are warm from the second time on."""
        import torch

        from arriero.components.sharding import local, sharded_like

        with torch.no_grad():
            for name, tensor in tensors.items():
                held = local(tensor.detach())
                if name in self._buffers and self._buffers[name].shape == held.shape:
                    self._buffers[name].copy_(held)
                else:
                    self._buffers[name] = held.to("cpu", copy=True)
        return {name: sharded_like(t, self._buffers[name]) for name, t in tensors.items()}

    def _write(self, tensors: Mapping[str, Tensor], mark: CheckpointMark) -> None:
        """In the thread: the files, then the mark."""
        from arriero.components.checkpoint_files import num_files, write_tensors, written_by
        from arriero.engine.weights.ranks import first_says

        time.sleep(_PAUSE_S)
        store, ranks = self._store, self._writers

        def begun() -> bytes:
            store.begin(mark.version)
            return b""

        first_says(ranks, begun)
        with nullcontext(store.place(mark.version)) if store.local else tempfile.TemporaryDirectory() as at:
            directory = Path(at)
            try:
                work = partial(write_tensors, tensors, directory, self._group)
                store.patience.call(f"write version {mark.version}", work, times=num_files(tensors))
                mine = store.take(mark.version, directory, written_by(ranks.rank, directory))
                said = json.dumps({"files": [file.model_dump() for file in mine]}).encode()
            except OSError as error:  # told to all ranks, which wait for us
                said = json.dumps({"error": f"rank {ranks.rank}: {error}"}).encode()
        told: list[dict[str, Any]] = [json.loads(each) for each in ranks.gather(said)]
        if errors := [each["error"] for each in told if "error" in each]:
            raise OSError("; ".join(errors))
        if ranks.rank:
            return
        files = tuple(CheckpointFile(**fields) for each in told for fields in each["files"])
        store.commit(mark.model_copy(update={"files": files}))
        store.keep_newest(self._config.keep)
        self._context.count("checkpoints", 1)

    def _busy(self) -> bool:
        if self._writing is not None and self._writing.done():
            self._settle()
        return self._writing is not None

    def _settle(self) -> None:
        """A checkpoint that can't be written is told and counted; training goes on."""
        if self._writing is None:
            return
        if (error := self._writing.exception()) is not None:
            _log.warning("the checkpoint of version %d isn't written: %s", self._last, error)
            self._context.count("checkpoints_failed", 1)
        self._writing = None


def restore(state: Kept, store: CheckpointStore, version: int) -> None:
    """Make `state` what it was at `version`; all ranks of it call it together, and any number may.

    For a state on any device and of any number of ranks and shards. Raises ValueError if the checkpoint is of
    another model or optimizer; whether it is whole `store.problem` says.
    """
    from arriero.components.checkpoint_files import read_checkpoint

    if store.local:
        read_checkpoint(state, Path(store.place(version)))
        return
    with tempfile.TemporaryDirectory() as folder:
        store.fetch(version, Path(folder))
        read_checkpoint(state, Path(folder))


def _groups(ranks: int) -> tuple[Any, Ranks, Ranks]:
    """For the files, for the trainer's thread and for the writer's; each talks in an order of its own."""
    from arriero.engine.weights.ranks import GroupRanks, OneRank

    if ranks == 1:
        return None, OneRank(), OneRank()
    import torch.distributed as dist

    untyped: Any = dist  # `new_group` is annotated only in part
    files, trainer, writer = (untyped.new_group(backend="gloo") for _ in range(3))
    return files, GroupRanks(trainer), GroupRanks(writer)

"""Runs a function on every rank of a gloo world, each in a process of its own."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

Work = Callable[[int, Path], None]


def run_ranks(work: Work, directory: Path, *, ranks: int) -> None:
    """`work(rank, directory)` on every rank; what they find they write into `directory`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training_states"])  # torch and transformers are imported once
    crew = [context.Process(target=_enter, args=(work, r, ranks, directory)) for r in range(ranks)]
    for process in crew:
        process.start()
    wait([process.sentinel for process in crew], timeout=220)  # the first: with an error the others hang
    for process in crew:
        process.join(timeout=5 if any(p.exitcode for p in crew) else 20)
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in crew] == [0] * ranks


def _enter(work: Work, rank: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    work(rank, directory)
    dist.destroy_process_group()

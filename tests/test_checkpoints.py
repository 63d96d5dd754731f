"""Checkpoints of a trainer: written beside it, whole or not there, read by any number of ranks."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from arriero.components.checkpoints import Checkpointer, Checkpoints, restore
from arriero.components.optimizer import AdamW
from arriero.components.sharding import whole
from arriero.components.training import TrainState
from arriero.components.training_options import Average, TrainingOptions
from arriero.engine.checkpoints import MARK, CheckpointStore
from arriero.schemas.checkpoints import Frontier
from tests.batches import random_batch
from tests.places import place
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama
from tests.training_states import state_of


def steps(state: TrainState, checkpointer: Checkpointer | None, number: int) -> list[dict[str, float]]:
    """Train on batches that follow from the version."""
    found: list[dict[str, float]] = []
    for _ in range(number):
        found.append(state.step(random_batch([8, 5, 9], seed=state.version)))
        if checkpointer is not None:
            checkpointer()
            checkpointer._settle()  # pyright: ignore[reportPrivateUsage]  # else which are skipped depends on the disk
    return found


def written(
    folder: Path, number: int, *, keep: int = 2, every: int = 2
) -> tuple[TrainState, CheckpointStore]:
    """A state that took so many steps, and what it left in `folder`."""
    state = state_of(optimizer=AdamW(lr=1e-3))
    checkpointer = Checkpointer(state, Checkpoints(every=every, keep=keep), place(run_dir=folder))
    steps(state, checkpointer, number)
    checkpointer.close(last=True)
    return state, CheckpointStore(str(folder / "checkpoints" / "node"))


def equal(one: TrainState, other: TrainState) -> bool:
    a, b = one.checkpoint(), other.checkpoint()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_comes_every_so_many_steps_and_at_the_end_and_the_newest_stay(tmp_path: Path) -> None:
    _, store = written(tmp_path, 7, keep=2)
    assert store.versions() == [6, 7]
    assert [store.problem(v) for v in (6, 7)] == ["", ""]
    assert store.newest() == 7
    assert store.newest(at_most=6) == 6
    assert store.newest(at_most=5) is None


def test_what_is_read_goes_on_at_the_same_bits(tmp_path: Path) -> None:
    options = TrainingOptions(average=Average(decay=0.9))
    state = state_of(optimizer=AdamW(lr=1e-3), options=options)
    checkpointer = Checkpointer(state, Checkpoints(every=1, keep=9), place(run_dir=tmp_path))
    steps(state, checkpointer, 3)
    checkpointer.close(last=True)
    resumed = state_of(tiny_llama(seed=9), optimizer=AdamW(lr=1e-3), options=options)
    restore(resumed, CheckpointStore(str(tmp_path / "checkpoints" / "node")), 2)
    assert resumed.version == 2
    assert steps(resumed, None, 1) != steps(state_of(optimizer=AdamW(lr=1e-3), options=options), None, 1)
    assert equal(resumed, state)


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002  # the global one, which a loss of the user's may use
    random.gauss(0, 1)
    _, store = written(tmp_path, 2)

    def drawn() -> list[float]:
        return [float(torch.rand(1)), random.gauss(0, 1), random.random(), float(np.random.rand())]  # noqa: NPY002

    expected = drawn()
    restore(state_of(), store, 2)
    assert drawn() == expected


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("truncated", "bytes,"),
        ("changed", "was changed since"),
        ("missing", "is missing"),
        ("unmarked", "it wasn't written to its end"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(
    damage: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RLinf #1469: the newest was incomplete, and taken."""
    _, store = written(tmp_path, 4)
    newest = Path(store.place(4))
    file = next(newest.glob("*.safetensors"))
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-7])
        case "changed":
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        case "missing":
            file.unlink()
        case _:
            (newest / MARK).unlink()
    with caplog.at_level(logging.WARNING):
        assert store.newest() == 2
    assert told in caplog.text
    assert "the checkpoint of version 4" in caplog.text


def test_a_checkpoint_that_was_broken_off_is_written_anew(tmp_path: Path) -> None:
    _, store = written(tmp_path, 2)
    (Path(store.place(2)) / MARK).unlink()
    (Path(store.place(2)) / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"torn")
    assert written(tmp_path, 2)[1].problem(2) == ""


def test_the_mark_says_what_the_ledger_said(tmp_path: Path) -> None:
    state = state_of()
    frontier = Frontier(events=9, cursor=8, admitted=8, trained=4, dropped={"stale": 1}, best_version=1)
    context = replace(place(run_dir=tmp_path), frontier=lambda: frontier)
    checkpointer = Checkpointer(state, Checkpoints(every=1), context)
    steps(state, checkpointer, 1)
    checkpointer.close(last=False)
    mark = CheckpointStore(str(tmp_path / "checkpoints" / "node")).mark(1)
    assert (mark.version, mark.run_id, mark.ranks, mark.frontier) == (1, "test", 1, frontier)


def test_checkpoints_go_to_any_url_of_fsspec_under_the_name_of_the_run(tmp_path: Path) -> None:
    config = Checkpoints(every=1, url=f"memory://checkpoints-{secrets.token_hex(4)}")
    state = state_of(optimizer=AdamW(lr=1e-3))
    checkpointer = Checkpointer(state, config, place(run_dir=tmp_path))
    steps(state, checkpointer, 3)
    checkpointer.close(last=True)
    store = CheckpointStore(f"{config.url}/test/node")
    assert store.versions() == [2, 3]
    other = state_of(tiny_llama(seed=9), optimizer=AdamW(lr=1e-3))
    version = store.newest()
    assert version == 3
    restore(other, store, version)
    assert equal(other, state)
    assert not (tmp_path / "checkpoints").exists()


def test_training_goes_on_when_a_checkpoint_cant_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder is to be")
    counts: Counter[str] = Counter()
    context = place(run_dir=tmp_path, count=lambda name, number: counts.update({name: number}))
    state = state_of()
    checkpointer = Checkpointer(state, Checkpoints(every=1), context)
    steps(state, checkpointer, 2)
    checkpointer.close(last=True)
    assert counts == {"checkpoints_failed": 2}
    assert "the checkpoint of version 2 isn't written" in caplog.text


def whole_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: whole(t) for name, t in state.checkpoint().items() if t.ndim}


def write_split(rank: int, directory: Path) -> None:
    state = state_of(optimizer=AdamW(lr=1e-3), options=TrainingOptions(shards=2), group=dist.group.WORLD)
    context = replace(place(run_dir=directory), rank=rank, ranks=2)
    checkpointer = Checkpointer(state, Checkpoints(every=2), context)
    steps(state, checkpointer, 2)
    checkpointer.close(last=True)
    weights = whole_tensors(state)
    if not rank:
        torch.save(weights, directory / "expected.pt")


def read_split(rank: int, directory: Path) -> None:
    shards, group = dist.get_world_size(), dist.group.WORLD
    state = state_of(
        tiny_llama(seed=9), optimizer=AdamW(lr=1e-3), options=TrainingOptions(shards=shards), group=group
    )
    restore(state, CheckpointStore(str(directory / "checkpoints" / "node")), 2)
    expected = torch.load(directory / "expected.pt", weights_only=True)
    found = whole_tensors(state)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_what_two_ranks_wrote_is_read_by_one_and_by_four(tmp_path: Path) -> None:
    run_ranks(write_split, tmp_path, ranks=2)
    store = CheckpointStore(str(tmp_path / "checkpoints" / "node"))
    assert store.newest() == 2
    assert store.mark(2).ranks == 2
    assert len(store.mark(2).files) == 2
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    one = state_of(tiny_llama(seed=9), optimizer=AdamW(lr=1e-3))
    restore(one, store, 2)
    assert all(torch.equal(one.checkpoint()[name], expected[name]) for name in expected)
    (tmp_path / "store").unlink()
    run_ranks(read_split, tmp_path, ranks=4)


# --- a store that hangs -----------------------------------------------------------------------------------


class HangingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory, but what it is asked to do doesn't come back before `goes_on` is set."""

    protocol = "hanging"
    goes_on = threading.Event()
    asked: ClassVar[list[str]] = []

    def put_file(self, lpath: str, rpath: str, *args: object, **kwargs: object) -> None:
        self.asked.append(rpath)
        self.goes_on.wait(60)
        super().put_file(lpath, rpath)


@pytest.fixture
def hanging() -> Iterator[type[HangingStore]]:
    fsspec.register_implementation("hanging", HangingStore, clobber=True)
    HangingStore.goes_on.clear()
    HangingStore.asked.clear()
    yield HangingStore
    HangingStore.goes_on.set()


def test_training_goes_on_beside_a_store_that_hangs_and_ends_within_the_bound(
    tmp_path: Path, hanging: type[HangingStore], caplog: pytest.LogCaptureFixture
) -> None:
    counts: Counter[str] = Counter()
    context = place(run_dir=tmp_path, count=lambda name, number: counts.update({name: number}))
    config = Checkpoints(every=1, url=f"hanging://{secrets.token_hex(4)}", patience_s=0.3)
    checkpointer = Checkpointer(state := state_of(), config, context)
    began = time.monotonic()
    steps(state, checkpointer, 3)
    checkpointer.close(last=True)
    assert time.monotonic() - began < 10
    assert counts == {"checkpoints_failed": 3}
    assert f"{config.url}/test/node didn't take shard-00001-model-" in caplog.text
    assert "of version 1 within 0.3 s" in caplog.text
    assert "hasn't answered for" in caplog.text
    assert len(hanging.asked) == 1, "it is asked again only when it has answered"


def test_a_store_that_answers_again_gets_the_next_checkpoint(
    tmp_path: Path, hanging: type[HangingStore]
) -> None:
    config = Checkpoints(every=1, url=f"hanging://{secrets.token_hex(4)}", patience_s=0.3)
    checkpointer = Checkpointer(state := state_of(), config, place(run_dir=tmp_path))
    steps(state, checkpointer, 2)
    hanging.goes_on.set()
    steps(state, checkpointer, 1)
    checkpointer.close(last=False)
    assert CheckpointStore(f"{config.url}/test/node").newest() == 3

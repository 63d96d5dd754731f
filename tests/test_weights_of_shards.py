"""A policy that FSDP has split over ranks reaches a generator whole, without being gathered."""

# pyright: reportUnknownMemberType=false
# Functions of torch are annotated in part.

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.sharding import whole
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.engine.weights import GroupRanks, WeightReceiver, WeightSender, destroy
from tests.batches import random_batch
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama


def _publish(rank: int, directory: Path) -> None:
    group = dist.group.WORLD
    assert group is not None
    shards = int((directory / "shards").read_text())
    model = tiny_llama(vocab_size=33, scale=5.0, kv_heads=2, tied=True)  # 33 rows don't divide
    state = TrainState(
        model, loss=AIPO(rho=2.0), optimizer=AdamW(lr=1e-2), steps=4, group=group,
        options=TrainingOptions(shards=shards),
    )  # fmt: skip
    url = f"shm://test-{directory.parent.name}-{directory.name}"
    sender = WeightSender(url, state.state_dict_for_weights(), GroupRanks(group))
    held = state.state_dict_for_weights()
    assert any(isinstance(tensor, DTensor) for tensor in held.values()) == (shards > 1)
    receiver = WeightReceiver("generator-0")
    try:
        for version in (1, 2):
            state.step(random_batch([9, 14, 5, 8], prompt=3, seed=version))
            manifest = sender.publish(version, state.state_dict_for_weights())
            want = {name: whole(tensor) for name, tensor in state.state_dict_for_weights().items()}
            if rank == 0:
                got = receiver.tensors(manifest)
                receiver.receive(manifest, got)
                assert got.keys() == want.keys()
                assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
            dist.barrier()
    finally:
        receiver.close()
        sender.close()
        destroy(url)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_generator_gets_the_whole_policy_from_the_parts_that_ranks_hold(
    tmp_path: Path, ranks: int, shards: int
) -> None:
    (tmp_path / "shards").write_text(str(shards))
    run_ranks(_publish, tmp_path, ranks=ranks)

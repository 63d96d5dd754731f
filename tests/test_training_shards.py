"""A policy split over ranks trains as a whole one, and goes on from a checkpoint of any number of ranks."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from arriero.components.checkpoint_files import read_checkpoint, write_checkpoint
from arriero.components.losses import AIPO, DecoupledPPO, ImportanceWeight
from arriero.components.optimizer import SGD, AdamW
from arriero.components.training import TrainState, load_policy
from arriero.components.training_options import Average, LoRA, TrainingOptions
from arriero.engine.weights import GroupRanks, WeightReceiver, WeightSender, destroy
from arriero.schemas.messages import Batch
from tests.batches import random_batch, random_sample
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama, tiny_tokenizer
from tests.training_states import GENTLE, state_of

torch.set_num_threads(1)

CLIPPED = replace(GENTLE, max_grad_norm=0.05)


def batches() -> tuple[Batch, ...]:
    """Uneven shares, a rank whose only sample is masked throughout, and ranks without any sample."""
    masked = Batch(samples=(random_sample(9, seed=1), random_sample(9, seed=2, trained=False)))
    return random_batch([20, 3, 9, 14, 6], prompt=2), masked, random_batch([7])


def several_of(options: TrainingOptions, group: dist.ProcessGroup | None) -> TrainState:
    """Four updates on a batch, with log-probabilities of before them, and clipped gradients."""
    return TrainState(
        tiny_llama(scale=5.0, hidden=24, tied=True), tiny_tokenizer(), optimizer=CLIPPED, steps=10,
        loss=DecoupledPPO(weight=ImportanceWeight(upper=3.0)), token_budget=24, minibatches=2, epochs=2,
        options=options, group=group,
    )  # fmt: skip


def publish(state: TrainState, rank: int, directory: Path) -> None:
    """Send the weights to a plain model on rank 0, and write down what arrived there and was verified."""
    url = f"shm://{directory.name.replace('_', '-')}"
    tensors = state.state_dict_for_weights()  # on all ranks: merging adapters is a collective
    sender = WeightSender(url, tensors, GroupRanks(world()))
    manifest = sender.publish(state.version, tensors)
    if not rank:
        into = {n: torch.zeros(t.shape) for n, t in tensors.items()}
        receiver = WeightReceiver("generator-0")
        receiver.receive(manifest, into)
        receiver.close()
        save_file(into, directory / "arrived.safetensors")
    dist.barrier()
    sender.close()
    if not rank:
        destroy(url)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def train_split(rank: int, directory: Path) -> None:
    shards = int((directory / "shards").read_text())
    options = TrainingOptions(shards=shards, recompute=True)
    state = several_of(options, dist.group.WORLD)
    metrics = [state.step(batch) for batch in batches()]
    publish(state, rank, directory)
    state.save(directory / "model")
    write_checkpoint(state, directory / "checkpoint")
    again = several_of(options, dist.group.WORLD)
    read_checkpoint(again, directory / "checkpoint")
    later = [s.step(random_batch([8, 5], seed=5)) for s in (state, again)]
    assert later[0] == later[1]
    (directory / f"{rank}.json").write_text(json.dumps(metrics))


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_split_policy_trains_as_a_whole_one(tmp_path: Path, ranks: int, shards: int) -> None:
    (tmp_path / "shards").write_text(str(shards))
    run_ranks(train_split, tmp_path, ranks=ranks)
    alone = several_of(TrainingOptions(), None)
    expected = [alone.step(batch) for batch in batches()]
    for rank in range(ranks):
        for ours, theirs in zip(json.loads((tmp_path / f"{rank}.json").read_text()), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)
    weights = alone.state_dict_for_weights()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    arrived = load_file(tmp_path / "arrived.safetensors")
    assert saved.keys() == weights.keys() == arrived.keys()
    assert all(torch.equal(saved[n], arrived[n]) for n in saved)
    assert max(float((saved[n] - weights[n]).abs().max()) for n in weights) < 1e-6
    assert load_policy(tmp_path / "model")[0].config.tie_word_embeddings
    # A checkpoint of several ranks is read by one.
    one = several_of(TrainingOptions(), None)
    read_checkpoint(one, tmp_path / "checkpoint")
    assert one.version == 3
    ahead, behind = (s.step(random_batch([8, 5], seed=5)) for s in (alone, one))
    assert behind == pytest.approx(ahead, abs=2e-5)


def train_split_variants(rank: int, directory: Path) -> None:
    average = Average(decay=0.5, used_for="both")
    lora = LoRA(rank=2, targets=("q_proj", "down_proj"))
    found: list[list[dict[str, float]]] = []
    for name, options in {
        "rough": TrainingOptions(shards=2, precision="bfloat16", fp32_logits=True),
        "lora": TrainingOptions(shards=2, lora=lora, average=average),
    }.items():
        state = state_of(options=options, group=dist.group.WORLD, optimizer=SGD(lr=0.1, momentum=0.5))
        found.append([state.step(b) for b in batches()])
        state.save(directory / name)
        if options.lora.rank:
            publish(state, rank, directory)
    (directory / f"{rank}.json").write_text(json.dumps(found))


def test_split_policies_compute_in_bfloat16_and_take_adapters(tmp_path: Path) -> None:
    run_ranks(train_split_variants, tmp_path, ranks=2)
    average = Average(decay=0.5, used_for="both")
    lora = TrainingOptions(lora=LoRA(rank=2, targets=("q_proj", "down_proj")), average=average)
    rough = TrainingOptions(precision="bfloat16", fp32_logits=True)
    metrics = json.loads((tmp_path / "0.json").read_text())
    merged, arrived = (load_file(tmp_path / f) for f in ("lora/model.safetensors", "arrived.safetensors"))
    assert all(torch.equal(merged[n], arrived[n]) for n in merged)
    for k, (name, options, tolerance) in enumerate([("rough", rough, 0.02), ("lora", lora, 1e-5)]):
        alone = state_of(options=options, optimizer=SGD(lr=0.1, momentum=0.5))
        expected = [alone.step(b) for b in batches()]
        for ours, theirs in zip(metrics[k], expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance, abs=tolerance)
        weights = alone.state_dict_for_weights()
        saved = load_file(tmp_path / name / "model.safetensors")
        assert max(float((saved[n] - weights[n]).abs().max()) for n in weights) < tolerance


def test_a_checkpoint_is_written_once_and_missed_by_name(tmp_path: Path) -> None:
    state = state_of(optimizer=AdamW(lr=1e-3))
    state.step(random_batch([6, 9]))
    write_checkpoint(state, tmp_path)
    with pytest.raises(FileExistsError, match="holds a checkpoint already"):
        write_checkpoint(state, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: no \*.safetensors in it"):
        read_checkpoint(state, tmp_path / "absent")
    other = state_of(options=TrainingOptions(average=Average(decay=0.9)))
    with pytest.raises(ValueError, match=r"lacks 21 of 86 tensors: \['average.lm_head.weight'"):
        read_checkpoint(other, tmp_path)


def bits(state: TrainState) -> list[Tensor]:
    return [t.clone() for t in state.state_dict_for_weights().values()]


def test_a_checkpoint_in_files_goes_on_at_the_same_bits(tmp_path: Path) -> None:
    options = TrainingOptions(average=Average(decay=0.9, used_for="publish"))
    state = state_of(options=options, loss=AIPO())
    for seed in range(2):
        state.step(random_batch([8, 20], seed=seed))
    write_checkpoint(state, tmp_path)
    resumed = state_of(tiny_llama(seed=9), options=options, loss=AIPO())
    read_checkpoint(resumed, tmp_path)
    for one in (state, resumed):
        one.step(random_batch([8, 20], seed=7))
    assert all(torch.equal(a, b) for a, b in zip(bits(state), bits(resumed), strict=True))

"""What a step may cost changes nothing but rounding; adapters and averages arrive as plain weights."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from arriero.components.losses import AIPO, CrossEntropy
from arriero.components.mismatch import MismatchGate
from arriero.components.optimizer import SGD, AdamW, Muon
from arriero.components.recorded import RecordedRollouts
from arriero.components.sampling import Sampling
from arriero.components.stragglers import Stragglers
from arriero.components.trainer import Trainer
from arriero.components.training import TrainState, load_policy
from arriero.components.training_options import Average, LoRA, TrainingOptions
from arriero.engine.errors import UserError
from arriero.engine.weights import WeightReceiver, WeightSender, destroy
from tests.batches import random_batch
from tests.drive import Alone
from tests.inline_runs import saved
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from tests.training_states import GENTLE, gradients, state_of

torch.set_num_threads(1)


@pytest.mark.parametrize("options", [TrainingOptions(recompute=True), TrainingOptions(logits_mb=1)])
def test_forgetting_and_chunks_leave_the_step_as_it_is(options: TrainingOptions) -> None:
    batch = random_batch([12, 7, 20], prompt=3)
    state, plain = state_of(options=options), state_of()
    assert state.step(batch) == pytest.approx(plain.step(batch), abs=1e-6)
    assert (gradients(state) - gradients(plain)).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
# torch's own tracer looks at `.grad` of what isn't a leaf, under recomputation.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_step_is_the_step() -> None:
    batches = [random_batch([12, 7, 20], prompt=3), random_batch([5, 9], prompt=2)]
    state, plain = state_of(options=TrainingOptions(compile=True, recompute=True)), state_of()
    for batch in batches:
        assert state.step(batch) == pytest.approx(plain.step(batch), abs=1e-5)


def test_float32_logits_are_nearer_to_the_exact_ones() -> None:
    batch = random_batch([12, 7, 20], prompt=3)
    exact = state_of().step(batch)["entropy"]
    rough = state_of(options=TrainingOptions(precision="bfloat16")).step(batch)["entropy"]
    near = state_of(options=TrainingOptions(precision="bfloat16", fp32_logits=True)).step(batch)["entropy"]
    assert 0 < abs(near - exact) < abs(rough - exact)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_adapters_arrive_merged_under_the_names_of_the_model(
    make: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    options = TrainingOptions(lora=LoRA(rank=4))
    bare, batch = make(scale=5.0), random_batch([12, 7, 20], prompt=3)
    begun = {n: p.clone() for n, p in bare.named_parameters()}
    state = TrainState(
        make(scale=5.0), tiny_tokenizer(), loss=AIPO(), optimizer=AdamW(lr=0.02), steps=9, options=options
    )
    before = state.state_dict_for_weights()
    assert all(torch.equal(before[n], begun[n]) for n in begun)
    state.step(batch)
    state.step(batch)
    sent = state.state_dict_for_weights()
    assert sent.keys() == begun.keys()
    moved = {n for n in sent if not torch.equal(sent[n], begun[n])}
    assert moved
    assert all(any(part.isdigit() for part in n.split(".")) and sent[n].ndim == 2 for n in moved)
    state.save(tmp_path)
    url = f"shm://adapters-{os.getpid()}-{make.__name__.replace('_', '-')}"
    sender, receiver = WeightSender(url, sent), WeightReceiver("generator-0")
    into = make(seed=5)
    try:  # what is received is verified, part by part, by the fingerprints of what was sent
        receiver.receive(sender.publish(2, state.state_dict_for_weights()), dict(into.named_parameters()))
    finally:
        receiver.close()
        sender.close()
        destroy(url)
    arrived, _ = load_policy(tmp_path)
    assert all(torch.equal(p, into.get_parameter(n)) for n, p in arrived.named_parameters())
    ids = torch.tensor([batch.samples[0].tokens.tolist()])
    with torch.no_grad():
        assert (arrived(input_ids=ids).logits - state.model(input_ids=ids).logits).abs().max() < 1e-4
    assert {n for n, p in state.model.named_parameters() if p.requires_grad} == {
        n for n, _ in state.model.named_parameters() if "lora_" in n
    }


def test_targets_that_the_model_lacks_are_named() -> None:
    with pytest.raises(UserError, match=r"lora.targets=gate: Target modules .*gate.* not found"):
        state_of(options=TrainingOptions(lora=LoRA(rank=2, targets=("gate",))))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_targets_that_the_model_lacks_are_known_before_it_is_loaded(
    make: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    there = "q_proj" if make is tiny_llama else "c_attn"
    model = saved(make(), tmp_path)
    assert LoRA(rank=2).problems(model) == LoRA(rank=2, targets=(there,)).problems(model) == []
    # peft would train the one that is there and say nothing of the other.
    some = TrainingOptions(lora=LoRA(rank=2, targets=(there, "gate")))
    trainer = Trainer(model=model, loss=AIPO(), steps=1, training=some)
    (line,) = trainer.problems(Alone(RecordedRollouts(path="x")))
    assert line.startswith(f"training.lora.targets=gate: {model} has no such module, but ")
    assert f"{there}, " in line
    (line,) = LoRA(rank=2, targets=("all-linear", there)).problems(model)
    assert line.endswith("; all-linear stands alone")


def test_a_compiler_that_isnt_there_is_missed_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = TrainingOptions(compile=True)
    monkeypatch.setenv("CXX", sys.executable)
    assert options.problems(ranks=1, optimizer="adamw") == []
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = options.problems(ranks=1, optimizer="adamw")
    assert line.startswith("training.compile=true needs a C++ compiler, but g++ isn't there; install g++")


@pytest.mark.parametrize("used_for", ["save", "publish", "both"])
def test_an_average_of_the_weights_goes_where_it_is_told(
    tmp_path: Path, used_for: Literal["save", "publish", "both"]
) -> None:
    average = Average(decay=0.75, used_for=used_for)
    state = state_of(options=TrainingOptions(average=average), optimizer=AdamW(lr=0.01))
    name = "lm_head.weight"
    expected = state.model.lm_head.weight.detach().clone()
    for seed in range(3):
        state.step(random_batch([9, 5], seed=seed))
        expected = 0.75 * expected + 0.25 * state.model.lm_head.weight.detach()
    newest = state.model.lm_head.weight.detach()
    assert (newest - expected).abs().max() > 1e-4
    state.save(tmp_path)
    for purpose, found in (
        ("save", load_file(tmp_path / "model.safetensors")[name]),
        ("publish", state.state_dict_for_weights()[name]),
    ):
        right = expected if used_for in (purpose, "both") else newest
        assert (found - right).abs().max() < 1e-6


@pytest.mark.parametrize("optimizer", [SGD(lr=0.5), SGD(lr=0.1, momentum=0.9), Muon(lr=0.01)])
def test_every_optimizer_lowers_the_loss_and_is_restored_to_the_bit(optimizer: SGD | Muon) -> None:
    batch = random_batch([12, 7, 20], prompt=3)
    state = state_of(optimizer=optimizer, loss=CrossEntropy())
    first = state.step(batch)
    state.step(batch)
    kept = {name: t.clone() for name, t in state.checkpoint().items()}
    resumed = state_of(tiny_llama(seed=9), optimizer=optimizer, loss=CrossEntropy())
    resumed.restore(kept)
    last = state.step(batch)
    assert last["loss"] < first["loss"]
    assert resumed.step(batch) == last


def test_muon_moves_the_matrices_of_layers_only_along_orthogonal_ones() -> None:
    model = tiny_llama(scale=5.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state_of(model, optimizer=Muon(lr=0.01)).step(random_batch([12, 7, 20], prompt=3))
    name = "model.layers.0.self_attn.q_proj.weight"
    step = before[name] - model.get_parameter(name)
    sizes = torch.linalg.svdvals(step.detach())
    assert sizes[7] > 0.6 * sizes[0]  # nearly orthogonal, as far as the gradient has a rank
    assert sizes.max() == pytest.approx(0.01 * 0.2 * 32**0.5, rel=0.4)


@pytest.mark.parametrize(
    ("options", "ranks", "optimizer", "problem"),
    [
        (TrainingOptions(shards=3), 4, "adamw", "shards=3 doesn't divide ranks=4"),
        (
            TrainingOptions(shards=2),
            2,
            "muon",
            "optimizer.kind=muon needs whole matrices, but training.shards=2",
        ),
        (TrainingOptions(lora=LoRA(rank=8)), 1, "muon", "optimizer.kind=muon is for whole matrices"),
        (
            TrainingOptions(fp32_logits=True),
            1,
            "sgd",
            "fp32_logits=true says nothing under training.precision=float32",
        ),
        (
            TrainingOptions(average=Average(used_for="both")),
            1,
            "adamw",
            "needs training.average.decay above 0",
        ),
        (
            TrainingOptions(lora=LoRA(alpha=16)),
            1,
            "adamw",
            "training.lora.alpha=16.0 without an adapter; set training.lora.rank above 0",
        ),
    ],
)
def test_options_that_cant_be_together_are_refused(
    options: TrainingOptions, ranks: int, optimizer: str, problem: str
) -> None:
    (found,) = options.problems(ranks=ranks, optimizer=optimizer)
    assert found.startswith(problem) or problem in found


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: AdamW(betas=(0.9, 1.0)), "betas.1\n.*less than 1"),
        (lambda: Muon(betas=(-0.1, 0.9)), "betas.0\n.*greater than or equal to 0"),
        (lambda: SGD(floor=0.5), "floor=0.5 isn't read by schedule=constant; leave it out, or take linear"),
        (lambda: LoRA(rank=1, targets=()), "targets\n.*at least 1 item"),
        (lambda: LoRA(rank=1, targets=("",)), "targets.0\n.*at least 1 character"),
        (lambda: LoRA(rank=1, seed=2**63), "seed\n.*less than"),
        (lambda: MismatchGate(stop_share=1.1), "stop_share\n.*less than or equal to 1"),
        (lambda: MismatchGate(warn_share=1.1, stop_share=1.0), "warn_share\n.*less than or equal to 1"),
        (lambda: Sampling(temperature=1e-300), "temperature\n.*0.0001"),
    ],
)
def test_a_value_that_would_fail_later_is_refused_by_its_key(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        build()


def test_resubmissions_that_nobody_reads_are_refused() -> None:
    (found,) = Stragglers(resubmissions=7).problems(replicas=1, max_new_tokens=5)
    assert found == (
        "stragglers.resubmissions=7 isn't read with stragglers.on_timeout=drop; set it to resubmit, or leave "
        "this out"
    )


def test_a_trainer_has_all_of_them_by_default() -> None:
    assert Trainer(model="m", loss=AIPO(), steps=1, optimizer=GENTLE).training == TrainingOptions()

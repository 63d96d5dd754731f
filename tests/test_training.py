"""A step: the same result however the batch is cut, and nothing moves when something is wrong."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from arriero.components.losses import (
    AIPO,
    DPO,
    ClippedPolicyGradient,
    CrossEntropy,
    DecoupledPPO,
    ImportanceWeight,
    Loss,
    Reinforce,
    WithEntropy,
    WithKL,
)
from arriero.components.optimizer import AdamW
from arriero.components.packing import Layout, PackedTokens
from arriero.components.training import TrainState, load_policy, token_logprobs
from arriero.schemas.messages import Batch, Sample
from tests.batches import random_batch, random_sample
from tests.tiny_models import save_tiny_llama, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

torch.set_num_threads(1)

# An eps this large keeps Adam from turning the sign of a rounding error into a whole step.
GENTLE = AdamW(lr=1e-3, eps=1e-4, max_grad_norm=math.inf)


def state_of(
    model: PreTrainedModel | None = None,
    *,
    loss: Loss | None = None,
    optimizer: AdamW = GENTLE,
    token_budget: int = 8192,
    layout: Layout = "padded",
    group: dist.ProcessGroup | None = None,
) -> TrainState:
    return TrainState(
        tiny_llama(scale=5.0) if model is None else model,
        loss=AIPO(rho=1.2) if loss is None else loss,
        optimizer=optimizer,
        steps=10,
        token_budget=token_budget,
        layout=layout,
        group=group,
    )


def weights_after(state: TrainState, *batches: Batch) -> dict[str, Tensor]:
    for batch in batches:
        state.step(batch)
    return {name: t.clone() for name, t in state.state_dict_for_weights().items()}


def gradients(state: TrainState) -> Tensor:
    return torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])


def one_by_one(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Log-probabilities [T] of the trained tokens from a forward pass over this sample alone."""
    tokens_L = torch.tensor(sample.tokens.tolist())
    with torch.no_grad():
        logits_LV: Tensor = model(input_ids=tokens_L[None]).logits[0].float() / sample.temperature
    logprobs_L = logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
    return logprobs_L[torch.tensor(sample.mask[1:].tolist())]


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
@pytest.mark.parametrize("token_budget", [40, 8192])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_the_packed_forward_is_the_forward_of_each_sequence_alone(
    make: Callable[..., PreTrainedModel], token_budget: int, layout: Layout
) -> None:
    model = make(scale=5.0)
    batch = random_batch([12, 3, 30, 7, 2, 19], prompt=3, temperature=0.6)
    state = state_of(model, token_budget=token_budget, layout=layout)
    found: dict[int, Tensor] = {}
    for keeps_logits in (True, False):
        for micro in state.micro_batches(batch):
            with torch.no_grad():
                logprobs_T, _ = token_logprobs(model, micro, keeps_logits=keeps_logits)
            for i in {int(x) for x in micro.tokens.sequence_T}:
                found[i] = logprobs_T[micro.tokens.sequence_T == i]
        for i, sample in enumerate(batch.samples):
            assert (found[i] - one_by_one(model, sample)).abs().max() < 1e-5


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(2, 24), min_size=1, max_size=8),
    st.integers(1, 64),
    st.sampled_from(["padded", "concatenated"]),
)
def test_loss_and_gradients_ignore_micro_batches_order_and_padding(
    lengths: list[int], token_budget: int, layout: Layout
) -> None:
    whole, cut = state_of(), state_of(token_budget=token_budget, layout=layout)
    batch = random_batch(lengths, prompt=4)
    samples = [*batch.samples, random_sample(5, seed=50, trained=False)]
    shuffled = random.Random(len(lengths)).sample(samples, len(samples))
    expected = whole.step(batch)
    metrics = cut.step(Batch(samples=tuple(shuffled)))
    size = max(1.0, float(gradients(whole).abs().max()))
    assert (gradients(cut) - gradients(whole)).abs().max() < 1e-6 * size
    assert {k: metrics[k] for k in metrics if k != "reward"} == pytest.approx(
        {k: expected[k] for k in expected if k != "reward"}, abs=1e-5
    )


def test_the_mean_over_tokens_is_over_the_whole_batch() -> None:
    class FirstTokenOnly:
        """One for the sequence of one trained token, zero for the other."""

        needs_behaviour: ClassVar[bool] = False
        ratio_control: ClassVar[bool] = False

        def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
            return (tokens.sequence_T == 0).float() + 0 * logprobs_T

        def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
            return tokens.sequence_T < 0

    batch = random_batch([2, 10])
    for token_budget in (1, 100):
        assert state_of(loss=FirstTokenOnly(), token_budget=token_budget).step(batch)[
            "loss"
        ] == pytest.approx(0.1)


@pytest.mark.parametrize("loss", [AIPO(rho=1.2), ClippedPolicyGradient(), Reinforce(), CrossEntropy()])
def test_the_step_is_the_one_of_a_plain_loop(loss: Loss) -> None:
    batch = random_batch([9, 4, 17], prompt=2)
    state, plain = state_of(loss=loss, optimizer=AdamW(lr=1e-3, weight_decay=0.1)), tiny_llama(scale=5.0)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    total = torch.zeros(())
    for s in batch.samples:
        tokens_L = torch.tensor(s.tokens.tolist())
        logits_LV = plain(input_ids=tokens_L[None]).logits[0]
        logp_L = logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
        trained = torch.tensor(s.mask[1:].tolist())
        assert s.logprobs is not None
        a, mu, logp = float(s.advantages[0]), torch.from_numpy(s.logprobs[s.mask]), logp_L[trained]
        ratio = (logp - mu).exp()
        match loss:
            case AIPO():
                per_token = -a * ratio.detach().clamp(max=1.2) * logp
            case ClippedPolicyGradient():
                per_token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            case Reinforce():
                per_token = -a * logp
            case _:
                per_token = -logp
        total = total + per_token.sum()
    total = total / sum(int(s.mask.sum()) for s in batch.samples)
    torch.autograd.backward(total)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    adamw.step()
    metrics = state.step(batch)
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    expected = dict(plain.named_parameters())
    for name, tensor in state.state_dict_for_weights().items():
        assert (tensor - expected[name]).abs().max() < 1e-5


def test_at_its_temperature_the_policy_that_sampled_has_ratio_one() -> None:
    model = tiny_llama(scale=8.0)
    bare = [random_sample(n, prompt=3, seed=n, temperature=0.6) for n in (9, 14, 5)]

    def sampled(sample: Sample, temperature: float) -> Sample:
        logprobs = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        logprobs[sample.mask] = one_by_one(model, sample).numpy()
        return sample.model_copy(update={"logprobs": logprobs, "temperature": temperature})

    right = state_of(tiny_llama(scale=8.0)).step(Batch(samples=tuple(sampled(s, 0.6) for s in bare)))
    assert right["mismatch_max"] < 1e-5
    assert right["ratio"] == pytest.approx(1, abs=1e-5)
    assert right["effective_samples"] == pytest.approx(1, abs=1e-5)
    assert right["kl"] == pytest.approx(0, abs=1e-8)
    wrong = state_of(tiny_llama(scale=8.0)).step(Batch(samples=tuple(sampled(s, 1.0) for s in bare)))
    assert wrong["mismatch_max"] > 0.1


def test_two_runs_end_at_the_same_bits() -> None:
    batches = [random_batch([8, 20, 5, 13], prompt=2, seed=s) for s in (0, 10)]
    first, second = (weights_after(state_of(token_budget=32), *batches) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_restored_checkpoint_goes_on_at_the_same_bits() -> None:
    batches = [random_batch([8, 20], seed=s) for s in range(4)]
    straight = weights_after(state_of(), *batches)
    state = state_of()
    weights_after(state, *batches[:2])
    kept = {name: t.clone() for name, t in state.checkpoint().items()}
    resumed = state_of(tiny_llama(seed=9))
    resumed.restore(kept)
    assert resumed.version == 2
    ended = weights_after(resumed, *batches[2:])
    assert all(torch.equal(straight[name], ended[name]) for name in straight)
    with pytest.raises(ValueError, match=r"the checkpoint lacks 1 of .*exp_avg.lm_head.weight"):
        state.restore({name: t for name, t in kept.items() if name != "exp_avg.lm_head.weight"})


def test_an_untrained_policy_can_be_checkpointed_too() -> None:
    fresh = state_of(tiny_llama(seed=1))
    other = state_of(tiny_llama(seed=2))
    other.restore({name: t.clone() for name, t in fresh.checkpoint().items()})
    assert torch.equal(gradient_free(other), gradient_free(fresh))


def gradient_free(state: TrainState) -> Tensor:
    return torch.cat([t.flatten() for t in state.state_dict_for_weights().values()])


class Recording:
    """Policy gradient; keeps what it was given."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"proximal", "entropy"})

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, PackedTokens]] = []

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        self.given.append((logprobs_T.detach().clone(), tokens))
        return -tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return tokens.sequence_T < 0


def test_proximal_logprobs_are_those_before_the_first_update_on_a_batch() -> None:
    batch = random_batch([9, 4, 7, 12], prompt=2)
    loss = Recording()
    state = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=GENTLE, steps=10, minibatches=2, epochs=2)
    metrics = state.step(batch)
    assert state.version == 1
    assert len(loss.given) == 4
    before = tiny_llama(scale=5.0)
    for part, (logprobs_T, tokens) in enumerate(loss.given):
        samples = batch.samples[2 * (part % 2) : 2 * (part % 2) + 2]
        by_length = sorted(samples, key=lambda s: -len(s.tokens))
        expected_T = torch.cat([one_by_one(before, s) for s in by_length])
        assert tokens.proximal_T is not None
        assert (tokens.proximal_T - expected_T).abs().max() < 1e-5
        moved = float((logprobs_T - tokens.proximal_T).abs().max())
        assert moved < 1e-5 if part == 0 else moved > 1e-4
        assert tokens.entropy_T is not None
        assert tokens.entropy_T.requires_grad
    assert metrics["tokens"] == 2 * sum(int(s.mask.sum()) for s in batch.samples)


def test_decoupled_ppo_clips_only_after_the_first_update() -> None:
    batch = random_batch([9, 14, 7, 12], prompt=2)
    hot = AdamW(lr=0.02)
    loss = DecoupledPPO(weight=ImportanceWeight(upper=1e6))
    once = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=hot, steps=9).step(batch)
    often = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=hot, steps=9, epochs=4).step(batch)
    assert once["clipped"] == 0
    assert often["clipped"] > 0


def test_an_entropy_bonus_keeps_the_policy_wider() -> None:
    batch = random_batch([9, 14, 7, 12], prompt=2)
    entropies: list[float] = []
    for loss in (AIPO(), WithEntropy(loss=AIPO(), beta=1.0)):
        state = state_of(loss=loss, optimizer=AdamW(lr=1e-2))
        for _ in range(6):
            state.step(batch)
        entropies.append(state.step(batch)["entropy"])
    assert entropies[1] > entropies[0] + 0.05


def test_a_penalty_needs_reference_logprobs_and_holds_the_policy_near_them() -> None:
    bare = random_batch([9, 14, 7, 12], prompt=2)
    with pytest.raises(ValueError, match=r"WithKL needs reference log-probabilities; the samples of \['g0'"):
        state_of(loss=WithKL(loss=AIPO(), beta=1.0)).step(bare)
    model = tiny_llama(scale=5.0)

    def read(sample: Sample) -> Sample:
        reference = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        reference[sample.mask] = one_by_one(model, sample).numpy()
        return sample.model_copy(update={"reference": reference})

    batch = Batch(samples=tuple(read(s) for s in bare.samples))
    moved: list[float] = []
    for beta in (1e-6, 3.0):
        state = state_of(loss=WithKL(loss=AIPO(), beta=beta), optimizer=AdamW(lr=3e-3))
        for _ in range(8):
            state.step(batch)
        logprobs = torch.cat([one_by_one(state.model, s) for s in batch.samples])
        fixed = np.concatenate([s.reference[s.mask] for s in batch.samples if s.reference is not None])
        moved.append(float((logprobs - torch.from_numpy(fixed)).square().mean()))
    assert moved[1] < 0.5 * moved[0]


def test_pairs_are_never_parted() -> None:
    batch = random_batch([9, 14, 7, 12, 20, 3], prompt=2)
    samples = tuple(
        s.model_copy(
            update={
                "reference": s.logprobs,
                "advantages": np.full(len(s.tokens), 1 - 2 * (i % 2), np.float32),
            }
        )
        for i, s in enumerate(batch.samples)
    )
    pairs = Batch(samples=samples)
    whole, cut = state_of(loss=DPO()), state_of(loss=DPO(), token_budget=1)
    assert cut.step(pairs)["loss"] == pytest.approx(whole.step(pairs)["loss"], abs=1e-6)
    assert (gradients(cut) - gradients(whole)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="5 samples don't divide into terms of 2"):
        cut.step(Batch(samples=samples[:5]))


class Infinite:
    """A loss with a fault."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T * math.inf

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T > 0


def test_a_loss_that_isnt_finite_names_the_step_and_moves_nothing() -> None:
    state = state_of(loss=Infinite())
    before = gradient_free(state)
    with pytest.raises(FloatingPointError, match="step 0: loss -inf"):
        state.step(random_batch([5]))
    assert torch.equal(gradient_free(state), before)
    assert state.version == 0


class Averaged(Infinite):
    """A loss that aggregates by itself."""

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return -logprobs_T.mean()


def test_a_loss_that_isnt_per_token_is_refused() -> None:
    with pytest.raises(TypeError, match="a loss is per token"):
        state_of(loss=Averaged()).step(random_batch([5]))


def test_a_batch_that_cant_be_trained_on_is_refused() -> None:
    state = state_of()
    with pytest.raises(ValueError, match="trained tokens = 0"):
        state.step(Batch(samples=(random_sample(5, trained=False),)))
    with pytest.raises(ValueError, match=r"AIPO needs log-probabilities; the samples of \['g4'\] have none"):
        state.step(Batch(samples=(random_sample(5), random_sample(5, seed=4, supervised=True))))
    with pytest.raises(ValueError, match="the context is 512"):
        state.step(random_batch([513]))


def test_half_precision_parameters_are_refused() -> None:
    model = tiny_llama()
    torch.nn.Module.to(model, torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        state_of(model)


def test_computing_in_bfloat16_leaves_losses_and_weights_in_float32() -> None:
    batch = random_batch([9, 14, 5], prompt=3)
    model = tiny_llama(scale=5.0)
    rough = TrainState(model, loss=AIPO(rho=1.2), optimizer=GENTLE, steps=10, precision="bfloat16")
    exact, close = state_of().step(batch), rough.step(batch)
    assert close["loss"] != exact["loss"]
    assert close["loss"] == pytest.approx(exact["loss"], rel=0.05)
    assert {t.dtype for t in rough.state_dict_for_weights().values()} == {torch.float32}


def test_supervised_training_lowers_the_loss_and_reports_no_ratio() -> None:
    batch = Batch(samples=tuple(random_sample(12, seed=s, supervised=True) for s in range(4)))
    state = state_of(loss=CrossEntropy(), optimizer=AdamW(lr=1e-2))
    metrics = [state.step(batch) for _ in range(8)]
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[0].keys() == {"loss", "tokens", "entropy", "grad_norm", "lr"}
    assert metrics[0]["tokens"] == 44
    assert state.version == 8


def test_the_learning_rate_rises_and_falls() -> None:
    rising = AdamW(lr=1.0, warmup_steps=4, schedule="cosine", floor=0.1)
    rates = [rising.learning_rate(step, steps=12) for step in (0, 3, 4, 8, 12, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert AdamW(lr=0.5).learning_rate(7, steps=3) == 0.5


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_policy_loads_as_the_weights_that_are_sent(tmp_path: Path, tied: bool) -> None:
    state = TrainState(tiny_llama(tied=tied), tiny_tokenizer(), loss=AIPO(), optimizer=GENTLE, steps=1)
    sent = weights_after(state, random_batch([6, 9]))
    state.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == sent.keys()
    assert all(torch.equal(stored[name], sent[name]) for name in sent)
    model, tokenizer = load_policy(tmp_path)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.encode("12") == tiny_tokenizer().encode("12")
    assert torch.equal(gradient_free(state_of(model)), gradient_free(state))


@pytest.mark.parametrize(
    ("removed", "lacking"),
    [("config.json", "config.json"), ("*.safetensors", "safetensors"), ("tok*", "tokenizer")],
)
def test_a_directory_that_is_no_model_is_named_with_what_it_lacks(
    tmp_path: Path, removed: str, lacking: str
) -> None:
    save_tiny_llama(tmp_path)
    for file in tmp_path.glob(removed):
        file.unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} is not a model directory: .*{lacking}.* missing"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        load_policy(tmp_path / "absent")


def ranked_batches() -> tuple[Batch, ...]:
    """Uneven shares, a rank whose only sample is masked throughout, and a rank without any sample."""
    masked = Batch(samples=(random_sample(9, seed=1), random_sample(9, seed=2, trained=False)))
    return random_batch([20, 3, 9, 14, 6], prompt=2), masked, random_batch([7])


def ranked_states(group: dist.ProcessGroup | None) -> tuple[TrainState, TrainState]:
    """One update per batch; and four, with log-probabilities of before them and a ratio per sequence."""
    weight = ImportanceWeight(upper=3.0, level="sequence_geometric")
    several = TrainState(
        tiny_llama(scale=5.0),
        loss=DecoupledPPO(weight=weight),
        optimizer=GENTLE,
        steps=10,
        token_budget=24,
        minibatches=2,
        epochs=2,
        group=group,
    )
    return state_of(token_budget=24, group=group), several


def train_on_a_rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    state, several = ranked_states(dist.group.WORLD)
    metrics = [s.step(batch) for s in (state, several) for batch in ranked_batches()]
    save_file(weights_after(state), directory / f"{rank}.safetensors")
    save_file(weights_after(several), directory / f"several-{rank}.safetensors")
    refused = ""
    try:
        state.step(random_batch([5], seed=rank))
    except RuntimeError as error:
        refused = str(error)
    (directory / f"{rank}.json").write_text(json.dumps([metrics, refused]))
    dist.destroy_process_group()


def test_two_ranks_end_at_the_weights_of_one(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=train_on_a_rank, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    assert [process.exitcode for process in ranks] == [0, 0]
    alone = ranked_states(None)
    expected = [state.step(batch) for state in alone for batch in ranked_batches()]
    for rank in (0, 1):
        metrics, refused = json.loads((tmp_path / f"{rank}.json").read_text())
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert "different batches" in refused
    for state, name in zip(alone, ("", "several-"), strict=True):
        weights = weights_after(state)
        one, two = (load_file(tmp_path / f"{name}{rank}.safetensors") for rank in (0, 1))
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert max(float((one[n] - weights[n]).abs().max()) for n in weights) < 1e-6

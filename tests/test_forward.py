"""Every layout gives what the model says of each sequence alone."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from arriero.components.forward import PolicyForward
from arriero.components.packing import Layout, pack
from arriero.engine.errors import UserError
from arriero.schemas.messages import Sample
from tests.batches import random_batch, random_sample
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2
from tests.training_states import one_by_one, state_of

torch.set_num_threads(1)


def groups(prompts: int, responses: list[int], *, prompt: int, seed: int = 0) -> list[Sample]:
    """For each prompt a group of responses of these lengths; the second and the third begin alike."""
    made: list[Sample] = []
    for k in range(prompts):
        asked = random_sample(prompt, seed=seed + k).tokens
        for i, n in enumerate(responses):
            bare = random_sample(prompt + n, prompt=prompt, seed=seed + 10 * k + i, temperature=0.7)
            tokens = np.concatenate([asked, bare.tokens[prompt:]])
            if i in (1, 2):
                tokens[prompt : prompt + 2] = 9
            made.append(bare.model_copy(update={"tokens": tokens, "group": f"g{k}"}))
    return made


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("token_budget", [40, 8192])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_the_packed_forward_is_the_forward_of_each_sequence_alone(
    make: Callable[..., PreTrainedModel], token_budget: int, layout: Layout
) -> None:
    model = make(scale=5.0)
    batch = random_batch([12, 3, 30, 7, 2, 19], prompt=3, temperature=0.6)
    state = state_of(model, token_budget=token_budget, layout=layout)
    found: dict[int, Tensor] = {}
    for micro in state.micro_batches(batch):
        with torch.no_grad():
            logprobs_T, _ = state.logprobs(micro)
        for i in {int(x) for x in micro.tokens.sequence_T}:
            found[i] = logprobs_T[micro.tokens.sequence_T == i]
    for i, sample in enumerate(batch.samples):
        assert (found[i] - one_by_one(model, sample)).abs().max() < 1e-5


def forward_and_back(make: Callable[..., PreTrainedModel], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and gradients of a sum of both, in double precision."""
    model = make(scale=5.0).double()
    samples = groups(2, [12, 3, 30, 2, 7], prompt=9)
    micro = pack(samples, range(len(samples)), np.ones(len(samples)), layout=layout)
    logprobs_T, entropy_T, _ = PolicyForward(model, layout=layout)(micro, entropy_gradient=True)
    torch.autograd.backward((logprobs_T * micro.tokens.advantages_T + 0.1 * entropy_T).sum())
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logprobs_T.detach(), entropy_T.detach(), gradient


# The norms of Llama and Qwen compute in float32 whatever the model is.
@pytest.mark.parametrize(("make", "tolerance"), [(tiny_gpt2, 1e-10), (tiny_llama, 1e-4), (tiny_qwen2, 1e-4)])
@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_every_layout_has_the_values_and_gradients_of_plain_rows(
    make: Callable[..., PreTrainedModel], tolerance: float, layout: Layout
) -> None:
    for found, expected in zip(forward_and_back(make, layout), forward_and_back(make, "padded"), strict=True):
        assert (found - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))


def test_samples_of_a_group_never_see_each_other() -> None:
    model = tiny_llama(scale=5.0)
    forward = PolicyForward(model, layout="shared_prefix")
    samples = groups(1, [6, 8, 7], prompt=5)
    one = pack(samples, (0, 1, 2), np.ones(3), layout="shared_prefix")
    changed = samples[1].tokens.copy()
    changed[7:] = (changed[7:] + 3) % 32
    other = [samples[0], samples[1].model_copy(update={"tokens": changed}), samples[2]]
    two = pack(other, (0, 1, 2), np.ones(3), layout="shared_prefix")
    with torch.no_grad():
        before_T, after_T = forward(one).logprobs_T, forward(two).logprobs_T
    mine_T = one.tokens.sequence_T == 1
    assert (before_T[~mine_T] - after_T[~mine_T]).abs().max() < 1e-6
    assert (before_T[mine_T] - after_T[mine_T]).abs().max() > 1e-2


def test_a_window_of_attention_is_kept_in_rows() -> None:
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).train(False)
    batch = random_batch([20, 11], prompt=2)
    state = state_of(model)
    (micro,) = state.micro_batches(batch)
    logprobs_T, _ = state.logprobs(micro)
    for i, sample in enumerate(batch.samples):
        found_T = logprobs_T[micro.tokens.sequence_T == i]
        assert (found_T - one_by_one(model, sample)).abs().max() < 1e-5


def test_a_model_whose_head_does_more_than_multiply_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attn_logit_softcapping=None,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"Gemma2ForCausalLM gives other log-probabilities in layout padded"):
        PolicyForward(Gemma2ForCausalLM(config).train(False), layout="padded")


def test_a_model_with_a_state_instead_of_attention_is_only_padded() -> None:
    config = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UserError, match="which layout shared_prefix can't split; set packing to padded"):
        PolicyForward(MambaForCausalLM(config).train(False))

"""Train states of tiny models, and what to compare of them."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arriero.components.losses import (
    AIPO,
    Loss,
)
from arriero.components.optimizer import SGD, AdamW, Muon
from arriero.components.packing import Layout
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.schemas.messages import Batch, Sample
from tests.tiny_models import tiny_llama

# An eps this large keeps Adam from turning the sign of a rounding error into a whole step.
GENTLE = AdamW(lr=1e-3, eps=1e-4, max_grad_norm=1e9)


def state_of(
    model: PreTrainedModel | None = None,
    *,
    loss: Loss | None = None,
    optimizer: AdamW | SGD | Muon = GENTLE,
    token_budget: int = 8192,
    layout: Layout = "shared_prefix",
    options: TrainingOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> TrainState:
    return TrainState(
        tiny_llama(scale=5.0) if model is None else model,
        loss=AIPO(rho=1.2) if loss is None else loss,
        optimizer=optimizer,
        steps=10,
        token_budget=token_budget,
        options=options or TrainingOptions(packing=layout),
        group=group,
    )


def weights_after(state: TrainState, *batches: Batch) -> dict[str, Tensor]:
    for batch in batches:
        state.step(batch)
    return {name: t.clone() for name, t in state.state_dict_for_weights().items()}


def gradients(state: TrainState) -> Tensor:
    return torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])


def gradient_free(state: TrainState) -> Tensor:
    return torch.cat([t.flatten() for t in state.state_dict_for_weights().values()])


def one_by_one(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Log-probabilities [T] of the trained tokens from a forward pass over this sample alone."""
    tokens_L = torch.tensor(sample.tokens.tolist())
    with torch.no_grad():
        logits_LV: Tensor = model(input_ids=tokens_L[None]).logits[0].float() / sample.temperature
    logprobs_L = logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
    return logprobs_L[torch.tensor(sample.mask[1:].tolist())]

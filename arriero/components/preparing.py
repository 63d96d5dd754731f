"""A model made ready for training: adapters, layers that forget or are compiled, the forward pass, shards."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from arriero.components.adapters import add_lora
from arriero.components.forward import PolicyForward
from arriero.components.head import Head
from arriero.components.sharding import layers, shard

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PreTrainedModel

    from arriero.components.training_options import TrainingOptions


def prepared(model: PreTrainedModel, options: TrainingOptions) -> PolicyForward:
    """The forward pass of `model`, which is changed in place. UserError for what the model can't do."""
    if options.lora.rank:
        add_lora(model, options.lora)
    compute = _compute(options)
    head = Head(chunk_mb=options.logits_mb, dtype=torch.float32 if options.fp32_logits else compute)
    autocast = None if options.shards > 1 else compute  # shards are gathered in what they compute in
    forward = PolicyForward(model, layout=options.packing, head=head, autocast=autocast)
    for layer in layers(model):
        # Of the instance and inside of its hooks: names stay, and what is split is gathered first.
        if options.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if options.recompute:
            untyped: Any = checkpoint  # returns whatever the layer does
            layer.forward = partial(untyped, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return forward


def split(forward: PolicyForward, options: TrainingOptions, *, ranks: int) -> dist.ProcessGroup:
    """Split the parameters over `options.shards` ranks each; ValueError if they don't divide the ranks."""
    if ranks % options.shards:
        raise ValueError(f"shards={options.shards} doesn't divide {ranks} ranks")
    return shard(
        forward, shards=options.shards, ranks=ranks, compute=_compute(options), wide_head=options.fp32_logits
    )


def _compute(options: TrainingOptions) -> torch.dtype | None:
    return torch.bfloat16 if options.precision == "bfloat16" else None

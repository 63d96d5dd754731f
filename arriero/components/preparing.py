"""A model made ready for training: adapters, layers that forget or are compiled, the forward pass, shards."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from arriero.components.adapters import add_lora
from arriero.components.forward import PackedForward, PolicyForward, ScoreForward, TeacherForward
from arriero.components.head import Head
from arriero.components.sharding import layers, shard

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PreTrainedModel

    from arriero.components.training_options import TrainingOptions


def prepared(model: PreTrainedModel, options: TrainingOptions) -> PolicyForward:
    """The forward pass of a policy, which is changed in place. UserError for what the model can't do."""
    _check_float32(model)
    if options.lora.rank:
        add_lora(model, options.lora)
    head = Head(chunk_mb=options.logits_mb, dtype=torch.float32 if options.fp32_logits else _compute(options))
    forward = PolicyForward(model, layout=options.packing, head=head, autocast=_autocast(options))
    _prepare_layers(model, options)
    return forward


def prepared_scorer(model: PreTrainedModel, options: TrainingOptions) -> ScoreForward:
    """The same of a scoring model, whose head always multiplies in float32."""
    _check_float32(model)
    forward = ScoreForward(model, layout=options.packing, autocast=_autocast(options))
    _prepare_layers(model, options)
    return forward


def prepared_teacher(model: PreTrainedModel, options: TrainingOptions, *, ranks: int) -> TeacherForward:
    """The forward pass of a model that isn't trained, split as the policy is and held in what it computes in.

    `model` is changed in place.
    """
    forward = TeacherForward(model, layout=options.packing, autocast=_autocast(options))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(_compute(options) or parameter.dtype)
    if options.shards > 1:
        split(forward, options, ranks=ranks)
    return forward


def split(forward: PackedForward, options: TrainingOptions, *, ranks: int) -> dist.ProcessGroup:
    """Split the parameters over `options.shards` ranks each; ValueError if they don't divide the ranks."""
    if ranks % options.shards:
        raise ValueError(f"shards={options.shards} doesn't divide {ranks} ranks")
    wide = options.fp32_logits or isinstance(forward, ScoreForward)
    return shard(forward, shards=options.shards, ranks=ranks, compute=_compute(options), wide_head=wide)


def _check_float32(model: PreTrainedModel) -> None:
    """TypeError for parameters that small updates would leave as they are."""
    if half := sorted({str(p.dtype) for p in model.parameters() if p.dtype.itemsize < 4}):
        raise TypeError(
            f"parameters are {half}: small updates vanish; load float32 and set precision=bfloat16"
        )


def _prepare_layers(model: PreTrainedModel, options: TrainingOptions) -> None:
    for layer in layers(model):
        # Of the instance and inside of its hooks: names stay, and what is split is gathered first.
        if options.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if options.recompute:
            untyped: Any = checkpoint  # returns whatever the layer does
            layer.forward = partial(untyped, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _autocast(options: TrainingOptions) -> torch.dtype | None:
    return None if options.shards > 1 else _compute(options)  # shards are gathered in what they compute in


def _compute(options: TrainingOptions) -> torch.dtype | None:
    return torch.bfloat16 if options.precision == "bfloat16" else None

"""Bytes on one device: what a trainer and a generator hold, and how much batch fits beside it.

Activations: arXiv:2205.05198, section 4 (34 bytes a token and hidden unit of a layer, attention scores not
kept). Optimizer: Adam, float32 moments and master weights; 16 bytes a parameter with weights and gradients.
"""

from __future__ import annotations

from arriero.engine.planner.costs import Layout, TrainWork
from arriero.engine.planner.hardware import BYTES, Hardware, Precision
from arriero.engine.planner.lengths import Lengths
from arriero.engine.planner.models import ModelShape

_ADAM = 12  # bytes a parameter: two float32 moments and float32 master weights
_LAYER = 34  # bytes a token and hidden unit inside one layer, bfloat16


def train_static(model: ModelShape, layout: Layout, precision: Precision) -> float:
    """Bytes a device: weights, gradients and optimizer states."""
    here = model.params / (layout.tp * layout.pp)
    weights = 2 * BYTES[precision] * here
    states = (_ADAM if precision != "fp32" else 8) * here
    if layout.shard == "full":
        # While a layer is computed, two layers' weights are whole.
        gathered = 2 * BYTES[precision] * model.layer_params / layout.tp
        return (weights + states) / layout.dp + gathered
    return weights + states / (layout.dp if layout.shard == "optimizer" else 1)


def activation_bytes(model: ModelShape, layout: Layout, work: TrainWork) -> float:
    """Bytes a device for the micro-batches under way; the first pipeline stage holds one per stage."""
    scale = BYTES[work.precision] / 2
    layers = model.layers if work.recompute is False else 1
    kept = 2 * model.layers if work.recompute else 0
    per_token = (kept + _LAYER * layers) * model.hidden * scale / layout.tp
    logits = 4 * model.vocab / layout.tp
    return min(work.micro_tokens, work.tokens / layout.dp) * (per_token + logits)


def train_bytes(model: ModelShape, layout: Layout, work: TrainWork) -> float:
    return train_static(model, layout, work.precision) + activation_bytes(model, layout, work)


def generate_static(model: ModelShape, tp: int, precision: Precision) -> float:
    """Bytes a device for the weights of a generator replica over `tp` devices."""
    return model.params * BYTES[precision] / tp


def resident_tokens(prompt: float, responses: Lengths) -> float:
    """Mean tokens that a sequence under way holds: those in flight are longer than those that end."""
    return prompt + responses.mean_square / (2 * responses.mean)


def cache_slots(
    model: ModelShape,
    hardware: Hardware,
    *,
    tp: int,
    precision: Precision,
    tokens: float,
    beside: float = 0.0,
) -> int:
    """Sequences of `tokens` resident tokens that fit beside the weights and `beside` bytes a device."""
    free = hardware.memory - generate_static(model, tp, precision) - beside
    each = tokens * model.cache_bytes(BYTES[precision] if precision == "fp32" else 2) / tp
    return max(0, int(free / each))

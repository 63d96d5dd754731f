"""Seconds of a training step and of a weight sync: roofline of operations and bytes, and communication.

Source of the shape of the model: Korthikanti et al., arXiv:2205.05198 (tensor parallel and recomputation),
Narayanan et al., arXiv:2104.04473 (pipeline bubble), Rajbhandari et al., arXiv:1910.02054 (sharding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from arriero.engine.planner.hardware import BYTES, Hardware, Precision
from arriero.engine.planner.models import ModelShape

Shard = Literal["none", "optimizer", "full"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One model over `tp * pp * dp` devices.

    `shard` is what the data-parallel devices divide among them: nothing (plain data parallel), the optimizer
    states, or everything (FSDP). `interleave` is how many pieces of the model each pipeline device holds.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    interleave: int = 1
    shard: Shard = "full"

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp} {self.shard}"


@dataclass(frozen=True, kw_only=True)
class TrainCost:
    """Seconds of one optimizer step by cause; what overlaps is counted once, where it is exposed."""

    compute: float
    launch: float
    tensor: float
    data: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.launch + self.tensor + self.data + self.bubble + self.optimizer


@dataclass(frozen=True, kw_only=True)
class TrainWork:
    """Tokens of one step, the mean number of earlier tokens each attends to, and how they are cut.

    `recompute` runs the forward pass twice and keeps the inputs of layers only.
    """

    tokens: float
    context: float
    micro_tokens: float = 8192.0
    precision: Precision = "bf16"
    recompute: bool = True


def all_reduce(size: float, devices: int, hardware: Hardware) -> float:
    """Seconds for a ring over `size` bytes on each device."""
    if devices <= 1:
        return 0.0
    return hardware.latency(devices) + 2 * size * (devices - 1) / devices / hardware.between(devices)


def train_step(model: ModelShape, hardware: Hardware, layout: Layout, work: TrainWork) -> TrainCost:
    """Seconds of one optimizer step on `layout`."""
    passes = 4 if work.recompute else 3  # a backward pass is two forward ones
    micro = max(1, math.ceil(work.tokens / layout.dp / work.micro_tokens))
    stage = model.layers / layout.pp
    operations = work.tokens * model.forward_flops(work.context) * passes
    compute = operations / layout.devices / hardware.rate(work.precision)
    # The weights of the stage are read once a pass and micro-batch, whatever its size.
    stage_bytes = model.params * BYTES[work.precision] / (layout.tp * layout.pp)
    compute = max(compute, micro * passes * stage_bytes / hardware.bandwidth)
    launch = micro * stage * passes * hardware.kernel_s
    width = work.tokens / layout.dp / micro * model.hidden * 2  # activations in bfloat16
    tensor = micro * stage * (6 if work.recompute else 4) * all_reduce(width, layout.tp, hardware)
    bubble = (layout.pp - 1) / (micro * layout.interleave) * (compute + launch + tensor)
    moved = _sharding_bytes(stage_bytes, layout, micro, work)
    across = hardware.between(layout.devices) if layout.dp > 1 else math.inf
    data = max(0.0, moved / across - compute)  # gathers and reductions run beside the products
    states = 16 * model.params / (layout.tp * layout.pp * (1 if layout.shard == "none" else layout.dp))
    return TrainCost(
        compute=compute, launch=launch, tensor=tensor, data=data, bubble=bubble,
        optimizer=2 * states / hardware.bandwidth,
    )  # fmt: skip


def _sharding_bytes(stage_bytes: float, layout: Layout, micro: int, work: TrainWork) -> float:
    """Bytes that each device sends for the data-parallel group in one step."""
    share = (layout.dp - 1) / layout.dp
    gathers = {"none": 1, "optimizer": 1, "full": micro * (3 if work.recompute else 2)}[layout.shard]
    return stage_bytes * share * (gathers + 1)  # and the gradients once


def forward_pass(model: ModelShape, hardware: Hardware, layout: Layout, work: TrainWork) -> float:
    """Seconds for log-probabilities of `work` without gradients: a reference model, a recomputed policy."""
    micro = max(1, math.ceil(work.tokens / layout.dp / work.micro_tokens))
    compute = work.tokens * model.forward_flops(work.context) / layout.devices / hardware.rate(work.precision)
    width = work.tokens / layout.dp / micro * model.hidden * 2
    stage = model.layers / layout.pp
    return compute + micro * stage * (hardware.kernel_s + 2 * all_reduce(width, layout.tp, hardware))


def sync_seconds(
    model: ModelShape, hardware: Hardware, *, senders: int, receivers: int, replica: int, precision: Precision
) -> float:
    """Seconds until every generator device holds its shard of new weights.

    Every one of `receivers` devices takes `1 / replica` of the weights, every one of `senders` gives an equal
    part; the slower side counts. Transfers go shard to shard, over the network when senders and receivers
    fill more than a node.
    """
    size = model.params * BYTES[precision]
    copies = max(1, receivers // replica)
    # Replicas hand weights on among themselves: a sender's part grows with the logarithm of the copies.
    sent = size / senders * min(copies, 1 + math.log2(copies))
    return max(size / replica, sent) / hardware.between(senders + receivers) + hardware.network_hop_s

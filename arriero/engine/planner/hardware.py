"""Devices: what the data sheet says, and which share of it programs reach.

Bandwidths are per device and direction, in bytes per second; rates are dense (no sparsity). Prices are
assumptions to compare plans with, in US dollars per device and hour; give your own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from arriero.engine.errors import UserError

Precision = Literal["fp32", "bf16", "fp8"]
BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 1}

_T, _G = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its surroundings.

    `node` devices share the fast `link`; beyond it the `network` is used. `matmul_share`, `memory_share` and
    `link_share` are the shares of the peaks that large kernels, streaming reads and large messages reach;
    `kernel_s` is the time per layer and pass that no size of batch takes away; `hop_s` and `network_hop_s`
    the latency of a small collective in a node and per doubling of nodes.
    """

    name: str
    flops: Mapping[Precision, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    node: int = 8
    price: float = 0.0
    matmul_share: float = 0.55
    memory_share: float = 0.75
    link_share: float = 0.75
    kernel_s: float = 25e-6
    hop_s: float = 10e-6
    network_hop_s: float = 40e-6
    usable_memory: float = 0.9
    source: str = ""

    def rate(self, precision: Precision) -> float:
        """Attained operations per second; a device without `precision` computes it in the next wider one."""
        for wider in (precision, "bf16", "fp32"):
            if wider in self.flops:
                return self.flops[wider] * self.matmul_share
        raise UserError(f"hardware {self.name}: no rate is known for {precision}")

    @property
    def bandwidth(self) -> float:
        """Attained bytes per second of the device's memory."""
        return self.memory_bandwidth * self.memory_share

    @property
    def memory(self) -> float:
        """Bytes for weights, states, activations and caches; the rest goes to framework and fragments."""
        return self.memory_bytes * self.usable_memory

    def between(self, devices: int) -> float:
        """Attained bytes per second and device in a group of `devices`."""
        peak = self.link_bandwidth if devices <= self.node else self.network_bandwidth
        return peak * self.link_share

    def latency(self, devices: int) -> float:
        """Seconds that a small collective among `devices` takes: one hop in a node, a tree across nodes."""
        if devices <= 1:
            return 0.0
        return self.hop_s + self.network_hop_s * math.log2(max(1, devices / self.node))

    def scaled(self, factor: float) -> Hardware:
        """The same device whose rates are all `factor` of these: what a calibration found."""
        return replace(
            self, matmul_share=self.matmul_share * factor, memory_share=self.memory_share * factor,
            kernel_s=self.kernel_s / factor,
        )  # fmt: skip


def _gpu(
    name: str, *, bf16: float, fp8: float | None, fp32: float, memory: float, bandwidth: float, link: float,
    network: float, price: float, source: str,
) -> Hardware:  # fmt: skip
    flops: dict[Precision, float] = {"fp32": fp32 * _T, "bf16": bf16 * _T}
    if fp8 is not None:
        flops["fp8"] = fp8 * _T
    return Hardware(
        name=name, flops=flops, memory_bytes=memory * _G, memory_bandwidth=bandwidth * _T,
        link_bandwidth=link * _G,
        network_bandwidth=network * _G, price=price, source=source,
    )  # fmt: skip


HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        _gpu(
            "a100", bf16=312, fp8=None, fp32=19.5, memory=80, bandwidth=2.039, link=300, network=25,
            price=1.8, source="NVIDIA A100 80GB SXM data sheet; network: 200 Gb/s per GPU, as in DGX A100",
        ),
        _gpu(
            "h100", bf16=989.4, fp8=1978.9, fp32=66.9, memory=80, bandwidth=3.35, link=450, network=50,
            price=3.0, source="NVIDIA H100 SXM5 data sheet (dense); network: 400 Gb/s per GPU (DGX)",
        ),
        _gpu(
            "h800", bf16=989.4, fp8=1978.9, fp32=66.9, memory=80, bandwidth=3.35, link=200, network=50,
            price=3.0, source="as H100 SXM5, NVLink 400 GB/s both ways; network: 400 Gb/s per GPU",
        ),
        _gpu(
            "h200", bf16=989.4, fp8=1978.9, fp32=66.9, memory=141, bandwidth=4.8, link=450, network=50,
            price=3.8, source="NVIDIA H200 SXM data sheet (dense); network: 400 Gb/s per GPU",
        ),
        _gpu(
            "b200", bf16=2250, fp8=4500, fp32=75, memory=180, bandwidth=8.0, link=900, network=50,
            price=6.0, source="NVIDIA DGX B200 data sheet divided by 8 (dense); network: 400 Gb/s per GPU",
        ),
        _gpu(
            "h20", bf16=148, fp8=296, fp32=44, memory=96, bandwidth=4.0, link=450, network=50,
            price=1.05, source="NVIDIA H20 data sheet; price: H800 / 2.85 as in StreamRL, arXiv:2504.15930",
        ),
        Hardware(
            name="cpu", flops={"fp32": 80 * _G}, memory_bytes=8 * _G, memory_bandwidth=14 * _G,
            link_bandwidth=7 * _G, network_bandwidth=1 * _G, node=64, price=0.05, matmul_share=0.6,
            kernel_s=60e-6, hop_s=50e-6, network_hop_s=200e-6,
            source="a core with AVX2: 2 units x 8 lanes x 2 operations x 2.5 GHz; a copy runs at 7 GB/s",
        ),
    )
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """The profile called `name`. Raises UserError that lists the known ones."""
    if (found := HARDWARE.get(name.lower())) is None:
        raise UserError(f"hardware {name} is not known; there are {', '.join(HARDWARE)}")
    return found

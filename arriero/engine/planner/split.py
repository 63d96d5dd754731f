"""The work of one optimizer step, and a plan for it: who has which devices, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

from arriero.engine.planner.costs import Layout, TrainWork
from arriero.engine.planner.decoding import Decoder
from arriero.engine.planner.flow import FlowResult
from arriero.engine.planner.hardware import Hardware, Precision
from arriero.engine.planner.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: `groups` prompts of `prompt` tokens with `samples` responses each.

    `overhead_s` is added to each decoding step, `score_s` to the way of a batch from generator to trainer.
    """

    groups: int
    samples: int
    responses: Lengths
    prompt: float = 200.0
    train: Precision = "bf16"
    generate: Precision = "bf16"
    micro_tokens: float = 16384.0
    overhead_s: float = 0.0
    score_s: float = 0.0

    @property
    def sequences(self) -> int:
        return self.groups * self.samples

    @property
    def tokens(self) -> float:
        return self.sequences * (self.prompt + self.responses.mean)

    def work(self) -> TrainWork:
        total = self.prompt + self.responses.mean
        square = self.prompt**2 + 2 * self.prompt * self.responses.mean + self.responses.mean_square
        return TrainWork(
            tokens=self.tokens,
            context=square / total / 2,
            micro_tokens=self.micro_tokens,
            precision=self.train,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trainer: its layout, tokens of a micro-batch, seconds a step and bytes a device."""

    layout: Layout
    micro_tokens: float
    seconds: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generators: `replicas` of `tp` devices with `slots` sequences each, and seconds for a step's work."""

    tp: int
    replicas: int
    slots: int
    seconds: float
    decoder: Decoder

    @property
    def devices(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True, kw_only=True)
class Split:
    """A plan: who has which devices, how long a step takes and what holds it up.

    `training` and `generation` name the same devices in a synchronous plan.
    """

    training: Training
    generation: Generation
    step_s: float
    staleness: int
    sync_s: float
    flow: FlowResult | None = None

    @property
    def bottleneck(self) -> str:
        if self.staleness == 0:
            return "generation" if self.generation.seconds > self.training.seconds else "training"
        if self._held_by_loop:
            return "the loop (raise staleness)"
        return "generation" if self.generation.seconds >= self.training.seconds else "training"

    def worth(self) -> tuple[float, float]:
        """Seconds a step that one more training device saves, and one more generating one."""
        t, g = self.training, self.generation
        if self.staleness == 0:
            n = g.devices
            each = (t.seconds + g.seconds) / (n + 1)
            return each, each
        if self._held_by_loop:  # a version waits for the slowest of its groups, which more devices don't help
            return t.seconds / (t.layout.devices + 1) / (self.staleness + 1), 0.0
        now = max(t.seconds, g.seconds)
        more_t = max(t.seconds * t.layout.devices / (t.layout.devices + 1), g.seconds)
        more_g = max(t.seconds, g.seconds * g.devices / (g.devices + 1))
        return now - more_t, now - more_g

    @property
    def _held_by_loop(self) -> bool:
        return self.step_s > 1.1 * max(self.generation.seconds, self.training.seconds)

    def cost_per_million(self, work: Workload, hardware: Hardware, devices: int) -> float:
        """US dollars for a million trained tokens."""
        return devices * hardware.price / 3600 * self.step_s / work.tokens * 1e6

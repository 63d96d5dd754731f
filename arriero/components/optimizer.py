"""Optimizers with their learning-rate schedules, as configuration: no torch, so that graphs can read them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass

_Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]  # of a running mean


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rises linearly to `lr` in `warmup_steps`, then stays (constant) or falls to `lr * floor`.

    It falls along a straight line (linear) or half a cosine. Gradients are scaled down to the global norm
    `max_grad_norm` if they exceed it; 1e9 never is. `weight_decay` is per unit of learning rate.
    """

    lr: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    floor: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _reads_its_floor(self) -> Self:
        if self.floor and self.schedule == "constant":
            raise ValueError(
                f"floor={self.floor} isn't read by schedule=constant; leave it out, or take linear or cosine"
            )
        return self

    def problems(self, *, steps: int) -> Iterable[str]:
        """What can't be with so many steps."""
        if self.warmup_steps > steps:
            yield (
                f"optimizer.warmup_steps={self.warmup_steps} are more than the {steps} steps of the run, so "
                f"lr={self.lr} is never reached; lower it"
            )

    def learning_rate(self, step: int, *, steps: int) -> float:
        """The rate of optimizer step `step` (0 is the first) of `steps`; later ones keep the last rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        span = max(1, steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        left = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True, kw_only=True)
class AdamW(Schedule):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8


@dataclass(frozen=True, kw_only=True)
class SGD(Schedule):
    """Stochastic gradient descent; `momentum` 0 keeps no state."""

    kind: Literal["sgd"] = "sgd"
    momentum: _Decay = 0.0


@dataclass(frozen=True, kw_only=True)
class Muon(Schedule):
    """Orthogonal updates of the matrices in the layers, scaled to AdamW's size; AdamW for everything else.

    Source: K. Jordan, "Muon" (2024); the scale: arXiv:2502.16982.
    """

    kind: Literal["muon"] = "muon"
    momentum: _Decay = 0.95
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8


Optimizer: TypeAlias = Annotated[AdamW | SGD | Muon, Field(discriminator="kind")]

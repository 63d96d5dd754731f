"""AdamW with its learning-rate schedule, as configuration: no torch, so that graph building can read it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Rises linearly to `lr` in `warmup_steps`, then stays (constant) or falls to `lr * floor` (cosine).

    Gradients are scaled down to the global norm `max_grad_norm` if they exceed it; infinity never does.
    """

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "cosine"] = "constant"
    floor: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: PositiveFloat = 1.0

    def learning_rate(self, step: int, *, steps: int) -> float:
        """The rate of optimizer step `step` (0 is the first) of `steps`; later ones keep the last rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        span = max(1, steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))

"""A gate on how a generator's log-probabilities differ from the trainer's, for the same weights.

Only tokens sampled from exactly the weights that the step starts from are compared, so that what staleness
changes isn't taken for a fault. What remains is arithmetic (kernels, lower precision), and it is small; a
wrong temperature, weights that didn't arrive or another tokenizer are not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MismatchGate:
    """Bounds on |log-prob of the trainer - of the generator|, nats per token, of each step's fresh tokens.

    A step is warned of if their mean is above `warn_mean`, or if more than the share `warn_share` of them
    differs by more than `token_bound`; above `stop_mean` or `stop_share` the run ends, before the step's
    weights are published. A mean of 1e9 and a share of 1 never are. Fewer than `min_tokens` fresh tokens are
    not judged.
    """

    warn_mean: PositiveFloat = 0.05
    stop_mean: PositiveFloat = 0.3
    token_bound: NonNegativeFloat = 0.5
    warn_share: float = Field(default=0.02, gt=0, le=1)
    stop_share: float = Field(default=0.2, gt=0, le=1)
    min_tokens: PositiveInt = 64

    @model_validator(mode="after")
    def _warns_first(self) -> Self:
        for name, warn, stop in (
            ("mean", self.warn_mean, self.stop_mean), ("share", self.warn_share, self.stop_share)
        ):  # fmt: skip
            if warn > stop:
                raise ValueError(f"warn_{name}={warn} is above stop_{name}={stop}; a gate warns first")
        return self

    def check(self, version: int, metrics: Mapping[str, float]) -> bool:
        """Whether the step from `version` is one to warn of, which is logged. UserError stops the run."""
        if metrics.get("fresh_tokens", 0) < self.min_tokens:
            return False
        mean, share = metrics["fresh_mismatch"], metrics["fresh_mismatch_share"]
        found = (
            f"step {version}: for the same weights, log-probabilities of generator and trainer differ by "
            f"{mean:.3g} nats on average, {metrics['fresh_mismatch_max']:.3g} at most, and {share:.1%} of "
            f"{metrics['fresh_tokens']:.0f} tokens by more than {self.token_bound:g}"
        )
        if mean > self.stop_mean or share > self.stop_share:
            raise UserError(
                f"{found}; mismatch.stop_mean is {self.stop_mean:g}, stop_share {self.stop_share:g}: look "
                "for another temperature, template or tokenizer in the generator, or a precision too low"
            )
        if warns := mean > self.warn_mean or share > self.warn_share:
            bounds = (self.warn_mean, self.warn_share)
            log.warning("%s; mismatch.warn_mean is %g, mismatch.warn_share %g", found, *bounds)
        return warns

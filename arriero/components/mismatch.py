"""A gate on how a generator's log-probabilities differ from the trainer's, for the same weights.

Only tokens sampled from exactly the weights that the step starts from are compared, so that what staleness
changes isn't taken for a fault. What remains is arithmetic (kernels, lower precision), and it is small; a
wrong temperature, weights that didn't arrive or another tokenizer are not.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.health import Gate


@dataclass(frozen=True, kw_only=True)
class MismatchGate:
    """Bounds on |log-prob of the trainer - of the generator|, nats per token, of each step's fresh tokens.

    A step is warned of if their mean is above `warn_mean`, or if more than the share `warn_share` of them
    differs by more than `token_bound`; above `stop_mean` or `stop_share` the run ends, before the step's
    weights are published. A mean of 1e9 and a share of 1 never are. Fewer than `min_tokens` fresh tokens are
    not judged.
    """

    warn_mean: PositiveFloat = 0.1
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

    def gates(self) -> tuple[Gate, Gate]:
        """One for the mean, one for the share."""
        says = (
            "for the same weights, log-probabilities of generator and trainer differ by {fresh_mismatch:.3g} "
            "nats on average, {fresh_mismatch_max:.3g} at most, and {fresh_mismatch_share:.1%} of "
            f"{{fresh_tokens:.0f}} tokens by more than {self.token_bound:g}"
        )
        return (
            self._gate("mismatch", "fresh_mismatch", self.warn_mean, self.stop_mean, "mean", says),
            self._gate(
                "mismatch_share", "fresh_mismatch_share", self.warn_share, self.stop_share, "share", says
            ),
        )

    def _gate(self, name: str, measure: str, warn: float, stop: float, bound: str, says: str) -> Gate:
        return Gate(
            name=name, measure=measure, warn=warn, stop=stop, says=says,
            keys=(f"mismatch.warn_{bound}", f"mismatch.stop_{bound}"),
            enough=("fresh_tokens", self.min_tokens),
            remedy=(
                "look for another temperature, template or tokenizer in the generator, or a precision too low"
            ),
        )  # fmt: skip

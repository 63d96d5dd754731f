"""`Curriculum`: prompts by what the policy has made of them so far."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, NonNegativeInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.engine.runtime.context import measured

Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Curriculum:
    """From the second epoch on, only rows that `low` to `high` of their last rollouts got right.

    A row that hasn't come back yet is asked again. What is known when a prompt is drawn are the versions that
    were made for sure by then, so that the choice doesn't depend on who was faster.
    """

    low: Share = 0.05
    high: Share = 0.95
    revisit: NonNegativeInt = 0  # every so many epochs all rows are asked again; 0: never

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; nothing lies between")
        return self

    def wants(self, record: str, epoch: int) -> bool:
        """Whether to ask a row again in `epoch` that was last asked as `record`; "" for never."""
        rate = measured(record) if record else None
        return (
            rate is None or self.low <= rate <= self.high or bool(self.revisit and epoch % self.revisit == 0)
        )

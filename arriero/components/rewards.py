"""All rewards, told apart by `kind`; what each one does stands in `verifiers`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from arriero.components.verifiers.function import Function, Judged, Known, RewardFunction
from arriero.components.verifiers.gsm8k import Gsm8k
from arriero.components.verifiers.gym import ReasoningGym
from arriero.components.verifiers.mathematics import Math
from arriero.components.verifiers.plain import Contains, ExactMatch, MultipleChoice
from arriero.components.verifiers.reward import Limits, RolloutReward
from arriero.components.verifiers.version import reward_version

__all__ = [
    "Contains", "ExactMatch", "Function", "Gsm8k", "Judged", "Known", "Limits", "Math", "MultipleChoice",
    "ReasoningGym", "Reward", "RewardFunction", "RolloutReward", "reward_version",
]  # fmt: skip

Reward: TypeAlias = Annotated[
    ExactMatch | Contains | MultipleChoice | Gsm8k | Math | ReasoningGym | Function,
    Field(discriminator="kind"),
]

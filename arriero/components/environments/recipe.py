"""The configuration that pipelines with an environment share."""

from __future__ import annotations

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.environments import AnyEnvironment
from arriero.components.environments.episodes import Episodes
from arriero.components.recipe import SampledConfig


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EnvironmentConfig(SampledConfig):
    """Instead of a reward an environment; `turns`, `tokens` and `seconds` bound an episode of it."""

    environment: AnyEnvironment
    turns: PositiveInt = 8
    tokens: PositiveInt | None = None
    seconds: PositiveFloat = 120.0
    observation: str = "\n{text}\n"

    def episodes(self) -> Episodes:
        return Episodes(
            generator=self.generator(), environment=self.environment, turns=self.turns, tokens=self.tokens,
            seconds=self.seconds, observation=self.observation,
        )  # fmt: skip

"""Environments: tasks in turns. `Episodes` runs them; `Environment` is what one of your own subclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass

from arriero.components.environments.environment import Environment, Episode, Tool, Turn, Unscorable
from arriero.components.environments.question import Question
from arriero.components.environments.tools import AnyTool, Calculator, Python, Toolbox
from arriero.components.formats import json_lists
from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.errors import UserError
from arriero.engine.portable import resolve
from arriero.schemas.messages import Prompt

__all__ = [
    "AnyEnvironment", "AnyTool", "Calculator", "Environment", "Episode", "Python", "Question", "Tool",
    "Toolbox", "Turn", "Unscorable", "UserEnvironment",
]  # fmt: skip


def _imported(value: object) -> object:
    return resolve(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class UserEnvironment(Environment):
    """An environment of your own by name: `make` is `package.module:Class`, called with `options`."""

    kind: Literal["user"] = "user"
    make: Annotated[Callable[..., Environment], BeforeValidator(_imported)]
    options: Annotated[Mapping[str, JsonValue], BeforeValidator(json_lists)] = field(
        default_factory=dict[str, JsonValue]
    )

    def made(self) -> Environment:
        """UserError unless `make` gives an environment."""
        try:
            found = cast("object", self.make(**self.options))
        except (TypeError, ValueError) as error:
            raise UserError(f"environment {self.make.__name__}: {error}") from error
        if not isinstance(found, Environment):
            raise UserError(f"{self.make.__name__} gave a {type(found).__name__}, which is no Environment")
        return found

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        return self.made().reset(prompt, seed=seed)

    def tools(self) -> Sequence[Tool]:
        return self.made().tools()

    def screens(self) -> Sequence[RolloutReward]:
        return self.made().screens()

    def opened(self) -> AbstractContextManager[Environment]:
        return self.made().opened()

    def problems(self) -> Sequence[str]:
        try:
            return list(self.made().problems())
        except UserError as error:
            return [str(error)]


AnyEnvironment: TypeAlias = Annotated[Question | UserEnvironment, Field(discriminator="kind")]

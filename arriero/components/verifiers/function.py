"""`Function`: a user's own function of prompt and rollout."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

import numpy as np
from pydantic import BeforeValidator, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.known import Known, canaries_of
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, RolloutReward, Scorer, verdict
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView
from arriero.engine.portable import import_path, resolve
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

Judged: TypeAlias = float | bool | Score
RewardFunction: TypeAlias = Callable[[Prompt, Rollout], Judged | Awaitable[Judged]]


def _imported(value: object) -> object:
    return resolve(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Function(Isolated):
    """A function of prompt and rollout, sync or async (then for `at_once` rollouts in one process).

    A config names it as `package.module:name`. True is `ok` and 1, False `wrong` and 0; a number is the
    value, and `ok` if above 0; a `Score` is taken as it is. Anything else, a number that isn't finite, and a
    function that raises, is an `error`; one that doesn't end is a `timeout`, and its process is killed.
    """

    kind: Literal["function"] = "function"
    function: Annotated[RewardFunction, BeforeValidator(_imported)]
    known: tuple[Known, ...] = ()  # tried before the first rollout
    at_once: PositiveInt = 32
    isolate: bool = True  # False: in the component's process, for a breakpoint; nothing can stop it there

    text_only: ClassVar[bool] = False

    @property
    def label(self) -> str:
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        return f"{module}:{name}" if name else repr(self.function)

    @property
    def width(self) -> int:
        return self.at_once if inspect.iscoroutinefunction(self.function) else 1

    def want(self) -> int:
        return self.width  # one that waits for others waits for many groups together

    def opened(self) -> AbstractAsyncContextManager[Scorer]:
        if not self.isolate:
            return RolloutReward.opened(self)
        if import_path(self.function).startswith("__main__:"):
            raise UserError(f"reward {self.label}: move the function to a module, or set isolate to false")
        return super().opened()

    async def _awaited(self, found: Awaitable[Judged]) -> Score:
        return judged(await found)

    def score(self, prompt: Prompt, rollout: Rollout) -> Score | Awaitable[Score]:
        found = self.function(prompt, rollout)
        return self._awaited(found) if isinstance(found, Awaitable) else judged(found)

    def canaries(self) -> Sequence[Canary]:
        return canaries_of(self.known)

    def remarks(self) -> Iterable[str]:
        """That nothing shows what the function does."""
        if not self.known:
            yield (
                f"reward {self.label} isn't tried before the run: it has no known answers; give one: "
                """--reward.known '[{"prompt": "1+1?", "answer": "2", "right": "2", "wrong": "3"}]'"""
            )

    def problems(self, view: GraphView) -> Iterable[str]:
        """A function that a worker can't import."""
        if self.isolate and import_path(self.function).startswith("__main__:"):
            yield f"{self.label} can't be imported by a worker; move it to a module, or set isolate to false"


def judged(found: object) -> Score:
    """What a function gave, as a score. Raises UserError for what can't be one."""
    if isinstance(found, Score):
        return found
    if isinstance(found, np.generic):
        return judged(cast("object", found.item()))
    if isinstance(found, bool):
        return verdict(found)
    if not isinstance(found, numbers.Real):
        raise UserError(
            f"it gave {found!r}, a {type(found).__name__}; a finite number, bool or Score is needed"
        )
    value = float(found)
    if not math.isfinite(value):
        raise UserError(f"it gave {value}; a finite number, bool or Score is needed")
    return Score(value=value, outcome=Outcome.OK if value > 0 else Outcome.WRONG)

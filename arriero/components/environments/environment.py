"""What an environment is: a task in turns, with a state of its own, that may be slow, block, or crash.

    reset(prompt, seed) -> Episode: opening -> policy -> step(text) -> Turn -> policy -> step(text) ...

An environment is configuration: a frozen dataclass. What changes is in the episodes it begins. All methods
are called in threads beside the event loop, an episode's one after the other, so that they may block;
whatever one of them raises is an outcome of its episode and of nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt, Said, Score


class Unscorable(UserError):
    """Raised by `reset`: no response to this prompt could be judged. The prompt is dropped and told of."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The answer to a turn of the policy. `text` is what it reads next; nothing if the episode is `done`.

    `reward` is that of the turn it answers. `right`: whether the task is solved, said with the last turn;
    None: it is if the rewards of all turns add up to more than 0.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    right: bool | None = None


def verdict(rewards: Sequence[float], right: bool | None) -> Score:
    """What an episode is worth: the sum of the rewards of its turns; `right` as its last turn said it."""
    total = float(sum(rewards))
    ok = total > 0 if right is None else right
    return Score(value=total, outcome=Outcome.OK if ok else Outcome.WRONG, turns=tuple(rewards))


class Episode(ABC):
    """One run through a task: the state between turns is the attributes of a subclass.

    `opening` is what the policy reads first; `messages` are shown instead where there are some.
    """

    opening: str
    messages: Sequence[Said] = ()

    @abstractmethod
    def step(self, text: str) -> Turn:
        """The answer to what the policy said; not called again after `done`."""

    def close(self) -> None:  # noqa: B027  # most episodes hold nothing
        """Give back what the episode holds; called once, unless a `step` of it never ends."""


@runtime_checkable
class Tool(Protocol):
    """Something the policy may call within a turn: one text in, one text out.

    `describe` is one line for the policy. What `call` raises is told to the policy as the result.
    """

    @property
    def name(self) -> str: ...

    @property
    def describe(self) -> str: ...

    def call(self, text: str) -> str: ...


class Environment(ABC):
    """Begins episodes; a subclass is a frozen dataclass."""

    @abstractmethod
    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        """A new episode; equal arguments give equal ones. `seed` in [0, 2**63) differs for each sample."""

    def tools(self) -> Sequence[Tool]:
        """What the policy may call; a call is answered without `step`."""
        return ()

    def screens(self) -> Sequence[RolloutReward]:
        """The rewards that can tell rows of no use apart, before anything is sampled."""
        return ()

    def opened(self) -> AbstractContextManager[Environment]:
        """What begins the episodes of a run, ready for work inside the context. Raises UserError where the
        environment can't work.
        """
        self.prepare()
        return nullcontext(self)

    def prepare(self) -> None:  # noqa: B027  # most environments need nothing
        """Called once, before the first episode. Raises UserError where the environment can't work."""

    def problems(self) -> Iterable[str]:
        """What of the configuration can't work, before anything starts."""
        return ()

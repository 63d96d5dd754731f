"""A conversation as token ids that only grow: what was sampled, and what was observed between.

Nothing is ever tokenised again: a turn's ids are those that the engine gave, and an observation is appended
behind them. Only sampled tokens have log-probabilities and versions; the others are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from arriero.schemas.messages import Rollout

if TYPE_CHECKING:
    from arriero.components.rollout_engine import Completion

Finish = Literal["stop", "length"]


class Conversation:
    """The tokens of one episode, from its opening on."""

    def __init__(self, opening: Sequence[int]) -> None:
        self.token_ids: list[int] = list(opening)
        self._sampled: list[tuple[int, Completion]] = []  # with where it begins
        self.num_opening = len(opening)

    @property
    def turns(self) -> int:
        """How many turns the policy has had."""
        return len(self._sampled)

    @property
    def last(self) -> list[int]:
        """The ids of the policy's last turn."""
        ids: list[int] = self._sampled[-1][1].token_ids.tolist()
        return ids

    def said(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        self._sampled.append((len(self.token_ids), completion))
        self.token_ids += completion.token_ids.tolist()

    def observed(self, ids: Sequence[int]) -> None:
        """Append what the policy reads next. ValueError for nothing: two turns would become one."""
        if not ids:
            raise ValueError("an observation without a token; let the turn's text hold something")
        self.token_ids += ids

    def rollout(self, *, text: str, finish: Finish, temperature: float, seed: int) -> Rollout:
        """All of it in arrays of one length."""
        length = len(self.token_ids)
        mask, versions = np.zeros(length, np.bool_), np.full(length, -1, np.int32)
        logprobs = np.full(length, np.nan, np.float32)
        for begin, turn in self._sampled:
            place = slice(begin, begin + len(turn.token_ids))
            mask[place], logprobs[place], versions[place] = True, turn.logprobs, turn.versions
        return Rollout(
            tokens=np.array(self.token_ids, np.int32), mask=mask, logprobs=logprobs, versions=versions,
            text=text, finish=finish, temperature=temperature, seed=seed,
        )  # fmt: skip

"""A prompt whose responses aren't finished, on its way from one replica of a node to another.

    Prompt -> Continuation 1 -> Continuation 2 -> ... -> RolloutGroup

Each has taken the place of the one before it. What was sampled so far travels along, so that any replica can
go on.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

from arriero.schemas.arrays import Float32Array, Int32Array
from arriero.schemas.messages import Message, Prompt, Record, oldest


class Response(Message):
    """What was sampled of one response so far, arrays [R]; `finish` is None while it isn't finished.

    tokens int32; logprobs float32, nats; versions int32: the weights that sampled the token. "error": no
    finite log-probability came after these tokens.
    """

    tokens: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish: Literal["stop", "length", "error"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.tokens.size == self.logprobs.size == self.versions.size:
            raise ValueError(
                f"unequal lengths: tokens {self.tokens.size}, logprobs {self.logprobs.size}, "
                f"versions {self.versions.size}"
            )
        if not np.isfinite(self.logprobs).all() or (self.versions < 0).any():
            raise ValueError("every token needs a finite log-probability and a version of 0 or more")
        return self


class Continuation(Record):
    """A prompt to go on with. `responses` by sample number; empty: none has begun.

    `hop` numbers the continuations of a prompt from 1; the runtime writes it. `losses`: how many holders in a
    row were lost with it. `timeouts`: how often the group ran out of time. `spent_s`: since its last
    time-out, or its start, on all replicas together.
    """

    prompt: Prompt
    responses: tuple[Response, ...] = ()
    hop: NonNegativeInt = 0
    losses: NonNegativeInt = 0
    timeouts: NonNegativeInt = 0
    spent_s: NonNegativeFloat = 0.0

    @property
    def num_tokens(self) -> int:
        """Of the longest response so far."""
        return max((r.tokens.size for r in self.responses), default=0)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version of a sampled token; None if no token was sampled."""
        return oldest(int(r.versions.min()) if r.versions.size else None for r in self.responses)

    def moved(self, node: str, *, hop: int, losses: int) -> Self:
        """The same, to be put on the edge of `node` as continuation number `hop` of its prompt."""
        return self._unchecked({
            "id": f"{self.prompt.id}>{node}~{hop}", "parents": (self.prompt.id,),
            "origins": self.prompt.origins, "hop": hop, "losses": losses,
        })  # fmt: skip


def prompt_of(record: Prompt | Continuation) -> Prompt:
    """The prompt itself, or the one that a continuation is about."""
    return record.prompt if isinstance(record, Continuation) else record

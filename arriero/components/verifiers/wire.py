"""What a pool and its workers say to each other over pipes: length, then msgpack. Nothing is ever unpickled.

pool   Setup              Job, Job, ...
worker          Ready                   Done, Done, ... (each names its job)
"""

from __future__ import annotations

import msgspec

from arriero.schemas.messages import Outcome

HEADER_BYTES = 4
MOST_BYTES = 1 << 30


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """`reward` is its JSON form (`engine.portable`); the limits are those of `reward.Limits`."""

    reward: bytes
    memory_mb: int
    time_s: float


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """`problem` is empty if the reward could be built."""

    problem: str


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A prompt and rollouts of it to score; without rollouts: whether it can be scored at all."""

    id: int
    prompt: bytes
    rollouts: tuple[bytes, ...] = ()


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """A `Score` on the wire."""

    value: float
    outcome: Outcome
    detail: str = ""
    raw: float | None = None


class Done(msgspec.Struct, frozen=True, array_like=True):
    """The scores of the first rollouts of job `id`, at least one, or why its prompt is `unscorable`.

    `spent`: the worker is of no further use.
    """

    id: int
    scores: tuple[Verdict, ...] = ()
    unscorable: str = ""
    spent: bool = False


def frame(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body

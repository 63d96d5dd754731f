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
    """A prompt and one rollout to score; without a rollout: whether the prompt can be scored at all."""

    id: int
    prompt: bytes
    rollout: bytes = b""


class Done(msgspec.Struct, frozen=True, array_like=True):
    """The score of job `id`, or why its prompt is unscorable. `spent`: the worker is of no further use."""

    id: int
    value: float = 0.0
    outcome: Outcome = Outcome.ERROR
    detail: str = ""
    raw: float | None = None
    spent: bool = False


def frame(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body

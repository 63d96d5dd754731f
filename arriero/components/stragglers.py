"""What a generator does about responses that take much longer than the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

_MANY = 1 << 16  # the graph knows how many prompts there can be
OnTimeout = Literal["drop", "resubmit"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Stragglers:
    """Partial rollouts, and the order and place of long ones. All off by default.

    `segment_tokens`: a response that has got so many new tokens from one replica is put back, and any replica
    goes on with it (Kimi k1.5, arXiv:2501.12599). `longest_first`: of the prompts at hand, those that took
    longest before are started first. `tail_replicas`: so many replicas take no prompts; they go on with what
    the others put back, and begin what is expected to be longer than a segment (StreamRL, arXiv:2504.15930).
    `on_timeout`: what becomes of a group after `group_timeout_s`, at most `resubmissions` times.
    """

    segment_tokens: PositiveInt | None = None
    longest_first: bool = False
    tail_replicas: NonNegativeInt = 0
    on_timeout: OnTimeout = "drop"
    resubmissions: PositiveInt = 2

    @property
    def active(self) -> bool:
        """Whether anything of this is on."""
        return bool(self.segment_tokens or self.longest_first or self.on_timeout == "resubmit")

    def backlog(self, at_once: int) -> int:
        """Continuations that may be under way, if a replica works on `at_once` groups.

        With tail replicas, what they work on and as much again. More would wait for them while the others do
        nothing about it; those go on with it themselves.
        """
        if not self.active:
            return 0
        return 2 * self.tail_replicas * at_once or _MANY

    def expected_in_tail(self, tokens: int) -> bool:
        """Whether a prompt is for the tail replicas, if its longest response had `tokens` (0: unknown)."""
        return bool(self.tail_replicas and self.segment_tokens and tokens > self.segment_tokens)

    def problems(self, *, replicas: int, max_new_tokens: int) -> Iterable[str]:
        """What can't work, for a generator of so many replicas."""
        if self.segment_tokens and self.segment_tokens >= max_new_tokens:
            yield (
                f"stragglers.segment_tokens={self.segment_tokens} is never reached with "
                f"sampling.max_new_tokens={max_new_tokens}; lower it or leave it out"
            )
        if self.tail_replicas and not self.segment_tokens:
            yield (
                f"stragglers.tail_replicas={self.tail_replicas} would have nothing to do: "
                "set stragglers.segment_tokens, after which a response is put back"
            )
        if self.tail_replicas >= replicas and self.tail_replicas:
            yield (
                f"stragglers.tail_replicas={self.tail_replicas} of {replicas} replicas leave none for "
                "prompts; use fewer, or more generators"
            )
        if self.on_timeout != "resubmit" and self.resubmissions != Stragglers().resubmissions:
            yield (
                f"stragglers.resubmissions={self.resubmissions} isn't read with "
                f"stragglers.on_timeout={self.on_timeout}; set it to resubmit, or leave this out"
            )

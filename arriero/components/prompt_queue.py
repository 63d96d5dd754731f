"""Prompts and continuations at hand in a generator, and which of them comes next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from arriero.engine.backlog import Backlog, either
from arriero.engine.stream import Stream
from arriero.schemas.continuations import Continuation
from arriero.schemas.messages import Prompt

if TYPE_CHECKING:
    from arriero.components.generator import Generator


class PromptQueue:
    """What a generator has taken and not begun.

    One record is taken when there may be room for it; with `longest_first` up to `ahead`, to choose from.
    Continuations come before prompts: they are older. But while there are tail replicas the others take them
    only when they have nothing else to do.
    """

    def __init__(
        self, config: Generator, prompts: Stream[Prompt], backlog: Backlog, *, in_tail: bool
    ) -> None:
        self._prompts, self._backlog, self._in_tail = prompts, backlog, in_tail
        self._policy, self._samples = config.stragglers, config.group_size
        self._ahead = config.want() if config.stragglers.longest_first else 1
        self._taken: deque[Prompt | Continuation] = deque()

    def next(self, room: int) -> Prompt | Continuation | None:
        """The record to begin now, with `room` for so many responses; None if there is none that fits."""
        while len(self._taken) < self._ahead and (record := self._poll(room)) is not None:
            self._taken.append(record)
        if not self._taken:
            return None
        first = max(self._taken, key=self._expected) if self._policy.longest_first else self._taken[0]
        if self._need(first) > room:
            return None
        self._taken.remove(first)
        return first

    def give_back(self, record: Prompt | Continuation) -> None:
        """Let `record`, which can't begin yet, come first again."""
        self._taken.appendleft(record)

    async def wait(self) -> bool:
        """Until something is at hand; False when nothing can come any more."""
        if not self._taken and self._policy.active:
            self._taken.extend(await either(self._prompts, self._backlog))
        elif not self._taken and (prompt := await self._prompts.next()) is not None:
            self._taken.append(prompt)
        return bool(self._taken)

    def to_tail(self, record: Prompt | Continuation) -> bool:
        """Whether a prompt is better begun by a tail replica."""
        if self._in_tail or isinstance(record, Continuation) or record.split == "eval":
            return False
        return self._policy.expected_in_tail(self._expected(record))

    def _poll(self, room: int) -> Prompt | Continuation | None:
        """Something that may fit, or may be chosen from later."""
        found: Prompt | Continuation | None = None
        if self._policy.active and room:
            yields = self._policy.tail_replicas and not self._in_tail
            found = self._backlog.ready() if yields else self._backlog.poll()
        if found is None and (room >= self._samples or self._policy.longest_first):
            found = self._prompts.poll()
        return found

    def _need(self, record: Prompt | Continuation) -> int:
        """Responses that aren't finished."""
        if isinstance(record, Prompt) or not record.responses:
            return self._samples
        return sum(response.finish is None for response in record.responses)

    def _expected(self, record: Prompt | Continuation) -> int:
        """Tokens that the longest response still takes, as far as anybody knows."""
        if isinstance(record, Prompt):
            return self._backlog.expected_tokens(record) if self._policy.active else 0
        expected = self._backlog.expected_tokens(record.prompt)
        return max(expected - record.num_tokens, 1)

"""How long the responses to a prompt were, known to all replicas of a node: a log beside its edges.

It is a hint for scheduling only. So nobody waits for it, and an entry that can't be written is said and
left out.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from arriero.engine.broker import Broker, BrokerError
from arriero.schemas.ledger import lengths_log
from arriero.schemas.messages import RolloutGroup

_log = logging.getLogger(__name__)


class Lengths:
    """Tokens of the longest response, by row of the data set; the newest entry counts.

    Somebody runs `follow`.
    """

    def __init__(self, broker: Broker, node: str) -> None:
        self._broker, self._name = broker, lengths_log(node)
        self._tokens: dict[int, int] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def expected(self, row: int) -> int:
        """Tokens of the longest response when the row came last; 0 if it is new."""
        return self._tokens.get(row, 0)

    async def follow(self) -> None:
        """Learn of what is noted anywhere, without end."""
        async for payload in self._broker.follow(self._name):
            row, tokens = msgspec.msgpack.decode(payload, type=tuple[int, int])
            self._tokens[row] = tokens

    def note(self, group: RolloutGroup) -> None:
        """Tell all replicas, in the background."""
        entry = (group.prompt.row, max(int(r.mask.sum()) for r in group.rollouts))
        task = asyncio.create_task(self._write(group.prompt.id, msgspec.msgpack.encode(entry)))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, prompt: str, payload: bytes) -> None:
        try:
            await self._broker.append(self._name, prompt, payload)
        except BrokerError as error:
            _log.warning("the length of %s isn't noted: %s", prompt, error)

    async def flush(self) -> None:
        """Until what was noted is written."""
        await asyncio.gather(*self._writing)

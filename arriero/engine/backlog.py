"""`Backlog`: a node's own edge, on which a replica puts what it hasn't finished, for any replica of the node.

    prompts -> generator -> rollouts
               ^       |
               +-------+  continuations

A component asks for it with a parameter `backlog: Backlog = NO_BACKLOG` of `run`, and says with `puts_back()`
for how many records, or that its configuration has no use for it. Nobody waits for room on this edge: what it
refuses, the holder goes on with. So it can't be part of a deadlock, whatever its capacity.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from arriero.engine.stream import Stream
from arriero.schemas.continuations import Continuation
from arriero.schemas.messages import Prompt

_BACKLOG = "-backlog"


class LiveBacklog(Protocol):
    """What stands behind a backlog while a component runs."""

    def expected_tokens(self, prompt: Prompt) -> int: ...
    async def refuse_prompts(self) -> None: ...
    async def put(self, record: Continuation) -> bool: ...
    async def next(self) -> Continuation | None: ...
    def poll(self) -> Continuation | None: ...
    def ready(self) -> Continuation | None: ...


class Backlog:
    """Continuations of this node's prompts. Outside `run`, or unless `puts_back()`, using it raises."""

    def __init__(self, live: LiveBacklog | None = None) -> None:
        self._live = live

    def expected_tokens(self, prompt: Prompt) -> int:
        """Of the longest response to this row of the data set when it came last; 0 if that isn't known."""
        return self._running().expected_tokens(prompt)

    async def refuse_prompts(self) -> None:
        """Leave the prompts to the other replicas: their stream has ended for this one."""
        await self._running().refuse_prompts()

    async def put(self, record: Continuation) -> bool:
        """Let any replica go on with a prompt that this one holds, from `record` on. True: it is no longer
        held here. False: there is no room, and nothing has changed.

        Raises ValueError for a prompt that isn't held.
        """
        return await self._running().put(record)

    async def next(self) -> Continuation | None:
        """The next continuation, waited for; None when no more can come.

        That is when the prompts have ended and no replica holds any.
        """
        return await self._running().next()

    def poll(self) -> Continuation | None:
        """A continuation if one has arrived, else None; and ask for one, if none has been asked for."""
        return self._running().poll()

    def ready(self) -> Continuation | None:
        """As `poll`, without asking for one."""
        return self._running().ready()

    def _running(self) -> LiveBacklog:
        if self._live is None:
            raise RuntimeError("a backlog works only inside run() of a component that puts_back()")
        return self._live


NO_BACKLOG = Backlog()


async def either(prompts: Stream[Prompt], backlog: Backlog) -> list[Continuation | Prompt]:
    """What comes first: a continuation, a prompt, or one of each; empty when neither can come any more."""
    waiting: set[asyncio.Task[Continuation | Prompt | None]]
    waiting = {asyncio.create_task(_next(stream)) for stream in (backlog, prompts)}
    arrived: list[Continuation | Prompt] = []
    try:
        while waiting and not arrived:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            arrived = [record for task in done if (record := task.result()) is not None]
    finally:
        for task in waiting:
            task.cancel()  # it takes a record only at the moment when it is done
        await asyncio.gather(*waiting, return_exceptions=True)
    return arrived


async def _next(stream: Stream[Prompt] | Backlog) -> Continuation | Prompt | None:
    return await stream.next()


def backlog_edge(node: str) -> str:
    """Name of the node's own edge, and of the one group that reads it. No node's name has a hyphen."""
    return f"{node}{_BACKLOG}"


def node_of(edge: str) -> str:
    """The node that puts onto an edge, its own or the one of its output."""
    return edge.removesuffix(_BACKLOG)

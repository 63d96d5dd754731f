"""The way out of an edge on NATS: one pull on the server for each `lease` call that waits, never more.

A pull whose call was cancelled is withdrawn by dropping the inbox it was to be answered in: the server
delivers nothing to an inbox without a subscriber. What was already on its way is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from arriero.engine.broker import BrokerError, EdgeEnded
from arriero.engine.nats_edge import NS, NatsEdge
from arriero.engine.nats_lease import NatsLease
from arriero.engine.nats_link import Link, ServerAway, Subscription
from arriero.engine.nats_names import token

_LONGEST_PULL_S = 30.0
_LATE_S = 2.0  # an answer that is later than this was lost
_PAUSE_S = (0.02, 1.0)  # between two looks at whether the group is drained, if nobody tells


class _Inbox:
    """A subscription and the `lease` calls whose pulls are answered there, oldest first."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.subject = link.new_inbox()
        self.calls: deque[asyncio.Future[Msg | None]] = deque()
        self.subscription: Subscription | None = None

    async def on_message(self, msg: Msg) -> None:
        status = msg.headers.get("Status") if msg.headers else None
        if status == "100":  # idle heartbeat
            return
        while self.calls:
            call = self.calls.popleft()
            if not call.done():
                call.set_result(msg if status is None else None)
                return
        if status is None:  # its call was cancelled
            await self.link.publish(msg.reply, b"-NAK")

    async def close(self) -> None:
        """Returns when nothing can arrive here any more and what did was given back."""
        if self.subscription is None:
            return
        with contextlib.suppress(NatsError, OSError):  # the connection broke, and the pulls with it
            await (self.subscription.drain() if self.link.up else self.subscription.unsubscribe())


class NatsConsumer:
    """One replica's way out of an edge, as a member of its group.

    `held` are the leases of the whole connection, for its pulse.
    """

    def __init__(self, edge: NatsEdge, group: str, held: dict[str, NatsLease]) -> None:
        self.edge, self.group = edge, group
        self._of_connection = held
        self._held: dict[str, NatsLease] = {}
        self._pull_subject = f"$JS.API.CONSUMER.MSG.NEXT.{edge.stream}.{token(group)}"
        self._inbox: _Inbox | None = None
        self._news = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        edge.listeners.append(self._on_news)

    def forget(self, lease: NatsLease) -> None:
        self._held.pop(lease.reply, None)
        self._of_connection.pop(lease.reply, None)

    async def lease(self, *, wait_s: float) -> NatsLease | None:
        decl = await self.edge.decl()
        if self.group not in decl.groups:
            raise BrokerError(f"edge {decl.name} has no group {self.group}; it has {', '.join(decl.groups)}")
        await self.edge.watch()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            try:
                msg = await self._pull(min(max(deadline - loop.time(), 0.0), _LONGEST_PULL_S))
            except ServerAway:
                await self.edge.link.connected(f"lease from edge {decl.name}", until=deadline)
                msg = None
            if msg is not None:
                lease = NatsLease(msg, self, decl.lease_s)
                self._held[lease.reply] = self._of_connection[lease.reply] = lease
                if lease.deliveries <= decl.max_deliveries:
                    return lease
                await lease.bury(f"its lease ran out; delivered {decl.max_deliveries} times")
                continue
            await self.edge.refresh_if_old()
            if loop.time() >= deadline:
                if self.edge.ended and await self._over():
                    raise EdgeEnded(decl.name)
                return None

    async def _pull(self, wait_s: float) -> Msg | None:
        """One message; None when none came within `wait_s`. Raises EdgeEnded, ServerAway."""
        link = self.edge.link
        loop = asyncio.get_running_loop()
        call: asyncio.Future[Msg | None] = loop.create_future()
        inbox = await self._open_inbox()
        inbox.calls.append(call)
        link.waiting.add(call)
        late = loop.call_later(wait_s + _LATE_S, _give_up, call)
        pull = {"batch": 1, "expires": int(wait_s * NS)} if wait_s >= 0.001 else {"batch": 1, "no_wait": True}
        try:
            if not await link.publish(self._pull_subject, json.dumps(pull).encode(), inbox.subject):
                raise ServerAway
            if self.edge.ended:
                self._watch_end()
            return await call
        except asyncio.CancelledError:
            if call.done() and not call.cancelled() and not call.exception() and (msg := call.result()):
                await link.publish(msg.reply, b"-NAK")
            raise
        finally:
            late.cancel()
            link.waiting.discard(call)
            if call in inbox.calls:  # its pull is still out
                inbox.calls.remove(call)
                self._retire(inbox)

    async def _open_inbox(self) -> _Inbox:
        if self._inbox is None:
            inbox = self._inbox = _Inbox(self.edge.link)
            inbox.subscription = await self.edge.link.subscribe(inbox.subject, inbox.on_message)
        return self._inbox

    def _retire(self, inbox: _Inbox) -> None:
        """Withdraw all pulls of an inbox; its other calls pull again through the next one."""
        if self._inbox is not inbox:
            return
        self._inbox = None
        for call in inbox.calls:
            _give_up(call)
        inbox.calls.clear()
        task = asyncio.ensure_future(inbox.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    # --- the end ------------------------------------------------------------------------------------------

    def _on_news(self) -> None:
        self._news.set()
        if self.edge.ended:
            self._watch_end()

    def _watch_end(self) -> None:
        waits = self._inbox is not None and any(not call.done() for call in self._inbox.calls)
        if waits and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """End the calls that wait when nothing is left for them; the others say when they settle a lease."""
        pause_s, longest_s = _PAUSE_S
        while self._inbox is not None and self._inbox.calls:
            self._news.clear()
            outcome: Exception | None = None
            try:
                if await self._over():
                    outcome = EdgeEnded(self.edge.name)
            except BrokerError as error:
                outcome = error
            if outcome is not None:
                self._end_calls(outcome)
                return
            try:
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, longest_s)

    def _end_calls(self, outcome: Exception) -> None:
        for call in self._inbox.calls if self._inbox is not None else ():
            if not call.done():
                call.set_exception(outcome)

    async def _over(self) -> bool:
        """Nothing waits in the group and nobody else holds anything, while what we hold stayed the same."""
        own = self._certainly_held()
        if own is None or not await self.edge.drained(self.group, len(own)):
            return False
        return own == self._certainly_held()

    def _certainly_held(self) -> frozenset[str] | None:
        """None while an acknowledgement is under way: the server may count that lease or not."""
        if any(lease.settling for lease in self._held.values()):
            return None
        return frozenset(reply for reply, lease in self._held.items() if lease.valid)

    async def close(self) -> None:
        """Give back what is held and withdraw the pulls."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._inbox is not None:
            self._retire(self._inbox)
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for lease in tuple(self._held.values()):
            await self.edge.link.publish(lease.reply, b"-NAK")


def _give_up(call: asyncio.Future[Msg | None]) -> None:
    if not call.done():
        call.set_result(None)

"""Calls that may never come back, such as those of a store: each is waited for as long as is reasonable.

| who waits        | for what                                    | unblocked by                             |
|------------------|---------------------------------------------|------------------------------------------|
| `call`, `answer` | the work                                    | its end, or `bound_s`; a `call`: `hurry` |
| `call`, `answer` | nothing while a late one hasn't come back   | they raise at once                       |
| the exit         | nobody: the thread of a call is left behind |                                          |
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)
_TOLD_S = 5.0  # what takes longer is told


def _nobody(what: str) -> AbstractContextManager[None]:
    return nullcontext()


HELD_UP: ContextVar[Callable[[str], AbstractContextManager[None]]] = ContextVar("held_up", default=_nobody)
"""Hears, while it lasts, for what the node that calls `answer` has been waiting for some seconds."""


class Patience:
    """One place that is asked, called `name`, and how long each call of it may take. For any threads."""

    def __init__(self, name: str, bound_s: float) -> None:
        self.name, self.bound_s = name, bound_s
        self._late: tuple[Future[object], str, float] | None = None
        self._hurried: Future[float] = Future()

    def call(self, what: str, work: Callable[[], T], *, times: int = 1) -> T:
        """What `work` gives or raises. It may take `times` the bound; then TimeoutError names it."""
        future, began = self._begin(what, work), time.monotonic()
        bound_s = self.bound_s * times
        either: set[Future[Any]] = {future, self._hurried}
        wait(either, min(_TOLD_S, bound_s), FIRST_COMPLETED)
        if not future.done() and not self._hurried.done() and bound_s > _TOLD_S:
            _log.warning("waiting for %s to %s", self.name, what)
            wait(either, max(began + bound_s - time.monotonic(), 0.0), FIRST_COMPLETED)
        if not future.done() and self._hurried.done():
            wait({future}, self._hurried.result())
            bound_s = round(time.monotonic() - began, 1)
        if not future.done():
            raise self._gave_up(future, what, began, bound_s)
        return future.result()

    def hurry(self, bound_s: float) -> None:
        """From now on a `call` may take so long and no longer, those under way too. The first word counts."""
        if not self._hurried.done():
            self._hurried.set_result(bound_s)

    async def answer(self, what: str, work: Callable[[], T]) -> T:
        """As `call`, without holding up the event loop; `HELD_UP` hears of it when it takes long."""
        future, began = self._begin(what, work), time.monotonic()
        waited = asyncio.wrap_future(future)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
        done, _ = await asyncio.wait({waited}, timeout=min(_TOLD_S, self.bound_s))
        if not done and self.bound_s > _TOLD_S:
            _log.warning("waiting for %s to %s", self.name, what)
            with HELD_UP.get()(f"{self.name} to {what}"):
                done, _ = await asyncio.wait({waited}, timeout=self.bound_s - _TOLD_S)
        if not done:
            raise self._gave_up(future, what, began, self.bound_s)
        return waited.result()

    def _begin(self, what: str, work: Callable[[], T]) -> Future[T]:
        if self._late is not None and not self._late[0].done():
            _, before, began = self._late
            since = time.monotonic() - began
            raise TimeoutError(
                f"{self.name} hasn't answered for {since:.0f} s ({before}), so it isn't asked to {what}"
            )
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels it from now on

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # carried to whoever waits
                future.set_exception(error)

        threading.Thread(target=run, name=f"{what}: {self.name}", daemon=True).start()
        return future

    def _gave_up(self, future: Future[T], what: str, began: float, bound_s: float) -> TimeoutError:
        self._late = (future, what, began)  # type: ignore[assignment]  # only whether it is done counts
        return TimeoutError(f"{self.name} didn't {what} within {bound_s:g} s")

"""Calls that may never come back, such as those of a store: each is waited for as long as is reasonable.

| who waits  | for what                                           | unblocked by                          |
|------------|----------------------------------------------------|---------------------------------------|
| `call`     | the work                                           | its end, or `bound_s`                 |
| `call`     | nothing while an earlier one hasn't come back      | it raises at once                     |
| the exit   | nobody: the thread of a call is left behind        |                                       |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Patience:
    """One place that is asked, called `name`, and how long each call of it may take."""

    def __init__(self, name: str, bound_s: float) -> None:
        self.name, self.bound_s = name, bound_s
        self._last: tuple[Future[object], str, float] | None = None

    def call(self, what: str, work: Callable[[], T], *, times: int = 1) -> T:
        """What `work` gives or raises. It may take `times` the bound; then TimeoutError names it.

        Call it from one thread at a time.
        """
        if self._last is not None and not self._last[0].done():
            _, before, began = self._last
            since = time.monotonic() - began
            raise TimeoutError(
                f"{self.name} hasn't answered for {since:.0f} s ({before}), so it isn't asked to {what}"
            )
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # carried to whoever waits
                future.set_exception(error)

        self._last = (future, what, time.monotonic())  # type: ignore[assignment]  # only whether it is done counts
        threading.Thread(target=run, name=f"{what}: {self.name}", daemon=True).start()
        try:
            return future.result(self.bound_s * times)
        except TimeoutError:
            if future.done():
                raise  # the work's own
            raise TimeoutError(f"{self.name} didn't {what} within {self.bound_s * times:g} s") from None

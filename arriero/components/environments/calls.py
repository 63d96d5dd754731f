"""Calls of user code in threads of their own: they may block, and one that never ends holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer(Generic[T]):
    """What a call gave, or what it raised."""

    key: str
    value: T | None = None
    error: BaseException | None = None


class Calls(Generic[T]):
    """Calls under way, by key. `submit`, `answers` and `forget` belong to one thread.

    Each call has a daemon thread: Python can't end a thread, so a call that was given up goes on by itself
    (`abandoned` counts those that still do) and doesn't keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: queue.SimpleQueue[tuple[int, Answer[T]]] = queue.SimpleQueue()
        self._under_way: dict[str, int] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: str) -> bool:
        return key in self._under_way

    @property
    def abandoned(self) -> int:
        """Calls that were given up and haven't ended yet."""
        self._threads = {n: t for n, t in self._threads.items() if t.is_alive()}
        return len(self._threads.keys() - set(self._under_way.values()))

    def submit(self, key: str, call: Callable[[], T]) -> None:
        """Start `call`; its answer comes under `key`."""
        assert key not in self._under_way, f"{key} is under way"
        self._number += 1
        number = self._number
        self._under_way[key] = number

        def run() -> None:
            try:
                answer = Answer[T](key=key, value=call())
            except BaseException as error:  # noqa: BLE001  # of user code, SystemExit too: carried to its episode
                answer = Answer[T](key=key, error=error)
            self._answers.put((number, answer))

        thread = threading.Thread(target=run, name=f"{self._name}-{number}", daemon=True)
        self._threads[number] = thread
        thread.start()

    def forget(self, key: str) -> None:
        """Give the call of `key` up, if there is one; its answer will not come."""
        self._under_way.pop(key, None)

    def answers(self, *, wait_s: float = 0.0, whole: bool = False) -> list[Answer[T]]:
        """Those that have come, ordered by key; waits up to `wait_s` for one, or with `whole` for all."""
        found: list[Answer[T]] = []
        deadline = time.monotonic() + wait_s
        while self._under_way:
            waits = wait_s > 0 and (whole or not found)
            try:
                left = max(0.0, deadline - time.monotonic())
                number, answer = self._answers.get(block=waits and left > 0, timeout=left or None)
            except queue.Empty:
                break
            self._threads.pop(number, None)
            if self._under_way.get(answer.key) == number:
                del self._under_way[answer.key]
                found.append(answer)
        return sorted(found, key=lambda a: a.key)

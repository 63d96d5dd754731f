"""The processes of `tests.weight_roles`, as a test holds them.

They are forked from a server that has imported everything once, so that a test starts them in milliseconds
and is itself never forked.
"""

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.weight_roles import Receiver, Sender, Setting, serve

# Also what only some of the roles need.
PRELOAD = ["tests.weight_roles", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]


class Failed(Exception):
    """The error of a process, as its type and message."""


class Role:
    """A process, as its parent sees it."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.tell("start")

    def tell(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def answer(self, timeout_s: float = 30.0) -> Any:
        """What it gave; Failed with its error."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        good, result = self._pipe.recv()
        if not good:
            raise Failed(result)
        return result

    def ask(self, name: str, *args: Any) -> Any:
        self.tell(name, *args)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self._pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class Crew:
    """The ranks of a trainer, and receivers that join when they are told to."""

    def __init__(self, setting: Setting, folder: Path, make: Callable[..., Any] = Sender) -> None:
        self.setting = setting
        meeting = str(folder / "meeting")
        ranks = range(setting.trainer.num_ranks)
        self.senders = [Role(make, setting, rank, meeting) for rank in ranks]
        for sender in self.senders:
            sender.answer(60.0)
        self.url = self.senders[0].ask("address")
        self._receivers: list[Role] = []

    def receivers(self, *names: str) -> list[Role]:
        """One process for each name: <kind>-<which>/<rank>, e.g. tp2-0/1."""
        fresh = [
            Role(Receiver, self.setting, self.url, name, name.split("-")[0], int(name.split("/")[1]))
            for name in names
        ]
        self._receivers += fresh
        for receiver in fresh:
            receiver.answer(60.0)
        return fresh

    def all_senders(self, name: str, *args: Any) -> list[Any]:
        for sender in self.senders:
            sender.tell(name, *args)
        return [sender.answer() for sender in self.senders]

    def report(self, version: int, expected: Sequence[str] = (), timeout_s: float = 10.0) -> tuple[Any, ...]:
        report: tuple[Any, ...] = self.senders[0].ask("report", version, expected, timeout_s)
        return report

    def end(self) -> None:
        for role in (*self.senders, *self._receivers):
            role.end()

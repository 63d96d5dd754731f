"""Heavy work off the event loop: one thread per component, so that its steps stay in order."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


def own_device() -> torch.device:
    """The GPU of this rank, made current in the calling thread; the CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class ComputeThread:
    """`await thread(fn, ...)` runs `fn` in this component's thread. Use as a context manager.

    The first call, in which a component imports and loads, runs alone in the process: two threads that import
    torch or transformers at once get half a module, or end the process.
    """

    _alone: ClassVar = threading.Lock()

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._loaded = False

    async def __call__(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `fn`; cancelling the wait leaves the call to end by itself."""
        work = partial(fn, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[], T]) -> T:
        if self._loaded:
            return work()
        with self._alone:
            self._loaded = True
            return work()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not waited for: that would hold up the whole event loop while a cancelled call goes on.
        self._pool.shutdown(wait=False, cancel_futures=True)

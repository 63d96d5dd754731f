"""Heavy work off the event loop: one thread per component, so that its steps stay in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

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
    """`await thread(fn, ...)` runs `fn` in this component's thread. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `fn`; cancelling the wait leaves the call to end by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: fn(*args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not waited for: that would hold up the whole event loop while a cancelled call goes on.
        self._pool.shutdown(wait=False, cancel_futures=True)

"""Where the parts of a graph stand: on devices of their own, or in turns on the same ones.

    generators   decode ............ | asleep .................. | decode
    trainer      parked ............ | a step, publishes ........ | parked

In turns each side gives its memory back before the other takes the devices. The sides hand over by the data
itself: generators rest when nothing is left to decode, the trainer rests while it waits for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, ParamSpec, TypeVar

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.engine.runtime.context import Context
from arriero.engine.turns import Turn

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DevicePlacement:
    """`devices`: `apart`, or `turns`: trainer and generators use the same ones, one side at a time.

    `sleep_level` of a generator between its turns: 1 keeps its weights in host memory, 2 drops them, and the
    version is received once more. A side that waits longer than `turn_bound_s` for the other ends the run.
    """

    devices: Literal["apart", "turns"] = "apart"
    sleep_level: Literal[1, 2] = 1
    turn_bound_s: PositiveFloat = 3600.0

    def problems(self, *, staleness: int | None, standby: bool) -> Iterable[str]:
        if self.devices == "apart":
            if self != DevicePlacement():
                yield f"placement.devices=apart doesn't read {self}; set placement.devices=turns"
            return
        if staleness:
            yield (
                f"placement.devices=turns with staleness={staleness}: who waits for the devices gains "
                "nothing by older weights; set staleness=0, or placement.devices=apart, with which processes "
                "share a device in time where there are too few, if all fit into its memory at once"
            )
        if standby:
            yield "placement.devices=turns with standby: nobody decodes while weights arrive; leave it out"


class Devices:
    """`await devices(fn, ...)` runs `fn` in a component's thread, with the devices at its disposal.

    `rest` gives them to the other side, after `asleep`; the next call waits for the turn. A component on
    several ranks calls all of it in step. Where devices aren't shared it is the thread alone.
    """

    def __init__(
        self, thread: ComputeThread, placement: DevicePlacement, context: Context, *, alone: bool
    ) -> None:
        self._thread, self._context = thread, context
        self._turn: Turn | None = None
        self.shared = placement.devices == "turns"
        if self.shared and not context.rank:
            name = f"{context.node}-{context.replica}"
            path = context.run_dir / "devices.lock"
            self._turn = Turn(path, name, alone=alone, bound_s=placement.turn_bound_s)
        self._together: Callable[[], object] | None = None
        self._here = False
        self.asleep: Callable[[], None] = lambda: None
        self.awake: Callable[[], None] = lambda: None

    async def __call__(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `fn`; cancelling the wait leaves the call to end by itself."""
        if self.shared and not self._here:
            await self._take()
        return await self._thread(fn, *args, **kwargs)

    async def aside(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As a call, for what needs no device."""
        return await self._thread(fn, *args, **kwargs)

    async def rest(self) -> None:
        """Nothing to do until something comes: the other side may have the devices."""
        if not self._here:
            return
        await self._thread(self.asleep)
        await self._barrier()
        self._here = False
        if self._turn is not None:
            self._turn.give()

    def close(self) -> None:
        """Leave the devices for good."""
        if self._turn is not None:
            self._turn.close()

    async def _take(self) -> None:
        if self._turn is not None:
            await self._turn.take()
        await self._barrier()
        self._here = True
        await self._thread(self.awake)

    async def _barrier(self) -> None:
        if self._context.ranks > 1:
            if self._together is None:
                self._together = await self._thread(_barrier_of_all)
            await self._thread(self._together)


def _barrier_of_all() -> Callable[[], object]:
    """A barrier of all ranks of this process's world that needs no GPU."""
    from typing import Any

    import torch.distributed as dist

    untyped: Any = dist  # annotated only in part
    group = untyped.new_group(backend="gloo")
    return lambda: untyped.barrier(group=group)

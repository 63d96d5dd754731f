"""Memory of tensors given back and filled again: host memory keeps what was in it.

What is emptied is the storage, so that views, ties and an optimizer's parameters stay what they are.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arriero.components.sharding import local

if TYPE_CHECKING:
    from arriero.components.learner import Learner

_NUMBERS = ("version", "updates", "loss.multiplier")


class Parking:
    """Tensors by name that leave their device and come back, some of them beside the work that follows."""

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}  # allocated once; page-locked where a GPU reads it
        self._parked: dict[str, tuple[Tensor, int, bool]] = {}  # with its bytes, and whether they are kept
        self._coming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "parking")

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def park(self, tensors: Mapping[str, Tensor], *, lost: Collection[str] = ()) -> None:
        """Give back the memory of all storages; what was in those of the names in `lost` is lost."""
        assert not self._parked, "parked already"
        self.wait()
        seen: set[int] = set()
        for name, tensor in tensors.items():
            own = local(tensor.detach())
            storage = own.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in seen:
                continue  # empty, or tied
            seen.add(storage.data_ptr())
            if name not in lost:
                self._buffer(name, own).copy_(_bytes(own))
            self._parked[name] = own, storage.nbytes(), name not in lost
        for own, _, _ in self._parked.values():
            own.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # another process wants it

    def unpark(self, *, later: Iterable[str] = ()) -> None:
        """Take the memory again and fill it; tensors named `later` are there after `wait`."""
        for own, nbytes, _ in self._parked.values():
            own.untyped_storage().resize_(nbytes)
        parked = {name: own for name, (own, _, kept) in self._parked.items() if kept}
        self._parked.clear()
        rest = {name: parked.pop(name) for name in later if name in parked}
        self._fill(parked)
        if rest:
            self._coming = self._thread.submit(self._fill, rest)

    def wait(self) -> None:
        """Until all that was parked is there."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.result()

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        gpu = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
        if gpu is None:
            for name, tensor in tensors.items():
                _bytes(tensor).copy_(self._host[name])
            return
        untyped: Any = torch.cuda  # its streams are annotated in part
        stream = untyped.Stream(gpu)
        stream.wait_stream(torch.cuda.default_stream(gpu))  # what used this memory before
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                _bytes(tensor).copy_(self._host[name], non_blocking=True)
        stream.synchronize()

    def _buffer(self, name: str, own: Tensor) -> Tensor:
        nbytes = own.untyped_storage().nbytes()
        held = self._host.get(name)
        if held is None or held.numel() != nbytes:
            pin = own.device.type == "cuda"
            held = self._host[name] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        return held


class ParkedTraining:
    """What a trainer has on its devices: weights, average and moments go to the host, gradients nowhere."""

    def __init__(self, state: Learner) -> None:
        own_memory(state.model.parameters())
        self._state, self._parking = state, Parking()
        self._later: list[str] = []
        state.before_moments(self._parking.wait)

    def park(self) -> None:
        """Leave the devices."""
        self._state.forget_gradients()
        held = {name: t for name, t in self._state.checkpoint().items() if name not in _NUMBERS}
        self._later = [name for name in held if not name.startswith("model.")]
        self._parking.park(held)

    def unpark(self) -> None:
        """Come back: weights at once, all else beside the forward and backward passes that need only them."""
        if self._parking.parked:
            self._parking.unpark(later=self._later)


def own_memory(parameters: Iterable[Tensor]) -> None:
    """Give each parameter that lies in a mapped file, say, memory that can be given back."""
    for parameter in parameters:
        if not local(parameter.detach()).untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

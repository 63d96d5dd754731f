"""What arriero adds to each worker of vLLM: its end of the weight plane.

vLLM mixes `WeightIntake` into its worker class, in this process or in those of the workers, and
`collective_rpc` calls it between two decoding steps.

    begin_weights | a thread receives into host memory and verifies; with standby it fills a twin of the model
    arrived       | what came of it, or that it goes on
    use_weights   | the model decodes with them: exchanged with its twin, or loaded from host memory

So nothing is in use before all ranks have it, and if it can't be received, the model is as before. Running
requests remain valid throughout. With tensor parallelism each worker receives what it stores, no more.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arriero.components.engine_layout import engine_layout
from arriero.components.head_padding import HeadPadding
from arriero.components.second_set import Room, room_for
from arriero.components.vllm_loading import Twin, load
from arriero.components.vllm_parts import Part
from arriero.engine.weights import SenderGone, StaleWeights, WeightError, WeightReceiver
from arriero.schemas.layouts import RankLayout
from arriero.schemas.weights import WeightManifest

_LEAVE_S = 5.0


@dataclass(frozen=True)
class Arrived:
    """What came of a version on one rank; of data alone, for it may travel between processes.

    `stale`: it was overwritten before it could be read; `gone`: its sender has ended or died.
    """

    error: str = ""
    stale: bool = False
    gone: bool = False


class WeightIntake:
    """Mixed into vLLM's worker: `model_runner`, `vllm_config`, `device` and `rank` are that worker's."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _arriero: _Intake | None = None

    def open_intake(self, name: str, secret: bytes, padding: HeadPadding | None) -> None:
        """Prepare for `begin_weights`; `name` is what the sender calls this generator if it gets stuck."""
        parallel, model_config = self.vllm_config.parallel_config, self.vllm_config.model_config
        runner = self.model_runner
        self._arriero = _Intake(
            f"{name}/{self.rank}", secret, padding, model_config.hf_config, parallel.tensor_parallel_size,
            self.rank % parallel.tensor_parallel_size, self.device,
        )  # fmt: skip
        if hasattr(runner, "_init_kv_zero_meta") and not hasattr(runner, "_kv_block_zeroer"):
            runner._init_kv_zero_meta()  # a worker process of its own: see `vllm_start`, zeroed cache blocks

    def room_for_twin(self) -> Room:
        """What a second set of this rank's weights takes, and what is free."""
        tensors = self.model_runner.get_model().parameters()
        return room_for(sum(tensor.nbytes for tensor in tensors), self.device)

    def make_twin(self) -> None:
        """From now on versions are made ready beside the weights in use."""
        assert self._arriero is not None, "open_intake comes first"
        in_place = not self.vllm_config.model_config.enforce_eager
        self._arriero.twin = Twin(self.model_runner.get_model(), self.vllm_config, in_place=in_place)

    def begin_weights(self, manifest: str) -> None:
        """Let a version (a `WeightManifest` as JSON) arrive beside the decoding."""
        assert self._arriero is not None, "open_intake comes first"
        self._arriero.begin(WeightManifest.model_validate_json(manifest))

    def arrived(self, *, wait: bool) -> Arrived | None:
        """What came of it; None if it still arrives, with `wait` not before it has ended."""
        assert self._arriero is not None, "open_intake comes first"
        return self._arriero.outcome(wait=wait)

    def use_weights(self) -> None:
        """Decode with what has arrived from now on."""
        assert self._arriero is not None, "open_intake comes first"
        if self._arriero.twin is not None:
            self._arriero.twin.switch()
        else:
            load(self.model_runner.get_model(), self.vllm_config, self._arriero.tensors())

    def seed_sampling(self, seed: int) -> None:
        """Begin the random numbers of all sampling anew."""
        torch.manual_seed(seed)

    def close_intake(self) -> None:
        if self._arriero is not None:
            self._arriero.close()
            self._arriero = None


class _Intake:
    """The receiver, its thread, and the host memory that versions arrive in, allocated once.

    `config` is that of the model, `rank` this worker's of `ranks`. A `twin` is filled with what has arrived.
    """

    def __init__(
        self, name: str, secret: bytes, padding: HeadPadding | None, config: Any, ranks: int, rank: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._receiver = WeightReceiver(name, secret, self._stores if ranks > 1 else None)
        self._padding = padding
        self._config, self._ranks, self._rank = config, ranks, rank
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._layout: RankLayout | None = None
        self._held: dict[str, Tensor] = {}
        self.twin: Twin | None = None
        self._device = device
        self._thread = ThreadPoolExecutor(1, "arriero-weights")
        self._arriving: Future[Arrived] | None = None

    def begin(self, manifest: WeightManifest) -> None:
        self._arriving = self._thread.submit(self._arrive, manifest)

    def outcome(self, *, wait: bool) -> Arrived | None:
        assert self._arriving is not None, "begin comes first"
        return self._arriving.result() if wait or self._arriving.done() else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What has arrived, as the loaders of the engine take it."""
        starts = {s.name: s.pieces[0].start for s in self._layout.stored} if self._layout else {}
        for name, tensor in self._held.items():
            wide = tensor if self._padding is None else self._padding.widen(name, tensor)
            shape = self._shapes.get(name, tensor.shape)
            if tuple(shape) == tuple(tensor.shape):
                yield name, wide
            else:
                # Widened heads are so many times as long in the whole tensor, too.
                times = [n // m if m else 1 for n, m in zip(wide.shape, tensor.shape, strict=True)]
                whole = [n * t for n, t in zip(shape, times, strict=True)]
                start = [n * t for n, t in zip(starts[name], times, strict=True)]
                yield name, Part(name, wide, whole, start)

    def _arrive(self, manifest: WeightManifest) -> Arrived:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        try:
            if not self._held:
                self._held = self._receiver.tensors(manifest)
            self._receiver.receive(manifest, self._held)
            if self.twin is not None:
                self.twin.fill(self.tensors())
        except StaleWeights as error:
            return Arrived(str(error), stale=True)
        except SenderGone as error:
            return Arrived(str(error), gone=True)
        except WeightError as error:
            return Arrived(str(error))
        return Arrived()

    def close(self) -> None:
        """Wait for what still arrives, within a bound: it writes into this memory."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._arriving is None or wait([self._arriving], timeout=_LEAVE_S).done:
            self._receiver.close()
            self._held.clear()

    def _stores(self, shapes: Mapping[str, tuple[int, ...]]) -> RankLayout | None:
        world = engine_layout(self._config, shapes, self._ranks)
        self._shapes = shapes
        self._layout = None if world is None else world.ranks[self._rank]
        return self._layout

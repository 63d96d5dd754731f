"""What arriero adds to each worker of vLLM: its end of the weight plane.

vLLM mixes `WeightIntake` into its worker class, in this process or in those of the workers, and
`collective_rpc` calls it between two decoding steps. A version arrives in host memory first, verified, and
then goes layer by layer into the kernels' own tensors (packed, fused, split over ranks), which stay where
they are: CUDA graphs and running requests remain valid. If it can't be received, the model is as before.
With tensor parallelism each worker receives what it stores, and nothing else.

vLLM is imported by name: without it, types and imports of this package are still whole.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from arriero.components.engine_layout import engine_layout
from arriero.components.head_padding import HeadPadding
from arriero.components.vllm_parts import Part
from arriero.engine.weights import WeightError, WeightReceiver
from arriero.schemas.layouts import RankLayout
from arriero.schemas.weights import WeightManifest


class WeightIntake:
    """Mixed into vLLM's worker: `model_runner`, `model_config` and `vllm_config` are that worker's."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _arriero: _Intake | None = None

    def open_intake(self, name: str, secret: bytes, padding: HeadPadding | None) -> None:
        """Prepare for `take_weights`; `name` is what the sender calls this generator if it gets stuck."""
        parallel = self.vllm_config.parallel_config
        self._arriero = _Intake(
            f"{name}/{self.rank}", secret, padding, self.vllm_config.model_config.hf_config,
            parallel.tensor_parallel_size, self.rank % parallel.tensor_parallel_size,
        )  # fmt: skip
        runner = self.model_runner
        if hasattr(runner, "_init_kv_zero_meta") and not hasattr(runner, "_kv_block_zeroer"):
            runner._init_kv_zero_meta()  # a worker process of its own: see `vllm_start`, zeroed cache blocks

    def take_weights(self, manifest: str) -> None:
        """Receive a version (a `WeightManifest` as JSON), verify it and load it into the model."""
        assert self._arriero is not None, "open_intake comes first"
        version = WeightManifest.model_validate_json(manifest)
        load(self.model_runner.model, self.vllm_config, self._arriero.receive(version))

    def seed_sampling(self, seed: int) -> None:
        """Begin the random numbers of all sampling anew."""
        torch.manual_seed(seed)

    def close_intake(self) -> None:
        if self._arriero is not None:
            self._arriero.close()
            self._arriero = None


class _Intake:
    """The receiver and the host memory that versions arrive in, allocated once.

    `config` is that of the model, `rank` this worker's of `ranks`.
    """

    def __init__(
        self, name: str, secret: bytes, padding: HeadPadding | None, config: Any, ranks: int, rank: int
    ) -> None:
        self._receiver = WeightReceiver(name, secret, self._stores if ranks > 1 else None)
        self._padding = padding
        self._config, self._ranks, self._rank = config, ranks, rank
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._layout: RankLayout | None = None
        self._arrived: dict[str, Tensor] = {}

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        if not self._arrived:
            self._arrived = self._receiver.tensors(manifest)
        self._receiver.receive(manifest, self._arrived)
        starts = {s.name: s.pieces[0].start for s in self._layout.stored} if self._layout else {}
        for name, tensor in self._arrived.items():
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

    def close(self) -> None:
        self._receiver.close()
        self._arrived.clear()

    def _stores(self, shapes: Mapping[str, tuple[int, ...]]) -> RankLayout | None:
        world = engine_layout(self._config, shapes, self._ranks)
        self._shapes = shapes
        self._layout = None if world is None else world.ranks[self._rank]
        return self._layout


def load(model: Any, vllm_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Put checkpoint tensors into a vLLM model that may be in use.

    WeightError, naming them, if tensors of the model got no weights; the model can't be used then.
    """
    reloading: Any = import_module("vllm.model_executor.model_loader.reload")
    configured: Any = import_module("vllm.config").set_current_vllm_config(vllm_config)
    tied = getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False)
    with configured, torch.no_grad():
        reloading.initialize_layerwise_reload(model)
        wanted = {name for name, _ in model.named_parameters()}
        if tied:
            wanted.discard("lm_head.weight")
        loaded: set[str] = model.load_weights(weights)
        reloading.finalize_layerwise_reload(model, vllm_config.model_config)
        if tied:
            _tie(model)
    if missing := sorted(wanted - loaded):
        raise WeightError(
            f"{len(missing)} of {len(wanted)} tensors of the engine got no weights: {missing[:3]}"
        )


def _tie(model: Any) -> None:
    """The output layer is the embedding; on a CPU it holds a packed copy, which has to be packed again."""
    head = model.lm_head
    head.weight = model.model.embed_tokens.weight
    head.quant_method.process_weights_after_loading(head)

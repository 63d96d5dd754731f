"""Checkpoint tensors into a vLLM model: into the one in use, or a twin that changes places with it.

vLLM's loaders put weights into the kernels' own form (packed, fused, split over ranks, in eight bits), layer
by layer. `load` does that to the tensors in use, while the model stands still. `Twin` does it beside them:

    model   decodes with set A | switch | decodes with set B
    twin    fills set B        |        | fills set A

A twin has every module of the model once more, but only the weights are its own. What a kernel keeps of
weights outside of tensors (a CPU's packed copy) changes places with them.

vLLM is imported by name: without it, types and imports of this package are still whole.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from arriero.engine.weights import WeightError

# vLLM's "current config" is one for the process; held while it is set, also by whoever builds an engine.
configured = threading.RLock()
_TENSORS = ("_parameters", "_buffers")


def load(model: Any, vllm_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Put checkpoint tensors into a vLLM model, whose tensors stay where they are.

    WeightError, naming them, if tensors of the model got no weights; the model can't be used then.
    """
    reloading: Any = import_module("vllm.model_executor.model_loader.reload")
    current: Any = import_module("vllm.config").set_current_vllm_config
    tied = getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False)
    with configured, current(vllm_config), torch.no_grad():
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


class Twin:
    """A second set of the weights of `model`, of a dense decoder. It costs their memory once more.

    `in_place`: something knows the model's tensors by address (a captured graph); `switch` copies then,
    instead of exchanging.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, *, in_place: bool) -> None:
        self._config, self._in_place = vllm_config, in_place
        twins: dict[int, nn.Module] = {}
        self._model: Any = _twin(model, twins, {})
        self._pairs = [(module, twins[id(module)]) for module in model.modules()]
        self._changed: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = []

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a version, in any thread. Raises as `load`, but the model in use stays whole."""
        before = [dict(vars(twin)) for _, twin in self._pairs]
        with _own_stream():
            load(self._model, self._config, weights)
        self._changed = [
            (vars(module), vars(twin), _rebound(old, vars(twin)))
            for (module, twin), old in zip(self._pairs, before, strict=True)
        ]  # fmt: skip

    def switch(self) -> None:
        """Between two steps: the model uses what was filled last, and the twin has what it used before."""
        for ours, theirs, names in self._changed:
            for kind in _TENSORS:
                if self._in_place:
                    _copy(theirs[kind], ours[kind])
                else:
                    ours[kind], theirs[kind] = theirs[kind], ours[kind]
            for name in names:
                ours[name], theirs[name] = theirs[name], ours.get(name)


def _rebound(old: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Attributes, other than tensors and modules, that are not what they were."""
    return tuple(
        n for n, value in now.items() if n not in (*_TENSORS, "_modules") and old.get(n) is not value
    )


def _copy(source: Mapping[str, Tensor | None], into: Mapping[str, Tensor | None]) -> None:
    for name, tensor in source.items():
        held = into[name]
        if tensor is not None and held is not None and tensor is not held:
            held.data.copy_(tensor.data)


def _twin(module: nn.Module, twins: dict[int, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    """The module with everything below it once more; what is shared in it stays shared."""
    if id(module) in twins:
        return twins[id(module)]
    reloading: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
    twin: nn.Module = object.__new__(type(module))
    twins[id(module)] = twin
    held, about = vars(module), vars(twin)

    def second(tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and id(tensor) not in tensors:
            tensors[id(tensor)] = _of(twin, module, _dressed(tensor.data.clone(), tensor))
        return tensor if tensor is None else tensors[id(tensor)]

    computed: set[str] = set(held["_non_persistent_buffers_set"])  # the same for all weights
    about |= held | {
        "_non_persistent_buffers_set": computed,
        "_parameters": {n: second(p) for n, p in held["_parameters"].items()},
        "_buffers": {n: b if n in computed else second(b) for n, b in held["_buffers"].items()},
        "_modules": {n: m and _twin(m, twins, tensors) for n, m in held["_modules"].items()},
    }
    if "quant_method" in held:
        about["quant_method"] = copy.copy(held["quant_method"])
    # How a checkpoint's tensors look to the loaders of this layer.
    known, mine = reloading.get_layerwise_info(module), reloading.get_layerwise_info(twin)
    mine.restore_device = known.restore_device
    mine.restore_metadata = tuple(
        {n: _of(twin, module, _dressed(t.data, t)) for n, t in kind.items()}
        for kind in known.restore_metadata
    )
    return twin


def _dressed(tensor: Tensor, like: Tensor) -> Tensor:
    """With the class and the attributes of a parameter of vLLM, which say how it is loaded."""
    tensor.__class__ = like.__class__
    vars(tensor).update(vars(like))
    return tensor


def _of(twin: nn.Module, module: nn.Module, tensor: Tensor) -> Tensor:
    """With `twin` for `module` in what the attributes call; wrappers that count for `module` are left out."""
    for name, value in vars(tensor).items():
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and value.__self__ is module:
            value = MethodType(value.__func__, twin)
        vars(tensor)[name] = value
    return tensor


@contextmanager
def _own_stream() -> Generator[None]:
    """What a GPU does here doesn't wait in line with the decoding, and is done at the end."""
    if not torch.cuda.is_available():
        yield
        return
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation there
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()

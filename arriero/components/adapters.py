"""LoRA: a low-rank addition to matrices that stay as they are, through peft; merged, it is gone again.

    W of [out, in] stays, A of [rank, in] and B of [out, rank] are trained: W + alpha / rank * B A

Generators know nothing of it: what is published and saved are the merged weights, under their own names.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch and peft annotate only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from arriero.components.sharding import local, whole
from arriero.components.training_options import LoRA
from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_BASE = ".base_layer."
_NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The names of the two factors of an addition, its scale, and whether the weight is [in, out]."""

    a: str
    b: str
    scale: float
    turned: bool


def add_lora(model: torch.nn.Module, config: LoRA) -> None:
    """Put adapters on `model`, and let nothing else be trained. UserError without peft or targets."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"lora.rank={config.rank} needs peft: pip install 'arriero[lora]'") from error
    targets = config.targets[0] if config.targets == LoRA().targets else list(config.targets)
    untyped: tuple[Any, Any] = (LoraConfig, inject_adapter_in_model)
    described = untyped[0](
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(config.seed)
        try:
            untyped[1](described, model, adapter_name=_NAME)
        except ValueError as error:
            raise UserError(f"lora.targets={', '.join(config.targets)}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def adapters(model: torch.nn.Module) -> dict[str, Adapter]:
    """By the name of the weight that it adds to, as the model without adapters calls it."""
    found: dict[str, Adapter] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            layer: Any = module  # one of peft's kinds of layers, which have no common type
            found[f"{name}.weight"] = Adapter(
                a=f"{name}.lora_A.{_NAME}.weight", b=f"{name}.lora_B.{_NAME}.weight",
                scale=float(layer.scaling[_NAME]), turned=bool(getattr(layer, "fan_in_fan_out", False)),
            )  # fmt: skip
    return found


def plain_name(name: str) -> str:
    """The name of a tensor as the model without adapters has it; empty for a tensor of an adapter."""
    return "" if ".lora_" in name else name.replace(_BASE, ".")


def merged(weight: Tensor, adapter: Adapter, tensors: Callable[[str], Tensor]) -> Tensor:
    """This rank's part of the weight with its addition; all ranks of a split model call it together."""
    a, b = tensors(adapter.a), tensors(adapter.b)
    held = local(weight)
    if adapter.turned:
        if held.shape != weight.shape:
            raise UserError("lora on weights of [in, out] can't be split over shards; set shards to 1")
        return held + adapter.scale * (whole(b) @ whole(a)).T
    # Rows of the weight are split as rows of B are.
    return held + adapter.scale * (local(b) @ whole(a))


def trained(model: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}

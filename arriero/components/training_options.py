"""How a trainer computes and what it keeps, as configuration: no torch, so that graphs can read it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import field, fields
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.model_directory import weight_shapes
from arriero.components.planning import Layout

Precision = Literal["float32", "bfloat16"]

_ALL = "all-linear"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class LoRA:
    """Train a low-rank addition to each of `targets` instead of the weights; `rank` 0 trains the weights.

    The addition is `alpha / rank * B A`, merged into the weights before they are published or saved.
    `targets` are names of modules, or `all-linear`: every Linear but the head. `seed` draws A; B begins at 0.
    Source: arXiv:2106.09685. Needs `pip install arriero[lora]`.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 32.0
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(_ALL,), min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)

    def problems(self, model: str) -> list[str]:
        """Targets that the model directory `model` has no matrix of; none if its files can't be read."""
        if not self.rank or self.targets == (_ALL,):
            return []
        matrices = [n.removesuffix(".weight") for n, s in weight_shapes(model).items() if len(s) == 2]
        absent = [t for t in self.targets if not any(f".{m}".endswith(f".{t}") for m in matrices)]
        if not (matrices and absent):
            return []
        known = ", ".join(sorted({m.rpartition(".")[2] for m in matrices}))
        also = f"; {_ALL} stands alone" if _ALL in absent else ""
        return [f"training.lora.targets={','.join(absent)}: {model} has no such module, but {known}{also}"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Average:
    """An exponential moving average of the weights: after each update `decay` of it stays; 0 keeps none.

    `used_for`: what takes the average instead of the newest weights. To publish it means to sample with it.
    """

    decay: float = Field(default=0.0, ge=0, lt=1)
    used_for: Literal["save", "publish", "both"] = "save"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TrainingOptions:
    """How steps are computed: what costs time and memory, and changes results by rounding at most.

    packing: how sequences lie in memory (`packing` says how). precision: what the forward pass computes in;
    parameters, gradients' sums and moments are float32. fp32_logits: the head multiplies in float32 even so.
    logits_mb: how much of the logits is ever there. shards: over how many ranks one copy of the model is
    split (FSDP); the ranks hold `ranks / shards` copies. recompute: forget the activations of each layer and
    compute them again in the backward pass. compile: compile each layer with torch.compile.
    """

    packing: Layout = "shared_prefix"
    precision: Precision = "float32"
    fp32_logits: bool = False
    logits_mb: PositiveInt = 128
    shards: PositiveInt = 1
    recompute: bool = False
    compile: bool = False
    lora: LoRA = field(default_factory=LoRA)
    average: Average = field(default_factory=Average)

    def problems(self, *, ranks: int, optimizer: str) -> list[str]:
        """What can't be together, each with a remedy."""
        found: list[str] = []
        if ranks % self.shards:
            found.append(
                f"training.shards={self.shards} doesn't divide ranks={ranks}; every copy needs as many ranks"
            )
        if self.fp32_logits and self.precision == "float32":
            found.append(
                "training.fp32_logits=true says nothing under training.precision=float32; leave it out"
            )
        if optimizer == "muon" and self.shards > 1:
            found.append(
                f"optimizer.kind=muon needs whole matrices, but training.shards={self.shards}; use adamw"
            )
        if optimizer == "muon" and self.lora.rank:
            found.append(
                f"optimizer.kind=muon is for whole matrices, not for training.lora.rank={self.lora.rank}; "
                "use adamw"
            )
        if not self.average.decay and self.average != Average():
            found.append(
                f"training.average.used_for={self.average.used_for} needs training.average.decay above 0"
            )
        if not self.lora.rank and self.lora != LoRA():
            found.append(f"{_others(self.lora)} without an adapter; set training.lora.rank above 0")
        if self.lora.rank and importlib.util.find_spec("peft") is None:
            found.append(f"training.lora.rank={self.lora.rank} needs peft: pip install 'arriero[lora]'")
        if self.compile and shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
            found.append(
                f"training.compile=true needs a C++ compiler, but {compiler} isn't there; install g++, or "
                "name another one in CXX"
            )
        return found

    def scorer_problems(self, *, ranks: int, optimizer: str, saved: bool) -> list[str]:
        """The same for a model whose head gives one number; `saved`: it is written at the end."""
        found = self.problems(ranks=ranks, optimizer=optimizer)
        default = TrainingOptions()
        if self.lora.rank:
            found.append(
                f"training.lora.rank={self.lora.rank}: a new head is trained as a whole, which an adapter "
                "isn't; leave it out"
            )
        if (self.fp32_logits, self.logits_mb) != (default.fp32_logits, default.logits_mb):
            found.append(
                "training.fp32_logits and training.logits_mb are for logits, but this head gives one number, "
                "always in float32; leave them out"
            )
        if self.average.decay and not (saved and self.average.used_for == "save"):
            what = "nothing is published" if saved else "nothing is saved or published"
            found.append(
                f"training.average.decay={self.average.decay}, used_for={self.average.used_for}: {what} of "
                "this model; leave it out"
            )
        return found


def _others(lora: LoRA) -> str:
    """The options of an adapter that aren't as they are by default, as keys with values."""
    default = LoRA()
    changed = {f.name: getattr(lora, f.name) for f in fields(LoRA)}
    return ", ".join(f"training.lora.{k}={v}" for k, v in changed.items() if v != getattr(default, k))

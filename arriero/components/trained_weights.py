"""What a policy in training shows of its weights: to generators, to a directory, to a checkpoint.

raw        what is in memory: split over shards, adapters apart       -> checkpoint
plain      as the model without adapters names it, adapters merged   -> generators, directory
averaged   plain, of the moving average of what is trained
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from arriero.components.adapters import adapters, merged, plain_name, trained
from arriero.components.sharding import local, sharded_like, whole
from arriero.components.training_options import Average
from arriero.schemas.lineage import HEAD, NO_HEAD

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_FILE_BYTES = 4 << 30


class TrainedWeights:
    """The weights of `model` and the moving average of those that are trained, if there is one."""

    def __init__(self, model: PreTrainedModel, average: Average) -> None:
        self._model = model
        self._config = average
        self._adapters = adapters(model)
        self._average: dict[str, Tensor] = {}
        if average.decay:
            self._average = {n: local(p.detach()).clone() for n, p in trained(model).items()}

    def updated(self) -> None:
        """Follow an update with the average."""
        if self._average:
            now = trained(self._model)
            for name, held in self._average.items():
                held.lerp_(local(now[name].detach()), 1 - self._config.decay)

    def raw(self) -> dict[str, Tensor]:
        """Live tensors by name, split as they are; one that several names share once, under the first."""
        owners = {name: id(p) for name, p in self._model.named_parameters(remove_duplicate=False)}
        first = {id(p): name for name, p in self._model.named_parameters()}
        state: dict[str, Tensor] = self._model.state_dict()
        return {name: t for name, t in state.items() if first.get(owners.get(name, 0), name) == name}

    def average(self) -> dict[str, Tensor]:
        """The average by raw name, split as the weights; empty if none is kept."""
        now = trained(self._model)
        return {name: sharded_like(now[name], held) for name, held in self._average.items()}

    def plain(self, purpose: str) -> dict[str, Tensor]:
        """Every tensor for `publish` or `save`, split as the weights; all ranks call it together."""
        return dict(self._shown(purpose))

    def write(self, directory: Path, *, first: bool) -> None:
        """Safetensors of the plain weights, gathered one by one; all ranks call it, the first one writes."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        sizes = [t.numel() * t.itemsize for name, t in self.raw().items() if plain_name(name)]
        files = _files(sizes)
        index: dict[str, str] = {}
        held: dict[str, Tensor] = {}
        for (name, tensor), file in zip(self._shown("save"), files, strict=True):
            gathered = whole(tensor)
            if not first:
                continue
            index[name] = file
            held[name] = gathered.detach().cpu().contiguous()
            if len(index) == len(files) or files[len(index)] != file:
                save_file(held, directory / file, metadata={"format": "pt", HEAD: NO_HEAD})
                held = {}
        if first and len(set(files)) > 1:
            listing = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
            (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2))

    def _shown(self, purpose: str) -> Iterator[tuple[str, Tensor]]:
        """Names of the plain model and tensors, split as the weights are."""
        tensors: Mapping[str, Tensor] = self.raw()
        if self._average and self._config.used_for in (purpose, "both"):
            tensors = {**tensors, **self.average()}
        with torch.no_grad():
            for raw_name, tensor in tensors.items():
                if name := plain_name(raw_name):
                    adapter = self._adapters.get(name)
                    if adapter is not None:
                        tensor = sharded_like(tensor, merged(tensor, adapter, tensors.__getitem__))
                    yield name, tensor


def _files(sizes: list[int]) -> list[str]:
    """The file that each tensor stands in; files of up to 4 GiB, one alone has the plain name."""
    numbers: list[int] = []
    number, filled = 1, 0
    for size in sizes:
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    if number == 1:
        return ["model.safetensors"] * len(sizes)
    return [f"model-{n:05d}-of-{number:05d}.safetensors" for n in numbers]

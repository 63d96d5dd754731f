"""What all that learns has in common: ranks and shards, weights, optimizer, version, and all of it kept.

    samples (the same on every rank) -> plan, pack -> this rank's micro-batches -> (a subclass) backward
    gradients summed over ranks -> clipped -> optimizer                       -> version + 1 for each batch

Shape suffixes: T = trained tokens of a micro-batch.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from arriero.components.adapters import trained
from arriero.components.descent import Descent
from arriero.components.losses import Aggregation, sequence_weights
from arriero.components.optimizer import SGD, AdamW, Muon
from arriero.components.packing import MicroBatch, pack, plan, read
from arriero.components.policy import save_description
from arriero.components.preparing import split
from arriero.components.sharding import local
from arriero.components.trained_weights import TrainedWeights
from arriero.components.training_options import TrainingOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arriero.components.forward import PackedForward
    from arriero.schemas.messages import Sample


class Kept(Protocol):
    """What a checkpoint is of. `version`: how many batches it has learned from."""

    version: int
    group: dist.ProcessGroup | None

    def checkpoint(self) -> dict[str, Tensor]:
        """Everything `restore` needs to go on bit for bit, as live tensors, `version` and `updates` too.

        What is split over ranks is a DTensor, as torch.distributed.checkpoint takes it.
        """
        ...

    def blank(self, updates: int) -> dict[str, Tensor]:
        """What `checkpoint` gives after so many updates, to be read into; the weights are the live ones."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `checkpoint` gave; ValueError naming the tensors that are missing."""
        ...


class Learner:
    """A model in training on any number of ranks: `version` is how many batches it has learned from.

    With a process `group` every rank calls everything together and with the same samples, trains its share
    of them and ends with the same weights, or with its part of them (`options.shards`). Parameters are
    float32; `options` say what the forward pass computes in, and all else that a step costs. `steps`: of the
    schedule of the optimizer.
    """

    def __init__(
        self,
        forward: PackedForward,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        optimizer: AdamW | SGD | Muon,
        steps: int,
        token_budget: int,
        options: TrainingOptions,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model: PreTrainedModel = forward.model
        self.tokenizer = tokenizer
        self.options = options
        self.group = group
        self.version: int = 0
        self._budget = token_budget
        shards = split(forward, options, ranks=self.ranks) if options.shards > 1 else None
        self.weights = TrainedWeights(self.model, options.average)
        self._arrive: Callable[[], None] = lambda: None
        self._descent = Descent(trained(self.model), optimizer, steps=steps, group=group, shards=shards)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def packed(
        self,
        samples: Sequence[Sample],
        aggregation: Aggregation = "token_mean",
        *,
        horizon: float = 0.0,
        together: int = 1,
    ) -> list[MicroBatch]:
        """This rank's share of `samples`, on its device, weighed so that it is one update."""
        counts = np.array([s.mask.sum() for s in samples], dtype=np.int64)
        weights = sequence_weights(counts, aggregation, horizon=horizon)
        layout = self.options.packing
        shares = plan(
            [read(s) for s in samples], token_budget=self._budget, ranks=self.ranks, layout=layout,
            together=together,
        )  # fmt: skip
        mine = shares[self.rank]
        return [pack(samples, m, weights, layout=layout, device=self.model.device) for m in mine]

    def state_dict_for_weights(self) -> dict[str, Tensor]:
        """Name -> tensor of the model as generators know it, what is published: DTensors of a split one.

        A tensor that several names share comes once. With adapters all ranks call it together.
        """
        return self.weights.plain("publish")

    def forget_gradients(self) -> None:
        """Give back the memory of the gradients; each update begins without any."""
        self._descent.clear()

    def before_moments(self, call: Callable[[], None]) -> None:
        """Have `call` called before anything but the weights is used: moments, averages."""
        self._arrive = call
        self._descent.before_optimizer(call)

    def save(self, directory: Path) -> None:
        """Write safetensors, config and tokenizer as they are loaded; every rank calls it."""
        self._arrive()
        self.weights.write(directory, first=self.rank == 0)
        if self.rank == 0:
            save_description(self.model, self.tokenizer, directory)

    def checkpoint(self) -> dict[str, Tensor]:
        """As `Kept`: weights, moments, version."""
        self._arrive()
        return self._own() | self._descent.checkpoint() | {"version": torch.tensor(self.version)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Kept`."""
        mine = self._own()
        own = mine.keys() | {"version"} | self._descent.wanted(tensors)
        if missing := sorted(own - tensors.keys()):
            raise ValueError(f"the checkpoint lacks {len(missing)} of {len(own)} tensors: {missing[:3]}")
        with torch.no_grad():
            for name, tensor in mine.items():
                local(tensor).copy_(local(tensors[name]))
        self._descent.restore(tensors)
        self.version = int(tensors["version"])

    def blank(self, updates: int) -> dict[str, Tensor]:
        """As `Kept`."""
        return self._own() | self._descent.blank(updates) | {"version": torch.tensor(0)}

    def _own(self) -> dict[str, Tensor]:
        """The weights and their average."""
        tensors = {f"model.{name}": t for name, t in self.weights.raw().items()}
        return tensors | {f"average.{name}": t for name, t in self.weights.average().items()}

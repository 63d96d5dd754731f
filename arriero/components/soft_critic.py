"""Two critics of turns in training, each with the slow copy of itself that its targets come from."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from arriero.components.losses import value_loss
from arriero.components.optimizer import AdamW
from arriero.components.preparing import prepared_scorer, split
from arriero.components.scoring_model import ScoringState, sample_scores
from arriero.components.sharding import local
from arriero.components.trained_weights import TrainedWeights
from arriero.components.training_options import Average, TrainingOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from transformers import PreTrainedModel

    from arriero.components.packing import PackedTokens
    from arriero.schemas.messages import Sample

Scores = npt.NDArray[np.float32]
_COUNTERS = ("version", "updates")
_SLOW = "slow."


class SoftCritic:
    """A scoring model and its slow copy, which follows by `tau` an update; `seed` draws a random head."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        seed: int,
        tau: float,
        optimizer: AdamW,
        steps: int,
        token_budget: int,
        options: TrainingOptions,
        group: dist.ProcessGroup | None,
    ) -> None:
        headed: Any = model  # the head has no common type
        weight: Tensor = headed.score.weight
        # Two heads of zeros would be one critic for ever.
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_(0.1 * noise / weight.shape[1] ** 0.5)
        slow = copy.deepcopy(model).requires_grad_(False)
        self.online = ScoringState(
            model, optimizer=optimizer, steps=steps, token_budget=token_budget, options=options, group=group
        )
        self._forward = prepared_scorer(slow, options)
        if options.shards > 1:
            split(self._forward, options, ranks=self.online.ranks)
        self._slow, self._tau, self._budget = TrainedWeights(slow, Average()), tau, token_budget

    def said(self, samples: Sequence[Sample]) -> list[Scores]:
        """What the copy makes of the trained tokens of each."""
        return sample_scores(self._forward, samples, token_budget=self._budget, group=self.online.group)

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One update towards what stands in the place of advantages, and a step of the copy."""
        metrics = self.online.step(samples, _squared_error)
        fast = self.online.weights.raw()
        with torch.no_grad():
            for name, held in self._slow.raw().items():
                local(held).lerp_(local(fast[name]), self._tau)
        return metrics

    def slow(self) -> dict[str, Tensor]:
        """Live tensors of the copy by name, split as they are."""
        return {f"{_SLOW}{name}": t for name, t in self._slow.raw().items()}


class DoubleCritic:
    """Two of them, kept together: what a checkpoint says of one stands behind its number."""

    def __init__(self, critics: tuple[SoftCritic, SoftCritic]) -> None:
        self.critics = critics
        self.group = critics[0].online.group
        self.version = 0

    def checkpoint(self) -> dict[str, Tensor]:
        """As `Kept`."""
        return self._together([c.online.checkpoint() | c.slow() for c in self.critics])

    def blank(self, updates: int) -> dict[str, Tensor]:
        """As `Kept`."""
        return self._together([c.online.blank(updates) | c.slow() for c in self.critics])

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Kept`."""
        counters = {name: tensors[name] for name in _COUNTERS}
        for number, critic in enumerate(self.critics):
            begin = f"{number}."
            critic.online.restore(
                {name.removeprefix(begin): t for name, t in tensors.items() if name.startswith(begin)}
                | counters
            )
            with torch.no_grad():
                for name, held in critic.slow().items():
                    local(held).copy_(local(tensors[begin + name]))
        self.version = int(tensors["version"])

    def _together(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found = {"version": torch.tensor(self.version), "updates": each[0]["updates"]}
        for number, tensors in enumerate(each):
            found |= {f"{number}.{name}": t for name, t in tensors.items() if name not in _COUNTERS}
        return found


def _squared_error(values_T: Tensor, tokens: PackedTokens) -> Tensor:
    return value_loss(values_T, tokens.advantages_T)

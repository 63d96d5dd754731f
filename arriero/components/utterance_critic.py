"""A critic of turns: what a conversation is worth before and after each turn of the policy.

    observation | turn 0 | observation | turn 1 |        one number for every beginning of a conversation
                V(0)     Q(0)          V(1)     Q(1)

A value is read where a conversation stands: in front of a turn it is that of the state, behind it that of the
turn in this state. So one scalar model is both V and Q.
Source: ArCHer, arXiv:2402.19446, section 3.2.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import on_tokens, utterance_td, utterances, whitened_tokens
from arriero.components.compute import ComputeThread, own_device
from arriero.components.losses import value_loss
from arriero.components.masked import on_mask
from arriero.components.model_directory import check_model_directory
from arriero.components.optimizer import AdamW
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class UtteranceCritic:
    """The batch with the advantage of its turn on every token: `min Q - min V` over two critics.

    For each batch it first takes `updates` updates on equal parts of `replayed`, each critic towards the
    one-step targets `r + gamma V(next turn)` for Q and Q for V, from a copy of itself that follows by `tau`
    an update (soft targets). After the last turn nothing comes, also where a conversation was cut off.
    `whiten`: the advantages of a batch have mean 0 and variance 1 over its tokens. The critics start from
    `model` with two random heads, and stay in this process.
    """

    model: str
    steps: PositiveInt
    optimizer: AdamW = field(default_factory=AdamW)
    gamma: float = Field(default=0.95, gt=0, le=1)
    tau: float = Field(default=0.1, gt=0, le=1)
    updates: PositiveInt = 4
    whiten: bool = True
    token_budget: PositiveInt = 8192
    computes: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.optimizer.problems(steps=self.steps * self.updates)
        if view.ranks > 1:
            yield f"ranks={view.ranks}: a critic is one process; its values are of whole batches"

    async def run(self, batches: Stream[Batch], replayed: Stream[Batch]) -> AsyncIterator[Batch]:
        with ComputeThread("utterance-critic") as compute:
            critics = await compute(self._load, current().seed)
            async for batch in batches:
                old = await replayed.next()
                if old is None or old.parents != (batch.id,):
                    raise RuntimeError(f"{batch.id} came without its replayed batch; feed both of one stream")
                for part in _parts(old.samples, self.updates):
                    for critic in critics:
                        await compute(critic.learn, part)
                judged = await compute(self._judged, critics, batch.samples)
                yield batch.model_copy(update={"samples": judged, "parents": (batch.id, old.id)})

    def _load(self, seed: int) -> tuple[_SoftCritic, ...]:
        return tuple(_SoftCritic(self, seed=2 * seed + number) for number in range(2))

    def _judged(self, critics: Sequence[_SoftCritic], samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        inputs = [read_turns(s) for s in samples]
        read = [[_values(v) for v in critic.online.values(inputs)] for critic in critics]
        advantages = [
            on_tokens(np.minimum(*(q for _, q in pair)) - np.minimum(*(v for v, _ in pair)), sample.mask)
            for sample, pair in zip(samples, zip(*read, strict=True), strict=True)
        ]
        if self.whiten:
            whitened = whitened_tokens([a[s.mask] for a, s in zip(advantages, samples, strict=True)])
            for advantage, sample, values in zip(advantages, samples, whitened, strict=True):
                advantage[sample.mask] = values
        return tuple(
            s.model_copy(update={"advantages": a.astype(np.float32)})
            for s, a in zip(samples, advantages, strict=True)
        )


class _SoftCritic:
    """A scoring model and the slow copy of it that its targets come from."""

    def __init__(self, config: UtteranceCritic, *, seed: int) -> None:
        import torch

        from arriero.components.scoring_model import ScoringState, load_scorer

        model: Any = load_scorer(config.model, device=own_device())[0]
        weight: Tensor = model.score.weight
        # Two heads of zeros would be one critic for ever.
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            weight.copy_(0.1 * noise / weight.shape[1] ** 0.5)
        self._gamma, self._tau, self._budget = config.gamma, config.tau, config.token_budget
        self._slow = copy.deepcopy(model)
        self.online = ScoringState(
            model, optimizer=config.optimizer, steps=config.steps * config.updates, token_budget=self._budget
        )

    def learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One update of the critic, and a step of its copy towards it."""
        import torch

        from arriero.components.scoring_model import sample_scores

        inputs = [read_turns(s) for s in samples]
        slow = sample_scores(self._slow, inputs, token_budget=self._budget)
        targets = [
            turn_targets(sample, *_values(v), gamma=self._gamma)
            for sample, v in zip(samples, slow, strict=True)
        ]
        told = [_with_targets(s, t) for s, t in zip(inputs, targets, strict=True)]
        metrics = self.online.step(told, _squared_error)
        with torch.no_grad():
            fast = self.online.model.parameters()
            for held, new in zip(self._slow.parameters(), fast, strict=True):
                held.lerp_(new, self._tau)
        return metrics


def read_turns(sample: Sample) -> Sample:
    """`sample` with a token more, and trained on are the first token of each turn and the one behind it.

    A value is read in front of the token that it stands at. ValueError for a turn with nothing before it.
    """
    turn_L = utterances(np.append(sample.mask, False))
    begins_L = (turn_L >= 0) & (np.append(-1, turn_L[:-1]) < 0)
    behind_L = (turn_L < 0) & (np.append(-1, turn_L[:-1]) >= 0)
    if begins_L[0]:
        raise ValueError(f"sample of {sample.group}: its first token was sampled, so no state comes before")
    length = len(turn_L)
    return Sample(
        group=sample.group, tokens=np.append(sample.tokens, np.int32(0)), mask=begins_L | behind_L,
        advantages=np.zeros(length, np.float32), origin=sample.origin,
    )  # fmt: skip


def turn_targets(sample: Sample, v_U: Floats, q_U: Floats, *, gamma: float) -> Floats:
    """Targets [2U] of V and Q in turn, from the values [U] of the slow copy.

    The reward of a sample whose turns aren't told apart belongs to its last turn.
    """
    rewards_U = np.zeros(len(v_U))
    if sample.turns:
        rewards_U += sample.turns
    else:
        rewards_U[-1:] += sample.reward
    target_U = utterance_td(rewards_U, v_U, gamma=gamma).targets
    return np.stack([q_U, target_U], axis=1).ravel()


def _values(read: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
    """V [U] and Q [U] out of what was read in turn."""
    both = read.astype(np.float64)
    return both[0::2], both[1::2]


def _with_targets(sample: Sample, targets: Floats) -> Sample:
    return sample.model_copy(update={"advantages": on_mask(sample.mask, targets, elsewhere=0.0)})


def _squared_error(values_T: Tensor, tokens: PackedTokens) -> Tensor:
    return value_loss(values_T, tokens.advantages_T)


def _parts(samples: tuple[Sample, ...], number: int) -> list[tuple[Sample, ...]]:
    """Up to `number` runs of samples, as equal as can be, none of them empty."""
    bounds = [round(i * len(samples) / number) for i in range(number + 1)]
    parts = [samples[a:b] for a, b in pairwise(bounds)]
    return [part for part in parts if any(s.mask.any() for s in part)]

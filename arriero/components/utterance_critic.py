"""A critic of turns: what a conversation is worth before and after each turn of the policy.

    observation | turn 0 | observation | turn 1 |        one number for every beginning of a conversation
                V(0)     Q(0)          V(1)     Q(1)

A value is read where a conversation stands: in front of a turn it is that of the state, behind it that of the
turn in this state. So one scalar model is both V and Q.
Source: ArCHer, arXiv:2402.19446, section 3.2.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import on_tokens, utterance_td, utterances, whitened_tokens
from arriero.components.checkpoints import Checkpointer, Checkpoints
from arriero.components.compute import ComputeThread, own_device
from arriero.components.masked import on_mask
from arriero.components.model_directory import check_model_directory
from arriero.components.optimizer import AdamW
from arriero.components.recovery import Recovery
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Sample

if TYPE_CHECKING:
    from arriero.components.soft_critic import DoubleCritic

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class UtteranceCritic:
    """The batch with the advantage of its turn on every token: `min Q - min V` over two critics.

    For each batch it first takes `updates` updates on equal parts of `replayed`, each critic towards the
    one-step targets `r + gamma V(next turn)` for Q and Q for V, from a copy of itself that follows by `tau`
    an update (soft targets). After the last turn nothing comes, also where a conversation was cut off.
    `whiten`: the advantages of a batch have mean 0 and variance 1 over its tokens. The critics start from
    `model` with two random heads, and stay in this process. `training`: how their updates are computed.
    """

    model: str
    steps: PositiveInt
    optimizer: AdamW = field(default_factory=AdamW)
    gamma: float = Field(default=0.95, gt=0, le=1)
    tau: float = Field(default=0.1, gt=0, le=1)
    updates: PositiveInt = 4
    whiten: bool = True
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    computes: ClassVar[bool] = True

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        return self.checkpoints.place(run_dir, run_id, node)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.optimizer.problems(steps=self.steps * self.updates)
        yield from self.checkpoints.problems()
        yield from self.training.scorer_problems(ranks=view.ranks, optimizer=self.optimizer.kind, saved=False)

    async def run(self, batches: Stream[Batch], replayed: Stream[Batch]) -> AsyncIterator[Batch]:
        context = current()
        with ComputeThread("utterance-critic") as compute:
            state = await compute(self._load, context.ranks, context.seed)
            checkpoint = await compute(Checkpointer, state, self.checkpoints, context)
            learn = partial(self._learn, state)
            past = await compute(Recovery, state, self.checkpoints, context, checkpoint.ranks, learn)
            await compute(past.catch_up)
            async for batch in batches:
                old = await replayed.next()
                if old is None or old.parents != (batch.id,):
                    raise RuntimeError(f"{batch.id} came without its replayed batch; feed both of one stream")
                await compute(learn, batch, old)
                judged = await compute(self._judged, state, batch.samples)
                yield batch.model_copy(update={"samples": judged, "parents": (batch.id, old.id)})
                await compute(checkpoint)
            await compute(checkpoint.close, last=True)

    def _load(self, ranks: int, seed: int) -> DoubleCritic:
        import torch.distributed as dist

        from arriero.components.scoring_model import load_scorer
        from arriero.components.soft_critic import DoubleCritic, SoftCritic

        def critic(number: int) -> SoftCritic:
            return SoftCritic(
                load_scorer(self.model, device=own_device())[0], seed=2 * seed + number, tau=self.tau,
                optimizer=self.optimizer, steps=self.steps * self.updates, token_budget=self.token_budget,
                options=self.training, group=dist.group.WORLD if ranks > 1 else None,
            )  # fmt: skip

        return DoubleCritic((critic(0), critic(1)))

    def _learn(self, state: DoubleCritic, batch: Batch, replayed: Batch) -> None:
        """Of `batch` itself nothing: it is judged by what has been learned."""
        del batch
        for part in _parts(replayed.samples, self.updates):
            inputs = [read_turns(s) for s in part]
            for critic in state.critics:
                slow = [_values(v) for v in critic.said(inputs)]
                targets = [turn_targets(s, *v, gamma=self.gamma) for s, v in zip(part, slow, strict=True)]
                critic.learn([_with_targets(s, t) for s, t in zip(inputs, targets, strict=True)])
        state.version += 1

    def _judged(self, state: DoubleCritic, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        inputs = [read_turns(s) for s in samples]
        read = [[_values(v) for v in critic.online.values(inputs)] for critic in state.critics]
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


def _parts(samples: tuple[Sample, ...], number: int) -> list[tuple[Sample, ...]]:
    """Up to `number` runs of samples, as equal as can be, none of them empty."""
    bounds = [round(i * len(samples) / number) for i in range(number + 1)]
    parts = [samples[a:b] for a, b in pairwise(bounds)]
    return [part for part in parts if any(s.mask.any() for s in part)]

"""Reward models: trained on pairs of responses, and used as a reward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.checkpoints import Checkpoints
from arriero.components.compute import ComputeThread, own_device
from arriero.components.losses import bradley_terry_loss
from arriero.components.losses.loss import PerSequence
from arriero.components.model_directory import (
    HasModel,
    check_model_directory,
    vocabulary_problem,
    weight_shapes,
)
from arriero.components.optimizer import AdamW
from arriero.components.placement import DevicePlacement, Devices
from arriero.components.publisher import WeightPlane
from arriero.components.training_options import TrainingOptions
from arriero.components.versions import versions
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Outcome, RolloutGroup, Sample, Score, ScoredGroup, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.forward import ScoreForward
    from arriero.components.packing import PackedTokens
    from arriero.components.scoring_model import ScoringState

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardTrainer:
    """Trains `model` with a new head to score the chosen response of each pair above the rejected one.

    Batches are pairs side by side, see `PreferenceBatch`. Saved under `model/` of the run directory as a
    sequence-classification model of one label. Metrics: loss, and the share of pairs ranked right before the
    update. Source: Bradley-Terry, as in arXiv:2203.02155.
    """

    model: str
    steps: PositiveInt
    optimizer: AdamW = field(default_factory=AdamW)
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        return self.checkpoints.place(run_dir, run_id, node)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.optimizer.problems(steps=self.steps)
        yield from self.checkpoints.problems()
        yield from self.training.scorer_problems(ranks=view.ranks, optimizer=self.optimizer.kind, saved=True)

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        context = current()
        with (
            ComputeThread("reward-trainer") as thread,
            closing(Devices(thread, DevicePlacement(), context, alone=True)) as compute,
        ):
            state = await compute(self._load, context.ranks)
            made = versions(
                state, partial(_step, state), batches, compute, context, steps=self.steps,
                checkpoints=self.checkpoints, plane=WeightPlane(), judge=lambda measured, version: None,
                save=True,
            )  # fmt: skip
            async for weights in made:
                yield weights

    def _load(self, ranks: int) -> ScoringState:
        import torch.distributed as dist

        from arriero.components.scoring_model import ScoringState, load_scorer

        model, tokenizer = load_scorer(self.model, device=own_device())
        return ScoringState(
            model, tokenizer, optimizer=self.optimizer, steps=self.steps, token_budget=self.token_budget,
            together=2, options=self.training, group=dist.group.WORLD if ranks > 1 else None,
        )  # fmt: skip


def _step(state: ScoringState, batch: Batch) -> dict[str, float]:
    from arriero.components.scoring_model import read_at_the_end

    samples = [read_at_the_end(s) for s in batch.samples]
    score_S = np.concatenate(state.values(samples))
    metrics = state.step(samples, _pair_losses)
    state.version += 1
    return metrics | {"accuracy": float((score_S[0::2] > score_S[1::2]).mean())}


def _pair_losses(score_T: Tensor, tokens: PackedTokens) -> Tensor:
    """The loss of its pair for each of two scores; the mean over scores is that over pairs."""
    pairs = PerSequence(tokens.sequence_T // 2)
    margin_P = pairs.sum(tokens.advantages_T.sign() * score_T)
    return pairs.spread(bradley_terry_loss(margin_P, margin_P.new_zeros(())))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModel:
    """The score of a trained reward model, in the directory `model`, as the reward of each rollout.

    It reads the tokens that were sampled, so it must have the policy's tokenizer. Every score is a verdict. A
    directory of a language model, which has no head to score with, is refused.
    """

    model: str
    token_budget: PositiveInt = 8192
    computes: ClassVar[bool] = True

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        readers = view.upstream(HasModel)  # type: ignore[type-abstract]  # an instance check needs no class
        for first in readers[:1]:  # it gives or tokenises the responses
            yield from vocabulary_problem(self.model, first.model)
        shapes = weight_shapes(self.model)
        if shapes and shapes.get("score.weight", (0,))[0] != 1:
            yield (
                f"model {self.model} has no head of one score (score.weight): every response is alike to it; "
                "train one with the pipeline reward_model"
            )

    async def run(self, rollouts: Stream[RolloutGroup]) -> AsyncIterator[ScoredGroup]:
        with ComputeThread("reward-model") as compute:
            forward = await compute(self._load)
            async for group in rollouts:
                yield await compute(self._score, forward, group)

    def _load(self) -> ScoreForward:
        from arriero.components.forward import ScoreForward
        from arriero.components.scoring_model import load_scorer

        return ScoreForward(load_scorer(self.model, device=own_device())[0])

    def _score(self, forward: ScoreForward, group: RolloutGroup) -> ScoredGroup:
        from arriero.components.scoring_model import read_at_the_end, sample_scores

        samples = [
            Sample(group="", tokens=r.tokens, mask=r.mask, advantages=np.zeros(len(r.tokens), np.float32))
            for r in group.rollouts
        ]
        read = [read_at_the_end(s) for s in samples]
        values = sample_scores(forward, read, token_budget=self.token_budget)
        scores = tuple(Score(value=float(v[0]), outcome=Outcome.OK) for v in values)
        return ScoredGroup(group=group, scores=scores)

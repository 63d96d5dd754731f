"""Reward models: trained on pairs of responses, and used as a reward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

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
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Outcome, RolloutGroup, Sample, Score, ScoredGroup, Weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.optimizer.problems(steps=self.steps)

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        context = current()
        with ComputeThread("reward-trainer") as compute:
            state, tokenizer = await compute(self._load, context.ranks)
            yield Weights(version=0)
            async for batch in batches:
                metrics = await compute(self._step, state, batch)
                yield Weights(version=state.version, metrics=metrics)
                if state.version == self.steps:
                    break
            if context.rank == 0:
                parts: tuple[Any, Any] = (state.model, tokenizer)  # `save_pretrained` is partly untyped
                for part in parts:
                    await compute(part.save_pretrained, context.run_dir / "model")

    def _load(self, ranks: int) -> tuple[ScoringState, PreTrainedTokenizerBase]:
        import torch.distributed as dist

        from arriero.components.scoring_model import ScoringState, load_scorer

        model, tokenizer = load_scorer(self.model, device=own_device())
        state = ScoringState(
            model, optimizer=self.optimizer, steps=self.steps, token_budget=self.token_budget, together=2,
            group=dist.group.WORLD if ranks > 1 else None,
        )  # fmt: skip
        return state, tokenizer

    def _step(self, state: ScoringState, batch: Batch) -> dict[str, float]:
        from arriero.components.scoring_model import read_at_the_end

        samples = [read_at_the_end(s) for s in batch.samples]
        score_S = np.concatenate(state.values(samples))
        metrics = state.step(samples, _pair_losses)
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
            model = await compute(self._load)
            async for group in rollouts:
                yield await compute(self._score, model, group)

    def _load(self) -> PreTrainedModel:
        from arriero.components.scoring_model import load_scorer

        return load_scorer(self.model, device=own_device())[0]

    def _score(self, model: PreTrainedModel, group: RolloutGroup) -> ScoredGroup:
        from arriero.components.scoring_model import read_at_the_end, sample_scores

        samples = [
            Sample(group="", tokens=r.tokens, mask=r.mask, advantages=np.zeros(len(r.tokens), np.float32))
            for r in group.rollouts
        ]
        read = [read_at_the_end(s) for s in samples]
        values = sample_scores(model, read, token_budget=self.token_budget)
        scores = tuple(Score(value=float(v[0]), outcome=Outcome.OK) for v in values)
        return ScoredGroup(group=group, scores=scores)

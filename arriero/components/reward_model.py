"""Reward models: trained on pairs of responses, and used as a reward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.components.losses import bradley_terry_loss
from arriero.components.losses.loss import PerSequence
from arriero.components.model_directory import check_model_directory
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

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        context = current()
        with ComputeThread("reward-trainer") as compute:
            state, tokenizer = await compute(self._load)
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

    def _load(self) -> tuple[ScoringState, PreTrainedTokenizerBase]:
        import torch
        import torch.distributed as dist

        from arriero.components.scoring_model import ScoringState, load_scorer

        model, tokenizer = load_scorer(self.model, device="cuda" if torch.cuda.is_available() else "cpu")
        state = ScoringState(
            model, optimizer=self.optimizer, steps=self.steps, token_budget=self.token_budget, together=2,
            group=dist.group.WORLD if dist.is_initialized() else None,
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

    It reads the tokens that were sampled, so it must have the policy's tokenizer. Every score is a verdict.
    """

    model: str
    token_budget: PositiveInt = 8192
    computes: ClassVar[bool] = True

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)

    async def run(self, rollouts: Stream[RolloutGroup]) -> AsyncIterator[ScoredGroup]:
        with ComputeThread("reward-model") as compute:
            state = await compute(self._load)
            async for group in rollouts:
                yield await compute(self._score, state, group)

    def _load(self) -> ScoringState:
        import torch

        from arriero.components.scoring_model import ScoringState, load_scorer

        model: PreTrainedModel
        model, _ = load_scorer(self.model, device="cuda" if torch.cuda.is_available() else "cpu")
        return ScoringState(model, optimizer=AdamW(), steps=1, token_budget=self.token_budget)

    def _score(self, state: ScoringState, group: RolloutGroup) -> ScoredGroup:
        from arriero.components.scoring_model import read_at_the_end

        samples = [
            Sample(group="", tokens=r.tokens, mask=r.mask, advantages=np.zeros(len(r.tokens), np.float32))
            for r in group.rollouts
        ]
        values = state.values([read_at_the_end(s) for s in samples])
        scores = tuple(Score(value=float(v[0]), outcome=Outcome.OK) for v in values)
        return ScoredGroup(group=group, scores=scores)

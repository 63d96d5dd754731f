"""The critic: values of tokens, the advantages that follow from them, and its own training."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import Estimate, gae, vtrace, whitened_tokens
from arriero.components.checkpoints import Checkpointer, Checkpoints
from arriero.components.compute import ComputeThread, own_device
from arriero.components.losses import MAX_LOG_RATIO, value_loss
from arriero.components.masked import on_mask
from arriero.components.model_directory import check_model_directory
from arriero.components.optimizer import AdamW
from arriero.components.policy_logprobs import PolicyLogprobs
from arriero.components.recovery import Recovery
from arriero.components.reference import ReferenceLogprobs
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import GraphView
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens
    from arriero.components.scoring_model import ScoringState

Values = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VTraceClips:
    """Where ratios are cut: `rho` decides whose values are learned, `c` how far corrections reach back."""

    rho: PositiveFloat = 1.0
    c: PositiveFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Critic:
    """The batch with generalised advantages (`gamma`, `lam`) of its tokens, whitened over the batch.

    The reward of a sample is earned by its last sampled token, `-kl * log(mu/ref)` by each, from the
    behaviour and the reference log-probabilities. Values come from the critic before it trains on the batch,
    which it does after giving it on: `epochs` updates on the returns, values held within `clip` of those
    before. Tokens of observations are skipped. A response that was cut off counts as ended, for its reward is
    of what there is; with `bootstrap` it goes on with the value after its last token. The schedule of the
    optimizer is over all updates.

    With `vtrace` both are V-trace's instead: of the policy that the batch is about to train, which a
    `PolicyLogprobs` before it has read, from what an older one sampled. An advantage isn't weighed by its
    ratio then, for the loss does that; the price `kl` is of that policy. `whiten`: whether advantages are.

    It starts from `model`, with a head that gives 0. `training`: how its updates are computed.
    Source: PPO as in arXiv:2203.02155 and 2009.01325.
    """

    model: str
    steps: PositiveInt
    optimizer: AdamW = field(default_factory=AdamW)
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    kl: NonNegativeFloat = 0.0
    clip: PositiveFloat = 0.2
    epochs: PositiveInt = 1
    bootstrap: bool = False
    vtrace: VTraceClips | None = None
    whiten: bool = True
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    computes: ClassVar[bool] = True

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        return self.checkpoints.place(run_dir, run_id, node)

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from check_model_directory(self.model)
        yield from self.optimizer.problems(steps=self.steps * self.epochs)
        if self.kl and not view.upstream(ReferenceLogprobs):
            yield f"kl={self.kl} needs reference log-probabilities; put a ReferenceLogprobs before the critic"
        read = bool(view.upstream(PolicyLogprobs))
        if self.vtrace and not read:
            yield "vtrace needs log-probabilities of the policy; put a PolicyLogprobs before the critic"
        if read and not self.vtrace:
            yield "what PolicyLogprobs reads is of use to vtrace alone; set it, or leave that node out"
        yield from self.checkpoints.problems()
        yield from self.training.scorer_problems(ranks=view.ranks, optimizer=self.optimizer.kind, saved=False)

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Batch]:
        context = current()
        with ComputeThread("critic") as compute:
            state = await compute(self._load, context.ranks)
            checkpoint = await compute(Checkpointer, state, self.checkpoints, context)
            learn = partial(self._learn, state)
            past = await compute(Recovery, state, self.checkpoints, context, checkpoint.ranks, learn)
            await compute(past.catch_up)
            async for batch in batches:
                values, found = await compute(self._judge, state, batch.samples)
                advantages = [f.advantages for f in found]
                yield _with_advantages(batch, whitened_tokens(advantages) if self.whiten else advantages)
                await compute(self._train, state, batch.samples, values, found)
                await compute(checkpoint)
            await compute(checkpoint.close, last=True)

    def _load(self, ranks: int) -> ScoringState:
        import torch.distributed as dist

        from arriero.components.scoring_model import ScoringState, load_scorer

        model, _ = load_scorer(self.model, device=own_device())
        return ScoringState(
            model, optimizer=self.optimizer, steps=self.steps * self.epochs, token_budget=self.token_budget,
            options=self.training, group=dist.group.WORLD if ranks > 1 else None,
        )  # fmt: skip

    def _learn(self, state: ScoringState, batch: Batch) -> None:
        """A step that was taken before, once more."""
        self._train(state, batch.samples, *self._judge(state, batch.samples))

    def _judge(self, state: ScoringState, samples: tuple[Sample, ...]) -> tuple[Values, list[Estimate]]:
        values, after = state.values(samples), self._after(state, samples)
        return values, [self._estimate(*each) for each in zip(samples, values, after, strict=True)]

    def _after(self, state: ScoringState, samples: tuple[Sample, ...]) -> list[float]:
        """The value of what would have come after each sample."""
        from arriero.components.scoring_model import read_at_the_end

        cut = [i for i, s in enumerate(samples) if s.truncated and self.bootstrap]
        values = state.values([read_at_the_end(samples[i]) for i in cut]) if cut else []
        after = [0.0] * len(samples)
        for i, value in zip(cut, values, strict=True):
            after[i] = float(value[0])
        return after

    def _estimate(self, sample: Sample, values: npt.NDArray[np.float32], after: float) -> Estimate:
        """Targets and advantages of the sampled tokens."""
        said = sample.policy if self.vtrace else sample.logprobs
        rewards = np.zeros(len(values))
        if self.kl:
            assert said is not None
            assert sample.reference is not None
            rewards -= self.kl * (said - sample.reference)[sample.mask]
        rewards[-1:] += sample.reward
        if self.vtrace is None:
            advantages = gae(rewards, values, gamma=self.gamma, lam=self.lam, bootstrap=after)
            return Estimate(targets=values + advantages, advantages=advantages)
        assert said is not None
        assert sample.logprobs is not None
        log_ratios = (said - sample.logprobs)[sample.mask].astype(np.float64)
        return vtrace(
            rewards, values, np.exp(np.minimum(log_ratios, MAX_LOG_RATIO)), gamma=self.gamma, lam=self.lam,
            bootstrap=after, clip_rho=self.vtrace.rho, clip_c=self.vtrace.c, clip_advantage=None,
        )  # fmt: skip

    def _train(
        self, state: ScoringState, samples: tuple[Sample, ...], values: Values, found: list[Estimate]
    ) -> None:
        """The targets stand in the place of advantages, the values before in that of a reference."""
        targets = [
            Sample(
                group=s.group, tokens=s.tokens, mask=s.mask,
                advantages=on_mask(s.mask, f.targets, elsewhere=0.0),
                reference=on_mask(s.mask, v, elsewhere=np.nan),
            )
            for s, v, f in zip(samples, values, found, strict=True)
        ]  # fmt: skip
        for _ in range(self.epochs):
            state.step(targets, self._value_losses)
        state.version += 1

    def _value_losses(self, values_T: Tensor, tokens: PackedTokens) -> Tensor:
        return value_loss(values_T, tokens.advantages_T, old_values_T=tokens.reference_T, clip=self.clip)


def _with_advantages(batch: Batch, advantages: list[npt.NDArray[np.float64]]) -> Batch:
    samples = tuple(
        s.model_copy(update={"advantages": on_mask(s.mask, a, elsewhere=0.0), "policy": None})
        for s, a in zip(batch.samples, advantages, strict=True)
    )
    return batch.model_copy(update={"samples": samples, "parents": (batch.id,)})

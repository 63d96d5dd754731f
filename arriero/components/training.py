"""A step on one batch, on any number of ranks; no runtime, no event loop.

    batch (the same on every rank) -> minibatches -> this rank's micro-batches of each
          -> sum of w_t * l_t, backward -> gradients and measures summed over ranks -> optimizer
    all of them, `epochs` times -> version + 1

Shape suffixes: B = rows, L = positions, V = vocabulary, T = trained tokens of a micro-batch.
An update is all or nothing: what can be wrong with a batch, a loss or a gradient raises before weights move.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from arriero.components.comparing import Taught
from arriero.components.forward import Predicted
from arriero.components.learner import Learner
from arriero.components.losses import Aggregation, Bounded, Comparing, Loss, facts, reference
from arriero.components.measures import Measures, over_updates, reward_spread
from arriero.components.optimizer import SGD, AdamW, Muon
from arriero.components.packing import MicroBatch, check_samples
from arriero.components.policy import load_policy
from arriero.components.preparing import prepared, prepared_teacher
from arriero.components.training_options import TrainingOptions

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arriero.schemas.messages import Batch, Sample

__all__ = ["TrainState", "load_policy"]

_DEFAULTS = TrainingOptions()


class TrainState(Learner):
    """A policy in training: `version` is the number of batches that made its weights, one `step` each.

    A step takes an update on each of `minibatches` equal parts of the batch, `epochs` times; by default one
    update on the whole. `mismatch_bound` is that of `Measures`; None if no sample comes from these weights,
    whatever version it names. `teacher`, of the same vocabulary, is what a loss that needs a divergence
    compares with; it is changed in place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        loss: Loss,
        optimizer: AdamW | SGD | Muon,
        steps: int,
        token_budget: int = 8192,
        aggregation: Aggregation = "token_mean",
        horizon: float = 0,
        minibatches: int = 1,
        epochs: int = 1,
        options: TrainingOptions = _DEFAULTS,
        group: dist.ProcessGroup | None = None,
        mismatch_bound: float | None = 0.5,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        model.train(False)  # dropout would make the policy another one than the generator's
        forward = prepared(model, options)
        ranks = 1 if group is None else group.size()
        self._teacher = None if teacher is None else prepared_teacher(teacher, options, ranks=ranks)
        super().__init__(
            forward, tokenizer, optimizer=optimizer, steps=steps, token_budget=token_budget, options=options,
            group=group,
        )  # fmt: skip
        self._forward = forward
        self.loss = loss
        self._facts = facts(loss)
        self._aggregation: tuple[Aggregation, float] = (aggregation, horizon)
        self._updates = (minibatches, epochs)
        self._mismatch_bound = mismatch_bound
        # A vector of one, as checkpoints hold it; the same on all ranks.
        self._multiplier = torch.tensor(
            [loss.multiplier] if isinstance(loss, Bounded) else [], dtype=torch.float64
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` once; measures of the step, the same on every rank.

        ValueError for a batch that can't be trained on; the weights are then as before. FloatingPointError
        for a loss or gradient that isn't finite; that update isn't taken.
        """
        minibatches, epochs = self._updates
        off_policy = all(s.logprobs is not None for s in batch.samples)
        self._check(batch)
        batch, mismatched = _apart(batch)
        parts = [self.micro_batches(part) for part in _parts(batch, minibatches, self._facts.together)]
        if "proximal" in self._facts.needs and len(parts) * epochs > 1:
            parts = [[self._with_proximal(micro) for micro in micros] for micros in parts]
        digest = _digest(batch.samples)
        beside = self.micro_batches(mismatched, ("sequence_sum", 0)) if mismatched.samples else []
        metrics = over_updates(
            [
                self._update(micros, beside, off_policy=off_policy, digest=digest, first=not (epoch or part))
                for epoch in range(epochs)
                for part, micros in enumerate(parts)
            ]
        )
        self.version += 1
        judged = [s.reward for s in batch.samples if s.judged]
        if off_policy and judged:
            metrics["reward"] = float(np.mean(judged))
            metrics["reward_std"] = reward_spread(batch.samples)
        return metrics

    def micro_batches(
        self, batch: Batch, aggregation: tuple[Aggregation, float] | None = None
    ) -> list[MicroBatch]:
        """This rank's share of `batch`, on its device, weighed so that it is one update."""
        how, horizon = aggregation or self._aggregation
        return self.packed(batch.samples, how, horizon=horizon, together=self._facts.together)

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [T] of the trained tokens under the weights of now."""
        logprobs_T, entropy_T, _ = self._predicted(micro, None)
        return logprobs_T, entropy_T

    def _predicted(self, micro: MicroBatch, taught: Taught | None) -> Predicted:
        untyped: Any = self._forward  # calling a module isn't typed
        found: Predicted = untyped(micro, entropy_gradient="entropy" in self._facts.needs, taught=taught)
        return found

    def _taught(self, micro: MicroBatch) -> Taught | None:
        """What the teacher makes of the same tokens; None without one."""
        if self._teacher is None or not isinstance(self.loss, Comparing):
            return None
        return Taught(hidden_TG=self._teacher(micro), linear=self._teacher.linear, between=self.loss.between)

    def _own(self) -> dict[str, Tensor]:
        """And what a loss has learned."""
        return super()._own() | ({"loss.multiplier": self._multiplier} if len(self._multiplier) else {})

    def _check(self, batch: Batch) -> None:
        """ValueError for a batch that can't be trained on."""
        samples = batch.samples
        config = self.model.config
        check_samples(
            samples,
            context=getattr(config, "max_position_embeddings", None),
            vocabulary=getattr(config, "vocab_size", None),
        )
        name = type(self.loss).__name__
        if self.loss.needs_behaviour and (bare := sorted({s.group for s in samples if s.logprobs is None})):
            raise ValueError(f"{name} needs log-probabilities; the samples of {bare} have none")
        unread = sorted({s.group for s in samples if s.reference is None})
        if "reference" in self._facts.needs and unread:
            raise ValueError(f"{name} needs reference log-probabilities; the samples of {unread} have none")
        if "kl_baseline" not in self._facts.needs and (odd := sum(s.mismatched for s in samples)):
            raise ValueError(f"{odd} responses are mismatched, which {name} doesn't read")
        if not any(s.mask.any() and not s.mismatched for s in samples):
            raise ValueError("trained tokens = 0 in the whole batch: every mask is empty")

    def _with_proximal(self, micro: MicroBatch) -> MicroBatch:
        with torch.no_grad():
            logprobs_T, _ = self.logprobs(micro)
        return replace(micro, tokens=replace(micro.tokens, proximal_T=logprobs_T))

    def _update(
        self,
        micros: Sequence[MicroBatch],
        beside: Sequence[MicroBatch],
        *,
        off_policy: bool,
        digest: int,
        first: bool,
    ) -> dict[str, float]:
        """One optimizer update on all `micros` of all ranks, and its measures; `beside` is read before it."""
        bound = self._mismatch_bound
        fresh = self.version if first and bound is not None else None
        measures = Measures(self.model.device, off_policy=off_policy, fresh=fresh, bound=bound or 0.0)
        self._descent.clear()
        kl_baseline = self._kl_baseline(beside) if "kl_baseline" in self._facts.needs else None
        for micro in micros:
            found = self._predicted(micro, self._taught(micro))
            logprobs_T, entropy_T = found.logprobs_T, found.entropy_T
            micro = self._completed(micro, found, kl_baseline)
            loss = self._weighted(logprobs_T, micro)
            torch.autograd.backward(loss)
            with torch.no_grad():
                clipped_T = self.loss.clipped(logprobs_T, micro.tokens)
                measures.add(loss, logprobs_T, entropy_T, micro.tokens, clipped_T)
        metrics = measures.totals(self.group, digest=digest)
        metrics |= self._descent.update(metrics["loss"], version=self.version)
        self.weights.updated()
        if kl_baseline is not None:
            metrics["kl_baseline"] = kl_baseline
        if isinstance(self.loss, Bounded):
            metrics["multiplier"] = float(self._multiplier)
            self._multiplier.fill_(self.loss.relearned(metrics["multiplier"], metrics["kl"]))
        return metrics

    @torch.no_grad()
    def _kl_baseline(self, micros: Sequence[MicroBatch]) -> float:
        """Mean over responses of log(pi/ref), at least 0; the same on all ranks, 0 without a response."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for micro in micros:
            logprobs_T, _ = self.logprobs(micro)
            if len(logprobs_T):  # a dummy has no reference
                total += ((logprobs_T - reference(micro.tokens)) * micro.tokens.weights_T).double().sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return max(0.0, float(total))

    def _completed(self, micro: MicroBatch, found: Predicted, kl_baseline: float | None) -> MicroBatch:
        """With what the forward pass itself gives to a loss that needs it."""
        tokens, needs = micro.tokens, self._facts.needs
        if "entropy" in needs:
            tokens = replace(tokens, entropy_T=found.entropy_T)
        if "divergence" in needs:
            tokens = replace(tokens, divergence_T=found.divergence_T)
        if "proximal" in needs and tokens.proximal_T is None:  # the only update: nothing has moved yet
            tokens = replace(tokens, proximal_T=found.logprobs_T.detach())
        if "multiplier" in needs:
            tokens = replace(tokens, multiplier=float(self._multiplier))
        if kl_baseline is not None:
            tokens = replace(tokens, kl_baseline=kl_baseline)
        return replace(micro, tokens=tokens)

    def _weighted(self, logprobs_T: Tensor, micro: MicroBatch) -> Tensor:
        losses_T = self.loss(logprobs_T, micro.tokens)
        if losses_T.shape != logprobs_T.shape:
            raise TypeError(
                f"{type(self.loss).__name__} gave {tuple(losses_T.shape)} for {len(logprobs_T)} tokens: "
                "a loss is per token, aggregation is apart"
            )
        return (losses_T * micro.tokens.weights_T).sum()


def _apart(batch: Batch) -> tuple[Batch, Batch]:
    """What is trained on, and the mismatched responses."""
    if not any(s.mismatched for s in batch.samples):
        return batch, batch.model_copy(update={"samples": ()})
    trained, read = (tuple(s for s in batch.samples if s.mismatched == odd) for odd in (False, True))
    return batch.model_copy(update={"samples": trained}), batch.model_copy(update={"samples": read})


def _parts(batch: Batch, minibatches: int, together: int) -> list[Batch]:
    """At most `minibatches` runs of samples, as equal as can be, each with something to train on."""
    terms = len(batch.samples) // together
    bounds = [round(i * terms / minibatches) * together for i in range(minibatches)] + [len(batch.samples)]
    parts = [batch.samples[begin:end] for begin, end in pairwise(bounds)]
    return [batch.model_copy(update={"samples": part}) for part in parts if any(s.mask.any() for s in part)]


def _digest(samples: Iterable[Sample]) -> int:
    """CRC-32 of the tokens, to notice ranks that were given different batches."""
    digest = 0
    for s in samples:
        digest = zlib.crc32(s.tokens.tobytes(), digest)
    return digest

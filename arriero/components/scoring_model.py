"""A model that gives numbers instead of tokens: a critic's values, or a reward model's scores.

It is a sequence-classification model of one label in Hugging Face format, whose head is read where we say and
not at the last token that isn't padding: an end of sequence that is also the padding can't move it.

Shape suffixes: T = trained tokens of a micro-batch.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from arriero.components.forward import ScoreForward
from arriero.components.learner import Learner
from arriero.components.model_directory import loading
from arriero.components.optimizer import AdamW
from arriero.components.packing import PackedTokens, check_samples, pack, plan, read
from arriero.components.policy import check_directory, load_tokenizer
from arriero.components.preparing import prepared_scorer
from arriero.components.training_options import TrainingOptions
from arriero.engine.errors import UserError
from arriero.schemas.messages import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DEFAULTS = TrainingOptions()
Objective = Callable[["Tensor", PackedTokens], "Tensor"]


def load_scorer(
    path: Path | str, *, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model with a head of one number, and tokenizer, from a model directory, in evaluation mode.

    A directory of a language model has no such head: a new one that gives 0 everywhere is put on it.
    UserError, naming the directory and what it lacks, if it isn't a model directory or can't be loaded.
    """
    directory = check_directory(path)
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    untyped: tuple[Any, Any] = (logging, AutoModelForSequenceClassification)  # annotated only in part
    logs, auto = untyped
    logs.disable_progress_bar()
    with loading(directory):
        verbosity = logs.get_verbosity()  # one for all threads; `loading` lets in one
        logs.set_verbosity_error()  # it warns of a new head, which is meant
        try:
            model, info = auto.from_pretrained(
                directory, num_labels=1, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                local_files_only=True, output_loading_info=True,
            )  # fmt: skip
        finally:
            logs.set_verbosity(verbosity)
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise UserError(
            f"model {path}: {type(model).__name__} has no Linear `score`; take a decoder-only model"
        )
    if any("score" in name for name in info["missing_keys"]):
        torch.nn.init.zeros_(model.score.weight)
    torch.nn.Module.to(model, device)
    model.train(False)
    scorer: PreTrainedModel = model
    return scorer, load_tokenizer(directory)


def read_at_the_end(sample: Sample) -> Sample:
    """`sample` with one token more, the only trained one: its score is that of the whole sequence."""
    mask = np.append(np.zeros(len(sample.tokens), np.bool_), True)
    tokens = np.append(sample.tokens, np.int32(0))
    advantage = sample.advantages[sample.mask][:1] if sample.mask.any() else np.zeros(1, np.float32)
    return Sample(
        group=sample.group, tokens=tokens, mask=mask, origin=sample.origin,
        advantages=np.where(mask, advantage, np.float32(0)).astype(np.float32),
    )  # fmt: skip


def sample_scores(
    forward: ScoreForward,
    samples: Sequence[Sample],
    *,
    token_budget: int,
    group: dist.ProcessGroup | None = None,
) -> list[npt.NDArray[np.float32]]:
    """The scores of each sample's trained tokens, in micro-batches of up to `token_budget` tokens.

    With a `group` its ranks share the samples, and each has the scores of all.
    """
    _check(forward.model, samples)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    shares = plan([read(s) for s in samples], token_budget=token_budget, ranks=ranks, layout=forward.layout)
    counts = [int(s.mask.sum()) for s in samples]
    found = [np.zeros(n, np.float32) for n in counts]
    for indices in shares[rank]:
        micro = pack(
            samples, indices, np.ones(len(samples)), layout=forward.layout, device=forward.model.device
        )
        with torch.no_grad():
            score_T: Tensor = forward(micro)
        ends = np.cumsum([counts[i] for i in indices])[:-1]
        for i, part in zip(indices, np.split(score_T.cpu().numpy(), ends), strict=False):  # a dummy has none
            found[i] = part
    if group is not None and samples:
        # Of each score all ranks but one have 0, so that the sum is the score itself.
        together = torch.from_numpy(np.concatenate(found)).to(forward.model.device)
        dist.all_reduce(together, group=group)
        found = np.split(together.cpu().numpy(), np.cumsum(counts)[:-1])
    return found


class ScoringState(Learner):
    """A scoring model in training. `version` is for whoever says what a batch is to count."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        optimizer: AdamW,
        steps: int,
        token_budget: int,
        together: int = 1,
        options: TrainingOptions = _DEFAULTS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        forward = prepared_scorer(model, options)
        super().__init__(
            forward, tokenizer, optimizer=optimizer, steps=steps, token_budget=token_budget, options=options,
            group=group,
        )  # fmt: skip
        self._forward, self._together = forward, together

    def values(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """The scores of each sample's trained tokens, on every rank."""
        return sample_scores(self._forward, samples, token_budget=self._budget, group=self.group)

    def step(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """One update on the mean over tokens of `objective(scores_T, tokens)` [T]; loss, norm and rate.

        FloatingPointError for a loss or gradient that isn't finite; the weights are then as before.
        """
        _check(self.model, samples)
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self._descent.clear()
        for micro in self.packed(samples, together=self._together):
            score_T: Tensor = self._forward(micro)
            loss = (objective(score_T, micro.tokens) * micro.tokens.weights_T).sum()
            torch.autograd.backward(loss)
            total += loss.detach().double()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        metrics = {"loss": float(total)}
        metrics |= self._descent.update(float(total), version=self._descent.updates)
        self.weights.updated()
        return metrics


def _check(model: PreTrainedModel, samples: Sequence[Sample]) -> None:
    check_samples(samples, context=getattr(model.config, "max_position_embeddings", None))

"""A model that gives numbers instead of tokens: a critic's values, or a reward model's scores.

It is a sequence-classification model of one label in Hugging Face format, whose head is read where we say and
not at the last token that isn't padding: an end of sequence that is also the padding can't move it.

Shape suffixes: B = rows, L = positions, H = hidden, T = trained tokens of a micro-batch.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from arriero.components.descent import Descent
from arriero.components.losses import sequence_weights
from arriero.components.model_directory import loading
from arriero.components.optimizer import AdamW
from arriero.components.packing import MicroBatch, PackedTokens, check_samples, pack, plan, read
from arriero.components.planning import Plan
from arriero.components.policy import check_directory, load_tokenizer
from arriero.engine.errors import UserError
from arriero.schemas.messages import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The verbosity of transformers is one for all threads.
_QUIET = Lock()

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
    with _QUIET, loading(directory):
        verbosity = logs.get_verbosity()
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


def scores(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """The number [T] that the model gives at the position before each trained token."""
    arguments = {"input_ids": micro.input_ids_BL, "position_ids": micro.position_ids_BL, "use_cache": False}
    headed: Any = model  # the head has no common type
    hidden_BLH: Tensor = headed.base_model(**arguments).last_hidden_state
    hidden_TH = hidden_BLH.flatten(0, 1).index_select(0, micro.index_T)
    score_T1: Tensor = headed.score(hidden_TH)
    return score_T1[:, 0].float()


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
    model: PreTrainedModel, samples: Sequence[Sample], *, token_budget: int
) -> list[npt.NDArray[np.float32]]:
    """The scores of each sample's trained tokens, in micro-batches of up to `token_budget` tokens."""
    found = [np.zeros(0, np.float32)] * len(samples)
    (micros,) = _planned(model, samples, token_budget)
    for indices in micros:
        micro = pack(samples, indices, np.ones(len(samples)), device=model.device)
        with torch.no_grad():
            score_T = scores(model, micro).cpu().numpy()
        ends = np.cumsum([int(samples[i].mask.sum()) for i in indices])[:-1]
        for i, part in zip(indices, np.split(score_T, ends), strict=True):
            found[i] = part
    return found


class ScoringState:
    """A scoring model in training. With a process `group` every rank steps on the same samples."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimizer: AdamW,
        steps: int,
        token_budget: int,
        together: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.version = 0
        self._budget, self._together, self._group = token_budget, together, group
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._descent = Descent(trained, optimizer, steps=steps, group=group)

    def values(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """The scores of each sample's trained tokens; every rank computes all of them."""
        return sample_scores(self.model, samples, token_budget=self._budget)

    def step(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """One update on the mean over tokens of `objective(scores_T, tokens)` [T]; loss, norm and rate.

        FloatingPointError for a loss or gradient that isn't finite; the weights are then as before.
        """
        counts = np.array([s.mask.sum() for s in samples], dtype=np.int64)
        weights = sequence_weights(counts, "token_mean")
        ranks, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self._descent.clear()
        shares = _planned(self.model, samples, self._budget, ranks=ranks, together=self._together)
        for indices in shares[rank]:
            micro = pack(samples, indices, weights, device=self.model.device)
            loss = (objective(scores(self.model, micro), micro.tokens) * micro.tokens.weights_T).sum()
            torch.autograd.backward(loss)
            total += loss.detach().double()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        metrics = {"loss": float(total)} | self._descent.update(float(total), version=self.version)
        self.version += 1
        return metrics


def _planned(
    model: PreTrainedModel, samples: Sequence[Sample], budget: int, *, ranks: int = 1, together: int = 1
) -> Plan:
    check_samples(samples, context=getattr(model.config, "max_position_embeddings", None))
    return plan([read(s) for s in samples], token_budget=budget, ranks=ranks, together=together)

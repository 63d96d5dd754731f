"""How the losses of tokens add up to the loss of a step."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


def sequence_weights(
    counts_S: npt.NDArray[np.int64], aggregation: Aggregation, *, horizon: float = 0
) -> npt.NDArray[np.float64]:
    """Weight [S] of each token of a sequence that has `counts_S` [S] trained tokens; 0 where it has none.

    token_mean: the mean over all tokens (DAPO). sequence_mean: the mean over sequences of their token mean
    (GRPO). sequence_sum: the mean over sequences of their token sum. fixed_length: the same divided by
    `horizon` tokens, whatever the lengths (Dr. GRPO, arXiv:2503.20783). Sequences without trained tokens
    count nowhere. ValueError if nothing is trained, or if `horizon` and `aggregation` don't fit together.
    """
    if (horizon > 0) != (aggregation == "fixed_length"):
        raise ValueError(
            f"aggregation {aggregation!r} with horizon {horizon}: exactly 'fixed_length' takes one, > 0"
        )
    trained_S = counts_S > 0
    if not trained_S.any():
        raise ValueError("trained tokens = 0 in the whole batch: every mask is empty")
    divisor = {
        "token_mean": counts_S.sum(),
        "sequence_mean": trained_S.sum() * np.maximum(counts_S, 1),
        "sequence_sum": trained_S.sum(),
        "fixed_length": trained_S.sum() * horizon,
    }[aggregation]
    return np.asarray(trained_S / divisor, dtype=np.float64)

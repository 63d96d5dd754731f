"""What is done to rewards before they become advantages: penalties for length, groups without a signal."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Beyond = Literal["held", "continued"]


def overlong_penalty(
    lengths: npt.ArrayLike, *, max_length: int, buffer: int, factor: float = 1.0, beyond: Beyond = "held"
) -> Floats:
    """Penalty [n] <= 0 of responses of `lengths` [n] tokens: 0 up to `max_length - buffer`, then falling.

    It reaches -`factor` at `max_length`. beyond: longer responses are `held` there (DAPO), or the line is
    `continued` (AReaL). A buffer of 0 has no line: 0 up to `max_length`, -`factor` beyond.
    ValueError for a buffer outside [0, max_length], or one of 0 whose line is to be continued.
    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie between 0 and max_length={max_length}")
    length_n = np.asarray(lengths, dtype=np.float64)
    if buffer == 0:
        if beyond == "continued":
            raise ValueError("buffer=0 has no line to continue; use beyond='held'")
        return np.where(length_n > max_length, -factor, 0.0)
    over_n = np.maximum(length_n - (max_length - buffer), 0.0) / buffer
    return -factor * (over_n if beyond == "continued" else np.minimum(over_n, 1.0))


def is_constant(rewards: npt.ArrayLike) -> bool:
    """Whether all rewards are equal, so that no baseline gives a signal. Compared exactly: no tolerance."""
    value_n = np.asarray(rewards, dtype=np.float64)
    return len(value_n) == 0 or bool((value_n == value_n[0]).all())

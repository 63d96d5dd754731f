"""Values of trained tokens back in the arrays of their sample.

Shape suffixes: L = tokens of a sample, T = those on its mask.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def on_mask(
    mask_L: npt.NDArray[np.bool_], values_T: npt.NDArray[np.floating], *, elsewhere: float
) -> npt.NDArray[np.float32]:
    """`values_T` where the mask is true, `elsewhere` where it isn't."""
    out_L = np.full(len(mask_L), elsewhere, np.float32)
    out_L[mask_L] = values_T
    return out_L

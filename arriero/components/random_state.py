"""The states of this process's random generators as tensors: torch, its GPU, numpy, Python."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

RANDOM = "random."  # then the rank, and which generator


def random_state(rank: int) -> dict[str, Tensor]:
    """By name, those of one rank apart from those of others."""
    untyped: Any = np.random.get_state()  # noqa: NPY002  # the global one: what a user's loss may draw from
    words, place, has_gauss, gauss = untyped[1], untyped[2], untyped[3], untyped[4]
    version, state, held = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words.tolist(), place, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor([version, *state], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if held is None else held], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return {f"{RANDOM}{rank}.{name}": tensor for name, tensor in found.items()}


def restore_random_state(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Take over what `random_state` gave; what isn't there stays as it is."""
    found = {name.removeprefix(f"{RANDOM}{rank}."): t for name, t in tensors.items()}
    if "torch" in found:
        torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found:
        numbers: list[int] = found["numpy"].tolist()
        words = np.array(numbers[:-2], np.uint32)
        state = ("MT19937", words, numbers[-2], numbers[-1], float(found["numpy_gauss"]))
        np.random.set_state(state)  # noqa: NPY002  # as above
    if "python" in found:
        inner: list[int] = found["python"].tolist()
        held = float(found["python_gauss"])
        random.setstate((inner[0], tuple(inner[1:]), None if np.isnan(held) else held))

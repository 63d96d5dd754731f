"""Small sets of tensors that tests of the weight plane send."""

import torch
from torch import Tensor


def model(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(1000, 64, dtype=torch.bfloat16, generator=random),
        "layer.weight": torch.randn(300, 70, generator=random),
        "layer.transposed": torch.randn(40, 30, generator=random).t(),
        "norm": torch.randn(70, dtype=torch.float16, generator=random),
        "step": torch.tensor(7 + seed),
        "mask": torch.rand(9, generator=random) > 0.5,
        "none": torch.empty(0, 4),
    }


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}

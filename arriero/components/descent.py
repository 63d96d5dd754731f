"""Gradient descent over ranks: sum the gradients, check and clip them, take one step of AdamW.

What isn't finite raises before a weight moves.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arriero.components.optimizer import AdamW

if TYPE_CHECKING:
    from torch import Tensor

_BUCKET_BYTES = 64 << 20
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Descent:
    """AdamW on named float32 parameters; `updates` is how many steps it has taken."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: AdamW,
        *,
        steps: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._config = optimizer
        self._steps = steps
        self._group = group
        self.updates = 0
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self._parameters.values():
            p.grad = None

    def update(self, loss: float, *, version: int) -> dict[str, float]:
        """One step along the gradients, at the learning rate of step `version`: gradient norm and rate.

        FloatingPointError for a loss or gradient that isn't finite; the weights are then as before.
        """
        for p in self._parameters.values():
            if p.grad is None:  # unused here: decayed all the same, as on a rank that did use it
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if self._group is not None:
            _sum_over_ranks(gradients, self._group)
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {version}: loss {loss}, gradient norm {grad_norm}; weights unchanged"
            )
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
        rate = self._config.learning_rate(version, steps=self._steps)
        for parameters in self._adamw.param_groups:
            parameters["lr"] = rate
        self._adamw.step()
        self.updates += 1
        return {"grad_norm": grad_norm, "lr": rate}

    def checkpoint(self) -> dict[str, Tensor]:
        """The moments by name, as live tensors, and the number of updates."""
        tensors = {"updates": torch.tensor(self.updates)}
        for name, parameter in self._parameters.items():
            moments: Mapping[str, Tensor] = self._adamw.state.get(parameter, {})
            tensors |= {f"{key}.{name}": moments[key] for key in _MOMENTS if key in moments}
        return tensors

    def wanted(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The names that `restore` reads, given the number of updates in `tensors`."""
        taken = "updates" in tensors and int(tensors["updates"]) > 0
        return {"updates"} | {f"{k}.{n}" for n in self._parameters for k in _MOMENTS if taken}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `checkpoint` gave."""
        self.updates = int(tensors["updates"])
        self._adamw.state.clear()
        for name, p in self._parameters.items() if self.updates > 0 else ():
            moments = {k: tensors[f"{k}.{name}"].to(p.device, copy=True) for k in _MOMENTS}
            step = torch.tensor(float(self.updates), device=p.device)
            self._adamw.state[p] = {"step": step, **moments}


def _sum_over_ranks(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """In place, in buckets of equal dtype, so that many small tensors cost one exchange."""
    bucket: list[Tensor] = []

    def flush() -> None:
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
        bucket.clear()

    for gradient in gradients:
        if bucket and (
            gradient.dtype != bucket[0].dtype
            or sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES
        ):
            flush()
        bucket.append(gradient)
    if bucket:
        flush()

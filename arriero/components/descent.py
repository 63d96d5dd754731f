"""Gradient descent over ranks: sum the gradients, check and clip them, take one step.

What isn't finite raises before a weight moves. Optimizers see plain tensors: of a sharded parameter the part
that this rank holds, whose gradient has been summed over ranks already.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arriero.components.optimizer import SGD, AdamW, Muon
from arriero.components.sharding import local, sharded_like

if TYPE_CHECKING:
    from torch import Tensor

_BUCKET_BYTES = 64 << 20
_MOMENTS = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Muon: ("momentum_buffer",),
}


class Descent:
    """An optimizer on named float32 parameters; `updates` is how many steps it has taken.

    With a `group` gradients are summed over it; with `shards`, over whose ranks every parameter is split,
    they have been.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: AdamW | SGD | Muon,
        *,
        steps: int,
        group: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._config = optimizer
        self._steps = steps
        self._group, self._shards = group, shards
        self.updates = 0
        self._held: dict[str, torch.nn.Parameter] = {}
        for name, p in self._parameters.items():
            held = p if local(p) is p else torch.nn.Parameter(local(p.detach()))
            if held.numel():  # a rank may hold nothing of a small parameter
                self._held[name] = held
        self._optimizers = _optimizers(self._held, optimizer)

    def clear(self) -> None:
        """Forget the gradients."""
        for p in (*self._parameters.values(), *self._held.values()):
            p.grad = None

    def before_optimizer(self, call: Callable[[], None]) -> None:
        """Have `call` called before each step of the optimizer."""

        def first(optimizer: object, args: object, kwargs: object) -> None:
            call()

        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(first)

    def update(self, loss: float, *, version: int) -> dict[str, float]:
        """One step along the gradients, at the learning rate of step `version`: gradient norm and rate.

        FloatingPointError for a loss or gradient that isn't finite; the weights are then as before.
        """
        for name, held in self._held.items():
            grad = self._parameters[name].grad
            # Unused here: decayed all the same, as on a rank that did use it.
            held.grad = torch.zeros_like(held) if grad is None else local(grad)
        gradients = [held.grad for held in self._held.values() if held.grad is not None]
        if self._group is not None and self._shards is None:
            _sum_over_ranks(gradients, self._group)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._shards is not None:
            square = norm.double().square()
            dist.all_reduce(square, group=self._shards)
            norm = square.sqrt().float()
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {version}: loss {loss}, gradient norm {grad_norm}; weights unchanged"
            )
        torch.nn.utils.clip_grads_with_norm_(self._held.values(), self._config.max_grad_norm, norm)
        rate = self._config.learning_rate(version, steps=self._steps)
        for optimizer in self._optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate
            optimizer.step()
        self.updates += 1
        return {"grad_norm": grad_norm, "lr": rate}

    def checkpoint(self) -> dict[str, Tensor]:
        """The moments by name, as live tensors, split as their parameters, and the number of updates."""
        tensors = {"updates": torch.tensor(self.updates)}
        for name, parameter in self._parameters.items():
            for key in self._moments(name) if self.updates else ():
                tensors[f"{key}.{name}"] = sharded_like(parameter, self._moment(name, key))
        return tensors

    def wanted(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The names that `restore` reads, given the number of updates in `tensors`."""
        taken = "updates" in tensors and int(tensors["updates"]) > 0
        return {"updates"} | {f"{k}.{n}" for n in self._parameters for k in self._moments(n) if taken}

    def blank(self, updates: int) -> dict[str, Tensor]:
        """What `checkpoint` gives after so many updates, all zero: to be read into."""
        return {"updates": torch.tensor(updates)} | {
            f"{key}.{name}": sharded_like(p, torch.zeros_like(local(p.detach())))
            for name, p in self._parameters.items()
            for key in (self._moments(name) if updates else ())
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `checkpoint` gave."""
        self.updates = int(tensors["updates"])
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for name, p in self._held.items() if self.updates > 0 else ():
            keys = self._moments(name)
            moments = {k: local(tensors[f"{k}.{name}"]).to(p.device, copy=True) for k in keys}
            optimizer = self._optimizer_of(name)
            if isinstance(optimizer, torch.optim.AdamW):
                moments["step"] = torch.tensor(float(self.updates), device=p.device)
            optimizer.state[p] = moments

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        if not isinstance(self._config, Muon):
            return self._optimizers[0]
        first = _is_matrix_of_a_layer(name, self._parameters[name])
        return self._optimizers[0 if first else -1]

    def _moments(self, name: str) -> tuple[str, ...]:
        """The names of what the optimizer keeps of a parameter."""
        if isinstance(self._config, SGD):
            return _MOMENTS[torch.optim.SGD] if self._config.momentum else ()
        matrix = isinstance(self._config, Muon) and _is_matrix_of_a_layer(name, self._parameters[name])
        return _MOMENTS[torch.optim.Muon if matrix else torch.optim.AdamW]

    def _moment(self, name: str, key: str) -> Tensor:
        held = self._held.get(name)
        if held is None:
            return torch.zeros_like(local(self._parameters[name].detach()))
        moment: Tensor = self._optimizer_of(name).state[held][key]
        return moment


def _optimizers(
    held: Mapping[str, torch.nn.Parameter], config: AdamW | SGD | Muon
) -> list[torch.optim.Optimizer]:
    """Muon comes first, what it leaves to AdamW last."""
    if isinstance(config, SGD):
        return [
            torch.optim.SGD(
                held.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay,
                fused=True,
            )
        ]  # fmt: skip
    matrices = {n: p for n, p in held.items() if isinstance(config, Muon) and _is_matrix_of_a_layer(n, p)}
    rest = [p for n, p in held.items() if n not in matrices]
    made: list[torch.optim.Optimizer] = []
    if isinstance(config, Muon) and matrices:
        made.append(
            torch.optim.Muon(
                matrices.values(), lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )  # fmt: skip
    if rest:
        made.append(
            torch.optim.AdamW(
                rest, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay,
                fused=True,
            )
        )  # fmt: skip
    return made


def _is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    """Layers are numbered; embeddings and heads, which Muon isn't for, stand outside of them."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


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

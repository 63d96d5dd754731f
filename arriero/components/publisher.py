"""The trainer's end of the weight plane: what carries its versions to the generators."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.engine.runtime.context import Context
from arriero.schemas.messages import Weights
from arriero.schemas.weights import TransportName

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.learner import Learner
    from arriero.engine.weights import WeightSender

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightPlane:
    """How new weights travel from the trainer to the generators.

    `shm`, shared memory, is for one host. Between hosts: `nixl` (RDMA or TCP), `gloo`, or `nccl` from GPU to
    GPU; `host` is then an address of the trainer's host that generators reach, by default the one that the
    launcher of a cluster knows it by, else that of this host alone. `store` writes each version
    into the folder `store`, any URL of fsspec. `lease_timeout_s`: how long a generator may read a version
    that is to be overwritten before it is named and no longer waited for; by default 30 s, or what its bytes
    take at 100 MB/s.
    """

    transport: TransportName = "shm"
    host: str = ""
    store: str = ""
    lease_timeout_s: PositiveFloat | None = None

    def problems(self) -> Iterable[str]:
        if (self.transport == "store") != bool(self.store):
            yield (
                f"weights.transport={self.transport} with weights.store={self.store!r}; "
                "give the URL of a folder with transport=store, and only with it"
            )
        if self.transport == "nixl" and not (find_spec("nixl_cu12") or find_spec("nixl_cu13")):
            yield "weights.transport=nixl needs NIXL; install arriero[nixl], or use gloo"


class Publisher:
    """Makes the `Weights` of a version; where a loop follows, the bytes go onto the weight plane first.

    All ranks of the trainer make it, and call it, together.
    """

    def __init__(self, state: Learner, plane: WeightPlane, context: Context) -> None:
        self._state, self._plane = state, plane
        self._sender: WeightSender | None = None
        # Who is busy with one evaluation takes the version of the next, which may be the last, after it.
        self._evaluations_s = context.wait_bound_s if context.evaluates_every else None
        # A new loop in an old run: nobody has the last version, and evaluations of it may be due.
        self._somebody_comes = context.announced < 0 and bool(context.made)
        self._first = not context.rank
        self._named: Mapping[str, str] = {}
        if context.loop:
            self._sender = self._open(context)

    def __call__(self, version: int, metrics: dict[str, float]) -> Weights:
        """Publish the weights of now. WeightError if a step that moves them has changed no bit."""
        if self._sender is None:
            return Weights(version=version, metrics=metrics)
        if self._first:
            self._name_failures(self._sender)
        moves = metrics.get("lr", 0.0) > 0 and metrics.get("grad_norm", 0.0) > 0
        manifest = self._sender.publish(version, self._tensors(), must_change=moves)
        return Weights(version=version, manifest=manifest, metrics=metrics)

    def close(self) -> None:
        """Wait until generators have what only this process holds, within the bound, and close."""
        if self._sender is not None:
            self._sender.close(somebody_comes=self._somebody_comes, left_within_s=self._evaluations_s)

    def _open(self, context: Context) -> WeightSender:
        import torch.distributed as dist

        from arriero.components.engine_layout import engine_layouts
        from arriero.engine.weights import GroupRanks, WeightSender

        plane = self._plane
        untyped: Any = dist  # `new_group` is annotated only in part
        tensors = self._tensors()
        return WeightSender(
            plane.store or context.weights_url,
            tensors,
            GroupRanks(untyped.new_group(backend="gloo")) if context.ranks > 1 else None,
            receivers=engine_layouts(self._state.model.config, tensors, context.parts),
            transport=plane.transport,
            slots=context.staleness + 2,
            keep_every=context.evaluates_every,
            lease_timeout_s=plane.lease_timeout_s,
            secret=context.secret,
            host=plane.host or os.environ.get("ARRIERO_HOST") or "127.0.0.1",
        )

    def _tensors(self) -> dict[str, Tensor]:
        return self._state.state_dict_for_weights()

    def _name_failures(self, sender: WeightSender) -> None:
        failures = sender.failures()
        for name, why in failures.items():
            if self._named.get(name) != why:
                log.warning("generator %s has not taken its last weights: %s", name, why)
        self._named = failures

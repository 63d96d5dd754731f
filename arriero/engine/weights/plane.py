"""The front door: which transport carries the weights, and an end of it that needs to know nothing else.

The senders choose a transport; its name is the scheme of the manifest's URL, by which receivers know it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from arriero.engine.weights.dist_transport import DistInlet, DistOutlet
from arriero.engine.weights.layout import TORCH_DTYPES, WeightError
from arriero.engine.weights.live_layout import gathered_layout, local_part, replicated_layout
from arriero.engine.weights.nixl_transport import NixlInlet, NixlOutlet
from arriero.engine.weights.plan import Plan, plan_weights
from arriero.engine.weights.ranks import OneRank, Ranks
from arriero.engine.weights.receiver import ShardReceiver
from arriero.engine.weights.sender import ShardSender
from arriero.engine.weights.served import ServedOutlet, Serving
from arriero.engine.weights.shm_transport import ShmInlet, ShmOutlet
from arriero.engine.weights.store_transport import StoreInlet, StoreOutlet
from arriero.engine.weights.transport import Inlet, Outlet
from arriero.schemas.layouts import RankLayout, WorldLayout
from arriero.schemas.weights import TransportName, WeightManifest


def open_outlet(transport: TransportName, url: str, plan: Plan, ranks: Ranks, serving: Serving) -> Outlet:
    """A source rank's end. `url` is the shared segment, or the folder of an object store.

    The other transports choose their address themselves.
    """
    slots, keep_every, bound_s = serving.slots, serving.keep_every, serving.lease_timeout_s
    match transport:
        case "shm":
            return ShmOutlet(url, plan, ranks, slots=slots, keep_every=keep_every, lease_timeout_s=bound_s)
        case "store":
            return StoreOutlet(url, plan, ranks, slots=slots, keep_every=keep_every, lease_timeout_s=bound_s)
        case "nixl":
            return NixlOutlet(plan, serving, ranks)
        case "gloo" | "nccl":
            device = torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else None
            return DistOutlet(plan, serving, ranks, backend=transport, device=device)


def open_inlet(url: str, name: str, secret: bytes) -> Inlet:
    """A receiver rank's end of what a manifest's URL names; WeightError if it can't be reached."""
    scheme = url.partition("://")[0]
    if scheme == "shm":
        return ShmInlet(url, name)
    if scheme == "nixl":
        return NixlInlet(url, name, secret)
    if scheme == "nccl":
        return DistInlet(url, name, secret, device=torch.device("cuda", torch.cuda.current_device()))
    return DistInlet(url, name, secret) if scheme == "gloo" else StoreInlet(url, name)


class WeightSender:
    """The end of a trainer, of one rank or several. Buffers are allocated here, once.

    All ranks make it, and publish, together. DTensors are sent shard by shard, each by the rank that has it;
    what all ranks have is packed by one of them. With a `layout`, `tensors` are this rank's parts already.
    `receivers`: layouts of those that store parts of tensors; those that store them whole need none.
    `host`, `secret`, `slots`, `keep_every` and `lease_timeout_s` are those of `Serving`.
    """

    def __init__(
        self,
        url: str,
        tensors: Mapping[str, Tensor],
        ranks: Ranks | None = None,
        *,
        layout: WorldLayout | None = None,
        receivers: Mapping[str, WorldLayout] | None = None,
        transport: TransportName = "shm",
        slots: int = 2,
        keep_every: int = 0,
        lease_timeout_s: float | None = None,
        secret: bytes = b"",
        host: str = "127.0.0.1",
    ) -> None:
        self._ranks = ranks = ranks or OneRank()
        if layout is None:
            layout = gathered_layout(tensors, ranks) if ranks.size > 1 else replicated_layout(tensors)
        plan = plan_weights(layout, receivers)
        serving = Serving(
            secret=secret, host=host, slots=slots, keep_every=keep_every, lease_timeout_s=lease_timeout_s
        )
        outlet = open_outlet(transport, url, plan, ranks, serving)
        self.shards = ShardSender(outlet, plan, layout, ranks)
        self._served = outlet if isinstance(outlet, ServedOutlet) else None
        self._bound_s = lease_timeout_s
        self._last: int | None = None

    @property
    def overtaken(self) -> tuple[str, ...]:
        """Receivers that the last publish no longer waited for."""
        return self.shards.overtaken

    def publish(
        self, version: int, tensors: Mapping[str, Tensor], *, must_change: bool = True
    ) -> WeightManifest:
        """As `ShardSender.publish`."""
        local = {name: local_part(name, tensor)[0] for name, tensor in tensors.items()}
        manifest = self.shards.publish(version, local, must_change=must_change)
        self._last = version
        return manifest

    def failures(self) -> dict[str, str]:
        """As `ShardSender.failures`."""
        return self.shards.failures()

    def close(self, *, somebody_comes: bool = False, left_within_s: float | None = None) -> None:
        """Give the buffers back. What lies in shared memory or a store stays until the run's owner goes.

        With the other transports it ends with these processes, so they wait first, within the bound of a
        lease, until every receiver has taken the last version or has left. With `somebody_comes` they wait
        as long for the first receiver, if there was none yet. Receivers that ask for older versions, and for
        the last one much later, are waited for until they have left, up to `left_within_s`.
        """
        if self._last is not None and self._served is not None:
            if not self._ranks.rank:
                if somebody_comes:
                    self._served.await_visitor()
                if left_within_s is None:
                    self.shards.report(self._last, timeout_s=self._bound_s)
                else:
                    self._served.await_left(left_within_s)
            self._ranks.gather(b"")
        self.shards.close()


class WeightReceiver:
    """A generator's end, whatever the transport. `name` is what the senders report, e.g. generator-0.

    `secret` is the run's, which senders over a network ask for. `stores` gives what this rank stores of
    tensors with these shapes; without it, or if it gives None, all of them, whole.
    """

    def __init__(
        self,
        name: str,
        secret: bytes = b"",
        stores: Callable[[Mapping[str, tuple[int, ...]]], RankLayout | None] | None = None,
    ) -> None:
        self.name, self._secret, self._stores = name, secret, stores
        self._open: dict[str, tuple[Inlet, ShardReceiver]] = {}

    def tensors(self, manifest: WeightManifest) -> dict[str, Tensor]:
        """New tensors, not filled, that what this rank stores would fit into without a cast."""
        inlet, receiver = self._ends(manifest)
        plan = inlet.plan(manifest.session)
        if receiver.layout is None:
            sizes = {name: (shape, name) for name, shape in plan.tensors.items()}
        else:
            sizes = {s.name: (s.shape, s.pieces[0].tensor) for s in receiver.layout.stored}
        return {
            name: torch.empty(shape, dtype=TORCH_DTYPES[plan.dtypes[tensor]])
            for name, (shape, tensor) in sizes.items()
        }

    def receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None:
        """As `ShardReceiver.receive`, of what this rank stores; whole tensors under the names that are sent.

        A further name for a received tensor (tied) is allowed.
        """
        self._ends(manifest)[1].receive(manifest, into)

    def close(self) -> None:
        for _, receiver in self._open.values():
            receiver.close()
        self._open.clear()

    def _ends(self, manifest: WeightManifest) -> tuple[Inlet, ShardReceiver]:
        if manifest.url not in self._open:
            try:
                inlet = open_inlet(manifest.url, self.name, self._secret)
            except OSError as error:
                raise WeightError(f"{self.name} can't reach {manifest.url}: {error}") from error
            layout = self._stores(inlet.plan(manifest.session).tensors) if self._stores else None
            self._open[manifest.url] = inlet, ShardReceiver(inlet, layout)
        return self._open[manifest.url]

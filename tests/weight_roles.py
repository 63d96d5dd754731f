"""Senders and receivers of sharded weights as processes of their own, told what to do through a pipe.

`tests.weight_crew` starts them.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.engine.weights.copying import Bytes
from arriero.engine.weights.dist_transport import DistInlet, DistOutlet
from arriero.engine.weights.nixl_transport import NixlInlet, NixlOutlet
from arriero.engine.weights.plan import Plan, plan_weights
from arriero.engine.weights.ranks import GroupRanks
from arriero.engine.weights.receiver import ShardReceiver
from arriero.engine.weights.sender import ShardSender
from arriero.engine.weights.served import Serving
from arriero.engine.weights.sharding import llama_layout
from arriero.engine.weights.shm_transport import ShmInlet, ShmOutlet
from arriero.engine.weights.store_transport import StoreInlet, StoreOutlet
from arriero.engine.weights.transport import Inlet, Outlet, Span
from arriero.schemas.layouts import LlamaShape, Parallelism, RankLayout, WorldLayout
from arriero.schemas.weights import WeightManifest

TransportName = Literal["shm", "gloo", "nixl", "store"]
Trap = Literal["", "raise", "kill", "stop", "hold", "flip"]
SECRET = b"of this test"
SMALL = LlamaShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=101,
)  # fmt: skip
ENGINES = {
    "tp1": Parallelism(fused=True),
    "tp2": Parallelism(tensor=2, fused=True, vocabulary_multiple=64),
}


@dataclass(frozen=True)
class Setting:
    """What all processes of a test agree on. `place` is a name for shm, a folder for the store."""

    transport: TransportName
    place: str
    trainer: Parallelism
    shape: LlamaShape = SMALL
    bound_s: float = 20.0

    def layout(self) -> WorldLayout:
        return llama_layout(self.shape, self.trainer)

    def plan(self) -> Plan:
        engines = {name: llama_layout(self.shape, engine) for name, engine in ENGINES.items()}
        return plan_weights(self.layout(), engines, cell_bytes=4096)

    def outlet(self, plan: Plan, ranks: GroupRanks) -> Outlet:
        if self.transport == "shm":
            return ShmOutlet(self.place, plan, ranks, lease_timeout_s=self.bound_s)
        if self.transport == "store":
            return StoreOutlet(self.place, plan, ranks, lease_timeout_s=self.bound_s)
        serving = Serving(secret=SECRET, lease_timeout_s=self.bound_s)
        if self.transport == "gloo":
            return DistOutlet(plan, serving, ranks)
        return NixlOutlet(plan, serving, ranks)

    def inlet(self, url: str, name: str) -> Inlet:
        if self.transport == "shm":
            return ShmInlet(url, name)
        if self.transport == "store":
            return StoreInlet(url, name)
        if self.transport == "gloo":
            return DistInlet(url, name, SECRET, bound_s=10.0)
        return NixlInlet(url, name, SECRET, bound_s=10.0)


def weights(layout: WorldLayout, seed: int) -> dict[str, Tensor]:
    """Logical tensors of a model, whole; other ones for each seed."""
    random = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=random) for tensor in layout.tensors}


def shards(layout: RankLayout, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank holds of them, by its layout; -1 in the padding."""
    held: dict[str, Tensor] = {}
    for stored in layout.stored:
        held[stored.name] = torch.full(stored.shape, -1.0)
        for piece in stored.pieces:
            to = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))
            box = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            held[stored.name][to] = logical[piece.tensor][box]
    return held


class Trapped:
    """An inlet with an accident after its first span: it raises, dies, stops, is slow or flips a bit."""

    def __init__(self, inlet: Inlet, trap: Trap) -> None:
        self._inlet, self._trap = inlet, trap
        self.stable, self.carried = inlet.stable, inlet.carried

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        return self._inlet.newest(after, wait_s)

    def plan(self, session: str) -> Plan:
        return self._inlet.plan(session)

    def lease(self, manifest: WeightManifest, spans: Sequence[Span]) -> AbstractContextManager[None]:
        return self._inlet.lease(manifest, spans)

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        for number, data in enumerate(self._inlet.fetch(manifest, spans)):
            if number == 1:
                self._spring(data)
                if self._trap == "flip":
                    data = data if data is spans[number].into else data.copy()
                    data[7] ^= 1
            yield data

    def report(self, version: int, error: str) -> None:
        self._inlet.report(version, error)

    def close(self) -> None:
        self._inlet.close()

    def _spring(self, data: Bytes) -> None:
        if self._trap == "raise":
            raise RuntimeError("out of memory, for instance")
        if self._trap == "hold":
            time.sleep(0.7)
        if self._trap in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._trap == "kill" else signal.SIGSTOP)


class Sender:
    """A rank of a trainer that publishes weights made from a seed."""

    def __init__(self, setting: Setting, rank: int, meeting: str) -> None:
        size = setting.trainer.num_ranks
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        plan, ranks = setting.plan(), GroupRanks(dist.group.WORLD)
        self._rank, self._layout = rank, setting.layout()
        outlet = setting.outlet(plan, ranks)
        self.url, self.sender = outlet.url, ShardSender(outlet, plan, self._layout, ranks, threads=1)

    def address(self) -> str:
        return self.url

    def publish(self, version: int, seed: int, must_change: bool = True, lose: int = -1) -> tuple[str, ...]:
        held = shards(self._layout.ranks[self._rank], weights(self._layout, seed))
        if self._rank == lose:
            held.pop("model.norm.weight")
        self.sender.publish(version, held, must_change=must_change)
        return self.sender.overtaken

    def publish_for(self, seconds: float, begin: int) -> int:
        """Versions almost as fast as they go, each with its number as seed; the last one's."""
        until, version = time.monotonic() + seconds, begin
        while True:
            self.publish(version, version)
            done = torch.tensor([float(time.monotonic() > until and version > begin + 4)])
            dist.broadcast(done, 0)
            if done.item():
                return version
            version += 1
            time.sleep(0.005)  # a machine may be so busy that a receiver needs several versions for a word

    def report(self, version: int, expected: Sequence[str], timeout_s: float) -> tuple[Any, ...]:
        report = self.sender.report(version, expected=expected, timeout_s=timeout_s)
        return report.taken, dict(report.failed)

    def close(self) -> None:
        self.sender.close()


class Receiver:
    """A rank of an engine."""

    def __init__(self, setting: Setting, url: str, name: str, kind: str, rank: int) -> None:
        self._layout = llama_layout(setting.shape, ENGINES[kind])
        self._inlet = setting.inlet(url, name)
        self._receiver = ShardReceiver(self._inlet, self._layout.ranks[rank], threads=1)
        self._rank = rank
        self._into = {s.name: torch.full(s.shape, -1.0) for s in self._layout.ranks[rank].stored}

    def newest(self, after: int = -1, wait_s: float = 0.0) -> int | None:
        manifest = self._receiver.newest(after, wait_s)
        return None if manifest is None else manifest.version

    def take(self, after: int = -1, trap: Trap = "", forget: bool = False) -> int:
        """Receive the newest version beyond `after`; its number."""
        manifest = self._receiver.newest(after, 10.0)
        assert manifest is not None, f"no version after {after} within 10 s"
        receiver = self._receiver
        if trap:
            inlet = Trapped(self._inlet, trap)
            receiver = ShardReceiver(inlet, self._layout.ranks[self._rank], threads=1)
        receiver.receive(manifest, {} if forget else self._into)
        return manifest.version

    def holds(self, seed: int) -> bool:
        """Whether every element is that of these weights, and the padding untouched."""
        want = shards(self._layout.ranks[self._rank], weights(self._layout, seed))
        return all(torch.equal(self._into[name], tensor) for name, tensor in want.items())

    def tensors(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self._into.items()}

    def take_all(self, until: int) -> int:
        """Every version that can be had, up to `until`; how many. Each is looked at."""
        last, count = -1, 0
        while last < until:
            manifest = self._receiver.catch_up(self._into, last, 20.0)
            assert manifest is not None
            assert manifest.version > last
            assert self.holds(manifest.version), f"version {manifest.version} has other values"
            last, count = manifest.version, count + 1
        return count

    def close(self) -> None:
        self._receiver.close()


def serve(pipe: "Connection[Any, Any]", make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Do what the pipe says until it says close, or ends."""
    torch.set_num_threads(1)
    role: Any = None
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            if name == "start":
                role = make(*arguments)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(role, name)(*args)))
        except Exception as error:  # noqa: BLE001  # the parent raises it
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
        if name == "close":
            return

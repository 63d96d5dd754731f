"""How fast the weight plane moves weights, per transport, beside a plain copy and the bare transport.

    python benchmarks/weights.py [--mb 256] [--rounds 5] [--transports shm,gloo,nixl,store]
                                 [--receivers 1,2,4] [--json]

One sender and its receivers are processes of their own; each round measures every path in turn, so that a
ratio is of one run and one load of the machine, and the median round counts. A busy machine stretches what
takes several threads or processes; the time of the processors, of all threads of one end, does not change.

    copy      tensor by tensor between buffers that exist already, twice: the least that a transport does
    publish   pack and hash into a slot, announce
    receive   lease, transfer into parameters, read back and hash
    raw       the same bytes by torch.distributed or NIXL alone, between the same two processes
    switch    what a generator stands still for when a version was prepared beside it
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from arriero.engine.weights import destroy, nixl_transport
from arriero.engine.weights.live_layout import replicated_layout
from arriero.engine.weights.plan import plan_weights
from arriero.engine.weights.plane import open_inlet, open_outlet
from arriero.engine.weights.ranks import OneRank
from arriero.engine.weights.receiver import ShardReceiver, Standby
from arriero.engine.weights.sender import ShardSender
from arriero.engine.weights.served import Serving
from arriero.schemas.weights import TransportName
from benchmarks.raw_transports import RawGloo, RawNixl

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

SECRET = b"benchmark"


def tensors_of(num_mb: int) -> dict[str, Tensor]:
    """bfloat16 weights of a small transformer's shapes: half matrices of 8 MB, half of 1 MB, and norms."""
    tensors: dict[str, Tensor] = {}
    for i in range(max(num_mb // 16, 1)):
        tensors[f"layers.{i}.mlp"] = torch.full((4096, 1024), i + 0.5, dtype=torch.bfloat16)
        for j in range(8):
            tensors[f"layers.{i}.attention.{j}"] = torch.full((512, 1024), j + 0.5, dtype=torch.bfloat16)
        tensors[f"layers.{i}.norm"] = torch.ones(1024, dtype=torch.bfloat16)
    return tensors


class Taken(NamedTuple):
    """Seconds of the clock, and of all threads of the process that did it."""

    wall_s: float
    cpu_s: float


def seconds(work: Callable[[], object]) -> Taken:
    start, used = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - start, time.process_time() - used)


class Receiving:
    """A receiver process, told what to do through its pipe."""

    def __init__(self, transport: TransportName, url: str, name: str, num_mb: int, raw_at: str) -> None:
        self.into = {n: torch.zeros_like(t) for n, t in tensors_of(num_mb).items()}
        self.receiver = ShardReceiver(open_inlet(url, name, SECRET))
        self.last = -1
        self.raw = None
        if raw_at:
            nbytes = sum(tensor.nbytes for tensor in self.into.values())
            self.raw = (RawGloo if transport == "gloo" else RawNixl).receiver(raw_at, nbytes)

    def receive(self) -> Taken:
        manifest = self.receiver.newest(self.last, 60)
        assert manifest is not None
        self.last = manifest.version
        return seconds(lambda: self.receiver.receive(manifest, self.into))

    def switch(self) -> Taken:
        manifest = self.receiver.newest()
        assert manifest is not None
        standby = Standby(self.receiver, self.into)  # not for all versions: it takes as much memory again
        standby.prepare(manifest)
        return seconds(standby.switch)

    def transfer(self) -> Taken:
        assert self.raw is not None
        return seconds(self.raw.receive)


def receiver_process(pipe: "Connection[Any, Any]", *arguments: Any) -> None:
    torch.set_num_threads(1)
    receiving = Receiving(*arguments)
    pipe.send("ready")
    while (what := pipe.recv()) != "end":
        pipe.send(getattr(receiving, what)())
    receiving.receiver.close()


class Bench:
    """One transport with its receivers."""

    def __init__(self, transport: TransportName, num_mb: int, receivers: int, folder: str) -> None:
        self.tensors = tensors_of(num_mb)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.copies = [{n: torch.zeros_like(t) for n, t in self.tensors.items()} for _ in range(2)]
        layout = replicated_layout(self.tensors)
        plan = plan_weights(layout)
        self.place = f"shm://benchmark-{os.getpid()}" if transport == "shm" else f"file://{folder}"
        outlet = open_outlet(transport, self.place, plan, OneRank(), Serving(secret=SECRET))
        self.sender = ShardSender(outlet, plan, layout)
        self.raw_sender: RawGloo | RawNixl | None = None
        if transport in ("gloo", "nixl"):
            self.raw_sender = (RawGloo if transport == "gloo" else RawNixl).sender(self.nbytes)
        raw_at = self.raw_sender.at if self.raw_sender is not None else ""
        self.version = -1
        self.pipes: list[Connection[Any, Any]] = []
        context = get_context("spawn")
        self.processes: list[SpawnProcess] = []
        for i in range(receivers):
            mine, theirs = context.Pipe()
            arguments = (theirs, transport, outlet.url, f"generator-{i}", num_mb, raw_at if i == 0 else "")
            process = context.Process(target=receiver_process, args=arguments, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        if self.raw_sender is not None:
            self.raw_sender.connect()
        assert [pipe.recv() for pipe in self.pipes] == ["ready"] * receivers

    def copy(self) -> Taken:
        def twice() -> None:
            for name, tensor in self.tensors.items():
                self.copies[0][name].copy_(tensor)
            for name, tensor in self.copies[0].items():
                self.copies[1][name].copy_(tensor)

        return seconds(twice)

    def publish(self) -> Taken:
        self.version += 1
        self.tensors["layers.0.norm"].add_(1)
        return seconds(lambda: self.sender.publish(self.version, self.tensors))

    def tell(self, what: str, receivers: int) -> Taken:
        """All of them at once; the slowest one's time, and the largest time of a processor."""
        for pipe in self.pipes[:receivers]:
            pipe.send(what)
        if what == "transfer" and self.raw_sender is not None:
            self.raw_sender.send(lambda: self.pipes[0].poll(50e-6))
        taken = [Taken(*pipe.recv()) for pipe in self.pipes[:receivers]]
        return Taken(max(t.wall_s for t in taken), max(t.cpu_s for t in taken))

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send("end")
            process.join(10)
        self.sender.close()
        if self.place.startswith("shm"):
            destroy(self.place)


def measure(transport: TransportName, num_mb: int, counts: list[int], rounds: int) -> dict[str, Any]:
    """Seconds of each path in each round, and the payload in bytes."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    bench = Bench(transport, num_mb, max(counts), folder)
    times: dict[str, list[Taken]] = {}
    try:
        for number in range(rounds + 2):  # two to touch every page of both slots and both sets of parameters
            for count in counts:
                taken = {"copy": bench.copy()} if count == counts[0] else {}
                taken[f"publish for {count}"] = bench.publish()
                taken[f"receive by {count}"] = bench.tell("receive", count)
                if count == counts[0]:
                    if bench.raw_sender is not None:
                        taken["raw"] = bench.tell("transfer", 1)
                    taken["switch"] = bench.tell("switch", 1)
                if number > 1:
                    for name, value in taken.items():
                        times.setdefault(name, []).append(value)
    finally:
        bench.end()
        shutil.rmtree(folder, ignore_errors=True)
    return {"transport": transport, "bytes": bench.nbytes, "seconds": times}


def show(result: dict[str, Any], counts: list[int]) -> dict[str, float]:
    """Print one transport's figures; the ratios."""
    nbytes, times = result["bytes"], result["seconds"]
    first = counts[0]
    publish, receive = times[f"publish for {first}"], times[f"receive by {first}"]
    both = [Taken(p.wall_s + r.wall_s, p.cpu_s + r.cpu_s) for p, r in zip(publish, receive, strict=True)]

    def of(above: list[Taken], below: list[Taken], what: int = 0) -> float:
        return median(a[what] / b[what] for a, b in zip(above, below, strict=True))

    ratios = {"end to end of copy": of(times["copy"], both), "... by processor": of(times["copy"], both, 1)}
    if "raw" in times:
        ratios["receive of raw"] = of(times["raw"], receive)
        ratios["... by processor "] = of(times["raw"], receive, 1)
    ratios["switch of receive"] = of(times["switch"], receive)
    print(f"\n{result['transport']}, {nbytes / 1e6:.0f} MB")
    print(f"  {'':<20}{'clock':>10}   {'speed':>11}   {'processor':>10}")
    for name, taken in times.items():
        wall_s, cpu_s = median(t.wall_s for t in taken), median(t.cpu_s for t in taken)
        speed = f"{(2 if name == 'copy' else 1) * nbytes / wall_s / 1e9:.2f} GB/s" if name != "switch" else ""
        print(f"  {name:<20}{1e3 * wall_s:>10.2f} ms{speed:>11}{1e3 * cpu_s:>10.1f} ms")
    for name, ratio in ratios.items():
        print(f"  {name:<20}{ratio:>10.3f}")
    return ratios


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=numbers, default=[256], help="payloads in MB, e.g. 256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", default="shm,gloo,nixl,store")
    parser.add_argument("--receivers", type=numbers, default=[1], help="e.g. 1,2,4")
    parser.add_argument("--json", action="store_true", help="the last line is the result as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for transport in arguments.transports.split(","):
        missing = nixl_transport.unavailable() if transport == "nixl" else ""
        if missing:
            print(f"\nnixl is left out: {missing}")
            continue
        for num_mb in arguments.mb:
            result = measure(transport, num_mb, arguments.receivers, arguments.rounds)
            results.append({**result, "ratios": show(result, arguments.receivers)})
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

"""How fast the weight plane moves weights through shared memory, beside a plain copy of the same bytes.

    python benchmarks/weights.py [--mb 128] [--rounds 7] [--json]

Every round measures all paths in turn, so that their ratio is of one run; the median round counts. `publish`
and `receive` hash every byte as well; `copy` copies tensor by tensor between buffers that both exist already.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from arriero.engine.weights import WeightReceiver, WeightSender, destroy
from arriero.schemas.weights import WeightManifest


def tensors_of(num_mb: int) -> dict[str, Tensor]:
    """bfloat16 weights of a small transformer's shapes: half matrices of 8 MB, half of 1 MB, and norms."""
    tensors: dict[str, Tensor] = {}
    for i in range(max(num_mb // 16, 1)):
        tensors[f"layers.{i}.mlp"] = torch.randn(4096, 1024).bfloat16()
        for j in range(8):
            tensors[f"layers.{i}.attention.{j}"] = torch.randn(512, 1024).bfloat16()
        tensors[f"layers.{i}.norm"] = torch.ones(1024, dtype=torch.bfloat16)
    return tensors


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(num_mb: int, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Payload in bytes, and the seconds of each path in each round."""
    tensors = tensors_of(num_mb)
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    cast = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in tensors.items()}
    url = f"shm://benchmark-{os.getpid()}"
    sender, receiver = WeightSender(url, tensors), WeightReceiver("benchmark")
    manifests: list[WeightManifest] = []

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    def publish() -> None:
        tensors["layers.0.norm"].add_(1)
        manifests.append(sender.publish(len(manifests), tensors))

    def receive(target: Mapping[str, Tensor]) -> None:
        receiver.receive(manifests[-1], target)

    paths: dict[str, Callable[[], None]] = {
        "copy": copy,
        "publish": publish,
        "receive": lambda: receive(into),
        "receive, cast to float32": lambda: receive(cast),
    }
    times: dict[str, list[float]] = {name: [] for name in paths}
    try:
        for _ in range(rounds + 2):  # two to touch every page of both slots
            for name, path in paths.items():
                times[name].append(seconds(path))
    finally:
        sender.close()
        receiver.close()
        destroy(url)
    return sum(tensor.nbytes for tensor in tensors.values()), {
        name: taken[2:] for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=128, help="payload in MB (default 128)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="the last line is the result as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes, times = measure(arguments.mb, arguments.rounds)
    speeds = {name: nbytes / median(taken) / 1e9 for name, taken in times.items()}
    ratios = {
        name: median(plain / mine for plain, mine in zip(times["copy"], taken, strict=True))
        for name, taken in times.items()
    }
    print(f"{nbytes / 1e6:.0f} MB, 1 thread, median of {arguments.rounds} rounds\n")
    print(f"{'path':<26}{'GB/s':>8}{'of copy':>10}")
    for name, speed in speeds.items():
        print(f"{name:<26}{speed:>8.2f}{ratios[name]:>9.0%}")
    if arguments.json:
        print(json.dumps({"bytes": nbytes, "gb_per_s": speeds, "ratio_to_copy": ratios}))


if __name__ == "__main__":
    main()

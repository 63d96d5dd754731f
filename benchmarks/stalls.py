"""How long a generator on vLLM stands still for a version of the weights, beside how long that is on its way.

    python -m benchmarks.stalls [--model DIRECTORY] [--versions 7] [--json]

One engine decodes all the time; versions come over shared memory. *Transfer* is from the announcement until a
version is ready on the generator's side, beside the decoding: in the second set of weights if there is one
(`standby`: the default `auto`, and off), else in host memory. *Stall* is the time between two decoding steps
in which it is put in use. *Step* is a decoding step while nothing arrives, and *beside* one while a version
does, which shares the processors with it. Medians over the versions. Without --model, a random Llama of 29
million parameters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from arriero.components.generator import Generator
from arriero.components.policy import load_tokenizer
from arriero.components.rollout_engine import Request, RolloutEngine, open_engine
from arriero.components.sampling import Sampling
from arriero.components.second_set import SecondSet
from benchmarks.random_policy import generator_context, publishing, write_model

REQUESTS, CONTEXT = 8, 512
CHOICES: tuple[SecondSet, ...] = ("auto", False)  # the default first


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Milliseconds, and the share of the transfer that the generator stood still for."""

    standby: SecondSet
    transfer_ms: float
    stall_ms: float
    step_ms: float
    beside_ms: float
    stall_share: float


def steps(engine: RolloutEngine, turn: int, number: int, arriving: threading.Thread | None) -> list[float]:
    """Seconds of each decoding step: so many, or until nothing arrives any more."""
    taken: list[float] = []
    while len(taken) < number if arriving is None else arriving.is_alive():
        if engine.idle:
            engine.add([
                Request(key=f"{turn}/{n}/{len(taken)}", prompt_ids=[3, 4, 5], seed=n) for n in range(REQUESTS)
            ])  # fmt: skip
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    return taken


def measure(model: str, versions: int, *, standby: SecondSet) -> Figures:
    generator = Generator(
        model=model, samples=1, slots=REQUESTS, context=CONTEXT, engine="vllm", standby=standby,
        sampling=Sampling(max_new_tokens=CONTEXT // 2),
    )  # fmt: skip
    context = generator_context(staleness=1)
    engine = open_engine(generator, context, load_tokenizer(model))
    transfers, stalls, alone, beside = (list[float]() for _ in range(4))
    with publishing(model, context) as (sender, tensors):
        for version in range(versions + 2):  # two to touch both slots and both sets
            next(iter(tensors.values())).add_(1e-3)
            manifest = sender.publish(version, tensors)
            if not version:
                engine.take(manifest)
                continue
            quiet = steps(engine, version, 8, None)
            began = time.perf_counter()
            arriving = threading.Thread(target=engine.prepare, args=(manifest,))
            arriving.start()
            meanwhile = steps(engine, version, 0, arriving)
            ready = time.perf_counter()
            engine.take(manifest)
            if version > 1:
                transfers.append(ready - began)
                stalls.append(time.perf_counter() - ready)
                alone += quiet
                beside += meanwhile
        engine.close()
    return Figures(
        standby=standby,
        transfer_ms=1e3 * median(transfers),
        stall_ms=1e3 * median(stalls),
        step_ms=1e3 * median(alone),
        beside_ms=1e3 * median(beside),
        stall_share=median(s / t for s, t in zip(stalls, transfers, strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_model(Path(folder), hidden=512, layers=9, heads=8, context=CONTEXT)
        found = [measure(args.model or folder, args.versions, standby=standby) for standby in CHOICES]
    if args.json:
        print(json.dumps([asdict(figures) for figures in found]))
        return
    for f in found:
        print(f"standby {f.standby!s:>5}: transfer {f.transfer_ms:.1f} ms, stall "
              f"{f.stall_ms:.2f} ms, share {f.stall_share:.4f}; a step takes {f.step_ms:.1f} ms alone, "
              f"{f.beside_ms:.1f} ms beside")  # fmt: skip


if __name__ == "__main__":
    main()

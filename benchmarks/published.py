"""What the cost models predict for numbers that others have published, beside those numbers.

    python benchmarks/published.py [--json]

Every row names the settings that are known and those that are assumed. Two unknowns of LlamaRL's runs (mean
response length, time per layer of a decoding step) are chosen for each row from the other five rows alone;
AReaL's one scale likewise; nothing else is fitted. A row misses if it is off by more than 25 %.
"""

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np

from arriero.engine.planner.costs import Layout, TrainWork, sync_seconds, train_step
from arriero.engine.planner.decoding import Decoder
from arriero.engine.planner.dispatch import even, skew_aware
from arriero.engine.planner.flow import Flow, steady
from arriero.engine.planner.hardware import Precision, hardware
from arriero.engine.planner.lengths import log_normal
from arriero.engine.planner.memory import cache_slots, resident_tokens
from arriero.engine.planner.models import model
from arriero.engine.planner.plan import asynchronous, synchronous
from arriero.engine.planner.split import Workload

TARGET = 0.25


@dataclass(frozen=True)
class Row:
    """A published number and the prediction; `raw`: without constants from other rows; `reference`: is 1."""

    what: str
    unit: str
    published: float
    predicted: float
    known: str
    assumed: str
    raw: float | None = None
    reference: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


# LlamaRL, arXiv:2505.24034: seconds a step.
LLAMARL = {
    ("8b", 0): 22.45,
    ("8b", 1): 8.90,
    ("70b", 0): 82.32,
    ("70b", 1): 20.67,
    ("405b", 0): 635.8,
    ("405b", 1): 59.5,
}
GPUS = {"8b": 256, "70b": 256, "405b": 1024}
MEANS, LAYER_S = (700.0, 1000.0, 1400.0, 2000.0), (25e-6, 50e-6, 100e-6, 200e-6)
MIDDLE = (1000.0, 25e-6)


@cache
def llamarl_step(size: str, staleness: int, mean: float, layer_s: float) -> float:
    """2,048 sequences a step, log-normal lengths cut at four times the mean; S = 0: one engine in turns."""
    h = replace(hardware("h100"), kernel_s=layer_s)
    precision: Precision = "fp8" if (size, staleness) == ("405b", 1) else "bf16"
    work = Workload(
        groups=512, samples=4, responses=log_normal(mean, sigma=0.7, longest=4 * mean), generate=precision
    )
    shape = model(f"llama-3.1-{size}")
    if staleness == 0:
        return synchronous(shape, h, GPUS[size], work, coupled=True).step_s
    return asynchronous(shape, h, GPUS[size], work, staleness=staleness).step_s


def llamarl() -> Iterable[Row]:
    for left_out, published in LLAMARL.items():
        others = {k: v for k, v in LLAMARL.items() if k != left_out}

        def misfit(mean: float, layer_s: float, others: dict[tuple[str, int], float] = others) -> float:
            return sum(abs(math.log(llamarl_step(*k, mean, layer_s) / v)) for k, v in others.items())

        mean, layer_s = min(((m, s) for m in MEANS for s in LAYER_S), key=lambda c: misfit(*c))
        size, staleness = left_out
        yield Row(
            f"LlamaRL {size} {'asynchronous' if staleness else 'synchronous'}", "s/step", published,
            llamarl_step(size, staleness, mean, layer_s),
            known=f"model, {GPUS[size]} H100, in turns or side by side with one step of delay",
            assumed="2,048 sequences a step; sigma 0.7; layouts and split by the planner; "
            + ("fp8 generator; " if (size, staleness) == ("405b", 1) else "")
            + f"from the other rows: mean response {mean:.0f} tokens, {layer_s * 1e6:.0f} us a layer",
            raw=llamarl_step(size, staleness, *MIDDLE),
        )  # fmt: skip


# AReaL, arXiv:2505.24298: thousand tokens a second by the bound on staleness.
AREAL = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}


def areal() -> Iterable[Row]:
    shape, h, sequences, generating = model("qwen2.5-1.5b"), hardware("h800"), 8192, 6
    lengths = log_normal(9000, sigma=1.0, longest=27648)
    slots = cache_slots(shape, h, tp=1, precision="bf16", tokens=resident_tokens(200, lengths))
    work = Workload(groups=512, samples=16, responses=lengths, micro_tokens=32768).work()
    train_s = train_step(shape, h, Layout(dp=8 - generating), work).total
    raw: dict[int, float] = {}
    for staleness in AREAL:
        flow = Flow(
            decoder=Decoder(model=shape, hardware=h, slots=slots), prompt=200, responses=lengths,
            share=sequences // generating, train_s=train_s, staleness=staleness, recompute=True,
        )  # fmt: skip
        step = steady(flow, total=sequences, versions=16, warm_up=6).step_s
        raw[staleness] = sequences * lengths.mean / step / 1e3
    for left_out, published in AREAL.items():
        scale = math.exp(np.mean([math.log(AREAL[k] / raw[k]) for k in AREAL if k != left_out]))
        yield Row(
            f"AReaL staleness {left_out}", "k tokens/s", published, raw[left_out] * scale,
            known="R1-Distill-Qwen 1.5B, 8 GPUs, interruptible generation, responses up to 27,648 tokens",
            assumed="H800; 6 of 8 generate; 512 x 16 sequences a step; mean response 9,000 tokens, sigma 1; "
            f"one scale of {scale:.2f} from the other rows",
            raw=raw[left_out],
        )  # fmt: skip


# StreamRL, arXiv:2504.15930: throughput relative to running in turns on the same devices.
STREAMRL = {
    "in turns": 1.00,
    "+ skew-aware dispatch": 1.08,
    "+ apart, streamed": 1.23,
    "+ asynchronous": 1.48,
}


def streamrl() -> Iterable[Row]:
    shape, h, gpus = model("qwen2.5-72b"), hardware("h800"), 128
    lengths = log_normal(6000, sigma=1.0, longest=20000)
    work = Workload(groups=128, samples=8, responses=lengths)
    batch = lengths.spread(work.sequences).tolist()
    turns = synchronous(shape, h, gpus, work, offload=True)
    g, rest = turns.generation, turns.training.seconds + turns.sync_s
    base = even(g.decoder, batch, work.prompt, g.replicas).seconds + rest
    skewed = skew_aware(g.decoder, batch, work.prompt, g.replicas, recall=0.87).seconds + rest
    streamed = late = math.inf
    for n in range(32, 97, 16):
        apart = asynchronous(shape, h, gpus, work, generating=n)
        g = apart.generation
        decode = skew_aware(g.decoder, batch, work.prompt, g.replicas, recall=0.87).seconds
        # All but the last tenth of a batch is trained on while the tail is still being sampled.
        streamed = min(
            streamed, max(decode, apart.training.seconds) + apart.training.seconds / 10 + apart.sync_s
        )
        late = min(late, apart.step_s)
    predicted = (1.0, base / skewed, base / streamed, base / late)
    for (what, published), ratio in zip(STREAMRL.items(), predicted, strict=True):
        yield Row(
            f"StreamRL {what}", "x", published, ratio,
            known="72B, responses up to 20,000 tokens, H800, a ranker that finds 87 % of the longest fifth",
            assumed="128 GPUs, 1,024 sequences a step, mean response 6,000 tokens, sigma 1, 1 step of delay",
            reference=published == 1.0,
        )  # fmt: skip


def weight_sync() -> Iterable[Row]:
    h = hardware("h100")
    big, middle = model("llama-3.1-405b"), model("llama-3.1-70b")
    yield Row(
        "LlamaRL weight sync 405b", "s", 2.0,
        sync_seconds(big, h, senders=512, receivers=512, replica=16, precision="bf16"),
        known="shard to shard over the network, H100, `about 2 seconds`",
        assumed="512 + 512 GPUs, generator over 16, sent in bf16, 400 Gb/s a GPU of which 75 % are reached",
    )  # fmt: skip
    yield Row(
        "OpenRLHF weight sync 70b", "s", 80.0, 2.0 * middle.params / h.network_bandwidth,
        known="`about 80 s`, HybridFlow, arXiv:2409.19256, figure 14; gathered and sent by one rank",
        assumed="nothing but one 400 Gb/s link: what the wire alone would take",
    )  # fmt: skip


def pretraining() -> Iterable[Row]:
    """The training model alone, where every setting is published: Llama 3, arXiv:2407.21783, table 4."""
    shape, h = model("llama-3.1-405b"), hardware("h100")
    for gpus, dp, sequences, published in ((8192, 64, 32, 430.0), (16384, 128, 16, 400.0)):
        tokens = dp * sequences * 8192.0
        work = TrainWork(tokens=tokens, context=4096, micro_tokens=8192, recompute=False)
        cost = train_step(shape, h, Layout(tp=8, pp=16, dp=dp, interleave=4, shard="optimizer"), work)
        rate = tokens * 3 * shape.forward_flops(4096) / cost.total / gpus / 1e12
        yield Row(
            f"Llama 3 405b pretraining, {gpus} GPUs", "TFLOP/s/GPU", published, rate,
            known="tp 8, pp 16, batch of 16M tokens of 8,192, H100",
            assumed="4 model pieces per pipeline device (with 1: a quarter slower)",
        )  # fmt: skip


def rows() -> list[Row]:
    return [*llamarl(), *areal(), *streamrl(), *weight_sync(), *pretraining()]


def markdown(found: list[Row]) -> str:
    lines = ["| what | unit | published | predicted | error | without fitting | known | assumed |"]
    lines.append("|---|---|--:|--:|--:|--:|---|---|")
    for r in found:
        miss = " **miss**" if abs(r.error) > TARGET else ""
        raw = "" if r.raw is None else f"{r.raw:.3g}"
        error = "reference" if r.reference else f"{r.error:+.0%}{miss}"
        numbers = f"{r.published:g} | {r.predicted:.3g} | {error} | {raw}"
        lines.append(f"| {r.what} | {r.unit} | {numbers} | {r.known} | {r.assumed} |")
    counted = [r for r in found if not r.reference]
    hit = sum(abs(r.error) <= TARGET for r in counted)
    return "\n".join([*lines, "", f"{hit} of {len(counted)} rows within {TARGET:.0%}."])


def main() -> None:
    parser = argparse.ArgumentParser(description="Published numbers beside predicted ones.")
    parser.add_argument("--json", action="store_true")
    found = rows()
    if parser.parse_args().json:
        print(json.dumps([{**asdict(r), "error": r.error} for r in found], indent=2))
    else:
        print(markdown(found))


if __name__ == "__main__":
    main()

"""What a rollout costs on an edge: encode, decode and validate, beside a plain copy of the same bytes.

    python benchmarks/codec.py [--rollouts 200] [--rounds 15] [--tokens 3846] [--json]

A rollout of 3,846 tokens has 50 KB: int32 tokens, float32 log-probabilities, int32 versions and a mask. Each
round passes over many different rollouts, more bytes than the L2 cache holds, and copies each rollout's bytes
into fresh memory; the ratio is of the same round, and the median round counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np

from arriero.engine.codec import decode, encode
from arriero.schemas.messages import Rollout

PROMPT = 64


def rollout(tokens: int, seed: int) -> Rollout:
    """A rollout of `tokens` random tokens, the first 64 of them the prompt."""
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) >= PROMPT
    return Rollout(
        tokens=rng.integers(0, 32000, tokens).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, rng.normal(-1.0, 0.3, tokens), np.nan).astype(np.float32),
        versions=np.where(mask, seed, -1).astype(np.int32),
        text="",
        finish="stop",
    )


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call, so that other work on the machine counts less."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def each(work: Callable[[Rollout], object], rollouts: Iterable[Rollout]) -> None:
    """Call `work` on every rollout and let go of what it gives."""
    for r in rollouts:
        work(r)


def copy(r: Rollout) -> bytes:
    """The bytes of a rollout, once, in fresh memory."""
    return b"".join((r.tokens.data, r.mask.data, r.logprobs.data, r.versions.data))


def measure(num_rollouts: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Microseconds per rollout of each path in each round."""
    rollouts = [rollout(tokens, seed) for seed in range(num_rollouts)]
    messages = [encode(r) for r in rollouts]
    found: dict[str, list[float]] = {"copy": [], "encode": [], "decode": [], "round_trip": []}
    gc.disable()  # as a collection would fall into one path or another by chance
    for _ in range(rounds + 1):
        took = {
            "copy": seconds(lambda: each(copy, rollouts)),
            "encode": seconds(lambda: each(encode, rollouts)),
            "decode": seconds(lambda: [decode(m, Rollout) for m in messages]),
            "round_trip": seconds(lambda: each(lambda r: decode(encode(r), Rollout), rollouts)),
        }
        for name, value in took.items():
            found[name].append(value / num_rollouts * 1e6)
    gc.enable()
    return {name: values[1:] for name, values in found.items()}  # the first round warms up


def main() -> None:
    """Print the medians, and as the last line JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=3846)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.rollouts, args.rounds, args.tokens)
    one = rollout(args.tokens, 0)
    ratios = [a / b for a, b in zip(found["round_trip"], found["copy"], strict=True)]
    figures = {
        "payload_bytes": len(copy(one)),
        "message_bytes": len(encode(one)),
        **{f"{name}_us": round(median(values), 2) for name, values in found.items()},
        "round_trip_per_copy": round(median(ratios), 2),
    }
    for name, value in figures.items():
        print(f"{name:20} {value}")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

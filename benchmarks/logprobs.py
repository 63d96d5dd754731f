"""Memory and time of log-probabilities for a large vocabulary: a chunk of the logits at a time, or all.

    python benchmarks/logprobs.py [--tokens 1024] [--vocab 128256] [--hidden 512] [--chunk-mb 64] [--json]

Forward and backward of the log-probabilities and entropies of `tokens` tokens, entropies with gradient, each
way in a process of its own. `extra_mb` is the peak of resident memory above that before the computation, in
which the weights, the hidden states and room for both gradients are; `seconds` is processor time.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from arriero.components.head import Head

WAYS = ("plain", "chunked")


def plain(hidden_TH: Tensor, linear: torch.nn.Linear, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """As one writes it by hand."""
    log_TV = linear(hidden_TH).log_softmax(-1)
    return log_TV.gather(1, targets_T[:, None])[:, 0], -(log_TV.exp() * log_TV).sum(-1)


def measure(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Peak of memory, time, and sums over the gradients, by which the two ways are compared."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = torch.nn.Linear(args.hidden, args.vocab, bias=False)
    hidden_TH = torch.randn(args.tokens, args.hidden, requires_grad=True)
    targets_T = torch.randint(0, args.vocab, (args.tokens,))
    # What both ways need and aren't measured for: the gradients, touched once.
    linear.weight.grad, hidden_TH.grad = torch.ones_like(linear.weight), torch.ones_like(hidden_TH)
    before, start = _resident_mb(), time.process_time()
    if way == "plain":
        logprobs_T, entropy_T = plain(hidden_TH, linear, targets_T)
    else:
        head = Head(chunk_mb=args.chunk_mb, entropy_gradient=True)
        logprobs_T, entropy_T = head(hidden_TH, linear, targets_T, torch.ones(args.tokens))
    torch.autograd.backward((logprobs_T + 0.1 * entropy_T).sum())
    return {
        "extra_mb": round(_resident_mb() - before),
        "seconds": round(time.process_time() - start, 2),
        "by_hidden": float((hidden_TH.grad - 1).abs().sum()),
        "by_weight": float((linear.weight.grad - 1).abs().sum()),
    }


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"tokens": 1024, "vocab": 128_256, "hidden": 512, "chunk_mb": 64}
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args)))
        return
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way]
        command += [word for n in numbers for word in (f"--{n.replace('_', '-')}", str(getattr(args, n)))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
        print(f"{way}: " + ", ".join(f"{key} {value:g}" for key, value in found[way].items()))
    logits_mb = args.tokens * args.vocab * 4 / 2**20
    ratios = {
        "logits_mb": round(logits_mb),
        "memory plain / chunked": round(found["plain"]["extra_mb"] / found["chunked"]["extra_mb"], 2),
        "time plain / chunked": round(found["plain"]["seconds"] / found["chunked"]["seconds"], 2),
    }
    print(", ".join(f"{key} {value}" for key, value in ratios.items()))
    if args.json:
        print(json.dumps(found | {"ratios": ratios}))


if __name__ == "__main__":
    main()

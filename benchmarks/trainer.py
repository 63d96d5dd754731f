"""How fast a training step is, against a plain PyTorch loop over the same micro-batches.

    python benchmarks/trainer.py [--samples 128] [--shortest 8] [--longest 40] [--steps 9] [--json]

The plain loop knows the rows already and does nothing but the forward, the same loss, the backward, clipping
and AdamW; ours packs the batch anew each step, checks it and measures it. They alternate on one thread, and
the figure is the median of the ratios plain / ours: 1 is equal, above 1 ours is faster.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.packing import MicroBatch
from arriero.components.training import TrainState
from arriero.schemas.messages import Batch, Sample

PROMPT = 7


def batch_of(samples: int, shortest: int, longest: int, vocab_size: int) -> Batch:
    """Random sequences of `shortest` to `longest` tokens, the first seven of each not trained on."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for i in range(samples):
        length = int(rng.integers(shortest, longest + 1))
        mask = np.arange(length) >= PROMPT
        made.append(
            Sample(
                group=str(i),
                tokens=rng.integers(4, vocab_size, length).astype(np.int32),
                mask=mask,
                advantages=np.full(length, rng.normal(), dtype=np.float32),
                logprobs=np.where(mask, -3.4, np.nan).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return Batch(samples=tuple(made))


class PlainLoop:
    """The same step as one would write it by hand, on whole rows [B, L] with a mask."""

    def __init__(self, model: LlamaForCausalLM, micros: list[MicroBatch], optimizer: AdamW) -> None:
        self.model = model
        self.max_norm = optimizer.max_grad_norm
        self.adamw = torch.optim.AdamW(
            model.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=0.0, fused=True
        )
        self.rows = [self._row(m) for m in micros]

    def _row(self, m: MicroBatch) -> tuple[Tensor, ...]:
        """Token ids and, where they are trained on, target, advantage times weight, behaviour; all [B, L]."""
        assert isinstance(m.keep, int)
        assert m.tokens.behaviour_T is not None
        B, L = m.input_ids_BL.shape
        position_T = m.index_T // m.keep * L + m.index_T % m.keep + L - m.keep
        columns = (m.tokens.targets_T, m.tokens.advantages_T * m.tokens.weights_T, m.tokens.behaviour_T)
        return m.input_ids_BL, *(
            torch.zeros(B * L, dtype=x.dtype).index_copy(0, position_T, x).view(B, L) for x in columns
        )

    def step(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        for input_ids_BL, targets_BL, scaled_BL, behaviour_BL in self.rows:
            logits_BLV = self.model(input_ids=input_ids_BL, use_cache=False).logits
            logp_BL = logits_BLV.float().log_softmax(-1).gather(-1, targets_BL[..., None])[..., 0]
            ratio_BL = (logp_BL - behaviour_BL).detach().exp().clamp(max=2.0)
            torch.autograd.backward(-(ratio_BL * scaled_BL * logp_BL).sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.adamw.step()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=40)
    parser.add_argument("--vocab", type=int, default=32)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each, after two that aren't")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=args.vocab,
        max_position_embeddings=max(512, args.longest),
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    optimizer = AdamW(lr=1e-5, max_grad_norm=1.0)
    batch = batch_of(args.samples, args.shortest, args.longest, args.vocab)
    ours = TrainState(copy.deepcopy(model), loss=AIPO(rho=2.0), optimizer=optimizer, steps=1000)
    micros = ours.micro_batches(batch)
    plain = PlainLoop(model, micros, optimizer)
    pairs = [(seconds(plain.step), seconds(lambda: ours.step(batch))) for _ in range(args.steps + 2)][2:]
    tokens = sum(len(s.tokens) for s in batch.samples)
    result = {
        "samples": args.samples,
        "tokens": tokens,
        "micro_batches": len(micros),
        "padding": round(sum(m.input_ids_BL.numel() for m in micros) / tokens - 1, 3),
        "plain_s": round(statistics.median(p for p, _ in pairs), 4),
        "ours_s": round(statistics.median(o for _, o in pairs), 4),
        "ratio": round(statistics.median(p / o for p, o in pairs), 3),
        "difference": max(
            float((a - b).abs().max().detach())
            for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True)
        ),
    }
    print(", ".join(f"{key} {value}" for key, value in result.items()))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

"""How fast a training step is, against a plain PyTorch loop over the same rows, in every layout.

    python benchmarks/trainer.py [--groups 16] [--samples 8] [--prompt 7] [--longest 32] [--json]

The plain loop knows its rows already and does nothing but the forward, the same loss, the backward, clipping
and AdamW; ours packs the batch anew each step, checks it and measures it. They take turns on one thread, and
the figures are medians of ratios of processor time within a turn: `plain / ours` is 1 where both are equally
fast, above 1 where ours is faster. `tokens` are those that are forwarded, padding included.
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
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.packing import Layout, MicroBatch
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.schemas.messages import Batch, Sample

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared_prefix")


def batch_of(groups: int, samples: int, prompt: int, responses: tuple[int, int], vocab_size: int) -> Batch:
    """Groups of random responses of `responses` tokens, from the least to the most, to one prompt each."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for group in range(groups):
        asked = rng.integers(4, vocab_size, prompt)
        for _ in range(samples):
            length = prompt + int(rng.integers(responses[0], responses[1] + 1))
            mask = np.arange(length) >= prompt
            answer = rng.integers(4, vocab_size, length - prompt)
            made.append(
                Sample(
                    group=str(group),
                    tokens=np.concatenate([asked, answer]).astype(np.int32),
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
        assert m.tokens.behaviour_T is not None
        B, L = m.input_ids_BL.shape
        columns = (m.tokens.targets_T, m.tokens.advantages_T * m.tokens.weights_T, m.tokens.behaviour_T)
        return m.input_ids_BL, *(
            torch.zeros(B * L, dtype=x.dtype).index_copy(0, m.index_T, x).view(B, L) for x in columns
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
    """Processor time: the machine may be shared."""
    start = time.process_time()
    call()
    return time.process_time() - start


def model_of(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        vocab_size=args.vocab,
        max_position_embeddings=args.prompt + args.longest,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {
        "groups": 16, "samples": 8, "prompt": 7, "shortest": 32, "longest": 32, "vocab": 32, "hidden": 128,
        "layers": 4, "budget": 8192, "steps": 9,
    }  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = model_of(args), AdamW(lr=1e-5, max_grad_norm=1.0)
    batch = batch_of(args.groups, args.samples, args.prompt, (args.shortest, args.longest), args.vocab)
    states = {
        layout: TrainState(
            copy.deepcopy(model), loss=AIPO(rho=2.0), optimizer=optimizer, steps=1000,
            token_budget=args.budget, options=TrainingOptions(packing=layout),
        )
        for layout in LAYOUTS
    }  # fmt: skip
    micros = {layout: state.micro_batches(batch) for layout, state in states.items()}
    plain = PlainLoop(model, micros["padded"], optimizer)
    turns: list[dict[str, float]] = []
    for _ in range(args.steps + 2):
        turn = {"plain": seconds(plain.step)}
        turns.append(turn | {name: seconds(partial(state.step, batch)) for name, state in states.items()})
    tokens = {name: sum(m.input_ids_BL.numel() for m in found) for name, found in micros.items()}
    result: dict[str, dict[str, float]] = {}
    for name, state in states.items():
        parts = zip(plain.model.parameters(), state.model.parameters(), strict=True)
        result[name] = {
            "tokens": tokens[name],
            "micro_batches": len(micros[name]),
            "fewer tokens": round(tokens["packed"] / tokens[name], 3),
            "plain / ours": round(statistics.median(t["plain"] / t[name] for t in turns[2:]), 3),
            "packed / ours": round(statistics.median(t["packed"] / t[name] for t in turns[2:]), 3),
            "difference": max(float((a - b).abs().max().detach()) for a, b in parts),
        }
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result[name].items()))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

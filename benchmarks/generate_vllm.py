"""Tokens per second of our generator on vLLM and of vLLM alone, side by side in one process.

    python benchmarks/generate_vllm.py [--json] [--repeats 7] [--model DIRECTORY]

Both sample the same number of tokens for the same prompts, at temperature 1, in as many slots, with the
log-probability of each sampled token. *Ours* is what a generator does in its role: tokenizing, groups,
checked rollouts with versions and text. *Bare* is vLLM alone, token ids in and token ids out. Both keep
their engine for all turns, which alternate. Seconds are those of the processor (user and system), so that
other work on the machine counts less. Without --model, a random Llama of 0.9 million parameters: the smaller
the model, the more everything besides it counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from arriero.components.generator import Generator
from arriero.components.group_decoding import GroupDecoding
from arriero.components.policy import load_tokenizer
from arriero.components.sampling import Sampling
from arriero.components.vllm_start import start
from arriero.engine.runtime.context import Context
from arriero.schemas.messages import Prompt, RolloutGroup, Weights
from arriero.schemas.weights import WeightManifest
from benchmarks.random_policy import generator_context, publishing, write_model

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 48


@dataclass(frozen=True, kw_only=True)
class Figures:
    """`ratio`: tokens/s of ours over those of the bare engine, median over the turns."""

    parameters: int
    ratio: float
    ratio_worst: float
    ratio_best: float
    ours_tokens_per_s: float
    bare_tokens_per_s: float


def ours(work: GroupDecoding, turn: int) -> int:
    """Number of tokens sampled."""
    for n in range(PROMPTS):
        refused = work.add(Prompt(id=f"{turn}/{n}", text=text(n), origins=(n,)))
        assert refused is None, refused
    tokens = 0
    while not work.idle:
        for group in work.step():
            assert isinstance(group, RolloutGroup), group
            tokens += sum(int(rollout.mask.sum()) for rollout in group.rollouts)
    return tokens


def bare(llm: Any, prompts: list[list[int]], sampling: Any, turn: int) -> int:
    """Number of tokens sampled."""
    tokens_input: Any = import_module("vllm.inputs.engine").tokens_input
    for n in range(PROMPTS * SAMPLES):
        llm.add_request(f"{turn}/{n}", tokens_input(prompts[n // SAMPLES]), sampling)
    tokens = 0
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return tokens


def text(n: int) -> str:
    return f"{n}+{n * 7 % 13}="


def measure(model: str, repeats: int) -> Figures:
    generator = Generator(
        model=model, samples=SAMPLES, slots=PROMPTS * SAMPLES, context=256, engine="vllm",
        sampling=Sampling(max_new_tokens=NEW_TOKENS),
    )  # fmt: skip
    context = generator_context(staleness=0)
    with publishing(model, context) as (sender, tensors):
        parameters = sum(tensor.numel() for tensor in tensors.values())
        rates = turns(generator, context, sender.publish(0, tensors), repeats)
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    return Figures(
        parameters=parameters,
        ratio=statistics.median(ratios),
        ratio_worst=min(ratios),
        ratio_best=max(ratios),
        ours_tokens_per_s=statistics.median(rates[0]),
        bare_tokens_per_s=statistics.median(rates[1]),
    )


def turns(
    generator: Generator, context: Context, manifest: WeightManifest, repeats: int
) -> tuple[list[float], list[float]]:
    """Tokens per second of ours and of the bare engine, which decode in turn."""
    model = generator.model
    work = GroupDecoding(generator, context)
    work.load(Weights(version=0, manifest=manifest))
    configs: Any = AutoConfig
    llm = start(generator, configs.from_pretrained(model), 256, context)
    llm.collective_rpc("begin_weights", args=(manifest.model_dump_json(),))
    llm.collective_rpc("arrived", kwargs={"wait": True})
    llm.collective_rpc("use_weights")
    parameters: Any = import_module("vllm.sampling_params")
    sampling = parameters.SamplingParams(
        temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=parameters.RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    tokenizer: Any = load_tokenizer(model)  # its methods are typed in part
    prompts = [list(tokenizer.encode(text(n))) for n in range(PROMPTS)]
    sides: list[Callable[[int], int]] = [lambda t: ours(work, t), lambda t: bare(llm, prompts, sampling, t)]
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(-1, repeats):  # the first one warms up
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.process_time()
            tokens = sides[which](turn)
            if turn >= 0:
                rates[which].append(tokens / (time.process_time() - began))
    work.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_model(Path(folder), hidden=128, layers=4, heads=4, context=512)
        figures = measure(args.model or folder, args.repeats)
    if args.json:
        print(json.dumps(asdict(figures)))
        return
    print(f"{figures.parameters / 1e6:.1f} million parameters, {PROMPTS} x {SAMPLES} x {NEW_TOKENS} tokens")
    print(f"ours {figures.ours_tokens_per_s:.0f} tokens/s, bare {figures.bare_tokens_per_s:.0f} tokens/s")
    print(f"ratio {figures.ratio:.3f} ({figures.ratio_worst:.3f} to {figures.ratio_best:.3f})")


if __name__ == "__main__":
    main()

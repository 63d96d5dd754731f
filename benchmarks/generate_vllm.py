"""Tokens per second of our generator on vLLM and of vLLM alone, side by side in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.generate_vllm [--json] [--repeats 9] [--model DIRECTORY]

Both sample the same number of tokens for the same prompts, at temperature 1, in as many slots, with the
log-probability of each sampled token, each in a thread of its own. *Ours* is `Generator.run`, from prompts on
a stream to groups: tokenizing, its event loop and its compute thread, versions, log-probabilities, checked
rollouts with text. *Bare* is `LLMEngine.step` alone, token ids in and token ids out. Both keep their engine
for all turns, which alternate; a turn in which one samples another number of tokens is an error. Ratios are
given by the processor's time (user and system of the whole process), which other work on the machine
stretches less, and by the clock. Without --model, a random Llama of 0.9 million parameters: the smaller the
model, the more everything besides it counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig

from arriero.components.compute import ComputeThread
from arriero.components.generator import Generator
from arriero.components.policy import load_tokenizer
from arriero.components.sampling import Sampling
from arriero.components.vllm_start import start
from arriero.engine.runtime.context import Context, entered
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup, Weights
from arriero.schemas.weights import WeightManifest
from benchmarks.random_policy import generator_context, publishing, write_model

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 48
TOKENS = PROMPTS * SAMPLES * NEW_TOKENS


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Of our tokens per second to those of the bare engine: median over the turns, and the extremes."""

    median: float
    worst: float
    best: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    parameters: int
    processor: Ratio
    clock: Ratio
    ours_tokens_per_s: float  # by the processor's time
    bare_tokens_per_s: float


class Feed:
    """Source of a stream that gets its records while it is read, and ends when it is closed."""

    def __init__(self) -> None:
        self._records: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._open = True

    def give(self, *records: object) -> None:
        self._records.extend(records)
        self._changed.set()

    def close(self) -> None:
        self._open = False
        self._changed.set()

    async def next(self) -> Any:
        while self._open and not self._records:
            self._changed.clear()
            await self._changed.wait()
        return self.poll()

    def poll(self) -> Any:
        return self._records.popleft() if self._records else None

    async def at(self, version: int) -> Any:
        raise LookupError(version)


def text(n: int) -> str:
    return f"{n}+{n * 7 % 13}="


async def ours(run: AsyncIterator[RolloutGroup | Dropped], prompts: Feed, turn: int) -> int:
    """Number of tokens sampled."""
    prompts.give(*(Prompt(id=f"{turn}/{n}", text=text(n), origins=(n,)) for n in range(PROMPTS)))
    tokens = 0
    for _ in range(PROMPTS):
        group = await anext(run)
        assert isinstance(group, RolloutGroup), group
        tokens += sum(int(rollout.mask.sum()) for rollout in group.rollouts)
    return tokens


class Bare:
    """vLLM alone, started as our generator starts it, with the same weights."""

    def __init__(self, generator: Generator, context: Context, manifest: WeightManifest) -> None:
        configs: Any = AutoConfig
        llm = start(generator, configs.from_pretrained(generator.model), 256, context)
        llm.collective_rpc("begin_weights", args=(manifest.model_dump_json(),))
        llm.collective_rpc("arrived", kwargs={"wait": True})
        llm.collective_rpc("use_weights")
        parameters: Any = import_module("vllm.sampling_params")
        self._sampling = parameters.SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=parameters.RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        tokenizer: Any = load_tokenizer(generator.model)  # its methods are typed in part
        self._prompts = [list(tokenizer.encode(text(n))) for n in range(PROMPTS)]
        self._tokens_input: Any = import_module("vllm.inputs.engine").tokens_input
        self._llm = llm

    def sample(self, turn: int) -> int:
        """Number of tokens sampled."""
        for n in range(PROMPTS * SAMPLES):
            self._llm.add_request(
                f"{turn}/{n}", self._tokens_input(self._prompts[n // SAMPLES]), self._sampling
            )
        tokens = 0
        while self._llm.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in self._llm.step())
        return tokens

    def close(self) -> None:
        self._llm.collective_rpc("close_intake")
        self._llm.engine_core.shutdown()


async def turns(
    generator: Generator, context: Context, manifest: WeightManifest, repeats: int
) -> list[tuple[list[float], list[float]]]:
    """Seconds (of the processor, of the clock) of ours and of the bare engine, which decode in turn."""
    prompts, weights = Feed(), Feed()
    weights.give(Weights(version=0, manifest=manifest))
    seconds: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    with entered(context), ComputeThread("bare") as thread:
        run = generator.run(Stream("prompts", Prompt, prompts), Stream("weights", Weights, weights))
        await ours(run, prompts, -3)  # starts it
        bare = await thread(Bare, generator, context, manifest)
        sides: list[Callable[[int], Awaitable[int]]] = [
            lambda turn: ours(run, prompts, turn),
            lambda turn: thread(bare.sample, turn),
        ]
        for turn in range(-2, repeats):  # the first ones warm up
            for which in (0, 1) if turn % 2 else (1, 0):
                used, began = time.process_time(), time.perf_counter()
                sampled = await sides[which](turn)
                taken = time.process_time() - used, time.perf_counter() - began
                assert sampled == TOKENS, f"{sampled} tokens, not {TOKENS}: the model ends its responses"
                if turn >= 0:
                    for kind, value in zip(seconds[which], taken, strict=True):
                        kind.append(value)
        await thread(bare.close)
        prompts.close()
        assert await anext(run, None) is None
    return seconds


def measure(model: str, repeats: int) -> Figures:
    generator = Generator(
        model=model, samples=SAMPLES, slots=PROMPTS * SAMPLES, context=256, engine="vllm",
        sampling=Sampling(max_new_tokens=NEW_TOKENS),
    )  # fmt: skip
    context = generator_context(staleness=0)
    with publishing(model, context) as (sender, tensors):
        parameters = sum(tensor.numel() for tensor in tensors.values())
        ours_s, bare_s = asyncio.run(turns(generator, context, sender.publish(0, tensors), repeats))
    return Figures(
        parameters=parameters,
        processor=ratio(ours_s[0], bare_s[0]),
        clock=ratio(ours_s[1], bare_s[1]),
        ours_tokens_per_s=TOKENS / median(ours_s[0]),
        bare_tokens_per_s=TOKENS / median(bare_s[0]),
    )


def ratio(ours_s: list[float], bare_s: list[float]) -> Ratio:
    ratios = [b / a for a, b in zip(ours_s, bare_s, strict=True)]
    return Ratio(median=median(ratios), worst=min(ratios), best=max(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
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
    for name, r in (("processor", figures.processor), ("clock", figures.clock)):
        print(f"ratio by {name}: {r.median:.3f} ({r.worst:.3f} to {r.best:.3f})")


if __name__ == "__main__":
    main()

"""Tokens per second of the embedded decode engine and of `model.generate`, side by side in one process.

    python benchmarks/generate.py [--json] [--repeats 9] [--stories DIRECTORY]

Both sample the same number of tokens at temperature 1 for the same prompts of mixed lengths,
end-of-sequence off, on one thread, and take turns. `generate` gets what it is best at: one batch, padded on
the left, its KV cache, no scores kept. The engine lives through all turns, as in a generator, and also
returns log-probabilities and versions. Seconds are those of the processor (user and system), so that other
work on the machine counts less. Reported: the median over the turns of the ratio of the two, and the median
tokens per second of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from arriero.components.decoding import DecodeEngine
from arriero.components.rollout_engine import Request
from arriero.components.sampling import Sampling

# What transformers loads, generates and tokenizes with is untyped.
Model: TypeAlias = Any
load: Any = AutoModelForCausalLM
make_tokenizer: Any = PreTrainedTokenizerFast

STORIES = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "models" / "stories260K"


@dataclass(frozen=True, kw_only=True)
class Case:
    """`prompts` prompts of `shortest` to `longest` tokens, `samples` responses of `new_tokens` to each."""

    name: str
    prompts: int
    samples: int
    new_tokens: int
    shortest: int = 6
    longest: int = 10


@dataclass(frozen=True, kw_only=True)
class Figures:
    """`ratio`: tokens/s of the engine over those of generate, median over the turns."""

    name: str
    parameters: int
    ratio: float
    ratio_worst: float
    ratio_best: float
    engine_tokens_per_s: float
    generate_tokens_per_s: float


def random_llama(*, hidden: int, layers: int, intermediate: int, vocab_size: int = 32) -> LlamaForCausalLM:
    torch.default_generator.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def without_end(model: Model) -> Model:
    """The model with its end-of-sequence tokens forgotten, so that every response has the same length."""
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    model.train(False)
    return model


def engine_for(model: Model, case: Case) -> DecodeEngine:
    tokenizer = make_tokenizer(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")))
    return DecodeEngine(
        model,
        tokenizer,
        Sampling(max_new_tokens=case.new_tokens),
        slots=case.prompts * case.samples,
        max_length=case.longest + case.new_tokens,
    )


def sample_with_engine(engine: DecodeEngine, prompts: list[list[int]], case: Case, seed: int) -> int:
    """Number of tokens sampled."""
    numbered = enumerate(prompt for prompt in prompts for _ in range(case.samples))
    engine.add([Request(key=str(i), prompt_ids=prompt, seed=seed + i) for i, prompt in numbered])
    num_tokens = 0
    while not engine.idle:
        num_tokens += sum(len(completion.token_ids) for completion in engine.step())
    return num_tokens


def sample_with_generate(model: Model, prompts: list[list[int]], case: Case, seed: int) -> int:
    """Number of tokens sampled."""
    torch.default_generator.manual_seed(seed)
    rows = [prompt for prompt in prompts for _ in range(case.samples)]
    longest = max(map(len, rows))
    token_ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        output = model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.new_tokens,
            min_new_tokens=case.new_tokens,
            use_cache=True,
            pad_token_id=0,
        )
    num_new: int = output.shape[1] - longest
    return num_new * len(rows)


def measure(model: Model, case: Case, repeats: int) -> Figures:
    rng = np.random.default_rng(0)
    vocab_size: int = model.config.vocab_size
    lengths = rng.integers(case.shortest, case.longest + 1, case.prompts)
    prompts = [[int(rng.integers(3, vocab_size)) for _ in range(length)] for length in lengths]
    num_tokens = case.prompts * case.samples * case.new_tokens
    engine = engine_for(model, case)
    sides: list[tuple[str, Callable[[int], int]]] = [
        ("engine", lambda seed: sample_with_engine(engine, prompts, case, seed)),
        ("generate", lambda seed: sample_with_generate(model, prompts, case, seed)),
    ]
    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    for turn in range(-2, repeats):
        for name, sample in sides if turn % 2 else reversed(sides):
            begin = time.process_time()
            sampled = sample(1000 * (turn + 2))
            elapsed = time.process_time() - begin
            assert sampled == num_tokens, f"{name} sampled {sampled} tokens, not {num_tokens}"
            if turn >= 0:
                seconds[name].append(elapsed)
    ratios = [theirs / ours for ours, theirs in zip(seconds["engine"], seconds["generate"], strict=True)]
    return Figures(
        name=case.name,
        parameters=model.num_parameters(),
        ratio=round(statistics.median(ratios), 3),
        ratio_worst=round(min(ratios), 3),
        ratio_best=round(max(ratios), 3),
        engine_tokens_per_s=round(num_tokens / statistics.median(seconds["engine"])),
        generate_tokens_per_s=round(num_tokens / statistics.median(seconds["generate"])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--repeats", type=int, default=9, help="turns that are measured, after two that are not"
    )
    parser.add_argument(
        "--stories", type=Path, default=STORIES, help="directory of a further model to measure"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    demo = Case(name="demo", prompts=32, samples=8, new_tokens=5)
    longer = Case(name="1M", prompts=16, samples=8, new_tokens=32)
    work: list[tuple[Model, Case]] = [
        (random_llama(hidden=64, layers=3, intermediate=128), demo),
        (random_llama(hidden=128, layers=4, intermediate=512), longer),
    ]
    if options.stories.is_dir():
        stories = Case(name=options.stories.name, prompts=16, samples=8, new_tokens=32)
        work.append((load.from_pretrained(options.stories, dtype=torch.float32), stories))
    else:
        print(f"left out: no model in {options.stories.name}")
    results = [measure(without_end(model), case, options.repeats) for model, case in work]
    for figures in results:
        print(
            f"{figures.name:>12} {figures.parameters:>9,} parameters: "
            f"engine {figures.engine_tokens_per_s:,.0f} tokens/s, "
            f"generate {figures.generate_tokens_per_s:,.0f}; ratio {figures.ratio} "
            f"({figures.ratio_worst} to {figures.ratio_best})"
        )
    if options.json:
        print(
            json.dumps(
                {"threads": 1, "repeats": options.repeats, "cases": [asdict(each) for each in results]}
            )
        )


if __name__ == "__main__":
    main()

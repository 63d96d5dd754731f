"""How full micro-batches are, and how many tokens are forwarded, on the lengths of GSM8K.

    python benchmarks/packing.py FOLDER [--examples 2048] [--samples 8] [--budget 8192] [--step 1024] [--json]

FOLDER holds GSM8K's train.jsonl and the tokenizer comes from --model. `packed`: one sequence per example,
question and solution. `shared_prefix`: `samples` solutions to each question, those of other questions in
their place, since only lengths matter. All figures are of all steps together. `full`: tokens over what is
computed: padding is, and all micro-batches of a step take as long, and as much memory, as the largest.
`of the budget`: tokens over micro-batches times the budget; `fewest`: the same for as few micro-batches as
the sum of tokens allows, which no packing can exceed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from arriero.components.planning import Layout, Tokens, in_prefix_order, plan


def efficiency(steps: Sequence[list[Tokens]], layout: Layout, budget: int) -> dict[str, float]:
    """How full micro-batches are, and tokens beside one pass per sequence."""
    forwarded = sequences = largest = budgets = fewest = 0
    for inputs in steps:
        (micros,) = plan(inputs, token_budget=budget, layout=layout)
        sizes: list[int] = []
        tokens = 0
        for micro in micros:
            lengths = [len(inputs[i]) for i in micro]
            shared = sum(in_prefix_order(inputs, micro)[1]) if layout == "shared_prefix" else 0
            padding = len(lengths) * max(lengths) - sum(lengths) if layout == "padded" else 0
            sizes.append(sum(lengths) - shared + padding)
            tokens += sum(lengths) - shared
            sequences += sum(lengths)
        forwarded += tokens
        # Padded runs have the sizes that fit their lengths: what they compute is their own padding.
        largest += sum(sizes) if layout == "padded" else len(sizes) * max(sizes)
        budgets += len(micros) * budget
        fewest += -(-tokens // budget) * budget
    return {
        "full": round(forwarded / largest, 3),
        "of the budget": round(forwarded / budgets, 3),
        "fewest": round(forwarded / fewest, 3),
        "fewer tokens": round(sequences / forwarded, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="a directory with a tokenizer")
    numbers = {"examples": 2048, "samples": 8, "budget": 8192, "step": 1024}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    untyped: Any = AutoTokenizer  # `from_pretrained` has no annotations
    encode = untyped.from_pretrained(args.model).encode
    lines = (args.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[: args.examples]
    rows = [json.loads(line) for line in lines]
    questions: list[Tokens] = [np.array(encode(row["question"]), np.int32) for row in rows]
    answers: list[Tokens] = [np.array(encode(row["answer"]), np.int32) for row in rows]
    single: list[Tokens] = [np.concatenate([q, a]) for q, a in zip(questions, answers, strict=True)]
    samples: int = args.samples
    grouped: list[Tokens] = [
        np.concatenate([q, answers[(k * samples + n) % len(answers)]])
        for k, q in enumerate(questions)
        for n in range(samples)
    ]

    def cut(inputs: list[Tokens], size: int) -> list[list[Tokens]]:
        return [inputs[i : i + size] for i in range(0, len(inputs) - size + 1, size)]

    result = {
        "padded": efficiency(cut(single, args.step), "padded", args.budget),
        "packed": efficiency(cut(single, args.step), "packed", args.budget),
        "shared_prefix": efficiency(cut(grouped, args.step * args.samples), "shared_prefix", args.budget),
        "lengths": {"mean": round(float(np.mean([len(s) for s in single])), 1)},
    }
    for name, found in result.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

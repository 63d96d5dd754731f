"""How full micro-batches are, and how many tokens are forwarded, on the lengths of GSM8K.

    python benchmarks/packing.py FOLDER [--examples 2048] [--samples 8] [--budget 8192] [--step 1024] [--json]

FOLDER holds GSM8K's train.jsonl and the tokenizer comes from --model. `packed`: one sequence per example,
question and solution. `shared_prefix`: `samples` solutions to each question, those of other questions in
their place, since only lengths matter. A figure is tokens that are forwarded over the room of the
micro-batches, all steps together.
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
    """Share of the room of all micro-batches that tokens fill, and tokens beside one pass per sequence."""
    forwarded = room = sequences = 0
    for inputs in steps:
        (micros,) = plan(inputs, token_budget=budget, layout=layout)
        for micro in micros:
            tokens = [len(inputs[i]) for i in micro]
            shared = sum(in_prefix_order(inputs, micro)[1]) if layout == "shared_prefix" else 0
            padding = len(tokens) * max(tokens) - sum(tokens) if layout == "padded" else 0
            forwarded += sum(tokens) - shared
            room += sum(tokens) + padding if layout == "padded" else budget
            sequences += sum(tokens)
    return {"full": round(forwarded / room, 3), "fewer tokens": round(sequences / forwarded, 2)}


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

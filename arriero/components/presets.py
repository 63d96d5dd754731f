"""Data sets by a short name: where they are, and what their fields are called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

FOLDER_VARIABLE = "ARRIERO_DATA"  # a folder with copies, looked into first

BOXED: Final = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
MARKED: Final = "{prompt}\nReason step by step, then give the final number after ####."

# Fields of a `PromptSource`, and the copies of its files below the folder.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "gsm8k": {
        "path": "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet",
        "eval_path": "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet",
        "prompt_field": "question",
        "answer_field": "answer",
        "template": MARKED,
    },
    "math": {
        "path": "hf://datasets/DigitalLearningGmbH/MATH-lighteval/data/train-00000-of-00001.parquet",
        "eval_path": "hf://datasets/HuggingFaceH4/MATH-500/test.jsonl",
        "prompt_field": "problem",
        "answer_field": "solution",
        "template": BOXED,
    },
    "math500": {
        "path": "hf://datasets/HuggingFaceH4/MATH-500/test.jsonl",
        "prompt_field": "problem",
        "answer_field": "answer",
        "template": BOXED,
    },
    "aime": {
        "path": "hf://datasets/HuggingFaceH4/aime_2024/data/train-00000-of-00001.parquet",
        "prompt_field": "problem",
        "answer_field": "answer",
        "template": BOXED,
    },
}
COPIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gsm8k": {"path": ("gsm8k/train.jsonl",), "eval_path": ("gsm8k/test.jsonl",)},
    "math": {"path": ("math/train.jsonl",), "eval_path": ("math/math500.jsonl",)},
    "math500": {"path": ("math/math500.jsonl", "math500.jsonl")},
    "aime": {"path": ("aime/aime24.jsonl", "aime24.jsonl")},
}


def expanded(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `PromptSource` whose `path` may be a preset's name; what is given stands.

    A copy in the folder that ARRIERO_DATA names is taken where there is one. `reasoning-gym:NAME` is
    `reasoning_gym:NAME`.
    """
    path = given.get("path")
    if isinstance(path, str) and path.startswith("reasoning-gym:"):
        return {**given, "path": path.replace("-", "_", 1)}
    if not isinstance(path, str) or path not in PRESETS:
        return dict(given)
    found: dict[str, Any] = dict(PRESETS[path])
    folder = os.environ.get(FOLDER_VARIABLE)
    for field, copies in COPIES[path].items() if folder else ():
        copy = next((f for c in copies if (f := Path(cast("str", folder)) / c).is_file()), None)
        if copy is not None:
            found[field] = str(copy)
    if given.get("held_out"):  # rows of the set itself are held out instead
        found.pop("eval_path", None)
    return found | {k: v for k, v in given.items() if k != "path"}

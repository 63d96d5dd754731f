"""A model, data and options with which GRPO and AIPO train for real, on any scheduler."""

from __future__ import annotations

import string
from pathlib import Path

from arriero.launchers.demo import write_data
from arriero.launchers.demo_model import write_tiny_llama


def real_options(folder: Path, **others: object) -> dict[str, str]:
    """Options of `arriero run` by name, with `_` for `-`; the files that they name are made in `folder`."""
    data = folder / "data"
    if not data.exists():
        write_data(data)
        write_tiny_llama(data / "model", characters=string.ascii_lowercase + "=")
    options = {
        "model": data / "model", "data": data / "train.jsonl", "sampling.max_new_tokens": 6,
        "groups_per_step": 8, "samples": 4, "weights.transport": "gloo", **others,
    }  # fmt: skip
    return {key: str(value) for key, value in options.items()}


def real_words(folder: Path, **others: object) -> list[str]:
    return [f"--{key}={value}" for key, value in real_options(folder, **others).items()]

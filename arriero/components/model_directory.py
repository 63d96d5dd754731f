"""What can be known of a Hugging Face model directory without importing torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def check_model_directory(path: str) -> Iterator[str]:
    """What keeps `path` from being loaded, one line each; nothing if it looks loadable."""
    directory = Path(path)
    if not directory.is_dir():
        yield f"model {path!r} is not a directory; give one with config.json and *.safetensors"
        return
    if not (directory / "config.json").is_file():
        yield f"model {path!r} is not a model directory: it has no config.json"
    elif not any(directory.glob("*.safetensors")):
        yield f"model {path!r} has no *.safetensors file; only safetensors are loaded"
    elif not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield f"model {path!r} has no tokenizer.json; save the tokenizer beside the model"


def context_length(path: str) -> int | None:
    """Positions the model was made for; None if its config doesn't say, or can't be read."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return length if isinstance(length, int) else None

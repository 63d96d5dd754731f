"""What can be known of a Hugging Face model directory without importing torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arriero.engine.errors import UserError, one_line


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


@contextmanager
def loading(path: Path | str) -> Generator[None, None, None]:
    """What libraries raise for the files of model directory `path`, as a UserError in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # anything: of transformers, tokenizers, safetensors
        raise UserError(
            f"model {str(path)!r} can't be loaded: {type(error).__name__}: {one_line(error)}; "
            "its config.json, *.safetensors and tokenizer must be whole and belong together"
        ) from error


def context_length(path: str) -> int | None:
    """Positions the model was made for; None if its config doesn't say, or can't be read."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return length if isinstance(length, int) else None

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
        yield f"model {path} is not a model directory: no such directory; give one in Hugging Face format"
        return
    if not (directory / "config.json").is_file():
        yield f"model {path} is not a model directory: config.json is missing"
    elif not any(directory.glob("*.safetensors")):
        yield f"model {path} is not a model directory: *.safetensors is missing (other formats aren't read)"
    elif not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield f"model {path} is not a model directory: tokenizer.json is missing; save it beside the model"


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

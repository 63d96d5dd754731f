"""What can be known of a Hugging Face model directory without importing torch or transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, runtime_checkable

from arriero.engine.errors import UserError, one_line
from arriero.engine.graph import GraphView

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")  # model types: dense decoders, built as Llama is
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself allows
_ONE_AT_A_TIME = RLock()


@runtime_checkable
class HasModel(Protocol):
    """A component that reads or writes tokens with the tokenizer of a model directory."""

    model: str


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


def reader_problems(path: str, view: GraphView) -> Iterator[str]:
    """What keeps a node from reading with model `path` what nodes before it gave or tokenised."""
    yield from check_model_directory(path)
    writers = view.upstream(HasModel)  # type: ignore[type-abstract]  # an instance check needs no class
    for first in writers[:1]:
        yield from vocabulary_problem(path, first.model)


def weight_shapes(path: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the tensors in the safetensors of a model directory, by name; none of a broken file."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                header: dict[str, dict[str, Any]] = json.loads(opened.read(min(size, _LONGEST_HEADER)))
        except (OSError, ValueError, struct.error):  # who loads it says what is wrong
            continue
        found |= {name: tuple(about["shape"]) for name, about in header.items() if "shape" in about}
    return found


def vocabulary_problem(path: str, policy: str) -> Iterator[str]:
    """One line if the tokenizers of two model directories give other ids; nothing if that can't be told."""
    if path == policy:
        return
    one, other = _vocabulary(path), _vocabulary(policy)
    if one and other and one != other:
        yield (
            f"model {path} has {len(one)} tokens and {policy} {len(other)}, not the same ids for all: it "
            "would misread what is sampled; take a model of the policy's tokenizer"
        )


def head_problem(path: str, policy: str) -> Iterator[str]:
    """One line if one of two models has no logits for some tokens; nothing if their heads are equal."""
    one, other = (_config(each).get("vocab_size") for each in (path, policy))
    tokens = max(_vocabulary(policy).values(), default=None)
    if one is None or other is None or one == other:
        return
    if tokens is None or min(one, other) <= tokens:
        there = "" if tokens is None else f", tokens up to {tokens}"
        yield (
            f"model {path} has vocab_size {one} and {policy} {other}{there}: their distributions can't be "
            "compared; take a model with the policy's, or divergence=sampled"
        )


def model_type(path: str) -> str:
    """As its config names it; empty if it doesn't, or can't be read."""
    return str(_config(path).get("model_type") or "")


def _config(path: str) -> Mapping[str, Any]:
    """config.json; empty if it can't be read."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config


def _vocabulary(path: str) -> Mapping[str, int]:
    """Ids of the tokens by tokenizer.json, added ones included; empty without it."""
    try:
        known: dict[str, Any] = json.loads((Path(path) / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    listed: dict[str, int] | list[list[Any]] = known.get("model", {}).get("vocab", {})
    base = listed if isinstance(listed, dict) else {str(entry[0]): i for i, entry in enumerate(listed)}
    return base | {str(t["content"]): int(t["id"]) for t in known.get("added_tokens", ())}


@contextmanager
def loading(path: Path | str) -> Generator[None, None, None]:
    """What libraries raise for the files of model directory `path`, as a UserError in one line.

    One thread of a process loads at a time: transformers replaces functions of its own meanwhile, and of two
    that do so at once the second leaves the replacement behind, after which no head is tied any more.
    """
    try:
        with _ONE_AT_A_TIME:
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
    config = _config(path)
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return length if isinstance(length, int) else None

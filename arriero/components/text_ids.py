"""Prompts and responses of supervised data as token ids, as a model directory says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from arriero.engine.errors import UserError
from arriero.schemas.messages import Record, Sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextIds:
    """The tokenizer of the model directory `model`; UserError if it lacks one or its end of sequence."""

    def __init__(self, model: str) -> None:
        self._tokenizer = _tokenizer(model)
        self._eos = _eos_id(model, self._tokenizer)

    def pair(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Ids of both, tokenised apart so that the border is one of tokens; the end of sequence is last."""
        ids = self._tokenizer.encode(prompt).ids
        if ids and ids[-1] == self._eos:
            ids = ids[:-1]  # some tokenizers end every text; here the text goes on
        return ids, [*self._tokenizer.encode(response, add_special_tokens=False).ids, self._eos]

    def sample(self, record: Record, prompt: str, response: str, *, advantage: float = 1.0) -> Sample:
        """`record` to be trained on: the response after the prompt, `advantage` on each of its tokens."""
        asked, answered = self.pair(prompt, response)
        mask = np.arange(len(asked) + len(answered)) >= max(len(asked), 1)  # nothing predicts the first token
        return Sample(
            group=record.id,
            tokens=np.array(asked + answered, dtype=np.int32),
            mask=mask,
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            origin=record.origins[0] if record.origins else -1,
        )


def tokenizer_problems(model: str) -> Iterator[str]:
    """What a check can say before anything is read."""
    if not (Path(model) / "tokenizer.json").is_file():
        yield _no_tokenizer(model)


def _tokenizer(model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise UserError(_no_tokenizer(model))
    tokenizer = Tokenizer.from_file(str(path))
    # A file may carry the truncation and padding of its training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _no_tokenizer(model: str) -> str:
    return (
        f"model={model!r}: no tokenizer.json in this directory; give a model directory in Hugging Face format"
    )


def _eos_id(model: str, tokenizer: Tokenizer) -> int:
    """The id that ends a text: the tokenizer's `eos_token`, else what the generation or model config says."""
    token = _setting(model, "tokenizer_config.json", "eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and (found := tokenizer.token_to_id(token)) is not None:
        return found
    for file in ("generation_config.json", "config.json"):
        value = _setting(model, file, "eos_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    raise UserError(
        f"model={model!r}: no eos_token in tokenizer_config.json nor eos_token_id in its configs; add one"
    )


def _setting(model: str, file: str, key: str) -> JsonValue:
    path = Path(model) / file
    if not path.is_file():
        return None
    values: dict[str, JsonValue] = json.loads(path.read_text(encoding="utf-8"))
    return values.get(key)

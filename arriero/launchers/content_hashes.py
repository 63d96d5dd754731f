"""What decides how prompts become tokens and responses become scores, by its hashes: for the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.components.chat import ChatFormat
from arriero.components.environments import Environment
from arriero.components.prompts import PromptSource
from arriero.components.rewards import RolloutReward, reward_version
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import ContentHashes, RunManifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# All that transformers reads a tokenizer from, of whatever kind; the chat template has a hash of its own.
TOKENIZER_FILES = (
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


def content_hashes(spec: GraphSpec) -> ContentHashes:
    """Of every tokenizer, chat template and reward in the graph's components. Raises UserError.

    A reward of several terms is one, and so is an environment with the rewards in it.
    """
    tokenizers, chats, rewards = dict[str, str](), dict[str, str](), dict[str, str]()
    for name, node in Graph.from_spec(spec).nodes.items():
        for place, part in _parts(name, node.component):
            if isinstance(part, RolloutReward | Environment):
                rewards[place] = reward_version(part)
                continue
            model, chat = getattr(part, "model", None), getattr(part, "chat", None)
            if not isinstance(model, str):
                continue
            if digest := tokenizer_sha256(Path(model)):
                tokenizers[place] = digest
            if isinstance(chat, ChatFormat) and (digest := chat.digest(model)):
                chats[place] = digest
    return ContentHashes(tokenizers=tokenizers, chats=chats, rewards=rewards)


def tokenizer_sha256(model: Path) -> str:
    """Of the tokenizer's files in a model directory, with their names; empty where there are none."""
    found = [model / name for name in TOKENIZER_FILES if (model / name).is_file()]
    digest = hashlib.sha256()
    for file in found:
        digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if found else ""


def tokenizer_of_run(model: str, place: str, manifest: RunManifest | None) -> PreTrainedTokenizerBase:
    """The tokenizer that the component at `place` had. UserError if `model` doesn't hold it any more."""
    from arriero.components.policy import load_tokenizer  # with torch, which a command line does without

    known = manifest.content.tokenizers.get(place, "") if manifest is not None else ""
    if not known:
        raise UserError("the manifest names no tokenizer")
    if (here := tokenizer_sha256(Path(model))) != known:
        what = f"is another than the run's ({here[:12]}, not {known[:12]})" if here else "is gone"
        raise UserError(f"the tokenizer in {model} {what}")
    return load_tokenizer(model)


def _parts(place: str, part: object) -> Iterator[tuple[str, object]]:
    """The component and the components it holds; not what rewards and data are made of."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return
    yield place, part
    if not isinstance(part, RolloutReward | Environment | PromptSource):
        for field in dataclasses.fields(part):
            yield from _parts(f"{place}.{field.name}", getattr(part, field.name))

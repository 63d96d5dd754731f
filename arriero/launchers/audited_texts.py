"""Texts against tokens: what was scored is what the policy sampled, and what it read is the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from arriero.components.chat import Chat
from arriero.components.environments.episodes import Episodes
from arriero.components.generator import Generator
from arriero.components.policy import said
from arriero.engine.errors import UserError, one_line
from arriero.engine.graph import Graph
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.content_hashes import tokenizer_of_run
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import RunManifest
from arriero.schemas.messages import Rollout, RolloutGroup, ScoredGroup

CHECK = "texts"


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """The tokenizer of one node that samples. `prompts`: whether it shows prompts as they are."""

    text: Callable[[list[int]], str]
    chat: Chat
    prompts: bool


@dataclass(kw_only=True)
class TextsRead:
    """`count` rollouts were read again; `left`: those that couldn't be, and why."""

    count: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    left: list[str] = field(default_factory=list[str])


def texts(record: Lineage, spec: GraphSpec, graph: Graph, manifest: RunManifest | None) -> TextsRead:
    """Decode every response with the tokenizer of the run and encode its prompt anew.

    Groups of other runs are `inherited`'s, and redacted ones have no text. A tokenizer that is gone, or is
    another than the manifest's, reads nothing.
    """
    found = TextsRead()
    readers = dict[str, _Reader]()
    for name in (node.name for node in spec.nodes):
        try:
            if (reader := _reader(name, graph, manifest)) is not None:
                readers[name] = reader
        except UserError as error:
            found.left.append(f"{CHECK} of {name}: {one_line(error)}")
    makers = {
        node.name: [r for n, r in readers.items() if n in (node.name, *spec.above(node.name))]
        for node in spec.nodes
    }
    for name, entry in record.groups.items():
        if entry.recorded or name in record.redacted or not (able := makers.get(entry.edge)):
            continue
        try:
            whole = record.group(name)
        except (ValueError, KeyError, IndexError, OSError):
            continue  # told by `content`
        group = whole.group if isinstance(whole, ScoredGroup) else whole
        found.count += len(group.rollouts)
        try:
            wrong = min((list(_otherwise(group, reader)) for reader in able), key=len)
        except (UserError, ValueError, OverflowError, TypeError) as error:  # ids that no tokenizer knows, say
            wrong = [("", f"can't be read by the tokenizer of the run: {one_line(error)}")]
        found.findings += [Finding(check=CHECK, where=f"{name}{at}", what=what) for at, what in wrong]
    return found


def _reader(name: str, graph: Graph, manifest: RunManifest | None) -> _Reader | None:
    """None for a node that samples nothing. UserError if its tokenizer isn't to be had any more."""
    component: object = graph.nodes[name].component
    generator = component.generator if isinstance(component, Episodes) else component
    if not isinstance(generator, Generator):
        return None
    place = name if generator is component else f"{name}.generator"
    tokenizer = tokenizer_of_run(generator.model, place, manifest)
    return _Reader(
        text=partial(said, tokenizer),
        chat=Chat(tokenizer, generator.chat, model=generator.model),
        prompts=generator is component,
    )


def _otherwise(group: RolloutGroup, reader: _Reader) -> Iterator[tuple[str, str]]:
    """Where in the group its texts and tokens disagree, and how."""
    shown = reader.chat.prompt(group.prompt) if reader.prompts else None
    for k, rollout in enumerate(group.rollouts):
        head = _head(rollout)
        tokens: list[int] = rollout.tokens.tolist()
        if shown is not None and tokens[:head] != shown:
            yield f"/{k}", "its first tokens aren't those of its prompt"
        if (read := reader.text(tokens[head:])) != rollout.text:
            yield f"/{k}", f"says {rollout.text:.60}, its tokens say {read:.60}"


def _head(rollout: Rollout) -> int:
    """How many tokens stand before the first sampled one."""
    return int(np.argmax(rollout.mask)) if rollout.mask.any() else rollout.mask.size

"""Rollouts and prompts against the graph: sampled as its generators do, of the rows that their ids name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import JsonValue

from arriero.components.group_decoding import request_seed
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.ledger import Resumed
from arriero.schemas.lineage import GroupEntry
from arriero.schemas.manifest import RunManifest

_OURS = "arriero.components."
_GENERATOR = "arriero.components.generator:Generator"
_ROW = re.compile(r"(?:s\d+-)?(?:e(?P<epoch>\d+)|eval)-r(?P<row>\d+)(?:@\d+)?")


@dataclass(frozen=True)
class _Rules:
    """What the graph says of rollouts; None where it doesn't say anything."""

    temperatures: frozenset[float] | None
    samples: int | None
    new_tokens: int | None
    chats: frozenset[str]
    seed: int | None
    ids_name_rows: bool


def sampled(record: Lineage, spec: GraphSpec, manifest: RunManifest | None) -> Iterator[Finding]:
    """What of the recorded groups isn't as the graph makes them. A run that was changed isn't looked at."""
    if any(isinstance(event, Resumed) and event.changed for event in record.events):
        return
    rules = _rules(spec, manifest)
    for name, group in record.groups.items():
        if not group.recorded:  # else it was sampled by another run
            for what in _otherwise(group, rules):
                yield Finding(check="sampling", where=name, what=what)


def _rules(spec: GraphSpec, manifest: RunManifest | None) -> _Rules:
    sources = [node for node in spec.nodes if not node.inputs]
    makers = [node for node in spec.nodes if _makes_rollouts(node)]
    settings = [s for m in makers if isinstance(s := m.config.get("sampling"), dict)]
    told = bool(settings) and len(settings) == len(makers)
    generators = [m for m in makers if m.component == _GENERATOR]
    alone = generators and len(generators) == len(makers)
    chats = {*manifest.content.chats.values()} if manifest is not None else set[str]()
    return _Rules(
        temperatures=frozenset(_number(s["temperature"]) for s in settings) if told else None,
        samples=max(_size(m) for m in generators) if alone else None,
        new_tokens=max(int(_number(s["max_new_tokens"])) for s in settings) if alone and told else None,
        chats=frozenset({*chats, ""}) if chats else frozenset(),
        seed=manifest.seed if alone and manifest is not None else None,
        ids_name_rows=all(node.component.startswith(_OURS) for node in sources),
    )


def _makes_rollouts(node: NodeSpec) -> bool:
    """Whether it gives groups of rollouts that weren't there before."""
    return node.output.endswith((":RolloutGroup", ":ScoredGroup")) and (
        "sampling" in node.config or not node.inputs
    )


def _size(node: NodeSpec) -> int:
    return int(_number(node.config["samples"])) + bool(node.config.get("greedy_baseline"))


def _number(value: JsonValue) -> float:
    assert isinstance(value, int | float), "a graph holds the values that its components have checked"
    return float(value)


def _otherwise(group: GroupEntry, rules: _Rules) -> Iterator[str]:
    if rules.temperatures is not None and (other := {*group.temperatures} - rules.temperatures):
        told = ", ".join(map(str, sorted(rules.temperatures)))
        yield f"was sampled at temperature {min(other)}, the graph says {told}"
    if rules.samples is not None and len(group.lengths) > rules.samples:
        yield f"has {len(group.lengths)} rollouts, the graph makes at most {rules.samples}"
    if rules.new_tokens is not None and max(group.sampled, default=0) > rules.new_tokens:
        yield f"has a response of {max(group.sampled)} tokens, the graph allows {rules.new_tokens}"
    if rules.chats and group.chat_digest not in rules.chats:
        yield f"was made with chat template {group.chat_digest}, which the manifest doesn't name"
    if rules.seed is not None and rules.samples is not None:
        due = {request_seed(rules.seed, group.prompt.id, k) for k in range(rules.samples)}
        if not due.issuperset(group.seeds) or len({*group.seeds}) < len(group.seeds):
            yield "its random seeds aren't those of its prompt in this run"
    named = _ROW.fullmatch(group.prompt.id) if rules.ids_name_rows else None
    if named and (int(named["row"]), int(named["epoch"] or 0)) != (group.prompt.row, group.prompt.epoch):
        p = group.prompt
        yield f"its prompt {p.id} is said to be row {p.row} of epoch {p.epoch}"

"""Rewards and advantages computed again from a record, by the components that the recorded graph names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import cast

from arriero.components.advantage import GroupAdvantage
from arriero.components.rewards import LlmJudge, RewardModel, RolloutReward, WeightedSum, reward_version
from arriero.engine.codec import encode
from arriero.engine.errors import UserError, one_line
from arriero.engine.graph import Graph
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.engine.stream import Stream
from arriero.schemas.graph import GraphSpec
from arriero.schemas.lineage import GroupEntry
from arriero.schemas.messages import Batch, Dropped, Outcome, Record, ScoredGroup

Result = tuple[str, str, list[Finding], list[str]]  # check, what it went through, findings, what was left out

_VERDICTS = (Outcome.OK, Outcome.WRONG)


async def recomputed(
    record: Lineage, spec: GraphSpec, graph: Graph, *, rescore: bool = False
) -> list[Result]:
    """One result per node that makes scored groups or batches.

    `rescore`: scores of another version of a reward, too, are compared with what the code of now gives.
    """
    found: list[Result] = []
    for node in spec.nodes:
        component: object = graph.nodes[node.name].component
        if node.output.endswith(":ScoredGroup") and node.inputs:
            try:
                found.append(await _rewards(record, node.name, component, rescore=rescore))
            except UserError as error:  # its code is gone, say
                name = f"rewards of {node.name}"
                found.append((name, "", [], [f"{name}: {one_line(error)}"]))
        elif node.output.endswith(":Batch"):
            found.append(await _advantages(record, node.name, component))
    return found


async def _rewards(record: Lineage, node: str, component: object, *, rescore: bool) -> Result:
    name = f"rewards of {node}"
    scored = [(k, g) for k, g in record.groups.items() if g.edge == node and g.scores]
    groups = [g for k, g in scored if k not in record.redacted]
    gone = len(scored) - len(groups)
    if why := _not_again(component):
        return name, "", [], [f"{name}: {why}"]
    reward = cast("RolloutReward", component)
    version = reward_version(reward)
    other = [g for g in groups if g.scores and g.scores.reward_version != version]
    left: list[str] = []
    if other and other[0].scores and not rescore:
        theirs = other[0].scores.reward_version
        told = f"{len(other)} groups scored by version {theirs}, here is {version}; see --rescore"
        left.append(f"{name}: {told}")
        groups = [g for g in groups if g not in other]
    if gone:
        left.append(f"{name}: {gone} groups are redacted")
    findings: list[Finding] = []
    count = 0
    failed: list[str] = []
    async with reward.opened() as scorer:
        for entry in groups:
            whole = _scored(record, entry)
            for k, then in enumerate(whole.scores if whole else ()):
                assert whole is not None
                where = f"{entry.id}/{k}"
                if then.outcome not in _VERDICTS:
                    told = f"reward {then.value} without a verdict ({then.outcome}), which counts as 0"
                    findings += [Finding(check=name, where=where, what=told)] if then.value else []
                    continue
                now = await scorer.score(whole.group.prompt, whole.group.rollouts[k])
                if now.outcome not in _VERDICTS:  # it says nothing about the one of then
                    failed.append(f"{now.outcome}: {' '.join(now.detail.split()):.200}")
                    continue
                count += 1
                if (now.value, now.outcome, now.raw) != (then.value, then.outcome, then.raw):
                    told = f"reward {then.value} ({then.outcome})"
                    what = f"{told}, computed again {now.value} ({now.outcome})"
                    findings.append(Finding(check=name, where=where, what=what))
    if failed:
        left.append(f"{name}: {len(failed)} scores, for which there was no verdict now: {failed[0]}")
    return name, f"{count} computed again" if count else "", findings, left


def _scored(record: Lineage, entry: GroupEntry) -> ScoredGroup | None:
    """The group that an entry is of; None if it can't be read, as `content` tells."""
    try:
        whole = record.group(entry.scores.id if entry.scores else entry.id)
    except (ValueError, KeyError, IndexError, OSError):
        return None
    return whole if isinstance(whole, ScoredGroup) else None


def _not_again(component: object) -> str:
    """Why a reward can't be computed again; empty if it can."""
    if not isinstance(component, RolloutReward):
        return f"{type(component).__name__} isn't one of arriero's rewards"
    parts = [t.reward for t in component.terms] if isinstance(component, WeightedSum) else [component]
    asking = [p for p in parts if isinstance(p, LlmJudge | RewardModel)]
    return f"{asking[0].label} asks another model, which may answer otherwise" if asking else ""


class _Recorded:
    """Stands behind a stream: the groups of one batch, in its order."""

    def __init__(self, groups: list[ScoredGroup]) -> None:
        self._groups: Iterator[ScoredGroup] = iter(groups)

    async def next(self) -> ScoredGroup | None:
        return next(self._groups, None)

    def poll(self) -> ScoredGroup | None:
        return next(self._groups, None)

    async def at(self, version: int) -> ScoredGroup:
        raise TypeError("a record has no versions")


async def _advantages(record: Lineage, node: str, component: object) -> Result:
    name = f"advantages of {node}"
    batches = [b for b in record.batches.values() if b.edge == node]
    if not isinstance(component, GroupAdvantage):
        return name, "", [], [f"{name}: {type(component).__name__} can't be run again by itself"]
    findings: list[Finding] = []
    for entry in batches:
        try:
            then = record.batch(entry.id)
            groups = [record.group(parent) for parent in entry.parents]
        except (KeyError, ValueError, IndexError):
            findings.append(
                Finding(check=name, where=entry.id, what="a group of the batch isn't in the record")
            )
            continue
        stream = Stream(node, ScoredGroup, _Recorded([g for g in groups if isinstance(g, ScoredGroup)]))
        outputs = cast("AsyncGenerator[Record, None]", component.run(stream))
        async with aclosing(outputs):
            made = [out async for out in outputs]
        if why := _differs(made, then):
            findings.append(Finding(check=name, where=entry.id, what=why))
    return name, f"{len(batches)} batches computed again", findings, []


def _differs(made: list[Record], then: Batch) -> str:
    """What is otherwise in a batch that was made again; empty for nothing."""
    if any(isinstance(out, Dropped) for out in made) or len(made) != 1:
        return "its groups don't make one batch"
    now = cast("Batch", made[0]).stamped(id=then.id, parents=then.parents, origins=then.origins)
    if encode(now) == encode(then):
        return ""
    if [s.group for s in now.samples] != [s.group for s in then.samples]:
        return "it holds other samples than its groups give"
    changed = [
        k for k, (a, b) in enumerate(zip(now.samples, then.samples, strict=True))
        if a.advantages.tobytes() != b.advantages.tobytes()
    ]  # fmt: skip
    return (
        f"the advantage of sample {changed[0]} is otherwise"
        if changed
        else "a sample is otherwise than its rollout"
    )

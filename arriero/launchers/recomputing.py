"""Rewards and advantages computed again from a record, by the components that the recorded graph names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from arriero.components.advantage import GroupAdvantage
from arriero.components.environments import Question
from arriero.components.environments.episodes import Episodes
from arriero.components.overlong import OverlongPenalty
from arriero.components.rewards import LlmJudge, RewardModel, RolloutReward, WeightedSum, reward_version
from arriero.components.verifiers.reward import Scorer
from arriero.engine.codec import encode
from arriero.engine.errors import UserError, one_line
from arriero.engine.graph import Graph
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.engine.stream import Stream
from arriero.launchers.played_again import Replayer
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.manifest import RunManifest
from arriero.schemas.messages import Batch, Dropped, Outcome, Record, Score, ScoredGroup

Result = tuple[str, str, list[Finding], list[str]]  # check, what it went through, findings, what was left out

_VERDICTS = (Outcome.OK, Outcome.WRONG)


async def recomputed(
    record: Lineage, spec: GraphSpec, graph: Graph, manifest: RunManifest | None, *, rescore: bool = False
) -> list[Result]:
    """One result per node that makes scored groups or batches.

    `rescore`: scores of another version of a reward, too, are compared with what the code of now gives.
    """
    found: list[Result] = []
    for node in spec.nodes:
        component: object = graph.nodes[node.name].component
        if node.output.endswith(":ScoredGroup") and node.inputs:
            try:
                found.append(await _rewards(record, graph, node, manifest, rescore=rescore))
            except UserError as error:  # its code is gone, say
                name = f"rewards of {node.name}"
                found.append((name, "", [], [f"{name}: {one_line(error)}"]))
        elif node.output.endswith(":Batch"):
            found.append(await _advantages(record, node.name, component))
    return found


@dataclass(kw_only=True)
class _Compared:
    """`failed`: why there was no verdict now, score by score."""

    count: int = 0
    failed: list[str] = field(default_factory=list[str])
    findings: list[Finding] = field(default_factory=list[Finding])


async def _rewards(
    record: Lineage, graph: Graph, node: NodeSpec, manifest: RunManifest | None, *, rescore: bool
) -> Result:
    name = f"rewards of {node.name}"
    scoring, penalties = _behind(graph, node)
    component: object = graph.nodes[scoring].component
    if why := _not_again(component):
        return name, "", [], [f"{name}: {why}"]
    version = reward_version(component.environment if isinstance(component, Episodes) else component)
    found, gone, others = _Compared(), 0, list[str]()
    async with _opened(scoring, component, manifest) as scorer:
        for key, entry in record.groups.items():
            if entry.edge != node.name or entry.scores is None:
                continue
            if key in record.redacted:
                gone += 1
            elif entry.scores.reward_version != version and not rescore:
                others.append(entry.scores.reward_version)
            elif (whole := _scored(record, key)) is not None:
                await _again(found, name, whole, scorer, penalties)
    left: list[str] = []
    if others:
        told = f"{len(others)} groups scored by version {others[0]}, here is {version}; see --rescore"
        left.append(f"{name}: {told}")
    if gone:
        left.append(f"{name}: {gone} groups are redacted")
    if failed := found.failed:
        left.append(f"{name}: {len(failed)} scores, for which there was no verdict now: {failed[0]}")
    return name, f"{found.count} computed again" if found.count else "", found.findings, left


@asynccontextmanager
async def _opened(name: str, component: object, manifest: RunManifest | None) -> AsyncGenerator[Scorer]:
    """What scores again as the node `name` did. Raises UserError if it can't."""
    if isinstance(component, Episodes):
        with component.environment.opened() as environment:
            yield Replayer(name, component, environment, manifest)
        return
    async with cast("RolloutReward", component).opened() as scorer:
        yield scorer


def _behind(graph: Graph, node: NodeSpec) -> tuple[str, list[OverlongPenalty]]:
    """The node that scores the groups of `node`, and what is taken off their scores after it, in order."""
    component: object = graph.nodes[node.name].component
    if not isinstance(component, OverlongPenalty):
        return node.name, []
    (source,) = (i.source for i in node.inputs)
    reward, before = _behind(graph, graph.spec().node(source))
    return reward, [*before, component]


async def _again(
    found: _Compared, name: str, then: ScoredGroup, scorer: Scorer, penalties: Sequence[OverlongPenalty]
) -> None:
    """Compare each score of a group with what the reward, and what is taken off it, give now."""
    of_verdicts = [k for k, score in enumerate(then.scores) if score.outcome in _VERDICTS]
    rollouts = [then.group.rollouts[k] for k in of_verdicts]
    made = await scorer.scores(then.group.prompt, rollouts) if rollouts else ()
    scores = dict(zip(of_verdicts, made, strict=True))
    whole = then.model_copy(
        update={"scores": tuple(scores.get(k, score) for k, score in enumerate(then.scores))}
    )
    for penalty in penalties:
        whole = penalty.apply(whole)
    for k, (score, now) in enumerate(zip(then.scores, whole.scores, strict=True)):
        where = f"{then.group.id}/{k}"
        if score.outcome not in _VERDICTS:
            told = f"reward {score.value} without a verdict ({score.outcome}), which counts as 0"
            found.findings += [Finding(check=name, where=where, what=told)] if score.value else []
            continue
        if now.outcome not in _VERDICTS:  # it says nothing about the one of then
            found.failed.append(f"{now.outcome}: {' '.join(now.detail.split()):.200}")
            continue
        found.count += 1
        if _worth(now) != _worth(score):
            told = f"reward {score.value} ({score.outcome}{_turns(score)})"
            what = f"{told}, computed again {now.value} ({now.outcome}{_turns(now)})"
            found.findings.append(Finding(check=name, where=where, what=what))


def _worth(score: Score) -> tuple[object, ...]:
    return score.value, score.outcome, score.raw, score.turns


def _turns(score: Score) -> str:
    return f", by turns {', '.join(map(str, score.turns))}" if score.turns else ""


def _scored(record: Lineage, name: str) -> ScoredGroup | None:
    """The group of this id; None if it can't be read, as `content` tells."""
    try:
        whole = record.group(name)
    except (ValueError, KeyError, IndexError, OSError):
        return None
    return whole if isinstance(whole, ScoredGroup) else None


def _not_again(component: object) -> str:
    """Why a reward can't be computed again; empty if it can."""
    if isinstance(component, Episodes):  # of which equal arguments give equal ones, by their contract
        environment = component.environment
        component = environment.reward if isinstance(environment, Question) else None
    elif not isinstance(component, RolloutReward):
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
    if not isinstance(component, GroupAdvantage):
        return name, "", [], [f"{name}: {type(component).__name__} can't be run again by itself"]
    findings: list[Finding] = []
    count = 0
    for entry in (b for b in record.batches.values() if b.edge == node):
        count += 1
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
    return name, f"{count} batches computed again", findings, []


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

"""What a record says about itself, checked: each check gives findings, and an empty list is a clean bill.

| check     | says                                                                                       |
|-----------|--------------------------------------------------------------------------------------------|
| `chain`   | every entry follows from all before it; nothing is recorded twice; it was closed             |
| `ledger`  | every prompt admitted, without a gap, and trained, evaluated or dropped, once                 |
| `content` | arrays and texts have the hashes that their entries name; masks and log-probs are valid; what  |
|           | is redacted is gone, and the rest of it as it was                                              |
| `steps`   | versions follow each other; each from the batch that is recorded, of the groups it names       |
| `tokens`  | no token of a step is staler than the bound, or sampled by a version that wasn't there         |
| `weights` | one version after the other, each made by the step that says so, with the measures of it       |
| `held out` | what came back of every held-out prompt is what its recorded group says                       |

A chain proves that nothing was changed by anybody who couldn't write all of it anew. Whoever could has to
make all of the above agree, and `head` differ from the one that was kept elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from pydantic import ValidationError

from arriero.engine.lineage.content import (
    SALT_BYTES,
    batch_sha256,
    batch_tokens_sha256,
    prompt_text,
    sha256,
)
from arriero.engine.lineage.findings import Check, Finding
from arriero.engine.lineage.place_checks import places
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.tables import origins_of
from arriero.engine.lineage.version_checks import held_out_prompts, tokens, weights, whole_batch
from arriero.engine.runtime.guard import trained
from arriero.engine.runtime.ledger import Ledger, LedgerError
from arriero.schemas.ledger import Trained
from arriero.schemas.lineage import BatchEntry, GroupEntry
from arriero.schemas.messages import Batch, RolloutGroup, Sample, ScoredGroup, Weights


def checks(*, staleness: int | None, producers: Mapping[str, str]) -> dict[str, Check]:
    """All checks by name; `staleness` is the graph's bound (None: no loop), `producers` the node by loop."""
    return {
        "chain": _chain,
        "ledger": _ledger,
        "content": _content,
        "steps": _steps,
        "tokens": lambda record: tokens(record, staleness),
        "weights": lambda record: weights(record, producers),
        "held out": held_out_prompts,
    }


def _chain(record: Lineage) -> Iterator[Finding]:
    if record.broken:
        yield Finding(check="chain", where="chain", what=record.broken)
    for name in record.twice:
        yield Finding(check="chain", where=name, what="is recorded twice")
    for where in record.late:
        yield Finding(check="chain", where=where, what="stands behind the end of the record")
    if record.opened is None:
        yield Finding(check="chain", where="first entry", what="says nothing about the run")
    failed = [entry.detail for entry in record.run if entry.what == "failed"]
    if record.closed is not None and record.closed.state == "finished" and failed and not record.resumed:
        what = f"says that the run failed ({failed[0]:.80}), and was closed as finished"
        yield Finding(check="chain", where="last entry", what=what)
    if record.closed is None:
        yield Finding(
            check="chain", where="last entry", what="doesn't close the record: the run goes on, or was killed"
        )


def _ledger(record: Lineage) -> Iterator[Finding]:
    ledger = Ledger()
    for event in record.history:
        try:
            ledger.apply(event)
        except LedgerError as error:
            yield Finding(check="ledger", where=type(event).__name__, what=str(error))
    origins = sorted(a.origin for a in record.admitted if a.split == "train")
    if gaps := sorted({*range(len(origins))} - {*origins}):
        yield Finding(check="ledger", where=f"prompt number {gaps[0]}", what="was never admitted")
    if record.closed is not None and ledger.in_flight:
        first = ledger.in_flight_origins[0]
        yield Finding(
            check="ledger",
            where=f"prompt number {first}",
            what=f"was admitted and neither trained nor dropped (so were {ledger.in_flight - 1} others)",
        )
    yield from _back(record, ledger)
    admitted = {a.origin: (a.id, a.row, a.epoch, a.min_version) for a in record.admitted}
    for g in record.groups.values():
        for told in (g.origins, g.scores.origins if g.scores else ()):
            if told and not {*told}.issuperset(g.prompt.origins):
                what = (
                    f"is said to come of prompt number {told[0]}, its prompt is number {g.prompt.origins[0]}"
                )
                yield Finding(check="ledger", where=g.id, what=what)
        for k in origins_of(g):
            *known, version = admitted.get(k, ("", -1, -1, -1))
            if known != [g.prompt.id, g.prompt.row, g.prompt.epoch]:
                yield Finding(
                    check="ledger",
                    where=g.id,
                    what=f"is of prompt {g.prompt.id}, number {k}; not admitted so",
                )
            elif version != g.prompt.min_version:
                what = f"is of prompt {g.prompt.id}, admitted for version {version} and not as it says"
                yield Finding(check="ledger", where=g.id, what=what)


def _back(record: Lineage, ledger: Ledger) -> Iterator[Finding]:
    """Whether each held-out prompt came back, or was dropped, once."""
    for name, times in Counter(e.id for e in record.evaluated).items():
        if times > 1:
            yield Finding(check="ledger", where=f"held-out prompt {name}", what=f"came back {times} times")
    finished = record.closed is not None and record.closed.state == "finished"
    if finished and ledger.evaluating:
        missing = ledger.held_out_sent - ledger.held_out_back
        what = f"{missing} were sent, and neither came back nor were dropped"
        yield Finding(check="ledger", where="held-out prompts", what=what)


def _content(record: Lineage) -> Iterator[Finding]:
    for name in record.groups:
        try:
            what = record.changed(name)
        except (KeyError, ValueError, OSError) as error:
            yield Finding(check="content", where=name, what=f"its content can't be read: {error!r:.120}")
            continue
        if what:
            yield Finding(check="content", where=name, what=what)
        elif name not in record.redacted:
            yield from _valid_group(record, name)
    for name, other in record.records.items():
        try:
            text = record.text(other.text)
        except (KeyError, ValueError, OSError) as error:
            yield Finding(check="content", where=name, what=f"its text can't be read: {error!r:.120}")
            continue
        if name in record.redacted and any(text):
            yield Finding(check="content", where=name, what="is said to be redacted, and its text is there")
        elif name not in record.redacted and sha256(text) != other.text_sha256:
            yield Finding(check="content", where=name, what="its text was changed")
    yield from places(record)


def _valid_group(record: Lineage, name: str) -> Iterator[Finding]:
    """Whether the group is one: the classes of the records check mask, log-probs and versions."""
    entry = record.groups[name]
    try:
        whole = record.group(name)
    except (ValidationError, ValueError, IndexError) as error:
        yield Finding(check="content", where=name, what=f"is no valid group: {error!s:.200}")
        return
    group = whole.group if isinstance(whole, ScoredGroup) else whole
    salt = record.text(entry.text)[:SALT_BYTES]
    if sha256(salt + prompt_text(group.prompt)) != entry.prompt_sha256:
        yield Finding(check="content", where=name, what="its prompt isn't the one that its hash is of")
    told = (entry.sampled, entry.oldest, entry.newest)
    if told != _columns(group):
        yield Finding(
            check="content", where=name, what="its counts of tokens or versions aren't those of its arrays"
        )
    if any(np.any(r.logprobs[r.mask] > 0) for r in group.rollouts):
        yield Finding(check="content", where=name, what="a log-probability is above 0")


def _columns(group: RolloutGroup) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    rollouts = group.rollouts
    return (
        tuple(int(r.mask.sum()) for r in rollouts),
        tuple(-1 if r.oldest_version is None else r.oldest_version for r in rollouts),
        tuple(int(r.versions.max(initial=-1)) for r in rollouts),
    )


def _steps(record: Lineage) -> Iterator[Finding]:
    made: Counter[str] = Counter()
    for step in record.steps:
        made[step.node] += 1
        where = f"step {step.version} of {step.node}"
        if step.version != made[step.node]:
            yield Finding(check="steps", where=where, what=f"comes where step {made[step.node]} is due")
        if (batch := whole_batch(record, step.batch)) is None:
            yield Finding(
                check="steps", where=where, what=f"its batch {step.batch} isn't whole in the record"
            )
            continue
        yield from _batch_findings(record, step, batch, where)


def _batch_findings(record: Lineage, step: Trained, batch: Batch, where: str) -> Iterator[Finding]:
    entry = record.batches[step.batch]
    if what := _changed_batch(record, entry):
        yield Finding(check="steps", where=where, what=what)
    if missing := [g for g in entry.groups if g not in record.groups and record.groups]:
        yield Finding(check="steps", where=where, what=f"its group {missing[0]} isn't in the record")
    left = record.left_of(batch, step)
    if left.origins != step.origins:
        yield Finding(check="steps", where=where, what="it was made from other prompts than its batch holds")
    if (tokens := left.trained_tokens) != step.tokens:
        yield Finding(check="steps", where=where, what=f"says {step.tokens} tokens, its batch has {tokens}")
    mean = float(np.mean([s.reward for s in left.samples])) if left.samples else 0.0
    if not math.isclose(mean, step.reward_mean, rel_tol=1e-9, abs_tol=1e-12):
        yield Finding(
            check="steps", where=where, what=f"says a mean reward of {step.reward_mean}, it is {mean}"
        )
    yield from _of_its_samples(step, left, where)
    for k, (sample, group, rollout) in enumerate(zip(batch.samples, entry.group, entry.rollout, strict=True)):
        of = record.groups.get(entry.groups[group]) if rollout >= 0 else None
        if of is not None and (what := _unlike(sample, of, rollout)):
            yield Finding(check="steps", where=where, what=f"sample {k}: {what}")


def _of_its_samples(step: Trained, batch: Batch, where: str) -> Iterator[Finding]:
    """Whether mean staleness and shares of right answers (these steer a curriculum) are its batch's."""
    due = trained(step.node, Weights(version=step.version), batch)
    if not math.isclose(due.staleness_mean, step.staleness_mean, rel_tol=1e-9, abs_tol=1e-12):
        what = f"says a mean staleness of {step.staleness_mean}, it is {due.staleness_mean}"
        yield Finding(check="steps", where=where, what=what)
    if step.right_shares and due.right_shares != step.right_shares:  # older records have none
        yield Finding(check="steps", where=where, what="says other shares of right answers than its samples")


def _unlike(sample: Sample, group: GroupEntry, rollout: int) -> str:
    """What a sample says otherwise than the rollout that it was made from; empty for nothing."""
    told = f"rollout {rollout} of {sample.group} has"
    reward = group.scores.values[rollout] if group.scores else sample.reward
    if reward != sample.reward:
        return f"{told} reward {sample.reward} in the batch and {reward} in its group"
    if (degrees := group.temperatures[rollout]) != sample.temperature:
        return f"{told} temperature {sample.temperature} in the batch and {degrees} in its group"
    if sample.origin not in (origins := origins_of(group)):
        return f"{told} prompt number {sample.origin} in the batch and {origins} in its group"
    return ""


def _changed_batch(record: Lineage, entry: BatchEntry) -> str:
    """What is otherwise than when the batch was recorded; empty for nothing."""
    own = record.own(entry)
    groups = [record.groups.get(name) for name in entry.groups]
    hashes = [g.shape_sha256 + g.tokens_sha256 if g else "" for g in groups]
    if batch_sha256(hashes, own, record.advantages(entry)) != entry.sha256:
        return "the arrays of its batch (advantages, ...), or its groups, were changed"
    if entry.id in record.redacted:
        return ""
    try:
        salt = record.text(entry.salt)
    except (KeyError, ValueError, OSError) as error:
        return f"the salt of its batch can't be read: {error!r:.120}"
    now = batch_tokens_sha256(own, record.reference(entry), salt)
    return "the own tokens of its batch, or reference log-probs, were changed" * (now != entry.tokens_sha256)

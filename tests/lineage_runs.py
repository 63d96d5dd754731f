"""Records to write down, and a process that writes until it is killed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from arriero.engine.lineage.writer import LineageWriter, Seen
from arriero.schemas.lineage import Opened
from arriero.schemas.messages import Batch, Outcome, Prompt, Rollout, RolloutGroup, Sample, Score, ScoredGroup

OPENED = Opened(run_id="run", graph_digest="graph")


def scored_group(
    number: int, *, size: int = 2, length: int = 12, version: int = 0, same: bool = False
) -> ScoredGroup:
    """Group `number`, always the same: random tokens and log-probabilities, the first rollout right."""
    rng = np.random.default_rng(number)
    prompt = Prompt(
        id=f"p-{number}", origins=(number,), text=f"question {number}", answer="42",
        metadata={"level": number % 3, "tags": ["é", "\n"]}, row=number, min_version=version,
    )  # fmt: skip
    rollouts: list[Rollout] = []
    for k in range(size):
        if same and rollouts:
            rollouts.append(rollouts[0])
            continue
        mask = np.arange(length + k) >= 3
        rollouts.append(
            Rollout(
                tokens=rng.integers(0, 50_000, length + k).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -rng.exponential(1, length + k), np.nan).astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                text=f"answer {k} of {number}",
                finish="stop" if k else "length",
                temperature=0.7,
                seed=number * 100 + k,
            )
        )
    name = f"p-{number}>generator"
    group = RolloutGroup(
        id=name, parents=(prompt.id,), origins=(number,), prompt=prompt, rollouts=tuple(rollouts)
    )
    scores = [Score(value=float(k == 0), outcome=Outcome.WRONG if k else Outcome.OK) for k in range(size)]
    return ScoredGroup(
        id=f"{name}>reward", parents=(name,), origins=(number,), group=group, scores=tuple(scores),
        reward_version="0123456789abcdef",
    )  # fmt: skip


def batch_of_groups(groups: Sequence[ScoredGroup]) -> Batch:
    """All rollouts of `groups`, with an advantage of their reward minus one half on sampled tokens."""
    samples = tuple(
        Sample(
            group=g.id, tokens=r.tokens, mask=r.mask, logprobs=r.logprobs, versions=r.versions,
            advantages=np.where(r.mask, np.float32(s.value - 0.5), np.float32(0)), temperature=r.temperature,
            reward=s.value, truncated=r.finish == "length", origin=g.origins[0],
        )
        for g in groups
        for r, s in zip(g.group.rollouts, g.scores, strict=True)
    )  # fmt: skip
    return Batch(
        id=f"advantage-{groups[0].id}", parents=tuple(g.id for g in groups),
        origins=tuple(sorted(g.origins[0] for g in groups)), samples=samples,
    )  # fmt: skip


def main(url: str, first: int) -> None:
    """Commit one group after the other, and say its id when it is there for good."""
    writer = LineageWriter(url, OPENED)
    number = first
    while True:
        group = scored_group(number, size=3)
        if not writer.knows("reward", group.id):
            writer.commit([Seen("reward", group)])
            print(group.id, flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

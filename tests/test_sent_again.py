"""A source that starts again: what had been admitted goes out once more, no sooner than it may be used."""

from __future__ import annotations

import asyncio

from arriero.engine.broker import Consumer
from arriero.engine.runtime.journal import record
from arriero.schemas.ledger import Admitted, Trained
from tests.brokers import Engine
from tests.runtime_runs import declare, graph, options, replica

GROUPS, VERSIONS = 4, 3


async def test_what_was_admitted_before_a_run_went_back_waits_for_its_version_again(engine: Engine) -> None:
    spec, opts = graph(staleness=0, groups=GROUPS), options(engine.run)
    broker = await declare(spec, opts, engine)
    # The ledger after a return to version 1: the prompts of later versions are admitted, and not trained.
    for k in range(GROUPS * VERSIONS):
        await record(
            broker, Admitted(id=f"p{k}", origin=k, split="train", epoch=0, row=k, min_version=k // GROUPS)
        )
    await record(broker, step(1))
    source = asyncio.create_task(replica(spec, opts, engine, "prompts"))
    group = broker.consumer("prompts", "generator-prompts")
    sent = await waiting(group)
    assert sent == {"p4", "p5", "p6", "p7"}  # version 2 alone may be under way at staleness 0
    await record(broker, step(2))
    sent = await waiting(group)
    assert sent == {"p8", "p9", "p10", "p11"}
    source.cancel()
    await asyncio.gather(source, return_exceptions=True)


async def waiting(group: Consumer) -> set[str]:
    """What comes until nothing does for half a second."""
    ids = set[str]()
    while (lease := await group.lease(wait_s=0.5)) is not None:
        await lease.ack()
        ids.add(lease.id)
    return ids


def step(version: int) -> Trained:
    origins = tuple(range(GROUPS * (version - 1), GROUPS * version))
    return Trained(
        node="trainer", version=version, batch=f"b{version}", origins=origins, tokens=1, staleness_max=0,
        staleness_mean=0.0, reward_mean=0.0,
    )  # fmt: skip

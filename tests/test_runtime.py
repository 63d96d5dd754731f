"""The runtime of a role, run with toy components on both brokers: what must hold whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from typing import get_args

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated
from tests.brokers import Engine
from tests.runtime_runs import (
    ATTEMPTS,
    SEEN,
    Moody,
    Noting,
    Placed,
    Prompts,
    Shaky,
    check_books,
    declare,
    graph,
    options,
    play,
    read,
    replica,
    start,
)

_runs = itertools.count()


@pytest_asyncio.fixture
async def memory(run_name: str) -> AsyncIterator[Engine]:
    """The broker in memory; for what both brokers are not needed for. Fails if messages are left."""
    engine = Engine("memory", run_name)
    yield engine
    await engine.assert_empty()
    await engine.close()


async def _play_in_memory(**parts: object) -> None:
    """Play a graph with some of everything that can go wrong, and check its books."""
    engine = Engine("memory", f"random{next(_runs)}")
    spec = graph(**parts)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # drawn by hypothesis
    loop = spec.loops[0]
    steps = parts["trainer"].steps if isinstance(parts["trainer"], Noting) else 0
    opts = options(engine.run, max_dead_letters=1000)
    played = await play(spec, engine, opts)
    ledger = check_books(played, engine.run, staleness=loop.staleness, groups=4)
    assert ledger.version("trainer") == steps
    await engine.assert_empty()
    await engine.close()


_random = given(
    staleness=st.sampled_from([0, 1, 3]),
    generators=st.sampled_from([1, 4]),
    generator=st.builds(
        Shaky,
        most_s=st.sampled_from([0.0, 0.003]),
        slow_s=st.sampled_from([0.0, 0.03]),
        slow_every=st.sampled_from([0, 3, 7]),
        drop_every=st.sampled_from([0, 3, 10]),
    ),
    reward=st.builds(Moody, once=st.sampled_from([0, 5]), always=st.sampled_from([0, 6])),
    trainer=st.builds(
        Noting, steps=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.004]), skip=st.sampled_from([0, 3])
    ),
    prompts=st.builds(Prompts, held_out=st.sampled_from([0, 2]), every=st.sampled_from([0, 2])),
    placed=st.sampled_from(get_args(Placed)),
)


@settings(max_examples=12)
@_random
def test_nothing_is_lost_stale_or_trained_twice_whatever_goes_wrong(**parts: object) -> None:
    asyncio.run(_play_in_memory(**parts))


@pytest.mark.slow
@settings(max_examples=120)
@_random
def test_nothing_is_lost_stale_or_trained_twice_in_many_more_cases(**parts: object) -> None:
    asyncio.run(_play_in_memory(**parts))


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("generators", [1, 4])
async def test_no_token_is_staler_than_the_bound(engine: Engine, staleness: int, generators: int) -> None:
    spec = graph(
        staleness=staleness,
        generators=generators,
        generator=Shaky(most_s=0.004, drop_every=9),
        reward=Moody(once=7),
        trainer=Noting(seconds=0.004),
        prompts=Prompts(held_out=2, every=3),
    )
    played = await play(spec, engine)
    ledger = check_books(played, engine.run, staleness=staleness, groups=4)
    assert ledger.version("trainer") == 8
    assert ledger.held_out_sent == 2 * len({0, 3, 6, 8})


async def test_a_slow_trainer_really_sees_data_one_step_old(memory: Engine) -> None:
    spec = graph(staleness=1, generator=Shaky(most_s=0.0), trainer=Noting(steps=6, seconds=0.05))
    await play(spec, memory)
    assert [version - oldest for version, oldest, _ in SEEN[memory.run]] == [0, 1, 1, 1, 1, 1]


async def test_with_staleness_0_every_sample_of_a_batch_is_of_exactly_the_version_it_replaces(
    memory: Engine,
) -> None:
    spec = graph(staleness=0, generators=4, trainer=Noting(steps=6))
    played = await play(spec, memory)
    assert [(version, oldest) for version, oldest, _ in SEEN[memory.run]] == [(v, v) for v in range(6)]
    assert played.most_in_flight == 4


async def test_stragglers_are_dropped_and_their_place_is_given_back(memory: Engine) -> None:
    spec = graph(
        staleness=1,
        generators=4,
        generator=Shaky(most_s=0.0, slow_s=0.15, slow_every=10),
        trainer=Noting(steps=12, seconds=0.005),
    )
    played = await play(spec, memory)
    ledger = check_books(played, memory.run, staleness=1, groups=4)
    assert ledger.version("trainer") == 12
    assert ledger.trained == 48
    assert ledger.dropped["stale"] > 0


async def test_a_record_that_fails_once_is_tried_again_and_trained(memory: Engine) -> None:
    played = await play(graph(reward=Moody(once=4), trainer=Noting(steps=5)), memory)
    ledger = check_books(played, memory.run, staleness=1, groups=4)
    assert not ledger.dropped
    assert played.dead == []
    assert ATTEMPTS[memory.run][3] == 2


async def test_a_record_that_always_fails_is_dropped_once_and_becomes_a_dead_letter(engine: Engine) -> None:
    played = await play(graph(reward=Moody(always=8), trainer=Noting(steps=5)), engine)
    ledger = check_books(played, engine.run, staleness=1, groups=4)
    rows = sorted(row for row, tries in ATTEMPTS[engine.run].items() if tries == 3)
    assert rows == [4, 12, 20]
    assert ledger.dropped == {"dead_letter": len(rows)}
    assert sorted(letter.id for letter in played.dead) == sorted(f"p{row}>generator" for row in rows)
    assert {letter.deliveries for letter in played.dead} == {3}
    assert re.fullmatch(r"ValueError: row .* \(runtime_runs\.py:\d+\)", played.dead[0].error)


async def test_the_last_record_of_a_stream_is_tried_again_too(engine: Engine) -> None:
    played = await play(graph(prompts=Prompts(count=4), reward=Moody(once=4)), engine)
    ledger = check_books(played, engine.run, staleness=1, groups=4)
    assert (ledger.trained, ATTEMPTS[engine.run][3]) == (4, 2)


async def test_a_batch_that_the_trainer_drops_gives_its_place_back_even_when_synchronous(
    memory: Engine,
) -> None:
    played = await play(graph(staleness=0, trainer=Noting(steps=6, skip=3)), memory)
    ledger = check_books(played, memory.run, staleness=0, groups=4)
    assert (ledger.version("trainer"), ledger.dropped["invalid"]) == (6, 8)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_held_out_prompts_hold_nobody_up_when_a_step_takes_one_group(
    memory: Engine, staleness: int
) -> None:
    """Every node then fires once per version, so every node has a guard that counts what is under way."""
    held_out, trainer = Prompts(held_out=3, every=2), Noting(steps=6)
    played = await play(graph(staleness=staleness, groups=1, prompts=held_out, trainer=trainer), memory)
    ledger = check_books(played, memory.run, staleness=staleness, groups=1)
    assert (ledger.version("trainer"), ledger.dropped.total()) == (6, 0)


async def test_no_evaluation_counts_what_another_version_sampled(memory: Engine) -> None:
    """A generator that doesn't keep to the version asked for loses the prompt, and the ledger says why."""
    prompts, trainer = Prompts(held_out=4, every=2), Noting(steps=8)
    shaky = Shaky(mixes=True, most_s=0.01)
    played = await play(graph(staleness=1, prompts=prompts, generator=shaky, trainer=trainer), memory)
    check_books(played, memory.run, staleness=1, groups=4)
    lost = [e for e in played.events if isinstance(e, DroppedEvent) and min(e.origins) < 0]
    assert all(e.reason == "invalid" and "to be evaluated was" in e.detail for e in lost)
    back = [e for e in played.events if isinstance(e, Evaluated)]
    sent = [e for e in played.events if isinstance(e, Admitted) and e.split == "eval"]
    assert len(lost) + len(back) == len(sent)


async def test_a_generator_that_dies_is_replaced_and_its_prompts_come_back(engine: Engine) -> None:
    spec = graph(
        staleness=1,
        generators=4,
        generator=Shaky(most_s=0.01),
        trainer=Noting(steps=20, seconds=0.005),
    )
    opts = options(engine.run)
    owner = await declare(spec, opts, engine)
    tasks = start(spec, opts, engine)
    for k in range(3):
        await asyncio.sleep(0.05)
        tasks["generator", k].cancel()
        await asyncio.gather(tasks["generator", k], return_exceptions=True)
        tasks["generator", k] = asyncio.create_task(replica(spec, opts, engine, "generator", k))
    await asyncio.gather(*tasks.values())
    ledger = check_books(await read(owner), engine.run, staleness=1, groups=4)
    assert ledger.trained == 80


async def test_ten_groups_ready_for_a_batch_of_eight_leave_two_for_the_next_step(memory: Engine) -> None:
    """slime #2238: a collector drained ten, returned eight and lost two."""
    spec = graph(groups=8, staleness=1, prompts=Prompts(count=16), trainer=Noting(steps=2, seconds=0.1))
    played = await play(spec, memory)
    assert check_books(played, memory.run, staleness=1, groups=8).trained == 16


async def test_two_epochs_of_four_batches_are_eight_steps_of_ten_then_a_clean_stop(memory: Engine) -> None:
    """NeMo-RL #2899: the run hung when the data ended before the steps."""
    spec = graph(prompts=Prompts(count=32, held_out=2), trainer=Noting(steps=10))
    async with asyncio.timeout(8):
        played = await play(spec, memory)
    ledger = check_books(played, memory.run, staleness=1, groups=4)
    assert ledger.version("trainer") == 8
    assert ledger.held_out_back == 4


async def test_everybody_leaves_when_the_trainer_has_made_its_last_step(engine: Engine) -> None:
    """prime-rl #2912: max_steps 3, staleness 2: the other processes waited for a version for ever."""
    async with asyncio.timeout(8):
        played = await play(graph(staleness=2, generators=2, trainer=Noting(steps=3)), engine)
    ledger = check_books(played, engine.run, staleness=2, groups=4)
    assert (ledger.version("trainer"), ledger.admitted) == (3, 12)

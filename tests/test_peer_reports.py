"""Faults that users of comparable systems reported, and faults of their kinds, on our own code."""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic.dataclasses import dataclass

from arriero.components.compute import ComputeThread
from arriero.components.model_directory import loading
from arriero.components.packing import check_vocabulary
from arriero.engine.broker import Lease
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.runtime import WaitTimeout
from arriero.engine.runtime.inputs import EdgeSource
from arriero.engine.runtime.provenance import check_kind, check_place
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Stream
from arriero.launchers.catalog import build, find
from arriero.launchers.failures import Failure, out_of_space
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import EVENT, Trained
from arriero.schemas.messages import Batch, Dropped, Prompt, RolloutGroup, ScoredGroup, Weights
from tests.brokers import Engine
from tests.runtime_runs import Noting, Shaky, play
from tests.toys import ToyCollect, ToyReward


class EmptyHanded:
    """A consumer whose edge has nothing: every call comes back empty after a moment."""

    async def lease(self, *, wait_s: float) -> Lease | None:
        await asyncio.sleep(0.01)
        return None


async def test_a_wait_reaches_its_bound_however_often_a_lease_comes_back_empty() -> None:
    """SkyRL #1173, prime-rl #2912: waits without an end."""

    async def poisoned(lease: Lease, error: str) -> None:
        await lease.nack(error)

    source = EdgeSource(
        EmptyHanded(), Prompt, name="a record of prompts", clock=NodeClock("trainer", bound_s=0.2),
        accept=lambda lease, record: record, poisoned=poisoned, again=lambda lease: None, want=2,
        max_deliveries=3,
    )  # fmt: skip
    source.start()
    with pytest.raises(WaitTimeout, match=r"trainer waited 0\.2 s for a record of prompts"):
        await asyncio.wait_for(source.next(), 5)
    await source.stop()


@dataclass(frozen=True, kw_only=True)
class Endless:
    """Three prompts, over and over."""

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(1_000_000):
            yield Prompt(id=f"e{k // 3}-r{k % 3}", text="?", epoch=k // 3, row=k % 3)


@dataclass(frozen=True, kw_only=True)
class Refusing:
    """Drops every prompt for `reason`, but the `good` row."""

    good: int = -1

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights]
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        inner = Shaky().run(prompts, weights)
        async for group in inner:
            assert isinstance(group, RolloutGroup)
            if group.prompt.row == self.good:
                yield group
            else:
                yield Dropped(parent=group.prompt.id, reason="too_long", detail="9 tokens, 8 fit")


def endless(generator: Refusing) -> GraphSpec:
    g = Graph("endless")
    weights = g.loop(Weights, staleness=1)
    groups = g.add(generator, name="generator")(g.add(Endless(), name="prompts")(), weights)
    scored = g.add(ToyReward(), name="reward")(groups)
    batches = g.add(ToyCollect(groups=2), name="collect")(scored)
    weights.close(g.add(Noting(steps=3), name="trainer")(batches))
    return g.check()


async def test_data_of_which_every_prompt_is_too_long_ends_the_run_after_one_epoch() -> None:
    """NeMo-RL #2899: a loop over data that can't give a batch."""
    with pytest.raises(
        UserError, match=r"prompts: all 3 records .* \(\d+ too_long; the last by generator: 9"
    ):
        await asyncio.wait_for(play(endless(Refusing()), Engine("memory", "hopeless")), 20)


async def test_one_prompt_that_fits_is_enough_to_go_on() -> None:
    played = await asyncio.wait_for(play(endless(Refusing(good=1)), Engine("memory", "hopeful")), 20)
    assert played.ledger.version("trainer") == 3
    assert played.ledger.trained == 6


def test_a_metric_that_overflowed_is_read_back_as_it_was() -> None:
    event = Trained(
        node="trainer", version=1, batch="b", origins=(0,), tokens=1, staleness_max=0, staleness_mean=0.0,
        reward_mean=0.0, metrics={"loss": math.nan, "kl": math.inf, "low": -math.inf},
    )  # fmt: skip
    again = EVENT.validate_json(EVENT.dump_json(event))
    assert isinstance(again, Trained)
    assert math.isnan(again.metrics["loss"])
    assert (again.metrics["kl"], again.metrics["low"]) == (math.inf, -math.inf)


async def test_components_of_one_process_load_one_after_the_other() -> None:
    """SkyRL #1415 and others: imports in several threads at once."""
    inside: list[int] = []
    lock, most = threading.Lock(), defaultdict[str, int](int)

    def load() -> None:
        with lock:
            inside.append(1)
            most["loading"] = max(most["loading"], len(inside))
        time.sleep(0.05)
        with lock:
            inside.pop()

    threads = [ComputeThread(f"c{k}") for k in range(4)]
    await asyncio.gather(*(thread(load) for thread in threads))
    assert most["loading"] == 1
    await asyncio.gather(*(thread(load) for thread in threads))  # afterwards they work side by side
    assert most["loading"] > 1
    for thread in threads:
        with thread:
            pass


def test_what_a_library_says_of_a_broken_model_is_one_line_that_names_the_directory() -> None:
    told = r"^model '/m' can't be loaded: KeyError: 'added_tokens'; its config"
    with pytest.raises(UserError, match=told) as caught, loading("/m"):
        raise KeyError("added_tokens")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_named_before_the_model_sees_its_tokens() -> None:
    check_vocabulary([0, 30], 31, "prompt p")
    with pytest.raises(UserError, match="prompt p has token 31, but the model's vocabulary ends at 30"):
        check_vocabulary([0, 31], 31, "prompt p")


def test_an_output_that_its_component_didnt_promise_is_refused_where_it_is_given() -> None:
    check_kind(Weights(version=1), Weights, "trainer")
    with pytest.raises(TypeError, match="reward gave 42, a int; its run promises ScoredGroup or Dropped"):
        check_kind(42, ScoredGroup, "reward")


def test_a_second_output_for_one_input_and_a_version_out_of_turn_are_refused() -> None:
    """prime-rl #1764: a version counted twice."""
    with pytest.raises(ValueError, match=r"comes from no input it holds; .* rates"):
        check_place(Batch(samples=()), (), "collect", version=0)
    check_place(Weights(version=0), (), "trainer", version=0)
    check_place(Weights(version=5), ("b",), "trainer", version=4)
    for version in (3, 4, 6):
        with pytest.raises(ValueError, match=f"trainer gave version {version} after 4"):
            check_place(Weights(version=version), ("b",), "trainer", version=4)


IN_THE_GRAPH = """\
from pydantic.dataclasses import dataclass
from arriero.engine.graph import Graph
@dataclass
class C: ...
def broken(cfg: C) -> Graph:
    return {}['key']
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise RuntimeError('at import')", r"broken\.py:1: RuntimeError: at import$"),
        ("import sys; sys.exit(3)", r"broken\.py:1: SystemExit: sys\.exit\(3\)$"),
        (IN_THE_GRAPH, r"broken\.py:6: KeyError: 'key'$"),
    ],
)
def test_an_error_in_a_pipeline_of_the_users_own_is_one_line_with_its_place(
    tmp_path: Path, code: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(UserError, match=told):
        _built(tmp_path / "broken.py")


def _built(file: Path) -> Graph:
    pipeline = find(str(file))
    return build(pipeline, pipeline.config_type())


def test_a_full_disk_is_named_in_place_of_what_failed_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(message="reward-0 ended with exit code 1\n\nThe full log is x")
    assert out_of_space(failure, (tmp_path, tmp_path / "absent")) is failure
    usage = shutil.disk_usage(tmp_path)._replace(free=0)

    def disk_usage(path: Path) -> object:
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    full = out_of_space(failure, (tmp_path,))
    assert full.code == 2
    assert full.message == (
        f"no space is left in {tmp_path}; make room, or choose another (reward-0 ended with exit code 1)"
    )

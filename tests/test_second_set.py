"""Whether a generator keeps a second set of its weights: as it is told, or as there is memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from arriero.components.generator import Generator
from arriero.components.placement import DevicePlacement
from arriero.components.second_set import Room, second_set
from arriero.engine.runtime.context import Context

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(tmp_path)


def decided(model: str, *rooms: Room, deterministic: bool = False, **options: Any) -> tuple[bool, int]:
    """Whether there is a second set, and how many are counted."""
    counted: list[str] = []
    context = Context(
        run_id="test", run_dir=Path(), node="generator", replica=0, rank=0, ranks=1, seed=0,
        deterministic=deterministic, staleness=1, loop="weights", count=lambda name, _: counted.append(name),
    )  # fmt: skip
    return second_set(Generator(model=model, **options), context, rooms), counted.count("second_sets")


def test_by_default_there_is_one_where_it_takes_a_quarter_of_the_free_memory_at_most(model: str) -> None:
    assert decided(model, Room(1 * GB, 4 * GB, "cpu")) == (True, 1)
    assert decided(model, Room(1 * GB + 1, 4 * GB, "cpu")) == (False, 0)
    assert decided(model, Room(1 * GB + 1, 4 * GB, "cuda")) == (False, 0)  # its cache is still to grow


def test_beside_a_cache_that_is_there_already_it_may_take_nearly_all(model: str) -> None:
    # Llama 8B in bfloat16 on a GPU of 141 GB, of which vLLM has left 15 %; a 70B over 8 of them fits too.
    assert decided(model, Room(16 * GB, 21 * GB, "cuda"), engine="vllm") == (True, 1)
    assert decided(model, *[Room(18 * GB, 21 * GB, "cuda")] * 8, engine="vllm") == (True, 1)
    assert decided(model, Room(20 * GB, 21 * GB, "cuda"), engine="vllm") == (False, 0)


def test_ranks_on_one_host_share_its_memory(model: str) -> None:
    assert decided(model, *[Room(1 * GB, 8 * GB, "cpu")] * 2, engine="vllm") == (True, 1)
    assert decided(model, *[Room(1 * GB, 8 * GB, "cpu")] * 3, engine="vllm") == (False, 0)


def test_one_rank_without_room_leaves_all_without(model: str) -> None:
    rooms = Room(16 * GB, 21 * GB, "cuda"), Room(16 * GB, 12 * GB, "cuda")
    assert decided(model, *rooms, engine="vllm") == (False, 0)


def test_what_is_said_counts_whatever_the_memory(model: str) -> None:
    assert decided(model, Room(4 * GB, 1 * GB, "cpu"), standby=True) == (True, 1)
    assert decided(model, Room(1, 4 * GB, "cpu"), standby=False) == (False, 0)


def test_nobody_gets_one_who_decodes_nothing_while_weights_arrive(model: str) -> None:
    room = Room(1, 4 * GB, "cpu")
    assert decided(model, room, placement=DevicePlacement(devices="turns")) == (False, 0)
    assert decided(model, room, deterministic=True) == (False, 0)


def test_the_log_names_what_there_is_no_second_set_for(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert decided(model, Room(20 << 20, 40 << 20, "cuda"), engine="vllm") == (True, 1)
    assert "20 MB of 40 MB free" in caplog.text
    assert decided(model, Room(38 << 20, 40 << 20, "cuda"), engine="vllm") == (False, 0)
    assert "38 MB are more than 0.9 of the 40 MB free" in caplog.text
    assert "lower vllm.memory_share" in caplog.text
    Path(model, "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert decided(model, Room(1, 40 << 20, "cuda"), engine="vllm") == (False, 0)
    assert "not qwen3_moe" in caplog.text

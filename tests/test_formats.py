"""Files of rows in every format, and data sets by a short name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, ipc

from arriero.components.datasets import read_rows
from arriero.components.presets import COPIES, PRESETS
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Gsm8k, Math
from arriero.engine.errors import UserError
from arriero.launchers.options import resolve
from arriero.pipelines.grpo import GRPOConfig
from tests.drive import kept, outputs

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
ROWS: list[dict[str, Any]] = [{"q": 'a, "b"\nc', "a": "1"}, {"q": "d\u00e9", "a": "2"}]


def written(path: Path) -> Path:
    table: Any = pa
    match path.name:
        case "rows.json":
            path.write_text(json.dumps(ROWS), encoding="utf-8")
        case "named.json":
            path.write_text(json.dumps({"version": 1, "data": ROWS, "tags": ["x"]}), encoding="utf-8")
        case "rows.csv":
            path.write_text('q,a\r\n"a, ""b""\nc",1\r\nd\u00e9,2\r\n', encoding="utf-8", newline="")
        case "rows.tsv":
            path.write_text('q\ta\n"a, ""b""\nc"\t1\nd\u00e9\t2\n', encoding="utf-8")
        case "rows.feather":
            writer: Any = feather
            writer.write_feather(table.Table.from_pylist(ROWS), str(path))
        case "file.arrow" | "stream.arrow":
            library: Any = ipc
            rows = table.Table.from_pylist(ROWS)
            opened = library.new_file if path.name == "file.arrow" else library.new_stream
            with opened(str(path), rows.schema) as sink:
                sink.write_table(rows)
        case _:
            raise AssertionError(path.name)
    return path


@pytest.mark.parametrize(
    "name",
    ["rows.json", "named.json", "rows.csv", "rows.tsv", "rows.feather", "file.arrow", "stream.arrow"],
)
def test_every_format_holds_the_same_rows(name: str, tmp_path: Path) -> None:
    assert [row.values for row in read_rows(str(written(tmp_path / name)))] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", "[1]", "row 1: a int where a JSON object is needed"),
        ("a.json", '{"a": [{}], "b": [{}]}', r"an object with 2 lists of objects \(a, b\)"),
        ("a.json", "3", "a int where a list of objects is needed"),
        ("a.json", "[", "invalid JSON"),
        ("a.csv", "q,a\n1\n", "a.csv:2: 1 fields where the header has 2"),
        ("a.csv", "q,q\n1,2\n", "a.csv:1: names of columns must be there and differ"),
        ("a.csv", 'q,a\n"1,2\n', "no CSV"),
        ("a.csv", "q,a\n", "no rows"),
        ("a.arrow", "q,a\n", "not a file of Arrow|can't be read"),
    ],
)
def test_a_broken_file_is_named_in_one_line(name: str, content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=why) as error:
        read_rows(str(path))
    assert "\n" not in str(error.value)


def test_a_preset_names_its_files_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARRIERO_DATA", raising=False)
    source = PromptSource(path="gsm8k")
    assert source.path.startswith("hf://datasets/openai/gsm8k/")
    assert (source.prompt_field, source.answer_field) == ("question", "answer")
    assert "test" in source.eval_path
    assert PromptSource(path="gsm8k", template="{prompt}!", limit=5).template == "{prompt}!"
    assert PromptSource(path="gsm8k", held_out=9).eval_path == ""
    assert PromptSource(path="reasoning-gym:chain_sum").gym == "chain_sum"
    assert PRESETS.keys() == COPIES.keys()


def test_a_command_line_may_say_only_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARRIERO_DATA", raising=False)
    config, _ = resolve(GRPOConfig, None, ["--model", "m", "--data", "math500", "--data.limit", "3"])
    assert (config.data.prompt_field, config.data.limit) == ("problem", 3)
    assert re.search(r"MATH-500", config.data.path)


@pytest.mark.parametrize(("name", "reward", "size"), [("gsm8k", Gsm8k(), 7473), ("math500", Math(), 500)])
async def test_the_answers_of_a_preset_can_be_scored(
    name: str, reward: Gsm8k | Math, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SHARED.is_dir():
        pytest.skip("the shared data aren't here")
    pytest.importorskip("math_verify")
    monkeypatch.setenv("ARRIERO_DATA", str(SHARED))
    prompts = kept(await outputs(PromptSource(path=name, epochs=1).run()))
    assert len(prompts) == size
    assert [why for p in prompts if (why := reward.unscorable(p))] == []


def test_a_store_that_cannot_be_reached_is_named_in_one_line() -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/rows.jsonl: can't be (read|opened)") as error:
        read_rows("http://127.0.0.1:9/rows.jsonl")
    assert "\n" not in str(error.value)

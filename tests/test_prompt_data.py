"""Data in blocks and over the network, several data sets, filters, what is held out, what can't be scored."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from arriero.components.blocks import LineBlocks
from arriero.components.curriculum import Curriculum
from arriero.components.datasets import open_blocks, read_rows
from arriero.components.fixed_weights import HeldOutSource
from arriero.components.prompt_data import PromptData
from arriero.components.prompts import PromptSource
from arriero.components.rewards import (
    Contains,
    Gsm8k,
    Length,
    Math,
    MultipleChoice,
    RolloutReward,
    Term,
    WeightedSum,
)
from arriero.components.row_order import windows_of
from arriero.engine.errors import UserError
from arriero.engine.runtime.context import entered
from arriero.schemas.messages import Prompt
from tests.drive import outputs
from tests.places import place


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(path: Path, count: int, **more: object) -> str:
    return write(path, [{"prompt": f"p{i}", "answer": i, **more} for i in range(count)])


def parquet(path: Path, count: int, group: int) -> str:
    pa, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]
    library.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def arrow(path: Path, count: int, group: int) -> str:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist([{"prompt": f"p{i}", "answer": str(i)} for i in range(count)])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=group):
            writer.write_batch(batch)
    return str(path)


async def drawn(source: PromptSource, first: int | None = None) -> list[Prompt]:
    return [p for p in await outputs(source.run(), first) if isinstance(p, Prompt)]


def keep_even(row: dict[str, Any]) -> bool:
    """For a source, which imports it."""
    return int(row["answer"]) % 2 == 0


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    window=st.integers(1, 4),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_windows_hold_every_row_of_every_block_once(
    sizes: list[int], window: int, epoch: int, shuffle: bool
) -> None:
    given_sizes = dict(enumerate(sizes))
    plan = list(windows_of(given_sizes, seed=1, epoch=epoch, window=window, shuffle=shuffle))
    assert sorted(b for together, _ in plan for b in together) == list(given_sizes)
    for together, order in plan:
        assert len(together) <= window
        assert sorted(order) == list(range(sum(given_sizes[b] for b in together)))
    again = list(windows_of(given_sizes, seed=1, epoch=epoch, window=window, shuffle=shuffle))
    assert again == plan


@pytest.mark.parametrize("made", [parquet, arrow])
async def test_row_groups_hold_the_rows_of_the_whole_file(tmp_path: Path, made: Any) -> None:
    path = made(tmp_path / f"d.{made.__name__}", 23, 4)
    blocks = open_blocks(path, in_memory=False)
    assert list(blocks.sizes) == [4, 4, 4, 4, 4, 3]
    assert [r for b in range(6) for r in blocks.read(b)] == read_rows(path)
    source = PromptSource(path=path, stream=2, epochs=2, held_out=3)
    found = await drawn(source)
    for epoch in (0, 1):
        rows = [p.row for p in found if p.epoch == epoch]
        assert sorted(rows) == list(range(20))
        assert rows != sorted(rows)
    assert [p.text for p in found] == [f"p{p.row}" for p in found]
    assert found == await drawn(source)
    assert found != await drawn(replace(source, seed=1))
    evaluation = await source.evaluation()
    assert evaluation is not None
    assert [p.row for p in evaluation.prompts] == [20, 21, 22]


async def test_lines_are_read_in_pieces_with_their_numbers(tmp_path: Path) -> None:
    text = "\ufeff" + "".join(f'{{"prompt": "é{i}"}}\n' + "\n" * (i % 3 == 0) for i in range(50))
    path = tmp_path / "d.jsonl"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        blocks = LineBlocks(str(path), file, nullcontext, block_bytes=100)
        assert len(blocks.sizes) > 5
        assert [r for b in range(len(blocks.sizes)) for r in blocks.read(b)] == read_rows(str(path))
    found = await drawn(PromptSource(path=str(path), stream=1, epochs=1))
    assert sorted(p.row for p in found) == list(range(50))


@settings(max_examples=20)
@given(limit=st.integers(1, 12), stream=st.integers(1, 4))
async def test_a_limit_holds_across_blocks(
    tmp_path_factory: pytest.TempPathFactory, limit: int, stream: int
) -> None:
    path = parquet(tmp_path_factory.mktemp("d") / "d.parquet", 10, 3)
    found = await drawn(PromptSource(path=path, stream=stream, limit=limit, epochs=1))
    assert {p.row for p in found} == set(range(min(limit, 10)))


def test_what_has_no_blocks_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt\nx\n")
    with pytest.raises(UserError, match=r"d\.csv: only JSONL that isn't compressed, Parquet and Arrow"):
        open_blocks(str(tmp_path / "d.csv"), in_memory=False)


async def test_a_pattern_stands_for_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"part-{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(2)])
    pattern = str(tmp_path / "part-*.jsonl")
    for stream in (0, 1):
        found = await drawn(PromptSource(path=pattern, epochs=1, shuffle=False, stream=stream))
        assert [(p.row, p.text) for p in found] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    with pytest.raises(UserError, match="no file has such a name"):
        read_rows(str(tmp_path / "none-*.jsonl"))


async def test_a_store_in_memory_is_read_whole_and_in_blocks() -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://arriero-test/d.jsonl", "wb") as file:
        file.write(b"".join(json.dumps({"prompt": f"p{i}"}).encode() + b"\n" for i in range(5)))
    whole = await drawn(PromptSource(path="memory://arriero-test/d.jsonl", epochs=1))
    pieces = await drawn(PromptSource(path="memory://arriero-test/d.jsonl", epochs=1, stream=1))
    globbed = await drawn(PromptSource(path="memory://arriero-test/*.jsonl", epochs=1))
    assert sorted(p.text for p in whole) == [f"p{i}" for i in range(5)]
    assert sorted(p.text for p in pieces) == sorted(p.text for p in globbed) == sorted(p.text for p in whole)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address where a web server shows it."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_a_file_behind_http_is_read(served: tuple[Path, str]) -> None:
    pytest.importorskip("aiohttp")
    folder, address = served
    numbered(folder / "d.jsonl", 4)
    found = await drawn(PromptSource(path=f"{address}/d.jsonl", epochs=1))
    assert sorted(p.text for p in found) == ["p0", "p1", "p2", "p3"]
    with pytest.raises(UserError, match=r"absent\.jsonl: (no such file|can't be read)"):
        read_rows(f"{address}/absent.jsonl")


async def test_a_row_whose_text_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", [{"prompt": p} for p in ("a  b", "c", "d", "c")])
    test = write(tmp_path / "e.jsonl", [{"prompt": p} for p in ("a b", "x")])
    counts: Counter[str] = Counter()
    with entered(place(count=lambda name, number: counts.update({name: number}))):
        found = await drawn(PromptSource(path=train, eval_path=test, epochs=1))
    assert sorted(p.row for p in found) == [1, 2, 3]
    assert counts["rows_held_out_too"] == 1
    both = await drawn(PromptSource(path=train, eval_path=train, epochs=1, overlap="allow"))
    assert len(both) == 4
    with pytest.raises(UserError, match=r"nothing is left to train on of 4 rows: .*overlap=allow"):
        await drawn(PromptSource(path=train, eval_path=train))


async def test_the_last_rows_of_a_set_in_blocks_are_held_out_by_content(tmp_path: Path) -> None:
    pa, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": p} for p in ("a", "b", "c", "a")]
    library.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=2)
    source = PromptSource(path=str(tmp_path / "d.parquet"), stream=1, held_out=1, epochs=1)
    assert sorted(p.text for p in await drawn(source)) == ["b", "c"]


async def test_an_expression_over_the_fields_chooses_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "rate": n / 10, "kind": "ab"[n % 2]} for n in range(1, 10)]
    path = write(tmp_path / "d.jsonl", rows)
    source = PromptSource(path=path, where='0.2 <= rate < 0.8 and kind == "a" or len(prompt) == 9', epochs=1)
    assert sorted(len(p.text) for p in await drawn(source)) == [2, 4, 6, 9]
    chosen = PromptSource(path=numbered(tmp_path / "n.jsonl", 6), keep=keep_even, epochs=1, limit=2)
    assert sorted(p.row for p in await drawn(chosen)) == [0, 2]  # the limit counts what is left


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("rate >", "is no expression"),
        ("rate.real > 1", "Attribute isn't allowed"),
        ("open('x')", r"open\(\) isn't known"),
        ("[x for x in rate]", "isn't allowed"),
        ("(lambda: 1)()", "isn't allowed|isn't known"),
        ("rate ** 9", "Pow isn't allowed"),
    ],
)
def test_what_isnt_an_expression_over_fields_is_refused(where: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PromptSource(path="d.jsonl", where=where)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("answr > 1", r"d\.jsonl:1: where='answr > 1': the row has no field 'answr'; did you mean answer\?"),
        ("prompt > 1", r"d\.jsonl:1: where='prompt > 1': TypeError"),
    ],
)
async def test_an_expression_that_doesnt_fit_the_rows_names_the_row(
    tmp_path: Path, where: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        await drawn(PromptSource(path=numbered(tmp_path / "d.jsonl", 2), where=where))


async def test_data_sets_are_mixed_by_weight(tmp_path: Path) -> None:
    main, other = numbered(tmp_path / "main.jsonl", 5), numbered(tmp_path / "other.jsonl", 50)
    mix = (PromptData(path=other, weight=1.0, limit=3, held_out=2),)
    source = PromptSource(path=main, weight=3.0, mix=mix)
    found = await drawn(source, first=40)
    for n in range(1, 41):
        assert abs(sum(p.source == "main" for p in found[:n]) - 0.75 * n) < 1
    assert {p.row for p in found if p.source == "other"} == {0, 1, 2}
    assert len({p.id for p in found}) == 40
    assert found == await drawn(source, first=40)
    evaluation = await source.evaluation()
    assert evaluation is not None
    assert [(p.id, p.source) for p in evaluation.prompts] == [
        ("s1-eval-r48", "other"), ("s1-eval-r49", "other"),
    ]  # fmt: skip


async def test_a_data_set_that_has_ended_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / f"{name}.jsonl", n) for name, n in (("a", 2), ("b", 7))]
    found = await drawn(PromptSource(path=paths[0], mix=(PromptData(path=paths[1]),), epochs=1))
    assert Counter(p.source for p in found) == {"a": 2, "b": 7}
    assert [p.source for p in found[:4]].count("a") == 2


def test_two_data_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "d.jsonl", 2)
    with pytest.raises(ValidationError, match="two data sets are called d; give them a name each"):
        PromptSource(path=path, mix=(PromptData(path=path),))


async def test_from_the_second_epoch_on_only_what_is_neither_solved_nor_hopeless(tmp_path: Path) -> None:
    known = {"e0-r0": 0.0, "e0-r1": 0.5, "e0-r2": 1.0, "e1-r1": 1.0}  # of row 3 nothing is known yet
    source = PromptSource(
        path=numbered(tmp_path / "d.jsonl", 4), epochs=4, curriculum=Curriculum(low=0.1, high=0.9, revisit=3)
    )
    with entered(place(measured=known.get)):
        found = await drawn(source)
    rows = [sorted(p.row for p in found if p.epoch == epoch) for epoch in range(4)]
    assert rows == [[0, 1, 2, 3], [1, 3], [3], [0, 1, 2, 3]]


async def test_a_curriculum_that_leaves_nothing_ends_the_data(tmp_path: Path) -> None:
    source = PromptSource(path=numbered(tmp_path / "d.jsonl", 2), curriculum=Curriculum())
    with entered(place(measured=lambda record: 1.0)):
        assert [p.epoch for p in await drawn(source)] == [0, 0]


async def test_rows_that_the_reward_cant_read_are_quarantined_before_the_first_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface/cookbook #335, open-r1 #293: an answer that couldn't be parsed earned 1.0."""
    rows = [{"prompt": f"p{i}", "answer": a} for i, a in enumerate(["#### 1", "???", "#### 3", ""])]
    path, counts = write(tmp_path / "d.jsonl", rows), Counter[str]()
    source = PromptSource(path=path, epochs=2).screened(Gsm8k())
    with entered(place(run_dir=tmp_path, count=lambda name, number: counts.update({name: number}))):
        found = await drawn(source)
    assert sorted(p.row for p in found) == [0, 0, 2, 2]
    report = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(r["row"], r["answer"]) for r in report] == [(1, "???"), (3, "")]
    assert "'???' has no number" in report[0]["reason"]
    assert counts["rows_quarantined"] == 2
    assert len([r for r in caplog.records if "2 rows are quarantined" in r.message]) == 1


async def test_a_sum_quarantines_what_one_of_its_terms_cant_read(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": a} for a in ("1", "???")]
    path = write(tmp_path / "d.jsonl", rows)
    reward = WeightedSum(terms=(Term(reward=Length(longest=9)), Term(reward=Math())))
    assert [p.row for p in await drawn(PromptSource(path=path, epochs=1).screened(reward))] == [0]
    assert len(await drawn(PromptSource(path=path, epochs=1).screened(Contains(text="x")))) == 2
    assert len(await drawn(PromptSource(path=path, epochs=1, screen=False).screened(reward))) == 2


async def quarantined(source: PromptSource, reward: RolloutReward, folder: Path) -> list[tuple[str, int]]:
    """Split and row of what the report of a screened source holds, which is drawn to its end."""
    screened = source.screened(reward)
    with entered(place(run_dir=folder)):
        evaluation = await screened.evaluation()
        assert [p.row for p in evaluation.prompts if not p.answer.isdigit()] == [] if evaluation else True
        assert [p.row for p in await drawn(screened) if not p.answer.isdigit()] == []
    report = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    return sorted((r["split"], r["row"]) for r in report)


@pytest.mark.parametrize("stream", [0, 1])
async def test_rows_are_quarantined_in_one_way_in_memory_streamed_and_held_out(
    tmp_path: Path, stream: int
) -> None:
    """Rows 1 and 4 have no number; row 4 is held out. Two epochs tell of each once."""
    path = write(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": a} for i, a in enumerate("1?34?6")])
    source = PromptSource(path=path, epochs=2, stream=stream, held_out=2)
    assert await quarantined(source, Gsm8k(), tmp_path) == [("eval", 4), ("train", 1)]


async def test_a_restarted_source_tells_of_no_row_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": a} for a in ("1", "?")])
    for _ in range(2):
        assert await quarantined(PromptSource(path=path, epochs=1), Gsm8k(), tmp_path) == [("train", 1)]


async def test_a_stream_of_rows_that_cannot_be_scored_ends_the_run(tmp_path: Path) -> None:
    path = numbered(tmp_path / "d.jsonl", 200)
    source = PromptSource(path=path, stream=1, answer_field="prompt").screened(MultipleChoice())
    with pytest.raises(UserError, match="none of the first 64 rows can be scored"):
        await drawn(source)


async def test_items_of_reasoning_gym_are_screened_too(tmp_path: Path) -> None:
    """Items of one set have no number in their answers."""
    pytest.importorskip("reasoning_gym")
    source = PromptSource(path="reasoning_gym:letter_jumble", size=3, epochs=1, options={"max_words": 3})
    with entered(place(run_dir=tmp_path)):
        assert await drawn(source.screened(Gsm8k())) == []
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 3


async def test_a_held_out_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "d.jsonl", 4)
    for source in (
        PromptSource(path=path, held_out=2, where="answer < 2"),
        HeldOutSource(path=path, held_out=2, where="answer < 2"),
    ):
        with pytest.raises(UserError, match="no row of 0 is left to evaluate on; change where or keep"):
            await source.evaluation()


async def test_a_question_is_held_out_however_it_is_shown(tmp_path: Path) -> None:
    """The same question in two data sets with two templates."""
    main = write(tmp_path / "main.jsonl", [{"prompt": p} for p in ("a", "b", "c")])
    other = write(tmp_path / "other.jsonl", [{"prompt": p} for p in ("b", "d")])
    mix = (PromptData(path=other, held_out=0, template="Q: {prompt}"),)
    source = PromptSource(path=main, held_out=2, mix=mix, epochs=1)
    assert sorted(p.text for p in await drawn(source)) == ["Q: d", "a"]

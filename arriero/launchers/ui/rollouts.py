"""The rollouts of a record, a page at a time: filtered and ordered by its tables, searched in its texts.

Nothing is held but the rows of one page, so that a page of a million rollouts costs what a page of ten does.
A search also holds where the texts lie.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, FiniteFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.engine.lineage.index import SAID, Index, Texts
from arriero.engine.lineage.spaces import Spaces
from arriero.launchers.report_rollouts import Pieces, token_class
from arriero.schemas.lineage import Place
from arriero.schemas.messages import Finish, Message, Outcome, Split

if TYPE_CHECKING:
    import pyarrow as pa

_SEARCH_S = 1.5  # of looking into texts, then what was found is shown
_BLOCK = 2048  # rollouts whose texts are read at a time, and more as the time allows
_SNIPPET = 240
_MOST_TOKENS = 8192

Order = Literal["newest", "oldest", "best", "worst", "longest", "stalest"]
_ORDERS: dict[Order, str] = {
    "newest": "part desc, start desc, id",
    "oldest": "part, start, id",
    "best": "reward desc nulls last, part desc, start desc, id",
    "worst": "reward nulls last, part desc, start desc, id",
    "longest": "sampled desc, part desc, start desc, id",
    "stalest": "staleness desc nulls last, part desc, start desc, id",
}
_KNOWN = """
with trained as (
    select rollout, max(version) as step from samples
    where version is not null and rollout <> '' group by rollout
), known as (
    select r.*, trained.step, trained.step - 1 - r.oldest as staleness
    from rollouts r left join trained on trained.rollout = r.id
)
"""


class Asked(Message):
    """Which rollouts, from which of them on, and how many; None and empty leave all in."""

    step: NonNegativeInt | None = None
    row: NonNegativeInt | None = None
    outcome: Outcome | None = None
    finish: Finish | None = None
    split: Split | None = None
    least: FiniteFloat | None = None
    most: FiniteFloat | None = None
    text: str = Field(default="", max_length=1000)
    order: Order = "newest"
    start: NonNegativeInt = 0
    count: int = Field(default=50, ge=1, le=200)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A rollout in the list; texts are their beginnings, empty where they are redacted."""

    id: str
    step: int | None
    row: int
    epoch: int
    split: str
    reward: float | None
    raw: float | None
    outcome: str
    sampled: int
    oldest: int
    newest: int
    staleness: int | None
    finish: str
    prompt: str
    response: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """`total` fit the filters; of them `searched` were looked into up to here. `after`: where to go on."""

    lines: tuple[Line, ...]
    total: int
    searched: int
    after: int | None


@dataclass(frozen=True, kw_only=True)
class Token:
    """`kind` are classes of `report_rollouts.STYLE`; nothing is known of a token that wasn't sampled."""

    text: str
    kind: str = ""
    logprob: float | None = None
    version: int | None = None
    advantage: float | None = None


@dataclass(frozen=True, kw_only=True)
class One:
    """A rollout in full; `turns`: what each earned; `others` are those of its group, with their rewards."""

    line: Line
    texts: Texts | None
    reward_version: str
    temperature: float
    seed: int
    recorded: str
    prompt_id: str
    steps: tuple[int, ...]
    turns: tuple[float, ...]
    tokens: tuple[Token, ...]
    left_out: int
    others: tuple[tuple[str, float | None], ...]


def page(index: Index, asked: Asked) -> Page:
    """The rollouts asked for; a search that takes long ends where it is, and says so."""
    where, values = _where(asked)
    fitting = f"from known{where}"
    ordered = f"{fitting} order by {_ORDERS[asked.order]}"
    if asked.text:
        return _searched(index, asked, index.arrow(f"{_KNOWN} select {SAID} {ordered}", values))
    ((total,),) = [tuple(r.values()) for r in index.rows(f"{_KNOWN} select count(*) {fitting}", values)]
    query = f"{_KNOWN} select * {ordered} limit ? offset ?"
    rows = index.rows(query, [*values, asked.count, asked.start])
    searched = asked.start + len(rows)
    lines = _lines(rows, index.texts([r["id"] for r in rows]))
    return Page(lines=lines, total=total, searched=searched, after=searched if searched < total else None)


def _searched(index: Index, asked: Asked, places: pa.Table) -> Page:
    """Looks into the texts at `places`, in their order, block by block: of each as they are stored."""
    wanted, total, at, size = asked.text.casefold(), places.num_rows, asked.start, _BLOCK
    began, found = time.monotonic(), list[str]()
    until = began + _SEARCH_S
    while at < total and len(found) < asked.count and (time.monotonic() < until or at == asked.start):
        block: list[dict[str, Any]] = places.slice(at, size).to_pylist()
        hits = {name for name, texts in index.said(block) if _holds(texts, wanted)}
        for row in block:
            at += 1
            found += [row["id"]] if row["id"] in hits else []
            if len(found) == asked.count:
                break
        took_s = time.monotonic() - began
        size = max(_BLOCK, min(4 * size, int((at - asked.start) / took_s * (_SEARCH_S - took_s))))
    query = f"{_KNOWN} select * from known where id in (select unnest(?))"
    rows = {row["id"]: row for row in index.rows(query, [found])} if found else {}
    lines = _lines([rows[name] for name in found], index.texts(found))
    return Page(lines=lines, total=total, searched=at, after=at if at < total else None)


def one(index: Index, name: str, pieces: Pieces | None) -> One:
    """A rollout by its id, token by token. Raises UserError if there is none."""
    if not (rows := index.rows(f"{_KNOWN} select * from known where id = ?", [name])):
        raise UserError(f"no rollout {name!r} is recorded")
    row, texts = rows[0], index.texts([name])
    samples = index.rows(
        "select version, advantage_part as part, advantage_start as start from samples "
        "where rollout = ? order by version nulls last",
        [name],
    )
    others = index.rows('select id, reward from rollouts where "group" = ? order by number', [row["group"]])
    tokens = () if name not in texts else _tokens(Spaces(index.url), row, samples, pieces)
    return One(
        line=_lines(rows, texts)[0], texts=texts.get(name), reward_version=row["reward_version"],
        temperature=row["temperature"], seed=row["seed"], recorded=row["recorded"], prompt_id=row["prompt"],
        steps=tuple(dict.fromkeys(s["version"] for s in samples if s["version"] is not None)),
        turns=tuple(row["turns"] or ()), tokens=tokens, left_out=max(row["length"] - _MOST_TOKENS, 0),
        others=tuple((r["id"], r["reward"]) for r in others),
    )  # fmt: skip


def _where(asked: Asked) -> tuple[str, list[object]]:
    """The filters as SQL with a `?` for each value."""
    tests: dict[str, object] = {
        "step = ?": asked.step, '"row" = ?': asked.row, "outcome = ?": asked.outcome,
        "finish = ?": asked.finish, "split = ?": asked.split, "reward >= ?": asked.least,
        "reward <= ?": asked.most,
    }  # fmt: skip
    given = {test: value for test, value in tests.items() if value is not None}
    return (" where " + " and ".join(given) if given else ""), [*given.values()]


def _lines(rows: Sequence[dict[str, Any]], texts: dict[str, Texts]) -> tuple[Line, ...]:
    return tuple(
        Line(
            id=r["id"], step=r["step"], row=r["row"], epoch=r["epoch"], split=r["split"], reward=r["reward"],
            raw=r["raw"], outcome=r["outcome"] or "", sampled=r["sampled"], oldest=r["oldest"],
            newest=r["newest"], staleness=r["staleness"] if r["oldest"] >= 0 else None, finish=r["finish"],
            prompt=texts[r["id"]].prompt[:_SNIPPET] if r["id"] in texts else "",
            response=texts[r["id"]].response[:_SNIPPET] if r["id"] in texts else "",
        )
        for r in rows
    )  # fmt: skip


def _holds(texts: Texts, wanted: str) -> bool:
    said = (texts.response, texts.prompt, texts.answer, texts.detail)
    return any(wanted in text.casefold() for text in said)


def _tokens(
    spaces: Spaces, row: dict[str, Any], samples: Sequence[dict[str, Any]], pieces: Pieces | None
) -> tuple[Token, ...]:
    """All tokens as they stand in the record, those of the prompt first; advantages are of its last step."""
    size = min(row["length"], _MOST_TOKENS)
    place = Place(part=row["part"], start=row["start"], size=size)
    arrays = spaces.read("rollouts", place, "tokens", "mask", "logprobs", "versions")
    advantages = np.full(size, np.nan, np.float32)
    step = None
    for sample in samples[-1:]:
        at, step = Place(part=sample["part"], start=sample["start"], size=size), sample["version"]
        advantages = spaces.read("advantages", at, "values")["values"]
    ids = [int(t) for t in arrays["tokens"]]
    texts = pieces(ids) if pieces is not None else [f"⟨{t}⟩" for t in ids]
    found: list[Token] = []
    for k, text in enumerate(texts):
        if not arrays["mask"][k]:
            found.append(Token(text=text))
            continue
        logprob, version, advantage = (
            float(arrays["logprobs"][k]),
            int(arrays["versions"][k]),
            float(advantages[k]),
        )
        age = step - 1 - version if step is not None else 0
        kind = token_class(logprob=logprob, age=age, advantage=advantage)
        known = advantage if np.isfinite(advantage) else None
        found.append(Token(text=text, kind=kind, logprob=logprob, version=version, advantage=known))
    return tuple(found)

"""How fast rewards judge, per core, beside bare math-verify; and whether golds earn themselves.

    python benchmarks/rewards.py [--data ../shared/data] [--answers 1000] [--json]

Each answer goes the whole way: to a worker of the reward and back. Right responses are the data sets' own
solutions, wrong ones the solutions of the next row. `per core` divides by the processor time of the worker
and of this process together, `wall` by the clock: the first holds on a busy machine too. Bare math-verify has
no worker, no limits, and takes the answers out of the same responses itself.
"""

import argparse
import asyncio
import importlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from arriero.components.rewards import Gsm8k, Math
from arriero.components.verifiers.canaries import response
from arriero.components.verifiers.pool import Pool
from arriero.components.verifiers.reward import Isolated
from arriero.schemas.messages import Outcome, Prompt, Rollout

DATA = Path(__file__).parents[1].parent / "shared" / "data"
LEAST = {"gsm8k": 500.0, "math": 100.0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt's answer and a response that is right."""

    answer: str
    solution: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Speeds in answers per second; disagreements are of gold against gold."""

    name: str
    answers: int
    per_core: float
    wall: float
    right_refused: int
    wrong_taken: int
    gold_disagreements: int
    bare_per_core: float = 0.0
    bare_right_refused: int = 0


def read(folder: Path) -> dict[str, list[Row]]:
    """Rows by reward; a data set that isn't there is left out."""
    gsm, math = folder / "gsm8k" / "test.jsonl", folder / "math" / "math500.jsonl"
    found: dict[str, list[Row]] = {}
    if gsm.is_file():
        found["gsm8k"] = [Row(answer=r["answer"], solution=r["answer"]) for r in lines(gsm)]
    if math.is_file():
        found["math"] = [Row(answer=r["answer"], solution=r["solution"]) for r in lines(math)]
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pairs(rows: Sequence[Row], number: int) -> list[tuple[str, str, bool]]:
    """Gold, response and whether that is right by construction, alternating."""
    found: list[tuple[str, str, bool]] = []
    for i in range(number // 2):
        row, other = rows[i % len(rows)], rows[(i + 1 + i // len(rows)) % len(rows)]
        found += [(row.answer, row.solution, True), (row.answer, other.solution, final(other) == final(row))]
    return found


def final(row: Row) -> str:
    """The answer without what names it: `x=5` says what `5` says."""
    return re.sub(r"^[a-z] *= *", "", row.answer.rpartition("####")[2].strip())


async def measure(reward: Isolated, rows: Sequence[Row], number: int) -> Measured:
    asked = pairs(rows, number)
    jobs: list[tuple[Prompt, Rollout]] = [(Prompt(text="?", answer=g), response(r)) for g, r, _ in asked]
    golds = [(Prompt(text="?", answer=r.answer), response(wrapped(reward, r.answer))) for r in rows]
    async with Pool(reward) as pool:
        before, start = processor_s(), time.perf_counter()
        scores = await asyncio.gather(*(pool.score(p, r) for p, r in jobs))
        wall_s, core_s = time.perf_counter() - start, processor_s() - before
        own = await asyncio.gather(*(pool.score(p, r) for p, r in golds))
    taken = [s.outcome is Outcome.OK for s in scores]
    return Measured(
        name=str(getattr(reward, "kind", "")),
        answers=len(jobs),
        per_core=len(jobs) / core_s,
        wall=len(jobs) / wall_s,
        right_refused=sum(right and not t for (*_, right), t in zip(asked, taken, strict=True)),
        wrong_taken=sum(t and not right for (*_, right), t in zip(asked, taken, strict=True)),
        gold_disagreements=sum(s.outcome is not Outcome.OK for s in own),
    )


def wrapped(reward: Isolated, answer: str) -> str:
    """The gold answer as a response."""
    return (
        f"\\boxed{{{answer}}}" if isinstance(reward, Math) else f"#### {answer.rpartition('####')[2].strip()}"
    )


def bare(rows: Sequence[Row], number: int) -> tuple[float, int]:
    """Answers per second of processor time of math-verify alone, and the right responses it refuses."""
    library: Any = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parse: Callable[[str], object] = library.parse
    asked = pairs(rows, number)
    start, refused = time.process_time(), 0
    for gold, text, right in asked:
        refused += right and not library.verify(parse(f"\\boxed{{{gold}}}"), parse(text))
    return len(asked) / (time.process_time() - start), refused


def processor_s() -> float:
    """Of this process and its workers."""
    mine = psutil.Process()
    times = [p.cpu_times() for p in (mine, *mine.children())]
    return float(sum(t.user + t.system for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="the numbers as JSON in the last line")
    options = parser.parse_args()
    found = read(options.data)
    if not found:
        parser.error(f"{options.data} has neither gsm8k/test.jsonl nor math/math500.jsonl; set --data")
    rewards: dict[str, Isolated] = {"gsm8k": Gsm8k(), "math": Math()}
    results: list[dict[str, object]] = []
    for name, rows in found.items():
        result: dict[str, object] = dict(vars(asyncio.run(measure(rewards[name], rows, options.answers))))
        if name == "math":
            speed, refused = bare(rows, options.answers)
            result |= {"bare_per_core": speed, "bare_right_refused": refused}
        results.append({**result, "least_per_core": LEAST[name]})
    columns = ("name", "answers", "per_core", "least_per_core", "bare_per_core", "wall")
    wide = (*columns, "right_refused", "wrong_taken", "gold_disagreements", "bare_right_refused")
    heads: dict[str, object] = dict(zip(wide, wide, strict=True))
    for row in (heads, *results):
        cells = [f"{row[c]:.0f}" if isinstance(row[c], float) else str(row[c]) for c in wide]
        print("  ".join(c.rjust(max(7, len(w))) for c, w in zip(cells, wide, strict=True)))
    if "math" in found:
        print("bare: math-verify alone, on the MATH rows")
    if options.json:
        print(json.dumps({str(r["name"]): r for r in results}))


if __name__ == "__main__":
    main()

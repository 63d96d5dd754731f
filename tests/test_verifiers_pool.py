"""Workers: what a hang, a crash and a flood become, and that no score moves to another rollout."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from arriero.components.rewards import Function, Gsm8k, Known, Limits, Math
from arriero.components.verifiers.pool import Pool
from arriero.engine.errors import UserError
from arriero.schemas.messages import Dropped, Outcome, Prompt, Rollout, ScoredGroup
from tests.verdicts import group, rollout, run, scores, values

SHORT = Limits(time_s=3.0, memory_mb=128)


def by_command(prompt: Prompt, rollout: Rollout) -> float:
    """Does what the response says."""
    match rollout.text.split():
        case ["hang"]:
            while True:
                pass
        case ["die"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["exit"]:
            sys.exit(3)
        case ["raise"]:
            raise ZeroDivisionError("by zero")
        case ["eat"]:
            return len([bytearray(1 << 20) for _ in range(4096)])
        case ["print"]:
            print("not a message", flush=True)
            sys.stdout.buffer.write(b"\x00\x00\x00\x01\x00")
            return 1.0
        case ["none"]:
            return None  # type: ignore[return-value]  # what a forgotten return gives
        case [number]:
            return float(number)
        case _:
            return 0.0
    return 0.0


async def waits(prompt: Prompt, rollout: Rollout) -> float:
    if rollout.text == "hang":
        await asyncio.sleep(3600)
    if rollout.text == "spin":
        while True:
            pass
    await asyncio.sleep(0.2)
    return float(rollout.text)


def child(prompt: Prompt, rollout: Rollout) -> float:
    import subprocess

    started = subprocess.Popen(["sleep", "1000"])
    Path(rollout.text).write_text(str(started.pid), encoding="ascii")
    while True:
        pass


async def test_hung_and_crashed_workers_cost_their_own_rollout_alone() -> None:
    # verl #288: a time limit of asyncio can't stop a loop. NeMo-RL #3635: scores moved by one.
    reward = Function(function=by_command, workers=2, limits=SHORT)
    texts = ("1", "hang", "2", "die", "3", "exit", "4", "raise", "5", "eat", "6", "print", "none", "7")
    found = await scores(reward, group(*texts))
    told = [s.value if s.outcome is Outcome.OK else s.outcome.value for s in found]
    assert told == [1, "timeout", 2, "error", 3, "error", 4, "error", 5, "error", 6, 1, "error", 7]
    why = {text: score.detail for text, score in zip(texts, found, strict=True) if score.detail}
    assert why["hang"] == "over 3 s"
    assert "SIGSEGV" in why["die"]
    assert re.fullmatch(r"SystemExit: 3 \(test_verifiers_pool\.py:\d+\)", why["exit"])
    assert re.fullmatch(r"ZeroDivisionError: by zero \(test_verifiers_pool\.py:\d+\)", why["raise"])
    assert why["eat"].startswith("MemoryError")
    assert "NoneType" in why["none"]


def by_whom(prompt: Prompt, rollout: Rollout) -> float:
    time.sleep(float(rollout.text))
    return float(os.getpid())


async def test_workers_share_a_group_whose_rollouts_take_long() -> None:
    found = await values(Function(function=by_whom, workers=2), group(*["0.1"] * 6))
    assert len(set(found)) == 2


async def test_scores_keep_the_order_of_their_rollouts_whichever_take_long() -> None:
    async with Pool(Function(function=waits_long, workers=2)) as pool:
        record = group("0", "0.05", "0", "0", "0.1", "0", "0.02", "0", "0")
        found = await pool.scores(record.prompt, record.rollouts)
    assert [s.value for s in found] == [0, 0.05, 0, 0, 0.1, 0, 0.02, 0, 0]


def waits_long(prompt: Prompt, rollout: Rollout) -> float:
    time.sleep(float(rollout.text))
    return float(rollout.text)


async def test_an_async_function_scores_many_at_once() -> None:
    reward = Function(function=waits, at_once=16, limits=Limits(time_s=30.0))
    assert await values(reward, group(*(str(k) for k in range(1, 17)))) == list(range(1, 17))


async def test_an_async_function_waits_for_many_groups_together() -> None:
    """64 groups of one response, 0.2 s each: one after the other they would take 12.8 s."""
    reward = Function(function=waits, at_once=64, limits=Limits(time_s=30.0))
    assert reward.want() == 64
    began = time.monotonic()
    found = await run(reward, *(group("1", id=f"g{k}") for k in range(64)))
    assert len(found) == 64
    assert time.monotonic() - began < 10.0


async def test_a_loop_in_an_async_function_costs_only_its_own_rollout() -> None:
    # It stops the others of its worker, too: each of them is asked again in a worker of its own.
    found = await scores(Function(function=waits, limits=Limits(time_s=1.0)), group("1", "spin", "hang"))
    assert [s.outcome.value for s in found] == ["ok", "timeout", "timeout"]


async def test_what_a_killed_worker_started_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    (score,) = await scores(Function(function=child, limits=Limits(time_s=2.0)), group(str(path)))
    assert score.outcome is Outcome.TIMEOUT
    pid = int(path.read_text(encoding="ascii"))
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"process {pid} is alive")


async def test_no_worker_outlives_its_reward() -> None:
    others = psutil.Process().children()  # a server of another test's, say
    async with Pool(Gsm8k(workers=2)) as pool:
        await pool.score(Prompt(text="?", answer="1"), rollout("1"))
        mine = [p for p in psutil.Process().children() if p not in others]
        assert len(mine) >= 2
    assert not [p for p in psutil.Process().children() if p in mine and p.status() != psutil.STATUS_ZOMBIE]


OPENS_AND_HANGS = """
import asyncio, psutil
from arriero.components.rewards import Function
from arriero.components.verifiers.pool import Pool
from arriero.schemas.messages import Prompt
from tests.verdicts import hangs_at_row_1, rollout

async def main():
    async with Pool(Function(function=hangs_at_row_1)) as pool:
        print(psutil.Process().children()[0].pid, flush=True)
        await pool.score(Prompt(text="?", row=1), rollout("#### -1"))

asyncio.run(main())
"""


def test_a_hung_worker_dies_with_the_process_that_asked_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", OPENS_AND_HANGS], stdout=subprocess.PIPE, env=environment
    ) as asking:
        assert asking.stdout is not None
        worker = psutil.Process(int(asking.stdout.readline()))
        assert worker.is_running()
        asking.kill()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive


async def test_a_stopped_worker_is_replaced_however_much_it_is_to_read() -> None:
    reward = Gsm8k(limits=Limits(time_s=2.0))
    others = psutil.Process().children()
    async with Pool(reward) as pool:
        (worker,) = [p for p in psutil.Process().children() if p not in others]
        worker.suspend()
        prompt = Prompt(text="x" * 5_000_000, answer="1")
        assert (await pool.score(prompt, rollout("#### 1"))).outcome is Outcome.TIMEOUT
        assert (await pool.score(prompt, rollout("#### 1"))).outcome is Outcome.OK
        assert pool.replaced == 1


async def test_power_towers_are_judged_at_once() -> None:
    # math-verify issues 59, 63 and 65: these ran for ever, or until memory was gone.
    pytest.importorskip("math_verify")
    texts = (
        r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}",
        r"\boxed{10^{(5^{5^{5^{5^{5}}} \cdot \log_{10}(5)} - 4)}}",
        r"\boxed{2^{99999999}}",
        r"\boxed{9999999!}",
    )
    found = await scores(Math(limits=Limits(time_s=60.0)), group(*texts, answer="10"))
    assert [s.outcome.value for s in found] == ["wrong"] * 4


async def test_a_reward_works_in_any_thread() -> None:
    # verl #5635, TRL #5281: outside the main thread math-verify raised, and every reward was 0.
    pytest.importorskip("math_verify")
    texts = (r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\sqrt{1/4}}", r"\boxed{2}")
    found = await asyncio.to_thread(lambda: asyncio.run(values(Math(), group(*texts, answer=r"\frac12"))))
    assert found == [1, 1, 1, 0]


async def test_an_unreadable_answer_sets_its_row_aside_and_earns_nothing() -> None:
    # huggingface/cookbook #335, open-r1 #293 and #566: every answer to it scored 1.
    pytest.importorskip("math_verify")
    good, bad = group(r"\boxed{2}", answer="2", id="a"), group(r"\boxed{2}", "x", answer="???", id="b")
    found = await run(Math(), good, bad)
    assert [type(r) for r in found] == [ScoredGroup, Dropped]
    assert isinstance(found[1], Dropped)
    assert (found[1].parent, found[1].reason) == ("b", "invalid")
    assert found[1].detail.startswith("quarantined: row 7: answer '???'")


async def test_a_data_set_without_a_readable_answer_ends_the_run() -> None:
    with pytest.raises(UserError, match=r"gsm8k can score none of the first 8 prompts: .*set answer_field"):
        await run(Gsm8k(), *(group("1", answer="none", id=str(k)) for k in range(20)))
    with pytest.raises(UserError, match="can score none of the first 1 prompts"):
        await run(Gsm8k(), group("1", answer="none"))


def generous(prompt: Prompt, rollout: Rollout) -> float:
    return 1.0


async def test_a_reward_that_cannot_tell_right_from_wrong_ends_the_run() -> None:
    known = (Known(answer="1", right="1", wrong="2"),)
    with pytest.raises(UserError, match="generous can't be trusted: it finds a known wrong response '2' ok"):
        await run(Function(function=generous, known=known), group("1"))
    with pytest.raises(UserError, match=r"finds a known right response '1' error .*ZeroDivision"):
        await run(Function(function=broken, known=known), group("1"))


def broken(prompt: Prompt, rollout: Rollout) -> float:
    return 1 / 0


async def test_a_reward_without_verdicts_ends_the_run() -> None:
    with pytest.raises(
        UserError, match="broken had no verdict 256 times in a row; the last: error: ZeroDivision"
    ):
        await run(Function(function=broken), *(group(*"12345678", id=str(k)) for k in range(40)))


async def test_scores_say_which_reward_gave_them() -> None:
    first, second = [await run(Gsm8k(strict=s), group("#### 1", answer="1")) for s in (False, True)]
    versions = {r.reward_version for r in (*first, *second) if isinstance(r, ScoredGroup)}
    assert len(versions) == 2
    assert all(len(v) == 16 for v in versions)

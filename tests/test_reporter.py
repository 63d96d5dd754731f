"""What is recorded of a run, from events and heartbeats with numbers worked out by hand."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime.journal import record
from arriero.engine.runtime.ledger import Ledger
from arriero.launchers.failures import Failure
from arriero.launchers.progress import Quiet
from arriero.launchers.reporter import Reporter
from arriero.launchers.rundir import create
from arriero.launchers.step_lines import step_line
from arriero.launchers.summary import Account, result_screen
from arriero.launchers.vitals import Vitals
from arriero.schemas.ledger import EVENT, LEDGER_LOG, Admitted, DroppedEvent, Evaluated, Event, Trained
from arriero.schemas.messages import Outcome
from arriero.schemas.run import NodeStatus, RoleStatus, RunOptions, RunSummary
from tests.toys import toy_graph

SPEC = toy_graph(generators=2, staleness=1).check()


def admitted(k: int) -> Admitted:
    return Admitted(id=f"p{k}", origin=k, split="train", epoch=0, row=k, min_version=0)


def held_out(k: int, version: int) -> Admitted:
    return Admitted(id=f"h{k}@{version}", origin=-k, split="eval", epoch=0, row=k, min_version=version)


def evaluated(k: int, version: int, *outcomes: Outcome) -> Evaluated:
    return Evaluated(
        id=f"h{k}@{version}", origin=-k, version=version, values=(0.0,) * len(outcomes), outcomes=outcomes
    )


def trained(version: int, origins: tuple[int, ...], reward: float = 0.0, **metrics: float) -> Trained:
    return Trained(
        node="trainer", version=version, batch=f"b{version}", origins=origins, tokens=24, staleness_max=1,
        staleness_mean=0.5, reward_mean=reward, metrics=metrics,
    )  # fmt: skip


class Recorded:
    """A finished recording: the summary, what failed, and the run directory."""

    def __init__(self, path: Path, events: Sequence[Event], allowed: int = 0) -> None:
        self.run, self.failures = create(path), list[Failure]()
        self.summary = asyncio.run(self._record(events, allowed))

    async def _record(self, events: Sequence[Event], allowed: int) -> RunSummary:
        broker = MemoryBroker()
        await broker.declare((), (LEDGER_LOG,))
        reporter = Reporter(
            SPEC, RunOptions(run_id="r", max_dead_letters=allowed), self.run,
            vitals=Vitals(()), display=Quiet(), fail=self.failures.append,
        )  # fmt: skip
        following = asyncio.create_task(reporter.follow(broker))
        for event in events:
            await record(broker, event)
        await reporter.drain(broker, following)
        return reporter.finish("finished", "", {})

    def lines(self, name: str) -> list[str]:
        return (self.run.path / name).read_text().splitlines()


def test_every_event_stands_in_the_ledger_file_as_it_came(tmp_path: Path) -> None:
    events: list[Event] = [admitted(0), held_out(1, 0), evaluated(1, 0, Outcome.OK), trained(1, (0,))]
    recorded = Recorded(tmp_path, events)
    assert [EVENT.validate_json(line) for line in recorded.lines("ledger.jsonl")] == events


def test_a_metric_that_is_not_finite_is_null_in_the_line_of_its_step() -> None:
    line = json.dumps(step_line(trained(1, (0,), loss=float("nan"), grad_norm=float("inf")), Vitals(())))
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (found["loss"], found["grad_norm"]) == (None, None)


def test_each_version_is_a_line_of_metrics(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, [admitted(0), trained(1, (0,), 0.25, loss=0.5, grad_norm=2.0)])
    (line,) = recorded.lines("metrics.jsonl")
    found = json.loads(line)
    expected = {"step": 1, "reward": 0.25, "loss": 0.5, "grad_norm": 2.0, "staleness_max": 1, "tokens": 24}
    assert found.items() >= expected.items()
    assert {"time", "queues", "roles", "nodes"} <= found.keys()


def test_prompts_under_way_at_the_end_are_dropped_with_that_reason_so_that_the_ledger_balances(
    tmp_path: Path,
) -> None:
    events: list[Event] = [admitted(0), admitted(1), admitted(2), held_out(1, 0), trained(1, (1,))]
    recorded = Recorded(tmp_path, events)
    last = EVENT.validate_json(recorded.lines("ledger.jsonl")[-1])
    assert isinstance(last, DroppedEvent)
    assert (last.origins, last.reason) == ((0, 2, -1), "end_of_run")
    s = recorded.summary
    assert s.groups_admitted == 3 == s.groups_trained + sum(s.groups_dropped.values())
    assert (s.state, s.error) == ("finished", "")


def test_a_ledger_that_contradicts_itself_fails_the_run(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, [admitted(0), trained(1, (0,)), trained(2, (0,))])
    assert recorded.summary.state == "failed"
    assert "prompt number 0 is trained in version 2, but was trained before" in recorded.summary.error


def test_more_dead_letters_than_allowed_fail_the_run_naming_node_record_and_error(tmp_path: Path) -> None:
    buried = [
        DroppedEvent(
            node="reward", parent=f"p{k}>generator", origins=(k,), reason="dead_letter", detail="bad"
        )
        for k in range(2)
    ]
    recorded = Recorded(tmp_path, [admitted(0), admitted(1), *buried], allowed=1)
    (failure,) = recorded.failures
    assert failure.code == 2
    assert failure.message == (
        "reward gave up record p1>generator: bad; 2 dead letters, --max-dead-letters allows 1"
    )


def test_accuracy_is_the_share_of_ok_over_all_samples_of_the_first_and_the_last_version_evaluated(
    tmp_path: Path,
) -> None:
    sent = [held_out(k, v) for v, k in ((0, 1), (0, 2), (3, 3), (5, 4))]
    ok, wrong, error = Outcome.OK, Outcome.WRONG, Outcome.ERROR
    back = [
        evaluated(1, 0, ok, wrong),
        evaluated(2, 0, wrong, error),
        evaluated(3, 3, wrong, wrong),
        evaluated(4, 5, ok, ok),
    ]
    summary = Recorded(tmp_path, [*sent, *back]).summary
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 1.0)


def test_rewards_are_means_of_the_first_and_the_last_tenth_of_the_steps(tmp_path: Path) -> None:
    steps = [trained(v, (v - 1,), reward=v / 20) for v in range(1, 21)]
    summary = Recorded(tmp_path, [*(admitted(k) for k in range(20)), *steps]).summary
    # 20 steps: the means of the first two and the last two.
    assert summary.reward_first == pytest.approx((0.05 + 0.10) / 2)
    assert summary.reward_last == pytest.approx((0.95 + 1.0) / 2)


def beat(role: str, replica: int, busy_s: float, idle_s: float, pid: int = 1, **node: int) -> RoleStatus:
    status = NodeStatus(node=role, busy_s=busy_s, idle_s=idle_s, **node)  # type: ignore[arg-type]  # counts only
    return RoleStatus(role=role, replica=replica, pid=pid, host="h", nodes=(status,))


def worked() -> Account:
    """10 versions of 4 prompts: 2 generators busy 8 s each of 10 s, a trainer busy 5 s of 10 s."""
    account = Account(SPEC)
    for version in range(1, 11):
        account.event(trained(version, ()), at_s=100.0 if version < 3 else 100.0 + version)
    for replica in range(2):
        account.heartbeat(beat("generator", replica, 8.0, 2.0, taken=20, given=20, tokens=400), 10.0)
        # Nothing happened since: the time after its last work isn't counted as idle.
        account.heartbeat(beat("generator", replica, 8.0, 30.0, taken=20, given=20, tokens=400), 10.0)
    account.heartbeat(beat("prompts", 0, 1.0, 9.0, given=40), 10.0)
    account.heartbeat(beat("reward", 0, 2.0, 8.0, taken=40, given=40), 10.0)
    account.heartbeat(beat("collect", 0, 0.5, 9.5, taken=40, given=10), 10.0)
    account.heartbeat(beat("trainer", 0, 5.0, 5.0, taken=10, given=11, tokens=240), 10.0)
    return account


def test_tokens_of_replicas_that_left_or_died_are_over_the_time_of_all() -> None:
    account = Account(SPEC)
    account.heartbeat(beat("generator", 0, 8.0, 2.0, taken=20, tokens=400), 10.0)
    account.heartbeat(beat("generator", 1, 5.0, 0.0, taken=10, tokens=300), 8.0)  # from 3 to 8, then it left
    account.heartbeat(beat("generator", 0, 9.0, 1.0, pid=2, taken=4, tokens=100), 20.0)  # started again
    assert account.tokens_per_s() == {"generator": 40.0}


def test_a_roles_rates_are_over_the_time_to_its_last_work() -> None:
    account = worked()
    assert account.tokens_per_s() == {"generator": 80.0, "trainer": 24.0}
    shares = {role: round(share, 6) for role, share in account.idle_share().items()}
    assert shares == {"prompts": 0.9, "generator": 0.2, "reward": 0.8, "collect": 0.95, "trainer": 0.5}


def test_the_prediction_and_the_bound_come_from_the_seconds_of_a_firing() -> None:
    summary = worked().summary(Ledger(), state="finished", error="", wall_s=1.0)
    assert summary.firing_s == pytest.approx(
        {"prompts": 1 / 40, "generator": 16 / 40, "reward": 2 / 40, "collect": 0.5 / 10, "trainer": 0.5}
    )
    # Four prompts on two generators of 0.4 s each: no schedule makes a version in less than 0.8 s.
    assert summary.bound_step_s == pytest.approx(0.8)
    assert summary.bound_nodes == ("generator:last",)
    assert summary.predicted_step_s is not None
    assert 0.8 <= summary.predicted_step_s < 0.9
    # Versions 3 to 10 came one second apart; the first two don't count.
    assert summary.step_s == pytest.approx(1.0)
    assert "1 in the median (of mean times: predicted 0.8, at least 0.8: generator)" in result_screen(
        summary, Path("run")
    )


def test_what_a_replica_needed_to_start_is_not_in_its_firings() -> None:
    account = worked()
    account.event(trained(11, ()), at_s=112.0)
    account.heartbeat(beat("trainer", 0, 5.3, 5.0, taken=11, given=12), 10.0)
    summary = account.summary(Ledger(), state="finished", error="", wall_s=1.0)
    assert summary.firing_s["trainer"] == pytest.approx(0.3)  # after the 0.5 s of each of the first ten


def test_what_was_never_measured_is_none_and_not_zero() -> None:
    account = Account(SPEC)
    account.event(trained(1, ()), at_s=0.0)
    summary = account.summary(Ledger(), state="finished", error="", wall_s=1.0)
    assert summary.predicted_step_s is summary.bound_step_s is summary.step_s is None
    assert summary.firing_s == {}
    assert summary.accuracy_before is summary.accuracy_after is None
    assert "accuracy" not in result_screen(summary, Path("run"))


def test_the_summary_file_is_the_summary(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, [admitted(0), trained(1, (0,), 0.5)])
    assert recorded.run.read_summary() == recorded.summary


def test_tensorboard_files_are_written_without_torch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from arriero.launchers.board import Board
from arriero.launchers.rundir import RunDir
board = Board(Path(sys.argv[1]) / "tensorboard")
board.add_scalar("train/reward", 0.5, 1)
board.close()
assert "torch" not in sys.modules, "torch was imported"
import tensorboardX
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/reward" in events.read_bytes()


def test_a_tensorboard_file_that_cannot_grow_raises_and_blocks_nobody(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from arriero.launchers.board import Board
from arriero.launchers.rundir import RunDir
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
board = Board(Path(sys.argv[1]) / "tensorboard")
try:
    for step in range(1000):
        board.add_scalar("train/reward", 0.5, step)
except OSError:
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 3


def test_a_stopped_run_says_that_it_leaves_no_model(tmp_path: Path) -> None:
    told = "not saved: only a run that ends by itself leaves one"
    for state, steps, shown in (("stopped", 3, True), ("stopped", 0, False), ("finished", 3, False)):
        summary = RunSummary.model_validate({"state": state, "steps": steps, "wall_s": 1.0})
        assert (told in result_screen(summary, tmp_path)) is shown

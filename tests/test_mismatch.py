"""The gate on generator against trainer: quiet for the same arithmetic, it warns, and it stops a real run."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.advantage import GroupAdvantage
from arriero.components.generator import Generator
from arriero.components.health import judge
from arriero.components.losses import AIPO
from arriero.components.measures import Measures, over_updates
from arriero.components.mismatch import MismatchGate
from arriero.components.packing import PackedTokens
from arriero.components.sampling import Sampling
from arriero.engine.component import PerRecord
from arriero.engine.graph import Graph
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig
from arriero.schemas.messages import RolloutGroup, Weights
from arriero.schemas.run import RunOptions
from tests.inline_runs import peaked_model, policy_gradient_fields

torch.set_num_threads(1)


def measured(differences: Any, versions: Any, *, fresh: int | None, bound: float = 0.5) -> dict[str, float]:
    """What a micro-batch measures whose log-probabilities are the behaviour's plus `differences`."""
    n = len(differences)
    zeros = torch.zeros(n)
    tokens = PackedTokens(
        targets_T=zeros.long(), advantages_T=zeros, weights_T=zeros, temperatures_T=zeros + 1,
        behaviour_T=zeros - 2, sequence_T=zeros.long(), versions_T=torch.as_tensor(versions),
    )  # fmt: skip
    measures = Measures(torch.device("cpu"), off_policy=True, fresh=fresh, bound=bound)
    logprobs_T = torch.as_tensor(differences, dtype=torch.float64) - 2
    measures.add(torch.tensor(0.0), logprobs_T, zeros, tokens, zeros)
    return measures.totals(None, digest=1)


def test_only_tokens_of_the_weights_in_use_are_compared() -> None:
    found = measured([0.25, -0.75, 8.0], [3, 3, 2], fresh=3)
    assert found["fresh_tokens"] == 2
    assert found["fresh_mismatch"] == 0.5
    assert found["fresh_mismatch_max"] == 0.75
    assert found["fresh_mismatch_share"] == 0.5
    assert found["mismatch_max"] == 8.0  # of all tokens, as it always was
    for nothing in (measured([0.25], [2], fresh=3), measured([0.25], [3], fresh=None)):
        assert not any(key.startswith("fresh") for key in nothing)


def test_the_percentile_is_that_of_numpy_to_nine_percent() -> None:
    differences = np.random.default_rng(0).exponential(0.02, 20_000)
    found = measured(differences, np.full(20_000, 3), fresh=3)
    want = np.quantile(differences, 0.99)
    assert want <= found["fresh_mismatch_p99"] <= 1.1 * want
    assert measured([1e-9] * 5, [3] * 5, fresh=3)["fresh_mismatch_p99"] == pytest.approx(1e-9)


def test_later_updates_of_a_step_leave_what_the_first_one_measured() -> None:
    first, later = measured([0.25, 0.25], [3, 3], fresh=3), measured([2.0, 2.0], [3, 3], fresh=None)
    together = over_updates([first, later])
    assert together["fresh_mismatch"] == 0.25
    assert together["fresh_tokens"] == 2
    assert together["mismatch"] == 1.125


@pytest.mark.parametrize("difference", [-900.0, 900.0])
def test_ratios_beyond_all_numbers_leave_measures_that_are_numbers(difference: float) -> None:
    found = measured([difference] * 3, [2] * 3, fresh=3)
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch_max"] == 900
    assert found["effective_samples"] == pytest.approx(1)  # all alike


def report(mean: float, share: float, tokens: float = 1000) -> dict[str, float]:
    return {
        "fresh_tokens": tokens,
        "fresh_mismatch": mean,
        "fresh_mismatch_p99": mean,
        "fresh_mismatch_max": mean,
        "fresh_mismatch_share": share,
    }


def test_the_gate_warns_and_then_stops() -> None:
    gates = MismatchGate().gates()

    def said(measured: dict[str, float]) -> list[tuple[str, str]]:
        return [(f.level, f.detail) for f in judge(gates, [measured], 7, "trainer")]

    assert said({}) == said(report(0.01, 0.0)) == said(report(9.0, 1.0, tokens=63)) == []
    for mean, share, key in ((0.11, 0.0, "mean is 0.1"), (0.01, 0.03, "share is 0.02")):
        ((level, message),) = said(report(mean, share))
        assert level == "warn"
        assert message.startswith("step 7: for the same weights")
        assert f"mismatch.warn_{key}" in message
    for mean, share, key in ((0.31, 0.0, "mean is 0.3"), (0.01, 0.21, "share is 0.2")):
        ((level, message),) = said(report(mean, share))
        assert level == "stop"
        assert re.search(rf"1000 tokens.* mismatch\.stop_{re.escape(key)}", message)
    with pytest.raises(ValueError, match=r"warn_mean=0\.4 is above stop_mean=0\.3"):
        MismatchGate(warn_mean=0.4)


@dataclass(frozen=True, kw_only=True)
class SaysTemperatureOne(PerRecord[RolloutGroup, RolloutGroup]):
    """Claims that the rollouts were sampled at temperature 1."""

    async def apply(self, record: RolloutGroup) -> RolloutGroup:
        claimed = tuple(r.model_copy(update={"temperature": 1.0}) for r in record.rollouts)
        return record.model_copy(update={"rollouts": claimed})


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, list[dict[str, float]]]]:
    """Exit code and metrics of each step of a run on a peaked model."""

    def begin(*, lie: bool, **generator_fields: Any) -> tuple[int, list[dict[str, float]]]:
        fields = policy_gradient_fields(
            tmp_path,
            model=peaked_model(tmp_path / "peaked"),
            steps=2,
            sampling=Sampling(max_new_tokens=5, temperature=0.5),
            mismatch=MismatchGate(**generator_fields.pop("gate", {})),
        )
        cfg = AIPOConfig(**fields)
        g = Graph("gated")
        weights = g.loop(Weights, staleness=0)
        prompts = g.add(cfg.data, name="prompts")()
        generator = Generator(
            model=cfg.model, samples=cfg.samples, sampling=cfg.sampling, slots=cfg.slots, **generator_fields
        )
        rollouts = g.add(generator)(prompts, weights)
        if lie:
            rollouts = g.add(SaysTemperatureOne(), name="lie")(rollouts)
        scored = g.add(cfg.reward, name="reward")(rollouts)
        batches = g.add(GroupAdvantage(groups=cfg.groups_per_step), name="advantage")(scored)
        weights.close(g.add(cfg.trainer(AIPO(rho=2.0)))(batches))
        record = create(tmp_path / "run")
        options = RunOptions(run_id="gated", seed=7, deterministic=True, wait_bound_s=60)
        code = inline(g.check(), options, record, LaunchOptions(quiet=True))
        lines = record.metrics.read_text().splitlines() if record.metrics.exists() else []
        return code, [json.loads(line) for line in lines]

    return begin


def test_a_generator_in_float32_agrees_to_the_last_digits_and_none_warns(
    run: Callable[..., tuple[int, list[dict[str, float]]]], caplog: pytest.LogCaptureFixture
) -> None:
    code, steps = run(lie=False)
    assert code == 0
    assert [s["fresh_tokens"] for s in steps] == [s["tokens"] for s in steps]  # nothing is stale
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps)
    assert "mismatch" not in caplog.text


def test_a_generator_in_bfloat16_is_warned_of_where_the_bound_says_so(
    run: Callable[..., tuple[int, list[dict[str, float]]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    code, steps = run(lie=False, precision="bfloat16", gate={"warn_mean": 1e-4})
    assert code == 0
    assert all(1e-3 < s["fresh_mismatch"] < 0.05 for s in steps)
    noted: list[Any] = [s["health"] for s in steps]
    assert noted == [{"mismatch": 1}] * 2
    assert caplog.text.count("mismatch.warn_mean is 0.0001") == 1  # what goes on is said once


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_generator_in_eight_bits_is_measured_at_each_step_and_stopped_where_the_bound_says_so(
    run: Callable[..., tuple[int, list[dict[str, float]]]],
    precision: str,
    standby: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    if standby:
        code, steps = run(lie=False, precision=precision, standby=True, gate={"warn_mean": 1e-4})
        assert code == 0
        assert all(1e-3 < s["fresh_mismatch"] < 0.2 for s in steps)
        assert all(
            s["fresh_mismatch"] <= s["fresh_mismatch_p99"] <= 1.1 * s["fresh_mismatch_max"] for s in steps
        )
        assert caplog.text.count("mismatch.warn_mean is 0.0001") == 1
    else:
        code, steps = run(lie=False, precision=precision, gate={"warn_mean": 1e-4, "stop_mean": 2e-4})
        assert (code, steps) == (2, [])
        assert "mismatch.stop_mean is 0.0002" in capsys.readouterr().err


def test_a_wrong_temperature_stops_the_run_before_its_weights_are_published(
    run: Callable[..., tuple[int, list[dict[str, float]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, steps = run(lie=True)
    assert code == 2
    assert steps == []
    assert "step 1: for the same weights, log-probabilities of generator and trainer differ by" in (
        capsys.readouterr().err
    )

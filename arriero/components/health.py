"""Gates on the health of a training run: each is data, and one pure function judges a step by all of them.

    measures of a step -> `judge` -> findings -> warned of by who records the run; a stop ends it

The trainer judges what it measures before it publishes the step's weights, so that a stop comes before
anybody samples with them. Who records the run judges the same again, to tell of it, and what only it sees:
queues, waits, event loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from statistics import fmean, median
from typing import Literal, Protocol, Self, runtime_checkable

from pydantic import ConfigDict, NonNegativeFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.schemas.ledger import Unhealthy

Measured = Mapping[str, float]

_FIRST, _BEFORE, _FEWEST = 5, 20, 5  # steps that a measure is compared with


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A bound on one measure of a step.

    `low`: it is to stay above the bounds, else not to exceed them. `over` divides the measure by its own mean
    in the first 5 steps of the run, or its median in the 20 before. It is judged once so many `steps` in a
    row are out of bounds, and only with at least `enough` of a measure that counts.
    """

    name: str
    measure: str
    warn: float | None
    stop: float | None
    keys: tuple[str, str]
    says: str
    remedy: str
    low: bool = False
    over: Literal["", "first", "before"] = ""
    steps: PositiveInt = 1
    enough: tuple[str, float] = ("", 0.0)


@runtime_checkable
class HasGates(Protocol):
    """A component that says by which gates a run is judged."""

    def gates(self) -> Sequence[Gate]: ...


def judge(gates: Iterable[Gate], history: Sequence[Measured], step: int, node: str) -> list[Unhealthy]:
    """What the gates say of the newest of `history`, the measures of all steps of `node` so far.

    `step` is its version. A measure that a step hasn't got, or that isn't a finite number, is within bounds.
    """
    return [found for gate in gates if (found := _judged(gate, history, step, node)) is not None]


def _judged(gate: Gate, history: Sequence[Measured], step: int, node: str) -> Unhealthy | None:
    if len(history) < gate.steps:
        return None
    values = [judged_value(gate, history, len(history) - 1 - back) for back in range(gate.steps)]
    for level, bound, key in (("stop", gate.stop, gate.keys[1]), ("warn", gate.warn, gate.keys[0])):
        if bound is None or not all(beyond(gate, v, bound) for v in values):
            continue
        since = f" for {gate.steps} steps" if gate.steps > 1 else ""
        of = {"": "", "first": " of what it was at first", "before": " times what it was before"}[gate.over]
        said = gate.says.format_map({**history[-1], "value": f"{values[0]:.3g}{of}{since}"})
        message = f"step {step}: {said}; {key} is {bound:g}: {gate.remedy}"
        return Unhealthy(
            node=node, version=step, gate=gate.name, level="stop" if level == "stop" else "warn",
            measure=gate.measure, value=values[0], bound=bound, detail=message,
        )  # fmt: skip
    return None


def beyond(gate: Gate, value: float, bound: float) -> bool:
    """Whether the gate finds fault with `value`; never with one that isn't finite."""
    if not math.isfinite(value):
        return False
    return value <= bound if gate.low else value > bound


def judged_value(gate: Gate, history: Sequence[Measured], at: int) -> float:
    """The measure that is judged of step number `at` (from 0); not a number where there is none."""
    counted, enough = gate.enough
    if counted and history[at].get(counted, 0.0) < enough:
        return math.nan
    value = history[at].get(gate.measure, math.nan)
    if not gate.over:
        return value
    span = history[:_FIRST] if gate.over == "first" else history[max(0, at - _BEFORE) : at]
    known = [v for m in span if math.isfinite(v := m.get(gate.measure, math.nan))]
    if len(known) < _FEWEST:
        return math.nan
    usual = fmean(known) if gate.over == "first" else median(known)
    return value / usual if usual > 0 else math.nan


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class High:
    """A measure above `warn` is warned of, above `stop` ends the run, `steps` times in a row; none: never."""

    warn: NonNegativeFloat | None = None
    stop: NonNegativeFloat | None = None
    steps: PositiveInt = 1

    @model_validator(mode="after")
    def _warns_first(self) -> Self:
        if self.warn is not None and self.stop is not None and self.warn > self.stop:
            raise ValueError(f"warn={self.warn:g} is above stop={self.stop:g}; a gate warns first")
        return self


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Low:
    """A measure of at most `warn` is warned of, at most `stop` ends the run; else as `High`."""

    warn: NonNegativeFloat | None = None
    stop: NonNegativeFloat | None = None
    steps: PositiveInt = 1

    @model_validator(mode="after")
    def _warns_first(self) -> Self:
        if self.warn is not None and self.stop is not None and self.warn < self.stop:
            raise ValueError(f"warn={self.warn:g} is below stop={self.stop:g}; a gate warns first")
        return self


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class HealthGates:
    """What a run is warned of, or ended for; docs/health.md says what each means and what to do."""

    masked: High = field(default_factory=lambda: High(warn=0.5))  # share of tokens clipped or masked
    tokens: Low = field(default_factory=lambda: Low(warn=0, stop=0))  # trained tokens
    reward_variance: Low = field(default_factory=lambda: Low(warn=0, steps=5))  # deviation within groups
    entropy: Low = field(default_factory=lambda: Low(warn=0.1, steps=3))  # share of that of the first steps
    kl: High = field(default_factory=lambda: High(warn=0.2))  # nats per token, from behaviour to policy
    staleness: High = field(default_factory=lambda: High(warn=8))  # mean of a token, versions
    stale: High = field(default_factory=lambda: High(warn=0.25, steps=3))  # share of groups dropped as stale
    gradient: High = field(default_factory=lambda: High(warn=10))  # times the median norm of 20 steps
    effective_samples: Low = field(default_factory=lambda: Low(warn=0.3))  # share
    imbalance: High = field(default_factory=lambda: High(warn=0.5, steps=5))  # full queue, idle trainer
    lag: High = field(default_factory=lambda: High(warn=5))  # seconds without a turn of an event loop

    def gates(self) -> tuple[Gate, ...]:
        return (
            _gate("masked", "clipped", self.masked),
            _gate("tokens", "tokens", self.tokens),
            _gate("reward_variance", "reward_std", self.reward_variance),
            _gate("entropy", "entropy", self.entropy, over="first"),
            _gate("kl", "kl", self.kl),
            _gate("staleness", "staleness_mean", self.staleness),
            _gate("stale", "stale_share", self.stale),
            _gate("gradient", "grad_norm", self.gradient, over="before"),
            _gate("effective_samples", "effective_samples", self.effective_samples),
            _gate("imbalance", "imbalance", self.imbalance),
            _gate("lag", "lag_s", self.lag),
        )


_WORDS = {
    "masked": (
        "{value} of the tokens are clipped or masked",
        "lower optimizer.lr or staleness, or widen the clip of the loss",
    ),
    "tokens": (
        "{value} tokens were trained",
        "every response is empty or masked; look at the rollouts, the filters and sampling.max_new_tokens",
    ),
    "reward_variance": (
        "rewards within a prompt's group deviate by {value}",
        "there is nothing to learn from; choose prompts of another difficulty, or look at the reward",
    ),
    "entropy": (
        "the entropy of the policy is {value}",
        "it has collapsed; lower optimizer.lr, widen the upper clip, or reward entropy",
    ),
    "kl": (
        "the policy is {value} nats per token away from what sampled its data",
        "lower optimizer.lr, epochs or staleness",
    ),
    "staleness": ("a trained token is {value} versions old", "lower staleness, or add generators"),
    "stale": (
        "{value} of the groups were dropped as stale",
        "raise staleness, or shorten responses (stragglers.segment_tokens)",
    ),
    "gradient": (
        "the norm of the gradient is {value}",
        "look at the rollouts of this step; lower optimizer.lr or optimizer.max_grad_norm",
    ),
    "effective_samples": (
        "{value} of the tokens weigh as much as all, with their importance ratios",
        "lower staleness or optimizer.lr; a few tokens make this update",
    ),
    "imbalance": (
        "one queue is full while the trainer waits: {value}",
        "see `queues` in metrics.jsonl; give the node behind the longest one more replicas",
    ),
    "lag": (
        "an event loop didn't come round for {value} s",
        "a component computes in its coroutine; compute in a thread, or give the role more cores",
    ),
}


def _gate(name: str, measure: str, limits: High | Low, over: Literal["", "first", "before"] = "") -> Gate:
    says, remedy = _WORDS[name]
    return Gate(
        name=name, measure=measure, warn=limits.warn, stop=limits.stop, steps=limits.steps, says=says,
        remedy=remedy, low=isinstance(limits, Low), over=over,
        keys=(f"health.{name}.warn", f"health.{name}.stop"),
    )  # fmt: skip

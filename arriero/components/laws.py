"""What every loss must hold to, whatever it computes; `check_laws` says what one breaks, and by how much.

    split        loss and gradient are the same however the batch is cut, ranked, laid out or padded
    masked       what isn't trained on contributes exactly nothing, NaN included
    finite       no tokens, one token, no advantage and extreme ratios give finite losses and gradients
    on-policy    on fresh data the gradient is the policy gradient
    weight       at equal log-probabilities the importance weight is 1 and nothing is clipped
    permutation  the order of the sequences changes nothing
    per-token    one loss per trained token

The policy gradient is that of `-A log pi` with one advantage per sequence; `on-policy` and `weight` are laws
for losses that call themselves policy gradients, which a loss does unless it says `policy_gradient = False`.
Everything is computed on a small random batch that is the same every time, in float64; `finite` in float32.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from arriero.components.law_cases import (
    Case,
    Doubles,
    Outcome,
    fresh,
    outcome,
    random_case,
    tokens_of,
    untrained,
)
from arriero.components.losses import Loss, facts
from arriero.components.packing import Layout, plan, read

if TYPE_CHECKING:
    from arriero.engine.graph import Graph

TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """A law that a loss breaks: on which input, and what differs from what."""

    law: str
    input: str
    difference: str

    def __str__(self) -> str:
        return f"{self.law}: {self.input}: {self.difference}"


def check_laws(loss: Loss) -> list[Violation]:
    """Every law that `loss` breaks, at most one violation per law and input; none after one that raises."""
    laws: list[Callable[[Loss], Iterator[Violation]]] = [_per_token, _split, _masked, _finite, _permutation]
    if facts(loss).policy_gradient:
        laws += [_on_policy, _weight]
    found: list[Violation] = []
    for law in laws:
        try:
            found.extend(law(loss))
        except _RaisedError as raised:
            name = law.__name__.strip("_").replace("_", "-")
            found.append(Violation(law=name, input=raised.input, difference=raised.difference))
    return found


class _RaisedError(Exception):
    """A loss raised instead of giving a number, on the input of this name."""

    def __init__(self, name: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        self.input = name
        self.difference = f"raised {error!r} in {Path(at.filename).name}, line {at.lineno}"


def graph_violations(graph: Graph) -> dict[str, list[Violation]]:
    """`node.field` -> the laws that the loss of this field breaks: what `arriero check --laws` prints."""
    return {name: check_laws(loss) for name, loss in graph_losses(graph).items()}


def graph_losses(graph: Graph) -> dict[str, Loss]:
    """`node.field` -> loss, of every component of `graph` that is configured with one."""
    return {
        f"{name}.{field.name}": value
        for name, node in graph.nodes.items()
        for field in dataclasses.fields(node.component)
        if isinstance(value := getattr(node.component, field.name), Loss)
    }


def _tried(
    name: str,
    loss: Loss,
    case: Case,
    micros: Sequence[Sequence[int]],
    *,
    layout: Layout = "padded",
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """`outcome`; `name` is what the input is called if the loss raises on it."""
    try:
        return outcome(loss, case, micros, layout=layout, dtype=dtype)
    except Exception as error:  # a user's loss may raise anything; that is the finding
        raise _RaisedError(name, error) from error


def _per_token(loss: Loss) -> Iterator[Violation]:
    name, case = "two sequences", random_case([9, 6])
    tokens, logprobs_T = tokens_of(
        case, [0, 1], np.ones(2), "padded", [torch.from_numpy(p) for p in case.policy]
    )
    try:
        shape = tuple(loss(logprobs_T, tokens).shape)
    except Exception as error:  # as in `_tried`
        raise _RaisedError(name, error) from error
    if shape != tuple(logprobs_T.shape):
        difference = f"shape {shape} instead of {tuple(logprobs_T.shape)}: aggregation isn't part of a loss"
        yield Violation(law="per-token", input=name, difference=difference)


def _split(loss: Loss) -> Iterator[Violation]:
    case = random_case([9, 4, 12, 7, 3, 16, 5, 8])
    lengths, terms = [len(s.mask) for s in case.samples], facts(loss).together
    whole = _tried("eight sequences at once", loss, case, [range(len(lengths))])
    alone = [range(i, i + terms) for i in range(0, len(lengths), terms)]
    layouts: tuple[Layout, ...] = ("padded", "packed", "shared_prefix")
    inputs = [read(s) for s in case.samples]
    cuts: list[tuple[str, Layout, list[Sequence[int]]]] = [("every sequence alone", "padded", [*alone])]
    for layout in layouts:
        for ranks in (1, 3):
            shares = plan(inputs, token_budget=24, ranks=ranks, layout=layout, together=terms)
            micros = [micro for share in shares for micro in share]
            cuts.append((f"{ranks} rank(s), {len(micros)} {layout} micro-batches", layout, [*micros]))
    for name, layout, cut in cuts:
        yield from _differs("split", name, case, _tried(name, loss, case, cut, layout=layout), whole)


def _masked(loss: Loss) -> Iterator[Violation]:
    name, case = "two sequences more that are masked throughout", random_case([9, 6, 12, 7])
    whole = _tried("four sequences with NaN off their masks", loss, case, [range(4)])
    further = random_case([10, 11], seed=1)
    blank = tuple(untrained(s) for s in further.samples)
    nothing = tuple(np.full(len(p), np.nan) for p in further.policy)
    more = Case(samples=case.samples + blank, policy=case.policy + nothing, proximal=case.proximal + nothing)
    found = _tried(name, loss, more, [range(6)])
    kept = dataclasses.replace(found, gradient=found.gradient[:4], clipped=found.clipped[:4])
    yield from _differs("masked", name, case, kept, whole)


def _finite(loss: Loss) -> Iterator[Violation]:
    """In float32, as in a trainer: there 89 nats are too many for an exponential."""
    terms = facts(loss).together
    whole = random_case([9] * terms)
    blank = dataclasses.replace(whole, samples=tuple(untrained(s) for s in whole.samples))
    cases = {
        "no trained token": blank,
        "one trained token per sequence": random_case([3] * terms),
        "equal rewards, so advantage 0": random_case([9, 6], advantage=0.0),
        "equal log-probabilities": random_case([9, 6], shift=0.0),
        "log-ratios of about 200 nats": random_case([9, 6], shift=200.0),
    }
    for name, case in cases.items():
        found = _tried(name, loss, case, [range(len(case.samples))], dtype=torch.float32)
        broken = ((i, np.flatnonzero(~np.isfinite(g))) for i, g in enumerate(found.gradient))
        at = next((f", gradient not finite {_place(case, i, int(t[0]))}" for i, t in broken if len(t)), "")
        if at or not np.isfinite(found.loss):
            yield Violation(law="finite", input=name, difference=f"loss {found.loss:.9g}{at}")


def _permutation(loss: Loss) -> Iterator[Violation]:
    name, case = "six sequences in another order", random_case([9, 4, 12, 7, 6, 5])
    whole, terms = _tried("six sequences", loss, case, [range(6)]), facts(loss).together
    order = [i for term in reversed(range(6 // terms)) for i in range(term * terms, (term + 1) * terms)]
    turned = Case(
        samples=tuple(case.samples[i] for i in order), policy=tuple(case.policy[i] for i in order),
        proximal=tuple(case.proximal[i] for i in order),
    )  # fmt: skip
    found = _tried(name, loss, turned, [range(6)])
    back = [order.index(i) for i in range(6)]
    found = dataclasses.replace(found, gradient=tuple(found.gradient[i] for i in back))
    yield from _differs("permutation", name, case, found, whole)


def _on_policy(loss: Loss) -> Iterator[Violation]:
    name, case = "fresh data, against the gradient of -A log pi", fresh(random_case([9, 4, 12, 7]))
    found = _tried(name, loss, case, [range(4)])
    right = dataclasses.replace(found, gradient=_weighed(case, weight=-1.0))
    yield from _differs("on-policy", name, case, found, right)


def _weight(loss: Loss) -> Iterator[Violation]:
    for level in (-1e-3, -1.0, -30.0):
        name, drawn = f"log-probabilities of {level} under both policies", random_case([9, 6]).samples
        even = tuple(np.where(s.mask, level, np.nan).astype(np.float32) for s in drawn)
        samples = tuple(
            s.model_copy(update={"logprobs": e.copy(), "reference": e.copy()})
            for s, e in zip(drawn, even, strict=True)
        )
        same = tuple(e.astype(np.float64) for e in even)
        case = Case(samples=samples, policy=same, proximal=same)
        found = _tried(name, loss, case, [range(2)])
        ones = _weighed(case, weight=1.0)
        for i, (gradient, one, limited) in enumerate(zip(found.gradient, ones, found.clipped, strict=True)):
            weight_L = np.divide(-gradient, one, out=np.ones(len(one)), where=one != 0)
            at = int(np.abs(weight_L - 1).argmax())
            if not abs(weight_L[at] - 1) <= TOLERANCE:
                difference = f"weight {weight_L[at]:.9g} instead of 1 {_place(case, i, at)}"
                yield Violation(law="weight", input=name, difference=difference)
                break
            if limited.any():
                difference = f"called clipped {_place(case, i, int(limited.argmax()))}"
                yield Violation(law="weight", input=name, difference=difference)
                break


def _weighed(case: Case, *, weight: float) -> tuple[Doubles, ...]:
    """`weight * A` [L] of each trained token over their number, per sample."""
    counts = sum(int(s.mask.sum()) for s in case.samples)
    return tuple(
        np.where(s.mask, weight * s.advantages.astype(np.float64) / counts, 0.0) for s in case.samples
    )


def _differs(law: str, name: str, case: Case, found: Outcome, expected: Outcome) -> Iterator[Violation]:
    """The largest difference, if it is one."""
    if not np.isclose(found.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE):
        difference = f"loss {found.loss:.9g} instead of {expected.loss:.9g}"
        yield Violation(law=law, input=name, difference=difference)
        return
    gaps = [float(np.abs(a - b).max()) for a, b in zip(found.gradient, expected.gradient, strict=True)]
    if not max(gaps) <= TOLERANCE:
        i = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        at = int(np.argmax(np.abs(found.gradient[i] - expected.gradient[i])))
        numbers = f"{found.gradient[i][at]:.9g} instead of {expected.gradient[i][at]:.9g}"
        yield Violation(law=law, input=name, difference=f"gradient {numbers} {_place(case, i, at)}")


def _place(case: Case, i: int, at: int) -> str:
    """Which token it is, and what the loss was given for it."""
    sample = case.samples[i]
    mu = np.nan if sample.logprobs is None else sample.logprobs[at]
    given = f"A {sample.advantages[at]:.6g}, log pi {case.policy[i][at]:.6g}, log mu {mu:.6g}"
    return f"at token {at} of sequence {i} ({given})"

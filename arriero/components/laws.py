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
Everything is computed in float64 on a small random batch that is the same every time.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from arriero.components.law_cases import (
    Case,
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
    """Every law that `loss` breaks, at most one violation per law and input."""
    laws: list[Callable[[Loss], Iterator[Violation]]] = [_per_token, _split, _masked, _finite, _permutation]
    if facts(loss).policy_gradient:
        laws += [_on_policy, _weight]
    found: list[Violation] = []
    for law in laws:
        try:
            found.extend(law(loss))
        except Exception as error:  # noqa: BLE001  # a user's loss may raise anything; that is the finding
            name = law.__name__.strip("_").replace("_", "-")
            at = traceback.extract_tb(error.__traceback__)[-1]
            difference = f"raised {error!r} in {Path(at.filename).name}, line {at.lineno}"
            found.append(Violation(law=name, input="a batch of this law", difference=difference))
    return found


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


def _per_token(loss: Loss) -> Iterator[Violation]:
    case = random_case([9, 6])
    tokens, logprobs_T = tokens_of(
        case, [0, 1], np.ones(2), "padded", [torch.from_numpy(p) for p in case.policy]
    )
    shape = tuple(loss(logprobs_T, tokens).shape)
    if shape != tuple(logprobs_T.shape):
        difference = f"shape {shape} instead of {tuple(logprobs_T.shape)}: aggregation isn't part of a loss"
        yield Violation(law="per-token", input="two sequences", difference=difference)


def _split(loss: Loss) -> Iterator[Violation]:
    case = random_case([9, 4, 12, 7, 3, 16, 5, 8])
    lengths, terms = [len(s.mask) for s in case.samples], facts(loss).together
    whole = outcome(loss, case, [range(len(lengths))])
    alone = [range(i, i + terms) for i in range(0, len(lengths), terms)]
    yield from _differs("split", "every sequence alone", outcome(loss, case, alone), whole)
    layouts: tuple[Layout, ...] = ("padded", "packed", "shared_prefix")
    inputs = [read(s) for s in case.samples]
    for layout in layouts:
        for ranks in (1, 3):
            shares = plan(inputs, token_budget=24, ranks=ranks, layout=layout, together=terms)
            micros = [micro for share in shares for micro in share]
            name = f"{ranks} rank(s), {len(micros)} {layout} micro-batches"
            yield from _differs("split", name, outcome(loss, case, micros, layout=layout), whole)


def _masked(loss: Loss) -> Iterator[Violation]:
    case = random_case([9, 6, 12, 7])
    whole = outcome(loss, case, [range(4)])
    for name, gradient, sample in zip("abcd", whole.gradient, case.samples, strict=True):
        if (gradient[~sample.mask] != 0).any():
            yield Violation(
                law="masked", input=f"sequence {name}, NaN off its mask",
                difference=f"gradient {gradient[~sample.mask].tolist()} there instead of 0",
            )  # fmt: skip
    further = random_case([10, 11], seed=1)
    blank = tuple(untrained(s) for s in further.samples)
    nothing = tuple(np.full(len(p), np.nan) for p in further.policy)
    more = Case(samples=case.samples + blank, policy=case.policy + nothing, proximal=case.proximal + nothing)
    found = outcome(loss, more, [range(6)])
    kept = dataclasses.replace(found, gradient=found.gradient[:4], clipped=found.clipped[:4])
    yield from _differs("masked", "two sequences more that are masked throughout", kept, whole)


def _finite(loss: Loss) -> Iterator[Violation]:
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
        found = outcome(loss, case, [range(len(case.samples))])
        if not (np.isfinite(found.loss) and all(np.isfinite(g).all() for g in found.gradient)):
            worst = max((float(np.abs(g).max()) for g in found.gradient), default=0.0)
            yield Violation(law="finite", input=name, difference=f"loss {found.loss}, gradient up to {worst}")


def _permutation(loss: Loss) -> Iterator[Violation]:
    case = random_case([9, 4, 12, 7, 6, 5])
    whole, terms = outcome(loss, case, [range(6)]), facts(loss).together
    order = [i for term in reversed(range(6 // terms)) for i in range(term * terms, (term + 1) * terms)]
    turned = Case(
        samples=tuple(case.samples[i] for i in order), policy=tuple(case.policy[i] for i in order),
        proximal=tuple(case.proximal[i] for i in order),
    )  # fmt: skip
    found = outcome(loss, turned, [range(6)])
    back = [order.index(i) for i in range(6)]
    found = dataclasses.replace(found, gradient=tuple(found.gradient[i] for i in back))
    yield from _differs("permutation", "six sequences in another order", found, whole)


def _on_policy(loss: Loss) -> Iterator[Violation]:
    case = fresh(random_case([9, 4, 12, 7]))
    found = outcome(loss, case, [range(4)])
    counts = sum(int(s.mask.sum()) for s in case.samples)
    expected = tuple(np.where(s.mask, -s.advantages.astype(np.float64) / counts, 0.0) for s in case.samples)
    right = dataclasses.replace(found, gradient=expected)
    yield from _differs("on-policy", "fresh data, against the gradient of -A log pi", found, right)


def _weight(loss: Loss) -> Iterator[Violation]:
    for level in (-1e-3, -1.0, -30.0):
        case = random_case([9, 6])
        even = tuple(np.where(s.mask, level, np.nan).astype(np.float32) for s in case.samples)
        samples = tuple(
            s.model_copy(update={"logprobs": e.copy(), "reference": e.copy()})
            for s, e in zip(case.samples, even, strict=True)
        )
        same = tuple(e.astype(np.float64) for e in even)
        found = outcome(loss, Case(samples=samples, policy=same, proximal=same), [range(2)])
        counts = sum(int(s.mask.sum()) for s in samples)
        name = f"log-probabilities of {level} under both policies"
        for s, gradient, limited in zip(samples, found.gradient, found.clipped, strict=True):
            weight_T = -gradient[s.mask] * counts / s.advantages[s.mask].astype(np.float64)
            if np.abs(weight_T - 1).max() > TOLERANCE:
                yield Violation(
                    law="weight", input=name, difference=f"weight {weight_T.tolist()} instead of 1"
                )
                break
            if limited.any():
                yield Violation(
                    law="weight", input=name, difference=f"{limited.sum()} tokens are called clipped"
                )
                break


def _differs(law: str, name: str, found: Outcome, expected: Outcome) -> Iterator[Violation]:
    """The largest difference, if it is one."""
    if not np.isclose(found.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE):
        yield Violation(law=law, input=name, difference=f"loss {found.loss} instead of {expected.loss}")
        return
    gaps = [float(np.abs(a - b).max()) for a, b in zip(found.gradient, expected.gradient, strict=True)]
    if not max(gaps) <= TOLERANCE:
        i = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        at = int(np.argmax(np.abs(found.gradient[i] - expected.gradient[i])))
        yield Violation(
            law=law, input=name,
            difference=f"gradient {found.gradient[i][at]:.9g} instead of {expected.gradient[i][at]:.9g} "
            f"at token {at} of sequence {i}",
        )  # fmt: skip

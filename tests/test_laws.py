"""Every loss holds to the laws, and each law notices a loss that breaks it."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from torch import Tensor

from arriero.components import losses
from arriero.components.laws import check_laws, graph_losses, graph_violations
from arriero.components.losses import (
    AIPO,
    AWR,
    CISPO,
    DPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    KTO,
    M2PO,
    SAPO,
    VMPO,
    ClippedPolicyGradient,
    CrossEntropy,
    Custom,
    DecoupledPPO,
    Divergence,
    ImportanceWeight,
    ImportanceWeighted,
    Loss,
    OffPolicyMask,
    OnPolicyDistillation,
    Reinforce,
    WithEntropy,
    WithKL,
    facts,
)
from arriero.components.packing import PackedTokens
from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.components.trainer import Trainer
from arriero.engine.graph import Graph

LOSSES: list[Loss] = [
    AIPO(),
    AWR(),
    CISPO(),
    CISPO(low=0.2, high=0.2),
    DPO(),
    DPO(kind="square"),
    DPPO(),
    DRO(),
    GMPO(),
    KTO(),
    KTO(kl=0.3, disliked=2.0),
    OffPolicyMask(loss=ClippedPolicyGradient()),
    OffPolicyMask(loss=AIPO(), delta=0.01),
    GSPO(),
    GSPO(low=0.2, high=0.3, gradient="per_token"),
    GSPO(low=0.2, high=0.3, advantage="sequence_mean"),
    M2PO(),
    SAPO(),
    VMPO(),
    ClippedPolicyGradient(),
    ClippedPolicyGradient(high=0.28, dual_clip=3.0),
    CrossEntropy(),
    DecoupledPPO(),
    DecoupledPPO(weight=ImportanceWeight(lower=0.5, level="sequence_geometric", outside="zero")),
    ImportanceWeighted(),
    ImportanceWeighted(weight=ImportanceWeight(level="sequence_product")),
    ImportanceWeighted(weight=ImportanceWeight(lower=0.5, outside="zero")),
    ImportanceWeighted(weight=ImportanceWeight(lower=0.5, judged="every_token", outside="zero")),
    Divergence(kind="jsd", beta=0.1),
    OnPolicyDistillation(),
    Reinforce(),
    WithKL(loss=GSPO(), beta=0.1),
    WithKL(loss=DecoupledPPO(), beta=0.1, estimator="k1", rho=2.0),
    WithKL(loss=Reinforce(), beta=0.1, estimator="k2"),
    WithEntropy(loss=WithKL(loss=AIPO(), beta=0.1), beta=0.01),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_loss_holds_to_the_laws(loss: Loss) -> None:
    assert [str(v) for v in check_laws(loss)] == []


def test_no_loss_is_left_out() -> None:
    kinds = {v for v in vars(losses).values() if isinstance(v, type) and hasattr(v, "clipped")}
    assert kinds - {type(loss) for loss in LOSSES} == {Loss, Custom}


def averaged(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """Divides by the tokens of the micro-batch."""
    return -tokens.advantages_T * logprobs_T / len(logprobs_T)


def scaled_by_zero(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """An infinite ratio, hidden by a zero."""
    assert tokens.behaviour_T is not None
    ratio_T = (logprobs_T - tokens.behaviour_T).exp()
    return -tokens.advantages_T * logprobs_T + 0 * ratio_T


def first_is_special(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """Counts the first sample of the batch twice."""
    return -tokens.advantages_T * logprobs_T * (1 + (tokens.sequence_T == 0).to(logprobs_T.dtype))


def divided_by_spread(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """Normalises advantages by their deviation: 0 where they are equal, none for a single token."""
    return -tokens.advantages_T / tokens.advantages_T.std() * logprobs_T


def wrong_sign(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """Climbs where it should descend."""
    return tokens.advantages_T * logprobs_T


def half_weight(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """A weight that isn't 1 at equal log-probabilities."""
    assert tokens.behaviour_T is not None
    return -tokens.advantages_T * (logprobs_T - tokens.behaviour_T).sigmoid().detach() * logprobs_T


def summed(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """One number for all tokens."""
    return -(tokens.advantages_T * logprobs_T).sum()


def raising(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """A loss with a bug."""
    raise ZeroDivisionError("of 3 tokens")


def unbounded(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """A plain ratio: finite in double precision, but not in the trainer's."""
    assert tokens.behaviour_T is not None
    return -tokens.advantages_T * (logprobs_T - tokens.behaviour_T).exp()


@pytest.mark.parametrize(
    ("function", "law"),
    [
        (averaged, "split"),
        (scaled_by_zero, "finite"),
        (unbounded, "finite"),
        (first_is_special, "permutation"),
        (divided_by_spread, "finite"),
        (wrong_sign, "on-policy"),
        (half_weight, "weight"),
        (summed, "per-token"),
        (raising, "split"),
    ],
)
def test_every_law_notices_a_loss_that_breaks_it(
    function: Callable[[Tensor, PackedTokens], Tensor], law: str
) -> None:
    broken = Custom(function=function, needs_behaviour=True, ratio_control=False)
    found = {v.law: v for v in check_laws(broken)}
    assert law in found
    assert found[law].input
    assert found[law].difference


def test_a_loss_that_raises_is_told_with_the_input_it_raised_on() -> None:
    def of_one_token(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        if len(logprobs_T) == 2:
            raise ZeroDivisionError("of 2 tokens")
        return -tokens.advantages_T * logprobs_T

    broken = Custom(function=of_one_token, needs_behaviour=False, ratio_control=False)
    found = {v.law: v for v in check_laws(broken)}
    assert {law: v.input for law, v in found.items()} == {"split": "every sequence alone"}
    assert re.fullmatch(
        r"raised ZeroDivisionError\('of 2 tokens'\) in test_laws.py, line \d+", found["split"].difference
    )


def test_a_violation_reads_as_law_input_and_difference() -> None:
    broken = Custom(function=wrong_sign, needs_behaviour=False, ratio_control=False)
    (violation,) = [v for v in check_laws(broken) if v.law == "on-policy"]
    assert (violation.law, violation.input) == ("on-policy", "fresh data, against the gradient of -A log pi")
    # All there is to work it out by hand: the advantage over the 18 trained tokens.
    found = re.fullmatch(
        r"gradient (\S+) instead of -(\S+) at token 2 of sequence 2 \(A (\S+), log pi (\S+), log mu (\S+)\)",
        violation.difference,
    )
    assert found is not None
    assert float(found[1]) == pytest.approx(float(found[2])) == pytest.approx(float(found[3]) / 18, rel=1e-5)
    assert found[4] == found[5]  # fresh
    assert str(violation).startswith("on-policy: fresh data, against")


def test_the_losses_of_a_graph_are_found_in_its_components() -> None:
    g = Graph("alone")
    trainer = Trainer(model="absent", loss=WithKL(loss=AIPO(), beta=0.1), steps=1)
    g.add(trainer)(
        g.add(SupervisedBatch(model="absent", examples=1, max_length=9))(g.add(ExampleSource(path="x"))())
    )
    assert graph_losses(g) == {"trainer.loss": WithKL(loss=AIPO(), beta=0.1)}
    assert graph_violations(g) == {"trainer.loss": []}


def above_reference(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """Policy gradient of what the reference finds less likely."""
    assert tokens.reference_T is not None
    return -tokens.advantages_T * (tokens.reference_T < 0) * logprobs_T


def test_a_function_may_need_what_the_trainer_or_a_reference_gives() -> None:
    loss = Custom(
        function=above_reference, needs_behaviour=False, ratio_control=False, needs=("reference", "entropy")
    )
    assert facts(loss).needs == {"reference", "entropy"}
    assert check_laws(loss) == []


class Misspelt(Reinforce):
    """Needs what doesn't exist."""

    needs = frozenset({"refrence"})


def test_an_unknown_need_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"needs \['refrence'\]; there are proximal, reference, entropy, divergence, multiplier",
    ):
        facts(Misspelt())


class Forgetful(Reinforce):
    """Needs a multiplier and doesn't say how it is learned."""

    needs = frozenset({"multiplier"})


def test_a_multiplier_that_nothing_learns_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Forgetful needs a multiplier; give it `multiplier` and `relearned`"
    ):
        facts(Forgetful())


def test_a_function_of_a_file_goes_through_the_serialised_graph_as_a_loss() -> None:
    g = Graph("alone")
    loss = Custom(function=half_weight, needs_behaviour=True, ratio_control=True)
    batches = g.add(SupervisedBatch(model="absent", examples=1, max_length=9))(
        g.add(ExampleSource(path="x"))()
    )
    g.add(Trainer(model="absent", loss=loss, steps=1))(batches)
    again = Graph.from_spec(type(g.spec()).model_validate_json(g.spec().model_dump_json()))
    (violations,) = graph_violations(again).values()
    assert {v.law for v in violations} == {"on-policy", "weight"}

"""What a loss is, and what all of them share. No torch at import: graph building reads this.

Shape suffix: T = trained tokens of a micro-batch, S = its sequences. Log-probabilities are in nats.

The loss of a step is `sum_t w_t * l_t` over every trained token of the whole batch. A `Loss` gives `l_t` and
`sequence_weights` gives `w_t`, before the batch is cut into micro-batches or over ranks; so neither the cut,
nor the ranks, nor padding can change the result. A sequence is never cut, so a loss may look at all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeAlias,
    get_args,
    runtime_checkable,
)

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

Need: TypeAlias = Literal["proximal", "reference", "entropy", "divergence", "multiplier", "kl_baseline"]

# Limits of a ratio: at least 1 - low, and a factor above 1 where a dual clip is set.
ClipLow: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
DualClip: TypeAlias = Annotated[float, Field(gt=1)] | None

# exp(20) is far beyond every clip; without the limit an infinite ratio times a zero gradient is NaN.
MAX_LOG_RATIO = 20.0


@runtime_checkable
class Loss(Protocol):
    """A per-token loss. The two facts are read by the graph check before anything starts.

    needs_behaviour: reads `tokens.behaviour_T`, so every sample must have log-probabilities.
    ratio_control: limits the ratio of policy to behaviour, so data of older versions is safe to train on.
    A loss may state more facts as attributes: the fields of `Facts`.
    """

    needs_behaviour: ClassVar[bool]
    ratio_control: ClassVar[bool]

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Loss [T] of each trained token, differentiable in `logprobs_T` [T]; TypeError in half precision."""
        ...

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Bool [T]: the tokens whose ratio the loss limited."""
        ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What else a loss may say of itself, by an attribute of the same name.

    needs: what `PackedTokens` must hold beyond advantages and behaviour. proximal: log-probabilities at the
    weights before the first update on the batch; reference: those of a fixed model; entropy: of the policy
    at each token, with gradient; divergence: from the trainer's teacher at each token, with gradient, see
    `Comparing`; multiplier: a number that is learned beside the weights, see `Bounded`; kl_baseline: the mean
    of log(pi/ref) over the mismatched responses of the batch, at least 0.
    together: how many samples in a row make one term (2 for pairs); they are never parted. by_sequence: every
    token has the loss of its whole sequence or pair. policy_gradient: on fresh data its gradient is that of
    `-A log pi`.
    """

    needs: frozenset[Need] = frozenset()
    together: int = 1
    by_sequence: bool = False
    policy_gradient: bool = True


@runtime_checkable
class Bounded(Protocol):
    """A loss that holds a divergence to a bound by a multiplier, whose value the trainer keeps."""

    multiplier: float

    def relearned(self, multiplier: float, kl: float) -> float:
        """The multiplier after an update that began at `kl` nats per token from the behaviour policy."""
        ...


@runtime_checkable
class Comparing(Protocol):
    """A loss of how far the policy is from a teacher, which the trainer holds beside it."""

    def between(self, student_logits_TV: Tensor, teacher_logits_TV: Tensor) -> Tensor:
        """The divergence [T], differentiable in the first; some of the tokens at a time."""
        ...


def facts(loss: Loss) -> Facts:
    """What `loss` says of itself, defaults where it says nothing; ValueError for an unknown need."""
    default = Facts()
    needs: frozenset[Need] = frozenset(getattr(loss, "needs", default.needs))
    if unknown := sorted(needs - set(get_args(Need))):
        raise ValueError(f"{type(loss).__name__} needs {unknown}; there are {', '.join(get_args(Need))}")
    if "multiplier" in needs and not isinstance(loss, Bounded):
        raise ValueError(f"{type(loss).__name__} needs a multiplier; give it `multiplier` and `relearned`")
    if "divergence" in needs and not isinstance(loss, Comparing):
        raise ValueError(f"{type(loss).__name__} needs a divergence; give it `between`")
    return Facts(
        needs=needs,
        together=getattr(loss, "together", default.together),
        by_sequence=getattr(loss, "by_sequence", default.by_sequence),
        policy_gradient=getattr(loss, "policy_gradient", default.policy_gradient),
    )


class Unclipped:
    """For losses that limit no ratio."""

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T != logprobs_T


class Around(Loss):
    """For what is put around another `loss`: its facts are those of that one."""

    loss: Loss

    def __post_init__(self) -> None:
        if kept := sorted(facts(self.loss).needs & {"multiplier", "divergence"}):
            raise ValueError(
                f"{type(self).__name__} can't stand around {type(self.loss).__name__}, for which the trainer "
                f"keeps a {kept[0]}: train with that loss alone"
            )

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return self.loss.clipped(logprobs_T, tokens)

    @property
    def needs_behaviour(self) -> bool:  # type: ignore[override]  # that of the loss inside
        return self.loss.needs_behaviour

    @property
    def ratio_control(self) -> bool:  # type: ignore[override]  # that of the loss inside
        return self.loss.ratio_control

    @property
    def needs(self) -> frozenset[Need]:
        return facts(self.loss).needs

    @property
    def together(self) -> int:
        return facts(self.loss).together

    @property
    def by_sequence(self) -> bool:
        return facts(self.loss).by_sequence

    @property
    def policy_gradient(self) -> bool:
        return facts(self.loss).policy_gradient


class PerSequence:
    """Sums and means over the tokens of each sequence; the tokens of one `key_T` [T] stand in a row.

    By way of a table of sequences by places, in which no two tokens meet: adding up by index has no fixed
    order on a GPU, and a step couldn't be replayed to the bit.
    """

    def __init__(self, key_T: Tensor) -> None:
        untyped: Any = key_T  # torch has no types for this
        found: tuple[Tensor, Tensor, Tensor] = untyped.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        _, self._row_T, self.counts_S = found
        begin_S = self.counts_S.cumsum(0) - self.counts_S
        ones_T = key_T.new_ones(len(key_T))
        self._place_T = ones_T.cumsum(0) - 1 - begin_S.index_select(0, self._row_T)
        self._width = int(self.counts_S.max()) if len(key_T) else 0

    def sum(self, x_T: Tensor) -> Tensor:
        """[S], differentiable."""
        return self._table(x_T).sum(1)

    def running(self, x_T: Tensor) -> Tensor:
        """[T]: for each token the sum over its sequence up to it; other sequences add no rounding."""
        return self._table(x_T).cumsum(1)[self._row_T, self._place_T]

    def mean(self, x_T: Tensor) -> Tensor:
        """[S], differentiable."""
        return self.sum(x_T) / self.counts_S

    def spread(self, x_S: Tensor) -> Tensor:
        """[T]: each token gets the value of its sequence."""
        return x_S[:, None].expand(-1, self._width)[self._row_T, self._place_T]

    def _table(self, x_T: Tensor) -> Tensor:
        table_SW = x_T.new_zeros(len(self.counts_S), self._width)
        return table_SW.index_put((self._row_T, self._place_T), x_T)


def log_ratio(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """log(pi/mu) [T]."""
    full_precision(logprobs_T)
    return logprobs_T - behaviour(tokens)


def ratio(log_ratio_T: Tensor) -> Tensor:
    """exp, with a finite result and gradient for any finite `log_ratio_T` [T]."""
    return log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()


def behaviour(tokens: PackedTokens) -> Tensor:
    """log mu [T]; ValueError if a sample has none."""
    if tokens.behaviour_T is None:
        raise ValueError("this loss needs the log-probabilities of the behaviour policy; a sample has none")
    return tokens.behaviour_T


def proximal(tokens: PackedTokens) -> Tensor:
    """Log-probabilities [T] before the first update; ValueError if the trainer gave none."""
    if tokens.proximal_T is None:
        raise ValueError("this loss needs proximal log-probabilities: state needs = frozenset({'proximal'})")
    return tokens.proximal_T


def reference(tokens: PackedTokens) -> Tensor:
    """Log-probabilities [T] of the reference model; ValueError if a sample has none."""
    if tokens.reference_T is None:
        raise ValueError(
            "this loss needs reference log-probabilities: put ReferenceLogprobs before the trainer"
        )
    return tokens.reference_T


def full_precision(logprobs_T: Tensor) -> None:
    """TypeError in half precision."""
    if logprobs_T.dtype.itemsize < 4:
        raise TypeError(
            f"log-probabilities are {logprobs_T.dtype}: ratios need float32; convert the logits first"
        )

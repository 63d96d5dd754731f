"""How a generator draws tokens: the config, the random numbers, the draw and its log-probabilities.

Invariant: the log-probability that is returned belongs to the distribution the token was drawn from,
temperature and top-p included. The random number of a token depends on the seed of its request and on its
position alone, so neither the batch around it nor a cut of the response into segments changes it.

Shapes: B rows, V vocabulary. torch is imported by the functions that need it, so building a `Sampling`
stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and when a response ends. An end-of-sequence token always ends it.

    `greedy` takes the most likely token instead, for evaluation: the log-probabilities are then still those
    of the distribution at `temperature`, which is not the one the token came from, so such rollouts must
    not be trained on.
    """

    max_new_tokens: PositiveInt = 128
    temperature: Annotated[float, Field(ge=1e-4)] = 1.0  # below it logits overflow
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    greedy: bool = False


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row [B], a pure function of (seed, position), with 52 random bits.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), over the seed and then the counter.
    """
    counter_B = _mix(seeds_B + _GOLDEN) + positions_B.astype(np.uint64) * _GOLDEN
    bits_B = _mix(counter_B) >> np.uint64(12)
    # 52 bits and not 53: then u * total rounds to less than total for every total in `draw`.
    return bits_B.astype(np.float64) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sampling_logprobs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [B, V] (nats, float32) of the distribution that `sampling` draws from.

    Tokens outside the nucleus get -inf; a row with a NaN or +inf logit is NaN throughout.
    """
    logp_BV = logits_BV.float().div(sampling.temperature).log_softmax(dim=-1)
    if sampling.top_p < 1.0:
        logp_BV = logp_BV.masked_fill(~nucleus(logp_BV, sampling.top_p), float("-inf"))
        logp_BV = logp_BV - logp_BV.logsumexp(dim=-1, keepdim=True)
    return logp_BV


def nucleus(logp_BV: Tensor, top_p: float) -> Tensor:
    """Mask [B, V] of the smallest set of most likely tokens whose mass reaches `top_p`; ties go to the
    lower id.

    Source: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    import torch

    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    prob_BV = sorted_BV.double().exp()
    before_BV = prob_BV.cumsum(dim=-1) - prob_BV
    return torch.zeros_like(logp_BV, dtype=torch.bool).scatter_(-1, order_BV, before_BV < top_p)


def draw(
    logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, greedy_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids [B] (int64) and their log-probabilities [B] (nats, float32) by inversion of the cumulative
    sum; where `greedy_B` [B] (bool) is true, the likeliest token instead.

    A row whose distribution is not finite has a NaN log-probability, and its token id means nothing.
    """
    import torch

    logp_BV = sampling_logprobs(logits_BV, sampling)
    if sampling.greedy:
        token_B1 = logp_BV.argmax(dim=-1, keepdim=True)
    else:
        cdf_BV = logp_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        # The first token whose cumulative sum lies above the target: never one of probability zero.
        token_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)
        token_B1.clamp_(max=cdf_BV.shape[-1] - 1)  # a NaN row has no such token
        if greedy_B is not None:
            token_B1 = logp_BV.argmax(dim=-1, keepdim=True).where(greedy_B[:, None], token_B1)
    return token_B1[:, 0], logp_BV.gather(-1, token_B1)[:, 0]


class StopStrings:
    """Tells whether the last token of a response completed one of the stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer: Any = tokenizer  # its `decode` is partly untyped
        self._stop = stop
        self._last_characters = {text[-1] for text in stop}
        # Every token holds a byte or more, so a match ends within as many tokens; a few more let the first
        # character of the window, which may be cut or lose its space, lie outside the match.
        self.window = max((len(text.encode()) for text in stop), default=0) + 4
        self._may_complete: dict[int, bool] = {}

    def __call__(self, token_ids: NDArray[np.int32]) -> bool:
        """`token_ids` [R]: the response so far, the newest token last."""
        return bool(self._stop) and self._plausible(int(token_ids[-1])) and self._matches(token_ids)

    def _matches(self, token_ids: NDArray[np.int32]) -> bool:
        text = self._text(token_ids[-self.window :].tolist())
        return any(stop in text for stop in self._stop)

    def _plausible(self, token_id: int) -> bool:
        """False when the text of the token alone shows that no stop string ends in it; saves decoding."""
        known = self._may_complete.get(token_id)
        if known is None:
            text = self._text([token_id])
            # A token alone may lose its space or be part of a character: then its text says nothing.
            conclusive = bool(text) and text.isascii() and " " not in self._last_characters
            known = not conclusive or any(c in text for c in self._last_characters)
            self._may_complete[token_id] = known
        return known

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

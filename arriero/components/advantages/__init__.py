"""From rewards to advantages, as pure functions on numpy arrays.

Where published implementations differ, an option is named after what it does; `docs/algorithms.md` says who
does which.
"""

from arriero.components.advantages.best import best_weights
from arriero.components.advantages.group import (
    Baseline,
    group_advantage,
    remax_advantage,
    whitened,
    whitened_tokens,
)
from arriero.components.advantages.shaping import Beyond, is_constant, overlong_penalty
from arriero.components.advantages.temporal import (
    Estimate,
    gae,
    on_tokens,
    returns_to_go,
    utterance_td,
    utterances,
    vtrace,
)

__all__ = [
    "Baseline",
    "Beyond",
    "Estimate",
    "best_weights",
    "gae",
    "group_advantage",
    "is_constant",
    "on_tokens",
    "overlong_penalty",
    "remax_advantage",
    "returns_to_go",
    "utterance_td",
    "utterances",
    "vtrace",
    "whitened",
    "whitened_tokens",
]

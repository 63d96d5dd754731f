"""`Known`: canaries from a configuration, for rewards whose right answers only their user knows."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from arriero.components.verifiers.reward import STRICT, Canary
from arriero.schemas.messages import Prompt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Known:
    """Two responses to one prompt with known verdicts: `right` must be `ok`, `wrong` must not be.

    An empty `right` isn't tried; an empty `wrong` is, as the empty response.
    """

    prompt: str = "?"
    answer: str = ""  # the prompt's
    right: str = ""
    wrong: str = ""


def canaries_of(known: Sequence[Known]) -> list[Canary]:
    """The canaries of a configuration."""
    pairs = [(Prompt(text=k.prompt, answer=k.answer), k) for k in known]
    right = [Canary(text=k.right, right=True, prompt=p) for p, k in pairs if k.right]
    return [*right, *(Canary(text=k.wrong, right=False, prompt=p) for p, k in pairs)]

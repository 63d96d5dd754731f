"""`Regex`: a response that matches a regular expression, or whose match is the prompt's answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.known import Known, canaries_of
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, verdict
from arriero.schemas.messages import Prompt, Rollout, Score

_GROUP = "answer"


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Regex(Isolated):
    """1 if `pattern` occurs in the response (`whole`: is the response).

    With a group `(?P<answer>...)`, 1 if what the last occurrence has there is the prompt's answer. A pattern
    may run for ever on some text: that is a `timeout`, and the worker is killed. Patterns that match an empty
    response are refused at the start.
    """

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
    whole: bool = False
    ignore_case: bool = False
    known: tuple[Known, ...] = ()  # tried before the first rollout

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        pattern, text = _compiled(self.pattern, self.ignore_case), rollout.text.strip()
        if _GROUP not in pattern.groupindex:
            return verdict((pattern.fullmatch(text) if self.whole else pattern.search(text)) is not None)
        found = [pattern.fullmatch(text)] if self.whole else list(pattern.finditer(text))
        last = found[-1] if found else None
        got = last[_GROUP] if last is not None else None
        return verdict(got is not None and self._normal(got) == self._normal(prompt.answer))

    def unscorable(self, prompt: Prompt) -> str:
        """With a group: a prompt without an answer."""
        if _GROUP in _compiled(self.pattern, self.ignore_case).groupindex and not self._normal(prompt.answer):
            return f"row {prompt.row}: the prompt has no answer to match"
        return ""

    def canaries(self) -> Sequence[Canary]:
        empty = Canary(text="", right=False, prompt=Prompt(text="?", answer="?"))
        return [*canaries_of(self.known), empty]

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@lru_cache(maxsize=64)
def _compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))

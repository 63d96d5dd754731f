"""Shaping terms: how a response looks, not whether it is right. They belong into a `WeightedSum`.

Their values stay out of the sum's raw reward, which filters look at: a group whose answers are all wrong is
uninformative, however different its lengths are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.extraction import boxes, conclusion
from arriero.components.verifiers.reward import STRICT, Canary, RolloutReward, verdict
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Length(RolloutReward):
    """0 for up to `longest - buffer` sampled tokens, then falling to -1 at `longest`; never lower.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476, equation 13.
    """

    kind: Literal["length"] = "length"
    longest: PositiveInt
    buffer: NonNegativeInt = 0

    shaping: ClassVar[bool] = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.buffer > self.longest:
            raise ValueError(f"buffer={self.buffer} is larger than longest={self.longest}; use at most that")
        return self

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        return Score(value=self.penalty(int(rollout.mask.sum())), outcome=Outcome.OK)

    def penalty(self, num_tokens: int) -> float:
        """In [-1, 0]."""
        over = num_tokens - (self.longest - self.buffer)
        if over <= 0:
            return 0.0
        return -min(1.0, over / self.buffer) if self.buffer else -1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Format(RolloutReward):
    """1 if the response has the asked form, else 0; one that was cut off has none.

    `thought`: it starts with one `<think>...</think>`, and more follows. `box`: exactly one box after that.
    `tag`: exactly one `<tag>...</tag>` with something in it.
    """

    kind: Literal["format"] = "format"
    thought: bool = False
    box: bool = False
    tag: str = ""

    shaping: ClassVar[bool] = True

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not (self.thought or self.box or self.tag):
            raise ValueError("format asks for nothing; set thought, box or tag")
        return self

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        return verdict(rollout.finish == "stop" and self.formed(rollout.text))

    def formed(self, text: str) -> bool:
        """Whether a complete response has the form."""
        if self.thought and not _one_thought(text):
            return False
        rest = conclusion(text)
        if self.box and (len(boxes(rest)) != 1 or not boxes(rest)[0].content):
            return False
        tag = re.escape(self.tag)
        inside: list[str] = re.findall(f"<{tag}>(.*?)</{tag}>", rest, re.S) if tag else []
        opened = rest.count(f"<{self.tag}>") if tag else 0
        return not tag or (len(inside) == opened == 1 and bool(inside[0].strip()))

    def canaries(self) -> Sequence[Canary]:
        right = "<think>so</think>" * self.thought + r" \boxed{1}" * self.box
        right += f" <{self.tag}>1</{self.tag}>" if self.tag else " 1"
        return [Canary(text=t, right=t == right, prompt=Prompt(text="?")) for t in (right, "", right + right)]


def _one_thought(text: str) -> bool:
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.lstrip().startswith("<think>") and bool(text.partition("</think>")[2].strip())

"""`Gsm8k`: the number at the end of a response (Cobbe et al., arXiv:2110.14168: "#### n")."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from pydantic.dataclasses import dataclass

from arriero.components.verifiers.extraction import conclusion, final_boxes, marked
from arriero.components.verifiers.quantity import IN_TEXT, measured, number
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, verdict
from arriero.schemas.messages import Prompt, Rollout, Score

_MARKER = re.compile(r"####[ \t]*([^\n]*)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gsm8k(Isolated):
    """1 if the response's number is the answer's, as an exact value; wherever in the text its marker stands.

    The response's number: behind the last `####`; else in the last box; else behind the last "Answer:"; else
    the last number of the text. With `strict`, only the first of these. Several different numbers behind one
    marker are no answer. The prompt's answer is a number, or a solution that ends in `#### n`.
    """

    kind: Literal["gsm8k"] = "gsm8k"
    strict: bool = False

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        gold, found = gold_number(prompt.answer), self._number(rollout.text)
        if gold is None or found is None:
            return verdict(False, "no number" if gold is not None else "the answer is no number")
        return verdict(found == gold)

    def unscorable(self, prompt: Prompt) -> str:
        """A prompt whose answer isn't a number."""
        if gold_number(prompt.answer) is None:
            return f"{_where(prompt)}: answer {prompt.answer[-60:]!r} has no number"
        return ""

    def canaries(self) -> Sequence[Canary]:
        prompt = Prompt(text="?", answer="10 * 7,000 = 70,000\n#### 70,000")
        right = ("#### 70000", "so\n#### $70,000.", "#### 7\nno:\n#### 70,000 dollars")
        wrong = ("#### 70", "#### 70 or 70000", "", "#### 70,001", "70000 it isn't\n#### 7")
        return [Canary(text=t, right=t in right, prompt=prompt) for t in (*right, *wrong)]

    def _number(self, text: str) -> Fraction | None:
        text = conclusion(text)
        if markers := _MARKER.findall(text):
            return _one_number(markers[-1])
        if self.strict:
            return None
        if boxed := final_boxes(text):
            return _one_number(boxed[-1].replace("\\$", "$").replace("\\%", "%")) if len(boxed) == 1 else None
        if (line := marked(text)) is not None:
            return _one_number(line)
        found = IN_TEXT.findall(text)
        return measured(found[-1]) if found else None


@lru_cache(maxsize=4096)
def gold_number(answer: str) -> Fraction | None:
    """The value of a prompt's answer; None if it is no number."""
    return measured(answer.rpartition("####")[2])


def _one_number(text: str) -> Fraction | None:
    """The number of a short text; of a calculation what stands behind its last "="; None for a choice."""
    text = text.rpartition("=")[2]
    if (value := measured(text)) is not None:
        return value
    values = {number(n.strip()) for n in IN_TEXT.findall(text)}
    return values.pop() if len(values) == 1 else None


def _where(prompt: Prompt) -> str:
    return f"row {prompt.row}"

"""`Math`: the answer in the box is the prompt's. math-verify parses; extraction and policy are ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from arriero.components.verifiers import symbolic
from arriero.components.verifiers.equality import same_answer, unreadable
from arriero.components.verifiers.extraction import MOST_ANSWER_CHARS, boxes, conclusion, final_boxes, marked
from arriero.components.verifiers.quantity import measured
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, verdict
from arriero.schemas.messages import Prompt, Rollout, Score

_ALONE_CHARS = 80
_FORMULA = re.compile(r"[\w\s\\{}()\[\]^+\-*/=<>.,|$!'\u00b0-\uffff]+")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Math(Isolated):
    """1 if the response's answer equals the prompt's; `equality` says when, `extraction` which answer it is.

    A number that merely stands in the text never counts. A response that is one formula and nothing else
    counts as its answer, unless it is a bare number. The prompt's answer is LaTeX, boxed or not.
    """

    kind: Literal["math"] = "math"
    box_only: bool = False  # neither "Answer:" nor a formula alone

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        answer = self.answer(rollout.text)
        if answer is None:
            return verdict(False, "no answer")
        gold = gold_text(prompt.answer)
        if why := unreadable(gold):
            return verdict(False, f"the prompt's answer: {why}")
        return verdict(same_answer(gold, answer[:MOST_ANSWER_CHARS]))

    def prepare(self) -> None:
        symbolic.parsed("x+1")

    def unscorable(self, prompt: Prompt) -> str:
        """A prompt whose answer can't be read."""
        why = unreadable(gold_text(prompt.answer))
        return f"row {prompt.row}: answer {prompt.answer[-80:]!r}: {why}" if why else ""

    def canaries(self) -> Sequence[Canary]:
        prompt = Prompt(text="?", answer=r"\frac{3}{4}")
        right = (r"\boxed{\frac34}", r"so \(\boxed{0.75}\).", r"\boxed{1} no, \boxed{\tfrac{9}{12}}")
        wrong = (r"\boxed{\frac43}", "", r"\boxed{}", "it is 3/4 there", r"\boxed{\frac34", r"\boxed{3,4}")
        return [Canary(text=t, right=t in right, prompt=prompt) for t in (*right, *wrong)]

    def answer(self, text: str) -> str | None:
        """What the response gives as its answer; None if nothing."""
        text = conclusion(text)
        if found := final_boxes(text):
            return ",".join(found) if all(found) else None
        if self.box_only:
            return None
        if (line := marked(text)) is not None:
            return line.strip("*_ ")
        return _alone(text.strip())


def gold_text(answer: str) -> str:
    """A prompt's answer without its box, or without the solution in front of `####`."""
    if found := boxes(answer):
        return found[-1].content
    return answer.rpartition("####")[2].strip()


def _alone(text: str) -> str | None:
    """A response that is one formula, if it is."""
    if (
        not text
        or len(text) > _ALONE_CHARS
        or re.search(r"\n|\\f?box", text)
        or measured(text.strip("$ ")) is not None
    ):
        return None
    prose = re.search(r"(?<![\\A-Za-z])(?!sqrt|sin|cos|tan|log|exp|inf)[A-Za-z]{3,}", text)
    return text if _FORMULA.fullmatch(text) and not prose else None

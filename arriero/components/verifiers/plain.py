"""Rewards that compare text: short work on any input, done in the component's own process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.extraction import conclusion, final_boxes, marked
from arriero.components.verifiers.reward import STRICT, Canary, RolloutReward, verdict
from arriero.schemas.messages import Prompt, Rollout, Score


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactMatch(RolloutReward):
    """1 if the response is the prompt's answer. An empty answer is set aside: silence would earn it."""

    kind: Literal["exact_match"] = "exact_match"
    strip: bool = True
    ignore_case: bool = False

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        want = self._normal(prompt.answer)
        return verdict(bool(want) and self._normal(rollout.text) == want)

    def unscorable(self, prompt: Prompt) -> str:
        return "" if self._normal(prompt.answer) else f"row {prompt.row}: the prompt has no answer to match"

    def canaries(self) -> Sequence[Canary]:
        prompt = Prompt(text="?", answer="Cat")
        return [Canary(text=t, right=t == "Cat", prompt=prompt) for t in ("Cat", "Dog", "", "Cats")]

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Contains(RolloutReward):
    """1 if `text` occurs in the response, also inside a word; the prompt doesn't count."""

    kind: Literal["contains"] = "contains"
    text: Annotated[str, Field(min_length=1)]
    ignore_case: bool = True

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        if self.ignore_case:
            return verdict(self.text.casefold() in rollout.text.casefold())
        return verdict(self.text in rollout.text)

    def canaries(self) -> Sequence[Canary]:
        prompt = Prompt(text="?")
        return [
            Canary(text=f"so {self.text}", right=True, prompt=prompt),
            Canary(text="", right=False, prompt=prompt),
        ]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MultipleChoice(RolloutReward):
    """1 if the response names the right option, and only that one; no answer is no option.

    The option stands in the last box, behind the last "Answer:" or "answer is", or is the whole response:
    `B`, `(B)`, `B.`, `B) text`, `\\text{(B)}`. The prompt's answer is the letter, in any of these forms.
    """

    kind: Literal["multiple_choice"] = "multiple_choice"
    options: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCD"

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        want, got = self._letter(prompt.answer), self._chosen(conclusion(rollout.text))
        return verdict(bool(want) and got == want, "" if got else "no option")

    def unscorable(self, prompt: Prompt) -> str:
        if self._letter(prompt.answer):
            return ""
        return f"row {prompt.row}: answer {prompt.answer[:40]!r} is none of the options {self.options}"

    def canaries(self) -> Sequence[Canary]:
        first, second = self.options[0], self.options[1]
        prompt = Prompt(text="?", answer=first)
        right = (f"The answer is ({first}).", f"\\boxed{{{first}}}", f"Answer: {first}")
        wrong = (f"\\boxed{{{second}}}", "", f"Answer: {first} or {second}")
        return [Canary(text=t, right=t in right, prompt=prompt) for t in (*right, *wrong)]

    def _chosen(self, text: str) -> str:
        if boxed := final_boxes(text):
            return self._letter(boxed[-1]) if len(boxed) == 1 else ""
        if (line := marked(text)) is not None:
            return self._letter(line)
        if said := re.findall(r"\b(?:answer|option|choice)\s+is:?\s*([^\n]{1,60})", text, re.I):
            return self._letter(str(said[-1]))
        return self._letter(text.strip()) if len(text.strip()) <= 60 else ""

    def _letter(self, text: str) -> str:
        """The one option named at the start of `text`; "" for none, or for several."""
        text = re.sub(r"\\text(?:bf)?\s*\{([^{}]*)\}", r"\1", text).strip("*_$ \t\n'\"`")
        found = re.match(rf"\(?([{self.options}{self.options.lower()}])(?![\w'])[).:]?", text)
        if found is None:
            return ""
        more = rf"[\s*,;/&|+]*(?:(?:or|and|[,;/&|+])\s*)\(?[{self.options}{self.options.lower()}](?![\w'])"
        if re.match(more, text[found.end() :]) or re.fullmatch(
            rf"(?:[\s().]*[{self.options}])+[\s().]*", text[found.end() :]
        ):
            return ""  # several
        if found[1].islower() and len(text) > found.end() and text[found.end() - 1] not in ").:":
            return ""  # "a" at the start of a sentence is a word
        return found[1].upper()

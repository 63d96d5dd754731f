"""`ReasoningGym`: every data set of reasoning-gym, by its own scorer."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from arriero.components.gym_rows import GYM, gym_scorer
from arriero.components.prompts import PromptSource
from arriero.components.verifiers.reward import STRICT, Isolated, no_verdict, verdict
from arriero.engine.errors import UserError, describe
from arriero.engine.graph import GraphView
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningGym(Isolated):
    """The data set's own scorer, for prompts from `reasoning_gym:NAME`.

    Full marks (1) are `ok`, anything less is `wrong` and worth 0; with `partial`, what the scorer gave, which
    several do for junk. A scorer that raises gives `error`. Prompts of a data set whose scorer fails its
    trial (`gym_scorer`: its own answers and junk are its canaries) can't be scored.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    partial: bool = False
    tag: str = (
        ""  # "answer": the last <answer>...</answer> is scored, a response without it is wrong; empty: all
    )

    slow_start: ClassVar[bool] = True  # the trial of some sets takes many seconds

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        name, options = _source(prompt)
        scorer = gym_scorer(name, options)
        answer = self._answer(rollout.text)
        if answer is None:
            return Score(value=0.0, outcome=Outcome.WRONG, detail=f"no <{self.tag}>")
        try:
            value = scorer(answer, prompt.metadata)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # foreign code on a model's text: counted by its outcome
            return no_verdict(describe(error))
        if not math.isfinite(value):
            return no_verdict(f"the scorer gave {value}")
        if value >= 1.0:
            return verdict(True)
        return Score(value=value if self.partial else 0.0, outcome=Outcome.WRONG)

    def prepare(self) -> None:
        importlib.import_module("reasoning_gym")

    def unscorable(self, prompt: Prompt) -> str:
        try:
            gym_scorer(*_source(prompt))
        except UserError as error:
            return str(error)
        return ""

    def problems(self, view: GraphView) -> Iterable[str]:
        """Prompts of another kind, and data sets whose scorer fails its trial."""
        for source in view.upstream(PromptSource):
            if not source.gym:
                yield f"it scores prompts from {GYM}NAME, but gets those of {source.path}; use another reward"
                continue
            try:
                gym_scorer(source.gym, json.dumps(dict(source.options), sort_keys=True))
            except UserError as error:
                yield str(error)

    def _answer(self, text: str) -> str | None:
        if not self.tag:
            return text.strip()
        tag = re.escape(self.tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None


def _source(prompt: Prompt) -> tuple[str, str]:
    """Name and options of the prompt's data set. Raises UserError if it comes from elsewhere."""
    name, options = prompt.metadata.get("dataset"), prompt.metadata.get("options")
    if not isinstance(name, str) or not isinstance(options, dict):
        raise UserError(f"the prompt doesn't come from {GYM}NAME; use another reward")
    return name, json.dumps(options, sort_keys=True)

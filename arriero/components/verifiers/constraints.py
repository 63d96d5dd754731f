"""`Constraints`: instructions that can be checked on the text (IFEval, arXiv:2311.07911)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, JsonValue
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.extraction import conclusion
from arriero.components.verifiers.instructions import INSTRUCTIONS, Refused, check
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, verdict
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

Arguments = Mapping[str, JsonValue]


def _known(id: str) -> str:
    if id not in INSTRUCTIONS:
        raise ValueError(f"unknown instruction {id!r}; known: {', '.join(INSTRUCTIONS)}")
    return id


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Constraint:
    """One instruction of every prompt, by IFEval's id and arguments."""

    id: Annotated[str, AfterValidator(_known)]
    arguments: Arguments = field(default_factory=dict[str, JsonValue])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Constraints(Isolated):
    """1 if the response (after its thoughts) follows all instructions; an empty one follows none.

    The instructions are those of `always` and of the row: a list of ids in `ids_field`, one of arguments in
    `arguments_field`, as IFEval has them. A row with an unknown id, or without a needed argument, is set
    aside. With `partial` the value is the share of instructions followed.
    """

    kind: Literal["constraints"] = "constraints"
    always: tuple[Constraint, ...] = ()
    ids_field: str = "instruction_id_list"
    arguments_field: str = "kwargs"
    partial: bool = False

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        text = conclusion(rollout.text).strip()
        wanted = self._instructions(prompt)
        held = [bool(text) and check(name, text, arguments) for name, arguments in wanted]
        missed = ", ".join(name for (name, _), h in zip(wanted, held, strict=True) if not h)
        score = verdict(all(held), missed)
        if self.partial and score.outcome is Outcome.WRONG:
            return Score(value=sum(held) / len(held), outcome=Outcome.WRONG, detail=missed)
        return score

    def unscorable(self, prompt: Prompt) -> str:
        """A row without instructions, or with one that can't be checked."""
        try:
            for name, arguments in self._instructions(prompt):
                check(name, "Some text.", arguments)
        except (UserError, Refused) as error:
            return f"row {prompt.row}: {error}"
        return ""

    def canaries(self) -> Sequence[Canary]:
        row: dict[str, JsonValue] = {
            self.ids_field: ["punctuation:no_comma", "length_constraints:number_words"],
            self.arguments_field: [{}, {"num_words": 3, "relation": "at least"}],
        }
        prompt = Prompt(text="?", metadata=row)
        if self.always:  # what would follow these as well isn't known
            return [Canary(text="", right=False, prompt=prompt)]
        wrong = ("", "one, two, three", "one two")
        return [Canary(text=t, right=t not in wrong, prompt=prompt) for t in ("one two three", *wrong)]

    def _instructions(self, prompt: Prompt) -> list[tuple[str, Arguments]]:
        """Raises UserError for a row that has none, or lists that don't fit."""
        ids, given = prompt.metadata.get(self.ids_field, []), prompt.metadata.get(self.arguments_field, [])
        if not isinstance(ids, list) or not isinstance(given, list) or len(ids) != len(given):
            raise UserError(
                f"fields {self.ids_field!r} and {self.arguments_field!r} are no lists of one length"
            )
        found = [(c.id, c.arguments) for c in self.always]
        for name, arguments in zip(ids, given, strict=True):
            found.append((str(name), cast("Arguments", arguments if isinstance(arguments, dict) else {})))
        if not found:
            raise UserError(f"no instructions: the row has no {self.ids_field!r}, and `always` is empty")
        return found

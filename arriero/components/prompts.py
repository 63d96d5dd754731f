"""`PromptSource`: prompts from a data set, epoch after epoch, and its held-out prompts for evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from arriero.components.datasets import (
    GYM,
    GYM_SIZE,
    GymRows,
    Row,
    gym_dataset,
    path_problem,
    permutation,
    read_rows,
)
from arriero.components.formats import json_lists
from arriero.components.presets import expanded
from arriero.engine.errors import UserError
from arriero.engine.graph import Evaluation, GraphView
from arriero.schemas.messages import Prompt, Split

SLOT = "{prompt}"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PromptSource:
    """Prompts from `path`: a file at any fsspec URL, `reasoning_gym:NAME` or a preset's name (`presets`).

    A string is a path.

    Every training row comes once per epoch, in an order that depends on `seed` and the epoch alone. Held-out
    rows are the last `held_out` ones, or those of `eval_path`; they are never trained on. Row numbers are
    those of the data set, from 0.
    """

    path: str
    prompt_field: str = ""  # empty: "prompt", or "question" if the first row has no "prompt"
    answer_field: str = ""  # empty: "answer" if the first row has it, else prompts have no answer
    template: str = SLOT  # {prompt} is replaced; other braces stay as they are
    epochs: PositiveInt | None = None  # None: for ever
    shuffle: bool = True
    seed: NonNegativeInt = 0
    limit: PositiveInt | None = None  # training rows used, from the first
    held_out: NonNegativeInt = 0  # rows kept from training, from the end
    eval_path: str = ""
    eval_limit: PositiveInt | None = None
    eval_every: NonNegativeInt = 0  # versions; 0: before and after training only
    size: PositiveInt | None = None  # of a reasoning_gym set; held-out items are counted in. None: 1000
    options: Annotated[Mapping[str, JsonValue], BeforeValidator(json_lists)] = Field(
        default_factory=dict[str, JsonValue]
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        given: Any = {"path": value} if isinstance(value, str) else value
        if isinstance(given, ArgsKwargs):
            return ArgsKwargs(given.args, expanded(given.kwargs or {}))
        return expanded(cast("dict[str, Any]", given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if SLOT not in self.template:
            raise ValueError(f"template {self.template!r} has no {SLOT}; put it where the row's text belongs")
        if self.held_out and self.eval_path:
            raise ValueError(
                f"held_out={self.held_out} and eval_path={self.eval_path!r} are both set; use one"
            )
        if not self.gym and (self.size or self.options):
            raise ValueError(f"size and options are for {GYM}NAME; for a file use limit (path={self.path!r})")
        if self.gym and (self.prompt_field or self.answer_field):
            raise ValueError(f"{self.path} has no fields to choose; remove prompt_field and answer_field")
        if "size" in self.options:
            raise ValueError("size is a field of its own; remove it from options")
        # Item i is made from seed + i, so another seed would repeat most of the training items.
        if self.eval_path.startswith(GYM):
            raise ValueError(f"eval_path={self.eval_path!r}: hold items out of one set with held_out instead")
        return self

    @property
    def gym(self) -> str:
        """Name of the reasoning-gym data set; empty for a file."""
        return self.path.removeprefix(GYM) if self.path.startswith(GYM) else ""

    async def run(self) -> AsyncIterator[Prompt]:
        rows = self._rows()
        size = len(range(self._first_held_out(rows))[: self.limit])
        for epoch in count() if self.epochs is None else range(self.epochs):
            order = permutation(self.seed, epoch, size) if self.shuffle else range(size)
            for row in map(int, order):
                yield self._prompt(rows, row, f"e{epoch}-r{row}", "train", epoch)

    def evaluation(self) -> Evaluation | None:
        """The held-out prompts, in the order of the data set; None without any. Raises UserError."""
        if not (self.eval_path or self.held_out):
            return None
        rows = self._checked(read_rows(self.eval_path)) if self.eval_path else self._rows()
        first = 0 if self.eval_path else self._first_held_out(rows)
        numbers = range(first, len(rows))[: self.eval_limit]
        prompts = tuple(self._prompt(rows, row, f"eval-r{row}", "eval", 0) for row in numbers)
        return Evaluation(prompts=prompts, every=self.eval_every)

    def problems(self, view: GraphView) -> Iterable[str]:
        """Missing local files, unknown data sets and their options; remote data isn't touched."""
        found = [p for path in (self.path, self.eval_path) if path and (p := path_problem(path))]
        if self.gym and not found:
            try:
                gym_dataset(self.gym, self.options, size=self.size or GYM_SIZE)
            except UserError as error:
                found.append(str(error))
        if self.eval_every and not (self.eval_path or self.held_out):
            found.append(f"eval_every={self.eval_every}, but nothing is held out; set held_out or eval_path")
        return found

    def _rows(self) -> Sequence[Row]:
        if self.gym:
            return GymRows(self.gym, self.options, self.size or GYM_SIZE)
        return self._checked(read_rows(self.path))

    def _checked(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows, all of which have the fields: a bad one is found at the start, not in the third epoch."""
        for row in rows:
            self._text_and_answer(row, first=rows[0])
        return rows

    def _text_and_answer(self, row: Row, first: Row) -> tuple[str, str]:
        if self.gym:
            answer = row.values.get("answer")  # None where a set has many right answers
            return row.text("question", "path"), "" if answer is None else row.text("answer", "path")
        alone = "question" in first.values and "prompt" not in first.values
        text = row.text(self.prompt_field or ("question" if alone else "prompt"), "prompt_field")
        if not self.answer_field and "answer" not in first.values:
            return text, ""
        return text, row.text(self.answer_field or "answer", "answer_field")

    def _first_held_out(self, rows: Sequence[Row]) -> int:
        if self.held_out >= len(rows):
            raise UserError(
                f"{self.path}: held_out={self.held_out} leaves nothing of {len(rows)} rows to train on"
            )
        return len(rows) - self.held_out

    def _prompt(self, rows: Sequence[Row], number: int, name: str, split: Split, epoch: int) -> Prompt:
        row = rows[number]
        # An item of reasoning-gym is made anew each time; there are no fields to look up in the first one.
        text, answer = self._text_and_answer(row, first=row if self.gym else rows[0])
        return Prompt(
            id=name,
            text=self.template.replace(SLOT, text),
            answer=answer,
            metadata=row.values,
            split=split,
            epoch=epoch,
            row=number,
        )

"""`PromptData`: one data set as prompts, and which of its rows are trained on, held out or left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Any, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from arriero.components.blocks import Blocks, Whole
from arriero.components.conversations import as_text, conversation, framed
from arriero.components.datasets import first_row, open_blocks, path_problem
from arriero.components.formats import JsonObject, Row, json_lists
from arriero.components.gym_rows import GYM, GYM_SIZE, GymRows, gym_dataset
from arriero.components.presets import expanded
from arriero.components.row_filter import RowFilter
from arriero.engine.errors import UserError
from arriero.engine.portable import resolve
from arriero.schemas.messages import Prompt, Said, Split

SLOT = "{prompt}"

Keep = Callable[[JsonObject], bool]


def _imported(value: object) -> object:
    return resolve(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PromptData:
    """Prompts from `path`: a file at any fsspec URL, several by a pattern, `reasoning_gym:NAME` or a preset.

    A string is a path. Held-out rows are the last `held_out` ones, or those of `eval_path`; they are never
    trained on, nor is a row with the same text. Row numbers are those of the data set, from 0.
    """

    path: str
    prompt_field: str = ""  # empty: "prompt", or "question" if the first row has no "prompt"
    answer_field: str = ""  # empty: "answer" if the first row has it, else prompts have no answer
    template: str = SLOT  # {prompt} is replaced; other braces stay as they are
    where: str = ""  # rows used: an expression over fields, `0.1 <= pass_rate <= 0.9`; empty: all
    keep: Annotated[Keep | None, BeforeValidator(_imported)] = None  # a function of a row's fields: whether
    limit: PositiveInt | None = None  # training rows used, from the first
    held_out: NonNegativeInt = 0  # rows kept from training, from the end
    eval_path: str = ""
    eval_limit: PositiveInt | None = None
    stream: NonNegativeInt = 0  # blocks of a file in memory at once; 0: all of it
    size: PositiveInt | None = None  # of a reasoning_gym set; held-out items are counted in. None: 1000
    options: Annotated[Mapping[str, JsonValue], BeforeValidator(json_lists)] = Field(
        default_factory=dict[str, JsonValue]
    )
    name: str = ""  # what evaluations call it; empty: the preset's or file's name
    weight: PositiveFloat = 1.0  # share of the prompts, where there are several data sets

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
        if self.where:
            RowFilter(self.where)
        return self

    @property
    def gym(self) -> str:
        """Name of the reasoning-gym data set; empty for a file."""
        return self.path.removeprefix(GYM) if self.path.startswith(GYM) else ""

    @property
    def holds_out(self) -> bool:
        """Whether some rows are kept for evaluation."""
        return bool(self.held_out or self.eval_path)

    @property
    def called(self) -> str:
        """What evaluations call it."""
        return self.name or self.gym or self.path.rpartition("/")[2].partition(".")[0]

    def data_problems(self) -> Iterable[str]:
        """Missing local files, unknown data sets and their options; remote data isn't touched."""
        found = [p for path in (self.path, self.eval_path) if path and (p := path_problem(path))]
        if self.gym and not found:
            try:
                gym_dataset(self.gym, self.options, size=self.size or GYM_SIZE)
            except UserError as error:
                found.append(str(error))
        try:
            for path in (self.path, self.eval_path) if not found else ():
                self.first(path)
        except UserError as error:
            found.append(str(error))
        return found

    def first(self, path: str) -> tuple[str, tuple[Said, ...]] | None:
        """Text and messages of the first row of `path`; None where that can't be looked at beforehand.

        UserError for a row without prompt or answer, or that `where` and `keep` can't be asked of.
        """
        if not path or path.startswith(GYM) or (row := first_row(path)) is None:
            return None
        reader = Reader(self, row.values)
        reader.answer(row)
        reader.wants(row, RowFilter(self.where) if self.where else None)
        return reader.question(row)

    def conversational(self) -> bool:
        """Whether its prompts are chat messages, as far as that can be known beforehand."""
        try:
            first = self.first(self.path)
        except UserError:  # told by `data_problems`
            return False
        return bool(first and first[1])


def content_key(text: str) -> bytes:
    """Tells texts apart that differ in more than white space."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


class Reader:
    """What the rows of a data set are to the policy; `first` is a row that says what fields are called."""

    def __init__(self, config: PromptData, first: JsonObject) -> None:
        self.config = config
        alone = "question" in first and "prompt" not in first
        prompt = config.prompt_field or ("question" if alone else "prompt")
        answer = config.answer_field or ("answer" if "answer" in first else "")
        self._fields = ("question", "answer") if config.gym else (prompt, answer)

    def question(self, row: Row) -> tuple[str, tuple[Said, ...]]:
        """The row's text, and the messages that it is given as, if it is. Raises UserError for neither."""
        name, setting = self._fields[0], "path" if self.config.gym else "prompt_field"
        said = conversation(row.value(name, setting), f"{row.where}: field {name!r}")
        return (as_text(said), said) if said else (row.text(name, setting), ())

    def answer(self, row: Row) -> str:
        """Raises UserError for a row without one, where there are answers."""
        name = self._fields[1]
        if self.config.gym and row.values.get(name) is None:  # where a set has many right answers
            return ""
        return row.text(name, "path" if self.config.gym else "answer_field") if name else ""

    def key(self, row: Row) -> bytes:
        """Equal for rows whose texts differ in white space alone; how they are shown doesn't matter."""
        return content_key(self.question(row)[0])

    def wants(self, row: Row, where: RowFilter | None) -> bool:
        """Whether the configuration lets the row be used. Raises UserError."""
        keep = self.config.keep
        return (where is None or where(row)) and (keep is None or keep(row.values))


@plain_dataclass(kw_only=True)
class OpenData:
    """A data set that is read. `place` tells its records from those of other sets; 0 is the first.

    `lazily`: rows come as they are needed, so that what is left out is found only then.
    """

    config: PromptData
    place: int = 0
    blocks: Blocks = field(init=False)
    lazily: bool = field(init=False)
    reader: Reader = field(init=False)
    numbers: Sequence[int] = field(
        init=False
    )  # of the rows that may be trained on, as they stand in `blocks`

    def __post_init__(self) -> None:
        data = self.config
        if data.gym:
            self.blocks: Blocks = Whole(GymRows(data.gym, data.options, data.size or GYM_SIZE))
        else:
            self.blocks = open_blocks(data.path, in_memory=not data.stream)
        self.lazily = bool(data.gym or data.stream)
        self._size = sum(self.blocks.sizes)
        self._where = RowFilter(data.where) if data.where else None
        if data.held_out >= self._size:
            raise UserError(
                f"{data.path}: held_out={data.held_out} leaves nothing of {self._size} rows to train on"
            )
        self.reader = Reader(data, next(self._rows(0)).values)
        self.numbers = range(self._size - data.held_out)
        if self.lazily:
            self.numbers = self.numbers[: data.limit]
        else:
            for row in self.blocks.read(0):  # a bad one is found at the start, not in the third epoch
                self.reader.question(row)
                self.reader.answer(row)

    def _rows(self, first: int) -> Iterator[Row]:
        """The rows from number `first` on."""
        begin = 0
        for block, size in enumerate(self.blocks.sizes):
            if begin + size > first:
                rows = self.blocks.read(block)
                yield from (rows[k] for k in range(max(0, first - begin), size))
            begin += size

    def used(self, row: Row) -> bool:
        """Whether the configuration lets the row be used. Raises UserError."""
        return self.reader.wants(row, self._where)

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Never give these rows."""
        gone = set(numbers)
        self.numbers = [n for n in self.numbers if n not in gone]

    def held_out(self) -> list[Prompt]:
        """The held-out prompts, in the order of the data set; empty without any. Raises UserError."""
        data, rows = self._held_out
        return [data.prompt(row, n, "eval", 0) for n, row in rows]

    def held_out_keys(self) -> set[bytes]:
        """What tells rows with the same text apart from all others, of those that are held out."""
        data, rows = self._held_out
        return {data.reader.key(row) for _, row in rows}

    @property
    def _held_out(self) -> tuple[OpenData, list[tuple[int, Row]]]:
        """Where the held-out rows stand, and those that are used with their numbers."""
        config, where, first = self.config, self, self._size - self.config.held_out
        if config.eval_path:
            own = PromptData(
                path=config.eval_path, prompt_field=config.prompt_field, answer_field=config.answer_field,
                template=config.template, name=config.called,
            )  # fmt: skip
            where, first = OpenData(config=own, place=self.place), 0
        rows = enumerate(where._rows(first), start=first) if config.holds_out else ()
        return where, [(n, row) for n, row in rows if self.used(row)][: config.eval_limit]

    def all_held_out(self) -> list[Prompt]:
        """Every row that is used, as a held-out prompt."""
        rows = enumerate(self._rows(0))
        found = [self.prompt(row, n, "eval", 0) for n, row in rows if self.used(row)]
        return found[: self.config.limit][: self.config.eval_limit]

    def prompt(self, row: Row, number: int, split: Split, epoch: int) -> Prompt:
        """The row as a prompt."""
        text, said = self.reader.question(row)
        template = self.config.template
        first = f"s{self.place}-" if self.place else ""
        return Prompt(
            id=f"{first}eval-r{number}" if split == "eval" else f"{first}e{epoch}-r{number}",
            text=template.replace(SLOT, text),
            messages=framed(said, SLOT, template),
            answer=self.reader.answer(row),
            metadata=row.values,
            split=split,
            epoch=epoch,
            row=number,
            source=self.config.called,
        )

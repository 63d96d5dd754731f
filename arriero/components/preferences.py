"""Preference data: pairs of a chosen and a rejected response from a file, and batches of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import field

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.batching import batch_of
from arriero.components.chat import ChatFormat
from arriero.components.conversations import answered, as_text, asked
from arriero.components.formats import Row
from arriero.components.row_source import RowSource
from arriero.components.text_ids import TextIds, tokenizer_problems
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Int63, Record, Said, Sample

STRICT = ConfigDict(extra="forbid")


class Preference(Record):
    """Two responses to one prompt, of which somebody chose one. The other fields are as in `Prompt`."""

    prompt: str
    chosen: str
    rejected: str
    messages: tuple[Said, ...] = ()
    epoch: Int63 = 0
    row: Int63 = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceSource(RowSource):
    """Pairs from a file, as `RowSource` reads it. A string is a path.

    A pair whose responses are equal says nothing: it is left out, and counted. The prompt may be chat
    messages, or stand as such in both responses before the assistant's last message.
    """

    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"

    async def run(self) -> AsyncIterator[Preference]:
        async for epoch, row, pair in self.rows(self._pair):
            yield pair.model_copy(update={"id": f"e{epoch}-r{row}", "epoch": epoch, "row": row})

    def _pair(self, row: Row) -> Preference | None:
        return pair_of(row, self.prompt_field, self.chosen_field, self.rejected_field)


def pair_of(row: Row, prompt_field: str, chosen_field: str, rejected_field: str) -> Preference | None:
    """The pair in a row; None if its responses are equal. UserError if they answer two conversations."""
    before, chosen = answered(row, chosen_field, "chosen_field")
    other, rejected = answered(row, rejected_field, "rejected_field")
    if before != other:
        raise UserError(
            f"{row.where}: {chosen_field!r} and {rejected_field!r} answer different conversations; a "
            "pair has one prompt"
        )
    prompt, messages = (as_text(before), before) if before else asked(row, prompt_field, "prompt_field")
    if chosen == rejected:
        return None
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, messages=messages)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceBatch:
    """Batches of `pairs` pairs as samples 2i (chosen, advantage 1) and 2i + 1 (rejected, advantage -1).

    Tokenised as the model directory `model` says; trained on are the responses with their end of sequence. A
    pair with a response of more than `max_length` tokens, prompt included, is dropped as too long, never cut.
    The last batch may be smaller.
    """

    model: str
    pairs: PositiveInt
    max_length: PositiveInt
    chat: ChatFormat = field(default_factory=ChatFormat)

    def rates(self) -> Rates:
        return Rates(consumes={"preferences": self.pairs})

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from tokenizer_problems(self.model, self.chat)

    async def run(self, preferences: Stream[Preference]) -> AsyncIterator[Batch | Dropped]:
        text = TextIds(self.model, self.chat)
        waiting: list[Sample] = []
        async for pair in preferences:
            found = (
                text.sample(pair, pair.prompt, pair.chosen, messages=pair.messages),
                text.sample(pair, pair.prompt, pair.rejected, messages=pair.messages, advantage=-1.0),
            )
            if (length := max(len(s.tokens) for s in found)) > self.max_length:
                detail = f"{length} tokens, max_length is {self.max_length}"
                yield Dropped(parent=pair.id, reason="too_long", detail=detail)
                continue
            waiting += found
            if len(waiting) == 2 * self.pairs:
                yield batch_of(waiting)
                waiting = []
        if waiting:
            yield batch_of(waiting)

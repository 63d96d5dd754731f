"""Preference data: pairs of a chosen and a rejected response from a file, and batches of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.batching import batch_of
from arriero.components.formats import Row
from arriero.components.row_source import RowSource
from arriero.components.text_ids import TextIds, tokenizer_problems
from arriero.engine.graph import GraphView, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Record, Sample

STRICT = ConfigDict(extra="forbid")


class Preference(Record):
    """Two responses to one prompt, of which somebody chose one."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferenceSource(RowSource):
    """Pairs from a file, as `RowSource` reads it. A string is a path.

    A pair whose responses are equal says nothing: it is left out, and counted.
    """

    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"

    async def run(self) -> AsyncIterator[Preference]:
        async for epoch, row, (prompt, chosen, rejected) in self.rows(self._texts):
            yield Preference(id=f"e{epoch}-r{row}", prompt=prompt, chosen=chosen, rejected=rejected)

    def _texts(self, row: Row) -> tuple[str, str, str] | None:
        prompt = row.text(self.prompt_field, "prompt_field")
        chosen, rejected = (
            row.text(self.chosen_field, "chosen_field"), row.text(self.rejected_field, "rejected_field"),
        )  # fmt: skip
        return (prompt, chosen, rejected) if chosen != rejected else None


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

    def rates(self) -> Rates:
        return Rates(consumes={"preferences": self.pairs})

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from tokenizer_problems(self.model)

    async def run(self, preferences: Stream[Preference]) -> AsyncIterator[Batch | Dropped]:
        text = TextIds(self.model)
        waiting: list[Sample] = []
        async for pair in preferences:
            found = (
                text.sample(pair, pair.prompt, pair.chosen),
                text.sample(pair, pair.prompt, pair.rejected, advantage=-1.0),
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

"""Preference data: pairs of a chosen and a rejected response from a file, and batches of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

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
        waiting: list[tuple[Sample, Sample]] = []
        async for pair in preferences:
            found = (
                self._sample(text, pair, pair.chosen, 1.0),
                self._sample(text, pair, pair.rejected, -1.0),
            )
            if (length := max(len(s.tokens) for s in found)) > self.max_length:
                detail = f"{length} tokens, max_length is {self.max_length}"
                yield Dropped(parent=pair.id, reason="too_long", detail=detail)
                continue
            waiting.append(found)
            if len(waiting) == self.pairs:
                yield _batch(waiting)
                waiting = []
        if waiting:
            yield _batch(waiting)

    def _sample(self, text: TextIds, pair: Preference, response: str, advantage: float) -> Sample:
        prompt, answer = text.pair(pair.prompt, response)
        length = len(prompt) + len(answer)
        mask = np.arange(length) >= max(len(prompt), 1)  # nothing predicts the first token
        return Sample(
            group=pair.id,
            tokens=np.array(prompt + answer, dtype=np.int32),
            mask=mask,
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            origin=pair.origins[0] if pair.origins else -1,
        )


def _batch(pairs: list[tuple[Sample, Sample]]) -> Batch:
    samples = tuple(s for pair in pairs for s in pair)
    origins = tuple(sorted({s.origin for s in samples if s.origin >= 0}))
    return Batch(parents=tuple(chosen.group for chosen, _ in pairs), origins=origins, samples=samples)

"""Responses that somebody liked or didn't, each by itself: rows of a file, and batches of them.

row i: prompt i, response i, liked or not -> sample i, advantage > 0 or < 0
                                          -> prompt i with the response of another row: mismatched
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.batching import batch_of
from arriero.components.chat import ChatFormat
from arriero.components.conversations import answered, as_text, asked
from arriero.components.formats import Row
from arriero.components.preferences import pair_of
from arriero.components.row_source import RowSource
from arriero.components.text_ids import TextIds, tokenizer_problems
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Int63, Record, Said, Sample

STRICT = ConfigDict(extra="forbid")
_LABELS = {"true": True, "1": True, "false": False, "0": False}


class Labelled(Record):
    """A response to a prompt, and whether it was liked. The other fields are as in `Prompt`."""

    prompt: str
    response: str
    liked: bool
    messages: tuple[Said, ...] = ()
    epoch: Int63 = 0
    row: Int63 = 0


@runtime_checkable
class HasMismatched(Protocol):
    """A component whose batches may hold responses beside prompts of others."""

    mismatched: bool


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LabelledSource(RowSource):
    """Judged responses from a file, as `RowSource` reads it. A string is a path.

    A label is true or false, or 1 or 0. A row without one that has a chosen and a rejected response is two:
    one that was liked and one that wasn't, left out and counted where they are equal.
    """

    prompt_field: str = "prompt"
    response_field: str = "response"
    label_field: str = "label"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"

    async def run(self) -> AsyncIterator[Labelled]:
        async for epoch, row, judged in self.rows(self._judged):
            for k, one in enumerate(judged):
                name = f"e{epoch}-r{row}" + (f"-{k}" if len(judged) > 1 else "")
                yield one.model_copy(update={"id": name, "epoch": epoch, "row": row})

    def _judged(self, row: Row) -> tuple[Labelled, ...] | None:
        pair = {self.chosen_field, self.rejected_field} <= row.values.keys()
        if self.label_field not in row.values and pair:
            if (p := pair_of(row, self.prompt_field, self.chosen_field, self.rejected_field)) is None:
                return None
            return (
                Labelled(prompt=p.prompt, response=p.chosen, liked=True, messages=p.messages),
                Labelled(prompt=p.prompt, response=p.rejected, liked=False, messages=p.messages),
            )
        before, response = answered(row, self.response_field, "response_field")
        prompt, messages = (
            (as_text(before), before) if before else asked(row, self.prompt_field, "prompt_field")
        )
        return (Labelled(prompt=prompt, response=response, liked=self._label(row), messages=messages),)

    def _label(self, row: Row) -> bool:
        value = row.value(self.label_field, "label_field")
        if (liked := _LABELS.get(str(value).lower())) is None:
            raise UserError(
                f"{row.where}: field {self.label_field!r} is {value!r}; true or false is needed, or 1 or 0 "
                "(label_field)"
            )
        return liked


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LabelledBatch:
    """Batches of `examples` judged responses; those that were liked have advantages above 0, others below.

    `balance`: the two kinds weigh the same in every batch, by the size of their advantages, 1 on average.
    `mismatched`: behind the samples each prompt comes once more, with the next response of the batch that was
    given to another prompt: KL(pi, ref) is estimated from these (KTO, arXiv:2402.01306, section 4.1).

    Tokenised as the model directory `model` says; trained on are the responses with their end of sequence.
    What has more than `max_length` tokens, prompt included, is dropped as too long, never cut, and isn't
    mismatched either. The last batch may be smaller.
    """

    model: str
    examples: PositiveInt
    max_length: PositiveInt
    balance: bool = True
    mismatched: bool = True
    chat: ChatFormat = field(default_factory=ChatFormat)

    def rates(self) -> Rates:
        return Rates(consumes={"judged": self.examples})

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from tokenizer_problems(self.model, self.chat)
        if self.mismatched and self.examples == 1:
            yield "a batch of 1 response has no other to estimate the kl from; raise it, or set kl of KTO"

    async def run(self, judged: Stream[Labelled]) -> AsyncIterator[Batch | Dropped]:
        text = TextIds(self.model, self.chat)
        waiting: list[Labelled] = []
        async for one in judged:
            sample = text.sample(one, one.prompt, one.response, messages=one.messages)
            if (length := len(sample.tokens)) > self.max_length:
                detail = f"{length} tokens, max_length is {self.max_length}"
                yield Dropped(parent=one.id, reason="too_long", detail=detail)
                continue
            waiting.append(one)
            if len(waiting) == self.examples:
                yield self._batch(text, waiting)
                waiting = []
        if waiting:
            yield self._batch(text, waiting)

    def _batch(self, text: TextIds, judged: Sequence[Labelled]) -> Batch:
        liked = sum(one.liked for one in judged)
        kinds = {True: liked, False: len(judged) - liked}
        weights = dict.fromkeys(kinds, 1.0)
        if self.balance:
            there = [kind for kind, number in kinds.items() if number]
            weights |= {kind: len(judged) / (len(there) * kinds[kind]) for kind in there}
        samples = [
            text.sample(
                one,
                one.prompt,
                one.response,
                messages=one.messages,
                advantage=weights[one.liked] * (1 if one.liked else -1),
            )
            for one in judged
        ]
        return batch_of([*samples, *(self._mismatched(text, judged) if self.mismatched else ())])

    def _mismatched(self, text: TextIds, judged: Sequence[Labelled]) -> Iterator[Sample]:
        for i, one in enumerate(judged):
            for other in (*judged[i + 1 :], *judged[:i]):
                if (other.prompt, other.messages) != (one.prompt, one.messages):
                    sample = text.sample(
                        one, one.prompt, other.response, messages=one.messages, advantage=0.0
                    )
                    if len(sample.tokens) <= self.max_length:
                        yield sample.model_copy(update={"mismatched": True})
                        break

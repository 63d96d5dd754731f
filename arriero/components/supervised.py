"""Supervised fine-tuning data: examples from a file, and batches of them with the response trained on."""

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
from arriero.engine.graph import GraphView, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Example, Said, Sample

STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExampleSource(RowSource):
    """Examples from a file, as `RowSource` reads it. A string is a path.

    With an empty `prompt_field` nothing comes before the response: plain text, of which all is trained on. A
    prompt may be chat messages; a row without one may have a whole conversation in `messages_field`.
    """

    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str = "messages"

    async def run(self) -> AsyncIterator[Example]:
        async for epoch, row, (prompt, response, messages) in self.rows(self._texts):
            yield Example(
                id=f"e{epoch}-r{row}",
                prompt=prompt,
                response=response,
                messages=messages,
                epoch=epoch,
                row=row,
            )

    def _texts(self, row: Row) -> tuple[str, str, tuple[Said, ...]]:
        if not self.prompt_field:
            return "", row.text(self.response_field, "response_field"), ()
        if self.prompt_field not in row.values and self.messages_field in row.values:
            messages, response = answered(row, self.messages_field, "messages_field")
            return as_text(messages), response, messages
        prompt, messages = asked(row, self.prompt_field, "prompt_field")
        return prompt, row.text(self.response_field, "response_field"), messages


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedBatch:
    """Batches of `examples` examples, tokenised as the model directory `model` says.

    Prompt and response are tokenised apart, so that the border between them is a border of tokens; trained on
    are the response and the end-of-sequence token after it; with a template in `chat` what the assistant says
    in any turn, with the end of the turn. An example of more than `max_length` tokens is
    dropped as too long, never cut. The last batch may be smaller unless `drop_last`.
    """

    model: str
    examples: PositiveInt
    max_length: PositiveInt
    drop_last: bool = False
    chat: ChatFormat = field(default_factory=ChatFormat)

    def rates(self) -> Rates:
        return Rates(consumes={"examples": self.examples})

    def problems(self, view: GraphView) -> Iterable[str]:
        yield from tokenizer_problems(self.model, self.chat)
        plain = [source for source in view.upstream(ExampleSource) if not source.prompt_field]
        if plain and self.chat.template:
            yield (
                f"{plain[0].path}: plain text (prompt_field is empty) has no turns that a chat template "
                "could show; leave chat.template out, or name the field of the prompt"
            )

    async def run(self, examples: Stream[Example]) -> AsyncIterator[Batch | Dropped]:
        text = TextIds(self.model, self.chat)
        samples: list[Sample] = []
        async for example in examples:
            sample = text.sample(
                example, example.prompt, example.response, messages=example.messages, every_turn=True
            )
            if (length := len(sample.tokens)) > self.max_length:
                detail = f"{length} tokens, max_length is {self.max_length}"
                yield Dropped(parent=example.id, reason="too_long", detail=detail)
                continue
            samples.append(sample)
            if len(samples) == self.examples:
                yield batch_of(samples)
                samples = []
        if samples and not self.drop_last:
            yield batch_of(samples)
        elif samples:
            for sample in samples:
                detail = f"last {len(samples)} of {self.examples} examples"
                yield Dropped(parent=sample.group, reason="filtered", detail=detail)

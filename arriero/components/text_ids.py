"""Prompts and responses of supervised data as token ids, as a model directory and a chat format say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from arriero.components.chat import Chat, ChatFormat, opening
from arriero.engine.errors import UserError
from arriero.schemas.messages import Record, Said, Sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextIds:
    """The tokenizer of the model directory `model`; UserError if it lacks one or its end of sequence.

    With a template in `chat` the prompt is the user's message, or the messages that are given, and the
    response ends as the assistant's turn does.
    """

    def __init__(self, model: str, chat: ChatFormat) -> None:
        self._tokenizer = _tokenizer(model)
        self._eos = _eos_id(model, self._tokenizer)
        self._chat = _chat(model, chat) if chat.template else None
        self._grows = False  # whether the template was seen to append only

    def pair(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Ids of both, tokenised apart so that the border is one of tokens; the end of sequence is last."""
        ids = self._tokenizer.encode(prompt).ids
        if ids and ids[-1] == self._eos:
            ids = ids[:-1]  # some tokenizers end every text; here the text goes on
        return ids, [*self._tokenizer.encode(response, add_special_tokens=False).ids, self._eos]

    def sample(
        self,
        record: Record,
        prompt: str,
        response: str,
        *,
        messages: Sequence[Said] = (),
        advantage: float = 1.0,
        every_turn: bool = False,
    ) -> Sample:
        """`record` to be trained on: the response after the prompt, `advantage` on each of its tokens.

        `messages` are the prompt as a conversation; with `every_turn` what the assistant says in it is
        trained on too. UserError for messages without a template.
        """
        turns = self._turns(prompt, response, messages, every_turn=every_turn)
        tokens = [token for told, said in turns for token in (*told, *said)]
        lengths = [len(ids) for turn in turns for ids in turn]
        mask = np.repeat([k % 2 == 1 for k in range(len(lengths))], lengths)
        mask[0] = False  # nothing predicts the first token
        return Sample(
            group=record.id,
            tokens=np.array(tokens, dtype=np.int32),
            mask=mask,
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            origin=record.origins[0] if record.origins else -1,
        )

    def _turns(
        self, prompt: str, response: str, messages: Sequence[Said], *, every_turn: bool
    ) -> list[tuple[list[int], list[int]]]:
        """What is told and what is answered, in turn: together the whole sequence."""
        if self._chat is None:
            if messages:
                raise UserError("the data are chat messages; set chat.template, to `model` say")
            return [self.pair(prompt, response)]
        told = opening(prompt, messages)
        earlier = [k for k, m in enumerate(told) if m["role"] == "assistant"] if every_turn else []
        if not earlier:
            return [(self._chat.render(told), self._chat.answer(response))]
        if not self._grows:
            self._chat.check_turns()
            self._grows = True
        ends = [*earlier, len(told)]
        answers = [self._chat.answer(m["content"]) for m in (told[k] for k in earlier)]
        answers.append(self._chat.answer(response))
        first = self._chat.render(told[: ends[0]])
        later = [self._chat.following(answers[n], told[k + 1 : ends[n + 1]]) for n, k in enumerate(ends[:-1])]
        return list(zip([first, *later], answers, strict=True))


def tokenizer_problems(model: str, chat: ChatFormat) -> Iterator[str]:
    """What a check can say before anything is read."""
    yield from chat.problems(model) if chat.template else ()
    if not (Path(model) / "tokenizer.json").is_file():
        yield _no_tokenizer(model)


def _chat(model: str, chat: ChatFormat) -> Chat:
    from arriero.components.policy import load_tokenizer

    return Chat(load_tokenizer(model), chat, model=model)


def _tokenizer(model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise UserError(_no_tokenizer(model))
    tokenizer = Tokenizer.from_file(str(path))
    # A file may carry the truncation and padding of its training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _no_tokenizer(model: str) -> str:
    return (
        f"model={model!r}: no tokenizer.json in this directory; give a model directory in Hugging Face format"
    )


def _eos_id(model: str, tokenizer: Tokenizer) -> int:
    """The id that ends a text: the tokenizer's `eos_token`, else what the generation or model config says."""
    token = _setting(model, "tokenizer_config.json", "eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and (found := tokenizer.token_to_id(token)) is not None:
        return found
    for file in ("generation_config.json", "config.json"):
        value = _setting(model, file, "eos_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    raise UserError(
        f"model={model!r}: no eos_token in tokenizer_config.json nor eos_token_id in its configs; add one"
    )


def _setting(model: str, file: str, key: str) -> JsonValue:
    path = Path(model) / file
    if not path.is_file():
        return None
    values: dict[str, JsonValue] = json.loads(path.read_text(encoding="utf-8"))
    return values.get(key)

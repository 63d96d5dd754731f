"""Chat templates: messages as token ids that only grow, so that a later turn never rewrites an earlier one.

    opening = chat.render(messages)                   # ... up to where the assistant speaks
    response = sampled tokens
    opening + response + chat.following(response, [{"role": "user", "content": "..."}]) + response 2 + ...

What was sampled is never rendered again: ids of a turn are those that the generator gave. That this is also
what the template means, `Chat.check_turns` tries; a template that rewrites its past (Qwen3's removes earlier
thoughts) is refused there, and can still be used for single turns.
"""

# pyright: reportUnknownMemberType=false
# The tokenizers of transformers are annotated only in part.

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pydantic import BeforeValidator, ConfigDict, JsonValue, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.formats import json_lists
from arriero.engine.errors import UserError, one_line
from arriero.schemas.messages import Prompt, Said

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "model"
_BREAK = "\u200b"  # zero-width space
_ANSWER = "Seventeen."
_THOUGHT = "<think>\nIt is prime.\n</think>\n\nSeventeen."


class ChatMessage(TypedDict):
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ChatFormat:
    """How prompts are shown to the model; a string is its `template`.

    `template`: empty, and the model reads the prompt's text as it is; `model`, and the prompt is the first
    message of the user in the tokenizer's own chat template; else a file *.jinja, or the template itself.
    `variables` are given to the template (`enable_thinking`, `date_string`).
    """

    template: str = ""
    system: str = ""  # the first message, unless a prompt's own messages have one of the system
    variables: Annotated[Mapping[str, JsonValue], BeforeValidator(json_lists)] = field(
        default_factory=dict[str, JsonValue]
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"template": value} if isinstance(value, str) else value

    def problems(self, model: str) -> Iterator[str]:
        """What can be known to be wrong without rendering: a missing file, a tokenizer without a template."""
        if not self.template and (self.system or self.variables):
            yield "chat.system and chat.variables need chat.template; set it to `model`, or to a file *.jinja"
        try:
            self.source(model)
        except UserError as error:
            yield str(error)

    def source(self, model: str) -> str:
        """The template's text, "" for none; `model` is a model directory. Raises UserError."""
        if self.template == MODEL:
            return _own_template(Path(model))
        if "{" not in self.template and self.template.endswith((".jinja", ".jinja2", ".j2")):
            try:
                return Path(self.template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"chat.template={self.template!r} can't be read: {one_line(error)}"
                ) from error
        if self.template and "{" not in self.template:
            raise UserError(
                f"chat.template={self.template!r} is no template; give `{MODEL}`, a file *.jinja or Jinja"
            )
        return self.template

    def digest(self, model: str) -> str:
        """16 hexadecimal digits of all that decides the text; "" without a template. Raises UserError."""
        if not (source := self.source(model)):
            return ""
        whole = json.dumps([source, self.system, dict(self.variables)], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


class Chat:
    """A tokenizer with a chat format. May be used by several threads.

    In what others than the assistant say, text that reads like a special token is broken by a zero-width
    space: data and tools can't open a turn. Raises UserError for a template that can't be read or rendered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, model: str) -> None:
        self._tokenizer: Any = tokenizer
        self._source, self.digest = chat.source(model), chat.digest(model)
        self._system, self._variables = chat.system, dict(chat.variables)
        self._lock = Lock()  # a fast tokenizer in two threads may raise "Already borrowed"
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        self._special = sorted((str(t.content) for t in added.values() if t.special), key=len, reverse=True)
        self._special_ids = {i for i, t in added.items() if t.special}
        if self._source:
            self.text([{"role": "user", "content": "?"}])

    def prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt: as its text is, or as the user's first message, or as its messages are.

        UserError for messages without a template.
        """
        if not self._source and not prompt.messages:
            return self._encoded(prompt.text, True)
        return self.render(opening(prompt.text, prompt.messages))

    def render(self, messages: Sequence[ChatMessage], *, tools: Sequence[JsonValue] = ()) -> list[int]:
        """Ids of a conversation up to where the assistant speaks next. `tools` are JSON schemas."""
        return self._encoded(self.text(messages, tools=tools), False)

    def following(
        self, response: Sequence[int], messages: Sequence[ChatMessage], *, tools: Sequence[JsonValue] = ()
    ) -> list[int]:
        """Ids to append to a sampled `response` for `messages` to follow it and the assistant to speak next.

        The end of the assistant's turn is part of them as far as the response doesn't have it.
        """
        start: list[ChatMessage] = [{"role": "user", "content": "?"}]
        # What stands before doesn't matter to a template that passes `check_turns`.
        ids = self._encoded(self._added(start, _ANSWER, messages, tools), False)
        last = response[-1] if response else -1
        if last in self._special_ids:
            closing = self._encoded(self._added(start, _ANSWER, (), tools), False)
            if last in closing:
                ids = ids[closing.index(last) + 1 :]
        return ids

    def answer(self, text: str) -> list[int]:
        """Ids of what the assistant says, as they are to be learned: with the token that ends its turn.

        Where the template has none, the tokenizer's end of sequence.
        """
        start: list[ChatMessage] = [{"role": "user", "content": "?"}]
        closing = self._encoded(self._added(start, _ANSWER, (), ()), False)
        end = next((k + 1 for k, i in enumerate(closing) if i in self._special_ids), 0)
        said = self._encoded(self._plain({"role": "assistant", "content": text})["content"], False)
        return [*said, *(closing[:end] if end else [*closing, int(self._tokenizer.eos_token_id)])]

    def text(
        self, messages: Sequence[ChatMessage], *, opened: bool = True, tools: Sequence[JsonValue] = ()
    ) -> str:
        """What the template makes of a conversation; `opened`: up to where the assistant speaks next."""
        if not self._source:
            raise UserError(f"a conversation needs a chat template; set chat.template to `{MODEL}` or a file")
        told = bool(self._system) and not any(m["role"] == "system" for m in messages)
        system: list[ChatMessage] = [{"role": "system", "content": self._system}] if told else []
        plain = [m if m["role"] == "assistant" else self._plain(m) for m in [*system, *messages]]
        try:
            found: str = self._tokenizer.apply_chat_template(
                plain, chat_template=self._source, tokenize=False, add_generation_prompt=opened,
                tools=list(tools) or None, **self._variables,
            )  # fmt: skip
        except Exception as error:  # jinja's, and whatever the template calls
            raise UserError(
                f"the chat template fails on roles {', '.join(m['role'] for m in plain)}: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
        return found

    def check_turns(self, *, roles: Sequence[str] = ("user",)) -> None:
        """Raises UserError, with the difference, if later turns of `roles` rewrite earlier ones.

        Tried on conversations of three turns, with and without thoughts in the answers.
        """
        question: list[ChatMessage] = [{"role": "user", "content": "?"}]
        self._added(question, _ANSWER, (), ())
        for answer in (_ANSWER, _THOUGHT):
            for role in roles:
                start: list[ChatMessage] = [{"role": "user", "content": "Which number?"}]
                more: list[ChatMessage] = [{"role": role, "content": "And the next one?"}]
                once = self._added(start, answer, more, ())
                again = self._added(
                    [*start, {"role": "assistant", "content": answer}, *more], answer, more, ()
                )
                if once != again:
                    raise UserError(
                        f"the chat template writes the same {role} message differently in a later turn: "
                        f"{_difference(once, again)}; use another chat.template"
                    )

    def _added(
        self,
        before: Sequence[ChatMessage],
        answer: str,
        after: Sequence[ChatMessage],
        tools: Sequence[JsonValue],
    ) -> str:
        """The text behind `answer` to `before`. Raises UserError if `after` changes what stands before it."""
        start = self.text(before, tools=tools) + answer
        spoken: ChatMessage = {"role": "assistant", "content": answer}
        whole = self.text([*before, spoken, *after], opened=bool(after), tools=tools)
        if not whole.startswith(start):
            raise UserError(
                f"the chat template rewrites earlier turns: {_difference(start, whole)}; "
                "for several turns use another chat.template, one that only appends"
            )
        return whole[len(start) :]

    def _plain(self, message: ChatMessage) -> ChatMessage:
        text = message["content"]
        for token in self._special:
            if token in text:
                text = text.replace(token, token[0] + _BREAK + token[1:])
        return {"role": message["role"], "content": text}

    def _encoded(self, text: str, special: bool) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


def opening(text: str, messages: Sequence[Said] = ()) -> list[ChatMessage]:
    """The first messages of a conversation: those that are given, else `text` as the user's."""
    if not messages:
        return [{"role": "user", "content": text}]
    return [{"role": m.role, "content": m.content} for m in messages]


def _difference(before: str, after: str) -> str:
    """Where two texts part, with a little of what stands around."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    first = max(0, same - 20)
    return f"{before[first : same + 40]!r} became {after[first : same + 40]!r}"


def _own_template(directory: Path) -> str:
    """The template beside the model: chat_template.jinja, or in tokenizer_config.json. Raises UserError."""
    try:
        if (file := directory / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        settings: dict[str, JsonValue] = json.loads((directory / "tokenizer_config.json").read_bytes())
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError) as error:
        raise UserError(f"the chat template of {directory} can't be read: {one_line(error)}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict)}
        found = named.get("default")
    if not isinstance(found, str) or not found:
        raise UserError(
            f"model={str(directory)!r} has no chat template; set chat.template to a file *.jinja, "
            "or leave it out for a base model"
        )
    return found

"""Chat messages of a data set, prompts and what was answered: `[{"role": "user", "content": "..."}]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pydantic import JsonValue

from arriero.components.formats import Row
from arriero.engine.errors import UserError
from arriero.schemas.messages import Said

ROLES = ("system", "user", "assistant", "tool")


def conversation(value: JsonValue, where: str) -> tuple[Said, ...]:
    """The messages in a field of a row; empty if it holds something else. `where` names row and field.

    Content in parts (`[{"type": "text", "text": ...}]`) is joined. UserError for what can't be shown as it is
    meant: another role, a picture, calls of tools, the assistant's turn at the end, nobody's question.
    """
    found = _messages(value, where)
    if found and found[-1].role not in ("user", "tool"):
        raise UserError(
            f"{where} ends with a message of the {found[-1].role}; a prompt ends where the assistant is to "
            "speak: leave the answer out"
        )
    return found


def answered(row: Row, field: str, setting: str) -> tuple[tuple[Said, ...], str]:
    """What is in `field`, text or a conversation: the messages before what the assistant said last, and that.

    UserError as above, and for a conversation that somebody else ends.
    """
    found = _messages(row.values.get(field), where := f"{row.where}: field {field!r}")
    if not found:
        return (), row.text(field, setting)
    if found[-1].role != "assistant" or not any(m.role == "user" for m in found):
        raise UserError(
            f"{where} ends with a message of the {found[-1].role}; what is learned is what the assistant "
            f"says last to a user ({setting})"
        )
    return found[:-1], found[-1].content


def asked(row: Row, field: str, setting: str) -> tuple[str, tuple[Said, ...]]:
    """The prompt in `field`: its text, and its messages if it is a conversation."""
    messages = conversation(row.value(field, setting), f"{row.where}: field {field!r}")
    return (as_text(messages), messages) if messages else (row.text(field, setting), ())


def as_text(messages: Sequence[Said]) -> str:
    """What a person would call the question: the user's message if it is the only one, else who said what.

    The system's message isn't part of it.
    """
    spoken = [m for m in messages if m.role != "system"]
    if len(spoken) == 1:
        return spoken[0].content
    return "\n\n".join(f"{m.role}: {m.content}" for m in spoken)


def framed(messages: Sequence[Said], slot: str, template: str) -> tuple[Said, ...]:
    """The messages with the last one of the user put into `slot` of `template`."""
    last = max((k for k, m in enumerate(messages) if m.role == "user"), default=-1)
    return tuple(
        Said(role=m.role, content=template.replace(slot, m.content)) if k == last else m
        for k, m in enumerate(messages)
    )


def _messages(value: JsonValue, where: str) -> tuple[Said, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        return ()
    return tuple(_said(cast("dict[str, JsonValue]", m), where) for m in value)


def _said(message: dict[str, JsonValue], where: str) -> Said:
    given = {k: v for k, v in message.items() if v is not None}  # a table has a column for what one row has
    role, content = given.pop("role", None), given.pop("content", "")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where} has a message with role {role!r}; known are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where} has a message whose content is a {type(content).__name__}; text is needed")
    if given:
        raise UserError(f"{where} has a message with {', '.join(given)}; only role and content are read")
    return Said.model_validate({"role": role, "content": content})


def _part(part: JsonValue, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind}:
            raise UserError(f"{where} has a message with a part of type {kind!r}; only text is read")
        case _:
            raise UserError(f"{where} has a message whose content isn't text nor parts of text")

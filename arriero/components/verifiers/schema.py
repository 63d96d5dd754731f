"""`JsonSchema`: a response that is JSON of a given form."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, Protocol, cast

from pydantic import JsonValue
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.extraction import MOST_CHARS, conclusion
from arriero.components.verifiers.json_values import same_json
from arriero.components.verifiers.known import Known, canaries_of
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, verdict
from arriero.engine.errors import UserError
from arriero.schemas.messages import Prompt, Rollout, Score

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.S)


class Validator(Protocol):
    """What we use of a validator of jsonschema."""

    def is_valid(self, instance: object) -> bool: ...


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JsonSchema(Isolated):
    """1 if the response is one JSON value that `schema` (draft 2020-12) accepts, without names given twice.

    The value is the last fenced block, else the whole response after its thoughts. `schema_field` names the
    field of the data with the row's own schema, an object or its text. References outside the schema are not
    followed. With `match_answer` the value must also equal the prompt's answer, read as JSON.
    """

    kind: Literal["json_schema"] = "json_schema"
    schema: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    schema_field: str = ""
    match_answer: bool = False
    known: tuple[Known, ...] = ()  # tried before the first rollout

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        found = _parsed(_json_text(conclusion(rollout.text)))
        if isinstance(found, str):
            return verdict(False, found)
        if self.match_answer:
            wanted = _parsed(prompt.answer)
            if isinstance(wanted, str):
                return verdict(False, f"the prompt's answer: {wanted}")
            if not same_json(wanted[0], found[0]):
                return verdict(False, "another value")
        return verdict(self._validator(prompt).is_valid(found[0]))

    def unscorable(self, prompt: Prompt) -> str:
        """A row whose schema, or whose answer, is no JSON or no schema."""
        try:
            self._validator(prompt)
        except UserError as error:
            return f"row {prompt.row}: {error}"
        if self.match_answer and isinstance(why := _parsed(prompt.answer), str):
            return f"row {prompt.row}: the answer is {why}"
        return ""

    def prepare(self) -> None:
        """Raises UserError for a `schema` that is none."""
        _validator(dict(self.schema))

    def canaries(self) -> Sequence[Canary]:
        field_only = bool(self.schema_field or self.match_answer)
        prompt = Prompt(text="?")
        junk = (
            [] if field_only else [Canary(text=t, right=False, prompt=prompt) for t in ("", "{", "no JSON")]
        )
        return [*canaries_of(self.known), *junk]

    def _validator(self, prompt: Prompt) -> Validator:
        if not self.schema_field:
            return _validator(dict(self.schema))
        found = prompt.metadata.get(self.schema_field)
        try:
            found = json.loads(found) if isinstance(found, str) else found
        except ValueError as error:
            raise UserError(f"field {self.schema_field!r} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"field {self.schema_field!r} has no schema")
        return _validator(cast("dict[str, Any]", found))


def _json_text(text: str) -> str:
    fenced = _FENCE.findall(text)
    return str(fenced[-1]) if fenced else text.strip()


def _parsed(text: str) -> tuple[object] | str:
    """The value, in a tuple because it may itself be text; or what is wrong."""
    if len(text) >= MOST_CHARS:
        return "too long"
    try:
        return (json.loads(text, object_pairs_hook=_once, parse_constant=_refused),)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _validator(schema: Mapping[str, Any]) -> Validator:
    """Raises UserError for what is no schema."""
    try:
        library: Any = importlib.import_module("jsonschema")
        referencing: Any = importlib.import_module("referencing")
    except ImportError as error:
        raise UserError("jsonschema isn't installed; pip install 'arriero[verifiers]'") from error
    kind = library.Draft202012Validator
    try:
        kind.check_schema(schema)
    except library.SchemaError as error:
        raise UserError(f"no JSON schema: {' '.join(str(error.message).split())[:200]}") from error
    # An empty registry: the library's own would fetch references over the network.
    return cast("Validator", kind(schema, registry=referencing.Registry()))

"""From what was given for keys to a checked configuration and the source of each value.

Sections are validated by pydantic one by one, innermost first, so that the place of an error is its key.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from arriero.engine.portable import NOT_FINITE, all_finite
from arriero.launchers.keys import (
    MISSING,
    Layout,
    Section,
    alternatives,
    default_of,
    documented,
    fields,
    layout,
    nearest,
    section,
    tag_of,
)  # fmt: skip

DEFAULT = "default"
COMMAND_LINE = "command line"
SEQUENCES = (list, tuple, set, frozenset, Sequence, AbstractSet)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a key was given: a value, or the `words` of a command line in order, still to be parsed."""

    value: Any
    source: str
    words: bool = False


def resolve_assignments(
    config_type: type[Any],
    assignments: Sequence[tuple[str, Given]],
    problems: list[str],
    also: Collection[str] = (),
) -> tuple[Any, dict[str, str]]:
    """Configuration and sources by key; later assignments win. What is wrong is added to `problems`.

    `also` are names that are valid elsewhere, for better messages.
    """
    resolver = _Resolver(layout=layout(config_type), problems=problems, also=also)
    for name, given in assignments:
        resolver.assign(name, given)
    config = resolver.build(Section(members={"": config_type}), "", MISSING)
    if resolver.missing:
        said = {key.name: text for key, text in documented(resolver.layout) if text}
        named = ", ".join(f"{k} ({said[k]})" if k in said else k for k in resolver.missing)
        problems.append(f"missing: {named}; give --key value or put them into a --config file")
    if config is MISSING:
        return None, {}
    return config, {k: resolver.source(k) for k in flatten(config)}


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a section that is None stands as one key."""
    found: dict[str, Any] = {}
    for name, info in fields(type(config)).items():
        value = getattr(config, name)
        if section(info.annotation) and value is not None:
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def explain(error: ValidationError) -> dict[str, str]:
    """What is wrong with each field of the value that was validated; "" for the value as a whole."""
    found: dict[str, list[str]] = {}
    for item in error.errors():
        place, *rest = item["loc"] or ("",)
        text = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = text.replace("Input should", "should", 1).replace("\n", "; ")
        index = "".join(f"[{part}] " for part in rest if isinstance(part, int))
        # pydantic adds its own "missing" for what was left out because of a problem told already.
        if item["type"] != "missing" or rest:
            found.setdefault(str(place), []).append(index + text)
    return {place: " or ".join(dict.fromkeys(texts)) for place, texts in found.items()}


def parse(hint: Any, words: Sequence[str]) -> Any:
    """Words of a command line as what pydantic converts to `hint`. Raises ValueError for broken JSON."""
    word, options = words[-1], alternatives(hint)
    if NoneType in options and word.lower() == "none":
        return None
    lists = [o for o in options if (typing.get_origin(o) or o) in SEQUENCES]
    if lists and not (str in options and len(words) == 1 and "," not in word):
        return [v for w in words for v in _items(lists[0], w)]
    for value in (v for o in options if typing.get_origin(o) is Literal for v in typing.get_args(o)):
        if word == str(value) or (isinstance(value, bool) and word.lower() == str(value).lower()):
            return value
    if word.startswith("{") and str not in options:
        return json.loads(word)
    return word


def _items(hint: Any, word: str) -> list[Any]:
    if word.startswith("["):
        return cast("list[Any]", json.loads(word))
    inner = [a for a in typing.get_args(hint) if a is not Ellipsis] or [str]
    if word.startswith("{"):
        return [json.loads(word)]
    parts = [p.strip() for p in word.split(",")] if word else []
    return [parse(inner[min(i, len(inner) - 1)], [part]) for i, part in enumerate(parts)]


@dataclass(kw_only=True)
class _Resolver:
    """Keys given so far, and what was found wrong with them. `prefix` names an element of a list."""

    layout: Layout
    problems: list[str]
    also: Collection[str] = ()
    prefix: str = ""
    given: dict[str, Given] = field(default_factory=dict[str, Given])
    missing: list[str] = field(default_factory=list[str])

    def source(self, key: str) -> str:
        return self.given[key].source if key in self.given else DEFAULT

    def assign(self, name: str, given: Given) -> None:
        """Note a value for a key or a section; a table is noted key by key."""
        name = name.replace("-", "_")
        if kind := self.layout.sections.get(name):
            self._assign_section(name, kind, given)
        elif name not in self.layout.names:
            self.problems.append(self._unknown(name, given))
        else:
            for end in (i for i, c in enumerate(name) if c == "."):
                self.given.pop(name[:end], None)
            before = self.given.get(name)
            if before and before.words and given.words:
                given = replace(given, value=[*before.value, *given.value])
            self.given[name] = given

    def _assign_section(self, name: str, kind: Section, given: Given) -> None:
        try:
            value = _section_value(kind, given)
        except (ValueError, RecursionError) as error:
            self._wrong(name, given, f"is not JSON ({error})")
            return
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[str, Any]", value).items():
                self.assign(f"{name}.{key}", Given(value=inner, source=given.source))
        elif value is None and kind.optional:
            self.given = {k: v for k, v in self.given.items() if not k.startswith(name + ".")}
            self.given[name] = Given(value=None, source=given.source)
        elif kind.short:
            self.assign(f"{name}.{kind.short}", given)
        else:
            first = next(iter(fields(kind.members[""])))
            self._wrong(name, given, f"has keys of its own, such as {name}.{first}")

    def build(self, kind: Section, name: str, default: Any) -> Any:
        """The value of a section, MISSING if there is none. `name` is "" for the whole configuration."""
        prefix = f"{name}." if name else ""
        if name in self.given:
            return None
        mine = [k for k in self.given if k.startswith(prefix)]
        if not mine and (default is not MISSING or kind.optional):
            if default is MISSING:
                self.missing.append(self.prefix + name)
            return default
        if (
            default is None
        ):  # an optional section that isn't there by default: it starts from its own defaults
            default = MISSING
        member = self._member(kind, prefix, default)
        if member is None:
            return MISSING
        cls, base = kind.members[member], default if tag_of(kind, default) == member else MISSING
        self._refuse_unused(kind, member, prefix, mine)
        values: dict[str, Any] = {kind.tag: member} if kind.tag else {}
        for field_name, info in fields(cls).items():
            if field_name == kind.tag:
                continue
            start = getattr(base, field_name) if base is not MISSING else MISSING
            value = self._field(info, prefix + field_name, start)
            if value is not MISSING:
                values[field_name] = value
        return self._validate(cls, prefix, values)

    def _field(self, info: FieldInfo, key: str, start: Any) -> Any:
        """What pydantic is given for a field; MISSING: nothing, its default holds or a problem is noted."""
        hint = info.annotation
        if nested := section(hint):
            return self.build(nested, key, default_of(info) if start is MISSING else start)
        if key not in self.given:
            if start is MISSING and info.is_required():
                self.missing.append(self.prefix + key)
            return start
        given = self.given[key]
        try:
            value = parse(hint, given.value) if given.words else given.value
        except (ValueError, RecursionError) as error:
            self._wrong(key, given, f"is not JSON ({error})")
            return MISSING
        return self._elements(hint, key, value, given)

    def _elements(self, hint: Any, key: str, value: Any, given: Given) -> Any:
        """The value, with tables in a list of sections resolved like sections."""
        lists = [o for o in alternatives(hint) if typing.get_origin(o) in SEQUENCES]
        inner = section(typing.get_args(lists[0])[0]) if lists else None
        if inner is None or not isinstance(value, list):
            return value
        found: list[Any] = []
        for index, item in enumerate(cast("Sequence[Any]", value)):
            place = f"{key}[{index}]"
            one = _Resolver(
                layout=layout(inner),
                problems=self.problems,
                prefix=f"{self.prefix}{place}.",
                missing=self.missing,
            )
            table = cast("dict[str, Any]", item if isinstance(item, dict) else {inner.short or "value": item})
            for name, part in table.items():
                one.assign(name, Given(value=part, source=given.source))
            found.append(one.build(inner, "", MISSING))
        return MISSING if any(f is MISSING for f in found) else found

    def _member(self, kind: Section, prefix: str, default: Any) -> str | None:
        """Which dataclass of the section it is; None if that can't be told, which is then a problem noted."""
        if not kind.tag:
            return ""
        key, choices = prefix + kind.tag, " | ".join(kind.members)
        if key not in self.given:
            if default_tag := tag_of(kind, default):
                return default_tag
            self.missing.append(f"{self.prefix}{key} ({choices})")
            return None
        given = self.given[key]
        value = str(given.value[-1] if given.words else given.value)
        if value in kind.members:
            return value
        close = nearest(value, list(kind.members))
        self._wrong(key, given, f"should be {choices}" + (f"; did you mean {close}?" if close else ""))
        return None

    def _refuse_unused(self, kind: Section, member: str, prefix: str, mine: Sequence[str]) -> None:
        """Keys of the union's other members: a problem, unless only the command line chose this member."""
        if not kind.tag:
            return
        own = layout(kind.members[member])
        chosen_late = self.source(prefix + kind.tag) == COMMAND_LINE
        for key in mine:
            if key.removeprefix(prefix) in (kind.tag, *own.names, *own.sections):
                continue
            if not chosen_late or self.source(key) == COMMAND_LINE:
                self._wrong(key, self.given[key], f"has no use: {self.prefix}{prefix}{kind.tag} is {member}")
            del self.given[key]

    def _validate(self, cls: type[Any], prefix: str, values: dict[str, Any]) -> Any:
        try:
            return self._finite(cls, TypeAdapter(cls).validate_python(values, strict=False), prefix)
        except ValidationError as error:
            for place, text in explain(error).items():
                key = prefix + place if place else prefix.rstrip(".")
                if place and key in self.given:
                    takes = next(k.takes for k in self.layout.of(key) if k.owner is cls)
                    self._wrong(key, self.given[key], f"{text}; it takes {takes}")
                else:
                    self.problems.append(f"{self.prefix}{key or cls.__name__}: {text}")
            return MISSING

    def _finite(self, cls: type[Any], config: Any, prefix: str) -> Any:
        """The section; MISSING if a value of its own isn't finite, which is then a problem noted."""
        wrong = [name for name in fields(cls) if not all_finite(getattr(config, name))]
        for name in wrong:
            key = prefix + name
            given = self.given.get(key, Given(value=getattr(config, name), source=DEFAULT))
            self._wrong(key, given, NOT_FINITE)
        return MISSING if wrong else config

    def _wrong(self, key: str, given: Given, text: str) -> None:
        shown = ",".join(given.value) if given.words else repr(given.value)
        self.problems.append(f"{self.prefix}{key} = {shown} ({given.source}) {text}")

    def _unknown(self, name: str, given: Given) -> str:
        if name in self.also:
            return f"{name} ({given.source}) is an option of the command: give it on the command line"
        close = nearest(name, [*self.layout.names, *self.also])
        hint = f"did you mean {self.prefix}{close}?" if close else "--help lists all keys"
        return f"unknown key {self.prefix}{name} ({given.source}); {hint}"


def _section_value(kind: Section, given: Given) -> Any:
    """A table, None, or the value of the section's short field. Raises ValueError for broken JSON."""
    if not given.words:
        return given.value
    word = str(given.value[-1])
    if kind.optional and word.lower() == "none":
        return None
    # No object in JSON begins so, but a template in Jinja may.
    return json.loads(word) if word.startswith("{") and not word.startswith(("{{", "{%")) else word

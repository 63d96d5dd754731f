"""Component configuration as JSON and back, exactly, also through JSON text.

JSON's own types and tuples (as arrays) stand for themselves. Everything else is an object with one key that
starts with `$`:

    {"$type": "module:Class", ...}   a dataclass or pydantic model, with its fields
    {"$ref": "module:name"}          a function, a class or a member of an enumeration
    {"$list": [...]}                 a list, which isn't a tuple
    {"$map": [[key, value], ...]}    a mapping whose keys aren't all plain strings
    {"$path": "..."}                 a path

Numbers are finite: an infinite limit would count as one, and limit nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, cast

from pydantic import BaseModel, JsonValue

from arriero.engine.errors import GraphError, describe, one_line, users_line

NOT_FINITE = "isn't finite; give a number, a large one where nothing is to be limited"


def all_finite(value: object) -> bool:
    """Whether a configuration value holds no infinite number and none that is no number."""
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return all(all_finite(k) and all_finite(v) for k, v in items.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(all_finite, cast("Collection[object]", value)))
    return not isinstance(value, float) or math.isfinite(value)


def import_path(obj: object) -> str:
    """`module:qualified.name` of a class or function. Raises GraphError for what has no such name."""
    module, name = getattr(obj, "__module__", ""), getattr(obj, "__qualname__", repr(obj))
    if "<" in name or not module:
        raise GraphError(f"{name} can't be imported by name; move it to the top of a module")
    return f"{module}:{name}"


def resolve(path: str) -> Any:
    """The object at `module:qualified.name`.

    Raises GraphError naming the part that is missing, or the line of the module that fails.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        if users_line(error):
            raise GraphError(f"{path!r} can't be imported: {describe(error)}") from error
        raise GraphError(f"{path!r} can't be imported ({error}); write it as package.module:name") from error
    return found


def to_json(value: object) -> JsonValue:
    """JSON for a configuration value. Raises GraphError for one that is infinite or has no exact form."""
    if isinstance(value, Enum):
        return {"$ref": f"{import_path(type(value))}.{value.name}"}
    if isinstance(value, float) and not math.isfinite(value):
        raise GraphError(f"{value} {NOT_FINITE}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if _has_fields(value) and not isinstance(value, type):
        return {"$type": import_path(type(value)), **fields_to_json(value)}
    if isinstance(value, tuple):
        return [to_json(v) for v in cast("tuple[object, ...]", value)]
    if isinstance(value, list):
        return {"$list": [to_json(v) for v in cast("list[object]", value)]}
    if isinstance(value, Mapping):
        return _mapping_to_json(cast("Mapping[object, object]", value))
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if callable(value):
        return {"$ref": _reference(value)}
    raise GraphError(
        f"a {type(value).__name__} has no JSON form: {value!r}; use numbers, text or a dataclass"
    )


def fields_to_json(component: object) -> dict[str, JsonValue]:
    """The fields of a dataclass instance. Raises GraphError if it isn't one, or naming the field."""
    if isinstance(component, type) or not _has_fields(component):
        kind = type(component).__name__
        raise GraphError(f"{kind} is not a dataclass; a component's fields are its configuration")
    found: dict[str, JsonValue] = {}
    for name in _field_names(component):
        value = getattr(component, name)
        try:
            found[name] = to_json(value)
        except GraphError as error:
            raise GraphError(f"{name}{'.' if _has_fields(value) else ': '}{error}") from error
    return found


def from_json(value: JsonValue) -> object:
    """The value that `to_json` was given."""
    if isinstance(value, list):
        return tuple(from_json(v) for v in value)
    if not isinstance(value, dict):
        return value
    match value:
        case {"$type": str(path), **fields}:
            return build(path, fields)
        case {"$ref": str(path)}:
            return resolve(path)
        case {"$list": list(items)}:
            return [from_json(v) for v in items]
        case {"$map": list(items)}:
            return dict(cast("tuple[tuple[object, object], ...]", from_json(items)))
        case {"$path": str(path)}:
            return Path(path)
        case _:
            return {k: from_json(v) for k, v in value.items()}


def build(path: str, config: Mapping[str, JsonValue]) -> Any:
    """The dataclass at `path` with `config` as its fields. Raises GraphError naming fields that don't fit."""
    kind = resolve(path)
    # A graph file names what is called here: only data classes, never any function.
    if not isinstance(kind, type) or not _has_fields(kind):
        raise GraphError(f"{path} is not a dataclass; only components and their configuration are built")
    fields = {k: from_json(v) for k, v in config.items()}
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise GraphError(f"{path} doesn't take this configuration: {one_line(error)}") from error


def _has_fields(value: object) -> bool:
    kind = cast("type[object]", value) if isinstance(value, type) else type(value)
    return dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)


def _field_names(value: object) -> Sequence[str]:
    if isinstance(value, BaseModel):
        return tuple(type(value).model_fields)
    return [f.name for f in dataclasses.fields(cast("Any", value)) if f.init]


def _mapping_to_json(value: Mapping[object, object]) -> JsonValue:
    if all(isinstance(k, str) and not isinstance(k, Enum) and not k.startswith("$") for k in value):
        return {cast("str", k): to_json(v) for k, v in value.items()}
    pairs: list[JsonValue] = [[to_json(k), to_json(v)] for k, v in value.items()]
    return {"$map": sorted(pairs, key=json.dumps)}


def _reference(value: object) -> str:
    path = import_path(value)
    if resolve(path) is not value:
        raise GraphError(f"{path} names something else, not this object; move it to the top of a module")
    return path

"""Component configuration as JSON and back, exactly: dataclasses by import path, functions by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from arriero.engine.errors import GraphError


def import_path(obj: object) -> str:
    """`module:qualified.name` of a class or function. Raises GraphError for what can't be imported by name."""
    module, name = getattr(obj, "__module__", ""), getattr(obj, "__qualname__", repr(obj))
    if "<" in name or not module:
        raise GraphError(f"{name} can't be imported by name; move it to the top of a module")
    return f"{module}:{name}"


def resolve(path: str) -> Any:
    """The object at `module:qualified.name`. Raises GraphError naming the part that is missing."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphError(f"{path!r} can't be imported ({error}); write it as package.module:name") from error
    return found


def to_json(value: object) -> JsonValue:
    """JSON for a configuration value. Raises GraphError for a value that has no exact JSON form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, Enum) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"$type": import_path(type(value)), **fields_to_json(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in cast("list[object]", value)]
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, PurePath):
        return str(value)
    if callable(value):
        return {"$ref": import_path(value)}
    raise GraphError(f"a {type(value).__name__} in a component's configuration has no JSON form: {value!r}")


def fields_to_json(component: object) -> dict[str, JsonValue]:
    """The fields of a dataclass instance. Raises GraphError if it isn't one."""
    if not dataclasses.is_dataclass(component):
        raise GraphError(f"{type(component).__name__} is not a dataclass; a component's fields are its configuration")
    return {f.name: to_json(getattr(component, f.name)) for f in dataclasses.fields(component) if f.init}


def from_json(value: JsonValue) -> object:
    """The value that `to_json` was given (tuples come back through the field's own validation)."""
    if isinstance(value, list):
        return tuple(from_json(v) for v in value)
    if isinstance(value, dict):
        if "$ref" in value:
            return resolve(str(value["$ref"]))
        if "$type" in value:
            return build(str(value["$type"]), {k: v for k, v in value.items() if k != "$type"})
        return {k: from_json(v) for k, v in value.items()}
    return value


def build(path: str, config: dict[str, JsonValue]) -> Any:
    """The dataclass at `path` with `config` as its fields. Raises GraphError naming fields that don't fit."""
    kind = resolve(path)
    try:
        return kind(**{k: from_json(v) for k, v in config.items()})
    except (TypeError, ValidationError) as error:
        raise GraphError(f"{path} doesn't take this configuration: {error}") from error

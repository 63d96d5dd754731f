"""Input ports and output of a component, read from its annotations; streams matched to ports."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeGuard

from arriero.engine.backlog import Backlog
from arriero.engine.component import Each, PerRecord, PutsBack
from arriero.engine.errors import GraphError
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Record


def ports(component: object) -> tuple[dict[str, type[Record]], type[Record]]:
    """Input ports and output record type, from the annotations of `run` (or of a lifted function).

    Raises GraphError if `component` isn't an instance of a component, or not annotated with record types.
    """
    if _is_lifted(component):
        return _function_ports(component.fn)
    if _is_per_record(component):
        return _function_ports(type(component).apply, skip=1)
    run = getattr(type(component), "run", None)
    if isinstance(component, type) or run is None:
        raise GraphError(
            f"{component!r} is not a component: it needs `async def run(self, ...)` and to be an instance"
        )
    kind = type(component).__name__
    if not inspect.isasyncgenfunction(run):
        raise GraphError(f"{kind}.run is no async generator; make it `async def` with `yield`")
    takes, gives = _annotations(run, skip=1)
    if takes.pop("backlog", Backlog) is not Backlog:
        raise GraphError(f"{kind}.run: backlog is the name of a node's own edge; annotate it as Backlog")
    for port, hint in takes.items():
        if typing.get_origin(hint) is not Stream:
            raise GraphError(f"{kind}.run: {port} is a {_text(hint)}; annotate it as Stream[...] of a record")
    if typing.get_origin(gives) not in (AsyncIterator, AsyncGenerator):
        raise GraphError(f"{kind}.run gives {_text(gives)}; annotate it as AsyncIterator[...] of a record")
    records = {
        port: record_type(typing.get_args(hint)[0], f"{kind}.run: {port}") for port, hint in takes.items()
    }
    return records, record_type(typing.get_args(gives)[0], f"{kind}.run")


def puts_back(component: object) -> int:
    """How many records the component, as configured, wants to have on an edge of its own; 0: it has none.

    Raises GraphError if it means to and its `run` takes no backlog.
    """
    if not isinstance(component, PutsBack) or not (most := component.puts_back()):
        return 0
    run = getattr(type(component), "run", None)
    if run is None or "backlog" not in inspect.signature(run).parameters:
        kind = type(component).__name__
        raise GraphError(
            f"{kind}.puts_back() is {most}; give {kind}.run a parameter backlog: Backlog = NO_BACKLOG"
        )
    return most


def _function_ports(
    function: Callable[..., object], skip: int = 0
) -> tuple[dict[str, type[Record]], type[Record]]:
    takes, gives = _annotations(function, skip=skip)
    name = _text(function)
    if len(takes) != 1:
        raise GraphError(f"{name} takes {len(takes)} parameters; a function of one record is needed")
    ((parameter, hint),) = takes.items()
    return {"records": record_type(hint, f"{name}: {parameter}")}, record_type(gives, name)


def _annotations(function: Callable[..., object], *, skip: int) -> tuple[dict[str, Any], Any]:
    """The parameters after the first `skip`, and what is returned, with their annotations."""
    try:
        hints = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (NameError, TypeError, ValueError) as error:
        raise GraphError(f"{_text(function)}: its annotations can't be read at run time ({error})") from error
    if missing := [p.name for p in parameters if p.name not in hints]:
        raise GraphError(f"{_text(function)}: {', '.join(missing)} is not annotated; name its record type")
    if many := [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise GraphError(f"{_text(function)}: {', '.join(many)} takes any number; give each input a name")
    return {p.name: hints[p.name] for p in parameters}, hints.get("return")


def record_type(hint: Any, where: str) -> type[Record]:
    """The one record type in `hint`, whatever is awaited or dropped beside it."""
    found = {h for h in _alternatives(hint) if h is not Dropped}
    if len(found) == 1 and isinstance(only := found.pop(), type) and issubclass(only, Record):
        return only
    raise GraphError(f"{where} is annotated as {_text(hint)}; one record type is needed")


def _alternatives(hint: Any) -> Iterator[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for h in args:
            yield from _alternatives(h)
    elif origin in (Awaitable, Coroutine):
        yield from _alternatives(args[-1])
    else:
        yield hint


def _text(hint: Any) -> str:
    return getattr(hint, "__qualname__", "") or str(hint)


def inputs_of(
    name: str, takes: Mapping[str, type[Record]], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Stream[Any]]:
    """The stream of each port. Raises GraphError for missing, unknown and unfit ones."""
    wanted = ", ".join(takes) or "no inputs"
    if len(args) > len(takes):
        raise GraphError(f"{name} takes {wanted}; got {len(args)} streams, {len(args) - len(takes)} too many")
    given = dict(zip(takes, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise GraphError(f"{name}.{min(twice)} is given twice, by position and by name; give it once")
    given |= kwargs
    if given.keys() != takes.keys():
        raise GraphError(f"{name} takes {wanted}; got {', '.join(given) or 'none'}")
    inputs: dict[str, Stream[Any]] = {}
    for port, want in takes.items():
        stream = given[port]
        if not _is_stream(stream):
            raise GraphError(f"{name}.{port} takes a stream, not {stream!r}; call what `add` returned")
        inputs[port] = stream
        if not issubclass(got := inputs[port].record, want):
            raise GraphError(
                f"{name}.{port} takes {want.__name__}, but {inputs[port].source} gives {got.__name__}; "
                "insert a component between them"
            )
    return inputs


def default_name(component: object) -> str:
    """The class's or function's name as a node's: lower case, without underscores."""
    named = component.fn if _is_lifted(component) else type(component)
    return str(getattr(named, "__name__", "")).replace("_", "").lower()


# isinstance alone leaves the type arguments unknown to pyright, and mypy calls a cast redundant.
def _is_lifted(component: object) -> TypeGuard[Each[Any, Any]]:
    return isinstance(component, Each)


def _is_per_record(component: object) -> TypeGuard[PerRecord[Any, Any]]:
    return isinstance(component, PerRecord)


def _is_stream(stream: object) -> TypeGuard[Stream[Any]]:
    return isinstance(stream, Stream)

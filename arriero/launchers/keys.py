"""The keys of a configuration type: one dotted name for every field that can be set.

A section is a field whose type is a pydantic dataclass, or a union of them told apart by one literal field
(`kind`). Sections nest; everything else is a value.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import io
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pydantic.dataclasses import rebuild_dataclass
from pydantic.fields import FieldInfo

_NO_MARKS = str.maketrans("", "", ".-_")
MISSING: Any = object()  # stands for "no default": None is a value


@dataclass(frozen=True, kw_only=True)
class Section:
    """Dataclasses by the value of their literal field `tag`; one alone is the member "" without a tag."""

    members: dict[str, type[Any]]
    tag: str = ""
    optional: bool = False

    @property
    def short(self) -> str:
        """The field that a plain value given for the section sets; "" if there is none."""
        if self.tag:
            return self.tag
        return next((name for name in ("path", "template") if name in fields(self.members[""])), "")


@dataclass(frozen=True, kw_only=True)
class Key:
    """A value that can be set: `field` of `owner`.

    `when` is the union member it belongs to (`reward.kind contains`), or "".
    """

    name: str
    hint: Any
    limits: tuple[Any, ...] = ()
    default: Any
    owner: type[Any] | None = None
    field: str = ""
    doc: str = ""
    when: str = ""

    @property
    def takes(self) -> str:
        """Its type and limits in words."""
        return " ".join([describe(self.hint), *(c for m in self.limits for c in _constraints(m))])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All keys of a type in field order (a name stands once per union member), and its sections by name."""

    keys: list[Key] = field(default_factory=list[Key])
    sections: dict[str, Section] = field(default_factory=dict[str, Section])

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(k.name for k in self.keys))

    @property
    def flags(self) -> set[str]:
        """Keys that are true when they stand alone on a command line."""
        return {k.name for k in self.keys if bool in alternatives(k.hint)}

    def of(self, name: str) -> list[Key]:
        return [k for k in self.keys if k.name == name]


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, `Annotated` and type aliases removed; a list of one for any other type."""
    while not isinstance(hint, type) and hasattr(hint, "__value__"):  # `type X = ...`
        hint = hint.__value__
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [a for h in typing.get_args(hint) for a in alternatives(h)]
    return [hint]


def fields(cls: type[Any]) -> dict[str, FieldInfo]:
    """Fields that a configuration can set, in order."""
    if not getattr(cls, "__pydantic_complete__", True):
        rebuild_dataclass(cls)
    found = cast("dict[str, FieldInfo]", cls.__pydantic_fields__)
    return {n: f for n, f in found.items() if f.init is not False}


def section(hint: Any) -> Section | None:
    """The section that a field of this type is, or None for a value."""
    options = alternatives(hint)
    classes: list[Any] = [o for o in options if o is not types.NoneType]
    if not classes or not all(isinstance(c, type) and hasattr(c, "__pydantic_fields__") for c in classes):
        return None
    optional = types.NoneType in options
    if len(classes) == 1:
        return Section(members={"": classes[0]}, optional=optional)
    for tag in fields(classes[0]):
        values = [_literals(fields(c)[tag].annotation) if tag in fields(c) else [] for c in classes]
        members = {v: c for c, own in zip(classes, values, strict=True) for v in own}
        # A literal that the classes share, such as a schedule, tells none of them apart.
        if all(values) and len(members) == sum(map(len, values)):
            return Section(members=members, tag=tag, optional=optional)
    return None


def _literals(hint: Any) -> list[str]:
    return [str(v) for v in typing.get_args(hint)] if typing.get_origin(hint) is Literal else []


def documented(found: Layout) -> list[tuple[Key, str]]:
    """Each key with what the source says about it: a description, a string below or a comment after."""
    owners = {k.owner: comments(k.owner) for k in found.keys if k.owner}
    return [(k, k.doc or (owners[k.owner].get(k.field, "") if k.owner else "")) for k in found.keys]


def default_of(info: FieldInfo) -> Any:
    """The default of a field; MISSING if it is required, or made from other fields."""
    if info.is_required() or info.default_factory_takes_validated_data:
        return MISSING
    return info.get_default(call_default_factory=True)


def tag_of(kind: Section, default: Any) -> str:
    """Which member of the union `default` is; "" if it is none of them."""
    return next((value for value, cls in kind.members.items() if type(default) is cls), "")


def layout(config_type: type[Any] | Section) -> Layout:
    """Keys and sections of a configuration type."""
    found = Layout()
    kind = config_type if isinstance(config_type, Section) else Section(members={"": config_type})
    _collect(found, kind, "", MISSING, "")
    return found


def _collect(found: Layout, kind: Section, prefix: str, default: Any, when: str) -> None:
    if kind.tag:
        choice = tag_of(kind, default) or (None if default is None else MISSING)
        hint = cast("Any", Literal)[tuple(kind.members)]
        found.keys.append(
            Key(name=prefix + kind.tag, hint=hint, default=choice, doc="which one, see below", when=when)
        )
    for value, cls in kind.members.items():
        inside = f"{prefix}{kind.tag} {value}" if kind.tag else when
        for name, info in fields(cls).items():
            if name == kind.tag:
                continue
            key = prefix + name
            given = getattr(default, name) if type(default) is cls else default_of(info)
            if nested := section(info.annotation):
                found.sections[key] = nested
                _collect(found, nested, key + ".", given, inside)
            else:
                found.keys.append(
                    Key(
                        name=key, hint=info.annotation, limits=tuple(info.metadata), default=given, owner=cls,
                        field=name, doc=info.description or "", when=inside,
                    )
                )  # fmt: skip


def comments(cls: type[Any]) -> dict[str, str]:
    """What stands about each field in the source of the class: a string below it, or a comment after it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            found |= _comments(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _comments(module: str) -> dict[str, dict[str, str]]:
    """Comments of the fields of all classes at the top of a module."""
    # Not inspect.getsource, which parses the module again for every class: half a second for `--help`.
    try:
        source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
        body = ast.parse(source).body
    except (KeyError, AttributeError, OSError, ValueError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    after = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    return {c.name: _class_comments(c, after) for c in body if isinstance(c, ast.ClassDef)}


def _class_comments(tree: ast.ClassDef, after: dict[int, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = _string(below) or after.get(statement.end_lineno or 0, "")
    return found


def _string(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value)).replace("\n", " ")
    return ""


def describe(hint: Any) -> str:
    """A type in words for a command line: `int > 0`, `contains | exact`, `tuple[str, ...]`."""
    if hint is None or hint is types.NoneType:
        return "none"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return " ".join([describe(args[0]), *(c for m in args[1:] for c in _constraints(m))])
    if origin is Literal:
        return " | ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(describe(a) for a in args)
    if origin is Callable:
        return "module:function"
    name = str(getattr(origin or hint, "__name__", hint))
    if origin is not None and args:
        return f"{name}[{', '.join('...' if a is Ellipsis else describe(a) for a in args)}]"
    return name


def _constraints(metadata: object) -> Iterator[str]:
    for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (limit := getattr(metadata, attribute, None)) is not None:
            yield f"{sign} {limit}"


def nearest(name: str, names: Collection[str]) -> str:
    """The known name most likely meant by `name`, or "".

    First what is the same but for `.`, `-` and `_`, then its last part elsewhere, as a key or a section, then
    the spelling.
    """
    plain = name.translate(_NO_MARKS)
    if spelt := [n for n in names if n.translate(_NO_MARKS) == plain]:
        return spelt[0]
    last = name.rpartition(".")[2]
    if same := [n for n in names if n.rpartition(".")[2] == last]:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0)[0]
    if sections := [f"{n.partition(f'.{last}.')[0]}.{last}" for n in names if f".{last}." in n]:
        return difflib.get_close_matches(name, sections, n=1, cutoff=0.0)[0]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return close[0]
    by_last = {n.rpartition(".")[2]: n for n in names}
    return next((by_last[n] for n in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)), "")

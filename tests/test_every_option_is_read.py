"""No option is accepted and then ignored: somewhere in the package each one is read, and not only handed on.

Read from the syntax alone. An attribute counts for an option if its owner is known to be of that class (from
annotations, `self`, and what those are assigned to) or isn't known at all, as behind a protocol, which any
class may fulfil; that of a module doesn't.
`C(f=x.f)`, which hands an option on under the same name, counts as much as the field `f` of our class C does.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import arriero

PACKAGE = Path(arriero.__file__).parent
RUN = {"RunOptions", "LaunchOptions", "Arguments", "Capacity", "Resources", "EdgeDecl"}
# Read in another way than as an attribute.
ELSEWHERE = {("Arguments", "config"): "options.py takes it from the words, for it names where others stand"}

_MODULE = "(module)"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


class Package:
    """The classes of the package by name, their bases, fields and the classes of their attributes."""

    def __init__(self) -> None:
        self.trees = {p: ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}
        found = [(p, c) for p, tree in self.trees.items() for c in tree.body if isinstance(c, ast.ClassDef)]
        self.classes = {c.name: c for _, c in found}
        self.options = {c.name for path, c in found if c.name in RUN or self._is_config(path, c)}
        protocols = {n for n, c in self.classes.items() if any("Protocol" in ast.unparse(b) for b in c.bases)}
        self.known = self.classes.keys() - protocols
        self.members: defaultdict[str, dict[str, str]] = defaultdict(dict)  # class -> attribute -> class
        self._ancestors: dict[str, set[str]] = {}
        self.modules = {name for tree in self.trees.values() for name in _imported_modules(tree)}
        for name, node in self.classes.items():
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    self._note(name, item.target.id, self.named(item.annotation))
                elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._note(name, item.name, self.named(item.returns))
        for name, node in self.classes.items():
            for function in _functions(node):
                for target, value in _assignments(function):
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        self._note(name, target.attr, self.type_of(value, self.scope(function, name)))

    def _is_config(self, path: Path, node: ast.ClassDef) -> bool:
        imports = [n.module for n in self.trees[path].body if isinstance(n, ast.ImportFrom)]
        decorated = any(
            "dataclass" in ast.unparse(d).partition("(")[0].split("_") for d in node.decorator_list
        )
        inside = path.relative_to(PACKAGE).parts[0] in ("components", "pipelines")
        return inside and decorated and "pydantic.dataclasses" in imports

    def _note(self, owner: str, attribute: str, kind: str) -> None:
        if kind:
            self.members[owner].setdefault(attribute, kind)

    def named(self, hint: ast.expr | None) -> str:
        """The one class of ours in an annotation; empty if there is none or several."""
        if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
            hint = ast.parse(hint.value, mode="eval").body
        found = {n.id for n in ast.walk(hint) if isinstance(n, ast.Name)} if hint is not None else set[str]()
        ours = found & self.known
        return ours.pop() if len(ours) == 1 else ""

    def ancestors(self, name: str) -> set[str]:
        """The class and all of ours that it inherits from; none for no class."""
        if name not in self.classes:
            return set()
        if name not in self._ancestors:
            bases = {n.id for b in self.classes[name].bases for n in ast.walk(b) if isinstance(n, ast.Name)}
            self._ancestors[name] = {name}.union(*(self.ancestors(b) for b in bases))
        return self._ancestors[name]

    def scope(self, function: Function, owner: str) -> dict[str, str]:
        """The classes of the names in a function."""
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        scope = {a.arg: self.named(a.annotation) for a in arguments} | ({"self": owner} if owner else {})
        for target, value in _assignments(function):
            if isinstance(target, ast.Name):
                scope[target.id] = self.type_of(value, scope)
        return scope

    def type_of(self, value: ast.expr, scope: dict[str, str]) -> str:
        match value:
            case ast.Name(id=name):
                return scope.get(name, _MODULE if name in self.modules else "")
            case ast.Await(value=inner):
                return self.type_of(inner, scope)
            case ast.Call(func=ast.Name(id=name)) if name in self.classes:
                return name
            case ast.Call(func=ast.Attribute() as method):
                return self.type_of(method, scope)
            case ast.Attribute(value=base, attr=attribute):
                owners = self.ancestors(self.type_of(base, scope))
                return next((self.members[o][attribute] for o in owners if attribute in self.members[o]), "")
            case _:
                return ""

    def reads(self) -> Iterator[tuple[str, str, str]]:
        """(class of the owner or empty, attribute, class it is only handed on to or empty) of every read."""
        owners = {id(f): c.name for c in self.classes.values() for f in _functions(c)}
        for tree in self.trees.values():
            handed = {
                id(k.value): call.func.id
                for call in ast.walk(tree)
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in self.classes
                for k in call.keywords
                if isinstance(k.value, ast.Attribute) and k.value.attr == k.arg
                if any(k.arg in self.fields(c) for c in self.ancestors(call.func.id))
            }
            for function in _functions(tree):
                scope = self.scope(function, owners.get(id(function), ""))
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                        yield self.type_of(node.value, scope), node.attr, handed.get(id(node), "")

    def fields(self, name: str) -> list[str]:
        return [
            item.target.id
            for item in self.classes[name].body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if not _is_constant(item.target.id, ast.unparse(item.annotation))
        ]


def _assignments(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    """Names under which modules are imported; a module of ours is told by its file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("arriero"):
            folder = PACKAGE.parent / str(node.module).replace(".", "/")
            yield from (a.asname or a.name for a in node.names if (folder / f"{a.name}.py").is_file())


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_constant(name: str, annotation: str) -> bool:
    """What nobody can set: a class variable, or the literal that tells the members of a union apart."""
    return annotation.startswith("ClassVar") or (name == "kind" and annotation.startswith("Literal"))


def unread(package: Package) -> list[str]:
    """`Class.field` of every option that nothing reads."""
    reads: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for owner, attribute, receiver in package.reads():
        reads[attribute].add((owner, receiver))

    def is_read(name: str, field: str, seen: frozenset[str] = frozenset()) -> bool:
        return any(
            (not owner or name in package.ancestors(owner) or owner in package.ancestors(name))
            and (not receiver or (receiver not in seen and is_read(receiver, field, seen | {name})))
            for owner, receiver in reads[field]
        )

    return [
        f"{name}.{field}"
        for name in sorted(package.options)
        for field in package.fields(name)
        if (name, field) not in ELSEWHERE and not is_read(name, field)
    ]


def test_every_option_is_read_somewhere() -> None:
    package = Package()
    assert {"Generator", "Trainer", "PromptSource", "AdamW", "AIPOConfig", *RUN} <= package.options
    assert unread(package) == []

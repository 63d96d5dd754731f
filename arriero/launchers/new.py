"""`arriero new NAME`: a whole pipeline in one file of your own, and its test."""

from __future__ import annotations

import importlib.util
import keyword
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from arriero.engine.errors import UserError

USAGE = """\
usage: arriero new NAME [--dir FOLDER]    writes NAME.py, an algorithm that runs, and test_NAME.py"""


def new(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Write both files, and say what to do with them. Raises UserError; nothing is overwritten."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    name, *rest = args
    if rest and (len(rest) != 2 or rest[0] != "--dir"):
        raise UserError(f"{' '.join(rest)} isn't understood\n{USAGE}")
    folder = Path(rest[1]) if rest else Path()
    _check_name(name)
    files = {folder / f"{name}.py": "pipeline.txt", folder / f"test_{name}.py": "test.txt"}
    if there := [str(path) for path in files if path.exists()]:
        raise UserError(f"{' and '.join(there)}: there already; choose another name or --dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            path.write_text(filled(template, name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; choose another --dir") from error
    pipeline, test = files
    return show(
        f"{pipeline}: the pipeline; {test}: its test\n"
        f"  pytest {test}\n"
        f"  arriero check {pipeline} --model MODEL --data DATA.jsonl --laws\n"
        f"  arriero run {pipeline} --model MODEL --data DATA.jsonl"
    )


def filled(template: str, name: str) -> str:
    """A template for an algorithm of this name."""
    text = resources.files("arriero.launchers").joinpath("templates", template).read_text(encoding="utf-8")
    title = "".join(part.capitalize() for part in name.split("_"))
    named = {"{{name}}": name, "{{Name}}": title, "{{graph}}": name.replace("_", "")}
    for mark, value in named.items():
        text = text.replace(mark, value)
    return text


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name[0].isalpha():
        raise UserError(f"{name} can't be the name of a function and a file: small letters, digits, _")
    if "." not in name and importlib.util.find_spec(name) is not None:
        raise UserError(f"there is a module {name} already, which the file would hide; choose another name")

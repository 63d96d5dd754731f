"""The measures of a run as TensorBoard's event files, at the times at which they were made."""

from __future__ import annotations

from pathlib import Path

from arriero.launchers.board import Board
from arriero.launchers.exports.subject import Subject


def write(about: Subject, path: Path) -> str:
    board = Board(path)
    for step, time_s, found in about.measures():
        for tag, value in found:
            board.add_scalar(tag, value, step, time_s)
    board.close()
    return f"{len(about.lines)} steps in {path}"

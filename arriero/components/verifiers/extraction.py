"""What part of a response is its answer. Pure text; everything here takes time linear in the text.

1. Thoughts in `<think>...</think>` don't count; while one is unfinished there is no answer.
2. The last complete `\\boxed{...}` or `\\fbox{...}`. Boxes joined by nothing but "and", "or" and commas are
   one answer of several parts.
3. Without a box, the last line that starts with "Answer:" or "Final answer:".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_CHARS = 100_000  # of a response, from its end
MOST_ANSWER_CHARS = 2_000
_MOST_JOIN = 100  # characters between two boxes of one answer

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.S)
_JOIN = re.compile(r"(?:[\s$,;.&]|\\[()\[\] ,;!]|\b(?:and|or)\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})*")
# No \s in it: a pattern that crosses lines takes quadratic time on a text of empty ones.
_MARKER = re.compile(
    r"^[ \t*_#>`-]*(?:the\s)?(?:final\s)?answer(?:\sis)?[ \t*_]*[:=][ \t*_]*(\S.*)$", re.I | re.M
)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A complete box, `start` and `end` of the whole of it in the text."""

    start: int
    end: int
    content: str


def conclusion(text: str) -> str:
    """The response after its thoughts, at most its last `MOST_CHARS`; empty while a thought is unfinished."""
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text[-MOST_CHARS:]


def boxes(text: str) -> list[Box]:
    """All complete boxes that stand in no other one, in order."""
    found: list[Box] = []
    closings, end = _closings(text), 0
    for opening in _BOX.finditer(text):
        if opening.start() < end:
            continue
        close = closings.get(opening.end() - 1)
        if close is None:  # nothing behind an opening without end can be complete: it stands inside
            continue
        end = close + 1
        found.append(Box(start=opening.start(), end=end, content=text[opening.end() : close].strip()))
    return found


def final_boxes(text: str) -> list[str]:
    """The contents of the last box and of those joined to it; empty if there is none."""
    found = boxes(text)
    first = len(found) - 1
    while first > 0 and _joined(text, found[first - 1].end, found[first].start):
        first -= 1
    return [box.content for box in found[max(first, 0) :]]


def _joined(text: str, end: int, start: int) -> bool:
    # Bounded: what stands between is looked at in more than linear time.
    return start - end <= _MOST_JOIN and _JOIN.fullmatch(text, end, start) is not None


def marked(text: str) -> str | None:
    """What stands behind the last "Answer:" at the start of a line."""
    found = None
    for match in _MARKER.finditer(text):
        found = match.group(1).rstrip(" \t*_")
    return found


def _closings(text: str) -> dict[int, int]:
    """Where the brace that opens at a place is closed; those that are never closed are left out."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            waiting.append(brace.start())
        elif brace[0] == "}" and waiting:
            found[waiting.pop()] = brace.start()
    return found

"""The checks of `Constraints`: pure functions of a text and arguments, by IFEval's ids (arXiv:2311.07911)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from pydantic import JsonValue


class Refused(ValueError):
    """An unknown instruction, or arguments it can't be checked with."""


class Given:
    """The arguments of one instruction. Reading a missing one raises Refused: there are no defaults."""

    def __init__(self, id: str, values: Mapping[str, JsonValue]) -> None:
        self.id, self._values = id, values

    def number(self, name: str) -> int:
        """A count."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise Refused(f"{self.id}: {name} is {value!r}; a whole number is needed")
        return int(value)

    def text(self, name: str) -> str:
        """A text that isn't empty."""
        value = self._values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise Refused(f"{self.id}: {name} is {value!r}; text is needed")
        return value

    def texts(self, name: str) -> list[str]:
        """At least one text."""
        value = self._values.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise Refused(f"{self.id}: {name} is {value!r}; a list of texts is needed")
        return [str(v) for v in value]

    def holds(self, count: int, number: str, relation: str) -> bool:
        """Whether a count stands in the given relation to the given number."""
        want = self.number(number)
        match self._values.get(relation):
            case "at least":
                return count >= want
            case "less than":
                return count < want
            case "at most":
                return count <= want
            case other:
                raise Refused(f"{self.id}: {relation} is {other!r}; at least, at most or less than is needed")


@cache
def _detector() -> Any:
    """langdetect's factory with its profiles; it draws the same numbers every time. Raises Refused."""
    try:
        library: Any = importlib.import_module("langdetect.detector_factory")
    except ImportError as error:
        raise Refused(
            "language:response_language needs langdetect; pip install 'arriero[verifiers]'"
        ) from error
    library.DetectorFactory.seed = 0  # it samples pieces of the text
    library.init_factory()
    return library._factory


def _language(text: str, given: Given) -> bool:
    factory, want = _detector(), given.text("language")
    if want not in factory.get_lang_list():
        raise Refused(f"{given.id}: language is {want!r}; known are {', '.join(factory.get_lang_list())}")
    detector = factory.create()
    detector.append(text)
    try:
        found: str = detector.detect()
    except Exception:  # noqa: BLE001  # a text without letters has no language
        return False
    return found == want


Check: TypeAlias = Callable[[str, Given], bool]


def check(id: str, text: str, arguments: Mapping[str, JsonValue]) -> bool:
    """Whether `text` follows the instruction. Raises Refused."""
    if id not in INSTRUCTIONS:
        raise Refused(f"instruction {id!r} isn't known here")
    return INSTRUCTIONS[id](text, Given(id, arguments))


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.I))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text)


def _sentences(text: str) -> int:
    """Sentences end in . ! ? before white space or the end; initials and common abbreviations don't count."""
    text = re.sub(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No)\.(?=\s+\S)", "", text)
    parts = re.split(r"(?<=[.!?])[\"')\]]*(?:\s+|$)|\n{2,}", text)
    return len([p for p in parts if re.search(r"\w", p)])


def _paragraphs(text: str, at: str) -> list[str]:
    return [p.strip() for p in re.split(at, text) if p.strip()]


def _is_json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.I).removesuffix("```")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _nth_paragraph(text: str, given: Given) -> bool:
    parts, nth = _paragraphs(text, r"\n\s*\n"), given.number("nth_paragraph")
    want = given.text("first_word").casefold()
    first = _words(parts[nth - 1])[:1] if 1 <= nth <= len(parts) else []
    return len(parts) == given.number("num_paragraphs") and [w.casefold() for w in first] == [want]


def _two_responses(text: str, given: Given) -> bool:
    parts = _paragraphs(text, r"\*{6}")
    return len(parts) == 2 and parts[0] != parts[1]


def _keywords(text: str, given: Given) -> bool:
    return all(_occurrences(k, text) for k in given.texts("keywords"))


def _sections(text: str, given: Given) -> bool:
    marks = re.findall(rf"{re.escape(given.text('section_spliter'))}\s*\d+", text)
    return len(marks) >= given.number("num_sections")


def _postscript(text: str, given: Given) -> bool:
    letters = re.findall(r"[A-Za-z]", given.text("postscript_marker"))
    return re.search(r"^[^\S\n]*" + r"\.?\s?".join(map(re.escape, letters)), text, re.M | re.I) is not None


def _highlights(text: str, given: Given) -> bool:
    found = re.findall(r"\*\*[^*\n]*\w[^*\n]*\*\*|(?<!\*)\*[^*\n]*\w[^*\n]*\*(?!\*)", text)
    return len(found) >= given.number("num_highlights")


def _letters(text: str, given: Given) -> bool:
    letter = given.text("letter")
    return given.holds(text.casefold().count(letter.casefold()), "let_frequency", "let_relation")


INSTRUCTIONS: Mapping[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": lambda t, g: g.holds(_occurrences(g.text("keyword"), t), "frequency", "relation"),
    "keywords:forbidden_words": lambda t, g: not any(_occurrences(w, t) for w in g.texts("forbidden_words")),
    "keywords:letter_frequency": _letters,
    "length_constraints:number_sentences": lambda t, g: g.holds(_sentences(t), "num_sentences", "relation"),
    "length_constraints:number_words": lambda t, g: g.holds(len(_words(t)), "num_words", "relation"),
    "length_constraints:number_paragraphs": lambda t, g: (
        len(_paragraphs(t, r"\*\*\*")) == g.number("num_paragraphs")
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda t, g: (
        len(re.findall(r"\[[^\[\]]+\]", t)) >= g.number("num_placeholders")
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, g: (
        len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)[^\S\n]+\S", t, re.M)) == g.number("num_bullets")
    ),
    "detectable_format:constrained_response": lambda t, _: (
        sum(f"My answer is {a}." in t for a in ("yes", "no", "maybe")) == 1
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": lambda t, _: _is_json(t),
    "detectable_format:title": lambda t, _: re.search(r"<<[^<>\n]*\w[^<>\n]*>>", t) is not None,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, g: (
        t.strip().casefold().startswith(g.text("prompt_to_repeat").strip().casefold())
    ),
    "startend:end_checker": lambda t, g: (
        t.strip().strip('"').casefold().endswith(g.text("end_phrase").strip().casefold())
    ),
    "startend:quotation": lambda t, _: len(t) > 2 and t.startswith('"') and t.endswith('"'),
    "change_case:capital_word_frequency": lambda t, g: g.holds(
        sum(w.isupper() for w in _words(t)), "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda t, _: t.isupper(),
    "change_case:english_lowercase": lambda t, _: t.islower(),
    "language:response_language": _language,
    "punctuation:no_comma": lambda t, _: "," not in t,
}

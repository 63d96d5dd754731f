"""LaTeX answers in one spelling: what is only typography goes, what carries meaning stays.

Goes: dollar signs, `\\left`/`\\right`, spacing, `\\dfrac` for `\\frac`, bold markers of Markdown, a full stop
at the end, degree, percent and currency signs, a unit in `\\text{}` behind a number, separators of thousands.
"""

from __future__ import annotations

import re
from functools import lru_cache

_PLAIN_WORDS = {
    "pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "theta": r"\theta",
    "alpha": r"\alpha", "beta": r"\beta", "sqrt": r"\sqrt", "sin": r"\sin", "cos": r"\cos", "tan": r"\tan",
    "log": r"\log", "ln": r"\ln", "exp": r"\exp",
}  # fmt: skip
_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi ",
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u00b0": "", "\u221a": r"\sqrt",
    "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b1": r"\pm ", "\u00b2": "^{2}", "\u00b3": "^{3}",
    "\u00a0": " ", "\u202f": " ", "\u2009": " ",
}  # fmt: skip
_REMOVED = re.compile(
    r"\\(?:left|right|[bB]ig[gG]?[lr]?|displaystyle|textstyle|limits|boldsymbol|rm|bf)(?![A-Za-z])"
    r"|\\[,!:;]|\\q?quad(?![A-Za-z])|~|\\(?:hspace|vspace)\{[^{}]*\}"
)
_NAMES = re.compile(r"\\(dfrac|tfrac|cfrac|leq|geq|leqslant|geqslant|dots|cdots|ldots|neq|varnothing|lbrace|rbrace|text(?:bf|it|rm|normal|sf)|mbox|mathrm|mathbf|operatorname|hbox)(?![A-Za-z])")  # fmt: skip  # noqa: E501
_SAME = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "leq": r"\le", "geq": r"\ge",
    "leqslant": r"\le", "geqslant": r"\ge", "dots": r"\ldots", "cdots": r"\ldots", "ldots": r"\ldots",
    "neq": r"\ne", "varnothing": r"\emptyset", "lbrace": r"\{", "rbrace": r"\}",
    "mbox": r"\text", "hbox": r"\text",
    "mathrm": r"\text", "mathbf": r"\text", "operatorname": r"\text",
}  # fmt: skip
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)(?![A-Za-z])|\\degree(?![A-Za-z])")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(rf"(\d+(?:\.\d+)?)\s*(?:{_DEGREE.pattern})")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])(?![A-Za-z])")
_UNIT = re.compile(
    r"^(.*[\d})\]])\s*(?:\\ )?\\text\s*\{(?![^{}]*\b(?:and|or|not|to)\b)[^{}()\d]*[A-Za-z][^{}()\d]*\}"
    r"(?:\^\{?[23]\}?)?\.?$",
    re.S,
)
_NO_UNIT = r"(?!(?:or|and|to|not|is|plus|minus|times|mod)\b)"
_PLAIN_UNIT = re.compile(
    rf"^(-?[\d.,/ ]*\d)\s+{_NO_UNIT}(?:square |cubic )?[A-Za-z]{{2,}}(?: [A-Za-z]+){{0,3}}"
    r"(?:\^\{?[23]\}?)?$"
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}| )\d{3})+(?!\d)(?!(?:,|\{,\}| )\s*\d)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?")


@lru_cache(maxsize=8192)
def normal(text: str) -> str:
    """The one spelling of a short answer; empty if nothing is left."""
    text = _outside(_unboxed(text.strip()))
    for sign, same in _SIGNS.items():
        text = text.replace(sign, same)
    text = re.sub(r",\s*\\[!,;]?\s*(?=\d{3})", ",", text)
    text = _REMOVED.sub(" ", text)
    text = _NAMES.sub(lambda m: _SAME.get(m[1], r"\text"), text)
    if _TRIGONOMETRY.search(text):
        text = _ANGLE.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _DEGREE.sub("", text)
    text = re.sub(r"\\text\s*\{([\s\d.,/+-]*\d[\s\d.,/+-]*)\}", r"\1", text)
    text = re.sub(r"\\\{\s*\\\}", r"\\emptyset", text)
    text = re.sub(r"\\text\s*\{\s*(e|i|d)\s*\}", r"\1", text)
    text = re.sub(r"\\\$|\\%|(?<=[\d)}])\s*%", "", text)
    text = re.sub(r"\\text\s*\{\s*(?:degrees?|percent)\s*\}", "", text)
    text = text.replace("...", r"\ldots ")
    if unit := _UNIT.match(text) or _PLAIN_UNIT.match(text):
        text = unit[1]
    text = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _REPEATING.sub(_repeating, text)
    text = _formulas(text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<=[\w})\]])\s*\.$", "", text).strip()


def words(text: str) -> str:
    """A spelled answer ("\\text{Evelyn}", "a red apple", "(C)") in lower case; empty for mathematics."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+", " ", text.replace("\\ ", " ")).strip(" .!'\"")
    if option := re.fullmatch(r"\(?([A-Za-z])\)?\.?", text):
        return option[1].casefold()
    text = re.sub(r"^(?:an?|the) (?=\w{2})", "", text.casefold())
    return text if re.fullmatch(r"[^\W\d_]{2,}(?:[ ,'-]+[^\W\d_]+)*", text) else ""


def is_spelled(text: str) -> bool:
    """Whether a normal text is words, not mathematics: in `\\text{}`, or longer than a product of letters."""
    spelled = words(text)
    return bool(spelled) and ("\\text" in text or len(re.sub(r"\W", "", spelled)) > 2)


def plain(text: str) -> str:
    """Calculator notation in LaTeX: `sqrt(2)/2`, `pi/2`, `exp(16)`, `x**2`, `2*x`, `<=`."""
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(
        r"(?<![A-Za-z\\])([A-Za-z]+)(?![A-Za-z])", lambda m: _PLAIN_WORDS.get(m[1], m[1]) + _gap(m[1]), text
    )
    text = _rounded(_rounded(text, r"\exp", "e^"), r"\sqrt", r"\sqrt")
    text = _rounded(text, "^", "^")
    return text.replace("*", r"\cdot ")


def _gap(word: str) -> str:
    return " " if word in _PLAIN_WORDS else ""


def _unboxed(text: str) -> str:
    found = re.fullmatch(r"\\f?box(?:ed)?\s*\{(.*)\}|\{([^{}]*)\}", text, re.S)
    return _unboxed((found[1] or found[2] or "").strip()) if found else text


def _outside(text: str) -> str:
    """Without the marks around a whole formula."""
    for opening, close in (
        ("$$", "$$"),
        ("$", "$"),
        (r"\(", r"\)"),
        (r"\[", r"\]"),
        ("**", "**"),
        ("`", "`"),
    ):
        while (
            len(text) > len(opening + close) and text.startswith(opening) and text.rstrip(".").endswith(close)
        ):
            text = text.rstrip(".")[len(opening) : -len(close)].strip()
    return text.replace("$", "").replace(r"\(", "(").replace(r"\)", ")") if "\\$" not in text else text


def _formulas(text: str) -> str:
    text = re.sub(r"(\\frac|\\sqrt)\s+(?=[\d{])", r"\1", text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _rounded(text, r"\sqrt", r"\sqrt")
    text = re.sub(r"([_^])\s*\{(\w)\}", r"\1\2", text)
    text = re.sub(r"\s*([=<>+\-*/,:;^_{}()\[\]|])\s*", r"\1", text)
    return re.sub(r"(?<![\d.])(\d+)\.0+(?!\d)", r"\1", text)


def _rounded(text: str, name: str, into: str) -> str:
    """`name(...)` as `into{...}`, with the bracket that closes it."""
    start = text.find(name + "(")
    while start >= 0:
        first = start + len(name)
        depth, end = 0, first
        while end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            if not depth:
                break
            end += 1
        else:
            return text
        text = f"{text[:start]}{into}{{{text[first + 1 : end]}}}{text[end + 1 :]}"
        start = text.find(name + "(", start + len(into))
    return text


def _repeating(found: re.Match[str]) -> str:
    whole, before, period = found[1] or "0", found[2], found[3]
    top = int(whole + before + period) - int(whole + before)
    return f"\\frac{{{top}}}{{{'9' * len(period)}{'0' * len(before)}}}"

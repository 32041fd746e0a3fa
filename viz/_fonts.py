"""Fonts and text of drawings and figures: text is not parsed, the font is the one that comes with matplotlib."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

FONT = "DejaVu Sans"
_WORD = re.compile(r"[^\W\d_]{2,}(?!\w*:)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STYLE = {
    "font.family": [FONT],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": True,  # for the numbers of logarithmic axes; what users wrote is never parsed
    "svg.hashsalt": "gradrewrite",
}


def figure_style() -> AbstractContextManager[None]:
    """Apply our matplotlib style; restore the user's afterwards."""
    from matplotlib.style import context

    settings: list[Any] = ["default", _STYLE]
    return context(settings)


def displayable(text: str, limit: int) -> str:
    """Replace characters that the font lacks by their code points, and shorten the middle to ``limit`` characters."""
    shown = "".join(c if c.isprintable() and _has_glyph(c) else _escaped(c) for c in text)
    if len(shown) <= limit:
        return shown
    head = (limit - 3) // 2
    return _without_middle(shown, head, len(shown) + head + 3 - limit, "...")


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in pixels, in DejaVu Sans of that size."""
    return size * sum(map(_advance, text))


def fit(text: str, width: float, size: float) -> str:
    """Shorten text to a width in pixels; the middle is cut, because the ends of names tell them apart."""
    if text_width(text, size) <= width:
        return text
    num_fitting = bisect_right(range(len(text) + 1), width, key=lambda kept: text_width(_cut(text, kept), size))
    return _cut(text, max(num_fitting - 1, 0))


def fit_all(labels: Sequence[tuple[str, float, float]]) -> list[str]:
    """Shorten labels (text, width, size) so that they stay distinct."""
    pairs = [(fit(*label), label) for label in labels]
    texts = {(short, text) for short, (text, *_) in pairs}
    times = Counter(short for short, _ in texts)
    return [_abbreviated(*label) if times[short] > 1 else short for short, label in pairs]


def _abbreviated(text: str, width: float, size: float) -> str:
    """Abbreviate words from the left, but a kind in front and the last word: ``b.e.l.0.a.s.query.weight``."""
    short = text
    for count in range(1, len(_WORD.findall(text))):
        short = _WORD.sub(lambda word: word[0][0], text, count)
        if text_width(short, size) <= width:
            return short
    end = len(short)
    while end and text_width(_without_middle(short, end, len(short)), size) > width:
        end -= 1
    return _without_middle(short, end, len(short))


def _cut(text: str, kept: int) -> str:
    head = kept // 3
    return _without_middle(text, head, len(text) - (kept - head))


def _without_middle(text: str, start: int, end: int, dots: str = "..") -> str:
    """Replace a part of the text by dots, and the rest of each number that begins or ends there."""
    for number in _NUMBER.finditer(text):
        if number.start() < start < number.end():
            start = number.start()
        if number.start() < end < number.end():
            end = number.end()
    return f"{text[:start]}{dots}{text[end:]}"


@functools.cache
def _advance(character: str) -> float:
    """Return the width of a character in units of the font size; 1.2 where the font lacks it."""
    font = _font()
    if not font.get_char_index(ord(character)):
        return 1.2
    font.set_size(100, 72)
    return float(font.load_char(ord(character)).linearHoriAdvance) / 6_553_600


def _has_glyph(character: str) -> bool:
    return character.isascii() or _font().get_char_index(ord(character)) != 0


def _font() -> Any:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def xml_safe(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)

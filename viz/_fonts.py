"""Fonts and text of drawings and figures: text is not parsed, the font is the one that comes with matplotlib."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gradrewrite.ir.graph_view import GraphView, Node

FONT = "DejaVu Sans"
_WORD = re.compile(r"[^\W\d_]{2,}(?!\w*:)")
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


@contextlib.contextmanager
def figure_style() -> Iterator[None]:
    """Apply our matplotlib style; restore the user's afterwards."""
    from matplotlib.style import context

    settings: list[Any] = ["default", _STYLE]
    with context(settings):
        yield


def displayable(text: str, limit: int) -> str:
    """Replace characters that the font lacks by their code points, and shorten the middle to ``limit`` characters."""
    shown = "".join(c if c.isprintable() and _has_glyph(c) else _escaped(c) for c in text)
    if len(shown) <= limit:
        return shown
    head = (limit - 3) // 2
    return f"{shown[:head]}...{shown[head + 3 - limit :]}"


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in pixels, in DejaVu Sans of that size."""
    return size * sum(map(_advance, text))


def fit(text: str, width: float, size: float) -> str:
    """Shorten text to a width in pixels; the middle is cut, because the ends of names tell them apart."""
    if text_width(text, size) <= width:
        return text
    least, most = 0, len(text)  # characters that are kept, by bisection
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text_width(_cut(text, middle), size) <= width else (least, middle - 1)
    return _cut(text, least)


def fit_all(labels: Sequence[tuple[str, float, float]]) -> list[str]:
    """Shorten labels (text, width, size); of those that come out equal, words are abbreviated, or the beginning cut."""
    found = [fit(*label) for label in labels]
    for shorten in (_abbreviated, _window):
        alike: dict[str, set[str]] = defaultdict(set)
        for short, (text, *_) in zip(found, labels, strict=True):
            alike[short].add(text)
        for n, (short, label) in enumerate(zip(found, labels, strict=True)):
            if len(alike[short]) > 1:
                found[n] = shorten(*label, alike[short])
    return found


def _abbreviated(text: str, width: float, size: float, _: Collection[str]) -> str:
    """Abbreviate words from the left, but a kind in front and the last word: ``b.e.l.0.a.s.query.weight``."""
    words, short = list(_WORD.finditer(text))[:-1], text
    for count in range(1, len(words) + 1):
        parts, at = [], 0
        for word in words[:count]:
            parts += [text[at : word.start()], word[0][0]]
            at = word.end()
        short = "".join([*parts, text[at:]])
        if text_width(short, size) <= width:
            return short
    while text_width(f"{short}..", size) > width:
        short = short[:-1]
    return f"{short}.."


def _window(text: str, width: float, size: float, alike: Collection[str]) -> str:
    """Leave out the beginning that labels have in common."""
    shortest = min(map(len, alike))
    begin = max(next((n for n in range(shortest) if len({other[n] for other in alike}) > 1), shortest) - 2, 0)
    end = len(text)
    while end > begin + 2 and text_width(f"..{text[begin:end]}..", size) > width:
        end -= 1
    return f"..{text[begin:end]}{'..' if end < len(text) else ''}"


def _cut(text: str, kept: int) -> str:
    head = kept // 3
    return f"{text[:head]}..{text[len(text) - (kept - head) :]}"


@functools.cache
def _advance(character: str) -> float:
    """Return the width of a character in units of the font size; 1.2 where the font lacks it."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    if not font.get_char_index(ord(character)):
        return 1.2
    font.set_size(100, 72)
    return float(font.load_char(ord(character)).linearHoriAdvance) / 6_553_600


def _has_glyph(character: str) -> bool:
    if character.isascii():
        return True
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT)).get_char_index(ord(character)) != 0


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def xml_safe(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)


def describe_node(graph_view: GraphView, node: Node) -> str:
    """Return the tooltip of a node: its target, provenance, shape, edit and source, a line each."""
    lines = [f"{node.name}: {node.target}"]
    what = node.op_and_argument if node.role == "placeholder" else f"{node.module_call}/{node.op}"
    lines.append(f"{what}, {node.lane}")
    if node.shape or node.dtype:
        lines.append(f"[{node.shape}] {node.dtype}")
    if node.edit >= 0:
        edit = graph_view.edits[node.edit]
        lines.append(f"inserted: {edit.text} at {edit.site}")
    elif node.mark:
        lines.append("inserted: carries records")
    return xml_safe("\n".join([*lines, *([node.source] if node.source else [])]))

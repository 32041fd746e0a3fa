"""Fonts and text of matplotlib figures: user text is not parsed, the font is the one that comes with matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

FONT = "DejaVu Sans"
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


def _has_glyph(character: str) -> bool:
    if character.isascii():
        return True
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(FONT)).get_char_index(ord(character)) != 0


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

"""DOT source for Graphviz: texts and attributes that it accepts whatever they contain."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

import graphviz

from gradrewrite.viz._graph_view import shorten, xml_safe

_LONGEST = 3000  # characters of an attribute: Graphviz reads at most 16 KiB, escapes take several bytes


def plain_label(text: str, width: int) -> str:
    """Return a label of at most ``width`` characters that Graphviz does not parse."""
    label: str = graphviz.nohtml(graphviz.escape(shorten(xml_safe(text), width)).replace("\n", "\\n"))
    return label


def html_text(text: str) -> str:
    """Return text as a part of an HTML-like label."""
    return html.escape(xml_safe(text))


def tooltip(text: str) -> str:
    """Return a tooltip, shortened to what Graphviz reads."""
    return _escaped(shorten(text, _LONGEST))


def data_attributes(data: Mapping[str, str]) -> dict[str, str]:
    """Return data as attributes ``data_name``; a long list of words continues in ``data_name_2``."""
    return {key: text for name, value in data.items() for key, text in _pieces(f"data_{name}", value)}


def _escaped(text: str) -> str:
    """Escape text, as the subclass of ``str`` that graphviz never takes for HTML."""
    escaped: str = graphviz.escape(xml_safe(text))
    return escaped


def _pieces(name: str, value: str) -> Iterator[tuple[str, str]]:
    words, number = value.split(" "), 1
    while words:
        count, length = 0, 0
        while count < len(words) and (not count or length + len(words[count]) < _LONGEST):
            length += len(words[count]) + 1
            count += 1
        text = shorten(" ".join(words[:count]), _LONGEST)
        yield name if number == 1 else f"{name}_{number}", _escaped(text)
        words, number = words[count:], number + 1

"""The color theme of every drawing: scenes, Graphviz, the page, and curves."""

from __future__ import annotations

INK = "#1f2933"  # text
DETAIL = "#495561"  # second lines of boxes
FAINT = "#6b7785"  # notes
PAPER = "#ffffff"
PANEL = "#fcfdfe"  # side panel of the page
HEADER = "#f8fafc"
LINE = "#a9b4c0"  # edges and borders of boxes
BORDER = "#d5dde5"  # borders of frames
BAND = "#eef2f6"  # frames of modules
PILL = "#f4f6f8"  # placeholders and outputs
PILL_EDGE = "#cfd7df"
SAVED = "#9dbad6"  # values saved for the backward
INSERTED, INSERTED_EDGE = "#ffd8a8", "#d9480f"
RECORDS = "#e6e1f5"  # nodes that pack records
CUT = "#c92a2a"  # the root cause, replaced edges, and non-finite values of curves
NOT_FINITE = "#fa5252"  # fill of sites with a non-finite value
ACCENT = "#1971c2"  # focus, search hits and curves of the page
SELECTED = "#0b7285"


def css_variables() -> str:
    """Return the theme as CSS variables: ``--inserted-edge`` for ``INSERTED_EDGE``."""
    colors = {name.lower().replace("_", "-"): value for name, value in globals().items() if name.isupper()}
    return f":root {{ {' '.join(f'--{name}: {value};' for name, value in colors.items())} }}"

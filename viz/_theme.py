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
INSERTED, INSERTED_EDGE = "#ffe8cc", "#c2570c"
RECORDS = "#e6e1f5"  # nodes that pack records
REPLACED = "#7048a8"  # edges that an edit replaced
NOT_FINITE = "#e03131"  # NaN, infinities, and the op that made the first; nothing else is red
NO_DATA = "#dfe4e9"  # what was not recorded
SOUND = "#2b8a3e"  # verdict of a healthy run
ACCENT = "#1864ab"  # focus, search hits
SELECTED = "#0b7285"
WEAK, STRONG = "#eaf3fb", "#5b9bd0"  # ends of the only color scale

_DARK = {
    "INK": "#e3e9ef",
    "DETAIL": "#b4c0cc",
    "FAINT": "#8b98a6",
    "PAPER": "#14191f",
    "PANEL": "#181e25",
    "HEADER": "#1b222a",
    "LINE": "#566270",
    "BORDER": "#323c47",
    "BAND": "#1f2730",
    "PILL": "#202932",
    "PILL_EDGE": "#3c4854",
    "SAVED": "#44688c",
    "INSERTED": "#43301c",
    "INSERTED_EDGE": "#f0995a",
    "RECORDS": "#312c46",
    "REPLACED": "#b79ae6",
    "NOT_FINITE": "#f25c5c",
    "NO_DATA": "#39434d",
    "SOUND": "#51b866",
    "ACCENT": "#6fb1ec",
    "SELECTED": "#3bb3c9",
    "WEAK": "#1c2c3b",
    "STRONG": "#2d6da6",
}
STOPS = 9  # of the color scale


def palette(weak: str = WEAK, strong: str = STRONG) -> list[str]:
    """Return the color scale, from weak to strong."""
    ends = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in (weak, strong)]
    shares = [number / (STOPS - 1) for number in range(STOPS)]
    return [f"#{''.join(f'{round(a + (b - a) * share):02x}' for a, b in zip(*ends, strict=True))}" for share in shares]


def css_variable(name: str) -> str:
    """Return a color of the theme as CSS: ``var(--inserted-edge)``."""
    return f"var(--{name.lower().replace('_', '-')})"


def css_variables() -> str:
    """Return the theme as CSS variables, light and dark: ``--inserted-edge``; ``--s0`` to ``--s8`` are the scale."""
    light = {name: value for name, value in globals().items() if name.isupper() and name in _DARK}
    scheme = "color-scheme: light dark;"
    return (
        f":root {{ {scheme} {_declared(light)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_declared(_DARK)} }} }}"
    )


def _declared(colors: dict[str, str]) -> str:
    named = colors | {f"S{n}": color for n, color in enumerate(palette(colors["WEAK"], colors["STRONG"]))}
    return " ".join(f"{css_variable(name)[4:-1]}: {value};" for name, value in named.items())

"""Tables as HTML, and pages of tables."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from gradrewrite._utils.files import written_whole

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif }}
body {{ margin: 2rem auto; max-width: 90rem }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }} caption {{ text-align: left }}
th, td {{ text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #8884; overflow-wrap: anywhere }}
tr[data-group=equal] {{ opacity: .6 }} tr[data-group=first] {{ background: #e6550d33 }}
</style><h1>{title}</h1>{body}</html>
"""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str, groups: Sequence[str] = ()) -> str:
    """A table as HTML, with a caption; the first cell of a row is its head, its group the attribute ``data-group``."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    marks = [f' data-group="{html.escape(group)}"' for group in groups] or [""] * len(rows)
    body = "".join(
        f'<tr{mark}><th scope="row">{html.escape(first)}</th>'
        f"{''.join(f'<td>{html.escape(cell)}</td>' for cell in rest)}</tr>"
        for mark, (first, *rest) in zip(marks, rows, strict=True)
    )
    top = f"<caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"


def write_table_page(path: str | os.PathLike[str], title: str, tables: str, text: str | None = None) -> str:
    """Write ``path.html``, a page of tables with a text behind them; return its path."""
    body = tables if text is None else f"{tables}<pre>{html.escape(text)}</pre>"
    written = f"{os.fspath(path).removesuffix('.html')}.html"
    with written_whole(written) as part:
        part.write_text(_PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return written

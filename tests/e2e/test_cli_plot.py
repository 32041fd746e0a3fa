"""The command line on curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradrewrite import viz

from models.shell import Shell

LOSS = '{"step": %d, "records": {"loss@run": %d}}\n'
STEP = '{"step": %d, "records": {"max_abs@error:0": %s, "clipped@error:0": %d, "limit@error:0": 0.1}}\n'


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ending", "check"), [("png", is_png), ("svg", lambda p: "<svg" in p.read_text())])
@pytest.mark.pure
def test_plot(shell: Shell, ending: str, check: Callable[[Path], bool]) -> None:
    Path("run.jsonl").write_text(STEP % (0, "0.2", 1) + STEP % (1, "0.01", 0))
    out = shell.folder / f"curves.{ending}"
    assert shell.run("plot", "run.jsonl", "--out", str(out)) == (0, f"{out}\n", "")
    assert check(out)


@pytest.mark.slow
def test_plot_titles_the_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.jsonl").write_text(STEP % (0, "0.2", 1))
    titles = []
    plot = viz.plot

    def watched(source: Path, **settings: Any) -> viz.Curves:
        titles.append(plot(source, **settings).title)
        return plot(source, **settings)

    monkeypatch.setattr(viz, "plot", watched)
    assert shell.run("plot", "run.jsonl") == (0, "curves.png\n", "")
    assert titles == ["run.jsonl"]


@pytest.mark.pure
def test_plot_against_several_runs(shell: Shell) -> None:
    for name in ("run.jsonl", "plain.jsonl", "other.jsonl"):
        Path(name).write_text('{"step": 0, "records": {"loss@run": 1.0}}\n')
    words = ("plot", "run.jsonl", "--baseline", "plain.jsonl", "other.jsonl", "--out", "curves.svg")

    assert shell.run(*words) == (0, "curves.svg\n", "")
    assert shell.run("report", *words[1:-1], "r.html") == (0, "r.html\n", "")
    page = Path("r.html").read_text()
    assert all(f'"name":"{name}"' in page for name in ("this run", "plain.jsonl", "other.jsonl"))


def test_plot_against_a_baseline(shell: Shell) -> None:
    for name, count in (("run", 2), ("plain", 3)):
        Path(f"{name}.jsonl").write_text("".join(LOSS % (n, n) for n in range(count)))
    words = ("plot", "run.jsonl", "--baseline", "plain.jsonl", "--out", "curves.svg")
    assert shell.run(*words) == (0, "curves.svg\n", "")
    text = Path("curves.svg").read_text()
    assert "<!-- run.jsonl -->" in text  # matplotlib writes what the glyphs spell
    assert "<!-- plain.jsonl -->" in text
    assert "cannot read none.jsonl: No such file" in shell.refused("plot", "run.jsonl", "--baseline", "none.jsonl")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("none.jsonl",), "cannot read none.jsonl: No such file or directory; give a file of monitor.to_jsonl"),
        (("bad.jsonl",), "bad.jsonl, line 1: wanted one JSON object"),
        (("run.jsonl", "--out", "x.html"), "--out x.html: the ending says the format; use one of .png, .svg, .pdf"),
        (("run.jsonl", "--out", "/dev/null/x.png"), "cannot write /dev/null/x.png: File exists"),
        ((".",), "cannot read .: Is a directory"),
    ],
)
@pytest.mark.pure
def test_plot_refuses(shell: Shell, words: tuple[str, ...], wanted: str) -> None:
    Path("bad.jsonl").write_text("step 1\n" * 2)
    Path("run.jsonl").write_text(STEP % (0, "0.2", 1))
    assert wanted in shell.refused("plot", *words)

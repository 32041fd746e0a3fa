"""The notebooks of ``docs/tutorials``: they run, print what is stored, and read as the style guide asks.

``python tests/e2e/test_tutorials.py`` runs them, or those that are named, and stores the outputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # as conftest.py does, where this runs as a program

from helpers import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
SECONDS = 120
KILOBYTES = 60
TOLERANCE = 0.05  # of figures, which other processors round otherwise
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
CELL_FILE = re.compile(r"\b\d+\.py:")  # the file of a cell, numbered by ipykernel
MACHINE = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|usr|var|Users)\b")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"]


def text_of(part: str | list[str]) -> str:
    return part if isinstance(part, str) else "".join(part)


def printed(cell: dict[str, Any]) -> str:
    return "".join(text_of(out.get("text", "")) for out in cell.get("outputs", ()) if out["output_type"] == "stream")


def prose(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        if cell["cell_type"] == "markdown":
            yield from re.split(r"\n\s*\n", text_of(cell["source"]).strip())


def run(path: Path, folder: Path) -> Any:
    """Run a notebook in a folder; return it with new outputs."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, resources=where
    ).execute()
    return notebook


def check_same(got: str, wanted: str) -> None:
    """Words are equal, and figures up to the tolerance."""
    ours, theirs = (CELL_FILE.sub("cell.py:", text) for text in (got, wanted))
    assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
    figures = [float(figure) for figure in NUMBER.findall(ours)]
    assert figures == pytest.approx([float(figure) for figure in NUMBER.findall(theirs)], rel=TOLERANCE)


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.inductor
@each_notebook
def test_it_runs_and_prints_what_is_stored(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn" if path.stem == "own_action" else "torch")
    pytest.importorskip("accelerate" if path.stem == "nan_in_trainer" else "torch")
    start = time.monotonic()
    again = run(path, tmp_path)
    assert time.monotonic() - start < SECONDS
    for cell, stored in zip(again.cells, read(path), strict=True):
        if "varies" not in cell.metadata.get("tags", ()):
            check_same(printed(cell), printed(stored))


@pytest.mark.pure
def test_the_three_tutorials_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["exploding_rnn", "nan_in_trainer", "own_action"]


@pytest.mark.pure
@each_notebook
def test_outputs_are_stored(path: Path) -> None:
    code = [cell for cell in read(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(
        cell["outputs"] for cell in code if re.search(r"^\s*(print|display)\(|\.legend\(\);", cell["source"][-1])
    )
    assert any(cell["outputs"] for cell in code)
    outputs = [out for cell in code for out in cell["outputs"]]
    assert not [out for out in outputs if out["output_type"] == "error"]
    for data in (out.get("data", {}) for out in outputs):
        assert all(len(text_of(value)) * 3 / 4 < KILOBYTES * 1024 for name, value in data.items() if "png" in name)
        assert all(len(text_of(value)) < KILOBYTES * 1024 for name, value in data.items() if "png" not in name)
    assert not re.search(r"Traceback|Warning\b", "".join(map(printed, code)))


@pytest.mark.pure
@each_notebook
def test_nothing_of_a_machine_is_in_it(path: Path) -> None:
    cells = read(path)
    shown = "\n".join([text_of(cell["source"]) + printed(cell) for cell in cells])
    shown += "".join(
        text_of(value)
        for cell in cells
        for out in cell.get("outputs", ())
        for name, value in out.get("data", {}).items()
        if "png" not in name
    )
    assert MACHINE.findall(shown) == []
    assert not [cell for cell in cells if set(cell["metadata"]) - {"tags"}]


@pytest.mark.pure
@each_notebook
def test_it_reads_well(path: Path) -> None:
    cells = read(path)
    paragraphs = list(prose(cells))
    headings = [text for text in paragraphs if text.startswith("#")]
    assert headings[0].startswith("# ")
    assert len(headings) >= 5
    assert all(heading.startswith("## ") for heading in headings[1:])
    assert max(len(text_of(cell["source"]).splitlines()) for cell in cells if cell["cell_type"] == "code") <= 25


class _Loaded(HTMLParser):
    """Addresses of what a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" else given.get("src")
        if tag != "a" and re.match(r"(?:https?:)?//", address or ""):
            self.found.append(f"{tag} {address}")


@pytest.mark.slow
@pytest.mark.pure
def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs_jupyter", reason="mkdocs-jupyter is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    pages = [tmp_path / "tutorials" / path.stem / "index.html" for path in NOTEBOOKS]
    for page in pages:
        text, parser = page.read_text(), _Loaded()
        parser.feed(text)
        assert parser.found == []
        assert re.findall(r"cdnjs[^\"]*|unpkg[^\"]*|jsdelivr[^\"]*|@import[^;]*|url\([\"']?(?:https?:)?//", text) == []
        for address in re.findall(r'<a href="(\.\.[^"]*)"', text):
            target, _, anchor = address.partition("#")
            linked = (page.parent / target / "index.html").read_text()
            assert not anchor or f'id="{anchor}"' in linked


def store(path: Path) -> None:
    """Run a notebook, and store its outputs without what differs from run to run."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = run(path, Path(folder))
    for cell in notebook.cells:
        for out in cell.get("outputs", ()):
            if any(name.startswith("image/") for name in out.get("data", {})):
                out["data"].pop("text/plain", None)
    pytest.importorskip("nbformat").write(notebook, path)


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        if notebook_path.stem in sys.argv[1:] or len(sys.argv) == 1:
            store(notebook_path)

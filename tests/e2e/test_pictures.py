"""The pictures of README and docs: the program that makes them, and the links to them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import matplotlib.font_manager  # noqa: F401 - which may say on stderr, once, that it makes its list of fonts
import pytest
from PIL import Image

from helpers import ROOT

PICTURES = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SHOWN = re.compile(r"!\[[^\]]+\]\(([^)\s]+)\)")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def program() -> Iterator[ModuleType]:
    name = "make_pictures"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.mark.slow
def test_pictures_of_one_model(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--out", str(tmp_path / "new"), "--only", "regression", "--no-page"]) == 0

    out, err = capsys.readouterr()
    names = ["regression_overview.svg", "regression_ladder.svg", "regression_curves.png"]
    assert out.splitlines() == [str(tmp_path / "new" / name) for name in names]
    assert "no pictures" not in err
    assert all((PICTURES / name).exists() for name in names)
    ladder = ET.parse(tmp_path / "new" / names[1]).getroot()
    assert sum(e.get("data-edit") is not None for e in ladder.iter()) == 6
    assert "median factor: 1" in "".join(ladder.itertext())
    with Image.open(tmp_path / "new" / names[2]) as curves:
        assert (curves.mode, curves.width) == ("P", 1800)
        assert curves.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.pure
def test_the_most_frequent_colors_stay_as_they_are(program: ModuleType, tmp_path: Path) -> None:
    image = Image.new("RGB", (300, 3))
    image.putdata([(n % 300, 7, 0) if n < 300 else (255, 255, 255 - n % 2) for n in range(900)])  # 302 colors
    image.save(tmp_path / "x.png")
    program.shrink(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as small:
        back = small.convert("RGB")
    assert [back.getpixel((n, 2)) for n in (0, 1)] == [(255, 255, 255), (255, 255, 254)]
    assert len(back.getcolors() or []) == 256


@pytest.mark.pure
def test_long_pictures_are_cut_off(program: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "long.svg"
    box = '<g transform="translate(5 {})"><rect x="0" y="0"/></g>'
    line = '<path d="M1 {}C1 500 3 {} 4 999"/>'
    parts = [box.format(10), box.format(101), line.format(3, 4), line.format(600, 700), '<text y="120">below</text>']
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="50" height="900"><g>{"".join(parts)}</g></svg>')
    program.crop(path, 100)

    root = ET.parse(path).getroot()
    assert (root.get("height"), root.get("viewBox")) == ("100", "0 0 50 100")
    assert [e.tag.removeprefix(SVG) for e in root.iter()] == ["svg", "g", "g", "rect", "path"]
    text = path.read_text()
    program.crop(path, 100)
    assert path.read_text() == text


@pytest.mark.parametrize("missing", ["transformers", "playwright.sync_api"])
@pytest.mark.pure
def test_what_is_missing_is_said(
    program: ModuleType,
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing != "transformers":
        monkeypatch.setattr(program, "draw", lambda trained, folder: ["drawn"])
        monkeypatch.setattr(program, "EXAMPLES", {"bert": lambda: None})
    assert program.main(["--out", str(tmp_path), "--only", "bert"]) == 0

    out, err = capsys.readouterr()
    what, drawn = ("of bert", "") if missing == "transformers" else ("of the page", "drawn\n")
    assert err.startswith(f"no pictures {what}: ")
    assert err.count("\n") == 1
    assert out == drawn


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.pure
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINKS.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.pure
def test_pictures_are_shown_and_small() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in SHOWN.findall(page.read_text())}
    kept = {*PICTURES.iterdir(), *(ROOT / "docs" / "benchmarks").iterdir()}
    assert shown == kept
    assert max(path.stat().st_size for path in kept) < 300_000
    assert sum(path.stat().st_size for path in kept) < 2_000_000


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda p: p.name)
@pytest.mark.pure
def test_pictures_name_no_folder(path: Path) -> None:
    data = path.read_bytes()
    assert not re.search(rb'(?:file://|["\s>](?:/(?:home|root|tmp|usr|work)/))', data)

"""The command line on graphs and curves: draw, sites, plot."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import networkx as nx
import pytest
import torch
from rich.console import Console

import gradrewrite as gr
from gradrewrite.cli import main
from gradrewrite.cli.site_tree import site_tree

from models.clips import header_of
from models.gpt import Gpt
from models.shell import Shell

RED = "#e03131"
MODEL = ("m:make", "--input", "m:inputs")
CLIPPED = (*MODEL, "--policy", "m:policy")


@pytest.mark.broad
@pytest.mark.parametrize("view", [(), ("--view", "overview")])
def test_draw_views(shell: Shell, view: tuple[str, ...]) -> None:
    assert shell.run("draw", *CLIPPED, *view, "--out", "a.b.svg") == (0, "a.b.svg\n", "")
    root = ET.parse("a.b.svg").getroot()
    text = " ".join("".join(e.itertext()) for e in root.iter())
    attributes = [value for element in root.iter() for value in element.attrib.values()]
    assert any("clamp_min" in value.split() for value in attributes)
    assert f"{shell.module}:make" in text  # the title


def is_page(path: Path) -> bool:
    return path.read_text().startswith("<!DOCTYPE html>")


def is_json(path: Path) -> bool:
    return json.loads(path.read_text())["schema"] == "gradrewrite/graph"


def is_graphml(path: Path) -> bool:
    return nx.read_graphml(path).nodes["clamp_min"]["site"] == "error:0"


def is_dot(path: Path) -> bool:
    return path.read_text().startswith("digraph")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def is_pdf(path: Path) -> bool:
    return path.read_bytes().startswith(b"%PDF")


@pytest.mark.broad
@pytest.mark.parametrize(
    ("ending", "check"),
    [
        (".html", is_page),
        (".json", is_json),
        (".graphml", is_graphml),
        (".dot", is_dot),
        (".png", is_png),
        (".pdf", is_pdf),
    ],
)
def test_draw_formats(shell: Shell, ending: str, check: Callable[[Path], bool]) -> None:
    path = shell.folder / f"out{ending}"
    assert shell.run("draw", *CLIPPED, "--out", str(path)) == (0, f"{path}\n", "")
    assert check(path)
    assert sorted(p.name for p in shell.folder.glob("out*")) == [path.name]


def test_draw_makes_a_page_by_default(shell: Shell) -> None:
    assert shell.run("draw", *MODEL) == (0, "backward.html\n", "")
    assert is_page(shell.folder / "backward.html")


@pytest.mark.broad
@pytest.mark.parametrize(
    "words",
    [
        ("m:make", "--input", "m:named"),
        ("m:model", "--input", "m:inputs"),
        ("m:make", "--input", "m:inputs", "--policy", "m:policy"),
        ("m:transformed", "--input", "m:inputs"),
    ],
)
def test_models_and_inputs_are_made_or_taken(shell: Shell, words: tuple[str, ...]) -> None:
    status, out, err = shell.run("sites", *words)
    assert (status, err) == (0, "")
    assert out.endswith("10 of 10 sites\n")


RECORDS = '{"max_abs@error:0": %s, "clipped@error:0": %d, "limit@error:0": 0.1}'
STEP = '{"step": %d, "graphs": 0, "records": ' + RECORDS + "}\n"
HEADER = header_of(("max_abs@error:0", "clipped@error:0", "limit@error:0"))


@pytest.mark.slow
def test_colors_of_a_run(shell: Shell) -> None:
    Path("run.jsonl").write_text(HEADER + STEP % (0, "0.2", 1) + STEP % (1, "0.01", 0))
    run = ("draw", *CLIPPED, "--run", "run.jsonl")
    assert shell.run(*run, "--out", "rate.svg")[0] == 0
    assert "error:0 \u00b7 50 %" in Path("rate.svg").read_text()
    assert shell.run(*run, "--color-by", "largest error", "--out", "size.svg")[0] == 0
    assert "error:0: largest absolute value: 0.2" in Path("size.svg").read_text()
    assert shell.run(*run, "--out", "page.html")[0] == 0
    assert '"steps":[0,1]' in Path("page.html").read_text()
    Path("run.jsonl").write_text(HEADER + STEP % (0, '"Infinity"', 1))
    assert shell.run(*run, "--color-by", "largest error", "--out", "inf.svg")[0] == 0
    assert f"fill:{RED}" in Path("inf.svg").read_text()
    Path("run.jsonl").write_text("")
    assert shell.run(*run, "--out", "none.svg") == (0, "none.svg\n", "")
    shell_says = shell.refused(*run, "--color-by", "not finite")
    assert "color_by='not finite': the monitor has no records for that" in shell_says


@pytest.mark.broad
@pytest.mark.parametrize("order", ["before", "after"])
def test_sites_pattern(shell: Shell, order: str) -> None:
    model, *given = MODEL
    words = (model, "error:*", *given) if order == "before" else (model, *given, "error:*")
    status, out, err = shell.run("sites", *words)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if "error:" in line] == ["error:0", "error:1", "error:2"]
    assert out.endswith("3 of 10 sites\n")
    status, out, err = shell.run("sites", *words, "--json")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["site"] for row in rows] == ["error:0", "error:1", "error:2"]
    assert rows[1] == {
        "site": "error:1",
        "kind": "error",
        "name": "1",
        "call": 0,
        "module": "1",
        "op": "tanh",
        "output_of": ["1"],
        "shape": [5, 4],
        "dtype": "float32",
        "source": rows[1]["source"],
    }


@pytest.mark.broad
def test_sites_of_a_policy(shell: Shell) -> None:
    status, out, err = shell.run("sites", *CLIPPED)
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if ":" in line}
    assert "ClipByValue(0.1" in rows["error:0"]
    assert "Clip" not in rows["activation:0"]
    status, out, err = shell.run("sites", *CLIPPED, "--json")
    actions = {row["site"]: row["actions"] for row in json.loads(out)}
    assert actions["error:0"][0].startswith("ClipByValue(0.1")
    assert actions["activation:0"] == []
    status, out, err = shell.run("sites", *CLIPPED, "--tree")
    assert "<- ClipByValue(0.1" in out


@pytest.mark.broad
def test_memory(shell: Shell) -> None:
    status, out, err = shell.run("memory", *MODEL)
    assert (status, err) == (0, "")
    assert out.startswith("kept for the backward: 80 B, with the policy 80 B (100%)\n")
    assert out.endswith("# no saved tensor has a narrower form with an error of at most 2.00%\n")
    status, out, err = shell.run("memory", *MODEL, "--json")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)
    assert (row["name"], row["plain_bytes"], row["policy_bytes"]) == ("saved:1", 80, 80)
    assert "under 4096" in row["reason"]


def test_sites_tree(shell: Shell) -> None:
    status, out, err = shell.run("sites", *MODEL, "--tree")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "activation, error: 6 sites",
        "├── 0, 1  [5, 4] float32",
        "└── 2  [5, 2] float32",
        "gradient: 4 sites",
        "├── 0: weight [4, 3], bias [4]  float32",
        "└── 2: weight [2, 4], bias [2]  float32",
        "10 of 10 sites",
    ]
    status, out, err = shell.run("sites", *MODEL, "error:0", "--tree")
    assert (status, err) == (0, "")
    assert out.splitlines() == ["error: 1 site", "└── 0  [5, 4] float32", "1 of 10 sites"]
    with pytest.raises(SystemExit) as stop:
        shell.run("sites", *MODEL, "--tree", "--json")
    assert stop.value.code == 2


@pytest.mark.long
def test_a_model_of_twelve_blocks_fits_on_one_screen() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    sites = gr.transform(Gpt(12, 32, 2, 32, 16), []).trace(tokens, tokens).sites
    text = io.StringIO()
    Console(file=text, width=200).print(site_tree(sites), no_wrap=True, overflow="ellipsis")
    lines = text.getvalue().splitlines()

    assert len(sites) > 600
    assert len(lines) < 40
    assert any("blocks.[0-11] x 12  [2, 16, 32]" in line for line in lines)
    assert any("/scaled_dot_product_attention x 12  [2, 2, 16, 16]" in line for line in lines)


def test_sites_without_a_match(shell: Shell) -> None:
    for words in (("m:make", "error:3", "--input", "m:inputs"), (*MODEL, "error:3")):
        err = shell.refused("sites", *words)
        assert "no site matches 'error:3'; nearest: error:0, error:1, error:2" in err
    assert "got ''" in shell.refused("sites", "m:make", "", "--input", "m:inputs")
    assert "is followed by the number of a call, got 'x'" in shell.refused("sites", *MODEL, "error:0#x")


@pytest.mark.pure
def test_sites_takes_one_pattern(shell: Shell) -> None:
    with pytest.raises(SystemExit) as stop:
        shell.run("sites", *MODEL, "error:0", "error:1")
    assert stop.value.code == 2
    assert "unrecognized arguments: error:0 error:1" in shell.capture.readouterr().err


@pytest.mark.broad
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ("no_such_module_x:make", "--input", "m:inputs"),
            "the model: no module named 'no_such_module_x'; run",
        ),
        (("m:mak", "--input", "m:inputs"), "has no 'mak'; nearest: make"),
        (("m:make", "--input", "m:input"), "has no 'input'; nearest: inputs"),
        (("make", "--input", "m:inputs"), "the model is given as module:name, got 'make'"),
        (("m:boom", "--input", "m:inputs"), "boom() raised ValueError: two lines; call it in Python to see where"),
        (("m:five", "--input", "m:inputs"), "made a int, wanted a torch.nn.Module"),
        (("m:make", "--input", "m:boom"), "the input: "),
        (("m:make", "--input", "m:too_many"), "does not fit forward(input): too many positional arguments"),
        (("m:Frozen", "--input", "m:inputs"), "TraceError: nothing here needs a gradient"),
        (("m:Branches", "--input", "m:inputs"), "GraphBreakError: "),
        ((*MODEL, "--policy", "m:number"), "PolicyError: a policy is a function Site -> action, a rule (gr.on), or"),
        ((*MODEL, "--policy", "m:answers_five"), "PolicyError: "),
        ((*MODEL, "--policy", "m:raises"), "the policy raised RuntimeError: no way"),
        ((*MODEL, "--policy", "m:strange"), "no site matches 'error:9'; nearest sites: error:0"),
        ((*MODEL, "--policy", "m:nothing"), "the policy: "),
        (("m:transformed", "--input", "m:inputs", "--policy", "m:policy"), "leave out --policy"),
    ],
)
def test_what_cannot_be_loaded(shell: Shell, words: tuple[str, ...], wanted: str) -> None:
    for command in (("draw", "--out", "x.svg"), ("sites",)):
        assert wanted in shell.refused(command[0], *words, *command[1:])
    assert not Path("x.svg").exists()


def test_inputs_that_do_not_fit(shell: Shell) -> None:
    status, out, err = shell.run("sites", "m:make", "--input", "m:narrow")
    line = err.splitlines()[-1]  # torch logs the same error above
    assert (status, out) == (2, "")
    assert line.startswith(f"gradrewrite: '{shell.module}:make' cannot be traced with '{shell.module}:narrow': ")
    assert "got [5, 2] X [3, 4]" in line
    assert "the plain model fails too" in line


@pytest.mark.pure
def test_a_module_that_does_not_import(shell: Shell) -> None:
    Path("does_not_import.py").write_text("import torch\n1 / 0\n")
    err = shell.refused("sites", "does_not_import:make", "--input", "m:inputs")
    assert "importing 'does_not_import' failed: ZeroDivisionError: division by zero" in err


@pytest.mark.broad
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ("--out", "x.jpg"),
            "--out x.jpg: the ending says the format; use one of .svg, .png, .pdf, .dot, .html",
        ),
        (("--out", ".svg"), "--out .svg: the ending says the format"),
        (("--out", "/dev/null/x.svg"), "cannot write /dev/null/x.svg: File exists; choose another path with -"),
        (("--out", "/dev/null/x.json"), "cannot write /dev/null/x.json: File exists"),
        (("--run", "none.jsonl"), "cannot read none.jsonl: No such file or directory; give a file of monitor.to_jsonl"),
        (("--run", "bad.jsonl"), "bad.jsonl, line 1: wanted one JSON object"),
        (("--color-by", "not finite"), "the monitor has no records for that"),
        (("--out", "x.json", "--view", "overview", "--reshapes"), "without colors; leave out --view, --resh"),
        (("--out", "x.graphml", "--run", "empty.jsonl", "--records"), "leave out --run, --records"),
        (("--out", "x.json", "--color-by", "not finite"), "leave out --color-by"),
    ],
)
def test_draw_refuses(shell: Shell, words: tuple[str, ...], wanted: str) -> None:
    Path("bad.jsonl").write_text("step 1\n" * 2)
    Path("empty.jsonl").write_text("")
    before = sorted(shell.folder.iterdir())
    assert wanted in shell.refused("draw", *CLIPPED, *words)
    assert [p for p in sorted(shell.folder.iterdir()) if p.name != "__pycache__"] == before


@pytest.mark.parametrize("words", [("draw",), ("draw", "a:b"), ("sites", "a:b"), ("plot",), ("draw", "--view", "x")])
@pytest.mark.pure
def test_usage(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: gradrewrite")


@pytest.mark.broad
def test_reshaping_ops_on_request(shell: Shell) -> None:
    counts = []
    for more in ((), ("--reshapes",)):
        assert shell.run("draw", *CLIPPED, "--out", "x.svg", *more)[0] == 0
        counts.append(Path("x.svg").read_text().count("data-node="))
    assert counts[0] < counts[1]


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line(shell: Shell) -> None:
    Path("warns.py").write_text(
        f"import warnings\nimport {shell.module}\n\n\n"
        f"def make():\n    warnings.warn('two\\nlines')\n    return {shell.module}.make()\n"
    )
    status, out, err = shell.run("draw", "warns:make", *CLIPPED[1:], "--out", "x.svg")

    assert (status, out) == (0, "x.svg\n")
    assert err.splitlines() == ["gradrewrite: two lines"]

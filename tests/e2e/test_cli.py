"""The command line; the demo keeps the README's promises."""

from __future__ import annotations

import json
import math
import re
import resource
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gradrewrite import read_jsonl
from gradrewrite.cli import main

from models.clips import header_of


def cpu_seconds() -> float:
    """Of this process and of what it has run, C++ compilers among them."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.mark.sample(12)
@pytest.mark.inductor
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cpu_seconds()
    assert main(["demo", "--out", str(tmp_path)]) == 0
    seconds = cpu_seconds() - before
    done = capsys.readouterr()
    assert seconds < 240  # 60 with cold caches on an idle machine
    result = json.loads((tmp_path / "demo.json").read_text())

    runs = result["regression"]["runs"]
    assert [run["seed"] for run in runs] == list(range(8))
    for run in runs:
        assert any(math.isnan(loss) for loss in run["plain"][:5])
        first, *_, last = run["rewritten"]
        assert last < 5
        assert last < 0.01 * first
    assert {e["site"].partition(":")[0] for e in result["regression"]["edits"]} == {"gradient"}
    assert len(result["regression"]["edits"]) == 6

    (run,) = result["text"]["runs"]
    assert sum(run["rewritten"][-10:]) < 0.75 * sum(run["rewritten"][:10])
    assert any(math.isnan(loss) for loss in run["plain"])
    sites = [e["site"] for e in result["text"]["edits"]]
    assert sites[:2] == ["error:wh", "error:wh#1"]
    assert len(sites) == 49
    assert result["text"]["edits"][0]["nodes"]  # those of the one body of the loop
    assert re.search(r"layer=wh need clipping, max error=[\d.e-]+ avg error=[\d.e-]+\n", done.out)
    assert "error:wh x 49" in done.out
    assert "step/s" in done.err
    for half in ("regression", "text"):
        check_pictures(tmp_path / half, result[half]["edits"])
    check_comparison(tmp_path, run)


def check_comparison(out: Path, losses: dict[str, list[float]]) -> None:
    """Every file is explained and linked, and the peaks of both runs are in figures that come from the losses."""
    index, report = (out / "index.html").read_text(), (out / "text_report.html").read_text()
    linked = set(re.findall(r'(?:href|src)="([^"]+)"', index))
    assert linked == {path.name for path in out.iterdir()} - {"index.html"}
    curves = re.findall(r"<p>(Plain, the loss [^<]*)</p>\s*<img [^>]*src=\"(regression|text)_losses.svg\"", index)
    assert [name for _, name in curves] == ["regression", "text"]
    assert index.index("text_losses.svg") < index.index("<a href")  # the curves come before any list of links
    assert re.match(r"Plain, the loss is not finite from step [1-4] on; clipped, it goes from ", curves[0][0])
    assert re.match(r"Plain, the loss is not finite from step \d+ on; clipped, it goes from ", curves[1][0])
    for page in (index, report):
        assert f"The loss of this run peaked at {max(losses['rewritten']):.4g} " in page
        assert "This run trains and the baseline does not." in page
    for name in ("plain", "rewritten"):
        steps = read_jsonl(out / f"text_{name.replace('rewritten', 'clipped')}.jsonl")
        assert [step.records["loss@run"] for step in steps] == pytest.approx(losses[name], nan_ok=True)
        assert all(len(step.clips) == (49 if name == "rewritten" else 0) for step in steps)
    assert ": this run trains and the baseline does not." in (out / "regression_report.html").read_text()


def check_pictures(path: Path, edits: list[dict[str, list[str]]]) -> None:
    page = path.with_suffix(".html").read_text()
    ladder = ET.parse(path.with_suffix(".svg")).getroot()
    shown = Counter(element.get("data-node") for element in ladder.iter())
    inserted = [node for edit in edits for node in edit["nodes"]]
    assert inserted
    for node in inserted:
        assert page.count(f'data-node="{node}"') == 1
        assert shown[node] == 1
    assert "<title>gradrewrite demo: " in page
    assert path.with_name(f"{path.name}_curves.png").read_bytes().startswith(b"\x89PNG")
    assert '<div id="charts">' in page


@pytest.mark.pure
def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--out" in err


LINE = '{"step": %d, "records": {"nonfinite@error:a": %d, "lr@optimizer:0": %s}}\n'


@pytest.mark.pure
def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(LINE % (0, 0, "0.1") + LINE % (1, 8, "0.1") + '{"step": 2, "rec')  # killed while it wrote

    assert main(["doctor", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "Values are not finite\n\nThe first value that is not finite is at error:a (8 elements), in step 1; "
    )
    assert "\nWhat to change: Right after such a step model.monitor.failure(anywhere=True) replays it" in out
    assert err == ""


@pytest.mark.pure
def test_doctor_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(LINE % (0, 0, "0.1"))

    assert main(["doctor", str(path)]) == 0
    assert capsys.readouterr().out.startswith(
        "Nothing to judge\n\nIn 1 step no norm and no clip was recorded; what was counted is finite.\n"
    )
    assert main(["doctor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    path.write_text("")
    assert main(["doctor", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Nothing to judge\n\nIn 0 steps no norm ")


@pytest.mark.pure
def test_doctor_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(LINE % (0, 0, "0.1") + LINE % (1, 8, '"NaN"'))

    assert main(["doctor", "--json", str(path)]) == 0
    (finding,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert list(finding) == ["kind", "site", "source", "factor", "step", "text", "figures", "suggestion"]
    assert (finding["kind"], finding["site"], finding["step"]) == ("faulty learning rate", "optimizer:0", 1)
    assert finding["figures"]["learning_rate"] == "NaN"


@pytest.mark.pure
def test_doctor_names_causes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    calls = {f"norm@error:cell{f'#{n}' if n else ''}": 2.0 ** (19 - n) for n in range(20)}
    rows = [{"step": n, "records": calls | {"loss@run": 2.0, "norm@gradient:w": 9.0**n}} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert main(["doctor", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "Exploding gradients\n\nIt does not learn: loss 2 -> 2 in 9 steps. Errors grow by a factor of 2 "
    )
    assert '\n[\n    gr.on("error:cell", ClipByNorm(2)),\n    gr.on("gradient:*", ClipByGlobalNorm(1.0)),\n]\n' in text
    assert "\n\nexploding: gradient:w grows by a factor of 9 per step" in text
    assert main(["doctor", str(path), "--json"]) == 0
    cause, finding = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (cause["kind"], cause["site"], cause["source"], cause["step"]) == ("exploding", "error:cell", "", 0)
    assert cause["factor"] == pytest.approx(2.0)
    assert (finding["kind"], finding["site"], finding["factor"]) == ("exploding", "gradient:w", None)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "cannot read {path}: No such file or directory; give a file of monitor.to_jsonl"),
        (LINE % (0, 0, "0.1") + "step 1\n", "{path}, line 2: wanted one JSON object, got b'step 1"),
        ('{"step": 0, "records": {"a\\nb@c": null}}\n', "for 'a\\nb@c', got None; mend or remove the line"),
        ('"a\\nb"\n', "{path}, line 1: wanted {{"),
    ],
)
@pytest.mark.pure
def test_doctor_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, wanted: str) -> None:
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)

    for options in ([], ["--json"]):
        assert main(["doctor", str(path), *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert wanted.format(path=path) in err
        assert "monitor.to_jsonl" in err


@pytest.mark.pure
def test_doctor_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.pure
def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "gradrewrite" in capsys.readouterr().out


@pytest.mark.pure
def test_doctor_says_what_was_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    records = '{"norm@error:a": 1.0, "bound@error:a": 2.0}'
    path.write_text(header_of(json.loads(records)) + f'{{"step": 0, "graphs": 0, "records": {records}}}\n')

    assert main(["doctor", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in found] == ["not judged"] * 2
    assert [one["figures"]["needed"] for one in found] == [5, 20]
    assert main(["doctor", str(path)]) == 0
    assert "\n\nNot judged, for too few steps:\n  exploding: needs 5 steps" in capsys.readouterr().out

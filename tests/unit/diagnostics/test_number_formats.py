"""Remarks of the doctor on number formats, and exponents in tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import gradrewrite as gr
from gradrewrite._utils.exponent_counts import FIRST, ExponentCounts, split_exponents
from gradrewrite.cli import main
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.passes import Observe

from models.small import TwoLayers


def records(site: str, counts: dict[int, float], zero: float = 0.0, nan: float = 0.0) -> dict[str, float]:
    """Counts by exponent at a site."""
    named = {f"exponents_{n}@{site}": counts.get(FIRST + n, 0.0) for n in range(64)}
    return {**named, f"exponents_zero@{site}": zero, f"exponents_inf@{site}": 0.0, f"exponents_nan@{site}": nan}


@pytest.mark.pure
def test_doctor_says_what_formats_would_lose() -> None:
    row = {
        **records("error:one", {-30: 25.0, -10: 75.0}),
        **records("error:two", {-10: 100.0}),
        **records("activation:one", {-3: 9.0, 10: 1.0}),
        **records("gradient:w", {-3: 9.0}),
        "norm@error:one": 1.0,
    }
    remarks = examine([gr.Step(n, row) for n in range(3)]).verdict.remarks

    assert remarks[-3:] == (
        "Exponents of error x 2: 2^-30 .. 2^-10, median 2^-10; "
        "float16 would flush 12.50 %, at a loss scale of 2^24 it flushes 0.00 %; "
        "float8_e4m3fn would flush 12.50 %, at a loss scale of 2^17 it flushes 12.50 %; "
        "float8_e5m2 would flush 12.50 %, at a loss scale of 2^24 it flushes 0.00 %.",
        "Exponents of activation:one: 2^-3 .. 2^10, median 2^-3; "
        "float8_e4m3fn would overflow 10.00 %, at a scale of 2^-3 it flushes 0.00 %.",
        "Exponents of gradient:w: 2^-3 .. 2^-3, median 2^-3; no format loses any.",
    )


@pytest.mark.pure
def test_only_the_last_steps_count_and_nothing_without_exponents() -> None:
    old, new = (gr.Step(n, records("error:one", {e: 1.0})) for n, e in ((0, -40), (100, -5)))
    steps = [old, *(gr.Step(n, new.records) for n in range(1, 21))]

    assert [r for r in examine(steps).verdict.remarks if "Exponents" in r] == [
        "Exponents of error:one: 2^-5 .. 2^-5, median 2^-5; no format loses any."
    ]
    assert not any("Exponents" in r for r in examine([gr.Step(0, {"norm@error:one": 1.0})]).verdict.remarks)


@pytest.mark.pure
def test_tables_have_one_row_a_site() -> None:
    rows = [records("error:one", {-31: 1.0, -17: 3.0, -9: 2.0}, nan=n) for n in (1.0, 0.0)]
    run = last_run([gr.Step(n, {**row, "norm@error:one": 1.0}) for n, row in enumerate(rows)])
    shown = run._repr_html_()

    assert shown.count("<tr>") == 1 + 2
    cells = "".join(f"<td>{cell}</td>" for cell in ("2^-31 .. 2^-9, median 2^-17", "", "", "", "2", "1"))
    assert f'<th scope="row">exponents@error:one</th>{cells}' in shown


@pytest.mark.pure
def test_second_exponents_at_a_site_and_incomplete_ones() -> None:
    second = {k.replace("@", ".2@"): v for k, v in records("error:one", {0: 2.0}).items()}
    rest, found = split_exponents({**second, "exponents_0@error:two": 1.0, "norm@error:one": 1.0})

    assert rest == {"exponents_0@error:two": 1.0, "norm@error:one": 1.0}
    assert {address: str(counts) for address, counts in found.items()} == {
        "exponents.2@error:one": "2^0 .. 2^0, median 2^0"
    }


@pytest.mark.pure
def test_texts_without_numbers() -> None:
    nothing = (0.0,) * 64
    assert str(ExponentCounts(nothing, 3.0, 0.0, 0.0)) == "no finite number but 0"
    assert str(ExponentCounts(nothing, 0.0, 1.0, 0.0)) == "no finite number"


def test_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gr.transform(TwoLayers(), [gr.on("error:*", Observe("exponents")), gr.on("gradient:*", Observe("norm"))])
    for _ in range(3):
        (model(torch.randn(5, 4)).square().mean() * 1e-6).backward()
    path = tmp_path / "run.jsonl"
    model.monitor.to_jsonl(path)
    model.monitor.flush()
    sites = [site for site in model.explain().graphs[0].sites if site.kind == "error" and "/" not in site.name]

    assert main(["doctor", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"remark: Exponents of error x {len(sites)}: 2^-" in text
    assert "float8_e4m3fn would flush 100.00 %" in text
    assert "exponents_" not in str(model.monitor.table())
    assert str(model.monitor.table()).count("exponents@error:") == len(sites)
    assert math.isfinite(model.monitor.latest()["exponents_0@error:one"])

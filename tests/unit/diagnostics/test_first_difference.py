"""The first difference between two run logs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gradrewrite import Step
from gradrewrite._utils.fingerprints import with_whole_fingerprints
from gradrewrite.cli import main
from gradrewrite.diagnostics.first_difference import compare_logs, merged_order, relative_difference
from gradrewrite.ir.outputs import SiteOp
from gradrewrite.monitoring.writers import JsonLines

pytestmark = pytest.mark.pure

SITES = ("activation:a", "error:a", "activation:b", "error:b", "gradient:a.weight")
ORDER = ("activation:a", "activation:b", "error:b", "error:a", "gradient:a.weight")
OPS = (SiteOp("a", "a/linear", 'net.py:3 "x = self.a(x)"'), SiteOp("b", "b/relu", 'net.py:4 "x = self.b(x)"'))


def print_of(number: int, site: str) -> dict[str, float]:
    return {f"fingerprint_{n}@{site}": float(number >> 16 * n & 0xFFFF) for n in range(3)}


def steps(
    number: int = 4, changed: Mapping[tuple[int, str], tuple[int, float]] | None = None, *, prints: bool = True
) -> list[Step]:
    """Steps with a fingerprint (number) and a norm at each site; those of ``changed`` are others."""
    found = []
    for step in range(number):
        records: dict[str, float] = {"time@run": math.nan}
        for n, site in enumerate(SITES):
            bits, norm = (changed or {}).get((step, site), (1 << 40 | n, 1.0 + step))
            records |= (print_of(bits, site) if prints else {}) | {f"norm@{site}": norm}
        found.append(Step(step, records, (), OPS))
    return found


@pytest.mark.parametrize("prints", [True, False])
def test_equal_logs(prints: bool) -> None:
    found = compare_logs(steps(prints=prints), steps(prints=prints))
    assert found.is_equal
    assert (found.num_steps, found.num_sites) == (4, 5)
    assert str(found) == "no difference in 4 steps and 5 sites"


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("site", SITES)
def test_the_first_site_in_execution_order_is_named(step: int, site: str) -> None:
    later = ORDER[ORDER.index(site) :]
    changed = {(n, one): (9, 2.0) for n in range(step + 1, 4) for one in SITES}
    changed |= {(step, one): (7, 1.0 + step) for one in later}
    first = compare_logs(steps(), steps(changed=changed)).first
    assert first is not None
    assert (first.step, first.site, first.kind) == (step, site, "bits")
    assert [name for name, _ in first.growth] == list(later)
    assert (first.op, first.source) == next(((o.op, o.source) for o in OPS if site.endswith(f":{o.name}")), ("", ""))


@pytest.mark.parametrize("bit", range(48))
def test_each_bit_of_a_fingerprint_counts(bit: int) -> None:
    changed = {(2, "error:b"): ((1 << 40 | 3) ^ 1 << bit, 3.0)}
    first = compare_logs(steps(), steps(changed=changed)).first
    assert first is not None
    assert (first.step, first.site, first.error) == (2, "error:b", 0.0)


def test_without_a_tolerance_figures_beside_a_fingerprint_do_not_count_and_others_must_be_equal() -> None:
    """As the norms of two numbers of threads."""
    changed = {(1, "error:a"): (1 << 40 | 1, 2.0 + 1e-7)}
    assert compare_logs(steps(), steps(changed=changed)).is_equal
    first = compare_logs(steps(prints=False), steps(changed=changed, prints=False)).first
    assert first is not None
    assert (first.step, first.site, first.kind) == (1, "error:a", "values")
    assert first.error == pytest.approx(5e-8, rel=1e-2)


def test_a_tolerance_is_of_relative_differences() -> None:
    changed = {(n, "activation:b"): (n, (1.0 + n) * (1 + 1e-4 * 10**n)) for n in range(4)}
    others = steps(changed=changed)
    wanted = {2e-4: 1, 2e-3: 2, 2e-2: 3, 0.2: None}
    for tolerance, step in wanted.items():
        first = compare_logs(steps(), others, tolerance=tolerance).first
        assert (first.step if first else None) == step
        assert first is None or first.site == "activation:b"
    found = compare_logs(steps(), others).first
    assert found is not None
    assert [n for n, _ in found.steps] == [0, 1, 2, 3]
    assert [error for _, error in found.steps] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1 / 1.1], rel=0.02)


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 2.0, 0.5),
        (-1.0, 1.0, 2.0),
        (0.0, -0.0, 0.0),
        (0.0, 1e-30, 1.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_relative_difference(a: float, b: float, wanted: float) -> None:
    assert relative_difference(a, b) == relative_difference(b, a) == wanted


def test_what_only_one_has_is_said() -> None:
    short = [Step(s.step, {k: v for k, v in s.records.items() if "gradient" not in k}, (), OPS) for s in steps(3)]
    found = compare_logs(steps(5), short, names=("x", "y"))
    assert found.first is None
    assert not found.is_equal
    assert found.remarks == ("only in x: 2 steps, 3 to 4", "only in x: gradient:a.weight (from step 0)")
    assert compare_logs(short, steps(3)[1:]).remarks[0] == "only in the first: step 0"


def test_only_some_sites() -> None:
    changed = {(1, "activation:a"): (7, 1.0), (3, "gradient:a.weight"): (7, 1.0)}
    first = compare_logs(steps(), steps(changed=changed), sites="gradient:*").first
    assert first is not None
    assert (first.step, first.site) == (3, "gradient:a.weight")


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "message"),
    [
        (steps(), [], None, "no step with a common record"),
        (steps(), steps(), -1.0, ">= 0, got -1.0"),
        (steps(), steps(), math.nan, ">= 0, got nan"),
        ([Step(0, print_of(1, "error:a"))], [Step(0, print_of(1, "error:a"))], 0.1, "fingerprints have none: add norm"),
    ],
)
def test_refusals(a: Sequence[Step], b: Sequence[Step], tolerance: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_logs(a, b, tolerance=tolerance)


def test_orders_are_merged() -> None:
    assert merged_order("abc", "axbyc") == ["a", "x", "b", "y", "c"]
    assert merged_order("abc", "xyc") == ["x", "y", "a", "b", "c"]
    assert merged_order("", "xy") == ["x", "y"]


def test_sums_of_parts_are_one_number() -> None:
    whole = with_whole_fingerprints({**print_of((1 << 48) - 1, "error:a"), "norm@error:a": 2.0})
    assert whole == {"fingerprint@error:a": float((1 << 48) - 1), "norm@error:a": 2.0}
    parts = [print_of(n, "error:a") for n in ((1 << 48) - 1, 0xFFFF_FFFF, 5)]
    added = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert with_whole_fingerprints(added) == {"fingerprint@error:a": float(0xFFFF_FFFF + 4)}
    second = {name.replace("@", ".2@"): value for name, value in print_of(3, "error:a").items()}
    assert with_whole_fingerprints(second) == {"fingerprint.2@error:a": 3.0}


def write(path: Path, rows: Sequence[Step]) -> Path:
    lines = JsonLines(path)
    for row in rows:
        lines.write(row)
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, equal = (str(write(tmp_path / name, steps())) for name in ("a.jsonl", "b.jsonl"))
    changed = {(2, site): (7, 5.0) for site in ORDER[1:]}
    other = str(write(tmp_path / "c.jsonl", steps(changed=changed)))

    assert main(["diff", same, equal]) == 0
    assert capsys.readouterr().out == "no difference in 4 steps and 5 sites\n"
    assert main(["diff", same, other, "--html", str(tmp_path / "out.html")]) == 1
    out = capsys.readouterr().out
    wanted = 'first difference: step 2, activation:b, b/relu, net.py:4 "x = self.b(x)": the bits differ: fingerprint '
    assert out.startswith(f"{wanted}010000000002 and fingerprint 000000000007\n")
    assert "activation:b   0.4" in out
    assert "largest by step: 2: 0.4, 3: 0" in out
    page = (tmp_path / "out.html").read_text()
    assert "<td>fingerprint 010000000002</td><td>fingerprint 000000000007</td>" in page
    assert "net.py:4" in page
    assert main(["diff", same, other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert found["first"]["growth"] == [[site, 0.4] for site in ORDER[1:]]
    assert [found["first"][key] for key in ("step", "site", "op")] == [2, "activation:b", "b/relu"]
    assert main(["diff", same, other, "--tolerance", "0.5"]) == 0
    assert main(["diff", same, other, "--sites", "activation:a"]) == 0
    capsys.readouterr()
    for wrong in (["--tolerance", "-1"], ["--sites", "x:*"], ["--html", str(tmp_path / "a.jsonl" / "out.html")]):
        assert main(["diff", same, other, *wrong]) == 2
    assert main(["diff", same, str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err

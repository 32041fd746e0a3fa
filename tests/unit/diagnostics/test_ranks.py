"""Files of several ranks of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradrewrite import Step, viz
from gradrewrite.cli import main
from gradrewrite.diagnostics.ranks import examine_ranks, first_bad_of, read_ranks
from gradrewrite.monitoring import writers
from gradrewrite.monitoring.writers import JsonLines

pytestmark = pytest.mark.pure


def steps(bad: dict[int, str] | None = None, *, grows: bool = False) -> list[Step]:
    sites, wrong = ("error:a", "error:b", "gradient:a.weight"), bad or {}

    def value(n: int, site: str) -> float:
        return float("nan") if wrong.get(n) == site else (10.0**n if grows else 1.0)

    return [Step(n, {f"norm@{site}": value(n, site) for site in sites}) for n in range(8)]


def write(path: Path, run: list[Step], **further: object) -> str:
    path.parent.mkdir(exist_ok=True)
    rows = [
        further | {"step": s.step, "records": {k: v if v == v else "NaN" for k, v in s.records.items()}} for s in run
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_first_value_that_is_not_finite() -> None:
    runs = {0: steps({5: "error:a"}), 1: steps({3: "gradient:a.weight"}), 2: steps({3: "error:b"})}
    first = first_bad_of(runs)
    assert first is not None
    # Errors of step 3 are made before gradients.
    assert (first.rank, first.step, first.site, first.also) == (2, 3, "error:b", (1,))
    (finding,) = examine_ranks(runs).faults
    assert finding.kind == "non-finite"
    assert finding.text.startswith(
        "The first value that is not finite was on rank 2 (rank 1 in the same step): error:b in step 3. "
    )
    assert finding.figures["rank"] == 2
    assert first_bad_of({0: steps(), 1: steps()}) is None


def test_findings_name_their_ranks() -> None:
    some = examine_ranks({0: steps(), 1: steps(grows=True), 2: steps()}).faults
    assert some
    assert all(finding.text.startswith("Rank 1: ") for finding in some)
    every = examine_ranks({0: steps(grows=True), 1: steps(grows=True)}).faults
    assert [finding.kind for finding in every] == [finding.kind for finding in some]
    assert all(finding.text.startswith("All ranks: ") for finding in every)
    two = examine_ranks({0: steps(grows=True), 1: steps(grows=True), 3: steps()}).faults
    assert all(finding.text.startswith("Ranks 0, 1: ") for finding in two)


def test_the_rank_where_it_went_wrong_first_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {0: steps({6: "error:a"}), 1: steps(), 2: steps({3: "error:b"})}
    paths = [write(tmp_path / f"run.rank{rank}.jsonl", run) for rank, run in runs.items()]

    health = examine_ranks(runs)
    assert health.verdict.text.startswith("The first value that is not finite was on rank 2: error:b in step 3. ")
    assert [(one.kind, one.figures["rank"], one.figures["ranks"]) for one in health.faults] == [("non-finite", 2, 2)]
    assert main(["doctor", *paths]) == 0
    assert f"\n\n{health.verdict.text}\nWhat to change: " in capsys.readouterr().out
    sound = examine_ranks({0: steps(), 1: steps()})
    assert sound.faults == ()
    assert sound.verdict.text.startswith("Rank 0: Nothing wrong so far: in 8 steps")


def test_ranks_are_in_the_names_of_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"run.rank{n}.jsonl", steps()[:n]) for n in (10, 2)]
    assert {rank: len(run) for rank, run in read_ranks(paths).items()} == {2: 2, 10: 8}
    plain = [write(tmp_path / name, steps()) for name in ("a.jsonl", "b.jsonl")]
    assert list(read_ranks(plain[:1])) == [0]
    with pytest.raises(ValueError, match=r"a\.jsonl has no rank.*--baseline"):  # two runs, not two ranks
        read_ranks(plain)
    with pytest.raises(ValueError, match=r"run\.rank2\.jsonl and .*run\.rank2\.jsonl are both of rank 2"):
        read_ranks([paths[1], paths[1]])
    low = [write(tmp_path / name, steps()) for name in ("lowrank8_a.jsonl", "lowrank8_b.jsonl")]
    with pytest.raises(ValueError, match=r"lowrank8_a\.jsonl has no rank"):
        read_ranks(low)


def test_ranks_are_in_the_lines(tmp_path: Path) -> None:
    """They come before names, which may be those of an experiment, and before the order of a shell (0, 1, 10, 2)."""
    paths = [write(tmp_path / str(n) / "run.rank3.jsonl", steps()[:n], rank=n) for n in (1, 10, 2)]
    assert {rank: len(run) for rank, run in read_ranks(paths).items()} == {1: 1, 2: 2, 10: 8}
    both = [write(tmp_path / folder / "run.jsonl", steps(), rank=1) for folder in ("a", "b")]
    with pytest.raises(ValueError, match=r"b.run\.jsonl and .*a.run\.jsonl are both of rank 1"):
        read_ranks(both)
    for wrong in (-1, True, "1", None):
        with pytest.raises(ValueError, match="line 1: wanted a whole number >= 0 as rank"):
            read_ranks([write(tmp_path / "wrong.jsonl", steps(), rank=wrong)])


def test_the_sink_writes_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (11, 2):
        monkeypatch.setattr(writers, "this_rank", lambda rank=rank: rank)
        sink = JsonLines(writers.path_of_rank(tmp_path / "run-{rank}.jsonl"))
        sink.write(Step(0, {"loss@run": float(rank)}))
    runs = read_ranks([tmp_path / "run-11.jsonl", tmp_path / "run-2.jsonl"])
    assert runs == {2: [Step(0, {"loss@run": 2.0})], 11: [Step(0, {"loss@run": 11.0})]}


def test_doctor_and_report_read_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / "run.rank0.jsonl", steps()), write(tmp_path / "run.rank1.jsonl", steps({2: "error:a"}))]
    assert main(["doctor", *paths]) == 0
    text = capsys.readouterr().out
    first = "The first value that is not finite was on rank 1: error:a in step 2. "
    assert text.startswith(f"2 ranks: 0, 1\n\nValues are not finite\n\n{first}")
    assert main(["doctor", "--json", *paths]) == 0
    assert json.loads(capsys.readouterr().out)[0]["figures"]["rank"] == 1
    assert main(["report", *paths, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "run.rank0.jsonl: rank 1 of 2 ranks" in page
    assert "was on rank 1: error:a in step 2" in page
    bad = viz.report(paths).health.first_bad
    assert bad is not None
    assert bad[:2] == ("error:a", 2)

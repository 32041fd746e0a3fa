"""Placed reports: order, clips, checks, and what is due."""

from __future__ import annotations

import pytest

from gradrewrite.ir.outputs import BackwardOutputs, ClipRecords, MeasuredTensor, Pack, Placed, SiteOp, in_order
from gradrewrite.ir.provenance import Anchor
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.ir.reports import Check, Kept, LogFigures, NormClip, Scalars, ValueClip
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure

SITE = Site("error", "a", module="net", op="linear", call=1)


def key(name: str, where: str = str(SITE)) -> RecordKey:
    return RecordKey.of(name, where)


NORM = Placed(
    NormClip("norm", key("norm"), key("bound"), is_wide=True),
    SITE,
    "ClipByNorm(max_norm=1.0)",
    "error:*",
    factor=key("factor"),
    bounds=((key("bound"), 1.0),),
)
LOGGED = LogFigures(key("max_abs"), key("mean_abs"), key("clipped"))
VALUE = Placed(
    ValueClip(key("norm_before"), key("norm_after"), key("share"), LOGGED), "step:group:default", factor=key("factor")
)
OBSERVED = Placed(
    Scalars(("zeros", "largest"), (key("zeros"), key("largest"))),
    SITE,
    every=3,
    tensor=MeasuredTensor({"zeros": "zeros"}, 10),
)
LATE = Placed(Check("nonfinite", key("nonfinite.2"), "skip"), SITE, seen=Anchor("mul_1", 7))
EARLY = Placed(Check("nonfinite", key("nonfinite"), "warn"), SITE, seen=Anchor("mul", 2))
KEPT = Placed(Kept("tensor", 0), SITE, every=4)


def names(keys: tuple[RecordKey, ...]) -> list[str]:
    return [found.name for found in keys]


def test_a_factor_stands_behind_its_norm_and_in_the_place_of_norms_around_a_clip() -> None:
    assert names(NORM.keys) == ["norm"]
    assert names(NORM.shown) == ["norm", "factor"]
    assert names(VALUE.keys) == ["norm_before", "norm_after", "share", "max_abs", "mean_abs", "clipped"]
    assert names(VALUE.shown) == ["factor", "share", "max_abs", "mean_abs", "clipped"]


def test_reports_stand_in_the_order_of_their_records() -> None:
    order = [key("nonfinite"), key("zeros"), key("largest"), key("norm")]

    assert in_order([KEPT, NORM, OBSERVED, EARLY], order) == (EARLY, OBSERVED, NORM, KEPT)


def test_outputs_are_read_from_placed_reports() -> None:
    packs = (Pack((key("nonfinite.2"), key("nonfinite")), 1, True), Pack((*NORM.keys, *OBSERVED.keys)))
    outputs = BackwardOutputs(packs, (NORM, OBSERVED, LATE, EARLY, KEPT), label="@1")

    assert outputs.checks == (EARLY, LATE)
    assert outputs.checked == {"warn": ((1,), ()), "skip": ((0,), ())}
    assert outputs.clips == (
        ClipRecords("error", "a@1", 1, "ClipByNorm(max_norm=1.0)", "error:*", NORM.report, key("factor")),
    )
    assert outputs.bounds == ((key("bound"), 1.0),)
    assert outputs.measured == {key("zeros"): OBSERVED.tensor}
    assert outputs.counts == {key("nonfinite"), key("nonfinite.2")}
    assert outputs.ops == (SiteOp("a@1#1", "net/linear", ""),)
    assert not outputs.logs
    assert outputs.undue(lambda every: every == 4) == {key("zeros"), key("largest")}
    assert outputs.undue(lambda every: every == 3) == frozenset()
    assert outputs.kept_keys(lambda every: every == 3) == [None]
    assert [(what, str(site)) for what, site, *_ in outputs.kept] == [("tensor", "error:a@1#1")]


def test_groups_are_clips_without_a_call() -> None:
    (clip,) = BackwardOutputs(placed=(VALUE,)).clips

    assert (clip.kind, clip.name, clip.call) == ("step:group", "default", 0)

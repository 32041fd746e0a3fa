"""The layout of the records that leave a backward graph: no two share a key or an element, none is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from gradrewrite.ir import editing, reports
from gradrewrite.ir.record_key import RecordKey
from gradrewrite.monitoring.step_record import GraphRecord
from gradrewrite.policy.actions import insertion_at
from gradrewrite.rewriting.forward_values import ForwardValues
from gradrewrite.rewriting.record_packing import RecordPacking
from gradrewrite.sites import Site

NAMES = st.sampled_from(["norm", "max_abs", "nonfinite", "bound", "limit", "largest", "norm.2", "x"])
SITES = [Site("error", "a"), Site("error", "a", call=1), Site("gradient", "a"), Site("activation", "a")]


@dataclass(frozen=True)
class Report:
    """What one action at one site reports: tensors of records, a bound that is a number, tensors that are kept."""

    site: Site
    names: tuple[tuple[str, ...], ...]
    num_kept: int
    skips: bool
    bound: tuple[str, float] | None
    is_double: tuple[bool, ...] = field(default=())


@st.composite
def all_reports(draw: Any) -> Report:
    site = draw(st.sampled_from(SITES))
    skips = site.kind != "activation" and draw(st.booleans())
    sizes = st.just(1) if skips else st.integers(1, 4)  # a check reports one count
    names = tuple(
        tuple("nonfinite" if skips else draw(NAMES) for _ in range(draw(sizes)))
        for _ in range(1 if skips else draw(st.integers(0, 3)))
    )
    bound = st.none() | st.tuples(st.sampled_from(["bound", "limit"]), st.floats(0, 9))
    is_double = tuple(draw(st.booleans()) for _ in names)
    return Report(site, names, draw(st.integers(0, 2)), skips, None if skips else draw(bound), is_double)


def reports_of(report: Report) -> list[reports.Report[reports.Leaf]]:
    found: list[reports.Report[reports.Leaf]] = []
    for n, names in enumerate(report.names):
        outputs = tuple(reports.Output(n, element) for element in range(len(names)))
        found.append(reports.Check(names[0], outputs[0], "skip") if report.skips else reports.Scalars(names, outputs))
    if report.bound is not None and not report.skips:
        name, number = report.bound
        found.append(reports.Scalars((name,), (reports.HostBound(number),)))
    kept = range(len(report.names), len(report.names) + report.num_kept)
    return [*found, *(reports.Kept("tensor", n) for n in kept)]


@given(st.lists(all_reports(), min_size=1, max_size=5))
def test_every_record_comes_out_at_its_own_key(given_reports: list[Report]) -> None:
    graph, mode, found = fx.Graph(), FakeTensorMode(), RecordPacking()
    inputs: list[Tensor] = []
    expected: dict[RecordKey, float] = {}
    keys: list[RecordKey] = []
    keys_of_reports: list[list[RecordKey]] = []
    kept: list[tuple[Site, Tensor]] = []
    placeholders: list[list[fx.Node]] = []
    for report in given_reports:
        own = []
        shapes = [(len(names),) if len(names) > 1 else () for names in report.names] + [(2,)] * report.num_kept
        for n, shape in enumerate(shapes):
            dtype = torch.float64 if n < len(report.names) and report.is_double[n] else torch.float32
            start = float(sum(t.numel() for t in inputs))
            size = torch.Size(shape).numel()
            inputs.append(torch.arange(start, start + size, dtype=dtype).reshape(shape))
            own.append(graph.placeholder(f"x{len(inputs)}"))
            with mode:
                own[-1].meta["val"] = torch.empty(shape, dtype=dtype)
        placeholders.append(own)
    graph.output(())
    rest = iter(inputs)
    for report, own in zip(given_reports, placeholders, strict=True):
        insertion = insertion_at(torch.relu, report.site)
        got = found.add(insertion, report.site, report.site, reports_of(report), own)
        values = [float(v) for _ in report.names for v in next(rest).flatten()]
        kept += [(report.site, next(rest)) for _ in range(report.num_kept)]
        assert len(got) == len(values)
        keys += got
        keys_of_reports.append(got)
        expected |= dict(zip(got, values, strict=True))
    layout, _ = found.pack_into(graph, ForwardValues(graph))
    editing.release(graph)
    graph.lint()
    outputs = fx.GraphModule({}, graph)(*inputs)
    tensors = list(outputs[: len(layout.packs)])

    bounds = [key for key, _ in layout.bounds]
    assert len({*keys, *bounds}) == len(keys) + len(bounds)
    assert all(RecordKey.parse(str(key)) == key for key in [*keys, *bounds])
    assert sorted(str(key) for pack in layout.packs for key in pack.keys) == sorted(map(str, keys))
    lengths = [len(pack.keys) + pack.has_verdict for pack in layout.packs]
    assert [tensor.numel() for tensor in tensors] == lengths
    assert GraphRecord(layout, tensors).values() == expected
    assert [site for _, site, *_ in layout.kept] == [site for site, _ in kept]
    assert all(torch.equal(a, b) for a, (_, b) in zip(outputs[len(tensors) :], kept, strict=True))
    skipping = {key for report, own in zip(given_reports, keys_of_reports, strict=True) if report.skips for key in own}
    for pack, tensor in zip(layout.packs, tensors, strict=True):
        counts = [expected[key] for key in pack.keys[: pack.num_skips]]
        assert {key for key in pack.keys if key in skipping} == set(pack.keys[: pack.num_skips])
        assert pack.has_verdict == bool(counts)
        if pack.has_verdict:
            assert tensor[-1] == float(max(counts) > 0)

"""Sums, tables and suggestions of ``Memory``, against figures counted by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from gradrewrite.diagnostics.memory import Memory, size_of
from gradrewrite.ir.memory import Forms, KeptTensor
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure

FULL, INT8, BF16 = 40_000, 10_100, 20_000


def site(module: str, op: str, *, is_output: bool = True) -> Site:
    """A saved site as the core names it."""
    name = module if is_output else f"{module}/{op}"
    inside = ((f"{module}/{op}", 0), (module, 0))
    return Site("saved", name, module, op, addresses=inside if is_output else ((name, 0), (module, 0)))


def memory(forms: Mapping[Site, Forms], *further: KeptTensor) -> Memory:
    rows = (*(KeptTensor(one, one.module, FULL, FULL) for one in forms), *further)
    sizes = sum(row.plain_bytes for row in rows), sum(row.policy_bytes for row in rows)
    return Memory(rows, *sizes, lambda _: forms)


def good(error: float = 0.01) -> Forms:
    return {"int8": (error, INT8), "bfloat16": (None, BF16)}


def bad(error: float = 0.1) -> Forms:
    return {"int8": (error, INT8), "bfloat16": (0.002, BF16)}


def test_sums_by_module() -> None:
    one, two = site("a", "linear"), site("b", "gelu")
    small = KeptTensor(two, "b", 30, 30, reason="each under 4096 bytes, and no site", count=3)
    stored = KeptTensor(one, "a", FULL, INT8, action="Store('int8')")
    rows = (stored, KeptTensor(two, "b", FULL, 0, FULL, "Offload()"), small)
    found = Memory(rows, 2 * FULL + 30, INT8 + 30, lambda _: {})

    assert found.by_module() == {"a": (FULL, INT8), "b": (FULL + 30, 30)}
    assert found.largest(1) == rows[:1]
    assert found.host_bytes == FULL
    assert found.largest_modules(1) == {"b": (FULL + 30, 30), "(1 others)": (FULL, INT8)}
    text = str(found)
    assert text.startswith("kept for the backward: 78.2 KiB, with the policy 9.89 KiB (13%), 39.1 KiB in host memory\n")
    words = " ".join(text.split())
    assert "saved:a 39.1 KiB 9.86 KiB Store('int8') " in words
    assert "saved:b 39.1 KiB 0 B Offload() (39.1 KiB in host memory) " in words
    assert words.endswith("3 tensors in b 30 B 30 B each under 4096 bytes, and no site")
    assert found._repr_html_().count("<table>") == 2


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")]
)
def test_sizes_as_text(count: int, text: str) -> None:
    assert size_of(count) == text


def test_one_rule_where_all_sites_agree() -> None:
    found = memory({site(f"layers.{n}", "linear"): good(0.01 + n / 1000) for n in range(3)}).suggestion()

    assert found == (
        "from gradrewrite.passes import Store\n\npolicy = [\n"
        "    # 117 KiB -> 29.6 KiB: 3 tensors, largest error 1.20% (saved:layers.2)\n"
        '    gr.on("saved:*", Store("int8")),\n]'
    )


def test_patterns_leave_out_what_would_lose_precision() -> None:
    """The layers' projections take int8, their norms bfloat16, and nothing touches what has no form."""
    forms: dict[Site, Forms] = {}
    for n in range(3):
        forms[site(f"layers.{n}.up", "linear")] = good()
        forms[site(f"layers.{n}.norm", "layer_norm", is_output=False)] = bad()
        forms[site(f"layers.{n}.act", "exp")] = {"int8": (math.nan, INT8), "bfloat16": (math.nan, BF16)}
    rules = [line.strip() for line in memory(forms).suggestion().splitlines() if "gr.on" in line]

    assert rules == [
        'gr.on("saved:layers.*.up", Store("int8")),',
        'gr.on("saved:layers.*.norm", Store("bfloat16")),',
    ]


def test_each_site_is_matched_by_one_form() -> None:
    forms = {site("a.x", "linear"): good(), site("a.y", "linear"): bad(), site("a.z", "linear"): good()}
    namespace: dict[str, object] = {}
    code = memory(forms).suggestion()
    exec(f"import gradrewrite as gr\n{code}", namespace)
    policy = namespace["policy"]
    assert isinstance(policy, list)

    for one, wanted in zip(forms, ("int8", "bfloat16", "int8"), strict=True):
        answers = [answer for rule in policy if (answer := rule(one)) is not None]
        assert [answer.form for answer in answers] == [wanted]


def test_what_saves_little_is_not_worth_a_rule() -> None:
    tiny = {"int8": (0.0, 50), "bfloat16": (None, 60)}
    small = KeptTensor(site("tiny", "exp"), "tiny", 70, 70)
    one = memory({site("a", "linear"): good()}, small)
    found = Memory(one.rows, one.plain_bytes, one.policy_bytes, lambda _: {one.rows[0].site: bad(), small.site: tiny})

    assert 'gr.on("saved:a", Store("bfloat16"))' in found.suggestion()
    assert "tiny" not in found.suggestion()


def test_nothing_to_suggest() -> None:
    assert memory({}).suggestion() == "# no saved tensor has a narrower form with an error of at most 2.00%"
    assert (
        memory({site("a", "exp"): bad(math.inf) | {"bfloat16": (0.5, BF16)}}).suggestion(0.1).startswith("# no saved")
    )

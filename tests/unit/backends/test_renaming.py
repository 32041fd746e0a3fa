"""Renaming: the calls of a graph that was compiled at one call of a region, at other calls."""

from __future__ import annotations

import pytest
import torch

from gradrewrite.backends.renaming import Renaming, calls_by_name
from gradrewrite.sites import Kind, Site

CPU = torch.device("cpu")


def sites_of(number: int, region: str = "a") -> list[Site]:
    """The sites of a region with one call of ``fc`` and two of ``act``, at one of its own calls."""

    def site(kind: Kind, name: str, call: int) -> Site:
        where = f"{region}.{name}", call
        return Site(kind, *where[:1], call=call, shape=(2,), dtype=torch.float32, device=CPU, addresses=(where,))

    values = [("fc", number), ("act", 2 * number), ("act", 2 * number + 1)]
    return [site("error", *value) for value in values] + [site("gradient", "fc.weight", 0)]


@pytest.mark.parametrize("made", [0, 1, 2, 3])
@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_calls_are_counted_from_the_call_that_the_graph_was_made_for(made: int, wanted: int) -> None:
    known = sites_of(made)
    renaming = Renaming("a", "b", wanted - made, calls_by_name(known, made))
    assert [str(renaming.site(site)) for site in known] == [str(site) for site in sites_of(wanted, "b")]
    assert [renaming.site(site).addresses for site in known[:-1]] == [s.addresses for s in sites_of(wanted, "b")[:-1]]


def test_a_last_call_without_a_site_is_counted() -> None:
    known = [site for site in sites_of(2) if str(site) != "error:a.act#5"]
    assert calls_by_name(known, 2) == {"a.fc": 1, "a.act": 2}

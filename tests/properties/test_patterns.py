"""Patterns: what a site is called finds it, what a pattern says comes back, and disjoint rules commute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Keep, NanToNum, Observe, Scale
from gradrewrite.policy.rules import ask
from gradrewrite.sites import AFTER_UPDATE, TRAITS, NamePattern, Pattern, Site

pytestmark = pytest.mark.pure

KIND = st.sampled_from(list(TRAITS))
PART = st.text(st.characters(exclude_characters="/#:>", exclude_categories=("Cs",)), min_size=1, max_size=6)
MODULE = st.lists(PART, min_size=1, max_size=3).map(".".join)
NAME = MODULE | st.builds("{}/{}".format, MODULE | st.just(""), PART)
CALL = st.sampled_from([0, 1]) | st.integers(0, 12)
BOUND = st.floats(0.001, 1e6)
ACTIONS = st.one_of(
    st.builds(ClipByValue, BOUND, log=st.booleans()),
    st.builds(ClipByNorm, BOUND, norm_type=st.sampled_from([1.0, 2.0, 3.0])),
    st.builds(ClipByGlobalNorm, BOUND, group=st.text(max_size=4)),
    st.builds(Scale, st.floats(-8.0, 8.0)),
    st.just(NanToNum()),
    st.builds(Observe, st.sampled_from(["norm", "max_abs", "zeros"])),
    st.builds(CheckFinite, st.sampled_from(["raise", "skip", "warn", "record"])),
    st.just(Keep()),
)
WORDS = {action.__name__: action for action in (ClipByValue, ClipByNorm, ClipByGlobalNorm, Scale, NanToNum, Observe)}
WORDS |= {action.__name__: action for action in (CheckFinite, Keep)} | {"on": gr.on}


def site(kind: Any, name: str, call: int) -> Site:
    return Site(kind, name, output_of=() if "/" in name else (name,), call=call)


PLAIN = st.text("ab./*?", min_size=1, max_size=6)
SITES = st.builds(site, KIND, NAME, CALL)


@given(SITES)
def test_the_text_of_a_site_is_a_pattern_that_finds_it(a: Site) -> None:
    call = f"#{a.call}" if a.call else ""
    assert str(a) == f"{a.kind}:{a.name}{call}"
    assert a.matches(f"{a.kind}:{gr.escape(a.name)}{call}")
    assert a.matches(f"{a.kind}:{gr.escape(a.name)}#{a.call}")
    assert a.matches(f"{a.kind}:{gr.escape(a.name)}")


@given(KIND, st.text("[]*?#ab.", min_size=1, max_size=8), st.text("[]*?#ab.", min_size=1, max_size=8), CALL)
def test_an_escaped_name_means_this_name_alone(kind: Any, name: str, other: str, call: int) -> None:
    assert site(kind, name, call).matches(f"{kind}:{gr.escape(name)}#{call}")
    assert site(kind, name, call).matches(f"{kind}:{gr.escape(name)}")
    assert site(kind, other, call).matches(f"{kind}:{gr.escape(name)}") == (name == other)


@given(SITES, SITES)
def test_an_exact_pattern_finds_no_other_site(a: Site, b: Site) -> None:
    assume((a.kind, a.name, a.call) != (b.kind, b.name, b.call))
    assert not b.matches(f"{a.kind}:{gr.escape(a.name)}#{a.call}")


@given(SITES, KIND, CALL)
def test_kind_and_call_tell_sites_of_one_name_apart(a: Site, kind: Any, call: int) -> None:
    other = site(kind, a.name, call)
    assert other.matches(f"{a.kind}:{gr.escape(a.name)}") == (kind == a.kind)
    assert other.matches(f"{a.kind}:{gr.escape(a.name)}#{a.call}") == ((kind, call) == (a.kind, a.call))


@given(st.none() | KIND, st.text(st.characters(exclude_characters="#:>"), min_size=1), st.none() | CALL)
def test_a_pattern_comes_back_from_its_text(kind: Any, glob: str, call: int | None) -> None:
    text = (f"{kind}:" if kind else "") + glob + ("" if call is None else f"#{call}")
    assert Pattern.parse(text) == Pattern(kind, NamePattern(glob, call))


@given(st.none() | st.just("error"), PLAIN, st.none() | CALL, PLAIN, st.none() | CALL)
def test_a_pattern_of_a_use_comes_back_from_its_text(
    kind: Any, name: str, call: int | None, to: str, to_call: int | None
) -> None:
    source, end = (n + ("" if c is None else f"#{c}") for n, c in ((name, call), (to, to_call)))
    text = (f"{kind}:" if kind else "") + f"{source}->{end}"
    assert Pattern.parse(text) == Pattern(kind, NamePattern(name, call), NamePattern(to, to_call))


@given(SITES, NAME, CALL)
def test_a_pattern_means_one_use_or_the_sum_over_all(a: Site, to: str, call: int) -> None:
    assume(a.name == a.name.strip() and to == to.strip())
    whole = site("error", a.name, a.call)
    use = replace(whole, destination=((to, call),))
    pattern = f"error:{gr.escape(a.name)}#{a.call}"
    assert use.matches(f"{pattern}->{gr.escape(to)}#{call}")
    assert use.matches(f"{pattern}->{gr.escape(to)}")
    assert not use.matches(f"{pattern}->{gr.escape(to)}#{call + 1}")
    assert not use.matches(pattern)
    assert not whole.matches(f"{pattern}->{gr.escape(to)}")


@pytest.mark.long
@given(st.none() | KIND, NAME, st.none() | CALL, ACTIONS | st.lists(ACTIONS, min_size=1, max_size=3))
def test_a_rule_comes_back_from_its_representation(kind: Any, name: str, call: int | None, action: Any) -> None:
    text = (f"{kind}:" if kind else "") + name + ("" if call is None else f"#{call}")
    rule = gr.on(text, action)
    assert eval(repr(rule), dict(WORDS)) == rule


def may_stand(action: Any, site: Site) -> bool:
    """Whether a policy may answer with an action; a check after the update cannot skip it."""
    is_late_skip = site.kind in AFTER_UPDATE and getattr(action, "on_failure", "") == "skip"
    return site.kind in action.kinds and not is_late_skip


@pytest.mark.broad
@given(SITES, SITES, st.permutations(range(3)), st.data())
def test_disjoint_rules_commute(a: Site, b: Site, order: list[int], data: st.DataObject) -> None:
    assume((a.kind, a.name) != (b.kind, b.name))
    at_a, at_b = (
        data.draw(ACTIONS.filter(lambda action, s=s: may_stand(action, s)), label=f"action at {s}") for s in (a, b)
    )
    rules = [
        gr.on(f"{a.kind}:{gr.escape(a.name)}", at_a),
        gr.on(f"{b.kind}:{gr.escape(b.name)}", at_b),
        gr.on("error:nowhere at all", NanToNum()),
    ]
    shuffled = [rules[n] for n in order]
    for one, action in ((a, at_a), (b, at_b)):
        assert ask(rules, one) == ask(shuffled, one) == (action,)

"""The tree of sites: repeated blocks and calls in one line."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradrewrite.cli.site_tree import site_tree
from gradrewrite.sites import Kind, Site

pytestmark = pytest.mark.pure


def shown(sites: list[Site]) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=200).print(site_tree(sites), no_wrap=True, overflow="ellipsis", highlight=False)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def module(kind: Kind, name: str, *shape: int, call: int = 0, source: str = "") -> Site:
    return Site(kind, name, name, "linear", (name,), call, shape, source=source)


def test_calls_are_one_line() -> None:
    sites = [module("error", "cell", 4, 8, call=n, source='net.py:7 "h = self.cell(h)"') for n in range(40)]

    assert shown(sites) == ["error: 40 sites", '└── cell x 40  [4, 8] float32 net.py:7 "h = self.cell(h)"']


def test_blocks_are_one_branch() -> None:
    sites = []
    for n in range(12):
        sites += [Site("error", f"blocks.{n}.attn/softmax", f"blocks.{n}.attn", "softmax", (), 0, (2, 4, 4))]
        sites += [module("error", f"blocks.{n}.attn", 2, 8), module("error", f"blocks.{n}", 2, 8)]
        sites += [
            Site("gradient", f"blocks.{n}.attn.{name}", shape=shape) for name, shape in (("w", (8, 8)), ("b", (8,)))
        ]
    sites.append(Site("error", "/sum", "", "sum", (), 0, (), torch.float16))

    assert shown(sites) == [
        "error: 37 sites",
        "├── blocks.[0-11] x 12  [2, 8] float32",
        "│   └── attn x 12  [2, 8] float32",
        "│       └── /softmax x 12  [2, 4, 4] float32",
        "└── /sum  [] float16",
        "gradient: 24 sites",
        "└── blocks.[0-11]",
        "    └── attn x 12: w [8, 8], b [8]  float32",
    ]


def test_kinds_with_alike_sites_share_a_tree() -> None:
    both = [module(kind, name, 3) for name in ("a", "b") for kind in ("activation", "error")]

    assert shown([*both, module("activation", "c", 3)]) == [
        "activation, error: 4 sites",
        "└── a, b  [3] float32",
        "activation: 1 site",
        "└── c  [3] float32",
    ]


def test_unlike_sites_of_one_name_have_lines_of_their_own() -> None:
    sites = [module("error", f"layers.{n}", 2 if n < 3 else 4) for n in range(5)]
    sites += [module("error", f"layers.{n}.inner", 2) for n in range(5)]

    assert shown(sites) == [
        "error: 10 sites",
        "├── layers.[0-4]",
        "│   └── inner x 5  [2] float32",
        "├── layers.[0-2] x 3  [2] float32",
        "└── layers.[3-4] x 2  [4] float32",
    ]


NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1), max_size=9)


@given(NAMES, st.sampled_from(["error", "gradient", "activation", "input", "step"]))
def test_any_names_have_a_tree(names: list[str], kind: Kind) -> None:
    lines = shown([Site(kind, name, op="op") for name in names])

    assert lines[:1] == ([f"{kind}: {len(names)} site{'s' * (len(names) != 1)}"] if names else [])

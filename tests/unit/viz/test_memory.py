"""``viz.plot_memory``: bars of known lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import BarContainer

from gradrewrite import viz
from gradrewrite.diagnostics.memory import Memory
from gradrewrite.ir.memory import KeptTensor
from gradrewrite.sites import Site

pytestmark = pytest.mark.pure

UNKNOWN: Any = "gif"
ROWS: Any = tuple(
    KeptTensor(Site("saved", name), name, size, size // 4) for name, size in {"b": 4096, "": 8192}.items()
)


def test_two_bars_a_module_in_the_order_of_the_forward(tmp_path: Path) -> None:
    bars = viz.plot_memory(Memory(ROWS, 12288, 3072, lambda _: {}), title="a model")
    figure = bars.figure()

    (axes,) = figure.axes
    plain, policy = (one for one in axes.containers if isinstance(one, BarContainer))
    assert [bar.get_width() for bar in plain.patches] == [4096, 8192]
    assert [bar.get_width() for bar in policy.patches] == [1024, 2048]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["b", "(root)"]
    assert figure.get_suptitle() == "a model\n12 KiB kept for the backward, 3 KiB with the policy"
    assert Path(bars.render(tmp_path / "memory", "svg")).read_text() == bars._repr_svg_()


def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match=r"model.memory\(\.\.\.\) returned, got tuple"):
        viz.plot_memory(ROWS)
    with pytest.raises(ValueError, match=r"MemoryBars.render: format is one of png, svg, pdf, got 'gif'"):
        viz.plot_memory(Memory((), 0, 0, lambda _: {})).render("x", UNKNOWN)

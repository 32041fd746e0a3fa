"""Legibility of a scene: texts that do not overlap and fit into their boxes. And Graphviz, a reader of DOT source."""

from __future__ import annotations

import subprocess
import sys

from gradrewrite.viz import _fonts, _scene

_GRAPHVIZ = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog=sys.argv[2]))
"""


def read_by_graphviz(source: str, form: str) -> bytes:
    """DOT source in another format; in a process of its own, for Graphviz can hang and crash."""
    command = [sys.executable, "-c", _GRAPHVIZ, form, "nop" if "layout=nop" in source else "dot"]
    return subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=True).stdout


def texts_of(scene: _scene.Scene) -> list[tuple[float, float, float, float, str]]:
    """Left, upper, right and lower edges of all texts."""
    sizes = {"": _scene.TEXT, "note": _scene.SMALL, "small": _scene.SMALL, "head": _scene.HEAD}
    found = [(n.x, n.y, n.text, sizes[n.style]) for n in _scene.texts_of(scene) if n.text]
    return [(x, y - 0.76 * size, x + _fonts.text_width(t, size), y + 0.24 * size, t) for x, y, t, size in found]


def assert_readable(scene: _scene.Scene) -> None:
    """No text overlaps another or leaves its box, its drawing, or the ladder's rows."""
    texts = sorted(texts_of(scene), key=lambda one: one[1])
    for number, a in enumerate(texts):
        assert 0 <= a[0]
        assert a[2] <= scene.width + 1, a
        for b in texts[number + 1 :]:
            if b[1] >= a[3]:
                break
            assert a[2] <= b[0] or b[2] <= a[0], (a, b)
    for box in scene.boxes:
        assert _fonts.text_width(box.text, _scene.TEXT) <= box.width - 2 * _scene.PAD + 1
        assert _fonts.text_width(box.small, _scene.SMALL) <= box.width - 2 * _scene.PAD + 1
    assert min(_scene.TEXT, _scene.SMALL, _scene.HEAD) >= 11

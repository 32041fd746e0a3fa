"""Run Graphviz in a child process, because it can hang and crash."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

_BEGINS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF", "json": b"{", "plain": b"graph "}
_DATE = re.compile(rb"(/CreationDate \(D:)\d{14}")  # equal drawings give equal bytes
TIME_LIMIT = 20.0  # seconds; a diagram of one screen takes a fraction of one

_CHILD = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog=sys.argv[2]))
"""


class GraphvizError(RuntimeError):
    """Graphviz is missing, timed out, crashed, or refused its input."""


def run_dot(source: str, form: str, *, time_limit: float = TIME_LIMIT) -> bytes:
    """Lay out DOT source and return it in another format (``plain``: positions as text; ``svg``, ``png``, ``pdf``).

    Raises:
        GraphvizError: Graphviz is not there, did not end in time, or failed.
    """
    command = find_graphviz(form, "nop" if "layout=nop" in source else "dot")
    if command is None:
        raise GraphvizError("Graphviz was found neither on PATH nor in pygraphviz; pip install pygraphviz")
    # Without fonts Graphviz says so on its error stream and goes on: only the exit status counts.
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        raise GraphvizError(f"Graphviz did not end within {time_limit:g} s") from None
    except OSError as err:
        raise GraphvizError(f"{command[0]} does not start: {err.strerror}") from None
    if done.returncode < 0:
        raise GraphvizError(f"Graphviz crashed (signal {-done.returncode})")
    if not done.returncode and done.stdout and _BEGINS[form] not in done.stdout[:1024]:
        raise GraphvizError(f"Graphviz wrote something that is no {form}: {done.stdout[:40]!r}")
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise GraphvizError(f"Graphviz failed (status {done.returncode}): {said[-1] if said else 'it said nothing'}")
    return _DATE.sub(rb"\g<1>19700101000000", done.stdout) if form == "pdf" else done.stdout


def find_graphviz(form: str, engine: str = "dot") -> list[str] | None:
    """Return the Graphviz command: ``dot`` on PATH, else the library in the pygraphviz wheel."""
    program = shutil.which("dot")
    if program is not None:
        return [program, f"-K{engine}", f"-T{form}"]
    if importlib.util.find_spec("pygraphviz") is None:
        return None
    return [sys.executable, "-c", _CHILD, form, engine]

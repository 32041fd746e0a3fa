"""The rewrite as text: a diff for reviews, and torch's structured log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import mostly_slow
from models.graphs import GRAPHS, no_edits, three_layers


@pytest.mark.parametrize("name", mostly_slow([n for n in GRAPHS if n != "no_edits"]))
def test_the_diff_turns_the_code_before_into_the_code_after(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    assert graph.before is not None
    diff, _, _ = graph.diff().partition("\n\n action")
    (tmp_path / "code").write_text(graph.before.code)
    (tmp_path / "diff").write_text(diff.replace("--- before", "--- code").replace("+++ after", "+++ code") + "\n")
    subprocess.run(["patch", "-s", "code", "diff"], cwd=tmp_path, check=True)

    assert (tmp_path / "code").read_text() == graph.code


def test_every_inserted_node_is_an_added_line() -> None:
    graph = three_layers()
    marked = set(re.findall(r"^\+ +(\w+)(?:: \"[^\"]*\")? = .*  # ", graph.diff(), re.M))

    assert marked == {name for edit in graph.edits for name in edit.nodes} | set(graph.record_nodes)
    assert not [line for line in graph.diff().splitlines() if line.startswith("-") and "  # " in line]


def test_the_table_counts_edits_and_nodes_by_action() -> None:
    graph = three_layers()
    table = graph.diff().rpartition("\n\n")[2]
    total = sum(len(e.nodes) for e in graph.edits if e.text == "ClipByGlobalNorm(1.0)")

    assert re.search(
        rf"ClipByGlobalNorm\(1\.0\) +6 +{total} +gradient:first\.weight \.\.\. gradient:third\.bias", table
    )
    assert re.search(r"<lambda>> +1 +0 +error:first", table)
    assert re.search(rf"\(carries records\) +{len(graph.record_nodes)}", table)


def test_no_edits() -> None:
    assert no_edits().diff() == "no edits: the graph is as it was"


@pytest.mark.slow
def test_the_rewritten_graph_is_in_torch_s_structured_log(tmp_path: Path) -> None:
    program = """
import torch, gradrewrite as gr
from gradrewrite.passes import ClipByValue
model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:weight", ClipByValue(0.25)))
model.compile()
model(torch.ones(1, 2)).sum().backward()
"""
    command = [sys.executable, "-c", program]
    subprocess.run(command, env={**__import__("os").environ, "TORCH_TRACE": str(tmp_path)}, check=True)
    (log,) = tmp_path.iterdir()
    lines = log.read_text(errors="replace").splitlines()
    at = next(n for n, line in enumerate(lines) if '"gradrewrite_joint_graph"' in line)
    head = json.loads(lines[at][lines[at].index("{") :])
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])

    assert head["artifact"] == {"name": "gradrewrite_joint_graph", "encoding": "string"}
    assert payload[0].startswith("# ")
    assert payload[1].startswith("# gradient:weight: ClipByValue(0.25) -> clamp_min, clamp_max")
    assert any("# ClipByValue(0.25) at gradient:weight" in line for line in payload)

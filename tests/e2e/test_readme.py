"""All code of the README runs, and its example prints what the README says; docstring examples too."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradrewrite as gr
import gradrewrite.passes
import gradrewrite.viz
from gradrewrite.cli import main

from helpers import ROOT

BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS.findall((ROOT / "README.md").read_text()) if found == language]


@pytest.mark.sample(12)
@pytest.mark.slow
def test_readme_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    (code,), (shown,) = blocks("python"), blocks("text")
    example = tmp_path / "example.py"
    example.write_text(code)
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)

    assert done.stdout == shown


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The definitions of the README's example, without its training, as the module ``my_models``."""
    module = ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    exec(blocks("python")[0].partition("\nfor name, policy in")[0], vars(module))
    return module


@pytest.mark.long
def test_readme_policies_and_pictures(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        **vars(gradrewrite.passes),
        **vars(example),
        "viz": gradrewrite.viz,
        "text": example.TEXT[:20].reshape(2, 10),
    }
    names["model"] = gr.transform(example.Net(), gr.on("error:wh", gradrewrite.passes.ClipByNorm(0.01)))
    policies = []
    for block in blocks("pycon"):
        for one in doctest.DocTestParser().get_examples(block):
            exec(compile(one.source, "README.md", "single"), names)
            policies += [names["policy"]] if "policy" in one.source else []

    assert (tmp_path / "backward.html").stat().st_size > 10_000
    assert len(policies) == 2
    rules, callback = policies
    model = gr.transform(example.Net(), rules[1:2])
    (edit, *_) = model.trace_step(torch.optim.SGD(model.parameters(), lr=0.1)).edits
    assert edit.site.kind == "step"
    assert gr.transform(example.Net(), callback).trace(names["text"]).edits[0].site.kind == "gradient"


@pytest.mark.long
def test_readme_commands(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vars(example).update(
        make=example.Net,
        batches=lambda: [example.TEXT[n : n + 40].reshape(2, 20) for n in range(4)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    commands = [line.split() for block in blocks("sh") for line in block.splitlines()]
    (diagnose,) = [words[1:] for words in commands if words[:2] == ["gradrewrite", "diagnose"]]

    assert main([*diagnose, "--steps", "3"]) == 0
    assert (tmp_path / "diagnosis.html").exists()
    assert [words[:4] for words in commands[:2]] == [
        ["pip", "install", "-e", "."],
        ["pip", "install", "-e", "'.[test]'"],
    ]


# ``passes`` and ``viz`` are other folders, which the path of an editable install does not have.
PACKAGES = (gradrewrite, gradrewrite.passes, gradrewrite.viz)
MODULES = {m.name for p in PACKAGES for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODULES - {"gradrewrite.__main__"}))
def test_docstring_examples(name: str) -> None:
    package, _, framework = name.rpartition(".")
    if package == "gradrewrite.integrations" and not framework.startswith("_"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    module = importlib.import_module(name)
    result = doctest.testmod(module)

    assert result.failed == 0

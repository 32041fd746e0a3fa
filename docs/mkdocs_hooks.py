"""Hooks of mkdocs: show mkdocstrings the packages as they are installed.

``passes/``, ``viz/`` and ``examples/`` become subpackages of ``gradrewrite`` on installation only. The API reference is
built from a copy in the installed layout, without importing anything.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tomllib
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: Any) -> Any:
    """Copy the packages into a temporary folder, and let mkdocstrings read them there."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tree = Path(tempfile.mkdtemp(prefix="gradrewrite-docs-"))
    atexit.register(shutil.rmtree, tree)
    for package in setuptools["packages"]:
        source = setuptools["package-dir"].get(package, package.replace(".", "/"))
        target = tree / package.replace(".", "/")
        target.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / source).glob("*.py"):
            # mkdocstrings renders doctests in a section of this name only
            (target / path.name).write_text(path.read_text().replace(" Example:\n", " Examples:\n"))
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(tree)]
    return config

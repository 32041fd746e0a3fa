"""Planted differences are named by their site, by ``gr.compare`` and from run logs; equal runs have none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
from gradrewrite import Step, read_jsonl
from gradrewrite.diagnostics.first_difference import compare_logs
from gradrewrite.passes import Observe

from models.planted import MODELS, PLANTS, Plant, make

STEPS = 3
PRINTS = [gr.on(f"{kind}:*", Observe("fingerprint", "norm")) for kind in ("activation", "error", "gradient")]
PRINTS += [gr.on(f"{kind}:*/*", Observe("fingerprint", "norm")) for kind in ("activation", "error")]


def train(model: gr.RewrittenModule, inputs: tuple[Tensor, ...], change: Callable[[], None] | None = None) -> None:
    """Make some steps; ``change`` comes before the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    for step in range(STEPS):
        if step == 1 and change is not None:
            change()
        optimizer.zero_grad()
        model(*inputs).backward()
        optimizer.step()


def log_of(path: Path, name: str, plant: Plant | None = None) -> list[Step]:
    model, inputs = make(name)
    is_late = plant is not None and plant.kind in ("bit", "layer")
    if plant is not None and not is_late:
        plant.change(model)
    rewritten = gr.transform(model, PRINTS)
    train(rewritten, inputs, (lambda: plant.change(model)) if plant is not None and is_late else None)
    rewritten.monitor.to_jsonl(path)
    return read_jsonl(path)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    folder = tmp_path_factory.mktemp("logs")
    return {name: log_of(folder / f"{name}.jsonl", name) for name in MODELS}


def test_there_are_thirty_plants_of_all_kinds() -> None:
    assert len({plant.name for plant in PLANTS}) == 30
    assert {plant.kind for plant in PLANTS} == {"kernel", "backward", "dtype", "seed", "bit", "layer"}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_compare_names_the_site(plant: Plant) -> None:
    model, inputs = make(plant.model)
    other = copy.deepcopy(model)
    plant.change(other)

    found = gr.compare(model, other, *inputs)

    assert found is not None
    assert (found.site, found.other) == (plant.site, plant.site)
    assert found.kind == ("values" if plant.name == "residual: dtype at activation:head" else "bits")
    assert found.error > 0
    assert found.op.rpartition("/")[0] == plant.site.partition(":")[2].partition("/")[0]
    assert found.source.split(":")[0] in ("planted.py", "gpt.py")
    assert found.growth[0] == (found.site, found.error)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_run_logs_name_the_step_and_the_site(plant: Plant, logs: dict[str, list[Step]], tmp_path: Path) -> None:
    compared = compare_logs(logs[plant.model], log_of(tmp_path / "run.jsonl", plant.model, plant))

    assert compared.first is not None
    assert compared.first.site == plant.site
    assert compared.first.step == (1 if plant.kind in ("bit", "layer") else 0)
    assert compared.first.op.rpartition("/")[0] == plant.site.partition(":")[2].partition("/")[0]
    assert compared.first.source.split(":")[0] in ("planted.py", "gpt.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equal_runs_have_no_difference(name: str) -> None:
    """25 pairs of runs of two models that were traced apart."""
    pairs = []
    twins = [gr.transform(make(name)[0], PRINTS) for _ in range(2)]
    for seed in range(9 if name == "residual" else 8):
        model, inputs = make(name, seed)
        runs = []
        for twin in twins:
            twin.load_state_dict(copy.deepcopy(model.state_dict()))
            train(twin, inputs)
            runs.append([replace(step, step=n) for n, step in enumerate(twin.monitor.steps()[-STEPS:])])
        pairs.append(compare_logs(*runs))

    assert all(pair.is_equal for pair in pairs)
    assert all(pair.num_steps == STEPS and pair.num_sites > 20 for pair in pairs)


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equal_models_have_no_difference(name: str) -> None:
    """25 pairs."""
    for seed in range(9 if name == "residual" else 8):
        model, inputs = make(name, seed)
        assert gr.compare(model, copy.deepcopy(model), *inputs) is None

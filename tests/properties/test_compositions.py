"""Random compositions of models, policies, loops and ways to run, against eager references.

``.ci/run`` runs 40 of them op by op and one compiled, by its number; without a number 2,000 and 60 are run.
``python tests/properties/test_compositions.py FIRST LAST [--compiled]`` runs some by hand.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # as conftest.py does, where this runs as a program

import sampling

from gradrewrite.rewriting import saved_tensors

from models.composition_runs import assert_same
from models.compositions import ACTIONS, IN_ONE_GRAPH, LAYERS, LOOPS, PER_EXAMPLE, WAYS, WEIGHINGS, Composition

SEEDS, EACH, COMPILED = 2_000, 40, 60
BLOCKS = SEEDS // EACH
NUMBER = sampling.number_of_run()


def check(seed: int, *, compiled: bool = False) -> None:
    """Run one composition; small tensors are saved tensors too."""
    torch.compiler.reset()
    with mock.patch.object(saved_tensors, "SMALL", 17), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(Composition.draw(seed), compiled=compiled)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(BLOCKS) if NUMBER is None else [NUMBER % BLOCKS])
def test_compositions(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        check(seed)


@pytest.mark.inductor
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(COMPILED) if NUMBER is None else [NUMBER % COMPILED])
def test_compiled_compositions(seed: int) -> None:
    check(seed, compiled=True)


@pytest.mark.pure
def test_every_action_layer_loop_and_way_is_drawn() -> None:
    drawn = [Composition.draw(seed) for seed in range(SEEDS)]
    actions = Counter((kind, action) for one in drawn for kind, action in {(k, a) for k, _, a in one.rules})
    layers = Counter(name for one in drawn for name in set(one.layers))
    of_groups = {("gradient", action) for action in (*WEIGHINGS, PER_EXAMPLE)}
    assert set(actions) == {(kind, action) for kind, texts in ACTIONS.items() for action in texts} | of_groups
    assert min(actions.values()) >= 0.03 * SEEDS, actions.most_common()[-3:]
    assert set(layers) == set(LAYERS)
    in_one = {(loop, IN_ONE_GRAPH) for loop in LOOPS if loop != "retained"}  # makes one backward a step
    assert {(one.loop, one.way) for one in drawn} == {(loop, way) for loop in LOOPS for way in WAYS} | in_one
    assert min(sum(one.split for one in drawn), sum(one.threaded for one in drawn)) >= 0.03 * SEEDS
    assert sum(one.subclass for one in drawn) >= 0.01 * SEEDS
    assert sum(one.inner for one in drawn) >= 0.05 * SEEDS


@pytest.mark.pure
def test_a_program_is_short() -> None:
    assert max(len(Composition.draw(seed).text.splitlines()) for seed in range(SEEDS)) <= 40


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    compiled = "--compiled" in sys.argv
    failed = 0
    for seed in range(first, last):
        try:
            check(seed, compiled=compiled)
        except Exception as err:  # of any kind: all are told
            failed += 1
            print(seed, type(err).__name__, str(err)[:1500], Composition.draw(seed).text, sep="\n", flush=True)
    print(f"{last - first - failed} of {last - first} are right")
    sys.exit(failed > 0)

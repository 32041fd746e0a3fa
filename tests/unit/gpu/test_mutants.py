"""The tests on the simulated GPU notice faults of the code that they are there for."""

from __future__ import annotations

import pytest

from gpu import mutants, shim


@pytest.mark.slow
@pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not())
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_noticed(name: str) -> None:
    done = mutants.run(name)

    assert mutants.is_noticed(done), done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_place_of_a_mutant_is_there(name: str) -> None:
    compile(mutants.MUTANTS[name].changed(), name, "exec")


def test_a_mutant_whose_place_is_gone() -> None:
    mutant = mutants.Mutant("gpu.mutants:run", "nothing like this", "", "", "")
    with pytest.raises(LookupError, match=r"gpu\.mutants:run has 'nothing like this' 0 times"):
        mutant.changed()

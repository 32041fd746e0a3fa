"""Tiny models of transformers, compared with hooks of eager autograd; the table in docs/architectures.md.

``python tests/integration/aot_eager/test_architectures.py --write`` writes the table.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # as conftest.py does

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm
from gradrewrite.testing import Comparison, assert_inert, assert_matches_eager

from helpers import ROOT
from models.architectures import ARCHITECTURES, Architecture

PAGE = ROOT / "docs" / "architectures.md"
HEAD = "| model class | kind | labels | tied | checkpoints | error sites | one graph |"
REMEDY = (
    "docs/architectures.md differs; python tests/integration/aot_eager/test_architectures.py --write makes it anew, "
    "with the versions of constraints.txt"
)


def clip_to_mean(g: Tensor) -> Tensor:
    """A clip that acts however small the clips before it have made the error."""
    bound = g.abs().mean()
    return g.clamp(-bound, bound)


POLICY = [gr.on("error:*", clip_to_mean), gr.on("gradient:*", ClipByGlobalNorm(1e-6))]
WORKING = [a for a in ARCHITECTURES if a.works]
OBSTRUCTED = [a for a in ARCHITECTURES if a.obstacle]
# One layer each: Inductor takes longer than all else here.
OPT, VIT = (a for a in WORKING if a.name in ("OPTForCausalLM", "ViTForImageClassification"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


@pytest.fixture
def _transformers() -> Iterator[None]:
    library = pytest.importorskip(
        "transformers", reason="the models are those of transformers: pip install -e '.[dev]'"
    )
    library.logging.set_verbosity_error()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other cost more than these tensors
    yield
    torch.set_num_threads(num_threads)


def ident(a: Architecture) -> str:
    return f"{a.name}-{a.variant}" if a.variant else a.name


def prepared(a: Architecture) -> tuple[nn.Module, dict[str, Any]]:
    """The model that can be traced, and its inputs."""
    torch.manual_seed(0)
    model, inputs = a.make(), a.make_inputs()
    if a.prepare is not None:
        a.prepare(model, inputs)
    return model, inputs


def is_tied(model: nn.Module) -> bool:
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))


def compare(a: Architecture, model: nn.Module, inputs: dict[str, Any], *, compiled: bool = False) -> Comparison:
    """Compare a policy whose clips act nearly everywhere."""
    found = assert_matches_eager(model, POLICY, compiled=compiled, loss_fn=lambda out: a.loss(out, inputs), **inputs)
    errors = {site for site in found.acted if site.startswith("error:")}
    loose = errors - set(found.changed)
    assert not found.refused
    assert len(errors) > 5
    assert len(loose) <= len(errors) / 10, f"clips that did not act: {sorted(loose)}"
    assert any(site.startswith("gradient:") for site in found.changed)
    return found


def row(a: Architecture, num_errors: int | None) -> str:
    """One line of the table; ``num_errors`` is None where nothing could be compared."""
    name = f"`{a.name}`" + (f", {a.variant}" if a.variant else "")
    yes = {True: "yes", False: "no"}
    if a.works:
        state = "yes" if not a.obstacle else f"with {a.remedy}; otherwise it {a.obstacle}"
    else:
        state = f"no: it {a.obstacle}"
    model = a.make()
    cells = (
        name, a.kind, yes["labels" in a.make_inputs()], yes[is_tied(model)], yes[a.has_checkpoints],
        "" if num_errors is None else str(num_errors), state,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def examined(a: Architecture) -> str:
    """The architecture's row, from what was measured."""
    if not a.works:
        return row(a, None)
    model, inputs = prepared(a)
    found = compare(a, model, inputs)
    torch.compiler.reset()
    assert_inert(model, compiled=False, loss_fn=lambda out: a.loss(out, inputs), **inputs)
    return row(a, sum(site.startswith("error:") for site in found.acted))


def rows() -> list[str]:
    """The rows of the table as the page has them."""
    lines = PAGE.read_text().splitlines()
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(HEAD) + 2 :]))


def row_of(a: Architecture) -> str:
    return dict(zip(map(ident, ARCHITECTURES), rows(), strict=True))[ident(a)]


@pytest.mark.pure
def test_the_table_has_every_architecture() -> None:
    names = [f"`{a.name}`" + (f", {a.variant}" if a.variant else "") for a in ARCHITECTURES]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows()] == names, REMEDY
    assert len({a.name for a in WORKING}) >= 25


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("a", ARCHITECTURES, ids=ident)
def test_errors_and_gradients_are_those_of_eager_hooks_and_the_table_says_so(a: Architecture) -> None:
    assert examined(a) == row_of(a), REMEDY


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("a", OBSTRUCTED, ids=ident)
def test_what_breaks_the_graph_breaks_it_in_torch_compile_alone(a: Architecture) -> None:
    torch.manual_seed(0)
    plain, model, inputs = a.make(), a.make(), a.make_inputs(remedied=False)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(plain, backend="aot_eager", fullgraph=True)(**inputs)
    with pytest.raises(gr.GraphBreakError, match=r"modeling_|output_capturing"):
        gr.transform(model, [])(**inputs)


@pytest.mark.sample(8)
@pytest.mark.inductor
@pytest.mark.usefixtures("_transformers")
def test_compiled_errors_and_gradients_are_those_of_eager_hooks() -> None:
    compare(OPT, *prepared(OPT), compiled=True)


@pytest.mark.sample(12)
@pytest.mark.inductor
@pytest.mark.usefixtures("_transformers")
def test_the_empty_policy_is_inert_compiled() -> None:
    model, inputs = prepared(VIT)
    assert_inert(model, loss_fn=lambda out: VIT.loss(out, inputs), **inputs)


def main(argv: list[str]) -> int:
    """Examine every architecture; print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/architectures.md")
    is_writing = parser.parse_args(argv).write
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table = [HEAD, "|---|---|---|---|---|---|---|"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a in ARCHITECTURES:
            torch.compiler.reset()
            table.append(examined(a))
            print(table[-1], flush=True)
    if is_writing:
        before, _, after = PAGE.read_text().partition(HEAD)
        _, _, after = after.partition("\n\n")  # a table ends with an empty line
        PAGE.write_text(f"{before}{chr(10).join(table)}\n\n{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

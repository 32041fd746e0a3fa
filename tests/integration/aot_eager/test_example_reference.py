"""The per-example gradients that the tests of the rewrite compare with: two ways to them agree."""

from __future__ import annotations

import pytest
import torch

from models.per_example import MODELS, example_gradients, make, vmap_gradients

pytestmark = pytest.mark.pure

# Models that ``torch.func`` cannot run, and its error.
REFUSED = {"checkpointed": "don't yet support saved tensor hooks|does not have vmap support"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_autograd_of_each_example_is_vmap_of_grad(name: str) -> None:
    model, inputs = make(name)
    wanted = vmap_gradients(model, *inputs)
    found = example_gradients(model, *inputs)
    assert wanted.keys() == found.keys()
    for parameter, terms in wanted.items():
        assert terms.dtype == torch.float64
        torch.testing.assert_close(found[parameter], terms, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", REFUSED)
def test_vmap_of_grad_refuses(name: str) -> None:
    model, inputs = make(name)
    with pytest.raises(RuntimeError, match=REFUSED[name]):
        vmap_gradients(model, *inputs)


def test_a_checkpointed_model_has_the_gradients_of_the_plain_one() -> None:
    checkpointed, inputs = make("checkpointed")
    plain, same = make("attention")
    assert all(torch.equal(a, b) for a, b in zip(inputs, same, strict=True))
    wanted = vmap_gradients(plain, *inputs)
    for parameter, terms in example_gradients(checkpointed, *inputs).items():
        torch.testing.assert_close(terms, wanted[parameter], rtol=1e-10, atol=1e-13)

"""KeepZeros: an error of 0 that meets an infinite derivative stays 0."""

from __future__ import annotations

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import KeepZeros

from models.zero_errors import PROGRAMS, Program, gradient

EVERYWHERE = gr.on("backward:*/*", KeepZeros())


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_a_mask_behind(name: str) -> None:
    loss, wanted = gradient(Program(name, covered=True), name)
    plain_loss, plain = gradient(Program(name), name)
    kept_loss, kept = gradient(gr.transform(Program(name), EVERYWHERE), name)

    assert not plain.isfinite().all()
    assert torch.equal(kept_loss, plain_loss)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept[plain.isfinite()], plain[plain.isfinite()])


@pytest.mark.inductor
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name: str) -> None:
    _, wanted = gradient(gr.transform(Program(name, covered=True), []).compile(), name)
    _, kept = gradient(gr.transform(Program(name), EVERYWHERE).compile(), name)

    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-6)

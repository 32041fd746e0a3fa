"""The operator that runs the body of a loop once an iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from gradrewrite._compat import make_fx
from gradrewrite.ir.loop_code import LoopCode, call, code_for


def body(h: Tensor, count: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = h * w + x
    return h, count + 1, h * 2


def coded(key: str, stacked: tuple[bool, bool], *, is_reversed: bool) -> LoopCode:
    gm = make_fx.trace(body, [torch.ones(2), torch.zeros(()), torch.ones(2), torch.ones(2)])
    return code_for(LoopCode(key, gm, 2, 1, stacked, is_reversed))


def plainly(h: Tensor, xs: Tensor, w: Tensor) -> list[Tensor]:
    values = [h]
    for x in xs:
        values.append(values[-1] * w + x)
    return values


def test_carries_and_stacks() -> None:
    h, w, xs = torch.ones(2), torch.tensor([0.5, 2.0]), torch.arange(8.0).reshape(4, 2)
    code = coded("carries", (True, False), is_reversed=False)
    values = plainly(h, xs, w)
    carried, count, outputs = call(code, [h, torch.zeros(())], [xs], [w])

    assert torch.equal(carried, torch.stack(values))
    assert count.item() == 4
    assert torch.equal(outputs, torch.stack(values[1:]) * 2)


def test_reversed() -> None:
    h, w, xs = torch.ones(2), torch.tensor([0.5, 2.0]), torch.arange(8.0).reshape(4, 2)
    code = coded("reversed", (True, False), is_reversed=True)
    values = plainly(h, xs.flip(0), w)[::-1]
    carried, _, outputs = call(code, [h, torch.zeros(())], [xs], [w])

    assert torch.equal(carried, torch.stack(values))
    assert torch.equal(outputs, torch.stack(values[:-1]) * 2)


def test_no_iteration() -> None:
    h, xs = torch.ones(2), torch.zeros(0, 2)
    code = coded("none", (False, False), is_reversed=False)
    last, count, outputs = call(code, [h, torch.zeros(())], [xs], [torch.ones(2)])

    assert torch.equal(last, h)
    assert last is not h
    assert count.item() == 0
    assert outputs.shape == (0, 2)


def test_arguments_of_other_layouts() -> None:
    h, w = torch.ones(2, 2)[:, 0], torch.tensor([[0.5, 1.0], [2.0, 3.0]])[:, 0]
    xs = torch.arange(8.0).reshape(2, 4).t()
    code = coded("layouts", (True, False), is_reversed=False)
    carried, *_ = call(code, [h, torch.zeros(())], [xs], [w])

    assert torch.equal(carried, torch.stack(plainly(h, xs, w)))


def test_one_code_has_one_key() -> None:
    first, second = coded("same", (True, True), is_reversed=False), coded("same", (True, True), is_reversed=False)

    assert first is second

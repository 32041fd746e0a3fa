"""Hooks of a module around another forward."""

from __future__ import annotations

import torch
from torch import nn

from gradrewrite.backends.module_hooks import HookedForwards


def test_one_class_for_each_type_and_a_forward_for_each_call() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    hooked = HookedForwards()
    first, second = (hooked.around(lambda x, n=n: x + n, module, nn.Linear, "it") for n in (1, 2))

    assert [first(torch.zeros(())).item(), second(torch.zeros(())).item()] == [1, 2]
    assert seen == ["Linear", "Linear"]
    assert type(first) is type(second)

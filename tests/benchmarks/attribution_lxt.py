"""Relevance of ``examples/attribution.py`` beside that of lxt, on one GPT-2 with random weights.

``pip install --no-deps lxt`` first; lxt changes classes of transformers in this process. Only its rules of
GPT-2 are imported: those of other models (lxt 2.1) need an older transformers.
``python -m tests.benchmarks.attribution_lxt`` prints the largest difference over the largest relevance.
"""

from __future__ import annotations

import importlib
import sys
import types

import torch
from torch import nn

import gradrewrite as gr
from gradrewrite.examples.attribution import RULES, Recall, relevance, sequences


def import_packages(*names: str) -> None:
    """Make packages known without running their ``__init__``."""
    for name in names:
        parent, _, own = name.rpartition(".")
        package = types.ModuleType(name)
        package.__path__ = [f"{path}/{own}" for path in importlib.import_module(parent).__path__]
        sys.modules[name] = package


def main() -> None:
    """Compare."""
    import_packages("lxt.efficient", "lxt.efficient.models")
    rules, patches = (importlib.import_module(f"lxt.efficient.{name}") for name in ("models.gpt2", "patches"))
    from transformers.models.gpt2 import modeling_gpt2

    torch.manual_seed(0)
    model = Recall().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens, _, wanted = sequences(8, 0)
    embedded, positions = model.embedded(tokens).detach(), model.gpt.transformer.wpe.weight.detach()
    ours = relevance(model, RULES, embedded, wanted, positions)
    plain = relevance(model, [], embedded, wanted, positions)
    for target, patch in rules.attnLRP.items():
        if target is not modeling_gpt2:  # its table of attention functions is another one today
            patch(target)
    modeling_gpt2.eager_attention_forward = patches.wrap_attention_forward(modeling_gpt2.eager_attention_forward)
    given = embedded.clone().requires_grad_()
    model(given).gather(1, wanted[:, None]).sum().backward()
    theirs = (given + positions).detach() * given.grad
    size = theirs.abs().max()
    print(f"gradrewrite {gr.__version__}, difference {(ours - theirs).abs().max() / size:.1e}", end=", ")
    print(f"of input x gradient {(plain - theirs).abs().max() / size:.1e}")


if __name__ == "__main__":
    main()

"""Explain the answers of a GPT-2 and a ViT: relevance instead of gradients, by rules at the backward of ops.

Both models come from configurations and are trained as they are: the GPT-2 to repeat the token that followed a marker,
the ViT on scikit-learn's digits. The rules are those of AttnLRP (Achtibat et al., 2024,
https://arxiv.org/abs/2402.05602) in the form input x gradient: an activation hands on the gradient times the quotient
of output and input, a normalization takes its standard deviation as a constant, a product gives half to each factor,
and a softmax is Taylor's expansion, which torch computes anyway. No class of transformers is changed:
``gr.transform(model, RULES)`` is a second view of the trained model.
``python examples/attribution.py`` prints how often the most relevant token is the one to repeat, and how the score of a
digit falls without its most relevant pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.policy.actions import Policy

LENGTH, TOKENS, MARKER = 24, 32, 0
TAKEN_AWAY = 8  # pixels, of 64


def identity(op: gr.BackwardOp) -> Any:
    """Activations: the relevance of the output is that of the input."""
    (x,), y = op.inputs, op.output
    is_small = x.abs() < 1e-6
    return op.error * torch.where(is_small, 0.5, y / torch.where(is_small, 1, x))


def constant_deviation(op: gr.BackwardOp) -> Any:
    """Layer norms: the deviation is a constant, so that the relevance of the input is that of the output."""
    x, weight = op.inputs[:2]
    eps = op.kwargs.get("eps", op.args[4] if len(op.args) > 4 else 1e-5)
    scale = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    scaled = op.error * weight * scale
    return (scaled - scaled.mean(-1, keepdim=True), *op.vjp(op.error)[1:])


def halves(op: gr.BackwardOp) -> Any:
    """Products of two values of the forward: each factor has half of the relevance."""
    return [None if g is None else g / 2 for g in op.vjp(op.error)]


def expansion(op: gr.BackwardOp) -> Any:
    """Softmax: Taylor's expansion at its input; records the relevance of its bias."""
    (gradient,) = op.vjp(op.error)
    (x,), y = op.inputs, op.output
    assert gradient is not None  # a softmax has one input, whose gradient is wanted here
    of_input = torch.where(y > 0, x * gradient, 0).sum()
    gr.record("absorbed", (y * op.error).sum() - of_input)
    return gradient


RULES: Policy = [
    gr.on("backward:*/gelu", identity),
    gr.on("backward:*/layer_norm", constant_deviation),
    gr.on("backward:*/matmul", halves),
    gr.on("backward:*/softmax", expansion),
]


class Recall(nn.Module):
    """A GPT-2 that is to repeat the token behind the marker, at the end of a sequence."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": 4,
            "vocab_size": TOKENS,
            "n_positions": LENGTH,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(
            **sizes, **dropouts, activation_function="gelu", attn_implementation="eager", use_cache=False
        )
        self.gpt = GPT2LMHeadModel(config)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, without positions."""
        return self.gpt.transformer.wte(tokens)  # type: ignore[no-any-return]

    def forward(self, embedded: Tensor) -> Tensor:
        """Return the scores of the next token, ``[B, TOKENS]``."""
        return self.gpt(inputs_embeds=embedded).logits[:, -1]  # type: ignore[no-any-return]


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens ``[count, LENGTH]``, the position to repeat, and its token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, TOKENS, (count, LENGTH), generator=generator)
    at = torch.randint(0, LENGTH - 3, (count,), generator=generator)
    rows = torch.arange(count)
    tokens[rows, at] = MARKER
    tokens[:, -1] = MARKER
    return tokens, at + 1, tokens[rows, at + 1]


class Digits(nn.Module):
    """A ViT for images of 8 x 8 pixels."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "image_size": 8,
            "patch_size": 2,
        }
        config = ViTConfig(
            **sizes, intermediate_size=2 * width, num_channels=1, num_labels=10, attn_implementation="eager"
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of the digits, ``[B, 10]``, of pixels ``[B, 64]``."""
        return self.vit(pixels.view(-1, 1, 8, 8)).logits  # type: ignore[no-any-return]


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits, ``[1797, 64]`` from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def train(model: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]], steps: int) -> float:
    """Train a model on batches of ``draw``; return the last loss."""
    run = gr.transform(model, gr.on("gradient:*", gr.passes.ClipByGlobalNorm(1.0))).compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        given, wanted = draw(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run(given), wanted)
        loss.backward()
        optimizer.step()
    return loss.item()


def relevance(model: nn.Module, policy: Policy, given: Tensor, answers: Tensor, further: Tensor | float = 0) -> Tensor:
    """Return input x gradient of the scores of answers under a policy; ``further`` is added to the input inside."""
    given = given.detach().requires_grad_()
    scores = gr.transform(model, policy)(given)
    scores.gather(1, answers[:, None]).sum().backward()
    assert given.grad is not None
    return (given + further).detach() * given.grad


def recall(steps: int) -> None:
    """Train a GPT-2, and print the hits of its relevance."""
    torch.manual_seed(0)
    model = Recall()

    def draw(step: int) -> tuple[Tensor, Tensor]:
        tokens, _, wanted = sequences(64, step)
        return model.embedded(tokens), wanted

    loss = train(model, draw, steps)
    model.eval()
    tokens, at, wanted = sequences(256, 10**6)
    embedded = model.embedded(tokens).detach()
    positions = model.gpt.transformer.wpe.weight.detach()
    is_right = model(embedded).argmax(-1) == wanted
    print(f"GPT-2: loss {loss:.3f}, {is_right.float().mean():.0%} of {len(tokens)} answers are right")
    for name, policy in (("input x gradient", []), ("AttnLRP", RULES)):
        found = relevance(model, policy, embedded, wanted, positions).sum(-1)[:, :-1]
        hits = (found.argmax(-1) == at).float().mean()
        print(f"{name:18} the most relevant token is the one to repeat in {hits:.0%}")


def classify(steps: int) -> None:
    """Train a ViT, and print scores without its most relevant pixels."""
    torch.manual_seed(0)
    model, (pixels, labels) = Digits(), digits()

    def draw(step: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, 1500, (64,), generator=torch.Generator().manual_seed(step))
        return pixels[rows], labels[rows]

    loss = train(model, draw, steps)
    model.eval()
    pixels, labels = pixels[1500:], labels[1500:]
    before = model(pixels).detach().gather(1, labels[:, None])
    is_right = (model(pixels).argmax(-1) == labels).float().mean()
    print(f"ViT: loss {loss:.3f}, {is_right:.0%} of {len(labels)} digits are right, score {before.mean():.2f}")
    for name, policy in (("input x gradient", []), ("AttnLRP", RULES)):
        found = relevance(model, policy, pixels, labels)
        left = pixels.scatter(1, found.topk(TAKEN_AWAY, dim=1).indices, 0.0)
        print(f"{name:18} without {TAKEN_AWAY} pixels: {model(left).detach().gather(1, labels[:, None]).mean():.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="updates of each training")
    args = parser.parse_args(argv)
    recall(args.steps)
    classify(args.steps)


if __name__ == "__main__":
    main()

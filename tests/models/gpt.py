"""A small GPT from a configuration, with the loss inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

ErrorClip = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Decoder-only transformer; ``forward(tokens, targets)`` returns the loss."""

    def __init__(
        self, layers: int = 4, width: int = 64, heads: int = 4, vocabulary: int = 128, context: int = 32
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int = 4, context: int = 32, vocabulary: int = 128, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random tokens and targets ``[rows, context]``."""
    tokens = torch.randint(0, vocabulary, (rows, context + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def hook_outputs(model: nn.Module, clip: ErrorClip, same: tuple[str, ...] = (".attn", ".mlp")) -> None:
    """Write error clips into a model by hand: a tensor hook on every module's output (not the root's).

    Args:
        model: The model, changed in place.
        clip: The hook.
        same: Ends of the names of modules that return the same tensor as a module inside of them; such a tensor gets
            one hook, as an engineer would place it.
    """

    def hook(_: nn.Module, __: object, output: object) -> None:
        for value in output if isinstance(output, tuple) else [output]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(clip)

    for name, module in model.named_modules():
        if name and not name.endswith(same) and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(hook)

"""Train a BERT on masked characters in half precision, with a pooler that the loss does not use.

The pooler's parameters are in the optimizer, and their gradients are missing: that is no error for a check, a clip or a
GradScaler. Its tanh is watched all the same. The GradScaler starts far too high, so the first updates are skipped, and
counted. ``python examples/unused_pooler.py --steps 40`` prints what the monitor and the doctor say.
It needs ``transformers``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Observe

CHARACTERS, LENGTH, ROWS = 128, 32, 8
MASK = 0
SATURATED = "saturated@activation:bert.pooler.activation/tanh"
POLICY = (
    gr.on("activation:bert.pooler*/tanh", Observe("saturated")),
    gr.on("gradient:*", CheckFinite("skip")),
    gr.on("step:*", ClipByGlobalNorm(1.0)),
)


class MaskedCharacters(nn.Module):
    """Predicts characters that are masked; BERT computes its pooled output, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.bert = BertModel(BertConfig(vocab_size=CHARACTERS, max_position_embeddings=LENGTH, **sizes))
        self.head = nn.Linear(32, CHARACTERS)
        with torch.no_grad():  # as after a training that went wrong: the tanh is at its bounds
            self.bert.pooler.dense.weight.mul_(1000)

    def forward(self, masked: Tensor, characters: Tensor) -> Tensor:
        """Return the mean loss of the masked ones of ``[rows, length]`` characters."""
        logits = self.head(self.bert(masked).last_hidden_state)
        return functional.cross_entropy(logits[masked == MASK].float(), characters[masked == MASK])


def train(steps: int, *, init_scale: float = 2.0**30) -> tuple[gr.RewrittenModule, list[float]]:
    """Train with float16 autocast, a GradScaler and fused AdamW; return the model and the losses."""
    torch.manual_seed(0)
    text = torch.tensor([ord(c) for c in "".join(topics.values()) if ord(c) < CHARACTERS])
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    model = gr.transform(MaskedCharacters(), list(POLICY), loss_scale=scaler)
    optimizer = gr.guard(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), model)
    losses = []
    hidden = torch.arange(LENGTH) % 6 == 0
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,))
        characters = text[starts[:, None] + torch.arange(LENGTH)]
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(characters.masked_fill(hidden, MASK), characters)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print what there is to say about pooler, skipped updates and saturation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    model, losses = train(options.steps)
    missing = [name for name, p in model.named_parameters() if p.grad is None and "pooler" in name]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; no gradient: {', '.join(missing)}")
    print(f"{model.monitor.skipped} of {options.steps} updates were skipped while the GradScaler found its scale")
    print(f"share of the pooler's tanh at its bounds: {model.monitor.latest()[SATURATED]:.2f}")
    for finding in model.monitor.diagnose():
        print(finding.text)


if __name__ == "__main__":
    main()

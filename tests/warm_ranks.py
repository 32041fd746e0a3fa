"""A process without threads that has loaded and traced what every rank needs, and is then forked."""

import torch

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

gr.transform(torch.nn.Linear(1, 1), gr.on("gradient:*", ClipByGlobalNorm(1.0))).trace(torch.ones(1))
torch.compiler.reset()

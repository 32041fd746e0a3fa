"""The models that are measured, in their sizes, and the ways in which each is trained."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

from models.convnet import ConvNet, images
from models.gpt import Gpt, batch, hook_outputs
from models.lstm import LstmLoop, sequences

BOUND = 1e-3
MAX_NORM = 1.0
WITH_BOUNDS = ("GPT:large", "Two layers:small")  # cases of which the project's bounds speak
ON_GPU = 16  # times as many rows in a batch


@dataclass(frozen=True)
class Case:
    """A model of one size.

    Attributes:
        model: Which one.
        size: ``"small"``, ``"medium"``, ``"large"`` or ``"huge"``.
        text: Its sizes.
        make: Makes it.
        inputs: Makes a batch of this many rows on a device.
        rows: Rows of a batch on the CPU, of which a GPU has sixteen times as many.
        is_for_gpu: Whether it is too large for a CPU.
    """

    model: str
    size: str
    text: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, str], tuple[Tensor, ...]]
    rows: int
    is_for_gpu: bool = False

    @property
    def name(self) -> str:
        """Model and size in one word, as the command line takes it."""
        return f"{self.model}:{self.size}"

    def batch(self, device: str) -> tuple[Tensor, ...]:
        """A batch on this device."""
        return self.inputs(self.rows * (1 if device == "cpu" else ON_GPU), device)


def _gpt(size: str, layers: int, width: int, rows: int) -> Case:
    text = f"{layers} layer{'s' if layers > 1 else ''} of width {width}, {rows} x 32 tokens"
    return Case(
        "GPT", size, text, lambda: Gpt(layers=layers, width=width), lambda n, device: batch(n, device=device), rows
    )


def _conv(size: str, widths: tuple[int, ...], pixels: int) -> Case:
    text = f"{len(widths)} convolutions with {' and '.join(map(str, widths))} channels, 8 images of {pixels} x {pixels}"
    return Case(
        "ConvNet", size, text, lambda: ConvNet(widths), lambda n, device: images(n, pixels, device=device), rows=8
    )


def _lstm(size: str, width: int, steps: int) -> Case:
    return Case(
        "LSTM loop",
        size,
        f"{steps} time steps of width {width}, 16 rows",
        lambda: LstmLoop(width),
        lambda n, device: sequences(n, steps, width, device),
        rows=16,
    )


def _huge_gpt() -> nn.Module:
    return Gpt(layers=12, width=768, heads=12, vocabulary=8192, context=512).bfloat16()


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


CASES = {
    case.name: case
    for case in (
        _gpt("small", 1, 64, 2),
        _gpt("medium", 2, 128, 4),
        _gpt("large", 4, 256, 8),
        Case(
            "GPT",
            "huge",
            "12 layers of width 768 in bfloat16, 16 x 512 tokens",
            _huge_gpt,
            lambda n, device: batch(n, 512, 8192, device),
            rows=1,
            is_for_gpu=True,
        ),
        _conv("small", (16, 32), 16),
        _conv("medium", (32, 64), 32),
        _conv("large", (32, 64, 128), 32),
        _lstm("small", 32, 2),
        _lstm("medium", 64, 3),
        _lstm("large", 128, 5),
        Case(
            "Two layers",
            "small",
            "8 wide, 4 rows: the fixed cost of a step",
            _two_layers,
            lambda n, device: (torch.randn(n, 8, device=device),),
            rows=4,
        ),
    )
}


def clip(g: Tensor) -> Tensor:
    """The clip that is written by hand."""
    return g.clamp(-BOUND, BOUND)


def everywhere(action: Any) -> list[gr.Policy]:
    """An action at the errors and activations of all module outputs, and at all gradients."""
    return [gr.on(f"{kind}:*", action) for kind in ("error", "activation", "gradient")]


POLICIES: Mapping[str, Callable[[], Any]] = {
    "empty": list,
    "clips": lambda: gr.on("error:*", ClipByValue(BOUND)),
    "global norm": lambda: gr.on("gradient:*", ClipByGlobalNorm(MAX_NORM)),
    "gradient checks": lambda: gr.on("gradient:*", CheckFinite("skip")),
    "checks": lambda: everywhere(CheckFinite("skip")),
    "statistics": lambda: everywhere(Observe("norm", "max_abs", "zeros")),
    "clips, checks, statistics": lambda: [
        gr.on("error:*", ClipByValue(BOUND)),
        *everywhere([CheckFinite("skip"), Observe("norm", "max_abs", "zeros")]),
    ],
    "function": lambda: gr.on("error:*", clip),
}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: What the tables call it.
        text: What it is.
        how: What runs the model.
        has_hooks: Whether a hook on every module's output clips its error.
        options: Options of Inductor.
        also: What a step does beside forward and backward.
        code: The way whose compiled code it shares, so that only that one is compiled for measurements.
        is_timed: Whether its steps are measured, and not only its compilation.
        only: The cases that are trained in this way; empty for all.
    """

    name: str
    text: str
    how: Literal["eager", "torch.compile", "gradrewrite"]
    has_hooks: bool = False
    options: Mapping[str, Any] | None = None
    also: Literal["", "clip_grad_norm_", "detect_anomaly"] = ""
    code: str = ""
    is_timed: bool = True
    only: tuple[str, ...] = ()

    def is_in(self, case: str) -> bool:
        """Whether a case is trained in this way."""
        return not self.only or case in self.only

    @property
    def is_compiled(self) -> bool:
        """Whether it has compiled code of its own."""
        return self.how != "eager" and not self.code

    def step(self, case: Case, device: str) -> Step:
        """A training step, without an optimizer; the same numbers for all ways."""
        torch.manual_seed(0)
        model = case.make().to(device)
        inputs = case.batch(device)
        if self.has_hooks:
            hook_outputs(model, clip)
        run: Callable[..., Tensor] = model
        if self.how == "torch.compile":
            run = torch.compile(_with_own_forward(model), fullgraph=True, options=dict(self.options or {}) or None)
        elif self.how == "gradrewrite":
            run = gr.transform(model, POLICIES[self.name]())
            run.compile()
        return Step(model, run, inputs, self.also)


def _with_own_forward(model: nn.Module) -> nn.Module:
    """Give a model a code object of its own, by which torch keeps compiled code: no way looks among that of others."""
    forward = type(model).forward
    own = types.FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


@dataclass(frozen=True)
class Step:
    """Forward and backward of one model on one batch.

    Attributes:
        model: Whose gradients are computed.
        run: What is called.
        inputs: The batch.
        also: As in ``Way``.
    """

    model: nn.Module
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    also: str = ""

    def clear(self) -> None:
        """Let go of the gradients."""
        self.model.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        """Run; gradients are added to those that are there."""
        if self.also == "detect_anomaly":
            with torch.autograd.set_detect_anomaly(True):
                self.run(*self.inputs).sum().backward()
            return
        self.run(*self.inputs).sum().backward()
        if self.also == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


WAYS = {
    way.name: way
    for way in (
        Way("plain", "`torch.compile`", "torch.compile"),
        Way("empty", "`gr.transform` with an empty policy", "gradrewrite"),
        Way("by hand", "`register_hook` on every module's output, under `torch.compile`", "torch.compile", True),
        Way("clips", '`gr.on("error:*", ClipByValue(...))`: the same clips', "gradrewrite"),
        Way(
            "plain, clip_grad_norm_",
            "`torch.compile`, then the eager function",
            "torch.compile",
            code="plain",
            also="clip_grad_norm_",
        ),
        Way("global norm", '`gr.on("gradient:*", ClipByGlobalNorm(...))`', "gradrewrite"),
        Way("gradient checks", '`gr.on("gradient:*", CheckFinite("skip"))`', "gradrewrite", only=WITH_BOUNDS),
        Way("checks", '`CheckFinite("skip")` everywhere', "gradrewrite"),
        Way("statistics", '`Observe("norm", "max_abs", "zeros")` everywhere', "gradrewrite"),
        Way("clips, checks, statistics", "all three", "gradrewrite"),
        Way("nan_asserts", "`torch.compile` with Inductor's option", "torch.compile", options={"nan_asserts": True}),
        Way("eager", "no compiler", "eager"),
        Way("eager, hooks", "the same clips by `register_hook`", "eager", True),
        Way("eager, detect_anomaly", "`torch.autograd.set_detect_anomaly(True)`", "eager", also="detect_anomaly"),
        Way(
            "function",
            "the clips as a tensor function, which has no hash for the cache",
            "gradrewrite",
            is_timed=False,
            only=WITH_BOUNDS,
        ),
    )
}  # fmt: skip

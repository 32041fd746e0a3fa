"""Random models as programs: hypothesis draws their Python source, which a failing example shows."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Shape = tuple[int, ...]
_NUMBERS = itertools.count()
_KEPT = 8
_HEADER = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
import gradrewrite as gr


"""


@dataclass(frozen=True)
class Program:
    """A model as source; ``Model`` is its class.

    Attributes:
        source: Python text of all classes.
        shape: Shape of the one input.
        dtype: Of parameters and input.
        seed: Of parameters and input.
        input_needs_gradient: Whether the input is a leaf that requires a gradient.
        autocast: Whether it runs under autocast to bfloat16.
    """

    source: str
    shape: Shape
    dtype: torch.dtype
    seed: int
    input_needs_gradient: bool
    autocast: bool

    def make(self) -> tuple[nn.Module, Tensor]:
        """The model and its input."""
        torch.manual_seed(self.seed)
        model: nn.Module = _imported(_HEADER + self.source).Model().to(self.dtype)
        x = torch.randn(self.shape, dtype=self.dtype)
        return model, x.requires_grad_(self.input_needs_gradient)

    def __repr__(self) -> str:
        needs = ", requires_grad=True" if self.input_needs_gradient else ""
        autocast = ", autocast" if self.autocast else ""
        return f"input {self.shape}, {self.dtype}{needs}{autocast}, seed {self.seed}\n{self.source}"


def _imported(text: str) -> Any:
    """The source as a module: Dynamo imports the modules of the functions that it reads. The last few are kept."""
    name = f"program_{next(_NUMBERS)}"
    module = types.ModuleType(name)
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(keepends=True), f"<{name}>")
    sys.modules[name] = module
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    old = f"program_{int(name.removeprefix('program_')) - _KEPT}"
    sys.modules.pop(old, None)
    linecache.cache.pop(f"<{old}>", None)
    return module


@dataclass
class _Value:
    name: str
    shape: Shape
    is_mutable: bool = True  # no leaf, and no one of several views of one op


@dataclass
class _Class:
    """One class while its source is written."""

    name: str
    depth: int
    width: int
    makes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    children: dict[str, list[str]] = field(default_factory=dict)  # by kind
    outputs: dict[str, list[Shape]] = field(default_factory=dict)  # of children that are blocks

    def add(self, code: str, shape: Shape, *, is_mutable: bool = True) -> _Value:
        value = _Value(f"v{len(self.values)}", shape, is_mutable)
        self.lines.append(f"{value.name} = {code}")
        self.values.append(value)
        return value

    @property
    def text(self) -> str:
        makes = "".join(f"        {line}\n" for line in self.makes)
        lines = "".join(f"        {line}\n" for line in self.lines)
        head = f"class {self.name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        return f"{head}{makes}\n    def forward(self, v0):\n{lines}"


class _Writer:
    """Draws programs; each method adds one statement, or nothing where no value fits."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.classes: list[_Class] = []

    def pick(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def block(self, name: str, shape: Shape, depth: int) -> _Class:
        c = _Class(name, depth, shape[-1])
        c.values.append(_Value("v0", shape, is_mutable=False))
        c.makes += [
            f"self.w = nn.Parameter(torch.randn({c.width}))",
            f"self.register_buffer('b', torch.randn({c.width}))",
        ]
        self.linear(c)
        for _ in range(self.draw(st.integers(1, 6))):
            statement = self.pick(_STATEMENTS)
            statement(self, c)
        self.returns(c)
        self.classes.append(c)
        return c

    def of(self, c: _Class, fits: Any = lambda v: True) -> _Value | None:
        found = [v for v in c.values if fits(v)]
        return self.pick(found[::-1]) if found else None

    def child(self, c: _Class, kind: str, make: str) -> str:
        known = c.children.setdefault(kind, [])
        if known and self.draw(st.booleans()):
            return str(self.pick(known))
        name = f"{kind}{len(known)}"
        c.makes.append(f"self.{name} = {make}")
        known.append(name)
        return name

    def linear(self, c: _Class) -> None:
        value = self.of(c, lambda v: v.shape and v.shape[-1] == c.width)
        if value is not None:
            frozen = bool(c.children.get("fc")) and self.draw(st.integers(0, 7)) == 7
            make = f"nn.Linear({c.width}, {c.width})" + (".requires_grad_(False)" if frozen else "")
            c.add(f"self.{self.child(c, 'fc', make)}({value.name})", value.shape)

    def module(self, c: _Class) -> None:
        kind, make = self.pick(
            [
                ("act", "nn.Tanh()"), ("norm", f"nn.LayerNorm({c.width})"), ("same", "nn.Identity()"),
                ("flat", "nn.Flatten(0)"), ("drop", "nn.Dropout(0.5)"), ("relu", "nn.ReLU(inplace=True)"),
                ("gelu", "nn.GELU()"),
            ]
        )  # fmt: skip
        value = self.of(c, lambda v: len(v.shape) > 0 and (kind != "norm" or v.shape[-1] == c.width))
        if value is not None and (kind != "relu" or value.is_mutable):
            shape = (_size(value.shape),) if kind == "flat" else value.shape
            c.add(
                f"self.{self.child(c, kind, make)}({value.name})", shape, is_mutable=kind != "same" or value.is_mutable
            )

    def tied(self, c: _Class) -> None:
        if len(c.children.get("fc", [])) > 1:
            c.makes.append("self.fc1.weight = self.fc0.weight")

    def unary(self, c: _Class) -> None:
        value = self.of(c)
        assert value is not None
        code = self.pick(
            ["torch.tanh({})", "{}.sin()", "{} * 1.5", "-{}", "F.gelu({})", "{}.abs()", "{} / 2", "{} ** 2",
             "{}.contiguous()", "{}.clamp(min=-0.5)", "1 - {}", "{}.detach() * {}", "gr.tap({}, 't')", "{}.clone()",
             "{} * self.b.mean()", "torch.where({} > 0, {}, 0.1)", "{}.exp().clamp(max=3.0)"]
        )  # fmt: skip
        is_same = code in ("gr.tap({}, 't')", "{}.contiguous()")
        c.add(code.replace("{}", value.name), value.shape, is_mutable=value.is_mutable or not is_same)

    def binary(self, c: _Class) -> None:
        a = self.of(c)
        assert a is not None
        b = self.of(c, lambda v: v.shape == a.shape)
        assert b is not None
        c.add(self.pick(["{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})"]).format(a.name, b.name), a.shape)

    def parameter(self, c: _Class) -> None:
        a = self.of(c, lambda v: v.shape and v.shape[-1] == c.width)
        if a is not None:
            c.add(
                self.pick(["{} * self.w", "{} + self.b", "{} + self.w.detach()", "{} - self.w.tanh()"]).format(a.name),
                a.shape,
            )

    def reduction(self, c: _Class) -> None:
        a = self.of(c, lambda v: len(v.shape) > 0)
        if a is not None:
            code, shape = self.pick([("{}.sum()", ()), ("{}.sum(0)", a.shape[1:]), ("{}.softmax(-1)", a.shape)])
            c.add(code.format(a.name), shape)

    def matmul(self, c: _Class) -> None:
        a = self.of(c, lambda v: len(v.shape) == 2)
        if a is not None:
            c.add(f"{a.name} @ {a.name}.mT", (a.shape[0], a.shape[0]))

    def view(self, c: _Class) -> None:
        a = self.of(c, lambda v: len(v.shape) > 0)
        if a is None:
            return
        rows, rest, n = a.shape[0], a.shape[1:], a.name
        options: list[tuple[str, Shape]] = [
            (f"{n}.reshape(-1)", (_size(a.shape),)),
            (f"{n}.unsqueeze(0)", (1, *a.shape)),
        ]
        if rows > 0:
            options += [(f"{n}[:1]", (1, *rest)), (f"{n}[1:]", (rows - 1, *rest)), (f"{n}[-1]", rest)]
        if len(a.shape) == 2:
            options += [
                (f"{n}.mT", a.shape[::-1]),
                (f"{n}.t()", a.shape[::-1]),
                (f"{n}.transpose(0, 1)", a.shape[::-1]),
            ]
            options += [(f"{n}[:, 0]", (rows,)), (f"{n}.expand(2, -1, -1)", (2, *a.shape))]
        code, shape = self.pick(options)
        c.add(code, shape, is_mutable=a.is_mutable and "expand" not in code)

    def chunk(self, c: _Class) -> None:
        a = self.of(c, lambda v: len(v.shape) > 0 and v.shape[-1] % 2 == 0 and v.shape[-1] > 0)
        if a is not None:
            half = (*a.shape[:-1], a.shape[-1] // 2)
            pair = c.add(f"{a.name}.chunk(2, -1)[0]", half, is_mutable=False)
            c.lines[-1] = f"{pair.name}, v{len(c.values)} = {a.name}.chunk(2, -1)"
            c.values.append(_Value(f"v{len(c.values)}", half, is_mutable=False))

    def in_place(self, c: _Class) -> None:
        a = self.of(c, lambda v: v.is_mutable and len(v.shape) > 0 and v.shape[0] > 0)
        if a is None:
            return
        options = ["{}.mul_(1.5)", "{}.add_(0.5)", "{}[0].mul_(3.0)", "{}[:1].add_(1.0)", "{} *= 2", "{}.tanh_()",
                   "{}[-1].copy_({}[0].detach() * 2)", "{}[0] = {}[-1] * 3", "{}.detach().mul_(1.5)"]  # fmt: skip
        if len(a.shape) == 2 and a.shape[1] > 0:
            options += ["{}[:, 0].mul_(2.0)", "{}.t().mul_(1.5)", "{}.diagonal().mul_(2.0)", "{}[:, 1:].zero_()",
                        "{}.mT[0].add_({}[:, 0].detach())"]  # fmt: skip
        c.lines.append(self.pick(options).replace("{}", a.name))

    def without_gradient(self, c: _Class) -> None:
        a = self.of(c)
        assert a is not None
        value = c.add(f"{a.name}.detach()", a.shape)
        c.lines[-1] = f"with torch.no_grad():\n            {value.name} = {a.name} * 2"

    def buffer(self, c: _Class) -> None:
        c.lines.append(self.pick(["self.b.mul_(0.9)", "self.b.add_(v0.detach().sum())", "self.b[0] = 1.0"]))

    def selection(self, c: _Class) -> None:
        a = self.of(c)
        assert a is not None
        bound = self.pick([0.0, 1.0, 100.0])
        selected = f"s{len(c.lines)}"
        c.lines.append(f"{selected} = {a.name}[{a.name}.detach() > {bound}]")
        if self.draw(st.booleans()):
            c.lines.append(f"{selected} = torch.sin({selected})")
        c.add(f"({selected} * {selected}).sum()", ())

    def nested(self, c: _Class) -> None:
        a = self.of(c, lambda v: len(v.shape) > 0 and v.shape[-1] > 0)
        if a is None or c.depth >= 2:
            return
        known = [name for name in c.children.get("block", []) if c.outputs[f"{name} in"] == [a.shape]]
        if known and self.draw(st.booleans()):
            name = str(self.pick(known))
        else:
            made = self.block(f"Block{len(self.classes)}_{c.depth}", a.shape, c.depth + 1)
            name = f"block{len(c.children.setdefault('block', []))}"
            c.children["block"].append(name)
            c.makes.append(f"self.{name} = {made.name}()")
            c.outputs[name], c.outputs[f"{name} in"] = made.outputs[""], [a.shape]
        shapes = c.outputs[name]
        call = f"self.{name}({a.name})"
        if self.draw(st.integers(0, 4)) == 0:
            call = f"checkpoint(self.{name}, {a.name}, use_reentrant=False)"
        names = [f"v{len(c.values) + n}" for n in range(len(shapes))]
        c.lines.append(f"{', '.join(names)}{',' if len(names) > 1 else ''} = {call}")
        c.values += [_Value(n, shape) for n, shape in zip(names, shapes, strict=True)]

    def returns(self, c: _Class) -> None:
        count = self.draw(st.integers(1, 3))
        chosen = [self.of(c, lambda v: v.name != "v0") or c.values[-1] for _ in range(count)]
        codes, shapes = [], []
        for value in chosen:
            code, shape = value.name, value.shape
            if len(shape) > 0 and shape[0] > 0:
                code, shape = self.pick(
                    [(code, shape)] * 4
                    + [
                        (f"{code}[:1]", (1, *shape[1:])),
                        (f"{code}[1:]", (shape[0] - 1, *shape[1:])),
                        (f"{code}.reshape(-1)", (_size(shape),)),
                    ]
                )
            codes.append(code)
            shapes.append(shape)
        c.outputs[""] = shapes
        if c.depth == 0 and self.draw(st.integers(0, 3)) == 0:
            items = ", ".join(f"'out{n}': {code}" for n, code in enumerate(codes))
            c.lines.append(f"return {{{items}}}")
        else:
            c.lines.append(f"return {', '.join(codes)}")


_STATEMENTS = [
    _Writer.linear, _Writer.linear, _Writer.module, _Writer.module, _Writer.unary, _Writer.unary, _Writer.binary,
    _Writer.binary, _Writer.parameter, _Writer.reduction, _Writer.matmul, _Writer.view, _Writer.view, _Writer.chunk,
    _Writer.in_place, _Writer.in_place, _Writer.without_gradient, _Writer.buffer, _Writer.selection, _Writer.nested,
    _Writer.nested, _Writer.tied,
]  # fmt: skip


def _size(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


@st.composite
def programs(draw: Any) -> Program:
    """Random models: reuse, fan-out, views, in-place ops through views, returned aliases, checkpoints, and more."""
    rows, width = draw(st.sampled_from([2, 3, 1, 0])), draw(st.sampled_from([4, 2, 3]))
    shape = draw(st.sampled_from([(rows, width), (2, rows, width)]))
    writer = _Writer(draw)
    top = writer.block("Model", shape, 0)
    source = (
        "\n\n".join(c.text for c in writer.classes if c is not top)
        + ("\n\n" if len(writer.classes) > 1 else "")
        + top.text
    )
    dtype = draw(st.sampled_from([torch.float64] * 6 + [torch.float32, torch.bfloat16]))
    autocast = dtype == torch.float32 and draw(st.booleans())
    return Program(source, shape, dtype, draw(st.integers(0, 3)), draw(st.booleans()), autocast)

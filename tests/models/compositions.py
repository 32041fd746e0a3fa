"""Programs that compose models, policies, loops and ways to run at random, as text; and their references."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite import passes
from gradrewrite.backends.backend import make_backend
from gradrewrite.backends.engines import AotEager
from gradrewrite.policy.state_store import StateStore
from gradrewrite.testing import _Hooked

from models.buffers import AmaxHistory, Codebook, Counted, MovingScale, Normalized, RunningMean
from models.small import Lambda

WIDTH, ROWS, STEPS = 4, 6, 3


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x[:, None])
        return y.mean(1) + x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x).tanh() * self.right(x).sigmoid()
        return y


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, h)
        return h


LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "Inplace": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1, inplace=True)),
    "Twice": lambda: Lambda(lambda m, x: m.one(m.one(x).sin()).sin(), one=nn.Linear(WIDTH, WIDTH)),
    "Residual": Residual,
    "Checkpointed": Checkpointed,
    "Attention": Attention,
    "Convolution": Convolution,
    "Branches": Branches,
    "Loop": Loop,
    "Normalized": Normalized,
    "RunningMean": RunningMean,
    "MovingScale": MovingScale,
    "Codebook": Codebook,
    "Counted": Counted,
    "AmaxHistory": AmaxHistory,
}


class Net(nn.Module):
    """Layers one behind the other, two of them perhaps with tied weights, and a head."""

    def __init__(self, layers: Sequence[str], *, tied: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.first(x).sin())).square().mean()
        return y


def clip_to_mean(g: Tensor) -> Tensor:
    return g.clamp(-g.abs().mean(), g.abs().mean())


def decay(g: Tensor, p: Tensor) -> Tensor:
    return g.add(p, alpha=0.01)


# By the kind of their site; each occurs in at least 3 % of the drawn policies.
ACTIONS: Mapping[str, Sequence[str]] = {
    "error": (
        "ClipByValue(1e-3)", "ClipByNorm(1e-2)", "Scale(0.5)", "clip_to_mean", "decay", "Observe('norm')",
        "CheckFinite('record')", "Keep()", "NanToNum()",
    ),
    "gradient": (
        "ClipByValue(1e-3)", "ClipByNorm(1e-2)", "ClipByGlobalNorm(1e-2)", "ClipByGlobalNorm(1e-2)", "L2(0.1)", "decay",
        "Observe('max_abs')", "Zero()", "CheckFinite('skip')", "CheckFinite('skip')",
    ),
    "activation": ("Observe('norm')", "CheckFinite('record')"),
    "saved": ("Recompute()", "Store('float32')"),
    "step": ("ClipByGlobalNorm(1e-2)", "CheckFinite('skip')", "Observe('norm')"),
}  # fmt: skip
PATTERNS: Mapping[str, Sequence[str]] = {
    "error": ("*", "layers.*", "layers.0", "first", "*/sin"),
    "gradient": ("*", "*.weight", "layers.*", "head.*"),
    "activation": ("*", "layers.*"),
    "saved": ("*",),
    "step": ("*",),
}
# In the regions themselves: what stands between them has no sites.
IN_REGIONS = {**PATTERNS, "error": ("first", "layers.0"), "activation": ("layers.*",)}
LOOPS = ("plain", "accumulated", "evaluated", "retained", "two forwards", "resumed", "bad batch")
WAYS = ("op by op", "dynamic", "regions", "parts", "backend")


@dataclass(frozen=True)
class Composition:
    """One program."""

    seed: int
    layers: tuple[str, ...]
    tied: bool
    rules: tuple[tuple[str, str, str], ...]  # kind, pattern, action
    loop: str
    way: str

    @classmethod
    def draw(cls, seed: int) -> Composition:
        draw = random.Random(seed)
        layers = tuple(draw.choice(list(LAYERS)) for _ in range(draw.randint(1, 3)))
        way, loop = draw.choice(WAYS), draw.choice((*LOOPS, "bad batch", "bad batch", "plain"))
        patterns = IN_REGIONS if way == "regions" else PATTERNS
        kinds = draw.choices(list(ACTIONS), k=draw.randint(2, 5))
        rules = [(kind, draw.choice(patterns[kind]), draw.choice(ACTIONS[kind])) for kind in kinds]
        wanted = [rule for rule in rules if _is_wanted(rule, way, loop)]
        saved = [rule for rule in wanted if rule[0] == "saved"][1:]  # a tensor has one form
        wanted = [rule for rule in wanted if rule not in saved]
        return cls(seed, layers, way != "regions" and draw.random() < 0.2, tuple(dict.fromkeys(wanted)), loop, way)

    @property
    def text(self) -> str:
        """The program, for a failure."""
        rules = "\n".join(f'    gr.on("{kind}:{pattern}", {action}),' for kind, pattern, action in self.rules)
        return (
            f"# seed {self.seed}, loop {self.loop!r}, way {self.way!r}\n"
            f"torch.manual_seed({self.seed})\nmodel = Net({list(self.layers)}, tied={self.tied}).double()\n"
            f"policy = [\n{rules}\n]\n"
        )

    def policy(self) -> list[gr.Rule]:
        """Make the policy anew."""
        names = {
            **{name: getattr(passes, name) for name in passes.__all__},
            "clip_to_mean": clip_to_mean,
            "decay": decay,
        }
        return [gr.on(f"{kind}:{pattern}", eval(action, names)) for kind, pattern, action in self.rules]

    def make(self) -> Net:
        """Make the plain model."""
        torch.manual_seed(self.seed)
        return Net(self.layers, tied=self.tied).double()


def _is_wanted(rule: tuple[str, str, str], way: str, loop: str) -> bool:
    """Leave out what is refused, or warned of, for a reason."""
    kind, _, action = rule
    if kind == "gradient" and action.startswith("ClipByGlobalNorm"):  # acts on each backward by itself
        return way != "regions" and loop in ("plain", "evaluated", "resumed")
    return action != "CheckFinite('skip')" or loop == "bad batch"


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


Result = dict[str, Tensor]


def run_rewritten(one: Composition) -> list[Result]:
    """Run a composition."""
    model = one.make()
    run, optimizer = _rewritten(one, model)
    found = []
    for number in range(STEPS):
        if one.loop == "resumed" and number == 1:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = one.make()
            run, optimizer = _rewritten(one, model)
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        if one.loop == "evaluated":
            model.eval()
            with torch.no_grad():
                run(batch(100 + number))
            model.train()
        optimizer.zero_grad()
        losses = [run(x) for x in _batches(one, number)] if one.loop == "two forwards" else []
        for loss in losses or map(run, _batches(one, number)):
            if one.loop == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
        found.append(_gradients(model))
        optimizer.step()
    return [*found, _state(model)]


def _rewritten(one: Composition, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    options: dict[str, Any] = {
        "dynamic": {"dynamic": True},
        "regions": {"regions": ["first", "layers.*", "head"]},
        "parts": {"fullgraph": False},
    }.get(one.way, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if one.way == "backend":
        backend = make_backend(one.policy(), None, AotEager())
        return torch.compile(model, backend=backend), gr.guard(optimizer, backend)
    rewritten = gr.transform(model, one.policy(), **options)
    return rewritten, gr.guard(optimizer, rewritten)


def run_reference(one: Composition) -> list[Result]:
    """Run the same on the plain model, with hooks of eager autograd, by hand at the steps."""
    model, policy, states, found = one.make(), one.policy(), StateStore(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(STEPS):
        if one.loop == "evaluated":
            model.eval()
            with torch.no_grad():
                model(batch(100 + number))
            model.train()
        optimizer.zero_grad()
        before, skips = copy.deepcopy(_state(model)), False
        for x in _batches(one, number):
            kept = {name: p.grad for name, p in model.named_parameters()}
            model.zero_grad()
            hooked = _Hooked(model, policy, _outside(one), (), states)
            loss = hooked(x)
            if one.loop == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
            hooked.finish()
            for name, p in model.named_parameters():
                old = kept[name]
                p.grad = p.grad if old is None else old if p.grad is None else old + p.grad
            skips |= any(v > 0 for key, v in hooked.records.items() if key.startswith("nonfinite@gradient:"))
        found.append(_gradients(model))
        if _step_sites(one, model) or (skips and any(action == "CheckFinite('skip')" for *_, action in one.rules)):
            model.load_state_dict(before)
        else:
            optimizer.step()
    return [*found, _state(model)]


def _outside(one: Composition) -> set[str]:
    return set()


def _step_sites(one: Composition, model: nn.Module) -> bool:
    """Act at the step sites, in order; whether the update is skipped."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    skips = False
    for kind, _, action in one.rules:
        if kind == "step" and action.startswith("ClipByGlobalNorm"):
            total = torch.stack([g.norm() for g in gradients]).norm()
            factor = torch.where(total > 1e-2, 1e-2 / total, torch.ones_like(total))
            for g in gradients:
                g.mul_(torch.where(total.isfinite() | total.isnan(), factor, 0.0))
        if kind == "step" and action == "CheckFinite('skip')":
            skips |= not all(bool(g.isfinite().all()) for g in gradients)
    return skips


def _batches(one: Composition, number: int) -> list[Tensor]:
    count = 2 if one.loop in ("accumulated", "two forwards") else 1
    found = [batch(10 * number + n) for n in range(count)]
    if one.loop == "bad batch" and number == 1:
        found[0][0] = math.nan
    return found


def _gradients(model: nn.Module) -> Result:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _state(model: nn.Module) -> Result:
    return {name: t.clone() for name, t in model.state_dict().items()}


def assert_same(one: Composition) -> None:
    """Compare a composition with its reference; AssertionError shows the program."""
    near = 1e-4 if any(action.startswith("Store") for *_, action in one.rules) else 1e-8
    for number, (got, wanted) in enumerate(zip(run_rewritten(one), run_reference(one), strict=True)):
        where = f"gradients of step {number}" if number < STEPS else "the model afterwards"
        assert got.keys() >= wanted.keys(), f"{where}: {sorted(wanted.keys() - got.keys())}\n{one.text}"
        finite = [float(t.abs().max()) for t in wanted.values() if t.is_floating_point() and t.isfinite().all()]
        largest = max(finite, default=1.0)
        for name, t in wanted.items():
            torch.testing.assert_close(
                got[name], t, rtol=near, atol=near * max(largest, 1e-12), equal_nan=True,
                msg=lambda m, n=name, w=where: f"{w}, {n}: {m}\n{one.text}",
            )  # fmt: skip

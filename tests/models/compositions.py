"""Programs that compose models, policies, loops and ways to run at random, as text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import gradrewrite as gr
from gradrewrite import passes

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


class OverTime(nn.Module):
    """A recurrent layer over three time steps, from states of its own or from zeros, its output masked."""

    def __init__(self, layer: nn.RNNBase, *, has_states: bool = False) -> None:
        super().__init__()
        self.rec, self.has_states = layer, has_states

    def forward(self, x: Tensor) -> Tensor:
        given = torch.stack([x, x.sin(), x.cos()], 1)
        count = self.rec.num_layers * (1 + self.rec.bidirectional)
        states = x.tanh().expand(count, -1, -1) if self.has_states else None
        output = self.rec(given, (states, states.cos()) if self.has_states and self.rec.mode == "LSTM" else states)[0]
        mask = torch.arange(3)[None] < 1 + torch.arange(len(x))[:, None] % 3
        y: Tensor = (output * mask[..., None]).sum(1)
        return y.unflatten(-1, (-1, WIDTH)).sum(1)


class Scalar(nn.Module):
    """Follows a mean in a tensor of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.mean.mul_(0.5).add_(y.detach().abs().mean())
        return y.sin()


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
    "LSTM": lambda: OverTime(nn.LSTM(WIDTH, WIDTH, batch_first=True), has_states=True),
    "GRU": lambda: OverTime(nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True), has_states=True),
    "RNN": lambda: OverTime(nn.RNN(WIDTH, WIDTH, bias=False, batch_first=True)),
    "Normalized": Normalized,
    "RunningMean": RunningMean,
    "MovingScale": MovingScale,
    "Codebook": Codebook,
    "Counted": Counted,
    "AmaxHistory": AmaxHistory,
    "Scalar": Scalar,
}


class Net(nn.Module):
    """Layers one behind the other, two of them perhaps with tied weights, and a head.

    It returns one loss, or two, or windows of what the head makes; with ``inner``, the features have their own gradient
    at the input among them.
    """

    def __init__(
        self, layers: Sequence[str], *, tied: bool, losses: int, windows: bool = False, inner: bool = False
    ) -> None:
        super().__init__()
        self.inner = inner
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.losses, self.loss_divisor, self.windows = losses, 1, windows
        if tied:
            self.head.weight = self.first.weight

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(self.first(x).sin())
        return h

    def finish(self, h: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.windows:
            overlapping: Tensor = self.head(h).unfold(1, 2, 1)
            return overlapping
        loss = self.head(h).square().mean() / self.loss_divisor
        return loss if self.losses == 1 else (loss, h.sin().mean())

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not (self.inner and torch.is_grad_enabled()):
            return self.finish(self.features(x))
        x = x.detach().requires_grad_()
        h = self.features(x)
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return self.finish(h + g)

    def grow(self) -> list[nn.Parameter]:
        """Append a layer; its parameters."""
        torch.manual_seed(1)
        layer = nn.Linear(WIDTH, WIDTH).double()
        self.layers.append(layer)
        return list(layer.parameters())


def clip_to_mean(g: Tensor) -> Tensor:
    return g.clamp(-g.abs().mean(), g.abs().mean())


def clip_to_percentile(g: Tensor) -> Tensor:
    bound = g.abs().quantile(0.8)
    return g.clamp(-bound, bound)


def decay(g: Tensor, p: Tensor) -> Tensor:
    return g.add(p, alpha=0.01)


def by_mean(g: Tensor, *, of: Tensor) -> Tensor:
    return g / (1 + of.abs().mean())


def by_later(g: Tensor, *, of: Tensor, error: Tensor) -> Tensor:
    return g / (1 + of.abs().mean()) + 0.1 * error.mean()


def alike(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norms = torch.stack([g.norm() for g in gradients.values()])
    gr.record("largest", norms.amax())
    return {name: g * (norms.mean() / (1 + g.norm())) for name, g in gradients.items() if g.dim() > 1}


def led(errors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    largest = torch.stack([e.abs().amax() for e in errors.values()]).amax()
    gr.record("largest", largest)
    return {"first": errors["first"] / (1 + largest)}


def smooth() -> Callable[[Tensor], Tensor]:
    mean = gr.State((), 1.0, torch.float64, name="mean")

    def divide(g: Tensor) -> Tensor:
        mean.set(0.5 * mean.value + 0.5 * g.abs().mean().nan_to_num())
        return g / (1 + 10 * mean.value)

    return divide


def copied(op: gr.BackwardOp) -> tuple[Tensor | None, ...]:
    """Return torch's own backward, computed by nodes of its own."""
    error = op.error
    return op.vjp(tuple(None if e is None else e * 1 for e in error) if isinstance(error, tuple) else error * 1)


def equalize(gramian: Tensor) -> Tensor:
    return gramian.diagonal().clamp(min=1e-12).rsqrt()


def falling(step: int) -> float:
    return 1e-2 / (1 + step)


LED = "joint(led, act_at='error:first', group='led')"
LATER = "call(by_later, reads={'of': 'activation:head', 'error': 'error:head'})"
# By the kind of their site; each occurs in at least 3 % of the drawn policies.
ACTIONS: Mapping[str, Sequence[str]] = {
    "error": (
        "ClipByValue(1e-3)", "ClipByNorm(1e-2)", "ClipByNorm(falling)", "Scale(0.5)", "clip_to_mean",
        "clip_to_percentile", "decay", "smooth()", "Observe('norm')", "CheckFinite('record')", "Keep()", "NanToNum()",
        "call(by_mean, reads={'of': 'activation:{name}'})", *4 * (LATER,), *3 * (LED,),
    ),
    "gradient": (
        "ClipByValue(1e-3)", "ClipByNorm(1e-2)", "ClipByNorm(falling)", "ClipByGlobalNorm(1e-2)", "L2(0.1)", "decay",
        "Scale(0.5)", "AdaptiveClip(0.01)", "AutoClip(50.0, group='auto')", "ZClip(0.5, group='z')", "smooth()",
        "clip_to_percentile", "Observe('max_abs')", "Zero()", *2 * ("CheckFinite('skip')",),
        "call(by_mean, reads={'of': 'param:{name}'})", *2 * ("joint(alike, group='alike')",),
    ),
    "activation": ("Observe('norm')", "CheckFinite('record')"),
    "saved": ("Recompute()", "Store('float32')"),
    "step": (
        "ClipByGlobalNorm(1e-2)", "CheckFinite('skip')", "Observe('norm')", "AdaptiveClip(0.01)", "DecayWeights(0.1)",
        "SkipSpikes(2.0, window=2)",
    ),
    "backward": ("KeepZeros()", "copied"),
}  # fmt: skip
WEIGHINGS = ("WeighLosses(MGDA())", "WeighLosses(UPGrad())", "WeighLosses(equalize)")
PER_EXAMPLE = "ClipPerExample(1e-2)"
PATTERNS: Mapping[str, Sequence[str]] = {
    "error": ("*", "layers.*", "layers.0", "first", "*/sin", "/sin->layers*", "first->/sin", "*/h", "*/gates#1"),
    "gradient": ("*", "*.weight", "layers.*", "head.*"),
    "activation": ("*", "layers.*"),
    "saved": ("*",),
    "step": ("*",),
    "backward": ("*/linear", "*/sin", "layers.*/*"),
}
# In the regions themselves: what stands between them has no sites.
IN_REGIONS = {**PATTERNS, "error": ("first", "layers.0", "*/h"), "activation": ("layers.*",), "backward": ("*/linear",)}
INSIDE = ("*/h", "*/gates#1")  # of loops
LOOPS = (
    "plain", "accumulated", "evaluated", "retained", "two forwards", "resumed", "bad batch", "spike", "grown", "moved",
)  # fmt: skip
WAYS = ("op by op", "dynamic", "regions", "parts", "backend", "methods")
IN_ONE_GRAPH = "train_step"  # a way to run a third of what would run op by op
# What no graph break, region or method of its own may stand between.
WHOLE = ("op by op", "dynamic")
# Layers whose examples do not mix.
SEPARATE = ("Linear", "Inplace", "Twice", "Residual", "Convolution", "Branches", "Loop", "Counted")
RECURRENT = ("LSTM", "GRU", "RNN")
GROUPS = ("ClipByGlobalNorm", "AutoClip", "ZClip", "joint")
LAST = ("WeighLosses", "ClipPerExample")  # of the actions at single sites of their group


@dataclass(frozen=True)
class Composition:
    """One program.

    Attributes:
        seed: Of the drawing, and of the parameters.
        layers: Names in ``LAYERS``.
        tied: Whether the head has the weight of the first layer.
        rules: Kind, pattern and action of each.
        loop: One of ``LOOPS``.
        way: One of ``WAYS``, or ``IN_ONE_GRAPH``.
        losses: How many the model returns.
        windows: Whether it returns windows, which overlap, and the loss is computed outside.
        split: Whether two optimizers have half of the parameters each.
        threaded: Whether another thread runs the backwards.
        subclass: Whether the weight of the head is a tensor subclass, so that all gradients are.
        inner: Whether the forward differentiates itself.
    """

    seed: int
    layers: tuple[str, ...]
    tied: bool
    rules: tuple[tuple[str, str, str], ...]
    loop: str
    way: str
    losses: int = 1
    split: bool = False
    threaded: bool = False
    windows: bool = False
    subclass: bool = False
    inner: bool = False

    @classmethod
    def draw(cls, seed: int) -> Composition:
        draw = random.Random(seed)
        theme = draw.choices(("any", "losses", "examples"), (8, 1.3, 0.6))[0]
        way = draw.choice(WAYS if theme == "any" else WHOLE)
        loop = draw.choice((*LOOPS, *4 * ("bad batch",)))
        layers = tuple(
            draw.choice(SEPARATE if theme == "examples" else list(LAYERS)) for _ in range(draw.randint(1, 3))
        )
        patterns = IN_REGIONS if way == "regions" else PATTERNS
        kinds = draw.choices(list(ACTIONS), (3, 4, 1, 1, 2, 0.7), k=draw.randint(2, 5))
        rules = [(kind, draw.choice(patterns[kind]), draw.choice(ACTIONS[kind])) for kind in kinds]
        can_be_inside = theme != "losses" and not set(layers).isdisjoint(RECURRENT)
        rules = [rule if can_be_inside or rule[1] not in INSIDE else (rule[0], "first", rule[2]) for rule in rules]
        behind = ("*", *INSIDE)  # has sites that are computed before that of the head, or in a loop
        rules = [(rule[0], "first", LATER) if rule[2] == LATER and rule[1] in behind else rule for rule in rules]
        rules = [(rule[0], "*", LED) if rule[2] == LED else rule for rule in rules]
        rules = [
            rule for rule in rules if _is_wanted(rule, way, loop) and (rule[2] not in (LATER, LED) or theme == "any")
        ]
        # A tensor has one form, a state one that sets it, an op one backward.
        once = ("Recompute()", "Store('float32')", "smooth()", "copied")
        seen = [(kind, action in once and (kind, kind == "saved" or action)) for kind, _, action in rules]
        rules = [rule for n, rule in enumerate(rules) if not seen[n][1] or seen[n] not in seen[:n]]
        rules = list(dict.fromkeys(rules))
        split = draw.random() < 0.15 and not any(kind == "step" and _skips(action) for kind, _, action in rules)
        tied = way not in ("regions", "methods") and draw.random() < 0.2
        threaded, windows = draw.random() < 0.1, theme == "any" and draw.random() < 0.1
        if theme == "losses":
            rules = _weighing(rules, draw.choice(WEIGHINGS), draw.choice(("*", "layers.*", "first.*")), draw.random())
        if theme == "examples":
            rules = _of_examples(rules, draw.choice(("*", "layers.*", "head.*")))
        losses = 2 if theme == "losses" else 1
        # In one graph: between several, torch guesses that gradients are plain tensors, and refuses others.
        is_one = way not in ("regions", "parts", "methods") and not (tied or windows) and theme == "any"
        subclass = is_one and loop != "bad batch" and draw.random() < 0.2
        if subclass:
            kinds_left = draw.choice((("error", "activation", "saved"), tuple(ACTIONS)))
            rules = [rule for rule in rules if rule[0] in kinds_left and rule[0] != "backward"]  # refused by its site
            rules = [rule for rule in rules if not rule[2].startswith("call")]  # values of the class
        # A recurrent layer that is differentiated inside of the forward has no sites of its own.
        left = (*RECURRENT, *["Convolution"] * (theme == "examples"))  # whose derivative convolves different examples
        can_be_inner = way in WHOLE and not subclass and set(layers).isdisjoint(left)
        inner = can_be_inner and draw.random() < 0.25
        if way == "op by op" and seed % 3 == 0 and loop != "retained" and not (split or threaded or subclass):
            way = IN_ONE_GRAPH
        return cls(seed, layers, tied, tuple(rules), loop, way, losses, split, threaded, windows, subclass, inner)

    @property
    def text(self) -> str:
        """The program, for a failure."""
        rules = "\n".join(f'    gr.on("{kind}:{pattern}", {action}),' for kind, pattern, action in self.rules)
        return (
            f"# seed {self.seed}, loop {self.loop!r}, way {self.way!r}, split {self.split}, threaded {self.threaded}\n"
            f"torch.manual_seed({self.seed})\n"
            f"model = Net({list(self.layers)}, tied={self.tied}, losses={self.losses}, "
            f"windows={self.windows}, subclass={self.subclass}, inner={self.inner}).double()\n"
            f"policy = [\n{rules}\n]\n"
        )

    def policy(self, step: int | None = None) -> list[gr.Rule]:
        """Make the policy anew; with the bounds of one step in place of schedules, if one is given."""
        bound = gr.Schedule(falling) if step is None else falling(step)
        functions = (by_mean, by_later, alike, led, clip_to_mean, clip_to_percentile, decay, smooth, equalize, copied)
        names = {
            **{name: getattr(passes, name) for name in passes.__all__},
            **{function.__name__: function for function in functions},
            "falling": bound,
            "call": gr.call,
            "joint": gr.joint,
        }
        return [gr.on(f"{kind}:{pattern}", eval(action, names)) for kind, pattern, action in self.rules]

    def make(self) -> Net:
        """Make the plain model."""
        torch.manual_seed(self.seed)
        net = Net(self.layers, tied=self.tied, losses=self.losses, windows=self.windows, inner=self.inner).double()
        if self.subclass:
            weight = net.head.weight.detach()
            net.head.weight = nn.Parameter(TwoTensor(weight, 2 * weight))
        return net

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Make the optimizers."""
        every = list(model.parameters())
        parts = [every[::2], every[1::2]] if self.split else [every]
        return [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]

    def batches(self, model: nn.Module, number: int) -> list[Tensor]:
        """Make the batches of a step, in the dtype of the model."""
        count = 2 if self.loop in ("accumulated", "two forwards") else 1
        found = [batch(10 * number + n) for n in range(count)]
        if self.loop == "bad batch" and number == 1:
            found[0][0] = math.nan
        if self.loop == "spike" and number == STEPS - 1:
            found[0] *= 100
        return [x.to(next(model.parameters()).dtype) for x in found]


def _skips(action: str) -> bool:
    return action.startswith(("SkipSpikes", "CheckFinite('skip')"))


def _is_wanted(rule: tuple[str, str, str], way: str, loop: str) -> bool:
    """Leave out what is refused, or warned of, for a reason."""
    kind, _, action = rule
    if kind == "gradient" and action.startswith(GROUPS):  # acts on each backward by itself
        return way not in ("regions", "methods", *["parts"] * action.startswith("joint")) and loop != "retained"
    if action in (LATER, LED):
        return way in WHOLE
    if action == "KeepZeros()":
        return loop != "bad batch"  # what torch makes NaN of zeros may stay finite
    if action.startswith("Store"):
        return loop != "moved"  # a form that is not smaller
    return action != "CheckFinite('skip')" or loop == "bad batch"


def _weighing(
    rules: Sequence[tuple[str, str, str]], action: str, pattern: str, place: float
) -> list[tuple[str, str, str]]:
    """Weigh losses behind some of the rules and in front of the groups; a site keeps, and remembers, for one loss."""
    rules = [rule for rule in rules if rule[2] not in ("smooth()", "Keep()")]
    if pattern == "layers.*":  # what lies behind acts on the sum of the losses
        rules = [rule for rule in rules if rule[0] != "error" or rule[1].startswith("layers")]
    groups = [rule for rule in rules if rule[0] == "gradient" and rule[2].startswith(GROUPS)]
    single = [rule for rule in rules if rule not in groups]
    at = int(place * (len(single) + 1))
    return [*single[:at], ("gradient", pattern, action), *single[at:], *groups]


def _of_examples(rules: Sequence[tuple[str, str, str]], pattern: str) -> list[tuple[str, str, str]]:
    """Clip the gradients of examples; at errors what acts on each element, at gradients what is linear, and groups."""
    known = {
        "error": ("ClipByValue", "Scale", "NanToNum", "Observe", "CheckFinite"),
        "gradient": ("Scale", "Observe", "CheckFinite", *GROUPS),
        "saved": (),
    }
    kept = [rule for rule in rules if rule[2].startswith(known.get(rule[0], ""))]
    return [("gradient", pattern, PER_EXAMPLE), *kept]


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))

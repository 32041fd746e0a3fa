"""Cost of a training step: two phases against one graph (``gr.train_step``).

    python tests/benchmarks/train_step_cost.py [--case MLP ...] [--rounds 200] [--first] [--json FILE]

Ratios are medians over interleaved rounds in one process, to torch.compile with fused AdamW and no clip; of the PINN to
eager mode. Beside them: MiB of transient memory (the highest sum of allocations in one step beyond what lives before
it, by the profiler), Python calls a step, and with ``--first`` the seconds of the first call, with cold caches, to the
sum of those of two phases and a compiled optimizer.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm

POLICIES: Mapping[str, list[Any]] = {
    "none": [],
    "global clip": [gr.on("gradient:*", ClipByGlobalNorm(1.0))],
    "clips and checks": [
        gr.on("error:*", ClipByNorm(1.0)),
        gr.on("error:*", CheckFinite("record")),
        gr.on("gradient:*", CheckFinite("record")),
        gr.on("gradient:*", ClipByGlobalNorm(1.0)),
    ],
}


@dataclass
class Row:
    """The figures of one way to make a step."""

    case: str
    way: str
    ratio: float  # to the first way
    milliseconds: float
    transient_mib: float
    calls: int
    first_seconds: float | None = None


class MLP(nn.Module):
    """Three linear layers, as of an actor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class TwoLayers(nn.Module):
    """Two layers of eight units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


class Burgers(nn.Module):
    """A physics-informed network for the Burgers equation, with second derivatives in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        u = self.net(torch.stack([t, x], -1)).squeeze(-1)
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return (u_t + u * u_x - 0.01 * u_xx).square().mean()


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """A GPT of four blocks."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(512, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, width // 64) for _ in range(4))
        self.f, self.head = nn.LayerNorm(width), nn.Linear(width, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x) + self.p.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.f(h))[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def _points() -> tuple[Tensor, Tensor]:
    return torch.rand(256, requires_grad=True), torch.rand(256, requires_grad=True)


CASES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "MLP": (lambda: MLP(64), lambda: (torch.randn(256, 16),), 500),
    "8 units": (TwoLayers, lambda: (torch.randn(16, 8),), 1000),
    "PINN": (Burgers, _points, 200),
    "GPT 256": (lambda: GPT(256, 128), lambda: (torch.randint(512, (4, 128)),), 20),
    "GPT 512": (lambda: GPT(512, 64), lambda: (torch.randint(512, (1, 64)),), 20),
}


def two_phases(model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool = False) -> Callable[..., Tensor]:
    """Return a step of two phases."""

    def run(*batch: Tensor) -> Tensor:
        loss = model(*batch)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for given in batch:
            given.grad = None
        detached: Tensor = loss.detach()
        return detached

    return run


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of two phases."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def ways_of(case: str, policies: list[str]) -> dict[str, Callable[..., Tensor]]:
    """Return the ways to make a step, the one that others are compared with first."""
    torch.manual_seed(0)
    base = CASES[case][0]()
    ways: dict[str, Callable[..., Tensor]] = {}
    if case == "PINN":  # torch.compile alone does not trace its derivatives
        model = copy.deepcopy(base)
        ways["eager"] = two_phases(model, fused(model))
    else:
        for clips in (False, True):
            model = copy.deepcopy(base)
            model.compile()
            ways[f"plain{' + clip_grad_norm_' * clips}"] = two_phases(model, fused(model), clips=clips)
    for name in policies:
        model = gr.transform(copy.deepcopy(base), POLICIES[name])
        model.compile()
        ways[f"two phases, {name}"] = two_phases(model, fused(model))
        own = gr.transform(copy.deepcopy(base), POLICIES[name])
        ways[f"one graph, {name}"] = one_graph(own)
    return ways


def one_graph(model: Any) -> Callable[..., Tensor]:
    """Return a step of one graph."""
    step = gr.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def run(*batch: Tensor) -> Tensor:
        loss: Tensor = step(*batch)
        for given in batch:
            given.grad = None
        return loss

    return run


def transient(run: Callable[..., Any], batch: tuple[Tensor, ...]) -> float:
    """Return the highest sum of allocations in a step beyond what lives before it, in MiB."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(*batch)
    events: Any = found.profiler
    sizes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e[0],
    )
    now = high = 0
    for _, size in sizes:
        now += size
        high = max(high, now)
    return high / 2**20


def python_calls(run: Callable[..., Any], batch: tuple[Tensor, ...]) -> int:
    """Count the Python functions that a step calls."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run(*batch)
    finally:
        sys.setprofile(None)
    return count - 1  # that of the profile's own end is none of the step's


def measure(case: str, policies: list[str], rounds: int | None) -> list[Row]:
    """Measure one case."""
    batch = CASES[case][1]()
    ways, seconds = ways_of(case, policies), {}
    for name, run in ways.items():
        begin = time.perf_counter()
        run(*batch)
        seconds[name] = time.perf_counter() - begin
        for _ in range(4):
            run(*batch)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for number in range(rounds or CASES[case][2]):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            begin = time.perf_counter()
            ways[name](*batch)
            times[name].append(time.perf_counter() - begin)
    first = times[next(iter(ways))]
    rows = []
    for name, run in ways.items():
        ratio = statistics.median(own / other for own, other in zip(times[name], first, strict=True))
        memory, calls = transient(run, batch), python_calls(run, batch)
        rows.append(Row(case, name, ratio, 1e3 * statistics.median(times[name]), memory, calls, seconds[name]))
    return rows


def first_calls(case: str, policy: str) -> tuple[float, float]:
    """Return the seconds of a first call with cold caches: one graph, and two phases with a compiled optimizer."""
    import tempfile

    from torch._inductor.utils import fresh_cache

    batch = CASES[case][1]()
    found = []
    for way in ("one graph", "two phases"):
        torch.compiler.reset()
        with fresh_cache(), tempfile.TemporaryDirectory():
            model = gr.transform(CASES[case][0](), POLICIES[policy])
            begin = time.perf_counter()
            if way == "one graph":
                one_graph(model)(*batch)
            else:
                model.compile()
                optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
                model(*batch).backward()
                torch.compile(optimizer.step)()
            found.append(time.perf_counter() - begin)
    return found[0], found[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--first", action="store_true", help="measure first calls with cold caches alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for case in options.case:
        if options.first:
            for policy in options.policy:
                one, two = first_calls(case, policy)
                print(f"{case}, {policy}: first call {one:.1f} s, two phases {two:.1f} s, {one / two:.2f}", flush=True)
            continue
        own = measure(case, options.policy, options.rounds)
        rows += own
        print(f"{case}: ratio, ms, transient MiB, Python calls, first call in s")
        for row in own:
            figures = f"{row.ratio:8.3f} {row.milliseconds:9.3f} {row.transient_mib:8.2f} {row.calls:6d}"
            print(f"  {row.way:32}{figures} {row.first_seconds:7.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

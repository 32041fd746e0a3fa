"""What records and finite checks cost a 4-layer GPT: cold compile time, kernels, bytes, and step time.

    python tests/benchmarks/record_cost.py compile [--repeat 5] [--out FILE.json]
    python tests/benchmarks/record_cost.py run [--width 64] [--steps 40] [--out FILE.json]
    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/record_cost.py cpu [--net gpt | tiny] [--steps 40] [--out FILE.json]

``compile``: every run is a process of its own with caches off; the variants alternate. ``run``: all variants in one
process, their steps interleaved, with a device synchronise around each; times are ratios to plain torch.compile.
``cpu``: the same for a GPT of width 256 or a net of two 8-wide layers, with one thread and the processor time of the
process, which other processes on the machine disturb less than they do wall time.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
COMPILED = ("plain", "empty", "errors", "both", "gradients", "outputs", "checks everywhere", "three everywhere")
CPU = {
    "gpt": ("empty", "gradients skip", "checks everywhere", "raise everywhere", "three everywhere"),
    "tiny": ("empty", "gradients skip", "three at gradients", "checks everywhere", "three everywhere"),
}


@dataclass
class Cold:
    """One cold compilation in seconds, and what it made."""

    variant: str
    seconds: float
    kernels: int
    megabytes: float
    records: int


@dataclass
class Steps:
    """Steps of one variant: seconds, and kernels and bytes where Inductor counts them."""

    variant: str
    seconds: list[float]
    kernels: int
    megabytes: float
    peak_megabytes: float


def policy_of(variant: str) -> Any:
    """What a variant inserts."""
    import gradrewrite as gr
    from gradrewrite.passes import CheckFinite, Observe

    three = Observe("max_abs", "mean_abs", "nonfinite")
    norms = Observe("norm", "max_abs", "zeros")

    def everywhere(action: Any) -> Any:
        return [gr.on(f"{kind}:*", action) for kind in ("error", "activation", "gradient")]

    return {
        "empty": [],
        "errors": gr.on("error:*", three),
        "both": [gr.on("error:*", three), gr.on("activation:*", three)],
        "gradients": gr.on("gradient:*", CheckFinite("record")),
        "gradients raise": gr.on("gradient:*", CheckFinite()),
        "outputs": gr.on("error:*", CheckFinite("record")),
        "outputs raise": gr.on("error:*", CheckFinite()),
        "gradients skip": gr.on("gradient:*", CheckFinite("skip")),
        "checks everywhere": everywhere(CheckFinite("skip")),
        "raise everywhere": everywhere(CheckFinite()),
        "three at gradients": gr.on("gradient:*", norms),
        "three everywhere": everywhere(norms),
    }[variant]


def prepare() -> None:
    """Caches off, Inductor's counters on."""
    import torch

    torch._inductor.config.force_disable_caches = True
    for name in ("torch._inductor.scheduler", "torch._inductor.debug"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch._logging.set_logs(inductor_metrics=True)
    logging.getLogger("torch._inductor").handlers.clear()


def counted(step: Callable[[], None]) -> tuple[float, int, float]:
    """Seconds of a first step, kernels and megabytes of what it compiles."""
    from torch._inductor import metrics

    metrics.reset()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start, metrics.generated_kernel_count, metrics.num_bytes_accessed / 1e6


def measure_cold(variant: str) -> Cold:
    """Compile one variant in this process."""
    import torch

    import gradrewrite as gr

    from models.gpt import Gpt, batch

    prepare()
    warm = torch.compile(torch.nn.Linear(16, 16))  # torch's own imports and the first C++ compilation
    warm(torch.ones(2, 16)).sum().backward()
    torch.manual_seed(0)
    plain, inputs = Gpt(), batch()
    if variant == "plain":
        model: Any = torch.compile(plain)
    else:
        model = gr.transform(plain, policy_of(variant))
        model.compile()
    seconds, kernels, megabytes = counted(lambda: model(*inputs).backward())
    records = 0 if variant == "plain" else len(model.monitor.latest())
    return Cold(variant, seconds, kernels, megabytes, records)


def cold(options: argparse.Namespace) -> list[Any]:
    """All variants, alternating, each in a process of its own."""
    runs: list[Cold] = []
    for _ in range(options.repeat):
        for variant in options.variants:
            command = [sys.executable, __file__, "compile", "--one", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(Cold(**json.loads(done.stdout.splitlines()[-1])))
    print("| variant | records | kernels | bytes, MB | cold compile s, median (min to max) | ratio to plain |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(r.seconds for r in runs if r.variant == "plain")
    for variant in options.variants:
        own = [r for r in runs if r.variant == variant]
        seconds = [r.seconds for r in own]
        middle = statistics.median(seconds)
        print(
            f"| {variant} | {own[0].records} | {own[0].kernels} | {own[0].megabytes:.2f} "
            f"| {middle:.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {middle / base:.2f} |"
        )
    return runs


def variants(width: int, device: str) -> dict[str, Callable[[], None]]:
    """One training step (without an optimizer) of each variant."""
    import torch

    import gradrewrite as gr

    from models.gpt import Gpt, batch, hook_outputs

    def make() -> Any:
        torch.manual_seed(0)
        return Gpt(width=width).to(device)

    inputs = batch(device=device)

    def step(model: Any) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            model(*inputs).backward()

        return run

    def under_anomaly_detection(model: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.autograd.detect_anomaly(check_nan=True):
                step(model)()

        return run

    def check(g: torch.Tensor) -> torch.Tensor:
        if not g.isfinite().all():
            raise FloatingPointError
        return g

    steps: dict[str, Callable[[], None]] = {"eager": step(make())}
    hooked = make()
    hook_outputs(hooked, check)
    steps["eager, hooks with isfinite().all()"] = step(hooked)
    steps["eager, detect_anomaly"] = under_anomaly_detection(make())
    steps["plain"] = step(torch.compile(make()))
    steps["nan_asserts"] = step(torch.compile(make(), options={"nan_asserts": True}))
    for variant in ("empty", "outputs", "outputs raise", "gradients", "gradients raise", "errors", "both"):
        model = gr.transform(make(), policy_of(variant))
        model.compile()
        steps[variant] = step(model)
    return steps


def run(options: argparse.Namespace) -> list[Any]:
    """Interleaved steps of all variants."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    prepare()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    steps = variants(options.width, device)
    results = {}
    for name, step in steps.items():
        torch.compiler.reset() if name == "plain" else None
        _, kernels, megabytes = counted(step)
        peak = 0.0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() / 1e6
        results[name] = Steps(name, [], kernels, megabytes, peak)
    for _ in range(options.steps):
        for name, step in steps.items():
            sync()
            start = time.perf_counter()
            step()
            sync()
            results[name].seconds.append(time.perf_counter() - start)
    print("| variant | kernels | bytes, MB | step ms, median | ratio to plain, median (quartiles) |")
    print("|---|---|---|---|---|")
    for name, result in results.items():
        pairs = zip(result.seconds, results["plain"].seconds, strict=True)
        low, middle, high = statistics.quantiles([ours / plain for ours, plain in pairs], n=4)
        print(
            f"| {name} | {result.kernels or ''} | {f'{result.megabytes:.2f}' if result.megabytes else ''} "
            f"| {1e3 * statistics.median(result.seconds):.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return list(results.values())


@dataclass
class CpuSteps:
    """Forwards and backwards of one variant, in seconds of processor time."""

    variant: str
    forward: list[float]
    backward: list[float]

    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def run_on_cpu(options: argparse.Namespace) -> list[Any]:
    """Interleaved steps of all variants on one thread, in processor time."""
    import gc
    import warnings

    import torch
    from torch import nn

    import gradrewrite as gr

    from models.gpt import Gpt, batch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def make() -> Any:
        torch.manual_seed(0)
        if options.net == "gpt":
            return Gpt(width=256)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    inputs = batch(options.rows) if options.net == "gpt" else (torch.randn(4, 8),)
    models = {"plain": torch.compile(make())}
    for variant in CPU[options.net]:
        models[variant] = gr.transform(make(), policy_of(variant))
        models[variant].compile()
    results = {name: CpuSteps(name, [], []) for name in models}
    order = random.Random(0)
    for number in range(options.steps + 3):
        for name, model in order.sample(list(models.items()), len(models)):  # none always comes after the same one
            model.zero_grad()
            gc.collect() if options.net == "gpt" else None
            start = time.process_time()
            loss = model(*inputs).sum()
            middle = time.process_time()
            loss.backward()
            end = time.process_time()
            if number >= 3:
                results[name].forward.append(middle - start)
                results[name].backward.append(end - middle)
    print("| variant | forward us, median | backward us, median | ratio to plain: of medians, of steps (quartiles) |")
    print("|---|---|---|---|")
    plain = results["plain"].steps()
    for name, result in results.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(result.steps(), plain, strict=True)], n=4)
        whole = statistics.median(result.steps()) / statistics.median(plain)
        forward, backward = (1e6 * statistics.median(part) for part in (result.forward, result.backward))
        print(f"| {name} | {forward:.0f} | {backward:.0f} | {whole:.3f}, {middle:.3f} ({low:.3f} to {high:.3f}) |")
    return list(results.values())


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["compile", "run", "cpu"])
    parser.add_argument("--rows", type=int, default=4, help="of 32 tokens; for cpu")
    parser.add_argument("--net", choices=list(CPU), default="gpt")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=COMPILED, help="of compile; 'plain' is one of them")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure_cold(options.one))))
        return
    runs = {"compile": cold, "run": run, "cpu": run_on_cpu}[options.what](options)
    if options.out:
        import torch

        record = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "runs": [asdict(r) for r in runs],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compare two checkouts on the models of ``tests/models``: traces, records, gradients, kernels, run logs and pages.

Run it as ``python tests/compare_checkouts.py BEFORE AFTER [--no-kernels] [--architectures]``, with two folders. For
BEFORE a file may stand that ``--dump`` wrote: ``python tests/compare_checkouts.py BEFORE --dump before.json``. A
restructuring has to leave all of it equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from models.digests import digest, digest_of, without_own_lines

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor], bool]


def main() -> int:
    """Print a line for each model, and return 1 if a line differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--no-kernels", action="store_true", help="do not compile with Inductor")
    parser.add_argument("--architectures", action="store_true", help="models of transformers too")
    parser.add_argument("--dump", type=Path, help="write what the only checkout does; without any, this environment")
    options = parser.parse_args()
    if options.dump is not None:
        (found,) = [observed_in(folder, options) for folder in options.checkouts] or [dict(observed(options))]
        options.dump.write_text(json.dumps(found))
        return 0
    before, after = (
        observed_in(path, options) if path.is_dir() else json.loads(path.read_text()) for path in options.checkouts
    )
    differ = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    for key in before:
        print(f"{'DIFFERS' if key in differ else 'equal  '} {key}: {_summary(before[key])}")
    for key in differ:
        print(f"\n{key}\n  before: {before.get(key)}\n  after:  {after.get(key)}")
    print(f"{len(before)} cases, {len(differ)} differ")
    return 1 if differ or before.keys() != after.keys() else 0


def observed_in(checkout: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the observations of a checkout's gradrewrite, made in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "gradrewrite"
        shutil.copytree(checkout / "gradrewrite", package)
        for part in ("passes", "viz"):
            shutil.copytree(checkout / part, package / part)
        dump = Path(folder) / "dump.json"
        flags = [flag for flag in ("--no-kernels", "--architectures") if getattr(options, flag[2:].replace("-", "_"))]
        environment = {**os.environ, "PYTHONPATH": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        subprocess.run([sys.executable, __file__, "--dump", str(dump), *flags], check=True, env=environment, cwd=folder)
        found: dict[str, Any] = json.loads(dump.read_text())
        return found


def observed(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """For each model and policy its trace, its records and gradients, and how many kernels Inductor makes of it."""
    import gradrewrite as gr
    from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, ClipByNorm, ClipByValue, Observe

    kernels, architectures = not options.no_kernels, options.architectures
    yield from of_features(kernels=kernels)
    yield from of_health_runs()

    policies: dict[str, Any] = {
        "clips": [
            gr.on("error:*", ClipByValue(0.1, log=True)),
            gr.on("gradient:*", [ClipByNorm(0.5), ClipByNorm(0.1)]),
        ],
        "checks": [
            gr.on("error:*", CheckFinite("record")),
            gr.on("gradient:*", [CheckFinite("warn"), Observe("norm")]),
        ],
        "group": [gr.on("activation:*", Observe("max_abs", "zeros")), gr.on("gradient:*", ClipByGlobalNorm(0.1))],
    }
    for name, graph in graphs().items():
        yield f"graphs.{name}", {"trace": digest(str(graph()))}
    for name, make in {**models(), **(architecture_models() if architectures else {})}.items():
        for label, policy in policies.items():
            torch.manual_seed(0)
            yield f"{name} {label}", of_model(make, policy, kernels=kernels and not name.startswith("architectures"))
            torch.compiler.reset()


def of_features(*, kernels: bool) -> Iterator[tuple[str, Any]]:
    """Train under policies with one feature each: op by op, on two ranks and, for kernels, compiled."""
    from models.feature_runs import FEATURES, observe, observe_ranks

    for name in FEATURES:
        yield f"feature {name}", observe(name)
        torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        yield "feature ranks", observe_ranks(Path(folder))
    for name in FEATURES if kernels else ():
        before = generated()
        found = observe(name, compiled=True)
        yield f"feature {name} compiled", {**found, "kernels": generated() - before}
        torch.compiler.reset()


def of_health_runs() -> Iterator[tuple[str, Any]]:
    """Write the run logs and pages of four trainings."""
    from models.health_runs import main

    with tempfile.TemporaryDirectory() as folder:
        main(["--out", folder])
        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
            yield f"health {path.name}", {"content": digest(path.read_text())}


def of_model(make: Callable[[], Made], policy: Any, *, kernels: bool) -> dict[str, Any]:
    """Return the observations of one model under one policy."""
    import gradrewrite as gr

    plain, args, kwargs, loss, autocast = make()
    model = gr.transform(plain, policy)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found: dict[str, Any] = {"trace": digest(without_own_lines(str(model.trace(*args, **kwargs))))}
            step(model, args, kwargs, loss)
        found |= {"records": {k: repr(v) for k, v in model.monitor.latest().items()}, "gradients": _gradients(model)}
        if kernels:
            model.compile()
            before = generated()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                step(model, args, kwargs, loss)
            found["kernels"] = generated() - before
    except gr.RewriteError as err:
        return {"error": f"{type(err).__name__}: {err}"}
    return found


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]) -> None:
    """One forward and backward from the same random state."""
    model.zero_grad()
    torch.manual_seed(1)
    loss(model(*args, **kwargs)).backward()


def generated() -> int:
    """Number of kernels that Inductor has generated in this process."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def models() -> dict[str, Callable[[], Made]]:
    """The models that need nothing but torch."""
    from models.gpt import Gpt, batch
    from models.zoo import CASES

    found: dict[str, Callable[[], Made]] = {f"zoo.{name}": partial(_of_case, case) for name, case in CASES.items()}
    found["gpt"] = lambda: (Gpt(layers=2), batch(), {}, lambda out: out, False)
    found["faults"] = _faulty
    return found


def _faulty() -> Made:
    from models.faults import FaultyTransformer

    return FaultyTransformer(0), (torch.randn(2, 3, 16), torch.randn(2, 3, 1)), {}, lambda out: out, False


def _of_case(case: Any) -> Made:
    return case.make(), case.inputs(), {}, case.loss, case.autocast


def graphs() -> dict[str, Callable[[], Any]]:
    """Graphs that the pictures are made of."""
    from models.graphs import GRAPHS

    return dict(GRAPHS)


def architecture_models() -> dict[str, Callable[[], Made]]:
    """Models of transformers that are one graph."""
    from models.architectures import ARCHITECTURES, Architecture

    def make(a: Architecture) -> Made:
        model, inputs = a.make(), a.make_inputs()
        if a.prepare is not None:
            a.prepare(model, inputs)
        return model, (), inputs, lambda out: a.loss(out, inputs), False

    return {f"architectures.{a.name}{a.variant}": partial(make, a) for a in ARCHITECTURES if a.works}


def _gradients(model: nn.Module) -> str:
    """A digest of the bits of all gradients."""
    return digest_of([p.grad for p in model.parameters() if p.grad is not None])


def _summary(found: dict[str, Any]) -> str:
    parts = [f"{len(v)} records" if k == "records" else f"{k} {v}" for k, v in found.items() if k != "gradients"]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

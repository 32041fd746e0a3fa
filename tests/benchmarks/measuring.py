"""Measurements of steps and of compilation: values in, dataclasses out."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch._inductor.compile_fx
import torch._logging._internal
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.profiler import ProfilerActivity, profile

import gradrewrite as gr

from benchmarks.cases import CASES, WAYS, Step

P = ParamSpec("P")
T = TypeVar("T")

CACHE = "TORCHINDUCTOR_CACHE_DIR"
WARM_UP = 3  # steps before the first that is timed
COLLECT = 20  # rounds between collections of garbage


@dataclass(frozen=True)
class Compilation:
    """The first step of one way in a new process.

    Attributes:
        seconds: Processor time of the step, the compiler's processes included.
        is_hit: Whether code came out of AOTAutograd's cache.
        kernels: Kernels that Inductor generated; of code out of the cache too.
        size: Bytes that they read and write, as Inductor counts them.
        edits: Edits of the rewritten graph.
        records: Records of a step.
        peak: Bytes that a later step has at most, over those that were there before it.
        state: Bytes of parameters, buffers and inputs.
        launches: Kernels on a GPU of one step; None on the CPU.
    """

    seconds: float
    is_hit: bool
    kernels: int
    size: int
    edits: int
    records: int
    peak: int
    state: int
    launches: int | None


def in_new_process(run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new process, which has imported torch and gradrewrite."""
    if torch.cuda.is_available():  # which a process that was forked may not use, if its parent has
        context: Any = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.preloaded"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(run, *args, **kwargs).result()


def prepare() -> None:
    """One thread, no parallel compilation, Inductor's counters on, no warnings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    for name in ("torch._inductor.scheduler", "torch._inductor.debug"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch._logging._internal.set_logs(inductor_metrics=True)
    logging.getLogger("torch._inductor").handlers.clear()


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Let torch's caches be in this folder."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    try:
        yield
    finally:
        del os.environ["TRITON_CACHE_DIR"]
        os.environ.pop(CACHE)
        if before is not None:
            os.environ[CACHE] = before


def compile_one(case: str, way: str, device: str, folder: Path) -> Compilation:
    """Compile one way in this process, with the caches of a folder of its own; then measure its memory.

    A small model is compiled before, with other caches: what torch imports and asks the machine once is not counted.
    """
    prepare()
    with cache_folder(folder.with_name("warm-up")):
        warm = torch.compile(torch.nn.Linear(4, 4, device=device))
        warm(torch.ones(2, 4, device=device)).sum().backward()
    with cache_folder(folder):
        step = WAYS[way].step(CASES[case], device)
        metrics.reset()
        counters.clear()
        _finish(device)
        before = _processor_seconds()
        step()
        _finish(device)
        seconds = _processor_seconds() - before
        kernels, size = metrics.generated_kernel_count, metrics.num_bytes_accessed
        is_hit = bool(counters["aot_autograd"]["autograd_cache_hit"])
        peak = peak_bytes(step, device)
    edits = records = 0
    if isinstance(step.run, gr.RewrittenModule):
        edits, records = len(step.run.explain().graphs[0].edits), len(step.run.monitor.latest())
    launches = kernels_on_gpu(step) if device == "cuda" else None
    return Compilation(seconds, is_hit, kernels, size, edits, records, peak, _state_bytes(step), launches)


def _processor_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _state_bytes(step: Step) -> int:
    tensors = [*step.model.parameters(), *step.model.buffers(), *step.inputs]
    return sum(t.numel() * t.element_size() for t in tensors)


class Clearable(Protocol):
    """A step: it computes gradients when it is called."""

    @property
    def clear(self) -> Callable[[], Any]:
        """Lets go of the gradients."""

    def __call__(self) -> None:
        """Run once."""


def peak_bytes(step: Clearable, device: str) -> int:
    """The most bytes of tensors that a step has at one time, over those that were there before it.

    The first step is not looked at, since it may make what stays. On the CPU the allocator's own reports are summed up.
    """
    step.clear()
    step()
    step.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return largest_sum(allocations(step))


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation of host memory, in their order; negative where memory is freed.

    A block that was there before and is freed inside is not reported by torch.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def largest_sum(numbers: list[int]) -> int:
    """The largest sum of any first part; at least 0."""
    total = largest = 0
    for number in numbers:
        total += number
        largest = max(largest, total)
    return largest


def kernels_on_gpu(step: Step) -> int:
    """Kernels that a real GPU runs in one step, copies included."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in recorded.events())


def time_in_turn(
    steps: Mapping[str, Callable[[], Any]], clear: Callable[[str], None], device: str, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Time steps in rounds, in each of which every one runs once, in random order.

    Args:
        steps: What is timed.
        clear: Called with the name of a step before it, outside of the time.
        device: ``"cpu"``: processor time of the process; ``"cuda"``: time between two events.
        rounds: How many there are at least.
        seconds: Rounds go on until as much has passed, to ten times ``rounds``.

    Returns:
        The seconds of each step, one number a round.
    """
    timer = _cpu_seconds_of if device == "cpu" else _cuda_seconds_of
    found: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    start = time.monotonic()
    gc.disable()
    try:
        for number in range(WARM_UP + 10 * rounds):
            if number >= WARM_UP + rounds and time.monotonic() - start > seconds:
                break
            if number % COLLECT == 0:
                gc.collect()
            for name in order.sample(list(steps), len(steps)):  # none always comes after the same one
                clear(name)
                taken = timer(steps[name])
                if number >= WARM_UP:
                    found[name].append(taken)
    finally:
        gc.enable()
    return found


def _cpu_seconds_of(step: Callable[[], Any]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _cuda_seconds_of(step: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def time_case(
    case: str, ways: list[str], device: str, folders: dict[str, Path], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Time the steps of several ways in this process, with code out of their caches."""
    prepare()
    steps: dict[str, Step] = {}
    for name in ways:
        way = WAYS[name]
        with cache_folder(folders[way.code or name]):
            steps[name] = way.step(CASES[case], device)
            steps[name]()
    return time_in_turn(steps, lambda name: steps[name].clear(), device, rounds, seconds)

"""The log of a simulated device: kernels, launches, copies, waits."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

MULTIPROCESSORS = {80: 108, 90: 132}  # A100, H100
SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that one block can have
_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel that Inductor generated.

    Attributes:
        name: Its name.
        tuner: What Inductor made of its source.
        is_backward: Whether it belongs to a backward graph.
    """

    name: str
    tuner: CachingAutotuner
    is_backward: bool

    def compile(self) -> list[Any]:
        """Compile each configuration that would be tuned to a cubin; raises what Triton or ptxas raise.

        Raises:
            RuntimeError: A block needs more shared memory than the chip has; a GPU says so when it loads the kernel.
        """
        binaries = [self.tuner._precompile_config(config).kernel for config in self.tuner.configs]
        limit = SHARED_MEMORY[self.tuner.device_props.cc]
        for binary in binaries:
            if binary.metadata.shared > limit:
                needed = binary.metadata.shared
                raise RuntimeError(f"{self.name} needs {needed} bytes of shared memory; {limit} are there")
        return binaries


@dataclass(frozen=True)
class Upload:
    """A copy from the host to the device.

    Attributes:
        text: The operation, its shape, and the line that asked for it.
        is_blocking: Whether the host waits for it.
    """

    text: str
    is_blocking: bool


@dataclass(frozen=True)
class Count:
    """Numbers of things since a moment.

    Attributes:
        launches: Triton kernels.
        operations: Other operations on the device: cuBLAS, an eager optimizer, copies on the device, those inside of
            opaque operators.
        waits: Times that the host waits.
        blocking: Uploads that block.
        uploads: Uploads of both kinds.
        size: Bytes of the arguments of all launches.
    """

    launches: int
    operations: int
    waits: int
    blocking: int
    uploads: int
    size: int

    def __sub__(self, other: Count) -> Count:
        """Differences."""
        return Count(*(mine - before for mine, before in zip(self._all(), other._all(), strict=True)))

    def _all(self) -> tuple[int, ...]:
        return self.launches, self.operations, self.waits, self.blocking, self.uploads, self.size


@dataclass
class SimulatedGpu:
    """Log of the work that the device would have done.

    Attributes:
        capability: 80 or 90.
        has_values: Whether tensors have values.
        code: The text that Inductor wrote for each graph.
        kernels: Kernels in the order of their making.
        launches: Names of Triton kernels in the order of their launches.
        operations: Names of other operations, with their numbers.
        waits: Where the host waits for the device.
        uploads: Copies to the device.
        size: Bytes of the arguments of all launches.
        sync_debug_mode: As ``torch.cuda.set_sync_debug_mode`` set it; ``"error"`` raises at waits.
        num_graphs: How many graphs became CUDA graphs.
        graph_refusals: Reasons why Inductor made no CUDA graph.
    """

    capability: int
    has_values: bool
    code: list[str] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    size: int = 0
    sync_debug_mode: str | int = "default"
    num_graphs: int = 0
    graph_refusals: list[str] = field(default_factory=list)

    def wait(self, what: str, *, is_checked: bool = True) -> None:
        """Note that the host waits for the device.

        Args:
            what: What waits.
            is_checked: Whether torch's debug mode notices it.

        Raises:
            RuntimeError: It must not wait.
        """
        self.waits.append(f"{what} {caller()}")
        if is_checked and self.sync_debug_mode in ("error", 2):
            raise RuntimeError(f"called a synchronizing CUDA operation: {self.waits[-1]}")

    def count(self) -> Count:
        """Return the numbers so far; the difference of two is what a step did."""
        blocking = sum(upload.is_blocking for upload in self.uploads)
        operations = self.operations.total()
        return Count(len(self.launches), operations, len(self.waits), blocking, len(self.uploads), self.size)


def caller() -> str:
    """The innermost line outside of torch and of this package, as ``file:line``."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.parent != _OWN and "torch" not in path.parts and path.name != "contextlib.py":
            return f"{path.name}:{frame.lineno}"
    return "?"

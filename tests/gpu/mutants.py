"""Mutants: changes of one line, each of which the tests on the simulated GPU must notice.

    python tests/gpu/mutants.py [name ...]

``tests/unit/gpu/test_mutants.py`` runs them too. As a pytest plugin this module applies the mutant that the
environment names, after the tests are collected; it imports nothing of gradrewrite before.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "GRADREWRITE_MUTANT"
_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A change of one function, and the tests that fail with it.

    Attributes:
        function: ``module:function`` or ``module:Class.method``.
        old: Part of its source; it is there once.
        new: What is there instead.
        tests: A file of ``tests/integration/cuda``.
        chosen: Which of its tests, as pytest's ``-k`` takes it.
    """

    function: str
    old: str
    new: str
    tests: str
    chosen: str

    def changed(self) -> str:
        """The changed source of the function.

        Raises:
            LookupError: The part is not there exactly once.
        """
        owner, name = self._place()
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        if source.count(self.old) != 1:
            raise LookupError(f"{self.function} has {self.old!r} {source.count(self.old)} times; a mutant changes one")
        return source.replace(self.old, self.new)

    def _place(self) -> tuple[Any, str]:
        """The owner of the function, and its name there."""
        module_name, _, path = self.function.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module_name)
        for part in owners:
            owner = getattr(owner, part)
        return owner, name

    def apply(self) -> None:
        """Change the function, wherever it is known by its name.

        Raises:
            LookupError: The part is not there exactly once.
        """
        owner, name = self._place()
        function = getattr(owner, name)
        found: dict[str, Any] = {}
        exec(compile(self.changed(), self.function, "exec"), function.__globals__, found)
        setattr(owner, name, found[name])
        for other in [m for known, m in sys.modules.items() if known.startswith("gradrewrite")]:
            if getattr(other, name, None) is function:
                setattr(other, name, found[name])


_BACKWARD = "gradrewrite.backends.runtime_wrapper:RewrittenBackward.__call__"
_COPY = "gradrewrite.monitoring.host_copy:copy_to_host"
MUTANTS = {
    "a copy into memory that is not pinned": Mutant(
        _COPY, "pin_memory=True", "pin_memory=False", "test_waits.py", "observe-default"
    ),
    "a copy that blocks": Mutant(_COPY, "non_blocking=True", "non_blocking=False", "test_waits.py", "observe-default"),
    "waiting for the event of a copy": Mutant(
        "gradrewrite.monitoring.step_record:StepRecord.is_here",
        "event.query()",
        "event.synchronize() is None",
        "test_waits.py",
        "observe-default",
    ),
    "reading a bound that is on the device": Mutant(
        _BACKWARD,
        "args.extend(self._live_inputs())",
        "args.extend(torch.full((), t.item(), device=t.device) for t in self._live_inputs())",
        "test_waits.py",
        "value and bound and device and default",
    ),
    "recording a bound of the host on the device": Mutant(
        "gradrewrite.policy.recording:_bound",
        'bound.device.type != "cpu"',
        "True",
        "test_waits.py",
        "norm and bound and host and default",
    ),
    "a blocking upload of the loss scale": Mutant(
        "gradrewrite.rewriting.loss_scale:LossScale.update",
        "non_blocking=True",
        "non_blocking=False",
        "test_waits.py",
        "scale and host and default",
    ),
    "reading gradients at every backward": Mutant(
        "gradrewrite.backends.graph_uses:Accumulation.is_accumulating",
        "if known is None else known == grad._version",
        "",
        "test_waits.py",
        "set and zero and default",
    ),
    "deciding on a skip on the host": Mutant(
        "gradrewrite.optimizer.update:_decides_on_device",
        "if not optimizers.is_fused(optimizer):",
        "if True:",
        "test_waits.py",
        "skip and fused and default",
    ),
    "a skip that no guard is told of": Mutant(
        "gradrewrite.monitoring.step_recorder:StepRecorder._note_verdicts",
        "guard.note(bad, parameters)",
        "pass",
        "test_cuda.py",
        "guarded and default",
    ),
    "records that are not copied out of a CUDA graph": Mutant(
        _BACKWARD, "t.clone() for t in (*packs, *kept)", "*packs, *(t.clone() for t in kept)", "test_cuda.py", "outlive"
    ),
    "kept tensors that are not copied out of a CUDA graph": Mutant(
        _BACKWARD, "t.clone() for t in (*packs, *kept)", "*(t.clone() for t in packs), *kept", "test_cuda.py", "outlive"
    ),
    "a clamp to twice the bound": Mutant(
        "gradrewrite.passes._clip_by_value:ClipByValue.apply",
        "high = bound_of(limit, tensor)",
        "high = 2 * bound_of(limit, tensor)",
        "test_cuda.py",
        "steps_without_waiting and default",
    ),
    "a factor that is squared": Mutant(
        "gradrewrite.passes._clip_by_norm:scale_down",
        "bound / norm",
        "(bound / norm) ** 2",
        "test_cuda.py",
        "eager_hooks and mlp and True",
    ),
}


def run(name: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a mutant in a process of its own."""
    mutant = MUTANTS[name]
    environment = {
        **os.environ,
        "GRADREWRITE_SAMPLE": "all",  # the tests that are chosen
        _VARIABLE: name,
        "GRADREWRITE_GPU": "interpreted",
        "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    file = str(_TESTS / "integration" / "cuda" / mutant.tests)
    options = ["-x", "-q", "-n0", "-p", "gpu.mutants", "-m", "cuda", "-k", mutant.chosen]
    command = [sys.executable, "-m", "pytest", *options, file]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=_TESTS.parent)


def is_noticed(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a test has failed, and nothing else has gone wrong."""
    return done.returncode == 1 and " failed" in done.stdout and " error" not in done.stdout.splitlines()[-1]


def pytest_collection_finish() -> None:
    """Apply the mutant of this process."""
    MUTANTS[os.environ[_VARIABLE]].apply()


def main() -> int:
    """Run the named mutants, or all; 1 if the tests pass with one of them."""
    survived = 0
    for name in sys.argv[1:] or MUTANTS:
        done = run(name)
        survived += not is_noticed(done)
        last = (done.stdout.strip().splitlines() or [done.stderr])[-1]
        print(f"{'noticed ' if is_noticed(done) else 'SURVIVED'} {name}: {last}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())

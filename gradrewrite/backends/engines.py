"""Engines: compilers or interpreters of graphs, ``"inductor"`` or ``"aot_eager"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import fx

from gradrewrite._compat import aot_autograd, inductor
from gradrewrite._compat.aot_autograd import CompilationHooks
from gradrewrite._compat.aot_autograd import Runnable as Runnable


class Engine(Protocol):
    """Compiles Dynamo graphs."""

    @property
    def name(self) -> str:
        """``"inductor"`` or ``"aot_eager"``."""

    @property
    def draws_from_seeds(self) -> bool:
        """Whether random numbers of a joint graph are drawn from seeds of the compiler."""

    @property
    def overwrites_outputs(self) -> bool:
        """Whether the next call overwrites the memory of outputs (CUDA graphs)."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the compiler, by name."""

    def cache_folder(self) -> str:
        """Return the folder of the compiler's caches; ``""`` to store no rewritten code."""

    def configured(self, mode: str | None, options: Mapping[str, Any] | None) -> Engine:
        """Return this engine with ``mode`` and ``options`` of ``torch.compile``; RuntimeError for an unknown one."""

    def compile_plain(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile a graph unchanged."""

    def compile_rewritten(self, gm: fx.GraphModule, inputs: Sequence[Any], hooks: CompilationHooks) -> Runnable:
        """Compile a graph, with hooks on its way."""

    def compile_step(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile a graph of ATen nodes without gradients; it may write to its inputs."""

    def compile_training_step(self, gm: fx.GraphModule, num_results: int, static: Sequence[int]) -> Runnable:
        """Compile a graph of a whole training step.

        Its last nodes write to inputs. The first results are the user's, the inputs at the positions ``static`` stay at
        their addresses. The callable takes its inputs in one list, which it may empty.
        """

    def compile_body(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Compile the body of a loop, for arguments like these.

        The callable takes them in one list, which it may empty.
        """


@dataclass(frozen=True, slots=True)
class Inductor:
    """Inductor."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    overwrites_outputs: bool = False  # as it was when the compilation began

    name: ClassVar[str] = "inductor"
    draws_from_seeds: ClassVar[bool] = True

    def cache_folder(self) -> str:
        """See ``Engine``."""
        return inductor.cache_folder(self.settings)

    def configured(self, mode: str | None, options: Mapping[str, Any] | None) -> Inductor:
        """See ``Engine``."""
        settings = inductor.settings_of(mode, options)
        return Inductor(settings, inductor.uses_cuda_graphs(settings))

    def compile_plain(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``."""
        return inductor.compile_plain(gm, inputs, self.settings)

    def compile_rewritten(self, gm: fx.GraphModule, inputs: Sequence[Any], hooks: CompilationHooks) -> Runnable:
        """See ``Engine``."""
        return inductor.compile_rewritten(gm, inputs, self.settings, hooks)

    def compile_step(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``; the gradients of a step are not at fixed addresses, so no CUDA graph is made."""
        return inductor.compile_step(gm, inputs, self.settings)

    def compile_training_step(self, gm: fx.GraphModule, num_results: int, static: Sequence[int]) -> Runnable:
        """See ``Engine``."""
        return inductor.compile_training_step(gm, self.settings, num_results, static)

    def compile_body(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``."""
        return inductor.compile_body(gm, inputs, self.settings)


@dataclass(frozen=True, slots=True)
class AotEager:
    """AOTAutograd without a compiler: graphs run op by op."""

    name: ClassVar[str] = "aot_eager"
    draws_from_seeds: ClassVar[bool] = False
    overwrites_outputs: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def cache_folder(self) -> str:
        """See ``Engine``; there are none."""
        return ""

    def configured(self, mode: str | None, options: Mapping[str, Any] | None) -> AotEager:
        """See ``Engine``; all settings are Inductor's, and ignored."""
        return self

    def compile_plain(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``."""
        return aot_autograd.compile_plain(gm, inputs)

    def compile_rewritten(self, gm: fx.GraphModule, inputs: Sequence[Any], hooks: CompilationHooks) -> Runnable:
        """See ``Engine``."""
        return aot_autograd.compile_rewritten(gm, inputs, hooks)

    def compile_step(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``; the graph runs unchanged."""
        return gm

    def compile_training_step(self, gm: fx.GraphModule, num_results: int, static: Sequence[int]) -> Runnable:
        """See ``Engine``; the graph runs unchanged."""
        return aot_autograd.box(gm)

    def compile_body(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """See ``Engine``; the graph runs unchanged."""
        return aot_autograd.box(gm)

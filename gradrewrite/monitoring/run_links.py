"""Links of a training run to its models, ranks and kept step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import distributed, nn

from gradrewrite._compat.data_parallel import DistributedDataParallel
from gradrewrite._version import __version__
from gradrewrite.diagnostics.run_log import Origin
from gradrewrite.monitoring.kept_step import KeptStep
from gradrewrite.monitoring.logged_tokens import LoggedTokens
from gradrewrite.replay.step_snapshot import StepSnapshot
from gradrewrite.sites import Site


class NamesOfBatch(NamedTuple):
    """Names and values of the user's for the next batch."""

    ids: Any = None  # names of its rows
    tokens: LoggedTokens | None = None


class RunLinks:
    """The models, ranks and kept step of one training run."""

    def __init__(self) -> None:
        # Group of the data parallelism that the model was last called in, or that averages its gradients.
        self.process_group: distributed.ProcessGroup | None = None
        # DistributedDataParallel that the model was last called in.
        self.data_parallel: weakref.ref[DistributedDataParallel] | None = None
        self.modules: Sequence[weakref.ref[nn.Module]] = ()  # with shards of parameters (FSDP2)
        self.agreeing: distributed.ProcessGroup | None = None  # ranks that skip the last update together
        # Site of a check that skips and may fail on one rank of several with equal parameters; None without one.
        self.lone_skip: Site | None = None
        # What the last guarded step computed, until the next one begins; None where updates are never skipped.
        self.kept_step: KeptStep | None = None
        self._models: list[tuple[weakref.ref[nn.Module], str]] = []  # with the labels of their sites
        self._policies: list[tuple[str, ...]] = []  # of the models, each rule as text
        self._names: NamesOfBatch | None = None  # of the next forward

    def note_lone_skip(self, site: Site | None) -> None:
        """Take note of a skipping check on one rank alone.

        None: no graph in use has such a check.
        """
        self.lone_skip = None if site is None else self.lone_skip or site

    def note_process_group(self, group: distributed.ProcessGroup) -> None:
        """Take note of the processes that skip updates together."""
        self.process_group = group

    def note_data_parallel(self, module: weakref.ref[DistributedDataParallel] | None) -> None:
        """Take note of the DistributedDataParallel around the model."""
        self.data_parallel = module

    def note_modules(self, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        """Note the modules of the last forward with sharded parameters."""
        self.modules = modules

    def note_ids(self, ids: Any) -> None:
        """Take names of the examples of the next forward."""
        self._names = (self._names or NamesOfBatch())._replace(ids=ids)

    def note_tokens(self, tokens: LoggedTokens) -> None:
        """Take values of the tokens of the next forward."""
        self._names = (self._names or NamesOfBatch())._replace(tokens=tokens)

    def note_policy(self, rules: Sequence[str]) -> None:
        """Take note of a model's policy, for the origin of run logs."""
        if tuple(rules) not in self._policies:
            self._policies.append(tuple(rules))

    def note_update(self, agreeing: distributed.ProcessGroup | None) -> None:
        """An update was made or skipped, with the other ranks of a group."""
        self.agreeing = agreeing
        if self.kept_step is not None:
            self.kept_step.close()

    def note_versions(self) -> None:
        """The update that is over has changed the versions of parameters just now."""
        if self.kept_step is not None:
            self.kept_step.note_versions()

    def label_of(self, model: weakref.ref[nn.Module]) -> str:
        """Return the label of a model's sites: ``""``, ``@2``, ``@3``.

        It keeps the records of models apart that have parameters of equal names. A label is found when the model is
        first compiled, and stays.
        """
        own = model()
        known = [(other, label) for ref, label in self._models if (other := ref()) is not None]
        found = next((label for other, label in known if other is own), None)
        if found is not None or own is None:
            return found or ""
        names = {name for name, _ in own.named_parameters()}
        taken = {label for other, label in known if not names.isdisjoint(n for n, _ in other.named_parameters())}
        labels = itertools.chain([""], map("@{}".format, itertools.count(2)))
        found = next(label for label in labels if label not in taken)
        self._models.append((model, found))
        return found

    def origin(self, config: Mapping[str, Any]) -> Origin:
        """Return the origin of the steps, with a configuration of the user's."""
        return Origin(__version__, tuple(dict.fromkeys(itertools.chain.from_iterable(self._policies))), config)

    def begin_forward(self) -> NamesOfBatch | None:
        """Let go of the former step; return names of the batch."""
        names, self._names = self._names, None
        if self.kept_step is not None and self.kept_step.is_over:
            self.kept_step = None
        return names

    def keep(
        self, backward: int, snapshot: StepSnapshot | None, update_key: int, is_cleared: Callable[[], bool]
    ) -> None:
        """Keep a graph of a backward; None: it cannot be replayed."""
        kept = self.kept_step
        if kept is None or kept.is_over or (backward not in kept.micro_batches and is_cleared()):
            kept = self.kept_step = KeptStep(update_key)
        kept.add(backward, snapshot)

    def can_replay(self, update_key: int) -> bool:
        """Whether the inputs of an update are kept."""
        return self.kept_step is not None and self.kept_step.update_key == update_key

    def drop_step(self) -> None:
        """Gradients without an update are gone, and so is their step."""
        if self.kept_step is not None and not self.kept_step.is_over:
            self.kept_step = None

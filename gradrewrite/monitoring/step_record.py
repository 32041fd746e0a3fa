"""Step records: what one ``loss.backward()`` reported, on its device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite.diagnostics.root_cause import CheckedRun
from gradrewrite.diagnostics.step_snapshot import Witness
from gradrewrite.ir.record_layout import Carried
from gradrewrite.monitoring.host_copy import Added, _copy_to_host, floats_of
from gradrewrite.sites import Site


@dataclass
class Run:
    """What one backward graph reported; tensors stay on their device until they are copied."""

    carried: Carried
    packs: list[Tensor]
    witness: Witness | None = None
    on_device: list[Tensor] = field(default_factory=list)  # sources of copies under way, kept alive

    def values(self) -> dict[str, float]:
        """All records; the packs are on the host."""
        pairs = zip(self.carried.packs, self.packs, strict=True)
        return {name: value for names, pack in pairs for name, value in zip(names, floats_of(pack), strict=True)}


@dataclass
class Row:
    """What one ``loss.backward()`` reported.

    Attributes:
        step: Number of the backward.
        runs: Its graphs, in the order in which their backwards ran.
        kept: Tensors that are kept.
        groups: Groups that were clipped.
        extra: Figures that the host knows (learning rates).
        added: Figures that came after the backward, by their addresses.
        was_read: Whether somebody has asked for it.
    """

    step: int = -1
    runs: list[Run] = field(default_factory=list)
    kept: dict[Site, Tensor] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    added: dict[tuple[str, ...], Added] = field(default_factory=dict)
    was_read: bool = False
    _ready: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    _copied: list[torch.cuda.Event] | None = None
    _values: dict[str, float] | None = None

    def close(self) -> None:
        """Note on each device that the records are complete: who copies them waits for that on the device."""
        for device in {pack.device for run in self.runs for pack in run.packs if pack.device.type == "cuda"}:
            self._ready[device] = torch.cuda.Event()
            self._ready[device].record(torch.cuda.current_stream(device))

    def start_copy(self) -> None:
        """Begin to copy the records to the host; nothing waits."""
        for added in self.added.values():
            added.start_copy()
        if self._copied is not None:
            return
        self._copied = []
        for device, ready in self._ready.items():
            torch.cuda.current_stream(device).wait_event(ready)
        for run in self.runs:
            run.on_device, run.packs = run.packs, [_copy_to_host(pack) for pack in run.packs]
        for device in self._ready:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def is_here(self) -> bool:
        """Whether the copy has arrived."""
        if self._copied is None or not all(event.query() for event in self._copied):
            return False
        return all(added.is_here() for added in self.added.values())

    def fetch(self) -> None:
        """Copy if that has not begun, and wait for it."""
        self.start_copy()
        assert self._copied is not None
        for event in self._copied:
            event.synchronize()
        for run in self.runs:
            run.on_device = []
        for added in self.added.values():
            added.fetch()

    def values(self) -> dict[str, float]:
        """All records in the order of the sites of the forward; the copy is here.

        Where a site reported several times, counts of elements add up; of all else the last report stands.
        """
        if self._values is None:
            # Behind a graph break the later graph's backward runs first.
            values = dict.fromkeys(name for run in reversed(self.runs) for pack in run.carried.packs for name in pack)
            known: dict[str, float] = {}
            for run in self.runs:
                for name, value in run.values().items():
                    adds_up = name in known and name in run.carried.counts
                    known[name] = known[name] + value if adds_up else value
            self._values = {name: known[name] for name in values}
        later = {name: value for added in self.added.values() for name, value in added.values().items()}
        return self._values | self.bounds() | self.extra | later

    def bounds(self) -> dict[str, float]:
        """Bounds of clips that are numbers, by address; those that are tensors are records of the graph."""
        return {name: value for run in self.runs for name, value in run.carried.bounds}

    def has(self, wanted: Callable[[Carried], bool]) -> bool:
        """Whether a graph carries something."""
        return any(wanted(run.carried) for run in self.runs)

    def checked_runs(self) -> list[CheckedRun]:
        """The graphs, for a look at their checks; the copy is here."""
        return [CheckedRun(run.carried, run.values(), run.witness) for run in self.runs]

    def forget_witnesses(self) -> None:
        """Let go of the inputs of the step."""
        for run in self.runs:
            run.witness = None

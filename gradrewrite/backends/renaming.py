"""Renaming of a region's compiled graph for a region of equal structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradrewrite.ir.edits import Edit
from gradrewrite.ir.outputs import BackwardOutputs, Owner
from gradrewrite.ir.record_key import RecordKey, with_label, without_label
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.sites import Site


def calls_by_name(sites: Sequence[Site], number: int) -> dict[str, int]:
    """Return the number of occurrences of each value name in one call of a graph with these sites.

    ``number`` calls of the graph came before the one that it was made for; the sites count on from there.
    """
    found: dict[str, int] = {}
    for site in sites:
        if site.traits.of_value:
            for name, call in (*(site.addresses or ((site.name, site.call),)), *site.destination):
                found[name] = max(found.get(name, 0), call + 1)
    # Rounded up: the last value of a name may have no site.
    return {name: -(-calls // (number + 1)) for name, calls in found.items()}


def _with_label(name: str, renamed: Mapping[str, object]) -> str:
    """Return the new name of a site, with the label of the model behind it, if it has one."""
    if name in renamed:
        return str(renamed[name])
    plain, label = without_label(name)
    return with_label(str(renamed[plain]), label) if plain in renamed else name


@dataclass(frozen=True, slots=True)
class Renaming:
    """Renaming of one region, and of its call, to another."""

    old: str  # the module whose graph it is
    new: str  # the module that the graph stands for
    # How many calls of the module come before, in the call of the model that the graph stands for, more than in the one
    # it was made for.
    shift: int = 0
    # how often each name of a value occurs in one call of the graph
    calls: Mapping[str, int] = field(default_factory=dict)

    def name(self, text: str) -> str:
        """Exchange the name of the region, where a name begins with it."""
        if text == self.old or (text.startswith(self.old) and text[len(self.old)] in "./"):
            return self.new + text[len(self.old) :]
        return text

    def site(self, site: Site) -> Site:
        """Rename a site; calls of values are counted on."""
        by = self.shift if site.traits.of_value else 0

        def moved(addresses: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
            return tuple((self.name(name), call + by * self.calls.get(name, 0)) for name, call in addresses)

        return replace(
            site,
            name=self.name(site.name),
            module=self.name(site.module),
            output_of=tuple(map(self.name, site.output_of)),
            call=site.call + by * self.calls.get(site.name, 0),
            addresses=moved(site.addresses),
            destination=moved(site.destination),
        )

    def outputs(self, outputs: BackwardOutputs, sites: Sequence[Site]) -> BackwardOutputs:
        """Rename the auxiliary outputs of a graph with these sites; groups and other owners of records keep theirs."""
        renamed = {str(site): self.site(site) for site in sites}

        def key(old: RecordKey) -> RecordKey:
            return replace(old, site=_with_label(old.site, renamed))

        def owner(old: Owner) -> Owner:
            return self.site(old) if isinstance(old, Site) else old

        packs = tuple(replace(pack, keys=tuple(map(key, pack.keys))) for pack in outputs.packs)
        placed = tuple(one.map(owner(one.owner), key) for one in outputs.placed)
        return replace(outputs, packs=packs, placed=placed)

    def edit(self, edit: Edit, sites: Sequence[Site]) -> Edit:
        """Rename an edit of a graph with these sites."""
        known = {str(site): str(self.site(site)) for site in sites}
        records = tuple(replace(key, site=_with_label(key.site, known)) for key in edit.records)
        return replace(edit, site=self.site(edit.site), records=records)

    def replay_graph(self, graph: ReplayGraph, sites: Sequence[Site]) -> ReplayGraph:
        """Rename the sites of a replay graph; ``inputs`` stays, for it refers to parameters."""
        return replace(
            graph,
            activations={number: self.site(site) for number, site in graph.activations.items()},
            errors={number: self.site(site) for number, site in graph.errors.items()},
            gradients={number: self.site(site) for number, site in graph.gradients.items()},
            actions={name: self.edit(edit, sites) for name, edit in graph.actions.items()},
        )

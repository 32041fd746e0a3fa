"""The new nodes of a group, by member."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

_SHARED = -1


def share_nodes(new: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[tuple[str, ...]]:
    """Return new nodes' names by member of a group; shared ones belong to the first."""
    reads: dict[fx.Node, int | None] = {node: i for i, node in enumerate(inputs)}
    for node in new:
        reads[node] = _common(reads.get(a) for a in node.all_input_nodes)
    feeds: dict[fx.Node, int | None] = {node: i for i, node in enumerate(results)}
    for node in reversed(new):
        feeds[node] = _common([feeds.get(node), *(feeds.get(u) for u in node.users)])
    member: dict[fx.Node, int | None] = {}
    for node in reversed(new):
        known = [number for number in (feeds[node], reads[node]) if number not in (None, _SHARED)]
        member[node] = known[0] if known else (reads[node] or _common(member.get(u) for u in node.users))
    shares: list[list[str]] = [[] for _ in inputs]
    for node in new:
        shares[max(member[node] or 0, 0)].append(node.name)
    return [tuple(names) for names in shares]


def _common(members: Iterable[int | None]) -> int | None:
    """The one member among these; None if there is none (a constant)."""
    known = {member for member in members if member is not None}
    return known.pop() if len(known) == 1 else (_SHARED if known else None)

"""Group actions: their members, their order, and the sharing of inserted nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from torch import fx

from gradrewrite.errors import PolicyError
from gradrewrite.policy.actions import GroupAction
from gradrewrite.policy.rules import Answered
from gradrewrite.rewriting.action_tracing import action_key
from gradrewrite.rewriting.insertion_points import InsertionPoint


def groups_of(
    answers: Sequence[tuple[InsertionPoint, Sequence[Answered]]],
) -> list[tuple[GroupAction, list[InsertionPoint]]]:
    """Collect the group actions among the answers of a policy, each with its insertion points.

    Groups come in the order in which the policy list names them; those of one callback in the order of its sites.

    Raises:
        PolicyError: Two actions of one group differ; or two groups have one name in records and states.
    """
    groups: dict[tuple[type, Hashable], dict[int, tuple[InsertionPoint, GroupAction]]] = defaultdict(dict)
    named_at: dict[tuple[type, Hashable], tuple[int, ...]] = {}
    for point, found in answers:
        for answered in found:
            action = answered.action
            if isinstance(action, GroupAction):
                key = (type(action), action.group)
                groups[key].setdefault(id(point), (point, action))
                _check_same(next(iter(groups[key].values())), (point, action))
                named_at[key] = min(named_at.get(key, answered.position), answered.position)
    _check_names([group for _, group in groups])
    ordered = sorted(groups, key=named_at.__getitem__)  # stable: equal positions stay in the order of sites
    members = [list(groups[key].values()) for key in ordered]
    return [(first[1], [point for point, _ in (first, *rest)]) for first, *rest in members]


def _check_names(groups: Iterable[Hashable]) -> None:
    by_name: dict[str, Hashable] = {}
    for group in groups:
        other = by_name.setdefault(str(group), group)
        if other != group:
            raise PolicyError(
                f"the groups {other!r} and {group!r} are two, and their records and states would have one name, "
                f"group:{group}; give one of them another name"
            )


def _check_same(first: tuple[InsertionPoint, GroupAction], other: tuple[InsertionPoint, GroupAction]) -> None:
    if action_key(first[1]) != action_key(other[1]):
        raise PolicyError(
            f"{other[0].site}: {other[1]!r} and {first[1]!r} at {first[0].site} are in one group {first[1].group!r}, "
            "which has one bound, one norm type and one log; give one of them another group"
        )


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

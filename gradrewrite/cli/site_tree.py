"""A tree of sites by module, with repeated blocks folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rich.text import Text
from rich.tree import Tree

from gradrewrite.sites import Kind, Site
from gradrewrite.viz._ladder import fold_names

_NUMBER = "\0"  # no name has it


@dataclass(frozen=True, slots=True)
class _Item:
    """One site, or the parameters of one module."""

    kind: Kind
    parts: tuple[str, ...]  # modules with their numbers, then an op
    op: str
    details: str  # what is printed of it

    @property
    def path(self) -> tuple[str, ...]:
        """The parts, with ``_NUMBER`` for numbers."""
        return tuple(map(_template, self.parts))

    @property
    def features(self) -> tuple[tuple[str, ...], str, str]:
        """All but kind and numbers."""
        return self.path, self.op, self.details


@dataclass(slots=True)
class _Branch:
    """One part of names, and the parts after it."""

    parts: dict[str, None] = field(default_factory=dict)  # with its numbers, in order
    own: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # parts without others after them, by features
    branches: dict[str, _Branch] = field(default_factory=dict)  # by their parts, with ``_NUMBER`` for numbers


def site_tree(sites: Sequence[Site], actions: Mapping[Site, Sequence[str]] = MappingProxyType({})) -> Tree:
    """Return the tree of sites, by kinds with alike sites.

    Modules and calls with equal ops, shapes, dtypes, lines of code and actions share a line.
    """
    items = _items(sites, actions)
    counts: dict[tuple[object, ...], Counter[Kind]] = {}
    for item, _ in items:
        counts.setdefault(item.features, Counter())[item.kind] += 1
    roots: dict[tuple[Kind, ...], _Branch] = {}
    sizes: Counter[tuple[Kind, ...]] = Counter()
    for item, number in items:
        known = counts[item.features]
        kinds = tuple(kind for kind, count in known.items() if count == known[item.kind])
        sizes[kinds] += number
        if item.kind == kinds[0]:
            _insert(roots.setdefault(kinds, _Branch()), item)
    tree = Tree("", hide_root=True)
    for kinds, root in roots.items():
        size = f"{sizes[kinds]} site{'s' if sizes[kinds] > 1 else ''}"
        _show(tree.add(Text(f"{', '.join(kinds)}: {size}")), root)
    return tree


def _items(sites: Sequence[Site], actions: Mapping[Site, Sequence[str]]) -> list[tuple[_Item, int]]:
    """Return items with their numbers of sites."""
    found: dict[object, tuple[_Item, int]] = {}
    for site in sites:
        shape = ", ".join("?" if size is None else str(size) for size in site.shape)
        dtype = str(site.dtype).removeprefix("torch.")
        done = f"  <- {', '.join(actions[site])}" if site in actions else ""
        module, _, name = site.name.rpartition(".")
        if site.traits.of_parameter and module:
            key = site.kind, module, dtype, site.call, done
            before, number = found.get(key, (None, 0))
            shapes = f"{before.details.removesuffix(f'  {dtype}{done}')}, " if before is not None else ": "
            item = _Item(site.kind, _modules(module), "", f"{shapes}{name} [{shape}]  {dtype}{done}")
            found[key] = item, number + 1
            continue
        parts = _modules(site.name)
        if site.traits.of_value and not site.traits.needs_kind and site.name not in site.output_of:
            module, slash, op = site.name.rpartition("/")
            parts = (*_modules(module), f"/{op}") if slash else parts
        details = f"  [{shape}] {dtype} {site.source}".rstrip() + done
        found[len(found)] = _Item(site.kind, parts, site.op, details), 1
    return list(found.values())


def _modules(name: str) -> tuple[str, ...]:
    """Return the parts of a module's name, with their numbers."""
    parts: list[str] = []
    for word in name.split(".") if name else ():
        if word.isdecimal() and parts:
            parts[-1] += f".{word}"
        else:
            parts.append(word)
    return tuple(parts)


def _template(part: str) -> str:
    return ".".join(_NUMBER if word.isdecimal() else word for word in part.split("."))


def _insert(branch: _Branch, item: _Item) -> None:
    for part in item.parts:
        branch = branch.branches.setdefault(_template(part), _Branch())
        branch.parts[part] = None
    branch.own.setdefault((item.op, item.details), []).append(item.parts[-1])


def _show(tree: Tree, root: _Branch) -> None:
    """Add the lines of a branch, one for equal details."""
    lines: dict[str | int, tuple[list[str], str, _Branch | None]] = {}  # by details, or by number of the branch
    for number, branch in enumerate(root.branches.values()):
        ends = [(_times(parts) + details, _folded(parts)) for (_, details), parts in branch.own.items()]
        if branch.branches:
            details = ends.pop()[0] if len(ends) == 1 else ""
            lines[number] = [_folded(list(branch.parts))], details, branch
        for details, name in ends:
            lines.setdefault(details, ([], details, None))[0].append(name)
    for names, details, below in lines.values():
        line = tree.add(Text(f"{', '.join(names)}{details}"))
        if below is not None:
            _show(line, below)


def _times(parts: Sequence[str]) -> str:
    return f" x {len(parts)}" if len(parts) > 1 else ""


def _folded(parts: Sequence[str]) -> str:
    """Return ``blocks.[0-11]`` for parts with numbers."""
    return fold_names([f".{part}" for part in parts]).removeprefix(".")

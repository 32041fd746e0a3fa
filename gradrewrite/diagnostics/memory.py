"""Bytes kept for the backward: as they are, and with a policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradrewrite._utils.formatting import plain_table
from gradrewrite._utils.html_tables import html_table
from gradrewrite.ir.memory import Forms, KeptTensor
from gradrewrite.sites import Pattern, Site

_MOST_MODULES = 20  # of a table or a picture
_NUMBER = re.compile(r"(?<![A-Za-z_])\d+(?=[./]|$)")

_LEAST = 1000  # a tensor that saves less than one part in as many is not suggested by itself


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that one forward keeps for its backward, without and with a policy.

    Parameters, buffers and inputs are kept anyway and do not count; nor does what only the forward or only the
    backward needs, which a peak has too. ``print`` shows ``table()``.

    Attributes:
        rows: The tensors, in the order of the forward.
        plain_bytes: Of all of them, without the policy.
        policy_bytes: Of all of them, with the policy; host memory not counted.
    """

    rows: tuple[KeptTensor, ...]
    plain_bytes: int
    policy_bytes: int
    _measure: Callable[[float], Mapping[Site, Forms]] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Memory], tuple[Any, ...]]:
        """Pickle the figures, without the graph that ``suggestion`` runs."""
        return Memory, (self.rows, self.plain_bytes, self.policy_bytes)

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory (``Offload``)."""
        return sum(row.host_bytes for row in self.rows)

    def by_module(self) -> dict[str, tuple[int, int]]:
        """Return the bytes without and with the policy of each module, in the order of the forward."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            plain, policy = found.get(row.module, (0, 0))
            found[row.module] = plain + row.plain_bytes, policy + row.policy_bytes
        return found

    def largest(self, n: int = 10) -> tuple[KeptTensor, ...]:
        """Return the largest rows, by their bytes without or with the policy."""
        return tuple(sorted(self.rows, key=lambda row: -max(row.plain_bytes, row.policy_bytes))[:n])

    def largest_modules(self, n: int = _MOST_MODULES) -> dict[str, tuple[int, int]]:
        """Return ``by_module()`` of the largest modules, and the sum of the others behind them."""
        modules = self.by_module()
        first = sorted(modules, key=lambda name: -max(modules[name]))[:n]
        found = {name or "(root)": sizes for name, sizes in modules.items() if name in first}
        others = [sizes for name, sizes in modules.items() if name not in first]
        if others:
            found[f"({len(others)} others)"] = sum(plain for plain, _ in others), sum(policy for _, policy in others)
        return found

    def table(self) -> str:
        """Return the bytes by module, then the ten largest tensors, as text."""
        share = f" ({self.policy_bytes / self.plain_bytes:.0%})" if self.plain_bytes else ""
        host = f", {size_of(self.host_bytes)} in host memory" if self.host_bytes else ""
        total = f"kept for the backward: {size_of(self.plain_bytes)}, with the policy {size_of(self.policy_bytes)}"
        tables = [plain_table(*cells).strip("\n") for cells in self._cells()]
        return "\n\n".join([f"{total}{share}{host}", *tables])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        captions = ("Bytes kept for the backward, by module", "The largest tensors")
        return "".join(html_table(*cells, text) for cells, text in zip(self._cells(), captions, strict=True))

    def _cells(self) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        modules = [(name, *map(size_of, sizes)) for name, sizes in self.largest_modules().items()]
        tensors = [_cells_of(row) for row in self.largest()]
        return [(("module", "plain", "policy"), modules), (("tensor", "plain", "policy", "action"), tensors)]

    def suggestion(self, largest_error: float = 0.02) -> str:
        """Return the policy that saves most for a small error, as code.

        At each saved site it takes the smallest form of ``Store`` with a relative L2 error (that of
        ``Observe("stored_error")``) of at most ``largest_error``. The forward of the plain graph runs once on the
        inputs that were given, op by op and apart: parameters, buffers and random state stay. ``Recompute`` and
        ``Offload`` are not weighed: they cost time, not precision.

        Args:
            largest_error: The limit; ``gradrewrite doctor`` warns above 0.05.

        Returns:
            Rules, each with its bytes and its largest error; a comment where nothing can be stored.

        Raises:
            RuntimeError: The object was pickled, or made by hand.
        """
        if self._measure is None:
            raise RuntimeError("suggestion() runs the graph, which is not pickled; call model.memory(...) again")
        measured = self._measure(largest_error)
        plain = {row.site: row.plain_bytes for row in self.rows if row.count == 1}
        chosen = {site: found for site, forms in measured.items() if (found := _chosen(forms, largest_error))}
        worth = [site for site, (_, _, size) in chosen.items() if (plain[site] - size) * _LEAST >= self.plain_bytes]
        lines, taken = [], set[Site]()
        for form in dict.fromkeys(chosen[site][0] for site in worth):
            own = [site for site in worth if chosen[site][0] == form]
            may = {site for site, found in chosen.items() if found[0] == form} - taken
            for pattern in _patterns(own, [site for site in measured if form in measured[site] and site not in may]):
                sites = [site for site in chosen if site in may and Pattern.parse(pattern).matches(site)]
                before, after = sum(plain[site] for site in sites), sum(chosen[site][2] for site in sites)
                worst = max(sites, key=lambda site: chosen[site][1])
                count = f"{len(sites)} tensor{'s' * (len(sites) > 1)}, largest error {chosen[worst][1]:.2%} ({worst})"
                lines.append(f"    # {size_of(before)} -> {size_of(after)}: {count}")
                lines.append(f'    gr.on("{pattern}", Store("{form}")),')
                may -= {*sites}
                taken |= {*sites}
        if not lines:
            return f"# no saved tensor has a narrower form with an error of at most {largest_error:.2%}"
        return "\n".join(["from gradrewrite.passes import Store", "", "policy = [", *lines, "]"])


def _cells_of(row: KeptTensor) -> tuple[str, ...]:
    """Return the texts of a row of the table."""
    host = f" ({size_of(row.host_bytes)} in host memory)" if row.host_bytes else ""
    return row.name, size_of(row.plain_bytes), size_of(row.policy_bytes), f"{row.action or row.reason}{host}"


def size_of(count: int) -> str:
    """Return a number of bytes as text."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return (
                f"{count / 1024**power:.3g} {unit}"
                if count < 1000 * 1024**power
                else f"{count / 1024**power:.0f} {unit}"
            )
    return f"{count} B"


def _chosen(forms: Forms, largest_error: float) -> tuple[str, float, int] | None:
    """Return the smallest form with a small error; NaN is none."""
    fitting = [
        (size, error, name) for name, (error, size) in forms.items() if error is not None and error <= largest_error
    ]
    if not fitting:
        return None
    size, error, name = min(fitting)
    return name, error, size


def _patterns(sites: Sequence[Site], others: Sequence[Site]) -> Iterator[str]:
    """Yield few patterns that match each of these sites once, and none of the others.

    A site that no pattern tells from the others is left out.
    """
    todo, others = list(sites), list(others)
    while todo:
        known = {text: Pattern.parse(text) for site in todo for text in _candidates(site)}
        fitting = {text: one for text, one in known.items() if not any(map(one.matches, others))}
        if not fitting:
            return
        text, best = min(fitting.items(), key=lambda one: (-sum(map(one[1].matches, todo)), len(one[0])))
        yield text
        others += [site for site in todo if best.matches(site)]
        todo = [site for site in todo if not best.matches(site)]


def _candidates(site: Site) -> Iterator[str]:
    """Yield patterns that match a site, with its numbers and with ``*``."""
    yield "saved:*"
    for name, call in site.addresses or ((site.name, site.call),):
        parts = name.partition("/")[0].split(".")
        heads = [".".join(parts[:end]) + ".*" for end in range(1, len(parts))]
        for glob in (*heads, name):
            if glob:
                yield f"saved:{_NUMBER.sub('*', glob)}"
                yield f"saved:{glob}"
                yield f"saved:{glob}#{call}"

"""Names of the elements of a recorded vector: ``row[3]@site`` is element 3 of ``row@site``."""

from __future__ import annotations

import re

MOST = 4096  # elements of a vector

_ELEMENT = re.compile(r"(.+)\[(\d+)\]((?:\.\d+)?)", re.DOTALL)  # a second vector of a name is ``row[3].2``


def names_of_elements(name: str, length: int) -> tuple[str, ...]:
    """Return the names of the records of the elements of a vector."""
    return tuple(f"{name}[{n}]" for n in range(length))


def split_element(address: str) -> tuple[str, int | None]:
    """Return the address of a vector and the number of the element; the address as it is and None of other records."""
    name, at, site = address.partition("@")
    found = _ELEMENT.fullmatch(name)
    return (address, None) if found is None else (f"{found[1]}{found[3]}{at}{site}", int(found[2]))


def elements_of(first: str, length: int) -> tuple[str, ...]:
    """Return the addresses of a vector, from that of its first element."""
    name, at, site = first.partition("@")
    found = _ELEMENT.fullmatch(name)
    assert found is not None
    return tuple(f"{found[1]}[{n}]{found[3]}{at}{site}" for n in range(length))

"""The disk cache of rewritten code: keys, and entries beside the code.

AOTAutograd's cache keys on the Dynamo graph, which a policy is no part of. So the key has two levels: what decides the
sites leads to a file with these sites; the policy is asked at them, and its answers lead to an identity that our pass
has in AOTAutograd's key. A hit is taken only if the entry was made for the same sites and the same answers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import platform
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from gradrewrite._compat import fake_tensors
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import Answered, ask_in_order, callbacks_of, rules_at
from gradrewrite.policy.scope import averages
from gradrewrite.rewriting.result import RewriteResult
from gradrewrite.sites import Site

logger = logging.getLogger("gradrewrite.cache")

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class CachedRewrite:
    """A rewrite, as an entry of the cache holds it."""

    rewrite: RewriteResult  # its sites without answers
    answers: str  # hash of the policy's answers at the sites
    replay_graph: ReplayGraph | None  # without its graph; None where nothing is checked, or it cannot be replayed
    replay_code: bytes  # that graph
    names: tuple[str, ...]  # of the outputs of the forward
    written_at: tuple[int, ...]  # positions of buffers that the forward writes, among its inputs


class CacheKey:
    """The key of one compilation, and the policy's answers at cached sites."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path = path  # the file that the first level of the key leads to
        self._identities: dict[str, str] = {}
        self.sites: tuple[Site, ...] = ()  # empty where there is no file yet
        self._candidates: tuple[Site, ...] = ()  # see ``SavedRewrite``
        self.identity = secrets.token_hex(16)  # becomes a part of AOTAutograd's key
        if path.exists():
            try:
                self.sites, self._candidates, self._identities = pickle.loads(path.read_bytes())
            except Exception as err:  # whatever is wrong with the file, it is only a cache
                logger.warning("%s cannot be read and will be written again: %s", path, err)
        self.answers = {site: ask_in_order(policy, site) for site in self.sites}
        # What is saved is known late, and such code is not stored.
        self.is_at_saved = any(ask_in_order(policy, site) for site in self._candidates)
        self.hash = hash_of_answers([self.answers[site] for site in self.sites])
        if self.hash is not None:
            self.identity = self._identities.get(self.hash, self.identity)

    def save(self, sites: tuple[Site, ...], candidates: tuple[Site, ...], answers: str) -> None:
        """Write the sites of a rewrite, and the identity of its answers; other processes may write the file too."""
        known = self._identities if sites == self.sites else {}
        if known.get(answers) == self.identity:
            return
        content = pickle.dumps((sites, candidates, {**known, answers: self.identity}))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
                written = Path(folder, self._path.name)
                written.write_bytes(content)
                os.replace(written, self._path)
        except OSError as err:  # a full disk: the next process compiles again
            logger.warning("%s cannot be written: %s", self._path, err)


def find_key(
    folder: str,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    values: Sequence[Value],
    given: Mapping[int, GraphInput],
    settings: Mapping[str, Any],
    policy: Policy,
    *further: object,
) -> CacheKey | None:
    """Return the key of the compilation of a graph with probes; None if a part of it cannot be hashed.

    ``further`` is what else decides the rewrite; as text it is the same in every process.
    """
    if not all(_is_plain(value) for value in settings.values()) or rules_at(policy, "saved"):
        return None
    described = [_described(x) for x in inputs]
    shapes = [_described(value.fake) for value in values]
    if None in described or None in shapes:
        return None
    codes = [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]
    roles = [(n, one.role, one.name, one.is_mask, one.has_site) for n, one in sorted(given.items())]
    parts = (
        *(_source_hash(), torch.__version__, platform.python_version(), codes, described, shapes, roles),
        *(_text_of(values), sorted(settings.items()), bool(callbacks_of(policy)), further),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    key = CacheKey(Path(folder, "gradrewrite", "sites", digest[:2], digest), policy)
    return None if key.is_at_saved else key


def hash_of_answers(answers: Sequence[tuple[Answered, ...]]) -> str | None:
    """Return the hash of a policy's answers by site; None if one is not an action of ours with plain settings.

    Code of the user's, and tensors, which are read at every backward, have no hash that would hold in other processes.
    """
    numbers: dict[int, int] = {}
    texts = []
    for at_site in answers:
        for answered in at_site:
            # Of an average the number of processes, and the name of their group, are in the code.
            text = None if averages(answered.insertion) else _text_of_action(answered.action)
            if text is None:
                return None
            number = numbers.setdefault(id(answered.action), len(numbers))
            texts.append((answered.position, answered.insertion.rule, text, number))
        texts.append(((), "", "", -1))
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _text_of_action(action: Any) -> str | None:
    kind = type(action)
    if not (is_dataclass(action) and f"{kind.__module__}.".startswith("gradrewrite.passes.")):
        return None
    settings = [(f.name, getattr(action, f.name)) for f in fields(action)]
    texts = [(name, repr(value) if _is_plain(value) else _text_of_action(value)) for name, value in settings]
    if any(text is None for _, text in texts):
        return None
    return f"{kind.__module__}.{kind.__qualname__}{texts!r}"


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _described(value: Any) -> object:
    """Return the static description of a value; None if it is not static."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    if not isinstance(value, Tensor):
        return (type(value).__qualname__, repr(value)) if _is_plain(value) else None
    if fake_tensors.is_wrapper(value):  # the processes of a mesh are in the code
        return None
    sizes = [*value.shape, *(value.stride() if value.layout is torch.strided else ())]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return (sizes, str(value.layout), str(value.dtype), str(value.device), value.requires_grad, value.is_leaf)


def _text_of(values: Sequence[Value]) -> list[Any]:
    numbers = {id(value): number for number, value in enumerate(values)}
    modules: dict[str, int] = {}  # by identity

    def plain(item: Any) -> Any:
        if isinstance(item, Value):
            return numbers.get(id(item))
        if isinstance(item, set | frozenset):
            return sorted(plain(tuple(item)))
        if isinstance(item, list):
            return [plain(one) for one in item]
        if isinstance(item, tuple):
            return tuple(plain_call(one) if _is_call(one) else plain(one) for one in item)
        return item

    def plain_call(call: ModuleCall) -> tuple[str, int, str]:
        return call[0], modules.setdefault(call[1], len(modules)), call[2]

    return [[plain(getattr(value, f.name)) for f in fields(Value) if f.name != "fake"] for value in values]


def _is_call(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3 and all(isinstance(part, str) for part in item)


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for name in ("gradrewrite", "gradrewrite.passes"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()

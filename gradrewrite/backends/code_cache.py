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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from gradrewrite._compat import aot_autograd, fake_tensors
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.inputs import GraphInput
from gradrewrite.ir.record_layout import BackwardOutputs
from gradrewrite.ir.replay_graph import ReplayGraph
from gradrewrite.ir.values import ModuleCall, Value
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import Answered, ask_in_order
from gradrewrite.policy.scope import averages
from gradrewrite.sites import Site

logger = logging.getLogger("gradrewrite.cache")

Runnable = Callable[..., Any]

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class CachedRewrite:
    """A rewrite, as an entry of the cache holds it.

    Attributes:
        sites: All sites.
        answers: Hash of the policy's answers at the sites.
        edits: What was inserted.
        record_nodes: Names of the nodes that carry records.
        outputs: The auxiliary outputs of the backward.
        out_of_reach: Sites out of reach at which the policy answered.
        replay_graph: The replay graph without its graph; None where nothing is checked, or it cannot be replayed.
        replay_code: That graph, as bytes.
        names: Names of the outputs of the forward.
    """

    sites: tuple[Site, ...]
    answers: str
    edits: tuple[Edit, ...]
    record_nodes: tuple[str, ...]
    outputs: BackwardOutputs
    out_of_reach: tuple[Site, ...]
    replay_graph: ReplayGraph | None
    replay_code: bytes
    names: tuple[str, ...]


class CacheKey:
    """The key of one compilation, and the policy's answers at cached sites.

    Attributes:
        identity: Becomes a part of AOTAutograd's key.
        answers: The answers of the policy, by site.
        sites: The known sites; empty where there is no file yet.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        """Read the file, and ask the policy.

        Args:
            path: The file that the first level of the key leads to.
            policy: The policy.

        Raises:
            PolicyError: The policy gives no valid answer.
        """
        self._path = path
        self._identities: dict[str, str] = {}
        self.sites: tuple[Site, ...] = ()
        self.identity = secrets.token_hex(16)
        if path.exists():
            try:
                self.sites, self._identities = pickle.loads(path.read_bytes())
            except Exception as err:  # whatever is wrong with the file, it is only a cache
                logger.warning("%s cannot be read and will be written again: %s", path, err)
        self.answers = {site: ask_in_order(policy, site) for site in self.sites}
        self.hash = hash_of_answers([self.answers[site] for site in self.sites])
        if self.hash is not None:
            self.identity = self._identities.get(self.hash, self.identity)

    def save(self, sites: tuple[Site, ...], answers: str) -> None:
        """Write the sites of a rewrite, and the identity of its answers.

        Other processes may write the file too.
        """
        known = self._identities if sites == self.sites else {}
        if known.get(answers) == self.identity:
            return
        content = pickle.dumps((sites, {**known, answers: self.identity}))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
                written = Path(folder, self._path.name)
                written.write_bytes(content)
                os.replace(written, self._path)
        except OSError as err:  # a full disk: the next process compiles again
            logger.warning("%s cannot be written: %s", self._path, err)


class Compilation(Protocol):
    """The compilation of a graph; the store's view of it."""

    def to_cache(self, names: tuple[str, ...]) -> CachedRewrite | None:
        """Return the cache entry of the rewrite; None if it may not be stored.

        Args:
            names: Names of the outputs of the forward.
        """
        ...

    def restore(self, cached: CachedRewrite, answers: Mapping[Site, tuple[Answered, ...]]) -> None:
        """Restore a rewrite from the cache.

        ``answers`` are those of the policy now, and equal to the stored ones.
        """
        ...

    def report(self) -> None:
        """List the graph."""
        ...

    def wrap_forward(self, compiled: Runnable, names: Sequence[str]) -> Runnable:
        """Wrap a compiled forward."""
        ...

    def wrap_backward(self, compiled: Runnable, names: Sequence[str], num_outputs: int) -> Runnable:
        """Wrap a compiled backward."""
        ...


class StoredCompilation:
    """The side of AOTAutograd's cache of one compilation; a ``CodeStore``.

    Attributes:
        probes: Names of the functions of ours in a Dynamo graph.
        forward_names: Names of the outputs of the forward; set when that is compiled.
        backward_interface: Names of the inputs of the backward, and the number of its auxiliary outputs; set likewise.
        backward: The graph of the backward; set when it is cut off the joint graph.
    """

    probes = ("gradrewrite.instrumentation.probes._probe", "gradrewrite.instrumentation.probes._probe_outputs")

    def __init__(self, key: CacheKey, compilation: Compilation, refuse: Callable[[], fx.GraphModule]) -> None:
        """Store and restore a compilation.

        Args:
            key: Its key.
            compilation: The compilation.
            refuse: Called in place of what compiled autograd would copy; a function of a module.
        """
        self._key = key
        self._compilation = compilation
        self._refuse = refuse
        self._stored: CachedRewrite | None = None
        self.forward_names: tuple[str, ...] = ()
        self.backward_interface: tuple[tuple[str, ...], int] = ((), 0)
        self.backward: fx.GraphModule | None = None

    @property
    def identity(self) -> str:
        """See ``CodeStore``."""
        return self._key.identity

    @property
    def answers(self) -> Mapping[Site, tuple[Answered, ...]]:
        """The answers of the policy, by site, where it was asked already."""
        return self._key.answers

    def save_key(self) -> None:
        """Write the key of a stored rewrite; do nothing without one."""
        if self._stored is not None:
            self._key.save(self._stored.sites, self._stored.answers)

    def forward_payload(self) -> CachedRewrite | None:
        """See ``CodeStore``; the rewrite."""
        self._stored = self._compilation.to_cache(self.forward_names)
        return self._stored

    def backward_payload(self) -> tuple[tuple[str, ...], int] | None:
        """See ``CodeStore``; the names of its inputs, and the number of its auxiliary outputs."""
        assert self.backward is not None
        aot_autograd.refuse_cached(self.backward, self._refuse)
        return self.backward_interface if self._stored is not None else None

    def restore_forward(self, compiled: Runnable, payload: CachedRewrite) -> Runnable:
        """See ``CodeStore``.

        Raises:
            LookupError: The entry was made for other sites, or for other answers of the policy.
        """
        if (payload.sites, payload.answers) != (self._key.sites, self._key.hash):
            raise LookupError("the entry was made for another policy")
        self._compilation.restore(payload, self.answers)
        return self._compilation.wrap_forward(compiled, payload.names)

    def restore_backward(self, compiled: Runnable, payload: tuple[tuple[str, ...], int]) -> Runnable:
        """See ``CodeStore``."""
        self._compilation.report()
        return self._compilation.wrap_backward(compiled, *payload)


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
    """Return the key of a compilation; None if a part of it cannot be hashed.

    Args:
        folder: The folder of Inductor's caches.
        gm: The Dynamo graph, with probes.
        inputs: Its inputs.
        values: The values of the probes.
        given: The tensor inputs, by position.
        settings: Inductor's settings.
        policy: The policy.
        *further: What else decides the rewrite; as text it is the same in every process.
    """
    if not all(_is_plain(value) for value in settings.values()):
        return None
    described = [_described(x) for x in inputs]
    shapes = [_described(value.fake) for value in values]
    if None in described or None in shapes:
        return None
    codes = [module.code for module in gm.modules() if isinstance(module, fx.GraphModule)]
    roles = [(n, one.role, one.name, one.is_mask, one.has_site) for n, one in sorted(given.items())]
    parts = (
        *(_source_hash(), torch.__version__, platform.python_version(), codes, described, shapes, roles),
        *(_text_of(values), sorted(settings.items()), further),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return CacheKey(Path(folder, "gradrewrite", "sites", digest[:2], digest), policy)


def hash_of_answers(answers: Sequence[tuple[Answered, ...]]) -> str | None:
    """Return the hash of a policy's answers by site.

    It is None if an answer is not an action of ours with plain settings.

    Code of the user's, and tensors, which are read at every backward, have no hash that would hold in other processes.
    """
    numbers: dict[int, int] = {}
    texts = []
    for at_site in answers:
        for answered in at_site:
            text = _text_of_action(answered.action)
            if text is None:
                return None
            number = numbers.setdefault(id(answered.action), len(numbers))
            texts.append((answered.position, answered.rule, text, number))
        texts.append(((), "", "", -1))
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _text_of_action(action: Any) -> str | None:
    kind = type(action)
    if not (is_dataclass(action) and f"{kind.__module__}.".startswith("gradrewrite.passes.")):
        return None
    if averages(action):  # the number of processes, and the name of their group, are in the code
        return None
    settings = [(f.name, getattr(action, f.name)) for f in fields(action)]
    return f"{kind.__module__}.{kind.__qualname__}{settings!r}" if all(_is_plain(v) for _, v in settings) else None


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
    if type(value.layout) is not torch.layout or value.layout is not torch.strided:
        sizes: list[Any] = list(value.shape)
    else:
        sizes = [*value.shape, *value.stride()]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return (sizes, str(value.layout), str(value.dtype), str(value.device), value.requires_grad, value.is_leaf)


def _text_of(values: Sequence[Value]) -> list[Any]:
    """Return everything that is known of the values, without addresses in memory."""
    numbers = {id(value): number for number, value in enumerate(values)}
    calls: dict[str, int] = {}

    def plain(item: Any) -> Any:
        if isinstance(item, Value):
            return numbers.get(id(item))
        if isinstance(item, set | frozenset):
            return sorted(plain(tuple(item)))
        if isinstance(item, list):
            return [plain(one) for one in item]
        if isinstance(item, tuple):
            return tuple(_numbered(one, calls) if _is_call(one) else plain(one) for one in item)
        return item

    return [[plain(getattr(value, f.name)) for f in fields(Value) if f.name != "fake"] for value in values]


def _is_call(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 3 and all(isinstance(part, str) for part in item)


def _numbered(call: ModuleCall, calls: dict[str, int]) -> tuple[str, int, str]:
    """A module call with a number in place of the identity of the module."""
    return call[0], calls.setdefault(call[1], len(calls)), call[2]


@functools.cache
def _source_hash() -> str:
    """Return the hash of the source of this package and of its actions."""
    digest = hashlib.sha256()
    for name in ("gradrewrite", "gradrewrite.passes"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()

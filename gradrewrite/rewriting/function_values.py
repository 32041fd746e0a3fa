"""The Python values in the reach of a function at its trace.

A traced function is not called again: what it reads of Python would keep its first value. As the guards of
torch.compile do, the values are compared with those of the trace at each use of the code.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import itertools
import operator
import random
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._compat.make_fx import is_traced
from gradrewrite.policy.actions import is_action

_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_ABSENT = object()
_MOST_ELEMENTS = 256  # of a container that is looked into; of a longer one, its length is compared
_MOST_BYTES = 1 << 16  # of an array that is compared; of a larger one, its shape is
_ITERATIONS = frozenset(("values", "items", "keys", "copy", "update"))  # that read more of a dict than constant keys
_SPECIAL = frozenset(  # methods that operators use
    f"__{name}__"
    for name in (
        "getattr getattribute getitem contains iter next len bool float int index complex missing enter exit get "
        "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg pos abs matmul lt le gt ge and or xor"
    ).split()
)
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))
_PACKAGES = "site-packages"  # in the paths of files of installed packages
_OURS = frozenset(("torch", "numpy", "gradrewrite", "builtins"))
_CLOCKS = frozenset(
    (
        *(f"time.{name}{ns}" for name in ("time", "perf_counter", "monotonic", "process_time") for ns in ("", "_ns")),
        *("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "posix.urandom", "uuid.uuid4"),
    )
)

_Edge = tuple[Callable[[Any, Any], Any], Any, Any, str]  # how it is read, of what, which, and its name for messages
_Read = tuple[Callable[[Any, Any], Any], Any, Any, Any, str]  # the same with its value


class FunctionValues:
    """The Python values within reach of functions, as they are now."""

    def __init__(self, functions: Iterable[Any], *, in_libraries: bool = True) -> None:
        """Read them; ``in_libraries`` also through functions of other packages."""
        self.functions = tuple(functions)
        self._in_libraries = in_libraries
        self._read()

    def _read(self) -> None:
        own = frozenset(map(_package_of, self.functions))
        facts = _CodeFacts()
        while True:  # a name in a method that is found leads to further attributes
            walk = _Walk(None if self._in_libraries else own, facts)
            for function in self.functions:
                walk.enter(function, is_called=True)
            if walk.facts == facts:
                break
            facts = walk.facts
        self._reads = tuple(walk.reads)
        self.clock = walk.clock  # a function of the time or of the system's random numbers that is called
        self.prints = walk.prints

    def first_change(self) -> tuple[str, Any] | None:
        """Return the name and the present value of the first changed one; None without one."""
        read: Any = None
        has_equal = False
        try:
            for read in self._reads:
                how, holder, key, before, _ = read
                now = how(holder, key)
                if now is not before:
                    if not _is_same(now, before):
                        return read[4], now
                    has_equal |= isinstance(now, _CONTAINERS)
        except (LookupError, AttributeError, ValueError):  # it is gone
            return read[4], "nothing"
        if has_equal:
            self._read()  # another container of equal values, which may change from now on
        return None

    def leaked_since(self, before: FunctionValues) -> str | None:
        """Return the name of the first traced tensor that was not there before; None without one."""
        known = {id(tensor) for *_, value, _ in before._reads for tensor in _traced_in(value)}
        found = ((name, tensor) for *_, value, name in self._reads for tensor in _traced_in(value))
        return next((name for name, tensor in found if id(tensor) not in known), None)

    def __len__(self) -> int:
        """The number of values."""
        return len(self._reads)


def functions_in(answer: Any) -> list[Any]:
    """Return the functions of the user in an action: itself, or a field of it."""
    if not _is_ours(type(answer)) or isinstance(answer, FunctionType | MethodType | functools.partial | nn.Module):
        return [answer]
    values = [getattr(answer, name) for name in getattr(answer, "__dataclass_fields__", ())]
    found = [functions_in(value) if is_action(value) else [value] * _is_code(value) for value in values]
    return [function for own in found for function in own]


def _is_code(value: Any) -> bool:
    if isinstance(value, FunctionType | MethodType | functools.partial | nn.Module):
        return True
    is_object = callable(value) or hasattr(value, "weights")  # a weighting of losses
    return is_object and not isinstance(value, type) and not _is_ours(type(value))


@dataclass
class _Walk:
    own: frozenset[str] | None  # packages whose functions are looked into; None for all
    facts: _CodeFacts  # of the functions found so far
    reads: list[_Read] = field(default_factory=list)
    clock: str = ""
    prints: bool = False
    _known: dict[tuple[int, bool], Any] = field(default_factory=dict)  # by identity, held

    def enter(self, value: Any, name: str = "", *, is_called: bool = False) -> None:
        """Read the references of a function, or of an object in its reach; ``is_called``: it may be called."""
        is_called |= self.facts.calls_any or isinstance(value, FunctionType)
        if (id(value), is_called) in self._known or _is_leaf(value) or isinstance(value, Tensor):
            return
        if str(type(value).__module__).partition(".")[0] == "gradrewrite":
            return  # a state, a schedule, a site
        self._known[id(value), is_called] = value
        for how, holder, key, label in self._edges(value, name, is_called=is_called):
            try:
                found = how(holder, key)
            except (LookupError, AttributeError, ValueError):  # a cell without a value, an empty slot
                continue
            self.reads.append((how, holder, key, found, label))
            last = label.rpartition(".")[2]
            self.enter(found, label, is_called=last in self.facts.called)

    def _edges(self, value: Any, name: str, *, is_called: bool) -> Iterator[_Edge]:
        dot = f"{name}." if name else ""
        if isinstance(value, functools.partial):
            self.enter(value.func, name, is_called=True)
            self.enter(value.args, f"{dot}args")
            yield from ((operator.getitem, value.keywords, key, f"{dot}{key}") for key in value.keywords)
        elif isinstance(value, MethodType):
            self.enter(value.__func__, name, is_called=True)
            self.enter(value.__self__, name)
        elif isinstance(value, FunctionType):
            yield from self._edges_of_function(value, dot)
        elif isinstance(value, _CONTAINERS):
            yield from self._edges_of_container(value, name, is_called=is_called)
        elif isinstance(value, ModuleType):
            own = {key: one for key, one in vars(value).items() if not _is_ours(value) or isinstance(one, Mapping)}
            yield from ((operator.getitem, vars(value), key, f"{dot}{key}") for key in self.facts.names & own.keys())
        elif isinstance(value, type):
            yield from self._edges_of_class(value, dot, is_called=is_called)
        elif isinstance(value, weakref.ref):
            yield (lambda ref, _: ref()), value, None, name
        elif (state := _state_of(value, may_take="next" in self.facts.globals)) is not None:
            yield (lambda own, read: read(own)), value, state, name or type(value).__name__
        else:
            yield from self._edges_of_object(value, dot, is_called=is_called)

    def _edges_of_function(self, fn: FunctionType, dot: str) -> Iterator[_Edge]:
        origin = str(fn.__globals__.get("__name__", ""))  # functools.wraps overwrites __module__
        if not _may_be_read(origin) or _is_of_python(fn.__code__.co_filename):
            return
        if self.own is not None and _PACKAGES in fn.__code__.co_filename and _package_of(fn) not in self.own:
            return
        code = _code_facts(fn.__code__)
        self.facts = self.facts.joined([code])
        self.prints |= "print" in code.globals and "print" not in fn.__globals__
        for path in code.paths:
            self.clock = self.clock or _clock(path, fn)
        for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield _contents, cell, None, f"{dot}{free}"
        for key in sorted(code.globals & fn.__globals__.keys()):
            yield operator.getitem, fn.__globals__, key, f"{dot}{key}"
        yield getattr, fn, "__defaults__", f"{dot}defaults"
        if fn.__kwdefaults__:
            yield _elements, fn.__kwdefaults__, None, f"{dot}defaults"
        yield from ((operator.getitem, vars(fn), key, f"{dot}{key}") for key in vars(fn))

    def _edges_of_container(self, value: Any, name: str, *, is_called: bool) -> Iterator[_Edge]:
        if isinstance(value, dict) and not self.facts.reads_whole and value and all(isinstance(k, str) for k in value):
            yield from ((_entry, value, key, f"{name}[{key!r}]") for key in self.facts.constants)
            return
        if len(value) > _MOST_ELEMENTS:
            yield (lambda own, _: len(own)), value, None, name
            return
        if not isinstance(value, tuple | frozenset):
            yield _elements, value, None, name
        for element in value.values() if isinstance(value, dict) else value:
            self.enter(element, name, is_called=is_called)

    def _edges_of_class(self, cls: type, dot: str, *, is_called: bool) -> Iterator[_Edge]:
        before: list[Mapping[str, Any]] = []
        for base in cls.__mro__:
            if not _may_be_read(base.__module__):
                continue
            own = vars(base)
            for key in own:
                if not self._may_use(key, is_called=is_called and not _is_ours(base)):
                    continue
                yield from ((_entry, hiding, key, f"{dot}{key}") for hiding in before)
                yield operator.getitem, own, key, f"{dot}{key}"
                found = own[key]
                for part in ("fget", "__func__", "func"):  # of properties, static and class methods
                    if not isinstance(found, FunctionType | functools.partial) and hasattr(found, part):
                        self.enter(getattr(found, part), f"{dot}{key}")
            before.append(own)

    def _may_use(self, key: str, *, is_called: bool) -> bool:
        """Whether a function may use a name of a class: operators use special methods without their names."""
        return key in self.facts.names or key in _SPECIAL or (is_called and key in ("__call__", "forward"))

    def _edges_of_object(self, value: Any, dot: str, *, is_called: bool) -> Iterator[_Edge]:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            is_whole = "__dict__" in self.facts.names or "vars" in self.facts.names
            named = own.keys() if is_whole else (self.facts.names | self.facts.constants) & own.keys()
            yield from ((operator.getitem, own, key, f"{dot}{key}") for key in sorted(named, key=str))
            if "getattr" in self.facts.names or "hasattr" in self.facts.names:
                yield from ((_entry, own, key, f"{dot}{key}") for key in self.facts.constants - own.keys())
            of_class = [key for key in self.facts.names - own.keys() if hasattr(type(value), key)]  # not yet hidden
            yield from ((_entry, own, key, f"{dot}{key}") for key in of_class)
        if isinstance(value, nn.Module):
            for held in (value._parameters, value._buffers, value._modules):
                yield from ((operator.getitem, held, key, f"{dot}{key}") for key in held if self._may_read(key))
        slots = {s for base in type(value).__mro__ for s in _slots(base)}
        yield from ((getattr, value, key, f"{dot}{key}") for key in self.facts.names & slots)
        self.enter(type(value), dot.removesuffix("."), is_called=is_called)
        if isinstance(own, dict) and "__wrapped__" in own:  # of functools.lru_cache
            self.enter(own["__wrapped__"], dot.removesuffix("."))

    def _may_read(self, key: str) -> bool:
        return key in self.facts.names or key.isdecimal()


@dataclass(frozen=True, slots=True)
class _CodeFacts:
    """The names, strings and calls of code."""

    names: frozenset[str] = frozenset()  # of attributes and globals
    globals: frozenset[str] = frozenset()
    constants: frozenset[str] = frozenset()  # strings
    called: frozenset[str] = frozenset()  # names of what is called
    calls_any: bool = False  # local variables are called
    reads_whole: bool = False  # a dict may be read otherwise than by constant keys
    paths: frozenset[tuple[str, ...]] = frozenset()  # dotted names that begin with a global or a closure

    def joined(self, others: Iterable[_CodeFacts]) -> _CodeFacts:
        """Return the facts of this and of other code."""
        every = [self, *others]
        return _CodeFacts(
            names=frozenset[str]().union(*(one.names for one in every)),
            globals=frozenset[str]().union(*(one.globals for one in every)),
            constants=frozenset[str]().union(*(one.constants for one in every)),
            called=frozenset[str]().union(*(one.called for one in every)),
            calls_any=any(one.calls_any for one in every),
            reads_whole=any(one.reads_whole for one in every),
            paths=frozenset[tuple[str, ...]]().union(*(one.paths for one in every)),
        )


@functools.lru_cache(maxsize=4096)
def _code_facts(code: CodeType) -> _CodeFacts:
    steps = list(dis.get_instructions(code))
    before = ["", *(step.opname for step in steps)]
    reads_whole = bool(_ITERATIONS.intersection(code.co_names)) or any(
        step.opname in ("CALL_FUNCTION_EX", "DICT_MERGE", "DICT_UPDATE")
        or (_is_item(step) and last not in ("LOAD_CONST", "LOAD_SMALL_INT"))
        for step, last in zip(steps, before, strict=False)
    )
    found = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    plain = [part for one in code.co_consts for part in (one if isinstance(one, tuple | frozenset) else (one,))]
    called, calls_any = _called_in(steps)
    own = _CodeFacts(
        names=frozenset(code.co_names),
        globals=frozenset(found),
        constants=frozenset(one for one in plain if isinstance(one, str)),
        called=called,
        calls_any=calls_any,
        reads_whole=reads_whole,
        paths=frozenset(_dotted_names(steps)),
    )
    return own.joined(_code_facts(one) for one in code.co_consts if isinstance(one, CodeType))


def _called_in(steps: Sequence[dis.Instruction]) -> tuple[frozenset[str], bool]:
    """Return the called names, and whether local variables are called.

    Where the bytecode of a version does not tell, everything may be called.
    """
    called, calls_local = set[str](), sys.version_info < (3, 11)
    for at, step in enumerate(steps):
        around = {steps[n].opname for n in (at - 1, at + 1) if 0 <= n < len(steps)}
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            is_method = step.opname in ("LOAD_METHOD", "LOAD_ATTR")
            if is_method or "NULL" in step.argrepr or "PUSH_NULL" in around:
                called.add(step.argval)
        elif step.opname.startswith("LOAD_FAST") and "PUSH_NULL" in around:
            calls_local = True
    return frozenset(called), calls_local


def _is_item(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _dotted_names(steps: Iterable[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    path: tuple[str, ...] = ()
    for step in steps:
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            path = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path = (*path, step.argval)
        elif step.opname not in ("PUSH_NULL", "CACHE"):
            path = ()
        if path:
            yield path


def _clock(path: tuple[str, ...], fn: FunctionType) -> str:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    first, *rest = path
    try:
        value = cells[first].cell_contents if first in cells else fn.__globals__[first]
        for name in rest:
            if not isinstance(value, ModuleType | type):
                return ""
            value = getattr(value, name)
    except (LookupError, AttributeError, ValueError):
        return ""
    if not isinstance(value, BuiltinFunctionType | FunctionType):
        return ""
    known = f"{value.__module__}.{value.__qualname__}" if value.__module__ else value.__qualname__
    return known if known in _CLOCKS or value.__qualname__ in _CLOCKS else ""


def _contents(cell: CellType, _: None) -> Any:
    return cell.cell_contents


def _entry(held: Mapping[str, Any], key: str) -> Any:
    return held.get(key, _ABSENT)


def _elements(held: Any, _: None) -> tuple[Any, ...]:
    if isinstance(held, dict):
        return (*held, *held.values())
    return tuple(held)


def _state_of(value: Any, *, may_take: bool) -> Callable[[Any], Any] | None:
    """Return a reader of the state of iterators, arrays and the like; None for other objects.

    An iterator that does not tell its state is another one at each look, where something may be taken from it.
    """
    if isinstance(value, Iterator):
        return _state_of_iterator(value, may_take=may_take)
    if isinstance(value, contextvars.ContextVar):
        return lambda own: own.get(None)
    if isinstance(value, Mapping) and _is_ours(type(value)):
        return lambda own: tuple(own.items())
    if isinstance(value, random.Random):
        return lambda own: hash(own.getstate())
    return _state_of_numpy(value)


def _state_of_iterator(value: Any, *, may_take: bool) -> Callable[[Any], Any]:
    if isinstance(value, GeneratorType):
        return lambda own: None if own.gi_frame is None else own.gi_frame.f_lasti
    if isinstance(value, itertools.count):
        return repr
    if operator.length_hint(value, -1) >= 0:
        return lambda own: operator.length_hint(own, -1)
    return (lambda own: object()) if may_take else id


def _state_of_numpy(value: Any) -> Callable[[Any], Any] | None:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.ndarray):
        return (lambda own: own.tobytes()) if value.nbytes <= _MOST_BYTES else (lambda own: (own.shape, own.dtype.str))
    if isinstance(value, numpy.random.Generator):
        return lambda own: repr(own.bit_generator.state)
    return (lambda own: hash(str(own.get_state()))) if isinstance(value, numpy.random.RandomState) else None


def random_state() -> tuple[int, ...]:
    """Return hashes of the states of the random numbers of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    states = [random.getstate()] if numpy is None else [random.getstate(), numpy.random.get_state()[1].tobytes()]
    return (*map(hash, states), 0 if numpy is None else numpy.random.get_state()[2])


_LEAVES = (int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.Size)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAVES) and not isinstance(value, tuple)


def _is_same(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return False
    if isinstance(now, set | frozenset):
        return bool(now == before)
    if isinstance(now, _CONTAINERS):
        pairs = zip(_elements(now, None), _elements(before, None), strict=False)
        return len(now) == len(before) and all(a is b or _is_same(a, b) for a, b in pairs)
    if _is_leaf(now) or _is_number_of_numpy(now):
        return bool(now == before) if isinstance(now, int | str | bytes) else repr(now) == repr(before)
    return False


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _traced_in(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if isinstance(part, Tensor) and is_traced(part)]


def _package_of(value: Any) -> str:
    """Return the package of a function, or of the class of an object that is one."""
    while isinstance(value, functools.partial | MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    origin = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return str(origin).partition(".")[0]


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _may_be_read(module: str) -> bool:
    """Whether code of a module is looked into: the user's, and optimizers and schedulers of torch."""
    first = str(module).partition(".")[0]
    return str(module).startswith("torch.optim") or (first not in _OURS and first not in sys.stdlib_module_names)


def _is_ours(value: Any) -> bool:
    """Whether a function, class or module is torch's, Python's or this package's."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    first = name.partition(".")[0]
    return first in _OURS or first in sys.stdlib_module_names


def _is_of_python(file: str) -> bool:
    return file.startswith(_LIBRARIES) and _PACKAGES not in file

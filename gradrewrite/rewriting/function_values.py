"""The Python values in the reach of a function at its trace.

A traced function is not called again: what it reads of Python would keep its first value. As the guards of
torch.compile do, the values are compared with those of the trace at each use of the code.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._compat.make_fx import is_traced

_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_ABSENT = object()
_MOST_ELEMENTS = 256  # of a container that are looked into; of a longer one, its elements are compared by identity
_ITERATIONS = frozenset(("values", "items", "keys", "copy", "update"))  # that read more of a dict than constant keys
_SPECIAL = frozenset(  # methods that operators and calls use
    f"__{name}__"
    for name in (
        "call getattr getattribute getitem contains iter next len bool float int index complex missing enter exit get "
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
        own = frozenset(map(_package_of, self.functions))
        names, constants, is_whole = frozenset[str](), frozenset[str](), False
        while True:  # a name in a method that is found leads to further attributes
            walk = _Walk(None if in_libraries else own, names, constants, is_whole)
            for function in self.functions:
                walk.enter(function)
            if walk.names <= names and walk.constants <= constants and walk.reads_whole <= is_whole:
                break
            names, constants, is_whole = walk.names | names, walk.constants | constants, walk.reads_whole or is_whole
        self._reads = tuple(walk.reads)
        self.clock = walk.clock  # a function of the time or of the system's random numbers that is called
        self.prints = walk.prints

    def first_change(self) -> tuple[str, Any] | None:
        """Return the name and the present value of the first changed one; None without one."""
        read: Any = None
        try:
            for read in self._reads:
                how, holder, key, before, _ = read
                now = how(holder, key)
                if now is not before and not _is_same(now, before):
                    return read[4], now
        except (LookupError, AttributeError, ValueError):  # it is gone
            return read[4], "nothing"
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
    fields = getattr(answer, "__dataclass_fields__", ())
    return [value for name in fields if isinstance(value := getattr(answer, name), FunctionType | MethodType)]


@dataclass
class _Walk:
    own: frozenset[str] | None  # packages whose functions are looked into; None for all
    names: frozenset[str]  # attributes that the functions found so far name
    constants: frozenset[str]  # their strings
    reads_whole: bool  # whether one of them reads dicts otherwise than by constant keys
    reads: list[_Read] = field(default_factory=list)
    clock: str = ""
    prints: bool = False
    _known: dict[int, Any] = field(default_factory=dict)  # by identity, held

    def enter(self, value: Any, name: str = "") -> None:
        """Read the references of a function, or of an object in its reach."""
        if id(value) in self._known or _is_leaf(value) or isinstance(value, Tensor):
            return
        if str(type(value).__module__).partition(".")[0] == "gradrewrite":
            return  # a state, a schedule, a site
        self._known[id(value)] = value
        for how, holder, key, label in self._edges(value, name):
            try:
                found = how(holder, key)
            except (LookupError, AttributeError, ValueError):  # a cell without a value, an empty slot
                continue
            self.reads.append((how, holder, key, found, label))
            self.enter(found, label)

    def _edges(self, value: Any, name: str) -> Iterator[_Edge]:
        dot = f"{name}." if name else ""
        if isinstance(value, functools.partial):
            self.enter(value.func, name)
            self.enter(value.args, f"{dot}args")
            yield from ((operator.getitem, value.keywords, key, f"{dot}{key}") for key in value.keywords)
        elif isinstance(value, MethodType):
            self.enter(value.__func__, name)
            self.enter(value.__self__, name)
        elif isinstance(value, FunctionType):
            yield from self._edges_of_function(value, dot)
        elif isinstance(value, _CONTAINERS):
            yield from self._edges_of_container(value, name)
        elif isinstance(value, ModuleType):
            own = {} if _is_ours(value) else vars(value)
            yield from ((operator.getitem, own, key, f"{dot}{key}") for key in self.names & own.keys())
        elif isinstance(value, type):
            yield from self._edges_of_class(value, dot)
        elif (state := _state_of(value)) is not None:
            yield (lambda own, read: read(own)), value, state, name or type(value).__name__
        else:
            yield from self._edges_of_object(value, dot)

    def _edges_of_function(self, fn: FunctionType, dot: str) -> Iterator[_Edge]:
        if _is_ours(fn) or _is_of_python(fn.__code__.co_filename):
            return
        if self.own is not None and _PACKAGES in fn.__code__.co_filename and _package_of(fn) not in self.own:
            return
        code = _code_facts(fn.__code__)
        self.names |= code.names
        self.constants |= code.constants
        self.reads_whole |= code.reads_whole
        self.prints |= "print" in code.globals and "print" not in fn.__globals__
        for path in code.calls:
            self.clock = self.clock or _clock(path, fn)
        for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield _contents, cell, None, f"{dot}{free}"
        for key in sorted(code.globals & fn.__globals__.keys()):
            yield operator.getitem, fn.__globals__, key, f"{dot}{key}"
        yield getattr, fn, "__defaults__", f"{dot}defaults"
        if fn.__kwdefaults__:
            yield _elements, fn.__kwdefaults__, None, f"{dot}defaults"
        yield from ((operator.getitem, vars(fn), key, f"{dot}{key}") for key in vars(fn))

    def _edges_of_container(self, value: Any, name: str) -> Iterator[_Edge]:
        if isinstance(value, dict):
            if not self.reads_whole and value and all(isinstance(key, str) for key in value):
                for key in self.constants:
                    yield _entry, value, key, f"{name}[{key!r}]"
                return
            yield _elements, value, None, name
        elif not isinstance(value, tuple | frozenset):
            yield _elements, value, None, name
        elements = tuple(value.values()) if isinstance(value, dict) else tuple(value)
        for element in elements if len(elements) <= _MOST_ELEMENTS else ():
            self.enter(element, name)

    def _edges_of_class(self, cls: type, dot: str) -> Iterator[_Edge]:
        before: list[Mapping[str, Any]] = []
        for base in cls.__mro__:
            if _is_ours(base):
                continue
            own = vars(base)
            for key in filter(self._may_use, own):
                yield from ((_entry, hiding, key, f"{dot}{key}") for hiding in before)
                yield operator.getitem, own, key, f"{dot}{key}"
                found = own[key]
                for part in ("fget", "__func__", "func"):  # of properties, static and class methods
                    if not isinstance(found, FunctionType | functools.partial) and hasattr(found, part):
                        self.enter(getattr(found, part), f"{dot}{key}")
            before.append(own)

    def _may_use(self, key: str) -> bool:
        """Whether a function may use a name of a class: a special method is used without its name."""
        return key in self.names or key == "forward" or (key.startswith("__") and key in _SPECIAL)

    def _edges_of_object(self, value: Any, dot: str) -> Iterator[_Edge]:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            is_whole = "__dict__" in self.names or "vars" in self.names
            named = own.keys() if is_whole else (self.names | self.constants) & own.keys()
            yield from ((operator.getitem, own, key, f"{dot}{key}") for key in sorted(named, key=str))
            if "getattr" in self.names or "hasattr" in self.names:
                yield from ((_entry, own, key, f"{dot}{key}") for key in self.constants - own.keys())
            hidden = [key for key in self.names - own.keys() if hasattr(type(value), key)]  # of the class, until now
            yield from ((_entry, own, key, f"{dot}{key}") for key in hidden)
        if isinstance(value, nn.Module):
            for held in (value._parameters, value._buffers, value._modules):
                yield from ((operator.getitem, held, key, f"{dot}{key}") for key in held if self._may_read(key))
        slots = {s for base in type(value).__mro__ for s in _slots(base)}
        yield from ((getattr, value, key, f"{dot}{key}") for key in self.names & slots)
        self.enter(type(value), dot.removesuffix("."))
        if isinstance(own, dict) and "__wrapped__" in own:  # of functools.lru_cache
            self.enter(own["__wrapped__"], dot.removesuffix("."))

    def _may_read(self, key: str) -> bool:
        return key in self.names or key.isdecimal()


@dataclass(frozen=True, slots=True)
class _CodeFacts:
    names: frozenset[str]  # of attributes and globals
    globals: frozenset[str]
    constants: frozenset[str]  # strings
    reads_whole: bool  # a dict may be read otherwise than by constant keys
    calls: tuple[tuple[str, ...], ...]  # dotted names that begin with a global or a closure


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
    inner = [_code_facts(one) for one in code.co_consts if isinstance(one, CodeType)]
    return _CodeFacts(
        names=frozenset(code.co_names).union(*(one.names for one in inner)),
        globals=frozenset(found).union(*(one.globals for one in inner)),
        constants=frozenset(one for one in plain if isinstance(one, str)).union(*(one.constants for one in inner)),
        reads_whole=reads_whole or any(one.reads_whole for one in inner),
        calls=tuple(dict.fromkeys([*_dotted_names(steps), *(path for one in inner for path in one.calls)])),
    )


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


def _state_of(value: Any) -> Callable[[Any], Any] | None:
    """Return a reader of the state of iterators, generators and arrays; None for other objects."""
    if isinstance(value, GeneratorType):
        return lambda own: None if own.gi_frame is None else own.gi_frame.f_lasti
    if isinstance(value, itertools.count):
        return repr
    if isinstance(value, Iterator):
        return lambda own: operator.length_hint(own, -1)
    if isinstance(value, random.Random):
        return lambda own: hash(own.getstate())
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.ndarray):
        return lambda own: own.tobytes()
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
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(a is b or _is_same(a, b) for a, b in zip(now, before, strict=True))
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


def _is_ours(value: Any) -> bool:
    """Whether a function, class or module is torch's, Python's or this package's."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    first = name.partition(".")[0]
    return first in _OURS or first in sys.stdlib_module_names


def _is_of_python(file: str) -> bool:
    return file.startswith(_LIBRARIES) and _PACKAGES not in file

"""The memory of a model's actions: the tensors behind ``gr.State``, by site, and the step of schedules."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors, make_fx
from gradrewrite._compat.optimizers import foreach_copies, foreach_copy
from gradrewrite._utils.formatting import listed
from gradrewrite._utils.warnings import warn
from gradrewrite.distributed.groups import this_rank
from gradrewrite.errors import PolicyError
from gradrewrite.numerics import philox
from gradrewrite.numerics.noise import NoiseSource
from gradrewrite.policy.schedules import Schedule

_VERSION = 1
_CALL = re.compile(r"#\d+")


@dataclass(frozen=True, slots=True, eq=False)
class StateKind:
    """The form of a state; each is another one, whatever it has."""

    shape: torch.Size
    init: float  # of every element at first
    dtype: torch.dtype
    name: str  # empty if it is numbered
    is_carried: bool = False  # from call to call; the calls of a site share one
    is_random: bool = False  # a stream of random numbers; see ``random_stream``

    def make(self, device: torch.device | None = None, key: str = "", seed: int = 0) -> Tensor:
        """Return the first value, of a random stream that for its key in the store and a seed."""
        if self.is_random:
            return torch.tensor([philox.key_of(seed, key), 0], dtype=self.dtype, device=device)
        return torch.full(self.shape, self.init, dtype=self.dtype, device=device)


def random_stream() -> StateKind:
    """Return the kind of a state with the key of a random stream, and a count of its uses."""
    return StateKind(torch.Size((2,)), 0, torch.int64, "random", is_random=True)


CarriedKeys: TypeAlias = dict[str, dict[StateKind, str]]


class StateScope:
    """The states of the actions at one site, or of one group, while they are traced.

    ``carried`` has the keys of those that are carried from call to call, by the site without the number of a call.
    """

    def __init__(self, store: StateStore, where: str, carried: CarriedKeys | None = None) -> None:
        self.store = store
        self._where = where
        self._carried = {} if carried is None else carried
        self._keys: dict[StateKind, str] = {}  # which also keeps them alive, so that none takes another's identity
        self.updates: dict[str, tuple[Tensor, Tensor]] = {}  # by the traced action: tensors and new values, by key
        self.is_used = False
        self._written: set[StateKind] = set()  # states that were set, in any trace

    def copied(self) -> StateScope:
        """Return a scope for further actions there, with the keys of those so far."""
        found = StateScope(self.store, self._where, self._carried)
        found._keys, found._written = dict(self._keys), set(self._written)
        return found

    def begin(self) -> None:
        """Clear the updates before an action is traced, or traced again."""
        self.updates.clear()
        self.is_used = False

    def value(self, state: StateKind, device: torch.device) -> Tensor:
        """Return the value of a state: its update in this trace, or its tensor."""
        self.is_used = True
        key = self._key(state)
        return self.updates[key][1] if key in self.updates else self.store.tensor(key, state, device)

    def set(self, state: StateKind, device: torch.device, new: Tensor) -> None:
        """Note the new value of a state."""
        self.is_used = True
        self._written.add(state)
        key = self._key(state)
        self.updates[key] = self.store.tensor(key, state, device), new

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the states that actions have used here."""
        return tuple(self._keys.values())

    @property
    def carried(self) -> dict[str, Tensor]:
        """Those of them that are carried from call to call, by key."""
        return {key: self.store.held(key) for state, key in self._keys.items() if state.is_carried}

    def check(self) -> None:
        """Raise PolicyError for a state that is only read here, and set elsewhere: these are two."""
        for state in (kind for kind in self._keys if not kind.is_random):
            self.store.note_use(state, self._base(state), is_written=state in self._written)

    def noise_source(self, name: str, own: NoiseSource) -> NoiseSource:
        """Return the source that an action draws from here: the first one of this name, or its own."""
        return self.store.noise_source(f"{self._where}/{name}", own)

    def write(self) -> None:
        """Write the updates of an action outside of a graph."""
        write_states([target for target, _ in self.updates.values()], [value for _, value in self.updates.values()])

    def _key(self, state: StateKind) -> str:
        where = self._base(state)
        known = self._carried.setdefault(where, {}) if state.is_carried else self._keys
        if state not in known:
            names = itertools.chain([state.name], (f"{state.name}.{n}" for n in itertools.count(2)))
            if not state.name:
                names = itertools.chain(map(str, itertools.count(sum(not one.name for one in known))))
            taken = {*self._keys.values(), *self._carried.get(where, {}).values()}
            known[state] = next(key for name in names if (key := f"{where}/{name}") not in taken)
        return self._keys.setdefault(state, known[state])

    def _base(self, state: StateKind) -> str:
        return _CALL.sub("", self._where) if state.is_carried else self._where


class StateStore:
    """All states of one model, and the step of its schedules."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed  # of random numbers
        self._tensors: dict[str, Tensor] = {}
        self._stacks: dict[tuple[str, str], _Stacks] = {}  # of loops, by site and name
        self._kinds: dict[str, StateKind] = {}  # of the tensors, by key
        self._ranks: dict[torch.device, Tensor] = {}  # the number of this process, by device
        self._noise: dict[str, NoiseSource] = {}
        self._adds_noise = True
        self._loaded: dict[str, Tensor] = {}  # until an action asks for it
        self._missing: list[str] | None = None  # states that what was loaded lacks; None where nothing is to be told
        self._uses: dict[StateKind, dict[str, bool]] = {}  # whether a state is set there, by site or group
        self._schedules: dict[tuple[Schedule, torch.device], _Scheduled] = {}
        self._first_step = 0
        self._steps: dict[int, int] = {}  # by the identity of the guard
        self._backwards = 0
        self._backward = -1
        self.current = 0  # the step that the last backward belongs to, or the step sites that run

    @property
    def step(self) -> int:
        """The number of the next backward's step: of optimizer steps with a guard, or of backwards without one."""
        return self._first_step + max(self._steps.values(), default=self._backwards)

    @property
    def is_used(self) -> bool:
        """Whether an action has a state, draws noise or follows a schedule."""
        return bool(self._tensors or self._schedules or self._noise)

    def scope(self, where: str, carried: CarriedKeys | None = None) -> StateScope:
        """Return the states at a site or of a group, for one rewrite; see ``StateScope``."""
        return StateScope(self, where, carried)

    def tensor(self, key: str, state: StateKind, device: torch.device) -> Tensor:
        """Return the tensor of a state, made if it is not there.

        PolicyError if what was loaded, or another state of this name, has another shape or dtype.
        """
        known = self._tensors.get(key, self._loaded.get(key))
        if known is not None and (known.shape != state.shape or known.dtype != state.dtype):
            raise PolicyError(
                f"{key}: the state is {tuple(state.shape)}, {state.dtype}, and what is there or was loaded is "
                f"{tuple(known.shape)}, {known.dtype}; was the policy another one when it was saved?",
                code="state",
            )
        if key in self._tensors and known is not None and known.device == device:
            return known
        if known is None and self._missing is not None:
            self._missing.append(key)
        with fake_tensors.outside_of_transforms() if make_fx.is_tracing() else contextlib.nullcontext():
            made = state.make(device, key, self.seed) if known is None else known.to(device, copy=True)
        self._tensors[key], self._kinds[key] = made, state
        self._loaded.pop(key, None)
        return made

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restore all states at the end."""
        kept = {key: tensor.clone() for key, tensor in self._tensors.items()}
        yield
        for key, tensor in self._tensors.items():
            tensor.copy_(kept[key] if key in kept else self._first(key))

    def _first(self, key: str) -> Tensor:
        """Return the first value of a state that is there."""
        return self._kinds[key].make(None, key, self.seed)

    def held(self, key: str) -> Tensor:
        """Return the tensor of a state that is there."""
        return self._tensors[key]

    def stack(self, site: str, name: str, calls: range, acting: Collection[int], in_use: int) -> Tensor:
        """Return the states of an action in the iterations of a loop as one tensor ``[len(calls), *shape]``.

        All states of one name at a value share memory, a row for each call of its site; that of the first call with an
        action is there. More calls have new memory, to which all tensors move.

        Args:
            site: The site of the value, without the number of a call.
            name: What stands behind the site in the key of the state.
            calls: The numbers of the iterations among the calls of the site.
            acting: Those of them with an action; of the others nothing is kept under a key.
            in_use: The end of the numbers at hand; further ones come into use where they are written or loaded.
        """
        like = self._tensors[_key_of_call(site, name, min(acting))]
        kind = self._kinds[_key_of_call(site, name, min(acting))]
        stacks = self._stacks.setdefault((site, name), _Stacks())
        with fake_tensors.outside_of_transforms(), torch.no_grad():
            memory, form = stacks.memory, (like.device, like.dtype, like.shape)
            if memory is None or (memory.device, memory.dtype, memory.shape[1:]) != form:
                stacks.parts.clear()
                stacks.calls.clear()
                memory = stacks.memory = self._first_rows(site, name, kind, calls.stop).to(like.device)
            elif len(memory) < calls.stop:
                stacks.memory = self._first_rows(site, name, kind, calls.stop).to(like.device)
                stacks.memory[: len(memory)] = memory
                memory = stacks.memory
                for part, tensor in stacks.parts.items():
                    tensor.set_(memory[part.start : part.stop : part.step])  # type: ignore[call-overload]
            stacks.calls |= set(acting)
            stacks.kind, stacks.in_use = kind, max(stacks.in_use, in_use)
            self._use_rows(site, name, stacks, self._loaded)
            if min(acting) >= stacks.in_use:  # it was made for the trace
                self._tensors.pop(_key_of_call(site, name, min(acting)), None)
            return stacks.parts.setdefault(calls, memory[calls.start : calls.stop : calls.step])

    def _first_rows(self, site: str, name: str, kind: StateKind, number: int) -> Tensor:
        if not kind.is_random:
            return kind.make().expand(number, *kind.shape).clone()
        return torch.stack([kind.make(None, _key_of_call(site, name, call), self.seed) for call in range(number)])

    def _use_rows(self, site: str, name: str, stacks: _Stacks, loaded: Collection[str] = ()) -> None:
        """Give the rows in use their keys, and those of loaded states."""
        assert stacks.memory is not None
        assert stacks.kind is not None
        keys = {number: _key_of_call(site, name, number) for number in sorted(stacks.calls)}
        stacks.in_use = max([stacks.in_use, *(number + 1 for number, key in keys.items() if key in loaded)])
        for number, key in keys.items():
            if number < stacks.in_use:
                row, known = stacks.memory[number], self._tensors.get(key)
                row.copy_(self._loaded.pop(key, row) if known is None else known)
                self._tensors[key] = row
                self._kinds.setdefault(key, stacks.kind)

    def _use_loaded_rows(self, site: str, name: str, stacks: _Stacks, loaded: Collection[str]) -> None:
        """Use the rows of loaded states alone, and set the others back to their first values."""
        keys = {number: _key_of_call(site, name, number) for number in stacks.calls}
        if any(key in loaded for key in keys.values()):
            assert stacks.memory is not None
            assert stacks.kind is not None
            for number, key in keys.items():
                if key not in loaded:
                    stacks.memory[number].copy_(stacks.kind.make(None, key, self.seed))
                    self._tensors.pop(key, None)
            stacks.in_use = 0
        self._use_rows(site, name, stacks, loaded)

    def write(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write the results of a backward; a loop may have fewer iterations than there is memory for."""
        own = zip(targets, values, strict=True)
        write_states([t if t.shape == v.shape else t.narrow(0, 0, len(v)) for t, v in own], values)
        for (site, name), stacks in self._stacks.items():
            for part, tensor in stacks.parts.items():
                ends = [part[len(v) - 1] + 1 for t, v in zip(targets, values, strict=True) if t is tensor]
                if ends and ends[0] > stacks.in_use:
                    stacks.in_use = ends[0]
                    with torch.no_grad():
                        self._use_rows(site, name, stacks)

    def note_use(self, state: StateKind, where: str, *, is_written: bool) -> None:
        """Note that an action at a site or of a group has a state; see ``StateScope.check``."""
        uses = self._uses.setdefault(state, {})
        uses[where] = uses.get(where, False) or is_written
        written = next((at for at, is_set in uses.items() if is_set), None)
        read = next((at for at, is_set in uses.items() if not is_set), None)
        if written is not None and read is not None:
            raise PolicyError(
                f"{read}: a gr.State{f' {state.name!r}' if state.name else ''} is read here and set at {written}: "
                f"each site has a state of its own, so that the one here would stay {state.init!r} for ever. Read and "
                "set it at one site, or let both functions close over a tensor that the training loop writes",
                code="state",
            )

    def noise_source(self, key: str, own: NoiseSource) -> NoiseSource:
        """Return the noise source under a key, with its loaded state.

        It is the first one that was given: a policy may answer with another action when a graph is compiled again, and
        the noise of that would begin anew.
        """
        source = self._noise.setdefault(key, own)
        source.is_silent = not self._adds_noise
        self._load_noise(key, source)
        return source

    def add_noise(self, adds: bool) -> None:
        """Set whether this process draws the noise; otherwise another does, and gradients are averaged with it."""
        self._adds_noise = adds
        for source in self._noise.values():
            source.is_silent = not adds

    def _load_noise(self, key: str, source: NoiseSource) -> None:
        prefix = f"{key}."
        own = {name.removeprefix(prefix): self._loaded.pop(name) for name in [*self._loaded] if name.startswith(prefix)}
        with fake_tensors.outside_of_transforms():
            source.load_state_dict(own)

    def own_tensors(self) -> list[Tensor]:
        """Return the tensors of states and schedules."""
        stacks = (tensor for known in self._stacks.values() for tensor in known.parts.values())
        schedules = (found.tensor for found in self._schedules.values())
        return [*self._tensors.values(), *stacks, *schedules, *self._ranks.values()]

    def rank(self, device: torch.device) -> Tensor:
        """Return the number of this process as a 0-d int64 tensor on a device."""
        if device not in self._ranks:
            with fake_tensors.outside_of_transforms():
                self._ranks[device] = torch.tensor(this_rank() or 0, device=device)
        return self._ranks[device]

    def copied_streams(self, states: Sequence[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Return copies of those of the states of a graph that are random streams, by the identity of the tensor."""
        streams = [tensor for key, tensor in states if self._kinds[key].is_random]
        return dict(zip(map(id, streams), foreach_copies(streams), strict=True))

    def schedule(self, schedule: Schedule, device: torch.device, least: float) -> Tensor:
        """Return the 0-d tensor on a device that follows a schedule, float64 where the device has that."""
        key = (schedule, device)
        if key not in self._schedules:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            with fake_tensors.outside_of_transforms():
                number = schedule.at(self.current, least)
                made = torch.full((), number, dtype=dtype, device=device)
            self._schedules[key] = _Scheduled(made, number, self.current)
        found = self._schedules[key]
        found.least = max(found.least, least)
        return found.tensor

    def note_backward(self, number: int) -> None:
        """A graph runs the backward of this number: the first of a backward brings schedules up to date."""
        if number != self._backward or number == -1:
            self.begin_step()
            if self._backwards and not self._steps:
                self._tell_of_others()
            self._backward = number
            self._backwards += 1

    def add_guard(self, guard: int) -> None:
        """From now on the steps of optimizers with guards count, those of this one too."""
        if guard not in self._steps:
            self._count_anew({*self._steps, guard})

    def remove_guard(self, guard: int) -> None:
        """From now on the steps of other guards count, or backwards where there is none."""
        if guard in self._steps:
            self._count_anew(self._steps.keys() - {guard})

    def _count_anew(self, guards: Collection[int]) -> None:
        """Go on from the step that is reached with these guards."""
        self._first_step, self._backwards, self._steps = self.step, 0, dict.fromkeys(guards, 0)

    def note_step(self, guard: int) -> None:
        """The optimizer with this guard has made a step, or skipped one."""
        if guard not in self._steps:  # the model was rewritten since, with the same monitor
            self.add_guard(guard)
        self._steps[guard] += 1
        if self._backwards:
            self._tell_of_others()

    def _tell_of_others(self) -> None:
        """Warn once, after a whole step, of a loaded state of another policy."""
        # A longer sequence has new states in a loop, and a shorter one does not use all.
        missing, left = self._missing, [key for key in self._loaded if not self._is_of_loop(key)]
        missing = missing and [key for key in missing if not self._is_of_loop(key)]
        self._missing = None
        if missing is None or not (missing or left):
            return
        texts = [f"it lacks {listed(missing)}, which began anew"] if missing else []
        texts += [f"no action has used its {listed(left)}"] if left else []
        warn(
            f"gr.load_state_dict: what was loaded is of another policy: {'; '.join(texts)}. Load it into a model with "
            "the policy that it was saved with"
        )

    def _is_of_loop(self, key: str) -> bool:
        return any(key.startswith(f"{site}#") and key.endswith(name) for site, name in self._stacks)

    def begin_step(self) -> None:
        """Bring schedules up to date: a backward begins, or the actions at step sites run."""
        step = self.current = self.step
        for (schedule, _), scheduled in self._schedules.items():
            if scheduled.step != step:
                number = schedule.at(step, scheduled.least)
                scheduled.step = step
                if number != scheduled.number:
                    scheduled.number = number
                    scheduled.tensor.fill_(number)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all states and the step."""
        found = self._without_noise()
        for key, source in self._noise.items():
            found["states"] |= {f"{key}.{device}": t for device, t in source.state_dict().items()}
        return found

    def _without_noise(self) -> dict[str, Any]:
        states = {key: t.detach().clone() for key, t in {**self._loaded, **self._tensors}.items()}
        return {"version": _VERSION, "step": self.step, "states": dict(sorted(states.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``, in place; ValueError for another version, shape or dtype."""
        if state.keys() != {"version", "step", "states"} or state["version"] != _VERSION:
            raise ValueError(
                f"gr.load_state_dict takes what gr.state_dict returned (version {_VERSION}), got {list(state)}"
            )
        for key, tensor in state["states"].items():
            known = self._tensors.get(key)
            if known is not None and (known.shape != tensor.shape or known.dtype != tensor.dtype):
                raise ValueError(
                    f"{key}: the state is {tuple(known.shape)}, {known.dtype}, and what is loaded is "
                    f"{tuple(tensor.shape)}, {tensor.dtype}; was the policy another one when it was saved?"
                )
        self._first_step, self._backwards, self._steps = int(state["step"]), 0, dict.fromkeys(self._steps, 0)
        self.current = self.step
        with torch.no_grad():
            for (site, name), stacks in self._stacks.items():
                self._use_loaded_rows(site, name, stacks, state["states"])
            for key, tensor in self._tensors.items():
                if key in state["states"]:
                    tensor.copy_(state["states"][key])
                else:
                    tensor.copy_(self._first(key))
        new = {key: tensor for key, tensor in state["states"].items() if key not in self._tensors}
        self._loaded = {key: tensor.detach().clone() for key, tensor in new.items()}
        self._missing = [key for key in self._tensors if key not in state["states"]]
        for key, source in self._noise.items():
            self._load_noise(key, source)

    def __getstate__(self) -> dict[str, Any]:
        """Return seed and values alone; noise is copied with its action."""
        return self._without_noise() | {"seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the seed and the values of another store."""
        self.__init__(state["seed"])  # type: ignore[misc]
        self.load_state_dict({name: value for name, value in state.items() if name != "seed"})


@dataclass(slots=True)
class _Stacks:
    """The states of one name in the iterations of loops: rows of a tensor, by the number of the call of their site."""

    memory: Tensor | None = None
    parts: dict[range, Tensor] = field(default_factory=dict)  # of the loops
    calls: set[int] = field(default_factory=set)  # with a state
    kind: StateKind | None = None
    in_use: int = 0  # the end of the numbers that have run or were loaded; the others have no keys


def _key_of_call(site: str, name: str, call: int) -> str:
    return f"{site}#{call}{name}" if call else f"{site}{name}"


@dataclass(slots=True)
class _Scheduled:
    tensor: Tensor
    number: float
    step: int
    least: float = -math.inf


def write_states(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write a graph's results into the tensors of states, as if all at once."""
    own = {t.untyped_storage().data_ptr() for t in targets}
    apart = [v.clone() if v.untyped_storage().data_ptr() in own else v for v in values]
    if targets:
        with torch.no_grad():
            foreach_copy(list(targets), apart)

"""Search for the op behind a non-finite value in an eager step, where the tracer cannot follow."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradrewrite._utils.tensors import computable, tensors_in
from gradrewrite.errors import NonFiniteError, Story
from gradrewrite.instrumentation.source_locations import user_line
from gradrewrite.replay.noted_calls import BatchSizes, NotedCall, operand_of
from gradrewrite.replay.observations import Repair, is_finite
from gradrewrite.replay.reason_table import reason_of
from gradrewrite.replay.reasons import EarlierOp, OpCall, Reason
from gradrewrite.sites import Site

_OPS = {"truediv": "div", "true_divide": "div", "divide": "div", "rtruediv": "div", "rdiv": "div", "rsub": "sub"}
_SWAPPED = ("rtruediv", "rdiv", "rsub")  # of the operands
_ROUNDS = 4  # of repairs, each of what the last has uncovered
_FAR = 4  # how many calls before are looked at


@dataclass(frozen=True)
class EagerRoot:
    """The op that made a non-finite value in an eager step.

    Attributes:
        op: ``module/op``.
        source: Its line.
        in_backward: Whether its backward made it.
        story: Why and where.
        shape: Of its result.
        percent: Share of its elements that are not finite, in percent.
    """

    op: str
    source: str
    in_backward: bool
    story: Story
    shape: tuple[int, ...] = ()
    percent: float = 0.0

    @property
    def site(self) -> Site:
        """Its result."""
        module, _, op = self.op.rpartition("/")
        return Site("activation", self.op, module, op, shape=self.shape, source=self.source)

    def error(self) -> NonFiniteError:
        """Return it as an error."""
        return NonFiniteError(
            self.site,
            percent=self.percent,
            op=self.op,
            source=self.source,
            in_backward=self.in_backward,
            story=self.story,
        )


@dataclass
class _Call:
    """A call of a torch function."""

    name: str
    module: str
    source: str
    args: list[Any]
    results: list[Tensor]
    reads: list[Tensor]
    is_bad: bool
    number: int

    @property
    def op(self) -> str:
        return f"{self.module}/{self.name}"


@dataclass
class _Recorder(TorchFunctionMode):
    """Records the calls of torch functions, and changes the arguments of some."""

    model: nn.Module
    repairs: Mapping[int, Repair]
    calls: list[_Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, self._number = self._number, self._number + 1
        repair = self.repairs.get(number)
        if repair is None:
            result = func(*args, **kwargs)
        else:
            result = func(*_in_order(func, repair(_in_order(func, _bound(func, args, kwargs)))))
        results = [t for t in tensors_in(result) if _is_real(t)]
        if results:
            reads = [t for t in tensors_in((args, kwargs)) if _is_real(t)]
            known = (_in_order(func, _bound(func, args, kwargs)), results, reads, not is_finite(results), number)
            self.calls.append(_Call(_name_of(func), self._module(), _line(), *known))
        return result

    def _module(self) -> str:
        """Return the name of the innermost module that is running."""
        frame = sys._getframe(2)
        while frame is not None:
            name: str | None = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def search_eagerly(
    model: nn.Module, run: Callable[[], Tensor], begin: Callable[[], None], inputs: Sequence[Any]
) -> EagerRoot | None:
    """Run a step in eager mode, and find the op of its first non-finite value.

    Nothing of the user's changes but what ``run`` writes, and gradients are not accumulated.

    Args:
        model: The model, for the names of modules.
        run: Computes the loss.
        begin: Sets random numbers, and all that ``run`` writes, to the state before the step.
        inputs: Inputs of the model, for the sizes of a batch.

    Returns:
        The op; None if no call of a torch function made such a value.
    """

    def record() -> tuple[_Search, bool]:
        begin()
        recorder = _Recorder(model, repairs)
        with recorder, torch.enable_grad():
            loss = run()
        leaves = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        is_sound = is_finite(loss) and is_finite([g for g in gradients if g is not None])
        return _Search(recorder.calls, loss, BatchSizes.of(inputs)), is_sound

    repairs: dict[int, Repair] = {}
    search, _ = record()
    first = search.root()
    found, later, is_tried = first, list[str](), False
    while found is not None and len(repairs) < _ROUNDS and not is_tried:
        call, reason, root = found
        if found is not first and (root.op, root.source) != (first[2].op, first[2].source):  # type: ignore[index]
            made = f"{'the backward of ' * root.in_backward}{root.op}, {root.source}, {root.story}"
            later.append(f"With that alone it is not finite yet: {made}. {root.story.advice}")
        if reason is None or reason.repair is None or call.number in repairs:
            break
        repairs[call.number] = reason.repair
        search, is_tried = record()
        found = None if is_tried else search.root()
    if first is None:
        return None
    root = first[2]
    advice = " ".join((root.story.advice, *later)) if is_tried else root.story.advice
    return replace(root, story=replace(root.story, advice=advice, is_tried=is_tried))


class _Search:
    """The search in the record of one step."""

    def __init__(self, calls: Sequence[_Call], loss: Tensor, sizes: BatchSizes) -> None:
        self._calls, self._loss, self._sizes = calls, loss, sizes
        self._makers = {id(t): call for call in calls for t in call.results}  # the last one of a value

    def root(self) -> tuple[_Call, Reason | None, EagerRoot] | None:
        """Return the call at fault, its reason and its story."""
        call = None if is_finite(self._loss) else self._origin(self._loss)
        bad_error: Tensor | None = None
        if call is None:
            call, bad_error = self._origin_in_backward()
        if call is None:
            return None
        own = OpCall(
            _OPS.get(call.name, call.name),
            call.args,
            _first_bad(call.results) if bad_error is None else bad_error,
            earlier=self._earlier(call),
        )
        reason = reason_of(own)
        if bad_error is not None:
            reason = reason_of(OpCall("", call.args, bad_error, call.name)) or reason
        elements, dims = own.is_bad, None
        if reason is not None and reason.elements is not None:
            elements, dims = reason.elements, reason.dims
        operands = tuple(operand_of(self._name(t), t) for t in call.reads)
        where, rows = NotedCall(reason, operands, elements, dims).places(self._sizes)
        story = Story(
            why="" if reason is None else reason.why,
            advice="" if reason is None else reason.advice,
            operands=operands,
            indices=where,
            rows=rows,
            cover=self._covers(call) if bad_error is None and is_finite(self._loss) else (),
            is_overflow=reason is not None and reason.is_overflow,
        )
        percent = 100.0 * float(own.is_bad.double().mean())
        return (
            call,
            reason,
            EagerRoot(call.op, call.source, bad_error is not None, story, (*own.result.shape,), percent),
        )

    def _earlier(self, call: _Call) -> list[EarlierOp]:
        """Return the calls behind its arguments, the nearest first."""
        found = [(0, _noted(call, -1))]
        for number, given in enumerate(call.args):
            level = [given] if isinstance(given, Tensor) else []
            for distance in range(_FAR):
                makers = [made for t in level if (made := self._makers.get(id(t))) is not None and made is not call]
                found += [(distance, _noted(made, number)) for made in makers]
                level = [t for made in makers for t in made.reads]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def _name(self, value: Tensor) -> str:
        made = self._makers.get(id(value))
        return "an input" if made is None else made.op

    def _origin(self, value: Tensor) -> _Call | None:
        """Return the first call on the way to a bad value that was given finite ones."""
        seen, found, todo = set[int](), None, [value]
        while todo:
            call = self._makers.get(id(todo.pop()))
            if call is None or call.number in seen:
                continue
            seen.add(call.number)
            bad = [t for t in call.reads if not is_finite(t) and id(t) in self._makers]
            todo += bad
            if not bad and call.is_bad and (found is None or call.number < found.number):
                found = call
        return found

    def _origin_in_backward(self) -> tuple[_Call | None, Tensor | None]:
        """Run the backward; return the call behind its first bad error."""
        owners = self._owners()
        found: list[tuple[_Call, Tensor]] = []

        def look(node: Any, call: _Call) -> Callable[[Any, Any], None]:
            def hook(made: Any, given: Any) -> None:
                if not found and is_finite(given) and not is_finite(made):
                    found.append((call, _first_bad([t for t in made if t is not None])))

            return hook

        handles = [node.register_hook(look(node, call)) for node, call in owners.items()]
        leaves = [t for t in _leaves_of(self._loss)]
        try:
            torch.autograd.grad(self._loss, leaves, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            return None, None
        call, error = found[0]
        forward = self._origin(next(t for t in call.results if not is_finite(t))) if call.is_bad else None
        return (call, error) if forward is None else (forward, None)

    def _owners(self) -> dict[Any, _Call]:
        """Return the call that made each node of the autograd graph."""
        owners: dict[Any, _Call] = {}
        for call in self._calls:
            todo = [t.grad_fn for t in call.results if t.grad_fn is not None]
            while todo:
                node = todo.pop()
                if node not in owners and not hasattr(node, "variable"):
                    owners[node] = call
                    todo += [before for before, _ in node.next_functions if before is not None]
        return owners

    def _covers(self, root: _Call) -> tuple[str, ...]:
        """Return the finite ops behind a bad call."""
        bad, found = {id(t) for t in root.results if not is_finite(t)}, []
        for call in self._calls[self._calls.index(root) + 1 :]:
            if any(id(t) in bad for t in call.reads):
                bad.update(id(t) for t in call.results if call.is_bad)
                found += [] if call.is_bad else [f"{call.name}, {call.source}"]
        return tuple(dict.fromkeys(found))[:2]


def _noted(call: _Call, operand: int) -> EarlierOp:
    numbers = tuple(arg for arg in call.args if isinstance(arg, float))
    return EarlierOp(_OPS.get(call.name, call.name), numbers, call.results[0].dtype, operand)


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [before for before, _ in node.next_functions]


def _first_bad(tensors: Sequence[Tensor]) -> Tensor:
    return next(computable(t.detach()) for t in tensors if not is_finite(t))


def _is_real(value: Tensor) -> bool:
    return value.layout is torch.strided and value.is_floating_point()


def _name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _bound(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return all arguments in order, with the defaults of a function of Python."""
    if inspect.isfunction(func):
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        return list(given.arguments.values())
    return [*args, *kwargs.values()]


def _in_order(func: Any, args: list[Any]) -> list[Any]:
    """Put the operands of a reflected operator into their order in the formula, or back."""
    return args[::-1] if _name_of(func) in _SWAPPED else args


def _line() -> str:
    return user_line(list(traceback.extract_stack(sys._getframe(2))))

"""Training steps as one graph beside the same steps in two phases, and beside steps without a policy."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gradrewrite as gr
from gradrewrite import passes

from models.small import SquaredTwoLayers

Optimize = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Optimize] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.02, t0=3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, eps=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(output: Any) -> Tensor:
    """Return the loss of what a model returned, of several their sum."""
    if isinstance(output, Tensor):
        return output.sum() if output.dim() else output
    if isinstance(output, Mapping) and "loss" in output:
        found: Tensor = output["loss"]
        return found
    if hasattr(output, "loss"):
        attribute: Tensor = output.loss
        return attribute
    losses = output.values() if isinstance(output, Mapping) else output
    return torch.stack([one for one in losses if one.requires_grad and one.numel() == 1]).sum()


def batch(number: int, rows: int = 6, width: int = 4) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


class Pair:
    """A model in training steps as one graph, its equal in two phases, and the plain model in two phases.

    Args:
        net: The model; copied.
        policy: Makes the policy.
        optimize: Makes the optimizer.
        compiled: Whether both are compiled.
        near: The relative tolerance.
        guard: Options of ``gr.guard``; None calls it for the two phases alone.
        schedule: Makes a scheduler of an optimizer.
        transform: Options of ``gr.transform``, made anew for each.
        loss: The loss of what the model returns, for the two phases.
        step: Options of ``gr.train_step``.
        reads: Whether the monitors are read behind every step.
    """

    def __init__(
        self,
        net: nn.Module,
        policy: Callable[[], Any] = list,
        optimize: Optimize = adamw,
        *,
        compiled: bool = False,
        near: float = 1e-12,
        guard: Mapping[str, Any] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        transform: Callable[[], Mapping[str, Any]] = dict,
        loss: Callable[[Any], Tensor] = loss_of,
        step: Mapping[str, Any] | None = None,
        reads: bool = True,
    ) -> None:
        self.net, self.near, self._loss, self._reads = copy.deepcopy(net), near, loss, reads
        self.one = gr.transform(copy.deepcopy(net), policy(), **transform())
        self.two = gr.transform(copy.deepcopy(net), policy(), **transform())
        if compiled:
            self.one.compile()  # for a first step in two phases
            self.two.compile()
        self.optimizer, self.reference, self._plain = (optimize(m.parameters()) for m in (self.one, self.two, self.net))
        gr.guard(self.reference, self.two, **(guard or {}))
        if guard is not None:
            gr.guard(self.optimizer, self.one, **guard)
        self.step_of_one = gr.train_step(self.one, self.optimizer, compile=compiled, **(step or {}))
        every = (self.optimizer, self.reference, self._plain)
        self._schedulers = [schedule(o) for o in every] if schedule is not None else []
        self.losses: list[float] = []
        self.seen: set[str] = set()
        self.num_steps = 0

    def step(self, *args: Any, micro_batches: Sequence[Any] = (), **kwargs: Any) -> Any:
        """Train all for one step and compare the first two; return what the training step returned."""
        self.num_steps += 1
        torch.manual_seed(self.num_steps)
        earlier = [self.step_of_one.accumulate(one) for one in micro_batches]
        output = self.step_of_one(*args, **kwargs)
        random = torch.get_rng_state()
        torch.manual_seed(self.num_steps)
        references = [self._backward(self.two, (one,), {}) for one in micro_batches]
        reference = self._backward(self.two, args, kwargs)
        self.reference.step()
        self.two.zero_grad()
        torch.testing.assert_close(torch.get_rng_state(), random)
        torch.manual_seed(self.num_steps)
        for one in micro_batches:
            self._backward(self.net, (one,), {})
        self._backward(self.net, args, kwargs)
        self._plain.step()
        self.net.zero_grad()
        for scheduler in self._schedulers:
            scheduler.step()
        self.same(list(map(_parts, [*earlier, output])), list(map(_parts, [*references, reference])), "output")
        assert all(not t.requires_grad for t in pytree.tree_leaves(_parts(output)) if isinstance(t, Tensor))
        assert all(p.grad is None for group in self.optimizer.param_groups for p in group["params"])
        self.losses.append(_number(output))
        self.compare()
        return output

    def _backward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        output = model(*args, **kwargs)
        (loss_of if model is self.net else self._loss)(output).backward()
        return pytree.tree_map_only(Tensor, lambda t: t.detach(), _parts(output))

    def compare(self) -> None:
        """Compare parameters, buffers, the state of the optimizers, and the last records."""
        self.same(dict(self.one.state_dict()), dict(self.two.state_dict()), "state of the model")
        own, wanted = self.optimizer.state_dict(), self.reference.state_dict()
        if not wanted["state"]:  # one graph has made what a first update would begin with
            assert not any(t.any() for t in pytree.tree_leaves(own.pop("state")) if isinstance(t, Tensor))
            del wanted["state"]
        self.same(own, wanted, "state of the optimizer")
        if self._reads:
            latest = dict(self.one.monitor.latest())
            self.seen |= latest.keys()
            self.same(latest, dict(self.two.monitor.latest()), "records")

    def finish(self, *, acts: bool = True, records: bool = True) -> None:
        """Compare histories and states; show that the policy has acted, has recorded, or neither.

        Args:
            acts: Whether the policy has changed what the plain model learned.
            records: Whether it has recorded.
        """
        one, two = self.one.monitor, self.two.monitor
        assert one.skipped == two.skipped
        self.seen |= two.latest().keys()
        assert any("@optimizer:" not in address for address in self.seen) is records, self.seen
        for address in sorted(self.seen):
            for per in ("backward", "step"):
                self.same(one.history(address, per=per), two.history(address, per=per), f"{address}, per {per}")
        kept = ({str(site): tensor for site, tensor in monitor.kept().items()} for monitor in (one, two))
        one_kept, two_kept = kept
        self.same(one_kept, two_kept, "kept")
        self.same(gr.state_dict(self.one), gr.state_dict(self.two), "gr.state_dict")
        assert self.differs() is acts

    def same_kept(self, what: str) -> None:
        """Assert that both have kept something, and the same."""
        got, wanted = ({str(k): t for k, t in m.monitor.kept(what).items()} for m in (self.one, self.two))
        assert wanted
        self.same(got, wanted, what)

    def trained(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        """The models with a policy and their optimizers."""
        return [(self.one, self.optimizer), (self.two, self.reference)]

    def bit_equal(self, got: Any, wanted: Any) -> None:
        """Assert that two trees are equal."""
        left, right = pytree.tree_leaves(got), pytree.tree_leaves(wanted)
        assert len(left) == len(right)
        for value, other in zip(left, right, strict=True):
            assert torch.equal(value, other) if isinstance(other, Tensor) else value == other, self.num_steps

    def differs(self) -> bool:
        """Whether the parameters are none of those of the plain model."""
        pairs = list(zip(self.two.parameters(), self.net.parameters(), strict=True))
        return not all(torch.allclose(p, q, rtol=1e-9, atol=1e-12, equal_nan=True) for p, q in pairs)

    def same(self, got: Any, wanted: Any, what: str) -> None:
        """Assert that two trees are equal but for rounding."""
        (left, form), (right, wanted_form) = (pytree.tree_flatten_with_path(tree) for tree in (got, wanted))
        where = f"step {self.num_steps}, {what}"
        paths = ([pytree.keystr(path) for path, _ in side] for side in (left, right))
        assert form == wanted_form, f"{where}: {' not '.join(map(str, paths))}"
        scale = max([1e-12, *(float(t.abs().max()) for _, t in right if _is_finite(t))])
        for (path, value), (_, other) in zip(left, right, strict=True):
            name = f"{where}{pytree.keystr(path)}"
            if isinstance(other, Tensor):
                assert type(value) is type(other), name
                assert (value.dtype, value.shape) == (other.dtype, other.shape), name
            if isinstance(other, Tensor | float) and not isinstance(other, bool):
                torch.testing.assert_close(
                    torch.as_tensor(value), torch.as_tensor(other), rtol=self.near, atol=self.near * min(scale, 1.0),
                    equal_nan=True, msg=lambda m, n=name: f"{n}: {m}",
                )  # fmt: skip
            else:
                assert value == other, name


def _parts(output: Any) -> Any:
    """Return an output, of a dataclass its fields."""
    return dict(vars(output)) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output


def _number(output: Any) -> float:
    """Return the loss of an output; NaN of several, of which nothing tells."""
    try:
        return float(loss_of(output))
    except (RuntimeError, ValueError, TypeError):
        return math.nan


def _is_finite(value: Any) -> bool:
    is_real = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
    return is_real and bool(value.isfinite().all())


def _to_mean() -> Callable[[Tensor], Tensor]:
    """Clip to twice a running mean."""
    mean = gr.State((), 0.1, torch.float64, name="mean")

    def clip(g: Tensor) -> Tensor:
        mean.set(0.5 * mean.value + 0.5 * g.abs().mean().nan_to_num())
        gr.record("mean", mean.value)
        return g.clamp(-mean.value, mean.value)

    return clip


def _falling(step: int) -> float:
    return 0.5 / (1 + step)


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


POLICIES: Mapping[str, Callable[[], Any]] = {
    "plain": list,
    "global clip": lambda: [gr.on("gradient:*", passes.ClipByGlobalNorm(0.3))],
    "error clip": lambda: [gr.on("error:one", _to_mean())],
    "skips": lambda: [gr.on("gradient:*", passes.CheckFinite("skip"))],
    "schedule": lambda: [gr.on("gradient:*", passes.ClipByNorm(gr.Schedule(_falling)))],
    "accumulated": lambda: [gr.on("step:*", passes.ClipByGlobalNorm(0.3)), gr.on("error:one", passes.Observe("norm"))],
}
STEPS, BAD_STEPS = 20, (4, 11)


def train(optimizer: str, policy: str, *, compiled: bool = False, near: float = 1e-12, steps: int = STEPS) -> Pair:
    """Train a pair and compare all of it."""
    torch.manual_seed(0)
    schedule = _scheduler if policy == "schedule" else None
    pair = Pair(
        SquaredTwoLayers().double(), POLICIES[policy], OPTIMIZERS[optimizer], compiled=compiled, near=near,
        schedule=schedule, reads=not compiled,
    )  # fmt: skip
    for number in range(steps):
        x = batch(number)
        if policy == "skips" and number in BAD_STEPS:
            x[0, 0] = math.inf
        before = [copy.deepcopy((model.state_dict(), optimizer.state_dict())) for model, optimizer in pair.trained()]
        pair.step(x, micro_batches=[batch(100 + number), batch(200 + number)] if policy == "accumulated" else ())
        if policy == "skips" and number in BAD_STEPS:
            for kept, (model, own) in zip(before, pair.trained(), strict=True):
                pair.bit_equal((model.state_dict(), own.state_dict()), kept)
    # Rprop looks at signs alone: a factor for all changes nothing.
    blind = optimizer == "Rprop" and policy in ("global clip", "schedule", "accumulated")
    pair.finish(acts=policy != "plain" and not blind, records=policy != "plain")
    assert pair.one.monitor.skipped == (len(BAD_STEPS) if policy == "skips" else 0)
    return pair

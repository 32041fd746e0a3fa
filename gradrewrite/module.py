"""``transform``: a model with a policy, as a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradrewrite._compat import autograd, data_parallel, dynamo
from gradrewrite._tensors import tensors_in
from gradrewrite.backends.backend import Backend, monitor_or_new
from gradrewrite.backends.capture import capture_joint_graph
from gradrewrite.backends.engines import AotEager, Engine, Inductor
from gradrewrite.backends.entry_point import EntryPoint, makes_gradients
from gradrewrite.backends.explanation import Explanation
from gradrewrite.backends.session import Session
from gradrewrite.ir.joint_graph import JointGraph
from gradrewrite.monitoring.monitor import Monitor, recorder_of
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import check_policy
from gradrewrite.rewriting.config import RewriteConfig
from gradrewrite.rewriting.loss_scale import LossScale

_OWN = frozenset(
    (
        "__class__",
        "original",
        "monitor",
        "training",
        "_config",
        "_compile_options",
        "_engine",
        "_session",
        "_entry_point",
    )
)


def transform(
    model: nn.Module,
    policy: Policy,
    *,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    monitor: Monitor | None = None,
    loss_scale: torch.amp.GradScaler | Tensor | None = None,
) -> RewrittenModule:
    """Give a model a policy for its backward pass.

    The forward pass is never changed: outputs, buffers and random numbers are those of the plain model run the
    same way. Until ``compile`` is called, a call runs the rewritten graph op by op.

    Args:
        model: Any module; its parameters, buffers and submodules are shared, not copied.
        policy: A callback ``Site -> action, sequence of actions, or None``; a rule (``gr.on``); or a list of
            policies, whose answers all apply, in order. ``[]`` leaves the backward as it is.
        fullgraph: Refuse what the tracer cannot see (the policy cannot reach it). False lists such regions in
            ``explain()`` and warns once about each.
        dynamic: Symbolic shapes, as in ``torch.compile``.
        monitor: Where records go; a new ``Monitor`` if None.
        loss_scale: What the loss is multiplied by before ``backward``: a ``torch.amp.GradScaler``, or a tensor with
            one element. It is read at every backward, on the device; thresholds, records and what tensor functions
            see are then in units of the unscaled loss.

    Returns:
        A module with the same parameters and state_dict keys.

    Raises:
        TypeError: ``model`` is no module or a DistributedDataParallel, or ``loss_scale`` neither scaler nor tensor.
        PolicyError: ``policy`` is none. What it answers is checked at the first training forward, or in ``trace``.

    Example:
        >>> import torch, gradrewrite as gr
        >>> from gradrewrite.passes import ClipByValue
        >>> model = gr.transform(torch.nn.Linear(2, 2), gr.on("gradient:*", ClipByValue(0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> float(model.weight.grad.max())
        0.10000000149011612
    """
    if isinstance(model, RewrittenModule):
        raise TypeError("this module is transformed already; transform model.original, with a list of both policies")
    if not isinstance(model, nn.Module):
        raise TypeError(f"gr.transform takes an nn.Module, got {type(model).__name__}; for a function use gr.backend")
    if isinstance(model, data_parallel.DistributedDataParallel):
        raise TypeError(
            "gr.transform takes the model inside of DistributedDataParallel, whose own forward cannot be traced; wrap "
            "in this order: DistributedDataParallel(gr.transform(model, policy))"
        )
    scale = None if loss_scale is None else LossScale(loss_scale)
    check_policy(policy)
    return RewrittenModule(model, RewriteConfig(policy, scale, fullgraph, dynamic), monitor_or_new(monitor))


class RewrittenModule(nn.Module):
    """A model whose backward pass follows a policy; made by ``transform``.

    Attributes:
        original: The module that was given; everything it has is shared with it.
        monitor: What the last backward reported.
    """

    original: nn.Module
    monitor: Monitor

    def __init__(self, model: nn.Module, config: RewriteConfig, monitor: Monitor) -> None:
        """Share everything with the model; see ``transform``."""
        self.__dict__["original"] = model
        training = model.training
        super().__init__()
        model.training = training
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(model, shared)
        self._config = config
        self._compile_options: Mapping[str, Any] = {}  # arguments of compile()
        self._engine: Engine = AotEager()
        self._session = Session(config, recorder_of(monitor), model)
        self.monitor = monitor
        self._restart()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its backward will follow the policy.

        Raises:
            GraphBreakError: The tracer cannot see the whole model (``fullgraph=True``).
            NotRewrittenError: Torch would run the plain model (``fullgraph=True``).
            PolicyError, CallbackError, NoSuchSiteError: The policy cannot be followed, or not on several processes.
        """
        return _run(self, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entry_point.is_stale():
            self._restart()
        in_parts = not self._session.config.fullgraph
        before = dynamo.graph_breaks_so_far() if in_parts else {}
        result = self._entry_point(args, kwargs)
        has_backward = torch.is_grad_enabled() or makes_gradients(result, (args, kwargs))
        if in_parts and has_backward:
            self._look_for_plain_ops(result, (args, kwargs), before)
        if has_backward:
            self._session.check_ranks(*data_parallel.ranks_around(self.modules()))
        self._session.check_rules()
        self._session.warnings.flush_warnings()
        return result

    def compile(self, **kwargs: Any) -> None:
        """Compile with Inductor from the next call on, in place; compiled again, only the new arguments hold.

        Args:
            **kwargs: What ``torch.compile`` takes, except ``backend``; ``fullgraph`` and ``dynamic`` win over those
                given to ``transform``.

        Raises:
            TypeError: ``backend`` is given, or something that ``torch.compile`` does not take.
            RuntimeError: ``mode`` or one of ``options`` is unknown to Inductor, or both are given. The model stays as
                it was.

        Example:
            >>> model = transform(nn.Linear(2, 2), [])
            >>> model.compile(dynamic=False)
        """
        if "backend" in kwargs:
            raise TypeError(
                "model.compile() compiles with Inductor and takes no backend; to call torch.compile yourself, use "
                "torch.compile(model, backend=gr.backend(policy))"
            )
        options = dict(kwargs.get("options") or {})
        options.pop("guard_filter_fn", None)  # Dynamo's, all others are Inductor's
        Inductor().configured(kwargs.get("mode"), options)
        given = {name: kwargs[name] for name in ("fullgraph", "dynamic") if name in kwargs}
        session = Session(replace(self._config, **given), recorder_of(self.monitor), self.original)
        entry_point = _entry_point(session, self, Inductor(), kwargs)
        self._session, self._entry_point = session, entry_point
        self._compile_options, self._engine = kwargs, Inductor()

    def trace(self, *args: Any, **kwargs: Any) -> JointGraph:
        """Show the rewritten joint graph for these inputs; nothing runs and nothing changes.

        Args:
            *args: Inputs of the model; only their shapes, dtypes and devices matter.
            **kwargs: As ``args``.

        Returns:
            The graph that Inductor would get, whether the model is compiled or not.

        Raises:
            GraphBreakError: The tracer cannot see the whole model.
            TraceError: Nothing needs a gradient.
            PolicyError, CallbackError, NoSuchSiteError: The policy cannot be followed.

        Example:
            >>> graph = transform(nn.Linear(2, 2), []).trace(torch.ones(1, 2))
            >>> [str(site) for site in graph.sites]
            ['activation:/linear', 'error:/linear', 'gradient:weight', 'gradient:bias']
        """
        return capture_joint_graph(self.original, self._session.config, args, kwargs)

    def explain(self) -> Explanation:
        """Return what was compiled and rewritten so far, and which regions the tracer skipped."""
        return self._session.explanation()

    def _restart(self) -> None:
        """Drop what was compiled; the next call traces again."""
        self._entry_point = _entry_point(self._session, self, self._engine, self._compile_options)
        self._session.forget()

    def _look_for_plain_ops(self, result: Any, inputs: Any, breaks: Mapping[str, int]) -> None:
        for reason, count in dynamo.graph_breaks_so_far().items():
            if count > breaks.get(reason, 0):
                self._session.note_break(reason)
        if "plain" in self._session.warnings:
            return
        outputs = [t for t in tensors_in(result) if t.grad_fn is not None]
        op = autograd.find_plain_op(outputs, list(tensors_in(inputs)))
        if op is not None:
            self._session.warnings.warn_once(
                "plain",
                f"a part of this call ran outside the rewritten graphs (first seen: {op}), where the policy does not "
                "hold; model.explain() lists the regions that the tracer skipped",
            )

    @property
    def training(self) -> bool:
        """The original's mode."""
        return self.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.original.training = mode

    def train(self, mode: bool = True) -> RewrittenModule:
        """Set the original's mode."""
        self.original.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RewrittenModule:
        self.original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's state."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the original's state."""
        return self.original.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the original, where its forward reads it."""
        if name in ("original", "monitor") and name in self.__dict__:
            raise AttributeError(
                f"{name!r} of a transformed model cannot be set: what was compiled would keep the old one. Give "
                "gr.transform(model, policy, monitor=...) the model and the monitor"
            )
        if name in _OWN or "_modules" not in self.__dict__ or name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the original."""
        delattr(self.original, name)

    def __dir__(self) -> list[str]:
        """The names of both."""
        return sorted({*dir(type(self)), *dir(self.original), "original", "monitor"})

    def __repr__(self) -> str:
        """The original's, and the policy."""
        return f"RewrittenModule(\n{self.original!r}\npolicy={self._session.config.policy!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RewrittenModule:
        """Copy the original; the policy is shared, for it holds the thresholds that you change; the monitor is new."""
        original = copy.deepcopy(self.original, memo)
        return _rebuild(original, self._config, self._compile_options, self._engine.name == "inductor")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the original, the policy and the settings; compiled code and records stay behind."""
        is_compiled = self._engine.name == "inductor"
        return _rebuild, (self.original, self._config, self._compile_options, is_compiled)


_run = dynamo.outside_of_graphs(
    RewrittenModule._run, "gradrewrite compiles the model by itself; an outer graph would lose the policy"
)


def _entry_point(session: Session, model: RewrittenModule, engine: Engine, options: Mapping[str, Any]) -> EntryPoint:
    backend = Backend(session, engine, model.monitor)
    evaluating = Backend(session, engine, model.monitor, is_silent=True)
    return EntryPoint(session, backend, evaluating, model.original, options)


def _rebuild(
    original: nn.Module, config: RewriteConfig, options: Mapping[str, Any], is_compiled: bool
) -> RewrittenModule:
    model = RewrittenModule(original, config, Monitor())
    if is_compiled:
        model.compile(**options)
    return model

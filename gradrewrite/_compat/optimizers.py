"""Optimizers, GradScaler, and foreach operations."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat.versions import needed_for

with needed_for("it can be asked whether a GradScaler has unscaled gradients"):
    from torch.amp.grad_scaler import OptState
with needed_for("the hooks that run before the update of an optimizer can be listed"):
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

foreach_copy = torch._foreach_copy_  # of each source into its target, by few kernels
foreach_subtract = torch._foreach_sub_  # in place, by few kernels where the dtypes are equal


def foreach_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of integer tensors, by few kernels."""
    return list(torch._foreach_add(list(tensors), 0)) if tensors else []


_OWN = ("torch.optim.", "gradrewrite.")  # modules whose wrappers of ``step`` read no gradient


_NARROW = tuple(
    f"torch.optim.{name}" for name in ("adam", "adamw", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop")
)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark ``step`` as called, though it changed nothing; else learning-rate schedulers warn."""
    optimizer.__dict__["_opt_called"] = True


def inside_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of one that only hands its calls on, as accelerate's and Lightning's do."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is optimizer or not isinstance(inner, torch.optim.Optimizer) else inside_of(inner)


def use_methods_of(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> None:
    """Point accelerate's optimizer at the ``step`` of the inner one; beside a GradScaler it keeps two versions."""
    if outer is inner or "_optimizer_patched_step_method" not in vars(outer):
        return
    from accelerate.optimizer import patch_optimizer_step

    vars(outer).update(
        _optimizer_original_step_method=inner.step,
        _optimizer_patched_step_method=patch_optimizer_step(outer, inner.step),
    )


@contextlib.contextmanager
def attributes_set(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> Iterator[None]:
    """Give an optimizer attributes that its fused kernels read (``grad_scale``, ``found_inf``), for one step."""
    attributes = vars(optimizer)
    given = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(given)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernels of an optimizer read ``grad_scale`` and ``found_inf``."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused") for group in optimizer.param_groups)


def may_read_gradients(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> bool:
    """Whether code other than torch's runs before the kernels of ``step``: an overridden method, or a step pre-hook."""
    if _global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks:
        return True
    function: Any = step
    while function is not None:
        function = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(function, FunctionType) or not function.__globals__["__name__"].startswith(_OWN):
            return True
        function = vars(function).get("__wrapped__")
    return False


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around ``step``, of this optimizer or of all."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let a class of torch make the state of a param group, as its first step does."""
    with needed_for("torch's optimizers make the state of a param group in one method, beside lists that it fills"):
        make = optimizer._init_group  # type: ignore[attr-defined]
    make(group, *([] for _ in range(len(inspect.signature(make).parameters) - 1)))


def computes_in_dtype_of_parameters(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether torch's own ``step`` adds eps in the parameter's dtype.

    Fused kernels compute in float32 (Adagrad's from torch 2.15 on); other classes are not known.
    """
    return not group.get("fused") and inspect.unwrap(type(optimizer).step).__module__ in _NARROW


def has_factored_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether torch's optimizer keeps rows and columns for a parameter."""
    return isinstance(optimizer, torch.optim.Adafactor) and parameter.dim() > 1


def is_number(key: Any) -> bool:
    """Whether the key of state of torch's optimizers is a number's."""
    return key in ("step", "mu_product", "eta", "mu")


def begins_at_zero(optimizer: torch.optim.Optimizer, key: Any) -> bool:
    """Whether a tensor of state counts as 0 before the first step.

    That step may make it from the gradient.
    """
    return not (isinstance(optimizer, torch.optim.Rprop) and key == "step_size")


def check_unmixed(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError where a fused or foreach kernel would get DTensors and plain tensors together."""
    for number, group in enumerate(optimizer.param_groups):
        is_together = group.get("fused") or group.get("foreach")
        if is_together and len({hasattr(p, "device_mesh") for p in group["params"]}) > 1:
            raise TypeError(
                f"param group {number} of {type(optimizer).__name__} has DTensors and plain tensors, which torch's "
                "fused and foreach kernels do not take together: give each kind a param group of its own"
            )


def scaler_in_use(depth: int = 40) -> torch.amp.GradScaler | None:
    """Return the GradScaler running ``step`` in the nearest frames; None without one."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            assert isinstance(scaler, torch.amp.GradScaler)
            return scaler
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def living_scaler() -> torch.amp.GradScaler | None:
    """Return a GradScaler of this process that has scaled a loss; None without one. All objects are looked at."""
    scalers = (found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler))
    return next((scaler for scaler in scalers if scaler.is_enabled() and scaler._scale is not None), None)


def unscale_once(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler unscale the gradients of an optimizer, unless it has done so since its last ``update``."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)


def note_found_inf(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Let the GradScaler that calls us know that another process found an infinity, so that all scales stay equal."""
    scaler = scaler_in_use()
    states = {} if scaler is None else scaler._per_optimizer_states.get(id(optimizer), {})
    for own in states.get("found_inf_per_device", {}).values():
        own.copy_(found_inf.reshape(own.shape), non_blocking=True)


def foreach_scale(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by one number or 0-d tensor; the product is computed in at least float32."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    for (device, dtype), group in alike.items():
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor)
            continue
        wide = torch.promote_types(dtype, torch.float32)
        own = factor.to(device, wide.to_real(), non_blocking=True)
        if wide == dtype or device.type == "cpu":  # which reads a 0-d factor in full
            torch._foreach_mul_(group, own)
        else:
            for tensor in group:
                tensor.copy_(tensor.to(wide) * own)


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """L2 norms, accumulated in ``dtype``, as one flat tensor."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale of a GradScaler on its device; None before its first use, or if it is disabled."""
    return scaler._scale if scaler.is_enabled() else None  # get_scale() would wait for the device


def scaling_of(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scale and the growth tracker of a GradScaler, made if it has not been used."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None
    assert scaler._growth_tracker is not None
    return scaler._scale, scaler._growth_tracker


def settings_of(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    """Return growth factor, backoff factor and growth interval of a GradScaler."""
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()

"""Mistakes of new users: each gets an error or a warning of ours that names the place and the way out."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import pickle
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradrewrite
from gradrewrite import errors
from gradrewrite.cli import main
from gradrewrite.testing import assert_matches_eager

gr: Any = gradrewrite  # without types, for mistakes are no well-typed programs
passes, viz = gr.passes, gr.viz
CheckFinite, ClipByGlobalNorm, ClipByNorm = passes.CheckFinite, passes.ClipByGlobalNorm, passes.ClipByNorm
ClipByValue, Keep, Observe = passes.ClipByValue, passes.Keep, passes.Observe
X = torch.ones(2, 3)
CLIP = ClipByNorm(1.0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def model(policy: Any = (), module: nn.Module | None = None, **options: Any) -> Any:
    return gr.transform(net() if module is None else module, policy if policy != () else [], **options)


def trained(policy: Any = (), module: nn.Module | None = None, **options: Any) -> Any:
    """Return a model after one backward."""
    rewritten = model(policy, module, **options)
    rewritten(X).sum().backward()
    return rewritten


def function(own: Callable[..., Any]) -> Any:
    """Train with a tensor function at one gradient."""
    return trained(gr.on("gradient:0.weight", own))


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Mistake(NamedTuple):
    """What somebody writes, and what he sees of it."""

    program: Callable[[], object]
    sees: type[BaseException] | type[Warning]
    says: str  # the place and the way out, as a regular expression


class Layer(nn.Module):
    """A model with a line of the user's in its forward."""

    def __init__(self, line: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.line = nn.Linear(3, 1), line

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.layer(x))


# ---- programs that are more than an expression


def _counts() -> None:
    calls = 0

    def every_tenth(g: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return g * 0 if calls % 10 == 0 else g

    function(every_tenth)


def _appends() -> None:
    seen: list[Tensor] = []

    def keep(g: Tensor) -> Tensor:
        seen.append(g)
        return g

    function(keep)


def _generates(g: Tensor) -> Iterator[Tensor]:
    yield g


async def _waits(g: Tensor) -> Tensor:
    return g


def _backward_in_backward(g: Tensor) -> Tensor:
    g.sum().backward()
    return g


def _state_of_another_site() -> None:
    mean = gr.State(name="mean")

    def write(g: Tensor) -> Tensor:
        mean.set(g.norm())
        return g

    trained([gr.on("gradient:0.weight", write), gr.on("gradient:2.weight", lambda g: g * mean)])


COUNT, LAST = gr.State(name="count"), gr.State(name="last")


def _state_in_place(g: Tensor) -> Tensor:
    COUNT.add_(1)
    return g


def _state_of_another_shape(g: Tensor) -> Tensor:
    LAST.set(g)
    return g


def _assigns(value: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(value, name, 2.0)


def _forgets_the_result() -> None:
    plain = net()
    gr.transform(plain, gr.on("error:*", CLIP))
    plain(X).sum().backward()
    gc.collect()


def _calls_the_plain_model() -> None:
    plain = net()
    rewritten = gr.transform(plain, gr.on("gradient:*", CLIP))
    rewritten(X).sum().backward()
    plain(X).sum().backward()


def _compiles_with_a_backend() -> None:
    model(gr.on("gradient:*", CLIP)).compile(backend="eager")


def _gradient_penalty() -> None:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(gr.on("gradient:*", CLIP))(x).sum(), x, create_graph=True)
    (g.norm() - 1).square().backward()


def _transform_around() -> None:
    rewritten = model(gr.on("gradient:*", CLIP))
    parameters = dict(rewritten.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(rewritten, p, (X,)).sum())(parameters)


def _hook(plain: nn.Module) -> nn.Module:
    plain[0].register_full_backward_hook(lambda *_: None)
    return plain


def _steps(policy: Any, *, number: int = 2, guarded: bool = False, batch: Tensor = X) -> Any:
    rewritten = model(policy)
    optimizer = sgd(rewritten)
    if guarded:
        optimizer = gr.guard(optimizer, rewritten)
    for _ in range(number):
        rewritten(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return rewritten


def _accumulates(action: Any) -> None:
    rewritten = model(gr.on("gradient:*", action))
    for _ in range(4):
        rewritten(X).sum().backward()
    rewritten.monitor.flush()


def _scales() -> None:
    rewritten = model(gr.on("gradient:*", CLIP))
    optimizer, scaler = sgd(rewritten), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = rewritten(X).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _guards_another_model() -> None:
    rewritten = model(gr.on("step:*", CLIP))
    optimizer = gr.guard(sgd(net()), rewritten)
    rewritten(X).sum().backward()
    optimizer.step()


def _guards_twice() -> None:
    rewritten = model(gr.on("step:*", CLIP))
    optimizer = gr.guard(sgd(rewritten), rewritten)
    gr.guard(optimizer, rewritten)


def _lbfgs() -> None:
    rewritten = model(gr.on("step:*", CLIP))
    gr.guard(torch.optim.LBFGS(rewritten.parameters()), rewritten)


def _freezes_everything() -> None:
    trained(gr.on("gradient:*", CLIP), net().requires_grad_(False))


class Unrolled(nn.Module):
    """A loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 3)
        for step in x.unbind(1):
            h = self.cell(step + h).tanh()
        return h


def _many_lengths() -> None:
    rewritten = model(OBSERVED, Unrolled())
    for length in range(1, 12):
        rewritten(torch.ones(2, length, 3)).sum().backward()


OBSERVED = gr.on("gradient:*", Observe("norm"))

MISTAKES = {
    # what is given as a policy
    "policy: a pattern": Mistake(
        lambda: model("error:*"), errors.PolicyError, r"got 'error:\*'.*gr\.on\('error:\*', action"
    ),
    "policy: a dict": Mistake(
        lambda: model({"error:*": CLIP}), errors.PolicyError, r"gr\.on\(pattern, action\) for pattern"
    ),
    "policy: a regular expression": Mistake(
        lambda: model(re.compile("error")), errors.PolicyError, "Patterns are globs"
    ),
    "policy: an action": Mistake(
        lambda: model(CLIP), errors.PolicyError, r"say where, as in gr\.on\('error:\*', ClipByNorm"
    ),
    "policy: a class": Mistake(
        lambda: model(ClipByNorm), errors.PolicyError, r"gr\.on\('error:\*', ClipByNorm\(\.\.\.\)\)"
    ),
    "policy: None": Mistake(lambda: model(None), errors.PolicyError, r"policy that changes nothing is \[\]"),
    "policy: a list of actions": Mistake(lambda: model([CLIP]), errors.PolicyError, r"say where, as in gr\.on"),
    "policy: no parameter": Mistake(
        lambda: trained(lambda: CLIP), errors.PolicyError, r"activation:0: .*with each gr\.Site"
    ),
    "policy: two parameters": Mistake(lambda: trained(lambda site, g: CLIP), errors.PolicyError, r"with each gr\.Site"),
    "policy: returns text": Mistake(
        lambda: trained(lambda _: "clip"), errors.PolicyError, "answers with an action.*'clip'"
    ),
    "policy: returns a condition": Mistake(
        lambda: trained(lambda site: site.kind == "error"),
        errors.PolicyError,
        r"ClipByNorm\(1\.0\) if condition else None",
    ),
    "policy: fails": Mistake(
        lambda: trained(lambda site: {}[site.name]), errors.PolicyError, "activation:0: .*KeyError: '0'"
    ),
    "policy: unknown attribute": Mistake(
        lambda: trained(lambda site: site.layer), errors.PolicyError, r"no attribute 'layer'.*kind, name, module, op"
    ),
    # rules
    "rule: kind": Mistake(lambda: gr.on("eror:*", CLIP), ValueError, "'eror' is no kind of site; use one of error"),
    "rule: parameter": Mistake(
        lambda: trained(gr.on("gradient:*.weigth", CLIP)),
        errors.NoSuchSiteError,
        r"test_mistakes.*nearest.*gradient:0\.weight",
    ),
    "rule: module": Mistake(
        lambda: trained(gr.on("decoder.9", CLIP)), errors.NoSuchSiteError, r"'decoder\.9'; nearest sites"
    ),
    "rule: a regular expression": Mistake(
        lambda: trained(gr.on("error:.*", CLIP)), errors.NoSuchSiteError, "nearest sites: error:0"
    ),
    "rule: empty pattern": Mistake(lambda: gr.on("", CLIP), ValueError, "non-empty string such as"),
    "rule: swapped": Mistake(lambda: gr.on(CLIP, "error:*"), ValueError, "pattern is a non-empty string"),
    "rule: no action": Mistake(
        lambda: gr.on("error:*", None), errors.PolicyError, r"on\('error:\*', \.\.\.\): no action"
    ),
    "rule: a number": Mistake(lambda: gr.on("error:*", 1.0), errors.PolicyError, r"answers with an action.*got 1\.0"),
    "rule: a class": Mistake(lambda: gr.on("error:*", ClipByNorm), errors.PolicyError, r"as in ClipByNorm\(\.\.\.\)"),
    "rule: clip_grad_norm_": Mistake(
        lambda: gr.on("gradient:*", nn.utils.clip_grad_norm_), errors.PolicyError, r"ClipByGlobalNorm.*gr\.guard"
    ),
    "rule: clip_grad_value_": Mistake(
        lambda: gr.on("gradient:*", nn.utils.clip_grad_value_), errors.PolicyError, r"ClipByValue.*gr\.guard"
    ),
    "rule: global clip of errors": Mistake(
        lambda: trained(gr.on("error:*", ClipByGlobalNorm(1.0))),
        errors.PolicyError,
        "error:0: .*it applies to gradient, step",
    ),
    "rule: stored error": Mistake(
        lambda: trained(gr.on("error:*", passes.Store("int8"))), errors.PolicyError, "error:0: .*it applies to saved"
    ),
    "rule: changed": Mistake(
        _assigns(gr.on("error:*", CLIP), "pattern"), AttributeError, r"dataclasses\.replace\(\.\.\., pattern="
    ),
    # actions
    "action: negative bound": Mistake(
        lambda: ClipByNorm(-1.0), ValueError, r"ClipByNorm: max_norm must be > 0, got -1"
    ),
    "action: bound of 0": Mistake(lambda: ClipByNorm(0.0), ValueError, "ClipByNorm: max_norm must be > 0"),
    "action: bound as text": Mistake(
        lambda: ClipByNorm("1"), TypeError, r"max_norm is a number or a tensor.*gr\.Schedule"
    ),
    "action: NaN": Mistake(lambda: ClipByNorm(math.nan), ValueError, "ClipByNorm: max_norm must not be NaN"),
    "action: a list": Mistake(lambda: ClipByValue([1.0]), TypeError, "ClipByValue: max is a number or a tensor"),
    "action: order of the norm": Mistake(lambda: ClipByNorm(1.0, norm_type="l2"), TypeError, "norm_type is a number"),
    "action: order 0": Mistake(lambda: ClipByGlobalNorm(1.0, norm_type=0), ValueError, "norm_type must be > 0"),
    "action: consequence": Mistake(lambda: CheckFinite("stop"), ValueError, "one of 'raise', 'skip', 'warn', 'record'"),
    "action: statistic": Mistake(lambda: Observe("nrom"), ValueError, "Observe: .*norm.*got 'nrom'"),
    "action: no statistic": Mistake(lambda: Observe(), ValueError, "Observe: name at least one"),
    "action: interval": Mistake(lambda: Observe("norm", every=0), ValueError, "every is a whole number >= 1, got 0"),
    "action: changed": Mistake(
        _assigns(CLIP, "max_norm"), AttributeError, r"replace\(\.\.\., max_norm=2\.0\).*gr\.Schedule"
    ),
    "action: unknown setting": Mistake(_assigns(CLIP, "maxnorm"), AttributeError, "no setting 'maxnorm'.*max_norm"),
    "action: not there": Mistake(lambda: passes.ClipByNrom, AttributeError, "no 'ClipByNrom', but ClipByNorm"),
    "action: elsewhere": Mistake(lambda: gr.ClipByNorm, AttributeError, r"from gradrewrite\.passes import ClipByNorm"),
    "action: several losses of one": Mistake(
        lambda: trained(gr.on("gradient:*", passes.WeighLosses(passes.UPGrad()))),
        errors.PolicyError,
        "needs the losses.*return them",
    ),
    "schedule: a number": Mistake(lambda: gr.Schedule(3), TypeError, "takes a function of the step, got 3"),
    "schedule: returns text": Mistake(
        lambda: trained(gr.on("gradient:*", ClipByNorm(gr.Schedule(lambda _: "a")))),
        errors.PolicyError,
        "returned 'a' at step 0, and a number",
    ),
    "schedule: steps": Mistake(lambda: gr.Schedule.linear(1.0, 0.1, steps=1e3), ValueError, "steps is a whole number"),
    # tensor functions
    "function: returns nothing": Mistake(
        lambda: function(lambda g: None), errors.CallbackError, "gradient:0.weight: .*return a tensor"
    ),
    "function: another shape": Mistake(
        lambda: function(lambda g: g.sum()), errors.CallbackError, r"changed the shape from \(4, 3\)"
    ),
    "function: another dtype": Mistake(
        lambda: function(lambda g: g.double()), errors.CallbackError, r"end it with \.to\(torch"
    ),
    "function: a branch": Mistake(
        lambda: function(lambda g: g if g.norm() > 1 else g * 0), errors.CallbackError, r"select with torch\.where"
    ),
    "function: item": Mistake(
        lambda: function(lambda g: g * g.norm().item()), errors.CallbackError, "compute with tensors"
    ),
    "function: float": Mistake(
        lambda: function(lambda g: g * float(g.norm())), errors.CallbackError, "compute with tensors"
    ),
    "function: NumPy": Mistake(
        lambda: function(lambda g: np.clip(g, -1, 1)), errors.CallbackError, "Compute with torch operations"
    ),
    "function: fails": Mistake(
        lambda: function(lambda g: g.nrom()), errors.CallbackError, "gradient:0.weight: .*no attribute 'nrom'"
    ),
    "function: three parameters": Mistake(
        lambda: function(lambda g, w, x: g), errors.PolicyError, "takes 3 arguments.*the gradient and what"
    ),
    "function: no parameter": Mistake(
        lambda: function(lambda: 1), errors.PolicyError, "takes 0 arguments.*takes the gradient"
    ),
    "function: a generator": Mistake(
        lambda: function(_generates), errors.PolicyError, "generator function.*returns a tensor"
    ),
    "function: async": Mistake(lambda: function(_waits), errors.PolicyError, "coroutine function.*returns a tensor"),
    "function: dropout": Mistake(lambda: function(nn.Dropout()), errors.CallbackError, "random op.*gr.uniform"),
    "function: noise": Mistake(
        lambda: function(lambda g: g + torch.randn_like(g)), errors.CallbackError, "Draw with gr.uniform"
    ),
    "function: random": Mistake(
        lambda: function(lambda g: g * random.random()), errors.CallbackError, "random numbers.*before the step"
    ),
    "function: time": Mistake(
        lambda: function(lambda g: g * time.time()), errors.CallbackError, r"reads time\.time\(\)"
    ),
    "function: a counter": Mistake(_counts, errors.CallbackError, r"keeps 'calls'.*gr\.State"),
    "function: a list": Mistake(_appends, errors.CallbackError, r"keeps 'seen'.*gr\.State"),
    "function: a wrong mask": Mistake(
        lambda: function(lambda g: g * torch.ones(5, 5)), errors.CallbackError, "gradient:0.weight: .*broadcast"
    ),
    "function: a backward": Mistake(
        lambda: function(_backward_in_backward), errors.CallbackError, "gradient:0.weight: "
    ),
    "function: a record of many": Mistake(
        lambda: function(lambda g: (gr.record("all", g), g)[1]),
        errors.CallbackError,
        r"gr\.record\('all'.*one real number",
    ),
    "state: read elsewhere": Mistake(_state_of_another_site, errors.PolicyError, "Read and set it at one site"),
    "state: in place": Mistake(lambda: function(_state_in_place), errors.CallbackError, r"state\.set\(\.\.\.\)"),
    "state: another shape": Mistake(
        lambda: function(_state_of_another_shape), errors.CallbackError, "give State the shape"
    ),
    # models
    "model: comes second": Mistake(
        lambda: gr.transform(OBSERVED, net()), TypeError, r"the model comes first: gr\.transform\(model, policy"
    ),
    "model: a class": Mistake(
        lambda: gr.transform(nn.Linear, []), TypeError, r"give an object, as in Linear\(\.\.\.\)"
    ),
    "model: a method": Mistake(
        lambda: gr.transform(net().forward, []), TypeError, r"give the model itself, and methods="
    ),
    "model: transformed": Mistake(
        lambda: model([], model()), TypeError, r"gr\.restore\(model\), with a list of both policies"
    ),
    "model: compiled": Mistake(
        lambda: model([], torch.compile(net())), TypeError, r"compile afterwards: gr\.transform"
    ),
    "model: data parallel": Mistake(
        lambda: model([], nn.DataParallel(net())), TypeError, r"DistributedDataParallel\(gr\.transform"
    ),
    "model: full backward hooks": Mistake(
        lambda: trained(OBSERVED, _hook(net())), errors.GraphBreakError, r"gr\.on\('error:0', function"
    ),
    "model: another backend": Mistake(_compiles_with_a_backend, TypeError, r"backend=gr\.backend\(policy\)"),
    "model: methods": Mistake(lambda: model(methods=("generate",)), ValueError, "Sequential has no method 'generate'"),
    "model: methods as text": Mistake(lambda: model(methods="forward"), TypeError, r"write methods=\('forward',\)"),
    "model: regions": Mistake(lambda: model(regions="decoder.*"), ValueError, "names of its modules are '0', '1', '2'"),
    "model: regions are no text": Mistake(lambda: model(regions=True), TypeError, r"as 'layers\.\*'.*got True"),
    "model: scale": Mistake(
        lambda: model(loss_scale="2"), TypeError, r"loss_scale is a torch\.amp\.GradScaler or a tensor"
    ),
    "model: monitor": Mistake(lambda: model(monitor=True), TypeError, r"monitor is a gr\.Monitor, got bool"),
    "model: wrong shape": Mistake(
        lambda: model()(torch.ones(2, 5)), errors.TraceError, r"\[2, 5\].*\n.*\n.*the plain model fails too"
    ),
    "model: wrong dtype": Mistake(
        lambda: model()(X.long()), errors.TraceError, "Long and Float\n.*the plain model fails too"
    ),
    "model: no argument": Mistake(lambda: model()(), TypeError, "missing 1 required positional argument: 'input'"),
    "model: a branch": Mistake(
        lambda: trained(OBSERVED, Layer(lambda h: h * 2 if h.sum() > 0 else h)),
        errors.GraphBreakError,
        r"test_mistakes\.py:\d+.*\n.*torch\.where",
    ),
    "model: print": Mistake(
        lambda: trained(OBSERVED, Layer(lambda h: (print(h.mean().item()), h)[1])),
        errors.GraphBreakError,
        "Print after the call",
    ),
    "model: NumPy's random numbers": Mistake(
        lambda: trained(OBSERVED, Layer(lambda h: h * float(np.random.rand()))),
        errors.GraphBreakError,
        "keep numbers in tensors",
    ),
    "model: many lengths": Mistake(_many_lengths, errors.NotRewrittenError, "Pad to few lengths"),
    "model: policy to trace": Mistake(
        lambda: model().trace(OBSERVED), TypeError, r"a policy is given to gr\.transform"
    ),
    "model: gradient penalty": Mistake(
        _gradient_penalty, errors.TraceError, r"gradients of gradients.*torch\.autograd\.grad"
    ),
    "model: transform around": Mistake(
        _transform_around, errors.GraphBreakError, r"inside of the model's forward.*model\.original"
    ),
    "model: pickled": Mistake(
        lambda: pickle.dumps(model(lambda _: None)), TypeError, r"gr\.state_dict\(model\) instead"
    ),
    "model: result forgotten": Mistake(
        _forgets_the_result, errors.RewriteWarning, r"keep the result.*model = gr\.transform"
    ),
    "model: plain one called": Mistake(
        _calls_the_plain_model, errors.RewriteWarning, "call the rewritten model itself"
    ),
    # optimizers
    "guard: swapped": Mistake(
        lambda: gr.guard(net(), sgd(net())), TypeError, r"takes a torch\.optim\.Optimizer, got Sequential"
    ),
    "guard: plain model": Mistake(
        lambda: gr.guard(sgd(net()), net()), TypeError, r"give what gr\.transform or gr\.backend"
    ),
    "guard: another model": Mistake(
        _guards_another_model, errors.RewriteWarning, r"make the optimizer from model\.parameters"
    ),
    "guard: twice": Mistake(_guards_twice, TypeError, r"gr\.unguard\(optimizer\) takes off"),
    "guard: LBFGS": Mistake(_lbfgs, TypeError, "LBFGS.*without a guard, with the actions at gradient sites"),
    "guard: forgotten": Mistake(
        lambda: _steps(gr.on("step:*", CLIP)), errors.RewriteWarning, r"with gr\.guard\(optimizer, model\)"
    ),
    "guard: forgotten for skips": Mistake(
        lambda: _steps(gr.on("gradient:*", CheckFinite("skip")), batch=X * math.nan).monitor.flush(),
        errors.RewriteWarning,
        r"skips nothing without gr\.guard",
    ),
    "guard: limit": Mistake(
        lambda: gr.guard(sgd(net()), model(), max_consecutive_skips=0),
        ValueError,
        "max_consecutive_skips is a whole number",
    ),
    "guard: loss not logged": Mistake(
        lambda: _steps(gr.on("step:*", passes.SkipSpikes(of="loss")), guarded=True),
        errors.PolicyError,
        r'monitor\.log\("loss", loss\)',
    ),
    "accumulation: clip": Mistake(lambda: _accumulates(CLIP), errors.RewriteWarning, r"write gr\.on\('step:\*'"),
    "accumulation: global clip": Mistake(
        lambda: _accumulates(ClipByGlobalNorm(1.0)), errors.RewriteWarning, "not on their sum"
    ),
    "scaler: not given": Mistake(_scales, errors.RewriteWarning, "loss_scale=scaler"),
    # records
    "monitor: record": Mistake(
        lambda: trained(OBSERVED).monitor.history("norm@gradient:0.weigth"),
        KeyError,
        r"nearest: norm@gradient:0\.weight",
    ),
    "monitor: latest": Mistake(lambda: trained(OBSERVED).monitor.latest()["norm"], KeyError, "nearest: norm@gradient"),
    "monitor: table": Mistake(
        lambda: trained(OBSERVED).monitor.table("error:*"), KeyError, "nearest sites with records"
    ),
    "monitor: kept": Mistake(
        lambda: trained(gr.on("gradient:*", Keep())).monitor.kept()["0.weigth"],
        KeyError,
        r"nearest: gradient:0\.weight",
    ),
    "monitor: kept what": Mistake(
        lambda: model().monitor.kept("tensors"), ValueError, "kept.what. is what Keep keeps, or a name under which"
    ),
    "monitor: log too early": Mistake(
        lambda: model(OBSERVED).monitor.log("loss", 1.0), RuntimeError, r"after loss\.backward\(\)"
    ),
    "monitor: log a name": Mistake(lambda: trained(OBSERVED).monitor.log("a@b", 1.0), ValueError, "a text without '@'"),
    "monitor: log a vector": Mistake(
        lambda: trained(OBSERVED).monitor.log("loss", X), ValueError, r"wanted one element, got shape \(2, 3\)"
    ),
    "monitor: log text": Mistake(
        lambda: trained(OBSERVED).monitor.log("loss", "1"), TypeError, "'loss'.*a real number or tensor, got str"
    ),
    "monitor: TensorBoard": Mistake(
        lambda: model().monitor.to_tensorboard("runs"), TypeError, "takes a SummaryWriter, got str"
    ),
    "monitor: capacity": Mistake(lambda: gr.Monitor(capacity=0), ValueError, "capacity is a whole number >= 1"),
    "monitor: no culprits": Mistake(
        lambda: trained(OBSERVED).monitor.culprits(), RuntimeError, r"SkipSpikes or CheckFinite"
    ),
    "state: another file": Mistake(
        lambda: gr.load_state_dict(model(), net().state_dict()), ValueError, r"takes what gr\.state_dict returned"
    ),
    "state: plain model": Mistake(
        lambda: gr.state_dict(net()), TypeError, r"give what gr\.transform or gr\.backend returned"
    ),
    # pictures, reports, diagnoses
    "picture: of a model": Mistake(lambda: viz.draw(model()), TypeError, r"as model\.trace\(\.\.\.\) returns it"),
    "picture: format": Mistake(
        lambda: viz.draw(model().trace(X)).render("x", "jpeg"), ValueError, "choose one of 'svg', 'png'"
    ),
    "report: of a number": Mistake(lambda: viz.report(3), TypeError, "a run is a Monitor, the path"),
    "diagnosis: no batch": Mistake(lambda: gr.diagnose(net(), []), ValueError, "give an iterable of batches"),
    "diagnosis: one batch": Mistake(lambda: gr.diagnose(net(), X), TypeError, r"of one batch it is \[batch\]"),
    "comparison: other models": Mistake(lambda: gr.compare(net(), nn.Linear(3, 2), X), ValueError, "say with names="),
    "test: no optimizer": Mistake(
        lambda: assert_matches_eager(net(), gr.on("step:*", CLIP), X), errors.PolicyError, "optimizer=lambda"
    ),
    "tap: a list": Mistake(lambda: gr.tap([X], "x"), TypeError, "name each of several by itself"),
}


def test_there_are_a_hundred() -> None:
    assert len(MISTAKES) >= 100


@pytest.mark.broad
@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named_with_the_way_out(name: str) -> None:
    mistake = MISTAKES[name]
    if issubclass(mistake.sees, Warning):
        with pytest.warns(mistake.sees, match=mistake.says):
            mistake.program()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(mistake.sees, match=mistake.says):
            mistake.program()


def test_log_lines_that_nobody_sees_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradrewrite"):
        rewritten = trained(gr.on("gradient:*", ClipByNorm(1e-3, log=True)))
        rewritten.zero_grad()
        rewritten(X).sum().backward()
        rewritten.monitor.flush()
    assert [r.getMessage() for r in caplog.records if "level INFO" in r.getMessage()] == [
        "log=True reports the clips that act at level INFO, which is not shown: logging.basicConfig(), then "
        'logging.getLogger("gradrewrite").setLevel(logging.INFO)'
    ]


def test_nothing_is_said_where_log_lines_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradrewrite"):
        trained(gr.on("gradient:*", ClipByNorm(1e-3, log=True))).monitor.flush()
    assert all("is not shown" not in record.getMessage() for record in caplog.records)
    assert any("need clipping" in record.getMessage() for record in caplog.records)


def test_a_table_without_records_says_so() -> None:
    table = trained(gr.on("gradient:*", lambda g: g * 2)).monitor.table()
    assert "nothing was recorded: Observe, CheckFinite, gr.record and clips by norm make records" in table.caption


def test_two_states_of_one_name_are_two() -> None:
    first, second, third = gr.State(name="mean"), gr.State(name="mean"), gr.State(name="mean.2")

    def add(g: Tensor) -> Tensor:
        first.set(first + 1)
        second.set(second + 2)
        third.set(third + 3)
        return g

    rewritten = function(add)
    rewritten(X).sum().backward()
    assert {key: float(value) for key, value in gr.state_dict(rewritten)["states"].items()} == {
        "gradient:0.weight/mean": 2.0,
        "gradient:0.weight/mean.2": 4.0,
        "gradient:0.weight/mean.2.2": 6.0,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor", "missing.jsonl"], r"missing\.jsonl.*monitor\.to_jsonl"),
        (["sites", "no_such_module:make", "--input", "math:pi"], "no_such_module"),
        (["sites", "math:make", "--input", "math:pi"], "make"),
        (["plot", "missing.jsonl", "--out", "x.jpeg"], r"\.jpeg|jpeg"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(says, said)
    assert "Traceback" not in said

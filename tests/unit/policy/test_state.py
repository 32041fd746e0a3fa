"""States of tensor functions: their values, whose they are, and their way into checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import AutoClip, ClipByGlobalNorm, ClipByNorm, ZClip

from models.small import Layers


def example(value: float, rows: int = 1) -> Tensor:
    return torch.full((rows, 3), value, dtype=torch.float64)


def counting(state: gr.State) -> Any:
    """A function that scales a gradient by 1 over the number of its calls."""

    def scaled(g: Tensor) -> Tensor:
        state.set(state + 1)
        return g / state.value

    return scaled


def net(width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def states_of(model: Any) -> dict[str, Tensor]:
    return gr.state_dict(model)["states"]


@pytest.mark.broad
@pytest.mark.parametrize("kind", ["gradient", "step", "error"])
def test_each_site_counts_by_itself(kind: str) -> None:
    model = gr.transform(net(), gr.on(f"{kind}:*0*", counting(gr.State(dtype=torch.float64, name="calls"))))
    plain = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if kind == "step":
        gr.guard(optimizer, model)
    for call in range(1, 4):
        model.zero_grad()
        plain.zero_grad()
        model(example(1.0)).sum().backward()
        plain(example(1.0)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad / call, rtol=1e-15, atol=0)
    sites = {"gradient": ["0.weight", "0.bias"], "step": ["0.weight", "0.bias"], "error": ["0"]}[kind]
    assert {name: float(t) for name, t in states_of(model).items()} == {f"{kind}:{s}/calls": 3.0 for s in sites}
    assert len(model.explain().graphs) == 1


def test_what_is_set_is_seen_at_once_and_read_by_the_next_backward() -> None:
    a, b = gr.State(init=1.0), gr.State(init=2.0)
    seen: list[dict[str, float]] = []

    def swap(g: Tensor) -> Tensor:
        before = a.value
        a.set(b)
        gr.record("a", a.value)
        gr.record("b", b.value)
        b.set(before)
        return g

    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", swap))
    for _ in range(3):
        model(example(1.0)).sum().backward()
        seen.append(model.monitor.latest())
    assert [(r["a@gradient:weight"], r["b@gradient:weight"]) for r in seen] == [(2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]
    assert {k: float(v) for k, v in states_of(model).items()} == {"gradient:weight/0": 2.0, "gradient:weight/1": 1.0}


def test_a_state_reads_like_a_tensor() -> None:
    state: Any = gr.State((3,), init=4.0)
    given = torch.tensor([1.0, 2.0, 3.0])
    for found, wanted in (
        (state + given, 4 + given),
        (given - state, given - 4),
        (state / given, 4 / given),
        (given**state, given**4),
        (-state, -torch.full((3,), 4.0)),
        (state > given, torch.ones(3, dtype=torch.bool)),
        (torch.minimum(state, given), given),
        (torch.stack([state, given]).sum(0), 4 + given),
        (torch.where(given > 2, state, given), torch.tensor([1.0, 2.0, 4.0])),
        (state.sqrt(), torch.full((3,), 2.0)),
        (state[0], torch.tensor(4.0)),
        (abs(state * -1), torch.full((3,), 4.0)),
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(state) == 3
    assert state.shape == (3,)
    assert repr(state) == "State((3,), 4.0, torch.float32)"
    state.set(given)
    assert torch.equal(state.value, given)
    state.set(2)
    assert torch.equal(state.value, torch.full((3,), 2.0))
    with pytest.raises(AttributeError, match="_nothing"):
        _ = state._nothing


def test_equality_is_that_of_elements() -> None:
    first: Any = gr.State(name="calls")

    def only_first(g: Tensor) -> Tensor:
        factor = torch.where(first == 0, 1.0, 0.0) + torch.where(first != 0, 3.0, 0.0)
        first.set(first + 1)
        return g * factor

    model = gr.transform(nn.Linear(3, 1, bias=False), gr.on("gradient:weight", only_first))
    for wanted in (1.0, 3.0, 3.0):
        model.zero_grad()
        model(example(1.0).float()).sum().backward()
        assert torch.equal(model.weight.grad, example(wanted).float())
    other: Any = gr.State((2,), 1.0)
    assert torch.equal(other == torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
    assert torch.equal(other != torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert len({first, other, first}) == 2  # a key by its identity


def set_first(s: Any) -> None:
    s[0] = 1.0


def add_to(s: Any) -> None:
    s += 1.0


@pytest.mark.broad
@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda s: s.add_(1), "add_ would write in place; write the new value with state.set"),
        (lambda s: s.copy_(s + 1), "copy_ would write in place"),
        (lambda s: s.zero_, "zero_ would write in place"),
        (set_first, "__setitem__ would write in place"),
        (add_to, "__iadd__ would write in place"),
    ],
    ids=["add", "copy", "zero", "item", "iadd"],
)
def test_writes_in_place_are_refused(write: Any, text: str) -> None:
    state = gr.State((2,))
    with pytest.raises(gr.CallbackError, match=text):
        write(state)
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:weight", lambda g: (write(state), g)[1]))
    with pytest.raises(gr.CallbackError, match=f"gradient:weight.*{text}"):
        model(example(1.0).float())


LIVE = torch.zeros(2)


@pytest.mark.broad
@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda s: s[0].fill_(7.0), r"\(copy_\) into a tensor that it closes over or a state"),
        (lambda s: s.value.add_(1), r"\(add_\) into a tensor that it closes over or a state"),
        (lambda s: s.value.view(2, 1).select(0, 1).mul_(2), r"\(mul_\) into a tensor that it closes over or a state"),
        (lambda s: LIVE[0].add_(1), r"\(add_\) into a tensor that it closes over or a state"),
    ],
    ids=["index", "value", "view", "closed over"],
)
def test_writes_into_what_is_not_the_functions_own_are_refused(write: Any, text: str) -> None:
    state = gr.State((2,))

    def fn(g: Tensor) -> Tensor:
        write(state)
        return g + state.sum() + LIVE.sum()

    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:weight", fn))
    with pytest.raises(gr.CallbackError, match=f"gradient:weight.*{text}"):
        model(example(1.0).float())
    assert torch.equal(LIVE, torch.zeros(2))


def test_what_is_computed_from_closed_over_tensors_may_be_changed_in_place() -> None:
    def fn(g: Tensor) -> Tensor:
        twice = LIVE * 2
        twice[0].fill_(7.0)
        return g + twice.sum()

    model = gr.transform(nn.Linear(3, 1, bias=False), gr.on("gradient:weight", fn))
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1, 3), 9.0))
    assert torch.equal(LIVE, torch.zeros(2))


def test_what_a_function_made_may_be_changed_in_place() -> None:
    state = gr.State((2,), 3.0)

    def fn(g: Tensor) -> Tensor:
        own = torch.zeros(2, dtype=g.dtype)
        own[0] = state[0]
        own[1:].add_(1)
        g[0, 0] = own.sum()
        return g.mul_(2)

    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", fn))
    model(example(1.0)).sum().backward()
    assert torch.equal(model.weight.grad, torch.tensor([[8.0, 2.0, 2.0]], dtype=torch.float64))


def test_shapes_and_dtypes() -> None:
    last = gr.State((1, 3), dtype=torch.bfloat16)

    def change(g: Tensor) -> Tensor:
        moved = g - last.to(g.dtype)
        last.set(g)
        return moved

    model = gr.transform(nn.Linear(3, 1, bias=False).double(), gr.on("gradient:weight", change))
    for value, wanted in ((1.0, 1.0), (3.0, 2.0), (3.0, 0.0)):
        model.zero_grad()
        model(example(value)).sum().backward()
        assert torch.equal(model.weight.grad, example(wanted))


def test_values_outlive_a_recompilation_and_a_compilation_of_another_size() -> None:
    def policy(site: gr.Site) -> Any:  # a new function and a new state at each question
        return counting(gr.State(dtype=torch.float64)) if site.matches("gradient:weight") else None

    model = gr.transform(nn.Linear(3, 1, bias=False).double(), policy, dynamic=False)
    for call, rows in enumerate((1, 2, 3, 2), 1):
        model.zero_grad()
        model(example(1.0, rows)).sum().backward()
        torch.testing.assert_close(model.weight.grad, example(rows / call), rtol=1e-15, atol=0)
    assert len(model.explain().graphs) == 3
    assert float(states_of(model)["gradient:weight/0"]) == 4.0


def test_units_are_those_of_the_unscaled_loss() -> None:
    largest = gr.State(name="largest")

    def follow(g: Tensor) -> Tensor:
        largest.set(torch.maximum(largest.value, g.abs().amax()))
        return g

    scale = torch.tensor(1024.0)
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:weight", follow), loss_scale=scale)
    for value in (2.0, 1.0):
        (model(example(value).float()).sum() * scale).backward()
    assert float(states_of(model)["gradient:weight/largest"]) == 2.0


@pytest.mark.broad
def test_regions_of_equal_structure_have_states_of_their_own() -> None:
    model = gr.transform(Layers(3, 3).double(), gr.on("gradient:*.bias", counting(gr.State())), regions="layers.*")
    for _ in range(2):
        model(example(1.0)).sum().backward()
    assert {k: float(v) for k, v in states_of(model).items()} == {f"gradient:layers.{n}.bias/0": 2.0 for n in range(3)}


def test_two_actions_may_not_set_one_state() -> None:
    state = gr.State()
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:weight", [counting(state), counting(state)]))
    with pytest.raises(gr.CallbackError, match=r"gradient:weight/0: two actions set this state"):
        model(example(1.0).float())


@pytest.mark.broad
@pytest.mark.parametrize(
    "read",
    [lambda s: s.item(), lambda s: float(s.value), lambda s: 1 if s.value else 2, lambda s: torch.full((), s), float],
    ids=["item", "float", "bool", "fill", "float of the state"],
)
def test_a_value_is_not_read_while_the_function_is_traced(read: Any) -> None:
    state = gr.State(init=3.0)
    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", lambda g: g * read(state)))
    with pytest.raises(gr.CallbackError, match="gradient:weight"):
        model(example(1.0))


def test_what_is_set_fits() -> None:
    state = gr.State((2,))

    def wrong(g: Tensor) -> Tensor:
        state.set(g)
        return g

    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:weight", wrong))
    with pytest.raises(gr.CallbackError, match=r"gradient:weight.*got shape \(1, 3\), and the state has \(2,\)"):
        model(example(1.0).float())
    for arguments, text in (((3,), "a tuple of whole numbers, got 3"), (((), "one"), "init is a number, got 'one'")):
        with pytest.raises(TypeError, match=text):
            gr.State(*arguments)


POLICY = [
    gr.on("gradient:0.*", counting(gr.State(dtype=torch.float64))),
    gr.on("gradient:*", ClipByGlobalNorm(gr.Schedule.cosine(0.5, 0.01, steps=12))),
    gr.on("step:0.*", AutoClip(40.0, history=6)),
    gr.on("step:2.*", [ClipByNorm(gr.Schedule.linear(0.3, 0.02, steps=15)), ZClip(0.5, warmup=3)]),
]


def made() -> tuple[Any, Any]:
    model = gr.transform(net(4), POLICY)
    return model, gr.guard(torch.optim.AdamW(model.parameters(), lr=0.05), model)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).double() * (1 + step % 4)
        model(x).square().mean().backward()
        optimizer.step()


def saved(*objects: Any) -> list[Any]:
    """Through a file that holds no code."""
    found = []
    for value in objects:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        found.append(torch.load(file, weights_only=True))
    return found


@pytest.mark.long
@pytest.mark.parametrize("is_called_before", [False, True])
def test_resuming_is_bit_equal(is_called_before: bool) -> None:
    model, optimizer = made()
    train(model, optimizer, range(8))
    parts = saved(model.state_dict(), optimizer.state_dict(), gr.state_dict(model))
    train(model, optimizer, range(8, 18))
    again, resumed = made()
    if is_called_before:
        train(again, resumed, range(90, 92))
    for part, load in zip(parts, (again.load_state_dict, resumed.load_state_dict), strict=False):
        load(part)
    gr.load_state_dict(again, parts[2])
    train(again, resumed, range(8, 18))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    first, second = gr.state_dict(model), gr.state_dict(again)
    assert first["step"] == second["step"] == 18
    assert first["states"].keys() == second["states"].keys()
    assert all(torch.equal(first["states"][key], second["states"][key]) for key in first["states"])
    # Without them it would be another training.
    alone, optimizer = made()
    alone.load_state_dict(parts[0])
    optimizer.load_state_dict(parts[1])
    train(alone, optimizer, range(8, 18))
    assert not torch.equal(alone[0].weight, model[0].weight)


@pytest.mark.long
def test_copies_and_pickles_have_states_of_their_own() -> None:
    policy = gr.on("gradient:*", [ZClip(warmup=2)])
    model = gr.transform(nn.Linear(3, 1).double(), policy)
    model(example(1.0)).sum().backward()
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    before = states_of(model)
    for other in copies:
        assert {k: float(v) for k, v in states_of(other).items()} == {k: float(v) for k, v in before.items()}
        other.zero_grad()
        other(example(2.0)).sum().backward()
        assert int(states_of(other)["group:default/ZClip.count"]) == 2
        assert int(states_of(model)["group:default/ZClip.count"]) == 1


@pytest.mark.broad
def test_a_trace_leaves_the_states_as_they_are() -> None:
    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", counting(gr.State())))
    model(example(1.0)).sum().backward()
    model.trace(example(1.0))
    model(example(1.0, rows=2)).sum().backward()
    assert float(states_of(model)["gradient:weight/0"]) == 2.0


def test_a_backend_has_states_too() -> None:
    backend = gr.backend(gr.on("gradient:weight", counting(gr.State())))
    assert gr.state_dict(backend) == {"version": 1, "step": 0, "states": {}}
    gr.load_state_dict(backend, {"version": 1, "step": 3, "states": {}})
    assert gr.state_dict(backend)["step"] == 3


@pytest.mark.long
def test_loading_what_does_not_fit() -> None:
    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", counting(gr.State())))
    with pytest.raises(TypeError, match="Linear has no policy"):
        gr.state_dict(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"takes what gr\.state_dict returned"):
        gr.load_state_dict(model, {"weight": torch.ones(3)})
    wrong = {"version": 1, "step": 0, "states": {"gradient:weight/0": torch.ones(2)}}
    gr.load_state_dict(model, wrong)
    with pytest.raises(gr.PolicyError, match=r"gradient:weight/0: the state is \(\), torch.float32, and what"):
        model(example(1.0))
    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", counting(gr.State())))
    gr.load_state_dict(model, {"version": 1, "step": 0, "states": {"gradient:gone/0": torch.ones(2)}})
    model(example(1.0)).sum().backward()
    assert states_of(model).keys() == {"gradient:gone/0", "gradient:weight/0"}  # nothing is lost in silence
    with pytest.raises(ValueError, match=r"gradient:weight/0: the state is \(\)"):
        gr.load_state_dict(model, wrong)
    assert float(states_of(model)["gradient:weight/0"]) == 1.0


def test_states_that_are_not_among_the_loaded_begin_anew() -> None:
    model = gr.transform(nn.Linear(3, 1).double(), gr.on("gradient:weight", counting(gr.State(init=5.0))))
    fresh = gr.state_dict(model)
    model(example(1.0)).sum().backward()
    gr.load_state_dict(model, fresh)
    assert float(states_of(model)["gradient:weight/0"]) == 5.0


@pytest.mark.long
def test_a_guard_that_comes_later_goes_on_counting() -> None:
    steps: list[int] = []
    schedule = gr.Schedule(lambda step: steps.append(step) or 1.0)  # type: ignore[func-returns-value]
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:*", ClipByNorm(schedule)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(times: int = 1) -> None:
        for _ in range(times):
            model(example(1.0).float()).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    gr.guard(optimizer, model)
    assert gr.state_dict(model)["step"] == 3
    for _ in range(2):
        step(times=2)
    gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    step()
    assert sorted(set(steps)) == [0, 1, 2, 3, 4, 5]
    assert steps == sorted(steps)
    assert gr.state_dict(model)["step"] == 6


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


class Unbroken(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "options"), [(Broken, {"fullgraph": False}), (Unbroken, {"regions": "layers.*"})], ids=["break", "regions"]
)
@pytest.mark.parametrize("action", [AutoClip(50.0), ZClip(warmup=2)], ids=repr)
def test_a_group_that_remembers_norms_needs_all_gradients(make: Any, options: Any, action: Any) -> None:
    model = gr.transform(make(), gr.on("gradient:*", action), **options)
    text = rf"{re.escape(repr(action))} at gradient:layers.*group 'default'.*a part of the gradients.*step:"
    with pytest.raises(gr.PolicyError, match=text):
        model(example(1.0).float()).sum().backward()
    model = gr.transform(make(), gr.on("step:*", action), **options)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gr.RewriteWarning)  # of the break
        model(example(1.0).float()).sum().backward()
    optimizer.step()
    assert int(states_of(model)[f"step:group:default/{type(action).__name__}.count"]) == 1


def test_two_groups_of_one_name_are_refused() -> None:
    policy = [gr.on("gradient:weight", AutoClip(50.0, group=1)), gr.on("gradient:bias", AutoClip(50.0, group="1"))]
    model = gr.transform(nn.Linear(3, 1), policy)
    with pytest.raises(gr.PolicyError, match=r"the groups 1 and '1' are two, .* one name, group:1; give one"):
        model(example(1.0).float())


@pytest.mark.broad
@pytest.mark.parametrize("reader", ["gradient:1.weight", "error:0", "step:1.weight"])
def test_a_state_that_is_set_at_another_site_is_refused(reader: str) -> None:
    scale = gr.State(name="scale")

    def follow(g: Tensor) -> Tensor:
        scale.set(g.abs().amax())
        return g

    for policy in (
        [gr.on("gradient:0.weight", follow), gr.on(reader, lambda g: g * scale)],
        [gr.on(reader, lambda g: g * scale), gr.on("gradient:0.weight", follow)],
    ):
        model = gr.transform(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), policy)
        optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)

        def step(model: gr.RewrittenModule = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        with pytest.raises(gr.PolicyError, match=f"{reader}: a gr.State 'scale' is read here and set at gradient:0"):
            step()


def following(site: str) -> gr.RewrittenModule:
    mean = gr.State(name="mean")

    def follow(g: Tensor) -> Tensor:
        mean.set((mean + g.abs().amax()) / 2)
        return g * mean

    return gr.transform(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), gr.on(site, follow))


def steps(model: gr.RewrittenModule, *, guarded: bool = False) -> None:
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model) if guarded else None
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        if optimizer is not None:
            optimizer.step()


@pytest.mark.broad
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("other", ["gradient:1.weight", "step:0.weight"])
def test_the_state_of_another_policy_is_told(other: str, used: bool, guarded: bool) -> None:
    first = following("gradient:0.weight")
    steps(first)
    model = following(other)
    guarded = guarded or other.startswith("step")
    if used:
        steps(model, guarded=guarded)
    gr.load_state_dict(model, gr.state_dict(first))
    lacks, left = f"it lacks {other}/mean, which began anew", "no action has used its gradient:0.weight/mean"
    with pytest.warns(gr.RewriteWarning, match=f"of another policy: {lacks}; {left}"):
        steps(model, guarded=guarded)
    steps(model, guarded=guarded)  # once


@pytest.mark.broad
@pytest.mark.parametrize("used", [False, True])
def test_the_state_of_the_same_policy_is_not_told(used: bool) -> None:
    for site in ("gradient:0.weight", "step:0.weight"):
        first, model = following(site), following(site)
        for one in (first, *([model] if used else [])):
            steps(one, guarded=True)
        gr.load_state_dict(model, gr.state_dict(first))
        steps(model, guarded=True)

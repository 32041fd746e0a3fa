"""A transformed model is an instance of its own class, and none of its policy is lost in silence."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import inspect
import io
import pickle
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipByValue, Scale, Zero

DOUBLE = gr.on("gradient:*", Scale(2.0))


class Net(nn.Module):
    """An autoencoder with a method that calls the module, and methods that do not."""

    width = 4

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, 3)
        self.decoder = nn.Linear(3, width)
        self.config = {"width": width}
        self.num_calls = 0

    @classmethod
    def of_width(cls, width: int) -> Net:
        return cls(width)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, hidden: Tensor) -> Tensor:
        return self.decoder(hidden)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.decode(self.encode(x)) * scale

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x).square().mean()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> nn.Module:
        return (self.encoder, self.decoder)[index]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a backward into ``.grad``, by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def doubled(net: Net, loss: Tensor) -> dict[str, Tensor]:
    """The oracle of ``DOUBLE``: gradients of the plain model that do not go through ``.grad``, times two."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    return {n: 2 * g for n, g in zip(names, torch.autograd.grad(loss, parameters), strict=True)}


@pytest.fixture(params=[False, True], ids=["twin", "inplace"])
def inplace(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.pure
def test_class_signature_and_protocols_are_the_models(net: Net, inplace: bool) -> None:
    wanted = inspect.signature(net.forward)
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)

    assert (model is net) == inplace
    assert isinstance(model, Net)
    assert isinstance(model, gr.RewrittenModule)
    assert (type(model).__name__, type(model).__qualname__, type(model).__module__) == ("Net", "Net", __name__)
    assert inspect.signature(model.forward) == wanted
    assert (len(model), model[1], model.width) == (2, net.decoder, 4)
    assert repr(model) == repr(Net())
    assert type(model.of_width(6)) is Net
    assert type(type(model)(6)) is Net


@pytest.mark.pure
def test_attributes_are_shared_both_ways(net: Net) -> None:
    model: Any = gr.transform(net, DOUBLE)
    model.num_calls = 3
    net.config = {"width": 5}
    net.extra = nn.Linear(1, 1)

    assert (net.num_calls, model.config, model.extra) == (3, {"width": 5}, net.extra)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in net.named_parameters()]
    model.eval()
    assert not net.training
    assert "_gradrewrite" not in vars(net)


@pytest.mark.broad
def test_policy_holds_where_a_method_calls_the_model(net: Net, batch: Tensor, inplace: bool) -> None:
    wanted = doubled(net, net.loss(batch))
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)

    torch.testing.assert_close(gradients(model, model.loss(batch)), wanted)
    torch.testing.assert_close(gradients(model, (model(batch) - batch).square().mean()), wanted)


@pytest.mark.broad
def test_attribute_set_in_the_forward(batch: Tensor, inplace: bool) -> None:
    class Counts(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.num_calls += 1
            return super().forward(x, scale=scale)

    model: Any = gr.transform(Counts(), DOUBLE, inplace=inplace)
    for _ in range(3):
        model(batch)

    assert model.num_calls == model.original.num_calls == 3


@pytest.mark.broad
def test_restore_gives_the_plain_model(net: Net, batch: Tensor, inplace: bool) -> None:
    plain = {n: g / 2 for n, g in doubled(net, net.loss(batch)).items()}
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)
    gradients(model, model.loss(batch))
    restored = gr.restore(model)

    with pytest.raises(TypeError, match="plain Net"):
        gr.restore(model.original if not inplace else restored)
    assert restored is net
    assert type(net) is Net
    assert not [name for name in vars(net) if "gradrewrite" in name]
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    torch.testing.assert_close(gradients(net, net.loss(batch)), plain)
    again = gr.transform(net, gr.on("gradient:*", Zero()), inplace=inplace)
    assert not any(g.any() for g in gradients(again, again.loss(batch)).values())


@pytest.mark.pure
def test_restore_refuses_what_has_no_policy(net: Net) -> None:
    with pytest.raises(TypeError, match="plain Net"):
        gr.restore(net)
    model: Any = gr.transform(net, [], inplace=True)
    with pytest.raises(TypeError, match=r"gr\.restore"):
        gr.transform(model, [])
    gr.restore(model)
    with pytest.raises(TypeError, match="plain Net"):
        gr.restore(model)


def test_restored_model_says_so(net: Net, batch: Tensor) -> None:
    model: Any = gr.transform(net, DOUBLE)
    gr.restore(model)
    with pytest.raises(RuntimeError, match=r"taken off by gr\.restore"):
        model(batch)


@pytest.mark.pure
def test_submodule_that_has_a_policy_is_refused(net: Net) -> None:
    gr.transform(net.encoder, DOUBLE, inplace=True)
    with pytest.raises(TypeError, match=r"'encoder' is transformed already.*gr\.restore"):
        gr.transform(net, [])


@pytest.mark.pure
def test_class_that_was_changed_since_is_not_restored(net: Net) -> None:
    model: Any = gr.transform(net, [], inplace=True)
    model.__class__ = type("Sharded", (type(model),), {})

    with pytest.raises(TypeError, match="changed after"):
        gr.restore(model)


@pytest.mark.broad
def test_replaced_forward_is_traced(net: Net, batch: Tensor, inplace: bool) -> None:
    """As accelerate does it for mixed precision: a bound method of the object, in its ``__dict__``."""
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)
    forward: Any = type(net).forward

    @functools.wraps(forward)
    def rescaled(self: Net, x: Tensor) -> Tensor:
        return forward(self, x, scale=3.0)

    model.forward = MethodType(rescaled, model)
    wanted = doubled(net, model.original(batch).sum())
    again = gr.transform(gr.restore(copy.copy(model)), DOUBLE, inplace=inplace)  # replaced before
    torch.testing.assert_close(gradients(again, again(batch).sum()), wanted)

    torch.testing.assert_close(gradients(model, model(batch).sum()), wanted)
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    torch.testing.assert_close(gradients(copied, copied(batch).sum()), wanted)


@pytest.mark.long
def test_copies_and_pickles_keep_class_and_policy(net: Net, batch: Tensor, inplace: bool) -> None:
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)
    wanted = gradients(model, model.loss(batch))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ):
        assert isinstance(other, Net)
        assert isinstance(other, gr.RewrittenModule)
        assert ("_gradrewrite" in vars(other)) == inplace
        torch.testing.assert_close(gradients(other, other.loss(batch)), wanted)
        assert type(gr.restore(other)) is Net


@pytest.mark.long
def test_model_that_refers_to_itself_is_pickled(batch: Tensor, inplace: bool) -> None:
    net: Any = Net()
    net.me = [net]
    net.encode = MethodType(Net.encode, net)
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)
    wanted = gradients(model, model.loss(batch))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(other, gr.RewrittenModule)
        assert not inplace or other.me[0] is other is other.encode.__self__
        torch.testing.assert_close(gradients(other, other.loss(batch)), wanted)


@pytest.mark.broad
def test_parameters_that_come_later_are_watched(batch: Tensor) -> None:
    model: Any = gr.transform(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2).requires_grad_(False)), DOUBLE)
    model(batch).sum().backward()
    model[1].requires_grad_(True)
    model(batch).sum().backward()
    with pytest.warns(gr.RewriteWarning, match=r"reached 0\.weight, 0\.bias, 1\.weight and 1 more through"):
        model[1](model[0](batch)).sum().backward()


@pytest.mark.broad
def test_twin_is_freed_without_the_garbage_collector(batch: Tensor) -> None:
    net = Net()
    refs = [weakref.ref(net), weakref.ref(net.encoder.weight)]
    model: Any = gr.transform(net, DOUBLE)
    gradients(model, model.loss(batch))
    gc.collect()
    gc.disable()
    try:
        del net, model
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


@pytest.mark.broad
def test_policy_dies_with_its_model_and_the_parameters_live(net: Net, batch: Tensor) -> None:
    model: Any = gr.transform(net, DOUBLE)
    gradients(model, model.loss(batch))
    del model
    gc.collect()

    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    gradients(net, net.loss(batch))  # no warning: nobody has a policy


def test_names_of_the_model_stay_its_own(inplace: bool) -> None:
    class Traced(Net):
        def trace(self) -> str:
            return "mine"

    net: Any = Traced()
    net.monitor = nn.Linear(1, 1)
    net.explain = "text"
    model: Any
    with pytest.warns(gr.RewriteWarning, match=r"Traced defines explain, monitor, trace .*ule\.monitor\.fget\(model\)"):
        model = gr.transform(net, DOUBLE, inplace=inplace)

    assert (model.trace(), model.monitor, model.explain) == ("mine", net.monitor, "text")
    assert gr.RewrittenModule.trace(model, torch.ones(1, 4)).edits
    assert isinstance(vars(gr.RewrittenModule)["monitor"].fget(model), gr.Monitor)


@pytest.mark.pure
def test_own_state_cannot_be_set(net: Net) -> None:
    model: Any = gr.transform(net, DOUBLE)
    for name in ("monitor", "original"):
        with pytest.raises(AttributeError, match=name):
            setattr(model, name, None)


@pytest.mark.pure
def test_classes_that_watch_their_subclasses(inplace: bool) -> None:
    class Registered(Net, abc.ABC):
        known: list[str] = []  # noqa: RUF012

        def __init_subclass__(cls, **kwargs: Any) -> None:
            Registered.known.append(cls.__name__)

    class Child(Registered):
        pass

    model: Any = gr.transform(Child(), [], inplace=inplace)

    assert Registered.known == ["Child"]
    assert isinstance(model, Registered)


@pytest.mark.pure
def test_slots_of_the_class() -> None:
    class Slotted(Net):
        __slots__ = ("offset",)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale) + self.offset

    net: Any = Slotted()
    net.offset = 2.0
    model: Any = gr.transform(net, [])
    model.offset = 3.0

    assert (net.offset, model.offset) == (3.0, 3.0)
    with pytest.raises(TypeError, match=r"__slots__ \(offset\)"):
        gr.transform(net, [], inplace=True)
    assert type(net) is Slotted


@pytest.mark.pure
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda net: torch.compile(net), r"\.compile\(\)"),
        (lambda net: torch.jit.trace(net, torch.ones(1, 4)), "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_refused_modules(net: Net, make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        gr.transform(make(net), [])


@pytest.mark.pure
@pytest.mark.parametrize("inside", [False, True])
def test_modules_with_a_trainer_of_their_own(inside: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = object.__new__(FullyShardedDataParallel)  # without a process group
    nn.Module.__init__(sharded)
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    for module, text in ((sharded, r"FSDP1 .*fully_shard"), (engine, "DeepSpeed runs the backward")):
        with pytest.raises(TypeError, match=text):
            gr.transform(nn.ModuleList([module]) if inside else module, [])


@pytest.mark.pure
def test_replicas_are_refused(net: Net, inplace: bool) -> None:
    model: Any = gr.transform(net, [], inplace=inplace)
    with pytest.raises(TypeError, match=r"DistributedDataParallel\(gr\.transform"):
        model._replicate_for_data_parallel()  # what nn.DataParallel calls for each device


@pytest.mark.pure
@pytest.mark.parametrize("name", ["encodes", "encoder", "of_width", "config"])
def test_names_that_are_no_methods(net: Net, name: str) -> None:
    with pytest.raises(ValueError, match=f"has no method '{name}'"):
        gr.transform(net, [], methods=(name,))


@pytest.mark.pure
def test_wrong_methods(net: Net) -> None:
    net.encode = lambda x: x
    with pytest.raises(ValueError, match="no method 'encode'"):
        gr.transform(net, [], methods=("encode",))
    with pytest.raises(TypeError, match=r"\('encode',\)"):
        gr.transform(net, [], methods="encode")


@pytest.mark.broad
def test_methods_have_entry_points_of_their_own(net: Net, batch: Tensor, inplace: bool) -> None:
    policy = [DOUBLE, gr.on("error:encoder", Scale(0.5)), gr.on("input:hidden", lambda g: g * 0)]
    model: Any = gr.transform(net, policy, methods=("encode", "decode"), inplace=inplace)
    got = gradients(model, model.decode(model.encode(batch)).sum())

    assert not got["encoder.weight"].any()  # the gradient of decode's input is zeroed
    assert [str(s) for g in model.explain().graphs for s in g.sites if s.kind == "input"] == ["input:hidden"]
    got = gradients(model, model(batch).sum())  # a graph of its own, in which decode has no input
    assert got["encoder.weight"].any()


@pytest.mark.broad
def test_rules_wait_for_all_methods(net: Net, batch: Tensor) -> None:
    model: Any = gr.transform(net, gr.on("error:nonsense", Zero()), methods=("encode", "decode"))
    hidden = model.encode(batch)
    model.decode(hidden.detach())
    with pytest.raises(gr.NoSuchSiteError, match="nonsense"):
        model(batch)


def test_methods_without_entry_points_warn_once(net: Net, batch: Tensor, inplace: bool) -> None:
    model: Any = gr.transform(net, DOUBLE, inplace=inplace)
    with pytest.warns(gr.RewriteWarning) as record:
        model.decode(model.encode(batch)).sum().backward()
    model.decode(model.encode(batch)).sum().backward()

    assert len(record) == 1
    text = str(record[0].message)
    assert "encoder.weight, encoder.bias, decoder.weight and 1 more" in text
    assert "encode(), decode()" in text
    assert "methods=('encode', 'decode')" in text
    assert record[0].filename == __file__


def test_submodule_called_directly_warns_once(net: Net, batch: Tensor) -> None:
    model: Any = gr.transform(net, DOUBLE)
    gradients(model, model.loss(batch))
    with pytest.warns(gr.RewriteWarning, match="'encoder' of it, was called directly"):
        model.encoder(batch).sum().backward()
    model.encoder(batch).sum().backward()


def test_plain_model_that_is_trained_warns(net: Net, batch: Tensor) -> None:
    model: Any = gr.transform(net, DOUBLE)
    with pytest.warns(gr.RewriteWarning, match="the rewritten model was never called"):
        net.loss(batch).backward()
    assert model.explain().graphs == ()


@pytest.mark.broad
def test_two_policies_for_one_model_do_not_warn(net: Net, batch: Tensor) -> None:
    first, second = gr.transform(net, DOUBLE), gr.transform(net, gr.on("gradient:*", ClipByValue(0.1)))
    wanted = doubled(net, net.loss(batch))
    for model in (first, second, first):
        got = gradients(model, model.loss(batch))
        expected = {n: (g / 2).clamp(-0.1, 0.1) for n, g in wanted.items()} if model is second else wanted
        torch.testing.assert_close(got, expected)


def test_several_calls_before_one_backward_do_not_warn(net: Net, batch: Tensor) -> None:
    wanted = doubled(net, net.loss(batch) + net.loss(batch * 2) + net(batch).sum())
    model: Any = gr.transform(net, DOUBLE)
    got = gradients(model, model.loss(batch) + model.loss(batch * 2) + model(batch).sum())
    torch.testing.assert_close(got, wanted)


@pytest.mark.pure
def test_gradients_that_are_asked_for_do_not_warn(net: Net, batch: Tensor) -> None:
    gr.transform(net, DOUBLE)
    torch.autograd.grad(net.loss(batch), list(net.parameters()))


@pytest.mark.inductor
def test_class_is_preserved_compiled(net: Net, batch: Tensor, inplace: bool) -> None:
    wanted = doubled(net, net.loss(batch))
    model: Any = gr.transform(net, DOUBLE, inplace=inplace, methods=("encode",))
    model.compile()

    torch.testing.assert_close(gradients(model, model.loss(batch)), wanted)
    hidden = doubled(net, model.original.encode(batch).sum() + 0 * sum(p.sum() for p in net.decoder.parameters()))
    got = gradients(model, model.encode(batch).sum())
    torch.testing.assert_close(got, {n: g for n, g in hidden.items() if n in got})

"""Per-example gradients compiled by Inductor: the same figures, embeddings and convolutions included."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import metrics

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, Keep, WeighExamples

from benchmarks.measuring import allocations, largest_sum
from models.per_example import example_gradients, make

pytestmark = pytest.mark.inductor

EXACT = {"rtol": 1e-10, "atol": 1e-13}


@pytest.mark.parametrize("name", ["attention", "tied", "conv 2-D", "recurrent", "checkpointed"])
def test_compiled(name: str) -> None:
    model, inputs = make(name)
    terms = example_gradients(model, *inputs)
    actions = [Keep("example_norms"), Keep("second_moment"), ClipPerExample(0.1)]
    rewritten = gr.transform(model, gr.on("gradient:*", actions))
    rewritten.compile()
    rewritten(*inputs).backward()
    norms = {site.name: t for site, t in rewritten.monitor.kept("example_norms").items()}
    moments = {site.name: t for site, t in rewritten.monitor.kept("second_moment").items()}
    total = torch.stack([own.flatten(1).square().sum(1) for own in terms.values()]).sum(0).sqrt()
    factors = (0.1 / total).clamp(max=1) / len(total)
    for parameter, own in terms.items():
        torch.testing.assert_close(norms[parameter], own.flatten(1).norm(dim=1), **EXACT)
        torch.testing.assert_close(moments[parameter], own.square().mean(0), **EXACT)
        wanted = torch.einsum("b,b...->...", factors, own)
        torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, **EXACT)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["tied", "conv 2-D"])
def test_factors_in_float32(name: str, each: bool) -> None:
    model, inputs = make(name)
    terms = example_gradients(model, *inputs)
    model, inputs = model.float(), [x.float() if x.is_floating_point() else x for x in inputs]
    rewritten = gr.transform(model, gr.on("gradient:*", WeighExamples(lambda n: 1 / (n + 0.01), per_parameter=each)))
    rewritten.compile()
    rewritten(*inputs).backward()
    squares = {parameter: own.flatten(1).square().sum(1) for parameter, own in terms.items()}
    for parameter, own in terms.items():
        norms = (squares[parameter] if each else torch.stack([*squares.values()]).sum(0)).sqrt()
        wanted = torch.einsum("b,b...->...", 1 / (norms + 0.01), own).float() / len(norms)
        torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "attention"])
def test_factors_of_a_function_have_the_kernels_of_a_clip(name: str) -> None:
    def kernels(action: ClipPerExample | WeighExamples) -> int:
        model, inputs = make(name)
        begin = metrics.generated_kernel_count
        gr.transform(model, gr.on("gradient:*", action)).compile()(*inputs).backward()
        return metrics.generated_kernel_count - begin

    assert 0 < kernels(WeighExamples(lambda n: (0.1 / n).clamp(max=1))) <= kernels(ClipPerExample(0.1))


@pytest.mark.parametrize("name", ["parts", "conv 1-D"])
def test_the_batch_may_be_symbolic(name: str) -> None:
    """One compilation serves every size above 1."""
    model, inputs = make(name)
    rewritten = gr.transform(model, gr.on("gradient:*", ClipPerExample(0.1)), dynamic=True)
    rewritten.compile()
    for number in (4, 3):
        batch = [torch.cat([x, x])[:number].clone() for x in inputs]
        terms = example_gradients(model, *batch)
        total = torch.stack([own.flatten(1).square().sum(1) for own in terms.values()]).sum(0).sqrt()
        factors = (0.1 / total).clamp(max=1) / number
        model.zero_grad()
        rewritten(*batch).backward()
        for parameter, own in terms.items():
            wanted = torch.einsum("b,b...->...", factors, own)
            torch.testing.assert_close(model.get_parameter(parameter).grad, wanted, **EXACT)
    assert len(rewritten.explain().graphs) == 1


def test_noise_comes_anew_at_each_backward() -> None:
    model, inputs = make("linear")
    rewritten = gr.transform(model, gr.on("gradient:*", ClipPerExample(1.0, noise_multiplier=1.0)))
    rewritten.compile()
    drawn = []
    for _ in range(2):
        model.zero_grad()
        rewritten(*inputs).backward()
        drawn.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = drawn[0] - drawn[1]
    assert float(difference.std()) == pytest.approx(2**0.5 / len(inputs[0]), rel=0.3)


@pytest.mark.sample(6)
def test_bfloat16_norms_are_those_of_float32() -> None:
    model, inputs = make("attention")
    model.bfloat16()
    rewritten = gr.transform(model, gr.on("gradient:net.head.weight", Keep("example_norms")))
    rewritten.compile()
    rewritten(*inputs).backward()
    (norms,) = rewritten.monitor.kept("example_norms").values()
    assert norms.dtype == torch.float32
    wanted = example_gradients(model.float(), *inputs)["net.head.weight"].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, wanted, rtol=0.05, atol=0)


def test_a_second_moment_is_kept_in_the_memory_it_was_computed_in() -> None:
    net, x = torch.nn.Linear(256, 256, bias=False), torch.randn(8, 256)
    size = net.weight.numel() * net.weight.element_size()
    model = gr.transform(net, gr.on("gradient:*", Keep("second_moment", loss_reduction="sum")))
    model.compile()

    def step() -> None:
        model(x).sum().backward()

    step()
    net.zero_grad()
    assert largest_sum(allocations(step)) < 2.5 * size  # the gradient and the moment
    (moment,) = model.monitor.kept("second_moment").values()
    assert moment.untyped_storage().data_ptr() != net.weight.grad.untyped_storage().data_ptr()
    torch.testing.assert_close(moment, x.square().mean(0).expand(256, -1))


def test_what_is_kept_does_not_change_with_the_gradient() -> None:
    net, x = torch.nn.Linear(3, 3, bias=False), torch.randn(4, 3)
    wanted = x.square().mean(0).expand(3, -1)
    actions = [Keep("second_moment", loss_reduction="sum"), Keep("second_moment", loss_reduction="sum"), Keep()]
    model = gr.transform(net, gr.on("gradient:*", actions))
    model.compile()
    model(x).sum().backward()
    net.weight.grad.zero_()
    torch.testing.assert_close(model.monitor.kept("second_moment")[next(iter(model.monitor.kept()))], wanted)
    torch.testing.assert_close(next(iter(model.monitor.kept().values())), x.sum(0).expand(3, -1))

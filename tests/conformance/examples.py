"""The shared reference of per-example gradients: a loop over the examples of a batch, one backward each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite.passes import ClipPerExample, Keep

from conformance.outcomes import TorchRefusesError
from conformance.reference import differentiable, fresh

TOLERANCE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-11}
Batch = list[Any]


class NoExamplesError(Exception):
    """There is nothing to compare."""


class WithLoss(nn.Module):
    """A module with the mean over examples of a weighted sum of what it makes of each."""

    def __init__(self, inner: nn.Module, constants: Sequence[Any], places: Sequence[int]) -> None:
        super().__init__()
        self.inner, self.places = inner, list(places)
        self.others: list[Any] = []
        for number, constant in enumerate(constants):  # what has no batch is a buffer
            if isinstance(constant, Tensor):
                self.register_buffer(f"constant_{number}", constant.detach())
            self.others.append(None if isinstance(constant, Tensor) else constant)

    def forward(self, *batch: Tensor) -> Tensor:
        given, rest = list(self.others), iter(batch)
        for number, other in enumerate(self.others):
            if number in self.places:
                given[number] = next(rest)
            elif other is None and hasattr(self, f"constant_{number}"):
                given[number] = getattr(self, f"constant_{number}")
        outputs = differentiable(self.inner(*given))
        if not outputs:
            raise NoExamplesError("no output has a gradient")
        return torch.stack([mean_of_examples(out, batch[-1].shape[0]) for out in outputs]).sum()


def mean_of_examples(out: Tensor, number: int) -> Tensor:
    """The same weights for each example, and squares, so that errors depend on the examples."""
    if out.dim() == 0 or out.shape[0] != number:
        raise NoExamplesError("an output has no example in each row")
    rows = (torch.view_as_real(out.resolve_conj()) if out.is_complex() else out).to(torch.float64).reshape(number, -1)
    return (rows * torch.cos(torch.arange(rows.shape[1], dtype=torch.float64)) + rows.square() / 4).sum(1).mean()


@dataclass(frozen=True)
class Examples:
    """A module on a batch.

    Attributes:
        make: Makes the module, with the same parameters each time.
        inputs: All of its inputs.
        places: Which of them have the examples in dimension 0; the others are constant.
    """

    make: Callable[[], nn.Module]
    inputs: Sequence[Any]
    places: Sequence[int]

    def with_loss(self) -> WithLoss:
        constants = [None if n in self.places else t for n, t in enumerate(self.inputs)]
        return WithLoss(self.make(), constants, self.places).train()

    def batch(self) -> list[Tensor]:
        return [fresh([self.inputs[n]])[0].detach() for n in self.places]

    def terms(self) -> dict[str, Tensor]:
        """The gradients of each example's own loss, ``[B, ...]``, by parameter."""
        model, of = self.with_loss(), []
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for example in zip(*self.batch(), strict=True):
            loss = model(*(x.unsqueeze(0) for x in example))
            grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            of.append([torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), grads, strict=True)])
        return {name: torch.stack(own) for name, own in zip(trained, zip(*of, strict=True), strict=True)}

    @property
    def is_one_by_one(self) -> bool:
        """Whether the module makes of each example what it makes of it in a batch."""
        model, batch = self.with_loss(), self.batch()
        try:
            with torch.no_grad():
                torch.manual_seed(2)
                alone = [self._outputs(model, [x[n : n + 1] for x in batch]) for n in range(batch[0].shape[0])]
                torch.manual_seed(3)
                whole = self._outputs(model, batch)
        except Exception:  # it takes no batch of one, or no other
            return False
        together = [torch.cat(rows) for rows in zip(*alone, strict=True) if all(r.dim() for r in rows)]
        return len(whole) == len(together) > 0 and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
            for a, b in zip(whole, together, strict=True)
        )

    def _outputs(self, model: WithLoss, batch: Sequence[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = []
        handle = model.inner.register_forward_hook(lambda _, __, out: outputs.extend(_tensors(out)))
        try:
            with torch.enable_grad():
                model(*batch)
        finally:
            handle.remove()
        return [t.detach() for t in outputs]

    def check(self) -> None:
        """Compare norms, second moments and clipped sums with the loop."""
        try:
            self.with_loss()(*self.batch())  # what has no example in each row says so here, not while it is traced
        except NoExamplesError:
            raise
        except Exception as err:
            raise TorchRefusesError from err
        try:
            terms = self.terms()
        except NoExamplesError:
            raise
        except Exception as err:  # the module takes no batch of one: it has to be refused
            self._rewritten(1.0)
            raise AssertionError(f"no loop over examples can run ({err}), and nothing is refused") from err
        norms = torch.stack([t.reshape(len(t), -1).square().sum(1) for t in terms.values()]).sum(0).sqrt()
        if not torch.isfinite(norms).all():
            raise NoExamplesError("a gradient is not finite")
        bound = float(norms.median()) * 0.99 or 1.0
        moments, kept, clipped = self._rewritten(bound)
        factors = (bound / norms.clamp(min=1e-300)).clamp(max=1)
        largest = max(float(t.abs().max()) for t in terms.values())
        for name, own in terms.items():
            wanted = {
                f"norms of {name}": (kept.get(name), own.reshape(len(own), -1).norm(dim=1)),
                f"second moment of {name}": (moments.get(name), own.square().mean(0)),
                f"clipped sum of {name}": (clipped[name], torch.einsum("b,b...->...", factors, own) / len(norms)),
            }
            for what, (found, right) in wanted.items():
                if found is None:  # no gradient reaches it
                    assert not right.any(), what
                    continue
                atol = TOLERANCE["atol"] + 1e-9 * max(largest, largest * largest)
                torch.testing.assert_close(found, right, rtol=1e-8, atol=atol, msg=lambda m, w=what: f"{w}: {m}")

    def _rewritten(self, bound: float) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor | None]]:
        model = self.with_loss()
        model.zero_grad()  # a suite may hand over one module several times
        actions = [Keep("example_norms"), Keep("second_moment"), ClipPerExample(bound)]
        rewritten = gr.transform(model, gr.on("gradient:*", actions), dynamic=False)
        try:
            rewritten(*self.batch()).backward()
        except gr.PolicyError:
            raise
        except Exception:
            self._raise_if_torch_refuses()
            raise
        kept = {
            what: {site.name: t for site, t in rewritten.monitor.kept(what).items()}
            for what in ("second_moment", "example_norms")
        }
        return kept["second_moment"], kept["example_norms"], {n: p.grad for n, p in model.named_parameters()}

    def _raise_if_torch_refuses(self) -> None:
        torch.compiler.reset()
        try:
            torch.compile(self.with_loss(), backend="aot_eager", fullgraph=True, dynamic=False)(
                *self.batch()
            ).backward()
        except Exception as err:
            raise TorchRefusesError from err


def check_first(samples: Iterable[Examples]) -> None:
    """Compare the first sample of which each example stays alone; without one, the first that can be compared."""
    known = list(samples)
    why = "no sample has several rows"
    for examples in sorted(known, key=lambda e: not e.is_one_by_one):
        try:
            examples.check()
        except NoExamplesError as reason:
            why = str(reason)
        else:
            return
    pytest.skip(why)


def _tensors(out: Any) -> list[Tensor]:
    return [t.clone() for t in differentiable(out)]


def find_examples(make: Callable[[], nn.Module], inputs: Sequence[Any], first: int) -> Examples:
    """Take the first input as a batch, and with it all others of as many rows, if only so each example stays alone.

    Where neither holds the module mixes examples: the answer may then be a refusal alone.
    """
    number = inputs[first].shape[0]
    all_rows = [n for n, t in enumerate(inputs) if isinstance(t, Tensor) and t.dim() and t.shape[0] == number]
    alone, together = Examples(make, inputs, [first]), Examples(make, inputs, all_rows)
    return alone if alone.is_one_by_one else together

"""Programs that clip in time: losses, parameters and records are those of eager loops with the clips written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradrewrite import viz
from gradrewrite.examples import bptt_clipping, seq2seq_attention

STEPS, UNROLL, LENGTH = 3, 10, 8
INF = math.inf
TIGHT = {"plain": (INF, INF), "gradient clip": (INF, 0.3), "error clip": (0.02, INF)}  # error of a cell, total norm


@dataclass
class ByHand:
    """Records of an eager run: losses, total norms, and errors by module ``[steps, calls]``, the first call first."""

    losses: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    errors: dict[str, list[list[float]]] = field(default_factory=dict)


def train_by_hand(
    model: nn.Module, cells: Sequence[str], batches: Iterable[Sequence[Tensor]], rate: float, error: float, total: float
) -> ByHand:
    """Train with gradient descent; hooks clip the error of each call of the cells, then one factor all gradients."""
    found = ByHand(errors={name: [] for name in cells})
    grads: dict[str, list[float]] = {}

    def watch(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def clip(gradient: Tensor) -> Tensor:
            norm = gradient.norm()
            grads[name].append(norm.item())
            return gradient * (error / norm) if norm > error else gradient

        return lambda module, given, out: out.register_hook(clip) and None

    hooks = [model.get_submodule(name).register_forward_hook(watch(name)) for name in cells]
    for batch in batches:
        grads.update({name: [] for name in cells})
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad * (total / norm if norm > total else 1.0)
        found.losses.append(loss.item())
        found.totals.append(norm)
        for name in cells:
            found.errors[name].append(grads[name][::-1])  # the backward meets the last call first
    for hook in hooks:
        hook.remove()
    return found


def assert_acted(way: str, found: Mapping[str, ByHand]) -> None:
    error, total = TIGHT[way]
    sizes = [size for one in found.values() for steps in one.errors.values() for row in steps for size in row]
    assert any(size > error for size in sizes) == (way == "error clip")
    assert any(norm > total for one in found.values() for norm in one.totals) == (way == "gradient clip")


@pytest.mark.slow
@pytest.mark.parametrize("way", TIGHT)
def test_bptt_equals_a_loop_by_hand(way: str, tmp_path: Path) -> None:
    error, total = TIGHT[way]
    path = tmp_path / "run.jsonl"
    policy = bptt_clipping.policies(error=error, total=total)[way]
    model = bptt_clipping.train(policy, steps=STEPS, unroll=UNROLL, path=path)
    plain = bptt_clipping.start()
    pieces = [[batch] for batch in bptt_clipping.batches(STEPS, UNROLL)]
    by_hand = train_by_hand(plain, ["cell"], pieces, bptt_clipping.RATE, error, total)

    assert_acted(way, {"": by_hand})
    monitor = model.monitor
    assert monitor.history("loss@run") == pytest.approx(by_hand.losses, rel=1e-5)
    assert monitor.history("total_norm@group:default") == pytest.approx(by_hand.totals, rel=1e-4)
    norms = bptt_clipping.error_norms(monitor, UNROLL)
    np.testing.assert_allclose(norms, np.transpose(by_hand.errors["cell"]), rtol=1e-4)
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-6)

    rates = {site.site: site.rate for site in viz.report(path).health.sites if site.site.startswith("error:")}
    acted = np.mean(norms > error, axis=1)
    if error < INF:
        assert rates == pytest.approx({"error:cell": np.mean(acted)})  # all calls in one row
    else:
        assert all(math.isnan(rate) for rate in rates.values())


@pytest.mark.sample(8)
@pytest.mark.slow
def test_translation_equals_a_loop_by_hand() -> None:
    seeds = 2
    found = seq2seq_attention.train(TIGHT, seeds=seeds, steps=STEPS, length=LENGTH)

    assert list(found) == list(TIGHT)
    for way, (error, total) in TIGHT.items():
        by_hand = {}
        for seed in range(seeds):
            net = seq2seq_attention.Translator(len(seq2seq_attention.load_text()[1]))
            net.reset(seed)
            data = seq2seq_attention.batches(STEPS, LENGTH, seed)
            by_hand[str(seed)] = train_by_hand(
                net, seq2seq_attention.LAYERS, data, seq2seq_attention.RATE, error, total
            )
        assert_acted(way, by_hand)
        runs = found[way]
        np.testing.assert_allclose(runs.losses, [one.losses for one in by_hand.values()], rtol=1e-4)
        np.testing.assert_allclose(runs.total_norms, [one.totals for one in by_hand.values()], rtol=1e-3)
        for layer in seq2seq_attention.LAYERS:
            errors = np.array([one.errors[layer] for one in by_hand.values()])
            np.testing.assert_allclose(runs.errors[layer], errors, rtol=1e-3)
            np.testing.assert_array_equal(runs.rates[layer], (errors > error).mean((0, 1)))


@pytest.mark.pure
def test_texts_lose_their_vowels_only() -> None:
    _, alphabet = seq2seq_attention.load_text()
    ((read, wanted),) = seq2seq_attention.batches(1, 40, 0)
    assert (tuple(read.shape), tuple(wanted.shape)) == ((seq2seq_attention.ROWS, 30), (seq2seq_attention.ROWS, 40))
    for row, whole in zip(read.tolist(), wanted.tolist(), strict=True):
        bare, text = ("".join(alphabet[n] for n in numbers) for numbers in (row, whole))
        kept = "".join(c for c in text if c not in seq2seq_attention.VOWELS)
        assert bare.rstrip() == kept[:30].rstrip()

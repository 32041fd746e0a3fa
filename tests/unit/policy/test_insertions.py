"""What each action inserts at each kind of site."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import gradrewrite as gr
import gradrewrite.passes as P
from gradrewrite.policy.actions import insertion_anywhere, insertion_at, is_action, kinds_of
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    HoldElements,
    Insertion,
    JudgeUpdate,
    KeepTensor,
    KeepZeroErrors,
    MeasureExampleGradients,
    MeasureTensor,
    Omitted,
    PerExample,
    RecomputeSaved,
    ReplaceBackward,
    ReplaceTensor,
    ScaleGroup,
    ScaleParameter,
    StoreSaved,
    WeighExampleGradients,
    WeighLossGradients,
)
from gradrewrite.policy.rules import ask_in_order, rule_skips
from gradrewrite.sites import TRAITS, Kind, Site

pytestmark = pytest.mark.pure


def halve(g: Tensor) -> Tensor:
    return g / 2


def add_weight(g: Tensor, weight: Tensor) -> Tensor:
    return g + weight


def site(kind: Kind, **fields: Any) -> Site:
    return Site(kind, "w", shape=(2, 3), dtype=torch.float32, device=torch.device("cpu"), **fields)


ALL: dict[str, tuple[Any, type]] = {
    "ClipByNorm": (P.ClipByNorm(1.0), ReplaceTensor),
    "ClipByNorm by site": (P.ClipByNorm({"w": 0.5}), ReplaceTensor),
    "ClipByValue": (P.ClipByValue(1.0, log=True), ReplaceTensor),
    "AdaptiveClip": (P.AdaptiveClip(), ReplaceTensor),
    "Scale": (P.Scale(2.0), ReplaceTensor),
    "Zero": (P.Zero(), ReplaceTensor),
    "NanToNum": (P.NanToNum(), ReplaceTensor),
    "L2": (P.L2(0.1), ReplaceTensor),
    "Every": (P.Every(2, P.ClipByNorm(1.0)), ReplaceTensor),
    "After": (P.After(2, add_weight), ReplaceTensor),
    "function": (halve, ReplaceTensor),
    "function of torch": (torch.sign, ReplaceTensor),
    "CheckFinite": (P.CheckFinite(), MeasureTensor),
    "Observe": (P.Observe("norm"), MeasureTensor),
    "Keep": (P.Keep(), KeepTensor),
    "DecayWeights": (P.DecayWeights(0.1), ScaleParameter),
    "Hold": (P.Hold(torch.lt), HoldElements),
    "AllReduce": (P.AllReduce(), AverageOverRanks),
    "ClipByGlobalNorm": (P.ClipByGlobalNorm(1.0), ScaleGroup),
    "AutoClip": (P.AutoClip(), ScaleGroup),
    "ZClip": (P.ZClip(), ScaleGroup),
    "ClipPerExample": (P.ClipPerExample(1.0), WeighExampleGradients),
    "WeighExamples": (P.WeighExamples(torch.reciprocal), WeighExampleGradients),
    "NoiseScale": (P.NoiseScale(), MeasureExampleGradients),
    "WeighLosses": (P.WeighLosses(P.UPGrad()), WeighLossGradients),
    "SkipSpikes": (P.SkipSpikes(), JudgeUpdate),
    "Store": (P.Store("int8"), StoreSaved),
    "Offload": (P.Offload(), StoreSaved),
    "Recompute": (P.Recompute(), RecomputeSaved),
    "KeepZeros": (P.KeepZeros(), KeepZeroErrors),
}


@pytest.mark.parametrize("name", ALL)
def test_effect_of_each_action_at_each_of_its_kinds(name: str) -> None:
    action, wanted = ALL[name]
    kinds = kinds_of(action)

    assert kinds
    for kind in TRAITS:  # at a kind that is not allowed too: nobody knows before the insertion says so
        found = insertion_at(action, site(kind))
        is_rule = kind == "backward" and not is_action(action)  # a function, of an op there
        assert type(found.effect) is (ReplaceBackward if is_rule else wanted)
        assert found.kinds == kinds
        assert found.key == insertion_at(action, site(kind)).key
        assert (found.group is None) == ("group" not in dir(found.effect))


def test_every_pass_is_in_the_table() -> None:
    weightings = {"UPGrad", "PCGrad", "MGDA", "CAGrad", "AlignedMTL"}

    assert set(P.__all__) - weightings == {name for name in ALL if name in P.__all__}


def test_arguments_of_replacements() -> None:
    def reads(action: Any, kind: Kind = "gradient") -> Any:
        effect = insertion_at(action, site(kind)).effect
        assert isinstance(effect, ReplaceTensor)
        return effect.reads

    assert [reads(add_weight), reads(halve), reads(P.AdaptiveClip()), reads(P.L2(0.1))] == [
        "value",
        "",
        "value",
        "value",
    ]
    assert reads(P.Every(2, add_weight)) == "value"
    assert reads(P.Observe("loss_cosine", "norm")) == "losses"
    assert reads(P.Observe("stored_error"), "saved") == "value"
    moment, noise = reads(P.Keep("second_moment", batch_dim=1)), reads(P.Observe("noise_scale", loss_reduction="sum"))
    assert moment == PerExample(("second_moment",), "mean", 1)
    assert noise == PerExample(("square_norms",), "sum", 0)


def test_statistics() -> None:
    def of(action: Any, **fields: Any) -> Any:
        effect = insertion_at(action, site("activation", **fields)).effect
        return list(effect.statistics) if isinstance(effect, MeasureTensor | ReplaceTensor) else None

    assert of(P.Observe("norm", "saturated")) == ["norm"]
    assert of(P.Observe("norm", "saturated"), op="tanh") == ["norm", "saturated"]
    assert of(P.CheckFinite("warn")) == ["nonfinite"]
    assert of(P.CheckFinite("warn"), may_be_infinite=True) == ["nan"]
    assert of(P.ClipByNorm(1.0)) == ["norm"]
    assert of(P.ClipByNorm(1.0, norm_type=1, log=True)) == ["max_abs", "mean_abs"]
    assert of(P.ClipByValue(1.0)) == []


def test_what_a_step_leaves_out_reserves_its_names() -> None:
    def names(action: Any, kind: Kind = "gradient") -> Any:
        insertion = insertion_at(action, site(kind))
        assert insertion.every is not None
        left = insertion.omitted().effect
        assert isinstance(left, Omitted)
        return left.names

    assert names(P.Observe("norm", "max", every=3)) == ("norm", "max")
    assert names(P.Observe("norm", "noise_scale")) == ("norm", "noise_scale")
    assert names(P.Observe("norm", "noise_scale"), "error") == ("norm",)
    assert names(P.Observe("norm", "loss_norms")) == ("norm",)
    assert names(P.Observe("stored_error"), "saved") == ("stored_error",)
    assert names(P.CheckFinite("record")) == ("nonfinite",)
    assert names(P.Keep(every=2)) == ()
    assert [insertion_anywhere(a).every for a in (P.CheckFinite("skip"), P.ClipByNorm(1.0), halve)] == [None] * 3


def test_bounds_of_the_site() -> None:
    clip = P.ClipByNorm({"w": 0.5, "*": 1.0})

    assert insertion_at(clip, site("error")).action == P.ClipByNorm(0.5)
    assert insertion_at(clip, site("saved")).action is clip  # where it may not be nobody asks for its bound
    with pytest.raises(gr.PolicyError, match="its patterns are"):
        insertion_at(P.ClipByNorm({"other": 0.5}), site("error"))


def test_units() -> None:
    actions = (P.ClipByNorm(1.0), halve, P.Scale(2.0), P.Observe("norm"), P.Observe("noise_scale"), P.AllReduce())

    assert [insertion_anywhere(action).has_units for action in actions] == [True, True, False, False, True, False]


class Own:
    """An action of a user."""

    kinds: frozenset[Kind] = frozenset(("gradient",))

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def at(self, site: Site) -> Any:
        assert site.shape[0] == 2  # which no made-up site has
        return self.result if self.result is not None else Insertion(self, ReplaceTensor(halve))


def test_actions_of_users() -> None:
    rule = gr.on("gradient:*", Own())
    (answered,) = ask_in_order(rule, site("gradient"))

    assert answered.insertion.kinds == {"gradient"}  # those of the action
    assert not rule_skips(rule)
    with pytest.raises(gr.PolicyError, match="does not apply to this kind of site; it applies to gradient"):
        ask_in_order(gr.on("error:*", Own()), site("error"))
    with pytest.raises(gr.PolicyError, match="returns an Insertion, and returned 3"):
        ask_in_order(gr.on("gradient:*", Own(3)), site("gradient"))


def test_a_refusal_names_the_action_as_it_was_given() -> None:
    for action in (P.Every(2, P.Scale(2.0)), P.After(3, P.ClipByNorm({"w": 1.0}))):
        with pytest.raises(gr.PolicyError, match=re.escape(f"activation:w: {action!r} does not apply")):
            ask_in_order(lambda _, action=action: action, site("activation"))

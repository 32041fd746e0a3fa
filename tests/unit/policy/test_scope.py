from __future__ import annotations

from typing import Any

import pytest
import torch

import gradrewrite as gr
import gradrewrite.passes as P
from gradrewrite.errors import PolicyError
from gradrewrite.ir.edits import Edit
from gradrewrite.policy.actions import insertion_at
from gradrewrite.policy.insertions import Insertion
from gradrewrite.policy.scope import (
    REFUSALS,
    Context,
    lone_skip,
    refuse,
    refuse_group_in_regions,
    refuse_in_data_parallelism,
    warnings_in_parts,
)
from gradrewrite.sites import Kind, Site

pytestmark = pytest.mark.pure

DDP, FSDP = "DistributedDataParallel", "FSDP2 (fully_shard)"
CLIP, AVERAGE, CHECK = P.ClipByGlobalNorm(1.0), P.AllReduce(), P.CheckFinite("skip")
TOGETHER = gr.joint(lambda values: values)
EXAMPLES, LOSSES = P.ClipPerExample(1.0), P.WeighLosses(P.UPGrad())


def site(kind: Kind = "gradient", name: str = "w") -> Site:
    return Site(kind, name, shape=(2,), dtype=torch.float32, device=torch.device("cpu"))


def insertion(action: Any) -> Insertion:
    return insertion_at(action, site())


# An action, its context, the message; and a context one step away, in which the same action may act.
CASES: dict[str, tuple[Any, Context, str, Context]] = {
    "kind": (
        AVERAGE,
        Context(site("error")),
        r"error:w: AllReduce\(\) does not apply to this kind of site; it applies to gradient\n",
        Context(site()),
    ),
    "skip_after_update": (
        CHECK,
        Context(site("param")),
        r"param:w: CheckFinite\(on_failure='skip'\) sees what the update has made, and skipping cannot undo that",
        Context(site("step")),
    ),
    "tensor_type": (
        P.ClipByNorm(1.0),
        Context(site("step"), tensor_type="NestedTensor"),
        "step:w: the tensor is a NestedTensor; actions at step sites take plain tensors and DTensors only",
        Context(site("step"), tensor_type="DTensor"),
    ),
    "shards": (
        P.ClipByNorm(1.0),
        Context(site("step"), num_ranks=4, needs_whole="it reads all"),
        r"ClipByNorm\(1.0\) acts on a gradient that is spread over 4 ranks, and .* by itself: it reads all\.",
        Context(site("step"), num_ranks=4),
    ),
    "group_in_a_loop": (
        P.WeighLosses(P.PCGrad()),
        Context(site("error"), is_in_loop=True),
        "acts on several gradients together, and each iteration of this loop has one by itself",
        Context(site("error")),
    ),
    "weighed_behind": (
        TOGETHER,
        Context(site("error"), is_weighed_behind=True),
        "is given an error that several losses share, and WeighLosses takes the gradient of each loss apart there",
        Context(site("error")),
    ),
    "weighed_behind_a_loop": (
        P.ClipByNorm(1.0),
        Context(site("error"), is_in_loop=True, is_weighed_behind=True),
        "acts inside a loop, and WeighLosses needs the gradient of each loss behind it",
        Context(site("error"), is_in_loop=True),
    ),
    "examples_of_dtensor": (
        EXAMPLES,
        Context(site(), tensor_type="DTensor"),
        "needs a plain gradient, and this one is a DTensor",
        Context(site()),
    ),
    "examples_of_part": (
        EXAMPLES,
        Context(site(), is_part=True),
        "needs the whole model in one graph",
        Context(site()),
    ),
    "losses_of_dtensor": (
        LOSSES,
        Context(site(), tensor_type="DTensor"),
        r"gradient:w: WeighLosses\(UPGrad\(\)\) needs a plain gradient, and this one is a DTensor",
        Context(site()),
    ),
    "losses_of_part": (
        LOSSES,
        Context(site("error"), is_part=True),
        "needs the backward of all losses in one graph, and this graph is a part of it",
        Context(site("error")),
    ),
    "losses_in_data_parallelism": (
        LOSSES,
        Context(site("error"), around=DDP, num_ranks=2),
        "under DistributedDataParallel with 2 processes: each process would weigh by the gradients of its own examples",
        Context(site("error")),
    ),
    "states_of_part": (
        CLIP,
        Context(site(), is_part=True, has_states=True),
        "remembers norms of group 'default', and this graph computes only a part",
        Context(site(), is_part=True),
    ),
    "values_of_two_graphs": (
        TOGETHER,
        Context(site("error"), elsewhere="the regions 'a' and 'b'"),
        "is called once in each graph, and its group 'default' has values of the regions 'a' and 'b'",
        Context(site("error")),
    ),
    "two_graphs": (
        CLIP,
        Context(site(), elsewhere="the regions 'a' and 'b'"),
        "its group has gradients of the regions 'a' and 'b'. Let it act on all",
        Context(site()),
    ),
    "group_outside": (
        CLIP,
        Context(site(), outside="head.weight"),
        "gradients of a region and 'head.weight', which is used outside of all regions",
        Context(site()),
    ),
    "average_outside": (
        AVERAGE,
        Context(site(), outside="head.weight"),
        "its pattern has 'head.weight' too, which is used outside of all regions",
        Context(site()),
    ),
    "averaged_twice": (
        AVERAGE,
        Context(site(), around=DDP, num_ranks=2),
        r"AllReduce\(\) inside DistributedDataParallel: gradients would be averaged twice",
        Context(site(), around=FSDP, num_ranks=2),
    ),
    "clipped_apart": (
        CLIP,
        Context(site(), around=FSDP, num_ranks=2),
        r"under FSDP2 \(fully_shard\) with 2 processes: each process would clip its own gradients",
        Context(site(), around=FSDP, num_ranks=2, is_averaged=True),
    ),
    "several_errors": (
        LOSSES,
        Context(site("error"), sites="error:w, error:v"),
        r"WeighLosses\(UPGrad\(\)\) is at error:w, error:v: a group is at gradient sites, or at one error site\. Take",
        Context(site("error")),
    ),
    "average_behind": (
        LOSSES,
        Context(site(), later_average="AllReduce()"),
        r"gradient:w: WeighLosses\(UPGrad\(\)\) comes before AllReduce\(\), so that each process would weigh by",
        Context(site()),
    ),
    "examples_beside": (
        LOSSES,
        Context(site(), of_examples="ClipPerExample(1.0)"),
        r"WeighLosses\(UPGrad\(\)\) and ClipPerExample\(1\.0\) are in one policy: a gradient has terms of losses",
        Context(site()),
    ),
    "group_before": (
        LOSSES,
        Context(site(), earlier_group="ClipByGlobalNorm(1.0)"),
        r"comes after ClipByGlobalNorm\(1\.0\), a group action, which acts on the weighted sums: list it after",
        Context(site()),
    ),
    "weighed_twice": (
        LOSSES,
        Context(site("error"), is_weighed_upstream=True),
        "error:w: the losses are weighed here, and once more upstream by another group; keep one of them",
        Context(site("error")),
    ),
    "two_devices": (
        LOSSES,
        Context(site(), first_device="cuda:0 (gradient:v)"),
        r"has gradients on cuda:0 \(gradient:v\) and on cpu; give the sites of each device a group of their own",
        Context(site()),
    ),
    "no_loss": (
        LOSSES,
        Context(site(), returned="(2, 3)."),
        r"\(\)\) needs the losses of the model: .* the shapes \(2, 3\)\. Compute the losses in the model's forward and",
        Context(site()),
    ),
    "a_loss_of_each_example": (
        LOSSES,
        Context(site(), too_many_losses="100 losses, each of which would have a backward of its own; at most 64"),
        "the model returns 100 losses, .*; at most 64 can be. Is this the loss of each example",
        Context(site()),
    ),
    "random_op": (
        LOSSES,
        Context(site(), op_of_all_losses="aten.rand (net.py:3) draws random numbers"),
        r"needs the gradient of each loss by itself, and the op aten.rand \(net.py:3\) draws random numbers\. Leave",
        Context(site()),
    ),
    "two_forms": (
        P.Store("int8"),
        Context(site("saved"), forms="Store('int8'), Recompute()"),
        r"saved:w: Store\('int8'\), Recompute\(\): one tensor is kept in one form, which Offload\(\) may keep",
        Context(site("saved")),
    ),
    "not_again": (
        P.Recompute(),
        Context(site("saved"), not_repeatable="draws random numbers, and would draw others"),
        r"saved:w: Recompute\(\): the op  draws random numbers, and would draw others; leave this site out",
        Context(site("saved")),
    ),
    "rules": (
        torch.sign,
        Context(site("backward"), rules="the tensor function f, the tensor function g"),
        "backward:w: the tensor function f, the tensor function g: an op has one backward; let the rules match diff",
        Context(site("backward")),
    ),
    "no_backward": (
        torch.sign,
        Context(site("backward"), no_backward="writes in place into a view"),
        "cannot replace the backward of this op, which writes in place into a view. Let the pattern leave it out",
        Context(site("backward")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal(case: str) -> None:
    action, context, message, near = CASES[case]

    with pytest.raises(PolicyError, match=message):
        refuse(insertion_at(action, context.site), context)
    refuse(insertion_at(action, near.site), near)
    refuse(insertion(torch.sign), Context(site()))


def test_each_row_has_a_case() -> None:
    given = [(insertion_at(action, context.site), context) for action, context, *_ in CASES.values()]
    rows = [next(n for n, row in enumerate(REFUSALS) if row.holds(*one)) for one in given]

    assert rows == list(range(len(REFUSALS)))


def test_observed_losses_are_refused_as_weighed_ones() -> None:
    observe, part = P.Observe("loss_norms"), Context(site("error"), is_part=True)

    with pytest.raises(PolicyError, match=r"Observe\('loss_norms'\) needs the backward of all losses in one graph"):
        refuse(insertion_at(observe, part.site), part)
    refuse(insertion(P.Observe("norm")), Context(site("error"), is_part=True))


@pytest.mark.parametrize(
    "action",
    [P.ClipByNorm(1.0), P.CheckFinite("skip"), torch.sign, EXAMPLES, P.Observe("loss_norms")],
    ids=["clip", "check", "function", "clip of examples", "figures of losses"],
)
def test_single_sites_and_examples_are_clipped_in_each_process(action: Any) -> None:
    for around in (DDP, FSDP):
        refuse(insertion(action), Context(site(), around=around, num_ranks=2))


def edit(name: str, action: Any) -> Edit:
    return Edit(site(name=name), action, (), insertion=insertion(action))


def test_average_before_a_clip_counts_at_its_own_site() -> None:
    averaged = [edit("a", AVERAGE), edit("a", CLIP)]
    alone = edit("b", CLIP)

    refuse_in_data_parallelism(averaged, FSDP, 2)
    with pytest.raises(PolicyError, match="each process would clip its own"):
        refuse_in_data_parallelism([*averaged, alone], FSDP, 2)


def test_one_group_in_two_regions() -> None:
    known: dict[Any, str] = {}

    for action in (CLIP, P.ClipByNorm(1.0), P.ClipByGlobalNorm(1.0)):
        refuse_group_in_regions(known, insertion(action), site(), "layers.0")
    refuse_group_in_regions(known, insertion(P.ClipByGlobalNorm(1.0, group="other")), site(), "layers.1")
    with pytest.raises(PolicyError, match=r"the regions 'layers\.0' and 'layers\.1'"):
        refuse_group_in_regions(known, insertion(CLIP), site(), "layers.1")


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        ([("a", CHECK)], "a"),
        ([("a", AVERAGE), ("a", CHECK)], None),
        ([("a", CHECK), ("a", AVERAGE)], "a"),
        ([("a", AVERAGE), ("b", CHECK)], "b"),
        ([("a", P.CheckFinite("raise")), ("a", CLIP)], None),
    ],
)
def test_check_on_one_rank_alone(edits: list[tuple[str, Any]], wanted: str | None) -> None:
    found = lone_skip([edit(name, action) for name, action in edits])

    assert (found and found.name) == wanted


def test_warnings_of_groups_in_parts() -> None:
    found = warnings_in_parts("again", ["group:a", "group:b", "group:c"], {"group:b"})

    assert list(found) == ["again 0", "again 1"]
    assert found["again 0"].startswith("group:a, group:c: the model was called several times before this backward; the")
    assert found["again 1"].startswith("group:b: the model was called several times before this backward; noise is")
    assert warnings_in_parts("accumulated", [], {"group:b"}) == {}

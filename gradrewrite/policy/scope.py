"""Scope of actions: one table of refusals by context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gradrewrite.errors import PolicyError
from gradrewrite.ir.edits import Edit
from gradrewrite.ir.reports import OnFailure
from gradrewrite.policy.actions import describe, is_action
from gradrewrite.policy.insertions import (
    AverageOverRanks,
    ExampleEffect,
    GroupEffect,
    Insertion,
    JudgeUpdate,
    MeasureTensor,
    PerExample,
    ReplaceGroup,
    ReplaceTensor,
    WeighLossGradients,
)
from gradrewrite.sites import Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def averages(insertion: Insertion) -> bool:
    """Return whether an insertion averages gradients over processes."""
    return isinstance(insertion.effect, AverageOverRanks)


def processes_of(insertion: Insertion) -> ProcessGroup | None:
    """Return the processes of an average; None for any other insertion."""
    return insertion.effect.processes() if isinstance(insertion.effect, AverageOverRanks) else None


def needs_examples(insertion: Insertion) -> bool:
    """Return whether an insertion needs the gradient of each example."""
    effect = insertion.effect
    reads_examples = isinstance(effect, ReplaceTensor) and isinstance(effect.reads, PerExample)
    return reads_examples or isinstance(effect, ExampleEffect)


def needs_losses(insertion: Insertion) -> bool:
    """Return whether an insertion needs the gradient of each loss."""
    effect = insertion.effect
    return _weighs(insertion) or (isinstance(effect, ReplaceTensor) and effect.reads == "losses")


def _weighs(insertion: Insertion) -> bool:
    return isinstance(insertion.effect, WeighLossGradients)


def _weighs_by_gradients(insertion: Insertion) -> bool:
    """Whether each process would have weights of its own."""
    return isinstance(insertion.effect, WeighLossGradients) and not insertion.effect.is_constant


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings of an action."""

    site: Site
    tensor_type: str = "Tensor"  # class name of the gradient
    is_part: bool = False  # the graph computes only a part of the model's gradients
    has_states: bool = False  # the action keeps states from step to step
    elsewhere: str = ""  # the graphs that have gradients of its group, as text, if they are several
    outside: str = ""  # parameters that are used outside of all regions; ``""`` for a site of a graph
    around: str = ""  # name of the data parallelism around the model
    num_ranks: int = 1  # of ``around``; for a gradient that is spread over ranks the number of those
    is_averaged: bool = False  # another action at the site averages its gradient over processes
    needs_whole: str = ""  # the reason why it needs a whole gradient, where that is spread over ranks
    # Of the weighing of losses: other actions and sites, as text.
    sites: str = ""  # those of its group, where one of several is an error site
    later_average: str = ""  # an average of several processes that comes behind it
    of_examples: str = ""  # an action in the policy that needs the gradient of each example
    earlier_group: str = ""  # a group action that comes before it
    is_weighed_upstream: bool = False
    first_device: str = ""  # that of its first gradient, where it is another one
    # Of the losses of a model.
    returned: str = ""  # the shapes of its outputs, where none is a loss
    too_many_losses: str = ""
    op_of_all_losses: str = ""  # one that cannot run for each, and why
    # Of saved tensors.
    forms: str = ""  # all actions there, where they contradict each other
    not_repeatable: str = ""  # the reason why its op cannot be computed again
    # Of the backward of an op.
    rules: str = ""  # all rules there, if they are several
    no_backward: str = ""  # why its backward cannot be replaced
    is_in_loop: bool = False  # it is inserted into the body of a loop
    is_weighed_behind: bool = False  # of such an error: what it leads to is the gradient of each of several losses


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the table."""

    holds: Callable[[Insertion, Context], bool]
    # The message; ``{action}``, ``{group}``, ``{allowed}`` (kinds of site) and the fields of ``{at}`` (the context) are
    # filled in.
    text: str
    code: str = "action-not-allowed"  # of the error


_SPANS = (
    "{action} at gradient sites acts on the gradients of one graph, but its group has gradients of %s. Let it act on "
    'all of them before the update: gr.on("step:*", {action}) in the policy, and gr.guard(optimizer, model)'
)

# The first row that holds is raised as a PolicyError.
REFUSALS = (
    Limit(
        lambda insertion, at: at.site.kind not in insertion.kinds,
        "{at.site}: {action} does not apply to this kind of site; it applies to {allowed}",
    ),
    Limit(
        lambda insertion, at: at.site.traits.after_update and _check_of(insertion) == "skip",
        "{at.site}: {action} sees what the update has made, and skipping cannot undo that. Check the gradients before "
        'it: gr.on("step:*", {action}); here CheckFinite takes "record", "warn" or "raise"',
    ),
    Limit(
        lambda insertion, at: at.site.traits.at_guard and at.tensor_type not in ("Tensor", "DTensor"),
        "{at.site}: the tensor is a {at.tensor_type}; actions at {at.site.kind} sites take plain tensors and DTensors "
        "only",
    ),
    Limit(
        lambda insertion, at: bool(at.needs_whole),
        "{at.site}: {action} acts on a gradient that is spread over {at.num_ranks} ranks, and each rank would act on "
        "its part by itself: {at.needs_whole}. There may be elementwise actions and functions, CheckFinite, Observe, "
        "and ClipByGlobalNorm (in a group of its own for one gradient)",
        "several-processes",
    ),
    Limit(
        lambda insertion, at: at.is_in_loop and isinstance(insertion.effect, GroupEffect),
        "{at.site}: {action} acts on several gradients together, and each iteration of this loop has one by itself. "
        "Let it act at the output of the module, or at gradients",
        "inside-a-loop",
    ),
    Limit(
        lambda insertion, at: at.is_weighed_behind and not at.is_in_loop,
        "{at.site}: {action} is given an error that several losses share, and WeighLosses takes the gradient of each "
        "loss apart there. Let it act at gradient sites, in a group behind WeighLosses",
        "losses",
    ),
    Limit(
        lambda insertion, at: at.is_weighed_behind,
        "{at.site}: {action} acts inside a loop, and WeighLosses needs the gradient of each loss behind it: each loss "
        "would have a loop of its own. Let it act at the output of the module",
        "inside-a-loop",
    ),
    Limit(
        lambda insertion, at: needs_examples(insertion) and at.tensor_type == "DTensor",
        "{at.site}: {action} needs a plain gradient, and this one is a DTensor",
        "per-example",
    ),
    Limit(
        lambda insertion, at: needs_examples(insertion) and at.is_part,
        "{at.site}: {action} needs the whole model in one graph, and this graph is a part of it (a graph break, or "
        "regions). Remove the break (fullgraph=True finds it), and transform the model without regions",
        "per-example",
    ),
    Limit(
        lambda insertion, at: needs_losses(insertion) and at.tensor_type == "DTensor",
        "{at.site}: {action} needs a plain gradient, and this one is a DTensor",
        "losses",
    ),
    Limit(
        lambda insertion, at: (
            (needs_losses(insertion) and at.is_part) or (_weighs(insertion) and bool(at.elsewhere or at.outside))
        ),
        "{at.site}: {action} needs the backward of all losses in one graph, and this graph is a part of it (a graph "
        "break, or regions=, which FSDP2 needs). Remove the break (fullgraph=True finds it), and transform the model "
        "without regions",
        "losses",
    ),
    Limit(
        lambda insertion, at: _weighs_by_gradients(insertion) and bool(at.around),
        "{action} at {at.site} under {at.around} with {at.num_ranks} processes: each process would weigh by the "
        "gradients of its own examples, with weights of its own. Let the graph average the gradient of each loss "
        'instead, without {at.around}: gr.on("gradient:*", gr.passes.AllReduce()) first, WeighLosses at gradient sites '
        "behind it",
        "losses",
    ),
    Limit(
        lambda insertion, at: insertion.group is not None and at.is_part and at.has_states,
        "{action} at {at.site} remembers norms of group {group!r}, and this graph computes only a part of the "
        "gradients of the model: each graph would add the norm of its part to one memory. Take step sites "
        '(gr.on("step:*", ...) with gr.guard), which have all gradients; or remove the graph break (fullgraph=True '
        "finds it) or regions=",
        "groups-in-parts",
    ),
    Limit(
        lambda insertion, at: isinstance(insertion.effect, ReplaceGroup) and bool(at.elsewhere) and _of_values(at),
        "{at.site}: {action} is called once in each graph, and its group {group!r} has values of {at.elsewhere}. Give "
        "those of each graph a group of their own, or compile them in one (another regions=, no graph break)",
        "groups-in-parts",
    ),
    Limit(
        lambda insertion, at: insertion.group is not None and bool(at.elsewhere),
        _SPANS % "{at.elsewhere}",
        "groups-in-parts",
    ),
    Limit(
        lambda insertion, at: insertion.group is not None and bool(at.outside),
        _SPANS % "a region and {at.outside!r}, which is used outside of all regions",
        "groups-in-parts",
    ),
    Limit(
        lambda insertion, at: averages(insertion) and bool(at.outside),
        "{action} averages gradients in the graphs of regions, but its pattern has {at.outside!r} too, which is used "
        "outside of all regions, and whose gradient would stay that of each process. Take a pattern of parameters "
        "inside of regions, if the others are averaged elsewhere; or compile the model as a whole, without regions; or "
        "take out the action, and let DistributedDataParallel(gr.transform(model, policy, regions=...)) average all of "
        "them",
        "several-processes",
    ),
    Limit(
        lambda insertion, at: averages(insertion) and at.around.startswith("DistributedDataParallel"),
        "{action} inside {at.around}: gradients would be averaged twice. Take out the action and let {at.around} "
        "average them, or call the rewritten model itself, without it",
        "several-processes",
    ),
    Limit(
        # A clip of examples acts on the gradients of a process's own examples, before any average.
        lambda insertion, at: (
            insertion.group is not None
            and bool(at.around)
            and not (at.is_averaged or needs_examples(insertion) or _weighs(insertion))
        ),
        "{action} at gradient sites under {at.around} with {at.num_ranks} processes: each process would clip its own "
        "gradients, before they are reduced, and not the gradients that the optimizer uses. Clip those, at step sites: "
        'gr.transform(model, gr.on("step:*", {action})) and gr.guard(optimizer, model). Or reduce in the graph before '
        "the clip, without {at.around}: put gr.passes.AllReduce() at the gradient sites before it. Clips of single "
        "sites act in each process by itself and are allowed",
        "several-processes",
    ),
    Limit(
        lambda insertion, at: bool(at.sites),
        "{action} is at {at.sites}: a group is at gradient sites, or at one error site. Take gradients "
        '(gr.on("gradient:trunk.*", ...)), or one error site (with #call if its module is called more than once), or '
        "give each a group of its own",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.later_average) and _weighs_by_gradients(insertion),
        "{at.site}: {action} comes before {at.later_average}, so that each process would weigh by the gradients of its "
        "own examples, with weights of its own. Weigh at gradient sites, behind the average: list AllReduce first; the "
        "gradient of each loss is then averaged",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.of_examples),
        "{at.site}: {action} and {at.of_examples} are in one policy: a gradient has terms of losses, or of examples. "
        "Take one of them, or compute the figures of examples in a run of their own",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.earlier_group),
        "{at.site}: {action} comes after {at.earlier_group}, a group action, which acts on the weighted sums: list it "
        "after WeighLosses",
        "losses",
    ),
    Limit(
        lambda insertion, at: at.is_weighed_upstream,
        "{at.site}: the losses are weighed here, and once more upstream by another group; keep one of them",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.first_device),
        "{at.site}: {action} has gradients on {at.first_device} and on {at.site.device}; give the sites of each device "
        "a group of their own",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.returned),
        "{at.site}: {action} needs the losses of the model: differentiable scalar outputs (in a tuple, list or "
        "mapping), or one tensor [K] with all of them, of a fixed size; the differentiable outputs have the shapes "
        "{at.returned} Compute the losses in the model's forward and return them; to evaluate a model that returns "
        "none then, call it under torch.no_grad()",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.too_many_losses),
        "{at.site}: {action}: the model returns {at.too_many_losses} can be. Is this the loss of each example? Return "
        "its mean",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.op_of_all_losses),
        "{at.site}: {action} needs the gradient of each loss by itself, and the op {at.op_of_all_losses}. Leave out "
        "the parameters behind it, or take an error site between this op and the losses",
        "losses",
    ),
    Limit(
        lambda insertion, at: bool(at.forms),
        "{at.site}: {at.forms}: one tensor is kept in one form, which Offload() may keep in host memory, or it is "
        "computed again; let the rules match different sites",
        "saved-tensor",
    ),
    Limit(
        lambda insertion, at: bool(at.not_repeatable),
        "{at.site}: {action}: the op {at.site.op} {at.not_repeatable}; leave this site out, or let Store keep it in a "
        "narrower form",
        "saved-tensor",
    ),
    Limit(
        lambda insertion, at: bool(at.rules),
        "{at.site}: {at.rules}: an op has one backward; let the rules match different sites, or make them one "
        "function. KeepZeros may stand beside a function, which is then given the backward that it has mended",
        "backward-of-an-op",
    ),
    Limit(
        lambda insertion, at: bool(at.no_backward),
        "{at.site}: {action} cannot replace the backward of this op, which {at.no_backward}. Let the pattern leave it "
        "out, or act at its error site",
        "backward-of-an-op",
    ),
)

OUTSIDE_OF_REGIONS = (
    "the policy answers at the gradients of {}, which are used outside of all regions: there is no gradient site, or "
    'one that has a part of the gradient. Use gr.on("step:*", action) with gr.guard'
)

_IN_PARTS = {
    "accumulated": "gradients of an earlier backward were still in .grad; ",
    "again": "the model was called several times before this backward; ",
}
_CLIP_IN_PARTS = {
    "accumulated": "the action of the group acts on the gradients of each backward by itself, not on their sum",
    "again": "the action of the group acts on the gradients of each call by itself, not on their sum",
}
_NOISE_IN_PARTS = {
    "accumulated": "noise is added in each backward, so that the variance of the noise in their sum is as many times "
    "larger. Compute each step in one backward, and clear the gradients after it",
    "again": "noise is added for each call, so that the variance of the noise in the gradients is as many times "
    "larger. Call the model once for each backward",
}


def refuse(insertion: Insertion, context: Context) -> None:
    """Raise PolicyError where an action may not act."""
    for limit in REFUSALS:
        if limit.holds(insertion, context):
            allowed, action = ", ".join(sorted(insertion.kinds)), describe(insertion.action)
            name = insertion.effect.group if isinstance(insertion.effect, GroupEffect) else None
            raise PolicyError(
                limit.text.format(action=action, group=name, allowed=allowed, at=context), code=limit.code
            )


def refuse_in_data_parallelism(edits: Iterable[Edit], around: str, num_ranks: int) -> None:
    """Raise PolicyError for an edit that may not act inside a data parallelism of several ranks."""
    insertions = [(edit.site, edit.insertion) for edit in edits]
    own = [(s, i) for s, i in insertions if s.kind == "gradient" or _weighs(i)]
    averaged = {site for site, insertion in own if averages(insertion)}
    for site, insertion in own:
        refuse(insertion, Context(site, around=around, num_ranks=num_ranks, is_averaged=site in averaged))


def refuse_group_in_regions(known: dict[Hashable, str], insertion: Insertion, site: Site, region: str) -> None:
    """Raise PolicyError for a group with gradients in two regions; ``known``, by group, gets the first one."""
    _refuse_in_several(known, insertion, site, region, "regions")


def refuse_group_in_parts(known: dict[Hashable, str], insertion: Insertion, site: Site, frame: str) -> None:
    """Raise PolicyError for a function of values in several graphs."""
    if isinstance(insertion.effect, ReplaceGroup):
        _refuse_in_several(known, insertion, site, frame, "graphs")


def _refuse_in_several(known: dict[Hashable, str], insertion: Insertion, site: Site, name: str, what: str) -> None:
    group = insertion.group
    if group is not None:
        first = known.setdefault(group, name)
        refuse(insertion, Context(site, elsewhere="" if first == name else f"the {what} {first!r} and {name!r}"))


def _of_values(at: Context) -> bool:
    return at.site.traits.of_value


def warnings_in_parts(
    cause: Literal["accumulated", "again"], groups: Sequence[str], noisy: Collection[str]
) -> dict[str, str]:
    """Return the warnings for groups that act on a part of a step, by a key for each; noisy ones add noise.

    The cause: gradients of an earlier backward, or several calls of the model in one.
    """
    clips, noises = ([group for group in groups if (group in noisy) == is_noisy] for is_noisy in (False, True))
    texts = ((clips, _CLIP_IN_PARTS[cause]), (noises, _NOISE_IN_PARTS[cause]))
    return {
        f"{cause} {number}": f"{', '.join(named)}: {_IN_PARTS[cause]}{text}"
        for number, (named, text) in enumerate(texts)
        if named
    }


def bounds_one_gradient(edit: Edit) -> bool:
    """Return whether an edit clips the gradient of one parameter, in each backward by itself."""
    insertion = edit.insertion
    effect = insertion.effect
    is_clip = isinstance(effect, ReplaceTensor) and effect.reads in ("", "value") and is_action(insertion.action)
    return edit.site.kind == "gradient" and is_clip and insertion.has_units


def warning_of_bounds(edits: Sequence[Edit]) -> str:
    """Return the warning for clips of single gradients that are accumulated."""
    first, *others = edits
    sites = f"{first.site}" + (f" and {len(others)} more gradients" if others else "")
    action = describe(first.action)
    return (
        f"{sites}: {_IN_PARTS['accumulated']}{action} acts on the gradient of each backward by itself, so that their "
        f"sum may have as many times the bound. To clip the sum, write gr.on('step:*', {action}) and "
        "gr.guard(optimizer, model)"
    )


def skips_updates(insertion: Insertion) -> bool:
    """Return whether an insertion may skip updates."""
    return isinstance(insertion.effect, JudgeUpdate) or _check_of(insertion) == "skip"


def _check_of(insertion: Insertion) -> OnFailure | None:
    """Return the consequence of a failed check; None for any other insertion."""
    return insertion.effect.fails if isinstance(insertion.effect, MeasureTensor) else None


def lone_skip(edits: Iterable[Edit]) -> Site | None:
    """Return the site of the first check that skips with no average before it: it may fail on one rank alone."""
    averaged = set()
    for edit in edits:  # in their order at each site
        if averages(edit.insertion):
            averaged.add(edit.site)
        elif _check_of(edit.insertion) == "skip" and edit.site not in averaged:
            return edit.site
    return None

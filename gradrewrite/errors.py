"""Errors and warnings of gradrewrite.

RewriteError
 +-- PolicyError                  what a policy answered cannot be done
 |    +-- UnsupportedGradientError   (TypeError) a sparse or complex gradient under an action
 +-- CallbackError                a tensor function breaks its contract
 +-- NoSuchSiteError              (LookupError) a rule matches nothing
 +-- GraphBreakError              (RuntimeError) the tracer cannot see the whole model
 +-- NotRewrittenError            (RuntimeError) torch would run the plain model
 +-- TraceError                   (RuntimeError) the model fails while it is traced, or has no backward
 +-- NonFiniteError               (ArithmeticError) a finite check failed
 +-- SpikeError                   (ArithmeticError) too many updates in a row were skipped, the last for a spike

RewriteWarning (UserWarning)      something differs from what the policy says, and is said once

The last line of a message is ``help: gradrewrite help code``, an entry of ``docs/troubleshooting.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradrewrite.sites import ARROW, Site


class RewriteError(Exception):
    """Base of every error that gradrewrite raises on purpose.

    Attributes:
        code: The entry of ``docs/troubleshooting.md`` on this message, its last line: ``help: gradrewrite help code``.
    """

    code = ""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        if code:
            self.code = code

    def __str__(self) -> str:
        return f"{self.text}\nhelp: gradrewrite help {self.code}"

    @property
    def text(self) -> str:
        """The message without its last line."""
        return super().__str__()


class PolicyError(RewriteError):
    """An answer of a policy that is no action, or not allowed at its site."""

    code = "policy-answer"


class UnsupportedGradientError(PolicyError, TypeError):
    """An action at a gradient with an unsupported layout or dtype."""

    code = "unsupported-gradient"


class CallbackError(RewriteError):
    """A tensor function breaks its contract; ``__cause__`` is the original error, if any."""

    code = "tensor-function"


class NoSuchSiteError(RewriteError, LookupError):
    """A rule matches no site of any graph of the model.

    Attributes:
        pattern: The pattern of the rule.
        known: Names of the nearest sites, the best first.
        source: ``file:line`` where the rule was made; ``""`` if not known.
    """

    code = "no-such-site"

    def __init__(self, pattern: str, known: Sequence[str], source: str = "") -> None:
        super().__init__(pattern, tuple(known), source)
        self.pattern = pattern
        self.known = tuple(known)
        self.source = source

    @property
    def text(self) -> str:
        """See ``RewriteError``."""
        nearest = ", ".join(self.known) or "there are none"
        traced = "gr.transform(model, []).trace(...)"
        if self.pattern.startswith("step:"):
            traced = "gr.transform(model, []).trace_step(optimizer)"
        everything = f"{traced}.sites has all of them"
        if self.pattern.startswith("saved:"):
            everything = "gr.transform(model, []).memory(...) lists what is kept"
        _, arrow, used_by = self.pattern.partition(ARROW)
        if arrow:
            end, meant = ("*/*", "op") if "/" in used_by else ("*", "outermost module")
            listed = f'gr.transform(model, [], uses=["*->{end}", "*/*->{end}"])'
            everything = f"{listed}.trace(...).sites has all uses, each with its {meant}"
        start = f"{self.source}: " if self.source else ""
        text = f"{start}no site matches {self.pattern!r}; nearest sites: {nearest} ({everything})"
        kind, _, name = self.pattern.rpartition(":")
        written = self.known if kind else [known.partition(":")[2] for known in self.known]
        if self.pattern in written and not set(name).isdisjoint("[*?#"):  # one is named as the pattern is written
            start = f"{kind + ':'!r} + " if kind else ""
            text += f". [ * ? # are signs of patterns: write gr.on({start}gr.escape({name!r}), ...)"
        return text


class GraphBreakError(RewriteError, RuntimeError):
    """The tracer cannot see the whole model, so the policy could not reach all of it."""

    code = "graph-break"


class NotRewrittenError(RewriteError, RuntimeError):
    """Torch would run the plain model where a policy was asked for."""

    code = "not-rewritten"


class TraceError(RewriteError, RuntimeError):
    """The model cannot be traced as it is called, or there is no backward graph to rewrite or to show."""

    code = "not-traced"


@dataclass(frozen=True, slots=True)
class PrecedingSite:
    """A site executed just before the failure.

    Attributes:
        site: The site.
        smallest: Its smallest absolute value.
        largest: Its largest absolute value.
    """

    site: Site
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor read by an op.

    Attributes:
        name: Of the input, parameter or buffer, or ``module/op`` of the op that made it.
        dtype: ``float32``.
        shape: Its sizes.
        low: Its lowest finite element; NaN if there is none.
        high: Its highest finite element; NaN if there is none.
        zeros: How many elements are 0.
        nonfinite: How many elements are NaN or infinite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    zeros: int
    nonfinite: int

    def __str__(self) -> str:
        """Name, dtype, shape and range in one line."""
        parts = [f"{self.low:.4g} to {self.high:.4g}"] if not math.isnan(self.low) else []
        parts += [f"{self.zeros} zeros"] if self.zeros else []
        parts += [f"{self.nonfinite} not finite"] if self.nonfinite else []
        return f"{self.name} ({self.dtype}, {list(self.shape)}, {', '.join(parts) or 'empty'})"


@dataclass(frozen=True, slots=True)
class Story:
    """The reason, place, cover and remedy of a non-finite value.

    Attributes:
        why: What the op was given: ``log of -0.135``; ``""`` if it is not known.
        advice: What to change; ``""`` if it is not known.
        facts: What the batch has to do with it: ``column 3 of x is up to 701, 294 times the others``.
        operands: The tensors that the op read.
        indices: Where the elements are: ``rows 4 to 7, positions 15 to 19``; ``""`` if it is not known.
        rows: Their numbers along the dimension of the batch; ``()`` if they are not known.
        parameter: The first parameter whose gradient it reaches; ``""`` if none.
        cover: Ops that hide it from the loss, each with its line.
        roots: Up to three further ops that made non-finite values independently, each with its line and reason.
        is_overflow: Whether finite values became too large, which is mostly no fault of the op.
        is_tried: Whether the step was finite with the advice followed at the op.
    """

    why: str = ""
    advice: str = ""
    facts: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    indices: str = ""
    rows: tuple[int, ...] = ()
    parameter: str = ""
    cover: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    is_overflow: bool = False
    is_tried: bool = False

    def __str__(self) -> str:
        """The parts behind the line of the op; ``""`` if nothing is known."""
        parts = [self.why]
        parts[0] += f" at {self.indices}" if self.why and self.indices else self.indices
        parts += self.facts
        parts += [f"it reaches {self.parameter} first"] if self.parameter else []
        parts += (
            [f"the loss does not show it: {' and '.join(self.cover)} hide{'s' * (len(self.cover) == 1)} it"]
            if self.cover
            else []
        )
        parts += [f"also, independent of it: {'; '.join(self.roots)}"] if self.roots else []
        return "; ".join(part for part in parts if part)


class NonFiniteError(RewriteError, ArithmeticError):
    """A finite check failed.

    Attributes:
        site: The first site that is not finite, in the order of execution (forward first, then backward).
        percent: Share of its elements that are NaN or infinite, in percent; NaN where it is not known.
        op: ``module/op`` of the op that made it: for an activation the op whose result it is, for an error or a
            gradient the op through whose backward it came; ``""`` if no op did (see ``cause``) or it is not known.
        source: That op's line, ``file:line "code"``.
        is_inner: Whether the backward of that op made it, in a gradient that the forward computes of itself by
            ``torch.autograd.grad``.
        step: Number of the backward, from 0.
        update: Number of the model's update, from 0, as in ``gr.state_dict``; without a guard, of its backward.
        micro_batch: Number of the backward among those of its update, from 0; None where an update has one.
        others: Every other site that is not finite, in the order of execution.
        window: Sites executed just before, the nearest last, with their absolute values.
        cause: What came into the model already non-finite (an input, a parameter, the loss); ``""`` if an op made it.
        note: Why the answer rests on the failed checks alone; ``""`` if every op was looked at.
        rank: The rank of the process that found it, where there are several; else None.
        in_backward: Whether the backward of that op made it. None is what the site tells.
        is_from_outside: Whether code made it that was not traced.
        story: Why and where the op made it, and what mends it; its parts are attributes of the error too.
    """

    code = "non-finite"

    def __init__(
        self,
        site: Site,
        *,
        percent: float = math.nan,
        op: str = "",
        source: str = "",
        step: int = 0,
        others: Sequence[Site] = (),
        window: Sequence[PrecedingSite] = (),
        cause: str = "",
        note: str = "",
        rank: int | None = None,
        is_inner: bool = False,
        in_backward: bool | None = None,
        is_from_outside: bool = False,
        story: Story = Story(),  # frozen
    ) -> None:
        super().__init__(site)
        self.site = site
        self.is_inner = is_inner
        self.percent = percent
        self.op = op
        self.source = source
        self.step = step
        self.others = tuple(others)
        self.window = tuple(window)
        self.cause = cause
        self.note = note
        self.rank = rank
        self.is_from_outside = is_from_outside
        self.story = story
        self.in_backward = is_inner or not site.traits.in_forward if in_backward is None else in_backward
        self.update = step
        self.micro_batch: int | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that the op read."""
        return self.story.operands

    @property
    def indices(self) -> str:
        """The places of the elements: ``rows 4 to 7, positions 15 to 19``."""
        return self.story.indices

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the elements along the dimension of the batch."""
        return self.story.rows

    @property
    def parameter(self) -> str:
        """The first parameter with a gradient that it reaches."""
        return self.story.parameter

    @property
    def cover(self) -> tuple[str, ...]:
        """The ops that hide it from the loss."""
        return self.story.cover

    @property
    def roots(self) -> tuple[str, ...]:
        """Up to three further ops that made such values independently."""
        return self.story.roots

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.site,), dict(self.__dict__)

    @property
    def told(self) -> str:
        """Site, op, line and story, without the sites before and behind."""
        sizes = self.site.shape
        number = math.prod(s for s in sizes if s is not None) if None not in sizes else None
        elements = f"of {number} elements" if number is not None else "of the elements"
        share = f"{self.percent:.3g} %" if not math.isnan(self.percent) else "some"
        where = "" if self.rank is None else f" on rank {self.rank}"
        parts = [
            f"{step_text(self.update, self.micro_batch)}{where}: first non-finite: {self.site}, {share} {elements}"
        ]
        if self.op:
            made = (
                f"made by {'the backward of ' * self.in_backward}{self.op}{', ' + self.source if self.source else ''}"
            )
            parts.append(made + ", in a gradient inside of the forward" * self.is_inner)
        if self.cause:
            parts.append(self.cause)
        text = ", ".join(parts)
        return f"{text}: {self.story}" if str(self.story) else text

    @property
    def text(self) -> str:
        """See ``RewriteError``."""
        text = self.with_window
        if self.others:
            count = len(self.others)
            text += f"; {count} other sites were not finite" if count > 1 else "; 1 other site was not finite"
        text = f"{text}; {self.note}" if self.note else text
        return f"{text}\nWhat to change: {self.story.advice}" if self.story.advice else text

    @property
    def with_window(self) -> str:
        """Site, op, line and story, and the sites executed before."""
        before = ", ".join(f"{w.site} ({w.smallest:.3g} to {w.largest:.3g})" for w in self.window)
        return f"{self.told}; just before it, in absolute values: {before}" if before else self.told


class SpikeError(RewriteError, ArithmeticError):
    """Too many updates in a row were skipped, the last one by ``SkipSpikes``.

    Attributes:
        address: The figure, ``record@site``: ``total_norm@step:group:default``.
        figure: Its value.
        limit: The largest value that would have been accepted; infinite where only NaN and infinity skip.
        step: Number of the last step of the monitor, from 0.
        update: Number of the last update, from 0, as in ``gr.state_dict``.
        note: How many updates were skipped.
    """

    code = "spikes"

    def __init__(
        self, address: str, *, figure: float, limit: float, step: int = 0, update: int | None = None, note: str = ""
    ) -> None:
        super().__init__(address)
        self.address, self.figure, self.limit, self.step, self.note = address, figure, limit, step, note
        self.update = step if update is None else update

    def __reduce__(self) -> tuple[object, ...]:
        return _spike_error, (self.address, self.figure, self.limit, self.step, self.update, self.note)

    @property
    def text(self) -> str:
        """See ``RewriteError``."""
        found = f"step {self.update}: {spike_text(self.address, self.figure, self.limit)}"
        return f"{found}; {self.note}" if self.note else found


def _spike_error(address: str, figure: float, limit: float, step: int, update: int, note: str) -> SpikeError:
    return SpikeError(address, figure=figure, limit=limit, step=step, update=update, note=note)


def step_text(update: int, micro_batch: int | None) -> str:
    """Return a step in words: ``step 33``, ``update 33, micro-batch 3``."""
    return f"step {update}" if micro_batch is None else f"update {update}, micro-batch {micro_batch + 1}"


def spike_text(address: str, figure: float, limit: float) -> str:
    """Return a sentence on a figure above its limit, or non-finite."""
    if not math.isfinite(figure):
        return f"{address} was {figure:g}, which is not finite"
    return f"{address} was {figure:.6g}, above its limit {limit:.6g}"


class RewriteWarning(UserWarning):
    """Warning of a difference from the policy; each is issued once."""

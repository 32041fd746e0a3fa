"""Causes of training faults, as values, and the table of their kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from gradrewrite.errors import Operand

Kind = Literal[
    "exploding", "vanishing", "non-finite op", "learning rate", "dead", "saturated", "spike", "bad batch", "one layer",
    "large error", "underflow", "clip too low", "non-finite", "faulty input", "faulty loss", "faulty learning rate",
    "stored error", "clip acts always", "clip sets the values", "stalls", "diverges", "not judged", "healthy",
    "too short", "no records", "learns", "untrained", "unknown",
    "no gradient", "trained unasked", "not in the optimizer", "optimizer setting", "constant vanishes",
    "update", "loss scale",
]  # fmt: skip
Outcome = Literal["learns", "stalls", "diverges", "non-finite", "untrained", "unknown"]
Gravity = Literal["sound", "mild", "grave", "first"]  # mild: it leaves room for other causes; first: it began before


@dataclass(frozen=True, slots=True)
class KindOfCause:
    """The traits of a kind of cause."""

    headline: str = ""  # two or three words; ``""``: the kind itself
    gravity: Gravity = "grave"
    advice: str = ""  # of all causes of the kind; ``""`` where it depends on figures
    is_non_finite: bool = False
    overflows: bool = False  # values grow until they are not finite
    is_told_once: bool = False  # it is found at one site, whatever that is
    told_as: Kind | None = None  # the kind of finding that says the same, and as much of it


KINDS: Mapping[Kind, KindOfCause] = {
    "no records": KindOfCause("Nothing to judge", "sound"),
    "too short": KindOfCause("Nothing wrong so far", "sound"),
    "healthy": KindOfCause(gravity="sound"),
    "clip acts always": KindOfCause("Clipping bound too low", "mild"),
    "clip too low": KindOfCause(told_as="clip acts always"),
    "exploding": KindOfCause("Exploding gradients", overflows=True, is_told_once=True),
    "one layer": KindOfCause("One layer explodes", overflows=True),
    "learning rate": KindOfCause(
        "Learning rate too high",
        advice="Lower the learning rate, for a start to a tenth, or warm it up.",
        overflows=True,
    ),
    "spike": KindOfCause(advice="Look at that step.", overflows=True),
    "bad batch": KindOfCause(advice="Look at that batch, and filter or normalize such values.", overflows=True),
    "vanishing": KindOfCause("Vanishing gradients", is_told_once=True),
    "underflow": KindOfCause(advice="Scale the loss (torch.amp.GradScaler), or use bfloat16."),
    "stalls": KindOfCause("It does not learn"),
    "diverges": KindOfCause("It diverges"),
    "dead": KindOfCause(
        "Dead units",
        "mild",
        "Lower the learning rate, start from another bias, or use a unit that leaks (LeakyReLU, GELU).",
        is_told_once=True,
    ),
    "saturated": KindOfCause(
        "Saturated units",
        "mild",
        "Start from smaller weights, or normalize what comes in: a saturated unit passes almost no error on.",
        is_told_once=True,
    ),
    "stored error": KindOfCause(
        "Imprecise stored tensors",
        "mild",
        'Keep them in a wider form, Store("bfloat16"), or leave them out of the rule.',
    ),
    "non-finite op": KindOfCause(
        "Values are not finite",
        advice="Mend that line (a clamp, an epsilon, an empty mask).",
        told_as="non-finite",
    ),
    "non-finite": KindOfCause("Values are not finite", is_non_finite=True, is_told_once=True),
    "faulty input": KindOfCause(
        gravity="first",
        advice="Look at the batch of that step, and filter such examples before they reach the model.",
        is_non_finite=True,
    ),
    "faulty loss": KindOfCause(
        advice="Look at the loss function: log, sqrt, a division by zero or by an empty mask; clamp its argument.",
        is_non_finite=True,
    ),
    "faulty learning rate": KindOfCause(
        gravity="first",
        advice="Look at the schedule at that step: a division by zero, or a step beyond its end.",
        is_non_finite=True,
    ),
    "no gradient": KindOfCause("Parameters without a gradient"),
    "trained unasked": KindOfCause("Parameters are trained unasked"),
    "not in the optimizer": KindOfCause("Parameters that the optimizer does not hold"),
    "optimizer setting": KindOfCause("A setting of the optimizer"),
    "constant vanishes": KindOfCause("A constant vanishes in its dtype"),
    "update": KindOfCause("A faulty update"),
    "loss scale": KindOfCause("A loss scale"),
}


def traits_of(kind: Kind) -> KindOfCause:
    """Return the traits of a kind."""
    return KINDS.get(kind, KindOfCause())


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a fault in a run.

    Attributes:
        kind: One of ``Kind``; ``KINDS`` has the traits of those with any.
        site: Where it begins, or is worst, as ``error:wh``, with the number of the call where only that one is meant;
            ``""`` if nowhere.
        source: The line of the forward behind it, ``file:line "code"``; ``""`` if it is not known.
        factor: By how much an error grows per layer or call on its way back, or a value exceeds its usual size, or a
            clip leaves; NaN where there is none.
        step: The first step concerned; -1 if none.
        text: One or two sentences with the figures.
        advice: What to change.
        rules: Code of the rules against it; empty where a policy is no remedy, or the run has it.
        operands: Of a non-finite value the tensors that its op read.
        indices: Where its elements are: ``rows 4 to 7, positions 15 to 19``; ``""`` if it is not known.
        parameter: The first parameter whose gradient it reaches; ``""`` if none.
        cover: Ops that hide it from the loss, each with its line.
        roots: Up to three further ops that made such values independently.
        is_explained: Whether what the op was given explains the value; an overflow is explained by what grew.
        figures: Every number that it rests on, by name.
        key: Text of the key of the record that tells the clip from others at the site; ``""`` if it is on no clip.
    """

    kind: Kind
    site: str
    source: str = ""
    factor: float = math.nan
    step: int = -1
    text: str = ""
    advice: str = ""
    rules: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    indices: str = ""
    parameter: str = ""
    cover: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    is_explained: bool = False
    figures: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    key: str = field(default="", repr=False, compare=False)

    @property
    def suggestion(self) -> str:
        """The advice, then the rules, one a line."""
        return "\n".join((self.advice, *self.rules))

    def to_json(self) -> dict[str, object]:
        """Return strict JSON, with NaN and infinities as strings."""
        return {
            "kind": self.kind,
            "site": self.site,
            "source": self.source,
            "factor": self.factor if math.isfinite(self.factor) else None,
            "step": self.step,
            "text": self.text,
            "figures": {name: value if math.isfinite(value) else words(value) for name, value in self.figures.items()},
            "suggestion": self.suggestion,
            **self._story(),
        }

    def _story(self) -> dict[str, object]:
        """Return the parts of a non-finite value's story."""
        operands = [
            {k: words(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(one).items()}
            for one in self.operands
        ]
        found: dict[str, object] = {"operands": operands, "indices": self.indices, "parameter": self.parameter}
        found |= {"cover": list(self.cover), "roots": list(self.roots), "is_explained": self.is_explained}
        return {name: value for name, value in found.items() if value}


def words(value: float) -> str:
    """A number for a reader."""
    if math.isfinite(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")

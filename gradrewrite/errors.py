"""Every error and warning that gradrewrite raises on purpose.

RewriteError
 +-- PolicyError                  what a policy answered cannot be done
 |    +-- UnsupportedGradientError   (TypeError) a sparse or complex gradient under an action
 +-- CallbackError                a tensor function breaks its contract
 +-- NoSuchSiteError              (LookupError) a rule matches nothing
 +-- GraphBreakError              (RuntimeError) the tracer cannot see the whole model
 +-- NotRewrittenError            (RuntimeError) torch would run the plain model
 +-- TraceError                   (RuntimeError) there is no backward to show

RewriteWarning (UserWarning)      something differs from what the policy says, and is said once
"""

from __future__ import annotations

from collections.abc import Sequence


class RewriteError(Exception):
    """Base of every error that gradrewrite raises on purpose."""


class PolicyError(RewriteError):
    """What a policy answered cannot be done at that site."""


class UnsupportedGradientError(PolicyError, TypeError):
    """An action stands at a gradient whose layout or dtype it cannot work on."""


class CallbackError(RewriteError):
    """A tensor function breaks its contract; ``__cause__`` is the original error, if any."""


class NoSuchSiteError(RewriteError, LookupError):
    """A rule matches no site of any graph of the model.

    Attributes:
        pattern: The pattern of the rule.
        known: Names of the nearest sites, the best first.
    """

    def __init__(self, pattern: str, known: Sequence[str]) -> None:
        """Keep the pattern and the names; both are shown."""
        super().__init__(pattern, tuple(known))
        self.pattern = pattern
        self.known = tuple(known)

    def __str__(self) -> str:
        """Name the pattern, the nearest sites, and where all of them are listed."""
        nearest = ", ".join(self.known) or "there are none"
        return f"no site matches {self.pattern!r}; nearest sites: {nearest} (print(model.trace(...)) lists all of them)"


class GraphBreakError(RewriteError, RuntimeError):
    """The tracer cannot see the whole model, so the policy could not reach all of it."""


class NotRewrittenError(RewriteError, RuntimeError):
    """Torch would run the plain model where a policy was asked for."""


class TraceError(RewriteError, RuntimeError):
    """There is no backward graph to rewrite or to show."""


class RewriteWarning(UserWarning):
    """Something differs from what the policy says; each is said once."""

"""Values of other sites in an eager run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from gradrewrite._compat import autograd
from gradrewrite.errors import PolicyError
from gradrewrite.ir.values import ModuleCall
from gradrewrite.policy.calls import filled, nearest_sites
from gradrewrite.policy.insertions import Insertion
from gradrewrite.sites import Pattern, Site

Calls = Sequence[ModuleCall]


@dataclass
class EagerReads:
    """The values that functions may read, as they are computed."""

    parameters: dict[str, Tensor] = field(default_factory=dict)  # and buffers, as the forward found them
    _calls: dict[Site, Calls] = field(default_factory=dict)  # of every site
    _values: dict[Site, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> EagerReads:
        """Begin a forward: copy parameters and buffers."""
        tensors = (*model.named_parameters(), *model.named_buffers())
        return cls({name: tensor.detach().clone() for name, tensor in tensors})

    def expect(self, site: Site, calls: Calls = ()) -> None:
        """Note a site, with the module calls around its value."""
        if site.iteration is not None:
            calls = ((site.name.rpartition("/")[0], str(site.iteration), ""),)
        self._calls[site] = calls

    def note(self, site: Site, value: Tensor) -> None:
        """Note the value of a site."""
        # What torch.vmap has made is no value outside of it.
        if not autograd.is_transformed(value):
            self._values[site] = value.detach()

    def arguments(self, insertion: Insertion, site: Site) -> list[Tensor]:
        """Return the values that an action reads at a site.

        PolicyError for one that autograd computes later.
        """
        texts = [filled(text, site, self._calls[site]) for _, text in insertion.read_patterns]
        return [self._one(Pattern.parse(text), site) for text in texts]

    def _one(self, pattern: Pattern, site: Site) -> Tensor:
        if pattern.kind == "param":
            return next(t for name, t in self.parameters.items() if pattern.matches(Site("param", name)))
        found = [other for other in self._calls if pattern.matches(other) and other != site]
        around = [(one, self._calls[one]) for one in found]
        other = found[nearest_sites(site, self._calls[site], around)[0]]
        if other not in self._values:
            raise PolicyError(
                f"{site}: it reads {other}, which eager autograd computes later; assert_matches_eager compares what "
                "reads earlier gradients. Compare without it",
                code="reads",
            )
        return self._values[other]

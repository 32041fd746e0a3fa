"""Normal noise in a backward, from a generator of its own: the random numbers of the model stay as they are."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("gradrewrite", "FRAGMENT")
_LIBRARY.define("normal_like(Tensor like, Tensor source) -> Tensor")


class NoiseSource:
    """Generators of normal noise, one on each device, made when it is first needed.

    Attributes:
        seed: Their seed.
        number: A live tensor with which a graph names the source at run time.
    """

    def __init__(self, seed: int) -> None:
        """Seed the generators."""
        self.seed = seed
        self.number = torch.tensor([id(self)])  # on the CPU, so that reading it waits for nothing
        self._generators: dict[torch.device, torch.Generator] = {}
        _SOURCES[id(self)] = self

    def __repr__(self) -> str:
        """The same for all sources of one seed."""
        return f"NoiseSource({self.seed})"

    def __reduce__(self) -> tuple[type[NoiseSource], tuple[int]]:
        """A copy begins again, with the same seed."""
        return NoiseSource, (self.seed,)

    def normal_like(self, like: Tensor) -> Tensor:
        """Draw a standard normal tensor of the shape, dtype and device of another, inside or outside of a graph."""
        return torch.ops.gradrewrite.normal_like.default(like, self.number)  # type: ignore[no-any-return]

    def draw(self, like: Tensor) -> Tensor:
        """Draw it now."""
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device).manual_seed(self.seed)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, generator=generator, dtype=dtype, device=like.device).to(like.dtype)


_SOURCES: weakref.WeakValueDictionary[int, NoiseSource] = weakref.WeakValueDictionary()


def _draw(like: Tensor, source: Tensor) -> Tensor:
    return _SOURCES[int(source)].draw(like)


def _fake(like: Tensor, source: Tensor) -> Tensor:
    return like.new_empty(like.shape)


_LIBRARY.impl("normal_like", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::normal_like", _fake, lib=_LIBRARY)

"""Normal noise in a backward, from a generator of its own: the random numbers of the model stay as they are."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradrewrite._compat import dynamo, fake_tensors
from gradrewrite.numerics.library import LIBRARY

LIBRARY.define("normal_like(Tensor like, Tensor source) -> Tensor")
_in_compilations = itertools.count(1)
_numbers = itertools.count()


def draw_seed() -> int:
    """Draw a seed from torch's default generator on the CPU.

    The generator moves on by one number. So it follows from ``torch.manual_seed``, and no two are equal. While a graph
    is compiled the generator does not move: torch takes back what is drawn there, and a count is added instead.
    """
    with fake_tensors.outside_of_transforms():
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return drawn + next(_in_compilations) if dynamo.is_compiling() else drawn


class NoiseSource:
    """Generators of normal noise, one on each device, made when it is first needed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.is_silent = False  # it draws zeros: another process adds the noise to the gradient that both average
        number = next(_numbers)
        with fake_tensors.outside_of_transforms():  # a policy may make it while a graph is traced
            # Names the source in a graph at run time, as a live tensor; on the CPU, so that reading waits for nothing.
            self.number = torch.tensor([number], device="cpu")
        self._generators: dict[torch.device, torch.Generator] = {}
        _sources[number] = self

    def __repr__(self) -> str:
        """A text without numbers: compiled code is the same for all sources."""
        return "NoiseSource()"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the source; the copy goes on with the next numbers."""
        return NoiseSource, (self.seed,), self.state_dict()

    def __setstate__(self, state: Mapping[str, Tensor]) -> None:
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of each generator, by its device."""
        return {str(device): generator.get_state() for device, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let generators go on from a state; those that are not in it stay as they are."""
        for name, value in state.items():
            self._on(torch.device(name)).set_state(value.cpu())

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def normal_like(self, like: Tensor) -> Tensor:
        """Draw a standard normal tensor of the shape, dtype and device of another, inside or outside of a graph."""
        return torch.ops.gradrewrite.normal_like.default(like, self.number)  # type: ignore[no-any-return]

    def draw(self, like: Tensor) -> Tensor:
        """Draw it now."""
        if self.is_silent:
            return torch.zeros_like(like)
        generator = self._on(like.device)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, generator=generator, dtype=dtype, device=like.device).to(like.dtype)


_sources: weakref.WeakValueDictionary[int, NoiseSource] = weakref.WeakValueDictionary()


def _draw(like: Tensor, source: Tensor) -> Tensor:
    return _sources[int(source)].draw(like)


def _fake(like: Tensor, source: Tensor) -> Tensor:
    return like.new_empty(like.shape)


LIBRARY.impl("normal_like", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::normal_like", _fake, lib=LIBRARY)

"""Copies of saved tensors in host memory, made and fetched beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradrewrite._compat import fake_tensors
from gradrewrite.numerics.library import LIBRARY

LIBRARY.define("offload(Tensor x) -> Tensor")
LIBRARY.define("fetch(Tensor copied, Device device, Tensor[] upcoming) -> Tensor")


@dataclass
class _Copies:
    """The copies from and to one device."""

    stream: torch.cuda.Stream
    # Copies that were begun, with the event of their end, by the memory of their source.
    begun: dict[int, tuple[Tensor, torch.cuda.Event, fake_tensors.StorageWeakRef]] = field(default_factory=dict)

    def begin(self, copied: Tensor, device: torch.device) -> None:
        """Begin to fetch a copy, if that was not begun; the copy to host memory comes before it on the same stream."""
        key = copied.untyped_storage().data_ptr()
        if key in self.begun and not self.begun[key][2].expired():
            return
        with torch.cuda.stream(self.stream):
            fetched = torch.empty_like(copied, device=device)
            fetched.copy_(copied, non_blocking=True)
            end = self.stream.record_event()
        self.begun[key] = fetched, end, fake_tensors.StorageWeakRef(copied.untyped_storage())

    def take(self, copied: Tensor) -> Tensor:
        """Return a fetched copy; the stream of the computation waits for it."""
        fetched, end, _ = self.begun.pop(copied.untyped_storage().data_ptr())
        current = torch.cuda.current_stream(fetched.device)
        current.wait_event(end)
        fetched.record_stream(current)
        return fetched

    def forget_lost(self) -> None:
        """Forget the copies for a backward that ended before it read them."""
        self.begun = {key: own for key, own in self.begun.items() if not own[2].expired()}


_copies: dict[torch.device, _Copies] = {}  # one stream a device, for as long as the process lives


def _copies_of(device: torch.device) -> _Copies:
    if device not in _copies:
        _copies[device] = _Copies(torch.cuda.Stream(device))
    return _copies[device]


def _offload(x: Tensor) -> Tensor:
    if x.device.type != "cuda":  # of a simulated device, which has no streams
        return x.clone()
    copies = _copies_of(x.device)
    copies.forget_lost()
    copies.stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(copies.stream):
        copied = torch.empty_like(x, device="cpu", pin_memory=True)
        copied.copy_(x, non_blocking=True)
    x.record_stream(copies.stream)
    return copied


def _fetch(copied: Tensor, device: torch.device, upcoming: Sequence[Tensor]) -> Tensor:
    if not copied.is_pinned():
        return copied.to(device, copy=True)
    copies = _copies_of(device)
    for one in (copied, *upcoming):
        copies.begin(one, device)
    return copies.take(copied)


LIBRARY.impl("offload", _offload, "CompositeExplicitAutograd")
LIBRARY.impl("fetch", _fetch, "CompositeExplicitAutograd")
torch.library.register_fake("gradrewrite::offload", lambda x: torch.empty_like(x, device="cpu"), lib=LIBRARY)
torch.library.register_fake(
    "gradrewrite::fetch", lambda copied, device, _: torch.empty_like(copied, device=device), lib=LIBRARY
)

offload = torch.ops.gradrewrite.offload.default
fetch = torch.ops.gradrewrite.fetch.default

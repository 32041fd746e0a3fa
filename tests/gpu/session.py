"""The simulated GPU of this process, registered when this module is imported: before torch is."""

from __future__ import annotations

from gpu import shim
from gpu.shim import Mode


def reason_to_skip(mode: Mode) -> str:
    """The reason why a test that needs this mode cannot run in this process."""
    if GPU is not None:
        return f"needs {shim.VARIABLE}={mode}, and it is {GPU}"
    return _WHY_NOT or f"no GPU; {shim.VARIABLE}={mode} simulates one"


def _start() -> tuple[Mode | None, str]:
    mode = shim.wanted()
    if mode is None:
        return None, ""
    why_not = shim.why_not()
    if why_not:
        return None, why_not
    shim.register(mode)
    return mode, ""


GPU, _WHY_NOT = _start()

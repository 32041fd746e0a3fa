"""Detection of monitors without importing their module, which imports the compiler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from gradrewrite.monitoring.monitor import Monitor


def is_monitor(source: Any) -> TypeGuard[Monitor]:
    """Whether an object is a ``Monitor``; where that class was never imported there is none."""
    module = sys.modules.get("gradrewrite.monitoring.monitor")
    return module is not None and isinstance(source, module.Monitor)

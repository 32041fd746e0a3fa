"""The namespace of our operators."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("gradrewrite", "DEF")

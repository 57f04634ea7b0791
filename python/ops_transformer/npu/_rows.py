"""What the functions of permuting share: the rows of any ids, and which of them exist."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..moe import moe_routing


def routing(ids: Tensor, experts: Optional[int] = None) -> Any:
    """The Routing of ids [n, K], which may be any numbers from 0 on."""
    if experts is None:
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0:
            raise ValueError(f"an expert's id is {low}, must not be negative")
        experts = high + 1
    return moe_routing(ids, experts)


def within(rows: Tensor, count: int) -> Tensor:
    """Rows that exist; -1 for those from `count` on."""
    return rows.masked_fill(rows >= count, -1)

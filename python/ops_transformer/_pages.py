"""How the rows of a cache's pages lie: the core's table (opst/page_layout.h), for shapes of any arrays."""

from __future__ import annotations

import functools
import math
from typing import Any, Sequence

from . import _core


@functools.lru_cache(maxsize=None)
def page_format(layout: str, dtype: str, side: str) -> Any:
    """rank, dims, heads_dim and panel_rows of a cache's "key" or "value" pages."""
    return _core.page_format(layout, dtype, side)


def row_elements(layout: str, dtype: str, side: str, shape: Sequence[int]) -> int:
    """head_dim or value_head_dim of pages of this shape."""
    return math.prod(shape[3:]) // page_format(layout, dtype, side).panel_rows

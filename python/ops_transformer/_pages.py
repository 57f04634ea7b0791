"""How the rows of a cache's pages lie: the core's table (opst/page_layout.h), for shapes of any arrays."""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, NamedTuple, Sequence, Tuple

from . import _core


@functools.lru_cache(maxsize=None)
def page_format(layout: str, dtype: str, side: str) -> Any:
    """rank, dims, heads_dim, panel_rows and numbers (in an element) of a cache's "key" or "value" pages."""
    return _core.page_format(layout, dtype, side)


def row_elements(layout: str, dtype: str, side: str, shape: Sequence[int]) -> int:
    """head_dim or value_head_dim of pages of this shape."""
    pages = page_format(layout, dtype, side)
    return math.prod(shape[3:]) // pages.panel_rows * pages.numbers


class ScaledPages(NamedTuple):
    """Keys or values of a cache of integers: what new_pages gives for "int8", "int8_offset", "int4" and "int4_offset".

    A number is (q + offset) * scale. `pages` holds q: int8, or uint8 of two halves in -8..7, the lower first; scales and
    offsets are float32, one for each group of neighbours in a row (without offsets they are 0). In layout "norm" both are
    [num_blocks, block_size, num_kv_heads, groups], of any strides: the device's [num_blocks, num_kv_heads, block_size] is
    ScaledPages(pages, scales.transpose(0, 2, 1)[..., None]).
    """

    pages: Any
    scales: Any
    offsets: Any = None

    def blocks(self, first: int, count: int = 1) -> "ScaledPages":
        """`count` blocks from `first` on, as a view: what convert_pages takes to copy them."""
        return ScaledPages(*(None if array is None else array[first:first + count] for array in self))


def parts(key: Any, value: Any) -> Tuple[Any, ...]:
    """(key pages, value pages, key scales, value scales, key offsets, value offsets) of a cache in any format."""
    pairs = zip(*(side if isinstance(side, ScaledPages) else (side, None, None) for side in (key, value)))
    return tuple(array for pair in pairs for array in pair)


def paged_arrays(key: Any, value: Any) -> Dict[str, Any]:
    """The same by the names of an attention call's tensors; scales and offsets where there are any."""
    keys, values, *scales = parts(key, value)
    names = ("key_scales", "value_scales", "key_offsets", "value_offsets")
    return {"key": keys, "value": values, **{name: array for name, array in zip(names, scales) if array is not None}}

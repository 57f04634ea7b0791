"""A paged cache of keys and values, and attention that reads it.

    key_cache, value_cache = new_pages(num_blocks=100, block_size=32, num_kv_heads=8, head_dim=64)
    pool = BlockPool(100)
    blocks = pool.allocate(3)                                  # a sequence's pages
    slots = [blocks[p // 32] * 32 + p % 32 for p in range(70)]
    scatter_pa_kv_cache(key, value, slots, key_cache, value_cache)
    out = paged_attention(query, key_cache, value_cache, np.array([blocks]), [70])

A cache is two arrays over memory of yours, in float32, bfloat16, float16 or numbers of eight bits; or two ScaledPages,
integers with their scales, which every function here takes in the place of arrays (paged_attention reads int8 and numbers of
eight bits in layout "norm"). Token p of a sequence is row p % block_size of the block that its row of block_table names at
p / block_size; slot = block * block_size + row. Page layouts:

    "norm"     [num_blocks, block_size, num_kv_heads, head_dim], any strides
    "panel32"  what attention multiplies without packing: block_size a multiple of 32; new_pages has its
               shapes

Integer arguments are int32 or int64 arrays, or sequences of numbers. A call that is refused raises ValueError with the
argument, the place and both values, and has written nothing.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np

from . import _core
from ._arrays import empty, integer_array, integers, optional_output, optional_view, output, rank, view
from ._calls import public
from ._context import Context, default_context
from ._core import UNBOUNDED, View
from ._paged_attention import PagedAttention, PagedStatistics, paged_attention
from ._pages import ScaledPages, page_format, parts, row_elements

__all__ = ["UNBOUNDED", "BlockPool", "PagedAttention", "PagedStatistics", "ScaledPages", "convert_pages", "gather_pa_kv_cache",
           "new_pages", "paged_attention", "rope_scatter_pa_kv_cache", "scatter_pa_kv_cache"]


def _ids(blocks: Any) -> List[int]:
    array = integer_array(blocks, "blocks")
    if array.ndim != 1:
        raise ValueError(f"blocks must be one row of block ids, but its shape is {list(array.shape)}")
    return array.tolist()


class BlockPool(_core.BlockPool):
    """Which blocks of a paged cache are in use, and by how many sequences: block ids, not memory.

    A block has as many references as sequences hold it. A refused call raises and changes nothing.
    """

    @public
    def __init__(self, num_blocks: int) -> None:
        """Blocks 0 to num_blocks - 1, all free."""
        super().__init__(num_blocks)

    @property
    @public
    def num_blocks(self) -> int:
        return super().num_blocks

    @property
    @public
    def num_free(self) -> int:
        return super().num_free

    @public
    def references(self, block: int) -> int:
        """Sequences that hold a block; 0: it is free."""
        return super().references(block)

    @public
    def allocate(self, count: int = 1) -> List[int]:
        """Ids of free blocks, with one reference each. MemoryError where too few are free."""
        return super().allocate(count)

    @public
    def fork(self, blocks: Any) -> None:
        """One more reference each: another sequence has the same past."""
        super().fork(_ids(blocks))

    @public
    def free(self, blocks: Any) -> None:
        """One reference less each; a block without any is free again."""
        super().free(_ids(blocks))

    @public
    def prepare_write(self, block: int) -> Tuple[int, Optional[int]]:
        """(the block to write, the block whose rows must be copied into it first or None): a shared block gives way to a
        private one. MemoryError where none is free."""
        return super().prepare_write(block)


@public
def new_pages(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, value_head_dim: Optional[int] = None, *,
              dtype: str = "f32", layout: str = "norm", like: Any = None) -> Tuple[Any, Any]:
    """(key_cache, value_cache) of zeros; arrays of the kind of `like`, NumPy's without it. From 2 MiB on they lie in huge
    pages where the system has any: a decoded token reads all of its sequence's, and page tables beside them otherwise.

    dtype "f32", "bf16", "f16", "f8_e4m3" or "f8_e5m2" gives arrays (of eight bits: Tagged, or of ml_dtypes where that is
    imported). "int8" gives ScaledPages with a scale for each token and head, "int4" with one for each 32 numbers of a row
    (or for the row, where 32 does not divide it); "int8_offset" and "int4_offset" have offsets too.

    ValueError for sizes below 0; MemoryError for those that no memory holds; RuntimeError where the layout cannot hold such
    blocks.
    """
    sizes = (layout, dtype, num_blocks, block_size, num_kv_heads, head_dim,
             head_dim if value_head_dim is None else value_head_dim)
    shapes = _core.page_shapes(*sizes)
    if any(len(shape) == 0 for shape in shapes):  # what the core gives where 64 bits do not count the elements
        wide = head_dim if value_head_dim is None else max(head_dim, value_head_dim)
        raise MemoryError(f"num_blocks {num_blocks} * block_size {block_size} * num_kv_heads {num_kv_heads} * head_dim {wide} "
                          "elements are more than 64 bits count")
    stored, has_offsets = _core.kv_format(dtype)
    pages = tuple(_zeros(like, shape, stored) for shape in shapes)
    groups = _core.scale_shapes(*sizes)
    if not groups[0]:
        return pages
    return tuple(ScaledPages(q, _scales(like, shape, layout), _scales(like, shape, layout) if has_offsets else None)
                 for q, shape in zip(pages, groups))


def _scales(like: Any, shape: Any, layout: str) -> Any:
    """Those of a head lie next to each other, as attention reads them; in "norm" the shape does not say so."""
    if layout != "norm":
        return _zeros(like, shape, "f32")
    blocks, rows, heads, groups = shape
    return _zeros(like, (blocks, heads, rows, groups), "f32").swapaxes(1, 2)


def _zeros(like: Any, shape: Any, dtype: str) -> Any:
    array = empty(like, shape, dtype, huge=True)
    bits = getattr(array, "array", array)
    bits[...] = 0
    return array


def _scale_views(scales: Tuple[Any, ...], written: bool, prefix: str = "") -> List[Optional[View]]:
    take = optional_output if written else optional_view
    names = ("key_scales", "value_scales", "key_offsets", "value_offsets")
    return [take(array, prefix + name) for array, name in zip(scales, names)]


@public
def scatter_pa_kv_cache(key: Any, value: Any, slot_mapping: Any, key_cache: Any, value_cache: Any, *, layout: str = "norm",
                        scales_given: bool = False, context: Optional[Context] = None) -> None:
    """Writes new tokens into the cache, rounded once to its dtype, or as integers with their scales.

    key [tokens, num_kv_heads, head_dim], value [tokens, num_kv_heads, value_head_dim], slot_mapping [tokens]; slot -1
    skips a token, and of several tokens with one slot the last wins. Of ScaledPages each group of a row gets the scale that
    spans it, |x| / 127 of its largest number (int4: / 7); a group with a NaN or an infinity an infinite one, and is NaN when
    it is read. scales_given: the scales and offsets of the slots are there already, and are read.
    """
    keys, values, *scales = parts(key_cache, value_cache)
    _core.scatter_pa_kv_cache(context or default_context(), view(key), view(value), integers(slot_mapping),
                              output(keys, "key_cache"), output(values, "value_cache"), layout,
                              *_scale_views(scales, not scales_given), scales_given)


@public
def rope_scatter_pa_kv_cache(query: Any, key: Any, value: Any, cos: Any, sin: Any, slot_mapping: Any, key_cache: Any,
                             value_cache: Any, *, query_weight: Any = None, key_weight: Any = None, eps: float = 1e-5,
                             style: str = "halves", layout: str = "norm", scales_given: bool = False, out: Any = None,
                             context: Optional[Context] = None) -> Any:
    """What a decoder does between its projections and attention, in one pass; gives the turned queries.

        query_out = rope(rms_norm(query, query_weight))        cache[slot] = rope(rms_norm(key, key_weight)), value

    query [tokens, num_heads, head_dim]; key, value and slot_mapping as in scatter_pa_kv_cache; cos and sin float32
    [tokens, half] of rowwise.rope_table, 2 * half <= head_dim; weights float32 [head_dim], without one there is no norm.
    `out` may be query itself. Arithmetic in float32; for float32 the same bits as the operators one after the other.
    """
    tensor = view(query)
    if out is None:
        out = empty(query, tensor.shape, tensor.dtype)
    keys, values, *scales = parts(key_cache, value_cache)
    _core.rope_scatter_pa_kv_cache(
        context or default_context(), tensor, view(key), view(value), view(cos), view(sin), integers(slot_mapping),
        optional_view(query_weight), optional_view(key_weight), output(out), output(keys, "key_cache"),
        output(values, "value_cache"), layout, style, eps, *_scale_views(scales, not scales_given),
        scales_given)
    return out


@public
def convert_pages(from_key: Any, from_value: Any, to_key: Any, to_value: Any, *, from_layout: str = "norm",
                  to_layout: str = "panel32", context: Optional[Context] = None) -> None:
    """Copies all pages of a cache into another one of the same sizes, between layouts and formats, rounded once.

    Slices of dimension 0 (ScaledPages.blocks) copy some blocks, also within one pool: what BlockPool.prepare_write asks for.
    """
    keys, values, *scales = parts(from_key, from_value)
    new_keys, new_values, *new_scales = parts(to_key, to_value)
    _core.convert_pages(context or default_context(), view(keys, "from_key"), view(values, "from_value"),
                        output(new_keys, "to_key"), output(new_values, "to_value"), from_layout, to_layout,
                        *_scale_views(scales, False, "from_"), *_scale_views(new_scales, True, "to_"))


@public
def gather_pa_kv_cache(key_cache: Any, value_cache: Any, block_table: Any, kv_lengths: Any, *, seq_offset: Any = None,
                       head_indices: Any = None, cumulative_lengths: bool = False, zero_fill: bool = False,
                       layout: str = "norm", dtype: Optional[str] = None,
                       context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(key, value) [tokens, heads, ..] of sequences one after the other, read out of a cache in its page layout.

    dtype "f32", "bf16" or "f16" of the result; by default the cache's own, or float32 where that is none of these.

    block_table [batch, max_blocks]; kv_lengths [batch], or with cumulative_lengths [batch + 1] from 0 on. seq_offset
    [batch]: the position of each sequence's first token to read. head_indices: the KV heads to read, in this order.
    zero_fill: rows past the table or in no block of the cache become zeros, where they would be refused.
    """
    length_view = rank(integers(kv_lengths), kv_lengths, 1, "[batch], or with cumulative_lengths [batch + 1]")
    lengths = np.asarray(kv_lengths).astype(np.int64)
    tokens = int(lengths[-1] if lengths.size else 0) if cumulative_lengths else int(lengths.sum())
    key_pages, value_pages, *scales = parts(key_cache, value_cache)
    keys, values = view(key_pages, "key_cache"), view(value_pages, "value_cache")
    num_kv_heads, head_dim = _page_sizes(keys, key_pages, layout, "key")
    _, value_head_dim = _page_sizes(values, value_pages, layout, "value")
    head_view = None if head_indices is None else rank(integers(head_indices), head_indices, 1, "[heads]")
    heads = num_kv_heads if head_view is None else head_view.shape[0]
    # Lengths that make no sense are the core's to refuse.
    wide = ("f32", "bf16", "f16")
    if dtype is not None and dtype not in wide:
        raise ValueError(f"dtype is {dtype!r}, must be f32, bf16 or f16")
    dtype = dtype or (keys.dtype if keys.dtype in wide else "f32")
    key = empty(key_pages, (max(tokens, 0), heads, head_dim), dtype)
    value = empty(value_pages, (max(tokens, 0), heads, value_head_dim), dtype)
    _core.gather_pa_kv_cache(context or default_context(), keys, values, integers(block_table), length_view,
                             view(key), view(value), None if seq_offset is None else integers(seq_offset), head_view,
                             layout, cumulative_lengths, zero_fill, *_scale_views(scales, False))
    return key, value


def _page_sizes(pages: View, array: Any, layout: str, side: str) -> Tuple[int, int]:
    """num_kv_heads, and head_dim or value_head_dim, of the "key" or "value" pages in a layout."""
    pages_of = page_format(layout, pages.dtype, side)
    rank(pages, array, pages_of.rank, f"[{', '.join(pages_of.dims)}]")
    return pages.shape[pages_of.heads_dim], row_elements(layout, pages.dtype, side, pages.shape)

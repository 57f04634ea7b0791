"""A paged cache of keys and values, and attention that reads it.

key_cache is [num_blocks, block_size, num_kv_heads, head_dim], value_cache likewise; slot = block * block_size + row.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from . import _core
from ._arrays import default_context, empty, integers, view
from ._core import AttentionCall, Context

__all__ = ["gather_pa_kv_cache", "paged_attention", "scatter_pa_kv_cache"]


def scatter_pa_kv_cache(key: Any, value: Any, slot_mapping: Any, key_cache: Any, value_cache: Any, *,
                        context: Optional[Context] = None) -> None:
    """Writes the keys and values [tokens, num_kv_heads, ..] of new tokens into the cache; slot -1 skips a token."""
    _core.scatter_pa_kv_cache(context or default_context(), view(key), view(value), integers(slot_mapping),
                              view(key_cache), view(value_cache))


def gather_pa_kv_cache(key_cache: Any, value_cache: Any, block_table: Any, kv_lengths: Any, *, seq_offset: Any = None,
                       context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(key, value) [tokens, num_kv_heads, ..] of sequences one after the other, read out of the cache."""
    tokens = int(np.asarray(kv_lengths).sum())
    keys, values = view(key_cache), view(value_cache)
    key = empty(key_cache, (tokens, *keys.shape[2:]), keys.dtype)
    value = empty(value_cache, (tokens, *values.shape[2:]), values.dtype)
    _core.gather_pa_kv_cache(context or default_context(), keys, values, view(block_table), integers(kv_lengths), view(key),
                             view(value), None if seq_offset is None else integers(seq_offset))
    return key, value


def paged_attention(query: Any, key_cache: Any, value_cache: Any, block_table: Any, kv_lengths: Any, *,
                    scale_value: Optional[float] = None, causal: bool = True, context: Optional[Context] = None) -> Any:
    """Attention of query [batch, num_heads, query_len, head_dim] over cached keys.

    block_table int32 or int64 [batch, max_blocks]; kv_lengths [batch]: keys of each sequence. causal: the last query
    sees every key of its sequence, the one before it all but the last, and so on.
    """
    call = AttentionCall(view(query), view(key_cache), view(value_cache))
    call.block_table, call.kv_lengths = view(block_table), integers(kv_lengths)
    call.softmax_scale, call.causal = scale_value, causal
    tensor = view(query)
    out = empty(query, (*tensor.shape[:3], view(value_cache).shape[-1]), tensor.dtype)
    call.forward(context or default_context(), view(out))
    return out

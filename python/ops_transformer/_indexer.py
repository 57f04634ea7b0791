"""LightningIndexer: the keys that a query had better attend to."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _core
from ._arrays import empty, integers, rank, view, view_of_new
from ._calls import public
from ._context import Context, default_context

_VALUES = ("f32", "bf16", "f16")


class SelectedKeys(NamedTuple):
    """What lightning_indexer gives with return_values."""

    indices: Any  # int32 [batch, query_len, num_kv_heads, count], or [tokens, num_kv_heads, count]; best first, then -1
    values: Any  # their scores, of the same shape; -inf beside -1


@public
def lightning_indexer(query: Any, key: Any, weights: Any, count: int = 2048, *, causal: bool = True, block_table: Any = None,
                      kv_lengths: Any = None, query_lengths: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                      return_values: bool = False, values_dtype: str = "f32", block_q: int = 0, block_kv: int = 0,
                      context: Optional[Context] = None) -> Any:
    """The `count` keys with the largest scores among those that each query sees, best first:

        score[t, j] = sum over heads g of weights[t, g] * relu(query[t, g] . key[j])

    query [batch, num_heads, query_len, head_dim], key [batch, num_kv_heads, kv_len, head_dim], weights [batch, num_heads,
    query_len]; each float32, bfloat16 or float16, of any strides. num_heads is a multiple of num_kv_heads (mostly 1), and each
    key head has a selection of its own, by its query heads. Gives int32 [batch, query_len, num_kv_heads, count]: indices of the
    sequence's keys, then -1 where a query sees fewer. With return_values a SelectedKeys, whose values (values_dtype "f32",
    "bf16" or "f16") are the scores, -inf beside -1.

    causal (the default): the last query sees every key of its sequence, the one before it all but the last, and so on.
    kv_lengths and query_lengths [batch]: keys and queries of each sequence; queries beyond see no key. With cu_seqlens_q
    [batch + 1], where sequences begin, query is [tokens, num_heads, head_dim], weights [tokens, num_heads], and the result
    [tokens, num_kv_heads, count]; with cu_seqlens_k key is [tokens, num_kv_heads, head_dim]. With block_table [batch,
    max_blocks] and kv_lengths key is the pages of a cache, [num_blocks, block_size, num_kv_heads, head_dim] (layout "norm").

    Of equal scores the smaller index comes first; NaN scores come last. The same indices for any number of threads and any
    block_q, block_kv (queries of a task, keys of a tile; 0: the plan's choice). Sums are float32. Memory grows with queries
    times count, never with queries times keys. Torch tensors: there is no gradient, so one that requires gradients is refused.

    Source: DeepSeek-AI, "DeepSeek-V3.2-Exp" (2025), equation 1.
    """
    if count < 0:
        raise ValueError(f"count is {count}, must not be negative")
    if values_dtype not in _VALUES:
        raise ValueError(f'values_dtype is "{values_dtype}", must be one of {", ".join(_VALUES)}')
    varlen_q, varlen_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    q, k, w = view(query, "query"), view(key, "key"), view(weights, "weights")
    if varlen_q:
        rank(q, query, 3, "[tokens, num_heads, head_dim] with cu_seqlens_q")
    else:
        rank(q, query, 4, "[batch, num_heads, query_len, head_dim] without cu_seqlens_q")
    if block_table is not None:
        rank(k, key, 4, "[num_blocks, block_size, num_kv_heads, head_dim] with block_table")
    elif varlen_k:
        rank(k, key, 3, "[tokens, num_kv_heads, head_dim] with cu_seqlens_k")
    else:
        rank(k, key, 4, "[batch, num_kv_heads, kv_len, head_dim] without cu_seqlens_k and block_table")
    num_kv_heads = k.shape[1 if block_table is None else 2]
    rows = (q.shape[0],) if varlen_q else (q.shape[0], q.shape[2])
    lists = [None if values is None else integers(values, name)
             for name, values in (("block_table", block_table), ("kv_lengths", kv_lengths), ("query_lengths", query_lengths),
                                  ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))]
    indices = empty(query, (*rows, num_kv_heads, count), "i32")
    scores = empty(query, (*rows, num_kv_heads, count), values_dtype) if return_values else None
    _core.lightning_indexer(context or default_context(), q, k, w, view_of_new(indices),
                            None if scores is None else view_of_new(scores), *lists, causal, block_q, block_kv)
    return SelectedKeys(indices, scores) if return_values else indices

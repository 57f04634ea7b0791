"""SparseFlashAttention: attention of each query over the keys of its list."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ._arrays import empty, view_of_new
from ._attention import Options, check_word, forward
from ._attention_reader import read
from ._calls import public
from ._context import Context, default_context
from ._pages import ScaledPages, paged_arrays, row_elements


class SparseAttention(NamedTuple):
    """What sparse_flash_attention gives with return_lse."""

    out: Any
    softmax_lse: Any  # float32 (float64) [batch, num_heads, query_len], or [num_heads, tokens]; -inf where no key is seen


@public
def sparse_flash_attention(query: Any, key: Any, value: Any, sparse_indices: Any, *, sparse_block_size: int = 1,
                           softmax_scale: Optional[float] = None, causal: bool = True, query_rope: Any = None,
                           key_rope: Any = None, sinks: Any = None, softcap: float = 0.0, block_table: Any = None,
                           kv_lengths: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                           layout: str = "norm", return_lse: bool = False, block_q: int = 0, block_kv: int = 0,
                           context: Optional[Context] = None) -> Any:
    """Attention of query [batch, num_heads, query_len, head_dim] over the keys that a list of each query names:

        out[t] = softmax(softmax_scale * [query, query_rope][t] . [key, key_rope][j]) value[j],   j of sparse_indices[t]

    key [batch, num_kv_heads, kv_len, head_dim], value [batch, num_kv_heads, kv_len, value_head_dim], which may be the first
    columns of key (key[..., :n]: their rows are then read once). num_heads is a multiple of num_kv_heads. sparse_indices int32
    [batch, query_len, num_kv_heads, count]: blocks of sparse_block_size keys (1, or a power of two) in any order, then -1; what
    lightning_indexer gives. A block that does not exist, stands twice or behind a -1 is refused. The result is like query, as
    wide as a value; a query whose list shows nothing gets 0.

    query_rope [batch, num_heads, query_len, rope_dim] and key_rope [batch, num_kv_heads, kv_len, rope_dim]: further columns of
    both. softmax_scale: default 1 / sqrt(head_dim + rope_dim). causal (the default): the last query sees every key of its list,
    the one before it all but the last key of the sequence, and so on; listed keys beyond are left out. sinks float32
    [num_heads]: one more score of each row. softcap: bounds the scores by tanh. return_lse gives a SparseAttention.

    kv_lengths [batch]: keys of each sequence. With cu_seqlens_q [batch + 1], where sequences begin, query is [tokens, num_heads,
    head_dim] and sparse_indices [tokens, num_kv_heads, count]; with cu_seqlens_k key is [tokens, num_kv_heads, head_dim]. With
    block_table [batch, max_blocks] and kv_lengths key and value are pages in `layout`: [num_blocks, block_size, num_kv_heads,
    head_dim] ("norm"), or what kv_cache.new_pages gives, of eight bits and ScaledPages too; of "panel32" blocks of 32 keys
    or more, no ropes, and no value that is columns of key.

    Dtypes: float32, bfloat16, float16, float64; key may differ from query. The same bits for any number of threads. block_q,
    block_kv: query heads of a task, keys of a tile; 0: the plan's choice.

    Torch tensors: gradients for query, key, value, query_rope, key_rope and sinks, also through softmax_lse; beside pages of
    eight bits, of ScaledPages or of "panel32" nothing has any, and a tensor that requires them is refused. Of a value that is
    columns of key torch adds both gradients. What chose the keys has none: sparse_indices are integers.

    Source: DeepSeek-AI, "DeepSeek-V3.2-Exp" (2025), equation 2.
    """
    paged = block_table is not None
    check_word("page_layout", layout, "layout")
    if not paged and (layout != "norm" or isinstance(key, ScaledPages) or isinstance(value, ScaledPages)):
        given = f'layout is "{layout}"' if layout != "norm" else "key and value are ScaledPages"
        raise ValueError(f"{given}, but block_table is not given, which says whose pages are whose")
    arrays = dict(query=query, sparse_indices=sparse_indices, query_rope=query_rope, key_rope=key_rope, sinks=sinks,
                  block_table=block_table, kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                  **paged_arrays(key, value))
    operator, tensors = read({name: array for name, array in arrays.items() if array is not None})
    shape, varlen = tensors["query"].shape, cu_seqlens_q is not None
    if len(shape) != (3 if varlen else 4):
        form = "[tokens, num_heads, head_dim] with cu_seqlens_q" if varlen else \
               "[batch, num_heads, query_len, head_dim] without cu_seqlens_q"
        raise ValueError(f"query must be {form}, but its shape is {list(shape)}")
    if not tensors["value"].shape:
        raise ValueError("value must be like key, but its shape is []")
    given = dict(softmax_scale=softmax_scale, causal=causal, softcap=softcap, block_q=block_q, block_kv=block_kv,
                 alignment="bottom_right", sparse_block_size=sparse_block_size, page_layout=layout)
    numbers = {name: number for name, number in given.items() if number != Options._field_defaults[name]}
    if operator is not None:
        out, lse, *_ = operator.attend(tensors, numbers, order="TND" if varlen else "BNSD", context=context)
        return SparseAttention(out, lse) if return_lse else out
    pages = tensors["value"]
    width = row_elements(layout, pages.dtype, "value", pages.shape) if paged else pages.shape[-1]
    out = empty(query, (*shape[:-1], width), tensors["query"].dtype)
    rows = (shape[1], shape[0]) if varlen else shape[:3]
    lse = empty(query, rows, "f64" if tensors["query"].dtype == "f64" else "f32") if return_lse else None
    forward(tensors, numbers, context or default_context(), view_of_new(out), None if lse is None else view_of_new(lse))
    return SparseAttention(out, lse) if return_lse else out

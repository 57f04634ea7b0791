"""Attention that reads a paged cache; see kv_cache for the cache itself."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

from ._arrays import empty, output, view_of_new
from ._attention import Options, check_dropout, forward, split_options
from ._attention_reader import read, starts
from ._calls import public
from ._context import Context, default_context
from ._core import UNBOUNDED
from ._layouts import from_heads_first, heads_first, shape_of_out
from ._pages import paged_arrays, row_elements

__all__ = ["PagedAttention", "PagedStatistics", "paged_attention"]

# Further keywords, beside those of the signature.
_OPTIONS = ("alibi_form", "alibi_key_start", "alibi_query_start", "alibi_slopes", "alignment", "bias", "bias_scale", "block_kv",
            "block_mask", "block_q", "drop_mask", "first_head", "first_key", "first_query", "keep_prob", "key_rope", "mask", "offset",
            "path", "prefix", "query_rope", "seed", "shared_prefix", "sparse_block_size", "sparse_indices", "total_heads", "tree_mask", "window_right")


class PagedAttention(NamedTuple):
    """What paged_attention gives with return_lse."""

    out: Any
    softmax_lse: Any  # float32 (float64) [batch, num_heads, query_len], or [num_heads, tokens]; -inf where no key is seen


class PagedStatistics(NamedTuple):
    """What paged_attention gives with return_statistics; the last three are float32 (float64), of softmax_lse's shape."""

    out: Any
    softmax_lse: Any
    softmax_max: Any  # the largest score
    softmax_sum: Any  # of exp(score - max), before dropout


def _tensors_and_options(query: Any, key_cache: Any, value_cache: Any, block_table: Any, kv_lengths: Any, sinks: Any,
                         actual_seq_qlen: Any, numbers: Dict[str, Any], options: Dict[str, Any], writes: bool):
    """(operator, tensors, numbers) of a call."""
    arrays, more = split_options("paged_attention", options, _OPTIONS)
    check_dropout("paged_attention", arrays, more)
    arrays.update(query=query, block_table=block_table, kv_lengths=kv_lengths, **paged_arrays(key_cache, value_cache))
    if sinks is not None:
        arrays["sinks"] = sinks
    operator, tensors = read(arrays, (actual_seq_qlen,), writes=writes)
    rank = 4 if actual_seq_qlen is None else 3
    shape = tensors["query"].shape
    if len(shape) != rank:
        raise ValueError(f"query has {len(shape)} dimensions, must have {rank} {'with' if rank == 3 else 'without'} "
                         "actual_seq_qlen")
    if not tensors["value"].shape:
        raise ValueError("value_cache must be pages (kv_cache.new_pages), but its shape is []")
    if rank == 3:
        tensors["cu_seqlens_q"] = starts(operator, "actual_seq_qlen", actual_seq_qlen, "query", shape[0])
    numbers = {name: number for name, number in {**numbers, **more}.items() if number != Options._field_defaults[name]}
    return operator, tensors, numbers


@public
def paged_attention(query: Any, key_cache: Any, value_cache: Any, block_table: Any, kv_lengths: Any, *,
                    scale_value: Optional[float] = None, causal: bool = True, actual_seq_qlen: Any = None,
                    window_left: int = UNBOUNDED, softcap: float = 0.0, sinks: Any = None, layout: str = "norm",
                    return_lse: bool = False, return_statistics: bool = False, alignment: str = "bottom_right",
                    query_layout: str = "BNSD", out: Any = None, context: Optional[Context] = None, **options: Any) -> Any:
    """Attention of query [batch, num_heads, query_len, head_dim] over cached keys; the result is as wide as a value.

    block_table [batch, max_blocks]; kv_lengths [batch]: keys of each sequence. num_heads is a multiple of num_kv_heads.
    causal (the default): the last query sees every key of its sequence, the one before it all but the last, and so on;
    alignment="top_left" lets query i see keys 0 to i instead. window_left: and only so many keys before its own. sinks float32
    [num_heads]: one more score of each row. query_layout="BSND": query and result are [batch, query_len, num_heads, ..]. out: the array to write into, which is given back. return_lse gives a
    PagedAttention, return_statistics a PagedStatistics.

    Caches may be of eight bits, or ScaledPages: they are read where they are. Of layout "panel32" those of int4, and of int8 with
    offsets or several scales to a row, are not multiplied as panels: keys of a tile are copied first, which is slower than "norm".

    Prompts and decoded tokens in one call: with actual_seq_qlen, where each sequence's queries end (lengths 2, 0, 3 ->
    [2, 2, 5]), query and result are [tokens, num_heads, head_dim].

    Speculative decoding: tree_mask int64 [batch, query_len], or [tokens] with actual_seq_qlen (flash_attention.tree_mask makes it of
    parents). The last keys of a sequence are those of its queries, up to 64 draft tokens: query i sees those whose bit in its
    word is 1, besides all keys before; words of -1 hide nothing, for sequences without a tree.

    Cascades: sequences of few queries, next to each other in the batch, whose rows of block_table begin with the same blocks
    (512 keys or more) read these keys once; their results may differ in the last bits from those that they have alone.
    shared_prefix=0 switches that off, shared_prefix=n says that all sequences hold their first n keys in the same blocks
    (ValueError where block_table says otherwise).

    Further options, by the names of opst/attention.h (help(flash_attention.flash_attention_score) explains them):
    window_right, query_rope and key_rope (pages too: further columns of query and keys), mask, block_mask (key blocks of the
    longest sequence), sparse_indices and sparse_block_size (the keys of each query: sparse_flash_attention), bias, bias_scale, alibi_slopes, alibi_form, alibi_query_start, alibi_key_start, prefix, keep_prob, seed, offset,
    drop_mask, first_query, first_key, first_head, total_heads, path, block_q, block_kv.

    Torch tensors: gradients for query, bias, sinks, and for the caches (each row the sum over the sequences that read it),
    where `out` is not given. Beside caches of eight bits, ScaledPages or layout "panel32" nothing has any: a tensor that
    requires them is refused (RuntimeError), as bias is beside sparse_indices. Autocast casts nothing here: a query may have another dtype than its cache.
    """
    operator, tensors, numbers = _tensors_and_options(
        query, key_cache, value_cache, block_table, kv_lengths, sinks, actual_seq_qlen,
        dict(softmax_scale=scale_value, causal=causal, window_left=window_left, softcap=softcap, page_layout=layout,
             alignment=alignment), options, out is not None)
    if query_layout not in ("BNSD", "BSND"):
        raise ValueError(f'query_layout is "{query_layout}", must be BNSD or BSND')
    varlen = actual_seq_qlen is not None
    query_layout = "TND" if varlen else query_layout
    if query_layout == "BSND":
        for name in {"query", "query_rope"} & tensors.keys():
            tensors[name] = heads_first(name, tensors[name], query_layout, None)
    shape, values = tensors["query"].shape, tensors["value"]
    if operator is not None:
        if out is not None:
            raise RuntimeError("paged_attention: out is given, but an argument needs more than its bytes read (gradients, a "
                               "compiler, a transform): leave it out, or call under torch.no_grad()")
        given = operator.attend(tensors, numbers, order=query_layout, statistics=return_statistics, context=context,
                                names={"key": "key_cache", "value": "value_cache"})
        given = (from_heads_first(given[0], query_layout), *given[1:])
        if return_statistics:
            return PagedStatistics(*given)
        return PagedAttention(*given[:2]) if return_lse else given[0]
    width = row_elements(layout, values.dtype, "value", values.shape)
    result = output(out, "out") if out is not None else None
    if result is None:
        out = empty(query, shape_of_out(query_layout, shape, width), tensors["query"].dtype)
        result = view_of_new(out)
    if query_layout == "BSND":
        result = heads_first("out", result, query_layout, None)
    rows = (shape[1], shape[0]) if varlen else shape[:3]
    statistics = [empty(query, rows, "f64" if tensors["query"].dtype == "f64" else "f32") if wanted else None
                  for wanted in (return_lse or return_statistics, return_statistics, return_statistics)]
    try:
        forward(tensors, numbers, context or default_context(), result,
                *(None if array is None else view_of_new(array) for array in statistics))
    except ValueError as error:
        raise ValueError(str(error).replace("softmax_scale", "scale_value")) from None
    if return_statistics:
        return PagedStatistics(out, *statistics)
    return PagedAttention(out, statistics[0]) if return_lse else out

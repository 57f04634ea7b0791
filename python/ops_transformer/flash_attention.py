"""Attention in O(N) memory, in the calling form of FlashAttentionScore and in a plain one.

Layouts, N heads of size D:

    BNSD  [batch, N, length, D]        BSND  [batch, length, N, D]
    BSH   [batch, length, N * D]       SBH   [length, batch, N * D]
    TND   [tokens, N, D]               sequences one after the other, without padding

Arrays are NumPy's, torch's, or any other with DLPack or the buffer protocol, with any strides; nothing is copied on the
way in or out. Dtypes: float32, bfloat16, float16, float64. Results of torch tensors that require gradients have gradients,
for query, key, value, bias and sinks, also through softmax_lse and softmax_sum; torch.compile sees one operator.

The diagonal. Where query and key differ in length, `alignment` says where causal masks, windows and ALiBi lie: "top_left"
(the default here: query i sees keys 0 to i, so that one query against five cached keys sees key 0 only) or "bottom_right"
(the last query sees the last key, what a cache of keys needs).
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ._arrays import Tagged, empty, is_torch, refusal, short, view, view_of_new
from ._attention import GRADIENTS, Options, check_dropout, check_mask, core_call, split_options
from ._attention_reader import read, starts
from ._block_mask import BlockMask, PredicateMask
from ._calls import public
from ._context import Context, default_context
from ._core import UNBOUNDED
from ._dropout import dropout_mask, pack_drop_mask
from ._indexer import SelectedKeys, lightning_indexer
from ._layouts import check_layout, from_heads_first, heads_first, hint, shape_of_out
from ._merge import MergedAttention, merge_attention
from ._sparse_attention import SparseAttention, sparse_flash_attention
from ._tree_mask import tree_mask
from ._weights import attention_weights

__all__ = ["UNBOUNDED", "AttentionScore", "BlockMask", "MergedAttention", "PredicateMask", "SelectedKeys", "SparseAttention",
           "attention_weights", "dropout_mask", "flash_attention", "flash_attention_grad", "flash_attention_score",
           "lightning_indexer", "merge_attention", "pack_drop_mask", "sparse_flash_attention", "tree_mask"]

# Further keywords of each function, beside those of its signature.
_SCORE_OPTIONS = ("alibi_form", "alibi_key_start", "alibi_query_start", "alignment", "bias_scale", "block_kv", "block_mask",
                  "block_q", "first_head", "first_key", "first_query", "kv_lengths", "offset", "path", "total_heads")
_PLAIN_OPTIONS = (*_SCORE_OPTIONS, "alibi_slopes", "bias", "cu_seqlens_k", "cu_seqlens_q", "drop_mask", "keep_prob",
                  "key_rope", "mask", "prefix", "query_rope", "seed", "sinks", "softcap", "softmax_scale", "tree_mask", "window_left", "window_right")
_PLAIN_LAYOUTS = {"BNSD": "[batch, heads, length, head_dim]", "BSND": "[batch, length, heads, head_dim]"}
_DEFAULTS = Options._field_defaults
_ORDERS = {"BNSD": "BNSD", "BSND": "BSND", "BSH": "BSND", "SBH": "SBND", "TND": "TND"}


class AttentionScore(NamedTuple):
    """What flash_attention_score gives and flash_attention_grad needs."""

    attention_out: Any  # the layout and dtype of query, D of value
    softmax_max: Any  # float32 (float64) [batch, N, length], TND [N, tokens]; -inf where no key is seen
    softmax_sum: Any  # likewise: sum of exp(score - max), before dropout


def _flags(name: str, array: Any) -> np.ndarray:
    """A mask as NumPy's array; refused as view refuses, and where it holds numbers."""
    array = np.asarray(array) if isinstance(array, (list, tuple)) and not isinstance(array, Tagged) else array
    dtype = view(array, name).dtype
    if name == "mask":
        check_mask(array, dtype)
    elif dtype in ("f32", "f64", "bf16", "f16"):
        raise ValueError(f"{name} has dtype {dtype}, must be bool or integer (not 0: hidden); numbers that are added to the "
                         "scores are a bias")
    return np.asarray(getattr(array, "array", array))


def _visible(mask: Any, padding_mask: Any) -> Any:
    """One mask of visible keys from `mask` (true: visible, or None) and padding_mask [batch, kv_len] (true: hidden)."""
    of_torch = is_torch(padding_mask) and (mask is None or is_torch(mask))
    hidden = padding_mask if of_torch else _flags("padding_mask", padding_mask)
    if len(hidden.shape) != 2:
        raise ValueError(f"padding_mask has {len(hidden.shape)} dimensions, must be [batch, kv_len]")
    if of_torch and (hidden.is_floating_point() or hidden.is_complex()):
        raise ValueError(f"padding_mask has dtype {hidden.dtype}, must be bool or integer (not 0: hidden)")
    visible = (hidden == 0)[:, None, None, :]
    if mask is None:
        return visible
    if of_torch:
        check_mask(mask, str(mask.dtype))
        seen = mask
    else:
        seen = _flags("mask", mask) != 0
    if any(a != b and 1 not in (a, b) for a, b in zip(visible.shape[::-1], seen.shape[::-1])):
        raise ValueError(f"padding_mask {list(hidden.shape)} and mask {list(seen.shape)} are of different problems: both say "
                         "batch and kv_len")
    return visible & seen


class _Problem:
    """One call's tensors, in the meaning [batch, N, length, D]: views, or torch tensors where `operator` computes."""

    def __init__(self, function: str, query: Any, key: Any, value: Any, layout: str, attn_head_num: Optional[int],
                 kv_head_num: Optional[int], attn_dim_per_head: Optional[int], ends: Tuple[Any, Any],
                 padding_mask: Any, arrays: Dict[str, Any], numbers: Dict[str, Any], options: Dict[str, Any]) -> None:
        check_layout(layout)
        self.layout, self.num_heads = layout, attn_head_num
        self.num_kv_heads = attn_head_num if kv_head_num is None else kv_head_num
        arrays = {name: array for name, array in arrays.items() if array is not None}
        self.numbers = {name: number for name, number in numbers.items() if number != _DEFAULTS[name]}
        if options:
            more, more_numbers = split_options(function, options, _SCORE_OPTIONS)
            arrays.update(more)
            self.numbers.update(more_numbers)
        check_dropout(function, arrays, self.numbers)
        if padding_mask is not None:
            arrays["mask"] = _visible(arrays.get("mask"), padding_mask)
        self.given = query, key, value
        self.operator, tensors = read({"query": query, "key": key, "value": value, **arrays}, (padding_mask, *ends),
                                      autocast=True)
        self.as_given = [tensors[name] for name in ("query", "key", "value")]
        self.counts = attn_head_num, kv_head_num, attn_dim_per_head
        try:
            q = heads_first("query", tensors["query"], layout, self.num_heads)
            k = heads_first("key", tensors["key"], layout, self.num_kv_heads)
            v = heads_first("value", tensors["value"], layout, self.num_kv_heads)
            for what, wanted, name, tensor, axis in (("attn_head_num", attn_head_num, "query", q, 1),
                                                     ("attn_dim_per_head", attn_dim_per_head, "query", q, -1),
                                                     ("kv_head_num", kv_head_num, "key", k, 1)):
                if wanted is not None and wanted != tensor.shape[axis]:
                    raise ValueError(f"{what} is {wanted}, but {name} has {tensor.shape[axis]} in input_layout {layout}")
        except ValueError as error:
            raise self.explained(error) from None
        tensors.update(query=q, key=k, value=v)
        if layout == "TND":
            if ends[0] is None or ends[1] is None:
                raise ValueError("input_layout TND needs actual_seq_qlen and actual_seq_kvlen, where each sequence ends")
            tensors["cu_seqlens_q"] = starts(self.operator, "actual_seq_qlen", ends[0], "query", q.shape[0])
            tensors["cu_seqlens_k"] = starts(self.operator, "actual_seq_kvlen", ends[1], "key", k.shape[0])
            counts = [tensors[name].shape[0] - 1 for name in ("cu_seqlens_q", "cu_seqlens_k")]
            if counts[0] != counts[1]:
                raise ValueError(f"actual_seq_qlen has {counts[0]} sequences, but actual_seq_kvlen has {counts[1]}")
        elif ends[0] is not None or ends[1] is not None:
            raise ValueError(f"actual_seq_qlen and actual_seq_kvlen go with input_layout TND, not {layout}")
        self.query, self.key, self.value, self.tensors = q, k, v, tensors
        self.order = _ORDERS[layout]

    def explained(self, error: ValueError) -> ValueError:
        """The error in the names of FlashAttentionScore, with the layout that would fit."""
        text = str(error).replace("softmax_scale", "scale_value")
        return ValueError(text + hint(self.layout, *(tuple(tensor.shape) for tensor in self.as_given), *self.counts))

    def in_meaning(self, name: str, array: Any, num_heads: Optional[int]) -> Any:
        """Another array of query's or key's layout."""
        tensor = view(array, name) if self.operator is None else self.operator.to_tensor(name, array)
        return heads_first(name, tensor, self.layout, num_heads)


@public
def flash_attention_score(
    query: Any,
    key: Any,
    value: Any,
    drop_mask: Any = None,
    padding_mask: Any = None,
    attn_head_num: Optional[int] = None,
    attn_dim_per_head: Optional[int] = None,
    scale_value: Optional[float] = None,
    input_layout: str = "BSND",
    seed: int = 0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    keep_prob: float = 1.0,
    *,
    kv_head_num: Optional[int] = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float = 0.0,
    prefix: Optional[Sequence[int]] = None,
    actual_seq_qlen: Optional[Sequence[int]] = None,
    actual_seq_kvlen: Optional[Sequence[int]] = None,
    context: Optional[Context] = None,
    **options: Any,
) -> AttentionScore:
    """softmax(scale_value * query key^T + bias) value, by heads.

    Query i of a sequence sees key j where i - pre_tokens <= j <= i + next_tokens (next_tokens = 0 is causal), j is not
    hidden by padding_mask (bool or integer [batch, kv_len], true = hidden) and visible in `mask` (bool, true = visible,
    broadcasts to [batch, N, query_len, kv_len]). `bias` is added to the scores and broadcasts likewise; `prefix`
    [batch] makes the first keys visible to every query. A row that sees no key gives 0, max -inf and sum 0.

    scale_value defaults to 1 / sqrt(D). attn_head_num is needed for BSH and SBH and checked elsewhere, as is
    attn_dim_per_head; kv_head_num where keys have fewer heads (each serves attn_head_num / kv_head_num of query's).
    TND takes actual_seq_qlen and actual_seq_kvlen: where each sequence ends (lengths 2, 0, 3 -> [2, 2, 5]).

    keep_prob < 1 drops weights: which ones is a function of `seed` and position (dropout_mask tells); or drop_mask says so
    (pack_drop_mask of [batch, N, query_len, kv_len], true = keep), and then a seed, an offset or first_.. beside it is refused.

    Further options, by the names of opst/attention.h:

        alignment            "top_left" (the default: pre_tokens, next_tokens and ALiBi count from query 0 and key 0) or
                             "bottom_right" (from the last of both)
        kv_lengths           [batch], keys of each sequence
        block_mask           BlockMask: only the listed pairs of a query block and a key block are seen, and computed
        bias_scale, alibi_form ("linear", "square_root"), alibi_query_start, alibi_key_start
        offset, first_query, first_key, first_head, total_heads
                             of dropout, the last four for a call that holds a piece of a larger problem
        path ("automatic", "standard", "flash"), block_q, block_kv

    Torch tensors: gradients for query, key, value, bias and sinks, also through softmax_sum (softmax_max counts as a constant,
    which is right for whatever depends on both together, such as max + log(sum) and merge_attention). Under torch's autocast
    query, key and value are cast as those of scaled_dot_product_attention are.
    """
    problem = _Problem(
        "flash_attention_score", query, key, value, input_layout, attn_head_num, kv_head_num, attn_dim_per_head,
        (actual_seq_qlen, actual_seq_kvlen), padding_mask,
        dict(drop_mask=drop_mask, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, prefix=prefix),
        dict(softmax_scale=scale_value, window_left=pre_tokens, window_right=next_tokens, keep_prob=keep_prob, seed=seed,
             softcap=softcap), options)
    try:
        if problem.operator is not None:
            out, _, largest, total = problem.operator.attend(problem.tensors, problem.numbers, order=problem.order,
                                                             statistics=True, context=context)
            return AttentionScore(from_heads_first(out, input_layout), largest, total)
        shape, dtype = problem.query.shape, problem.query.dtype
        out = empty(query, shape_of_out(input_layout, shape, problem.value.shape[-1]), dtype)
        rows = (shape[1], shape[0]) if input_layout == "TND" else shape[:3]
        largest, total = (empty(query, rows, "f64" if dtype == "f64" else "f32") for _ in range(2))
        core_call(problem.tensors, problem.numbers).forward(
            context or default_context(), heads_first("out", view_of_new(out), input_layout, shape[1]), None,
            view_of_new(largest), view_of_new(total))
    except ValueError as error:
        raise problem.explained(error) from None
    return AttentionScore(out, largest, total)


@public
def flash_attention_grad(
    query: Any,
    key: Any,
    value: Any,
    grad_out: Any,
    softmax_max: Any = None,
    softmax_sum: Any = None,
    attention_out: Any = None,
    drop_mask: Any = None,
    padding_mask: Any = None,
    attn_head_num: Optional[int] = None,
    attn_dim_per_head: Optional[int] = None,
    scale_value: Optional[float] = None,
    input_layout: str = "BSND",
    seed: int = 0,
    pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED,
    keep_prob: float = 1.0,
    *,
    kv_head_num: Optional[int] = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    softcap: float = 0.0,
    prefix: Optional[Sequence[int]] = None,
    actual_seq_qlen: Optional[Sequence[int]] = None,
    actual_seq_kvlen: Optional[Sequence[int]] = None,
    softmax_lse: Any = None,
    grad_lse: Any = None,
    wanted: Sequence[str] = ("query", "key", "value"),
    context: Optional[Context] = None,
    **options: Any,
) -> Tuple[Any, ...]:
    """(grad_query, grad_key, grad_value) of sum(grad_out * attention_out), in the layouts of query, key, value.

    The arguments of flash_attention_score as they were then, and what it gave: softmax_max and softmax_sum, or softmax_lse in
    their place. grad_lse: the gradient with respect to softmax_lse, of its shape and dtype. wanted: which gradients, in this
    order, of "query", "key", "value", "bias" and "sinks" (those two float32, or float64).
    """
    if attention_out is None:
        raise ValueError("attention_out is needed, what flash_attention_score gave")
    if (softmax_lse is None) == (softmax_max is None) or (softmax_max is None) != (softmax_sum is None):
        raise ValueError("the statistics that flash_attention_score gave are needed: softmax_max and softmax_sum, or softmax_lse "
                         "in their place")
    try:
        wanted = tuple(wanted)
    except Exception:  # of an object that is no sequence, or of its own
        raise refusal(TypeError, wanted, f"is {short(wanted)}, must be names among {', '.join(GRADIENTS)}", "wanted") from None
    for name in wanted:
        if not isinstance(name, str) or name not in GRADIENTS:
            raise ValueError(f'wanted has "{name if isinstance(name, str) else short(name)}", must be among '
                             f'{", ".join(GRADIENTS)}')
        if (name == "bias" and bias is None) or (name == "sinks" and sinks is None):
            raise ValueError(f'wanted has "{name}", but {name} is not given')
    problem = _Problem(
        "flash_attention_grad", query, key, value, input_layout, attn_head_num, kv_head_num, attn_dim_per_head,
        (actual_seq_qlen, actual_seq_kvlen), padding_mask,
        dict(drop_mask=drop_mask, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, prefix=prefix),
        dict(softmax_scale=scale_value, window_left=pre_tokens, window_right=next_tokens, keep_prob=keep_prob, seed=seed,
             softcap=softcap), options)
    statistics = {"softmax_lse": softmax_lse, "softmax_max": softmax_max, "softmax_sum": softmax_sum, "grad_lse": grad_lse}
    heads = problem.query.shape[1]
    try:
        saved = {name: problem.in_meaning(name, array, heads)
                 for name, array in (("attention_out", attention_out), ("grad_out", grad_out))}
        saved.update({name: view(array, name) if problem.operator is None else problem.operator.to_tensor(name, array)
                      for name, array in statistics.items() if array is not None})
        if problem.operator is not None:
            found = problem.operator.gradients(problem.tensors, problem.numbers, saved, wanted, context)
            return tuple(from_heads_first(found[name], input_layout) if name in ("query", "key", "value") else found[name]
                         for name in wanted)
        return _gradients(problem, saved, wanted, bias, sinks, context)
    except ValueError as error:
        raise problem.explained(error) from None


def _gradients(problem: _Problem, saved: Dict[str, Any], wanted: Tuple[str, ...], bias: Any, sinks: Any,
               context: Optional[Context]) -> Tuple[Any, ...]:
    real = "f64" if problem.query.dtype == "f64" else "f32"
    arrays = dict(zip(GRADIENTS, (*problem.given, bias, sinks)))
    of_heads = {"query": problem.query.shape[1], "key": problem.key.shape[1], "value": problem.key.shape[1]}
    gradients, views = {}, {}
    for name in wanted:
        dtype = problem.query.dtype if name in of_heads else real
        gradients[name] = empty(arrays[name], view(arrays[name]).shape, dtype)
        views[f"grad_{name}"] = view(gradients[name])
        if name in of_heads:
            views[f"grad_{name}"] = problem.in_meaning(f"grad_{name}", gradients[name], of_heads[name])
    out, grad_out = saved.pop("attention_out"), saved.pop("grad_out")
    core_call(problem.tensors, problem.numbers).backward(context or default_context(), out, grad_out, **saved, **views)
    return tuple(gradients[name] for name in wanted)


@public
def flash_attention(q: Any, k: Any, v: Any, causal: bool = False, *, return_lse: bool = False, layout: str = "BNSD",
                    context: Optional[Context] = None, **options: Any) -> Any:
    """softmax(q k^T / sqrt(D)) v for [batch, heads, length, D]; causal: query i sees keys 0 to i.

    Where q and k differ in length the causal diagonal lies at the top left: one query against five cached keys sees key 0 only.
    alignment="bottom_right" lets the last query see every key.

    k and v may have fewer heads, each of which serves as many heads of q; the result is as wide as v. return_lse: (out,
    softmax_lse), the latter float32 (float64) [batch, heads, length], natural logarithm, -inf where no key is seen.
    layout="BSND": q, k, v, ropes and the result are [batch, length, heads, D] (with cu_seqlens_q the layout says nothing).

    Options, by the names of opst/attention.h (help(flash_attention_score) explains those that it shares): softmax_scale,
    alignment, window_left and window_right (keys beside the diagonal, both ends included; negative: bands away from it), mask,
    bias, bias_scale, alibi_slopes, alibi_form, alibi_query_start, alibi_key_start, softcap, sinks, prefix, kv_lengths, block_mask
    (a BlockMask: only listed blocks are seen, and computed), keep_prob, seed, offset, drop_mask, first_query, first_key,
    first_head, total_heads, path, block_q, block_kv; cu_seqlens_q and cu_seqlens_k [batch + 1] for sequences one after the other:
    q [tokens, heads, D], lse [heads, tokens]; tree_mask int64 [batch, length] (or [tokens]) for trees of draft tokens, whose words
    the function tree_mask makes of their parents: the last keys are those of the queries, up to 64, and query i sees those of
    them whose bit in its word is 1, besides all keys before (a word of -1: all keys). tree_mask has no gradients. query_rope and
    key_rope, like q and k but rope_dim wide: further columns of both, in tensors of their own.
    """
    arrays: Dict[str, Any] = {}
    numbers: Dict[str, Any] = {}
    if options:
        arrays, numbers = split_options("flash_attention", options, _PLAIN_OPTIONS)
        check_dropout("flash_attention", arrays, numbers)
    if causal:
        numbers["causal"] = True
    operator, tensors = read({"query": q, "key": k, "value": v, **arrays}, autocast=True)
    query, rows = tensors["query"], tensors["query"].shape
    varlen = "cu_seqlens_q" in tensors
    if layout not in _PLAIN_LAYOUTS:
        raise ValueError(f'layout is "{layout}", must be one of {", ".join(_PLAIN_LAYOUTS)}')
    if len(rows) != (3 if varlen else 4):
        form = "[tokens, heads, head_dim] with cu_seqlens_q" if varlen else _PLAIN_LAYOUTS[layout]
        raise ValueError(f"q must be {form}, but its shape is {list(rows)}")
    if not tensors["value"].shape:
        raise ValueError("v must have the dimensions of k, but its shape is []")
    layout = "TND" if varlen else layout
    if layout == "BSND":
        for name in {"query", "key", "value", "query_rope", "key_rope"} & tensors.keys():
            tensors[name] = heads_first(name, tensors[name], layout, None)
        query, rows = tensors["query"], tensors["query"].shape
    if operator is not None:
        out, lse, *_ = operator.attend(tensors, numbers, order=layout, context=context)
        out = from_heads_first(out, layout)
        return (out, lse) if return_lse else out
    out, lse = empty(q, shape_of_out(layout, rows, tensors["value"].shape[-1]), query.dtype), None
    if return_lse:
        lse = empty(q, (rows[1], rows[0]) if varlen else rows[:3], "f64" if query.dtype == "f64" else "f32")
    core_call(tensors, numbers).forward(context or default_context(), heads_first("out", view_of_new(out), layout, None),
                                        None if lse is None else view_of_new(lse))
    return (out, lse) if return_lse else out

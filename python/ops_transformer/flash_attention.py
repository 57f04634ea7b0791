"""Attention in O(N) memory, in the calling form of FlashAttentionScore.

Layouts, N heads of size D:

    BNSD  [batch, N, length, D]        BSND  [batch, length, N, D]
    BSH   [batch, length, N * D]       SBH   [length, batch, N * D]
    TND   [tokens, N, D]               sequences one after the other, without padding

Arrays are NumPy's, torch's, or any other with DLPack or the buffer protocol, with any strides; nothing is copied on the
way in or out. Dtypes: float32, bfloat16, float16, float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _core
from ._arrays import Tagged, default_context, empty, integers, offsets, optional_view, view
from ._core import UNBOUNDED, AttentionCall, Context, View

__all__ = ["UNBOUNDED", "AttentionScore", "MergedAttention", "flash_attention", "flash_attention_grad",
           "flash_attention_score", "merge_attention"]

# The axes of each layout. H holds heads and their elements, N * D.
_AXES = {"BNSD": "BNSD", "BSND": "BSND", "BSH": "BSH", "SBH": "SBH", "TND": "TND"}


class AttentionScore(NamedTuple):
    """What flash_attention_score gives and flash_attention_grad needs."""

    attention_out: Any  # the layout and dtype of query, D of value
    softmax_max: Any  # float32 (float64) [batch, N, length], TND [N, tokens]; -inf where no key is seen
    softmax_sum: Any  # likewise: sum of exp(score - max), before dropout


def _heads_first(name: str, array: Any, layout: str, num_heads: Optional[int]) -> View:
    """[batch, N, length, D], or TND as it is: the same memory."""
    tensor = view(array)
    axes = _AXES[layout]
    if len(tensor.shape) != len(axes):
        raise ValueError(
            f"input_layout {layout} means {len(axes)} dimensions, but {name} has {len(tensor.shape)}: {list(tensor.shape)}"
        )
    if "H" in axes:
        if num_heads is None or num_heads < 1:
            raise ValueError(f"input_layout {layout} needs attn_head_num, the number of heads, for {name}")
        if tensor.shape[2] % num_heads:
            raise ValueError(
                f"input_layout {layout}: dimension 2 of {name} is {tensor.shape[2]}, which is not attn_head_num = "
                f"{num_heads} heads of one size"
            )
        tensor = tensor.split(2, num_heads)  # BSND or SBND
        axes = axes[:2] + "ND"
    if axes == "SBND":
        tensor = tensor.transposed(0, 1)
        axes = "BSND"
    return tensor.transposed(1, 2) if axes == "BSND" else tensor


def _check_heads(layout: str, query: View, num_heads: Optional[int], head_dim: Optional[int]) -> None:
    for what, wanted, found in (("attn_head_num", num_heads, query.shape[1]), ("attn_dim_per_head", head_dim, query.shape[-1])):
        if wanted is not None and wanted != found:
            raise ValueError(f"{what} is {wanted}, but query has {found} in input_layout {layout}")


class _Problem:
    """One call's tensors, in the meaning [batch, N, length, D]."""

    def __init__(self, query: Any, key: Any, value: Any, attn_head_num: Optional[int], attn_dim_per_head: Optional[int],
                 kv_head_num: Optional[int], scale_value: Optional[float], input_layout: str, drop_mask: Any,
                 padding_mask: Any, seed: int, pre_tokens: int, next_tokens: int, keep_prob: float, mask: Any, bias: Any,
                 alibi_slopes: Any, sinks: Any, softcap: float, prefix: Optional[Sequence[int]],
                 actual_seq_qlen: Optional[Sequence[int]], actual_seq_kvlen: Optional[Sequence[int]]) -> None:
        if input_layout not in _AXES:
            raise ValueError(f'input_layout is "{input_layout}", must be one of {", ".join(_AXES)}')
        self.layout = input_layout
        self.num_heads = attn_head_num
        self.num_kv_heads = attn_head_num if kv_head_num is None else kv_head_num
        q = _heads_first("query", query, input_layout, self.num_heads)
        k = _heads_first("key", key, input_layout, self.num_kv_heads)
        v = _heads_first("value", value, input_layout, self.num_kv_heads)
        _check_heads(input_layout, q, attn_head_num, attn_dim_per_head)
        if kv_head_num is not None and kv_head_num != k.shape[1]:
            raise ValueError(f"kv_head_num is {kv_head_num}, but key has {k.shape[1]} in input_layout {input_layout}")
        self.query, self.key, self.value = q, k, v
        call = self.call = AttentionCall(q, k, v)
        if input_layout == "TND":
            if actual_seq_qlen is None or actual_seq_kvlen is None:
                raise ValueError("input_layout TND needs actual_seq_qlen and actual_seq_kvlen, where each sequence ends")
            call.cu_seqlens_q = offsets(actual_seq_qlen)
            call.cu_seqlens_k = offsets(actual_seq_kvlen)
        elif actual_seq_qlen is not None or actual_seq_kvlen is not None:
            raise ValueError(f"actual_seq_qlen and actual_seq_kvlen go with input_layout TND, not {input_layout}")
        call.alignment = "top_left"
        call.window_left, call.window_right = pre_tokens, next_tokens
        call.softmax_scale = scale_value
        call.keep_prob, call.seed = keep_prob, seed
        call.softcap = softcap
        call.drop_mask = optional_view(drop_mask)
        call.bias = optional_view(bias)
        call.alibi_slopes = optional_view(alibi_slopes)
        call.sinks = optional_view(sinks)
        call.prefix = None if prefix is None else integers(prefix)
        call.mask = _visible(mask, padding_mask)
        if input_layout == "TND":
            self.statistics_shape = (q.shape[1], q.shape[0])
        else:
            self.statistics_shape = q.shape[:3]
        self.statistics_dtype = "f64" if q.dtype == "f64" else "f32"

    def to_layout(self, name: str, array: Any, num_heads: Optional[int]) -> View:
        return _heads_first(name, array, self.layout, num_heads)

    def out_shape(self) -> Tuple[int, ...]:
        q, width = self.query.shape, self.value.shape[-1]
        if self.layout == "TND":
            return (q[0], q[1], width)
        batch, heads, length, _ = q
        return {"BNSD": (batch, heads, length, width), "BSND": (batch, length, heads, width),
                "BSH": (batch, length, heads * width), "SBH": (length, batch, heads * width)}[self.layout]


def _visible(mask: Any, padding_mask: Any) -> Optional[View]:
    """One mask of visible keys from `mask` (true: visible) and padding_mask [batch, kv_len] (true: hidden)."""
    if padding_mask is None:
        return optional_view(mask)
    visible = np.equal(np.asarray(padding_mask), 0)
    if visible.ndim != 2:
        raise ValueError(f"padding_mask has {visible.ndim} dimensions, must be [batch, kv_len]")
    visible = visible[:, None, None, :]
    return view(visible if mask is None else visible & np.asarray(mask, dtype=np.bool_))


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
) -> AttentionScore:
    """softmax(scale_value * query key^T + bias) value, by heads.

    Query i of a sequence sees key j where i - pre_tokens <= j <= i + next_tokens (next_tokens = 0 is causal), j is not
    hidden by padding_mask (bool or integer [batch, kv_len], true = hidden) and visible in `mask` (bool, true = visible,
    broadcasts to [batch, N, query_len, kv_len]). `bias` is added to the scores and broadcasts likewise; `prefix`
    [batch] makes the first keys visible to every query. A row that sees no key gives 0, max -inf and sum 0.

    scale_value defaults to 1 / sqrt(D). attn_head_num is needed for BSH and SBH and checked elsewhere, as is
    attn_dim_per_head; kv_head_num where keys have fewer heads (each serves attn_head_num / kv_head_num of query's).
    TND takes actual_seq_qlen and actual_seq_kvlen: where each sequence ends (lengths 2, 0, 3 -> [2, 2, 5]).

    keep_prob < 1 drops weights: which ones is a function of `seed` and position; or drop_mask says so (packed bits,
    uint8, 1 = keep, of [batch, N, query_len, kv_len]).
    """
    problem = _Problem(query, key, value, attn_head_num, attn_dim_per_head, kv_head_num, scale_value, input_layout,
                       drop_mask, padding_mask, seed, pre_tokens, next_tokens, keep_prob, mask, bias, alibi_slopes,
                       sinks, softcap, prefix, actual_seq_qlen, actual_seq_kvlen)
    out = empty(query, problem.out_shape(), problem.query.dtype)
    softmax_max = empty(query, problem.statistics_shape, problem.statistics_dtype)
    softmax_sum = empty(query, problem.statistics_shape, problem.statistics_dtype)
    problem.call.forward(context or default_context(), problem.to_layout("out", out, problem.query.shape[1]), None,
                         view(softmax_max), view(softmax_sum))
    return AttentionScore(out, softmax_max, softmax_sum)


def flash_attention_grad(
    query: Any,
    key: Any,
    value: Any,
    grad_out: Any,
    softmax_max: Any,
    softmax_sum: Any,
    attention_out: Any,
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
) -> Tuple[Any, Any, Any]:
    """(grad_query, grad_key, grad_value) of sum(grad_out * attention_out), in the layouts of query, key, value.

    The arguments of flash_attention_score as they were then, and what it gave.
    """
    problem = _Problem(query, key, value, attn_head_num, attn_dim_per_head, kv_head_num, scale_value, input_layout,
                       drop_mask, padding_mask, seed, pre_tokens, next_tokens, keep_prob, mask, bias, alibi_slopes,
                       sinks, softcap, prefix, actual_seq_qlen, actual_seq_kvlen)
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    gradients = [empty(array, view(array).shape, problem.query.dtype) for array in (query, key, value)]
    grad_query, grad_key, grad_value = (
        problem.to_layout(name, gradient, n)
        for name, gradient, n in zip(("grad_query", "grad_key", "grad_value"), gradients, (heads, kv_heads, kv_heads))
    )
    problem.call.backward(
        context or default_context(), problem.to_layout("attention_out", attention_out, heads),
        problem.to_layout("grad_out", grad_out, heads), softmax_max=view(softmax_max), softmax_sum=view(softmax_sum),
        grad_query=grad_query, grad_key=grad_key, grad_value=grad_value)
    return tuple(gradients)


def flash_attention(q: Any, k: Any, v: Any, causal: bool = False, *, return_lse: bool = False,
                    context: Optional[Context] = None) -> Any:
    """softmax(q k^T / sqrt(D)) v for [batch, heads, length, D]; causal: query i sees keys 0 to i.

    k and v may have fewer heads, each for as many of q's; the result is as wide as v. return_lse: (out, softmax_lse),
    the latter float32 (float64) [batch, heads, length], natural logarithm, -inf where no key is seen.
    """
    query, value = view(q), view(v)
    if len(query.shape) != 4:
        raise ValueError(f"q must be [batch, heads, length, head_dim], but its shape is {list(query.shape)}")
    call = AttentionCall(query, view(k), value)
    call.causal, call.alignment = causal, "top_left"
    out = empty(q, (*query.shape[:3], value.shape[-1]), query.dtype)
    lse = empty(q, query.shape[:3], "f64" if query.dtype == "f64" else "f32") if return_lse else None
    call.forward(context or default_context(), view(out), optional_view(lse))
    return (out, lse) if return_lse else out


class MergedAttention(NamedTuple):
    """Attention over all keys, of which the parts had some each."""

    attention_out: Any
    softmax_lse: Any  # of the form with softmax_lse, else None
    softmax_max: Any = None  # of the form with softmax_max and softmax_sum, else None
    softmax_sum: Any = None


def merge_attention(attention_out: Any, softmax_lse: Any = None, softmax_max: Any = None, softmax_sum: Any = None, *,
                    dtype: Optional[str] = None, context: Optional[Context] = None) -> MergedAttention:
    """Joins attention over parts of the keys into attention over all of them.

    attention_out [parts, .., D], float32 or float64, up to four more dimensions. Either softmax_lse, or softmax_max and
    softmax_sum, of its dtype and of its shape without D; the result has the same form. A part whose lse is -inf or +inf
    (max -inf, sum 0) has seen no key and adds nothing. dtype of the result: "f32", "bf16", "f16", "f64"; default that of
    the parts. ValueError for shapes that disagree, and where neither form or both are given.
    """
    if (softmax_lse is None) == (softmax_max is None) or (softmax_max is None) != (softmax_sum is None):
        raise ValueError("merge_attention takes softmax_lse, or softmax_max and softmax_sum")
    parts = view(attention_out)
    if len(parts.shape) < 2:
        raise ValueError(f"attention_out must be [parts, .., D], but its shape is {list(parts.shape)}")
    out = empty(attention_out, parts.shape[1:], dtype or parts.dtype)
    lse, largest, total = (None if part is None else empty(part, parts.shape[1:-1], parts.dtype)
                           for part in (softmax_lse, softmax_max, softmax_sum))
    _core.merge_attention(context or default_context(), parts, optional_view(softmax_lse), optional_view(softmax_max),
                          optional_view(softmax_sum), view(out), optional_view(lse), optional_view(largest),
                          optional_view(total))
    return MergedAttention(out, lse, largest, total)

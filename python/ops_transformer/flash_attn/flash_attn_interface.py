"""Attention of dense and of varlen tensors, with the arguments of flash_attn.flash_attn_interface."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .._calls import public
from ..flash_attention import flash_attention
from ..kv_cache import paged_attention
from ._checks import DENSE, PAGES, VARLEN, check_heads, check_same, has_form, integers, is_readable, marked, rule, unpacked
from ._dropped import dropped_weights
from ._kv_cache import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

_QKV, _KV = "[batch, seqlen, 3, nheads, headdim]", "[batch, seqlen, 2, nheads_k, headdim]"
_VARLEN_QKV, _VARLEN_KV = "[total, 3, nheads, headdim]", "[total, 2, nheads_k, headdim]"


def _dropout(dropout_p: float) -> Dict[str, Any]:
    """keep_prob and a seed that torch's generator draws."""
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}, must be at least 0 and below 1")
    return {"keep_prob": 1 - dropout_p, "seed": int(torch.randint(2**63 - 1, ()))} if dropout_p > 0 else {}


def _with_probabilities(result: Tuple[Tensor, Tensor], dropped: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask)."""
    out, lse = result
    return out, marked(lse), out.new_empty(0) if dropped is None else dropped


def _dense(q: Tensor, k: Tensor, v: Tensor, names: Tuple[str, str], dropout_p: float, softmax_scale: Optional[float], causal: bool, window_size: Any,
           softcap: float, alibi_slopes: Any, return_attn_probs: bool) -> Any:
    check_heads(q, k, v, ("q", "k", "v"))
    check_same((names[0], names[1]), q, k, {0: "batch"})
    options = rule(q, q.shape[0], softmax_scale, causal, window_size, softcap, alibi_slopes)
    dropout = _dropout(dropout_p)
    result = flash_attention(q, k, v, layout="BSND", return_lse=return_attn_probs, **options, **dropout)
    if not return_attn_probs:
        return result
    return _with_probabilities(result, dropped_weights(q, k, options, dropout) if dropout else None)


@public(facade=True)
def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                    window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """softmax(softmax_scale q k^T) v of q [batch, seqlen_q, nheads, headdim], k and v [batch, seqlen_k, nheads_k, headdim].

    nheads is a multiple of nheads_k. The last query stands at the last key: query i sees keys up to i + seqlen_k - seqlen_q where
    causal, and with window_size (left, right) those from `left` before that place to `right` behind it, both included; -1: no
    limit. A row that sees no key is 0, with softmax_lse +inf. softmax_scale: 1 / sqrt(headdim) where None. softcap above 0
    bounds scores to softcap tanh(score / softcap). alibi_slopes [nheads] or [batch, nheads] add -slope |i + seqlen_k - seqlen_q - j|.
    dropout_p of the weights are dropped, at random by a seed of torch's generator. Results repeat bit by bit whatever
    `deterministic` says.

    return_attn_probs: (out, softmax_lse [batch, nheads, seqlen_q], S_dmask): with dropout_p above 0 the weights
    [batch, nheads, seqlen_q, seqlen_k] before dropout, negative where dropped, else a tensor without elements.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        has_form(name, tensor, DENSE)
    check_same(("k", "v"), k, v, {0: "batch", 1: "seqlen"})
    return _dense(q, k, v, ("q", "k"), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


@public(facade=True)
def flash_attn_kvpacked_func(q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                             window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                             deterministic: bool = False, return_attn_probs: bool = False) -> Any:
    """flash_attn_func of keys and values in one tensor kv [batch, seqlen_k, 2, nheads_k, headdim]."""
    has_form("q", q, DENSE)
    k, v = unpacked("kv", kv, 2, _KV)
    return _dense(q, k, v, ("q", "kv"), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


@public(facade=True)
def flash_attn_qkvpacked_func(qkv: Any, dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                              window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                              deterministic: bool = False, return_attn_probs: bool = False) -> Any:
    """flash_attn_func of one tensor qkv [batch, seqlen, 3, nheads, headdim]."""
    q, k, v = unpacked("qkv", qkv, 3, _QKV)
    return _dense(q, k, v, ("qkv", "qkv"), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)


# ---- sequences one after the other -----------------------------------------------------------------------------------


def _starts(name: str, cu_seqlens: Any, total: Optional[int], of: str, longest_name: str, longest: int) -> Tensor:
    """cu_seqlens [batch + 1], checked where its numbers can be read."""
    starts = integers(name, cu_seqlens, (None,), "[batch + 1]")
    if starts.shape[0] == 0:
        raise ValueError(f"{name} is empty, must be [batch + 1]")
    if longest < 0:
        raise ValueError(f"{longest_name} is {longest}, must not be negative")
    if not is_readable(starts):
        return starts
    numbers: List[int] = starts.tolist()
    if numbers[0] != 0:
        raise ValueError(f"{name}[0] is {numbers[0]}, must be 0")
    for i, (start, end) in enumerate(zip(numbers, numbers[1:])):
        if end < start:
            raise ValueError(f"{name}[{i + 1}] is {end}, less than {name}[{i}] = {start}")
        if end - start > longest:
            raise ValueError(f"{longest_name} is {longest}, but sequence {i} of {name} has {end - start}")
    if total is not None and numbers[-1] > total:
        raise ValueError(f"{name}[{len(numbers) - 1}] is {numbers[-1]}, but {of} has {total} rows")
    return starts


def _varlen(q: Tensor, k: Tensor, v: Tensor, names: Tuple[str, str], cu_seqlens: Tuple[Any, Any], longest: Tuple[int, int], dropout_p: float,
            softmax_scale: Optional[float], causal: bool, window_size: Any, softcap: float, alibi_slopes: Any, return_attn_probs: bool,
            block_table: Any = None) -> Any:
    one = cu_seqlens[0] is cu_seqlens[1]
    suffixes = ("", "") if one and names[0] == names[1] else ("_q", "_k")
    check_heads(q, k, v)
    starts_q = _starts(f"cu_seqlens{suffixes[0]}", cu_seqlens[0], q.shape[0], names[0], f"max_seqlen{suffixes[0]}", longest[0])
    starts_k = starts_q if one and longest[0] == longest[1] and q.shape[0] == k.shape[0] else _starts(
        f"cu_seqlens{suffixes[1]}", cu_seqlens[1], None if block_table is not None else k.shape[0], names[1], f"max_seqlen{suffixes[1]}", longest[1])
    if starts_q.shape != starts_k.shape:
        raise ValueError(f"cu_seqlens_k has {starts_k.shape[0]} numbers, but cu_seqlens_q has {starts_q.shape[0]}")
    batch = starts_q.shape[0] - 1
    options = rule(q, batch, softmax_scale, causal, window_size, softcap, alibi_slopes)
    dropout = _dropout(dropout_p)
    if block_table is not None:
        integers("block_table", block_table, (batch, None), f"[batch, max_num_blocks_per_seq] with batch = {batch}")
        if dropout and return_attn_probs:
            raise NotImplementedError("flash_attn_varlen_func: return_attn_probs with dropout_p and a block_table is not implemented")
        scale = options.pop("softmax_scale", None)
        result = paged_attention(q, k, v, block_table, starts_k.diff(), actual_seq_qlen=starts_q[1:], causal=False, scale_value=scale,
                                 return_lse=return_attn_probs, **options, **dropout)
    else:
        result = flash_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, return_lse=return_attn_probs, **options, **dropout)
    if not return_attn_probs:
        return result
    dropped = dropped_weights(q, k, options, dropout, (starts_q.tolist(), starts_k.tolist(), longest)) if dropout else None
    return _with_probabilities(tuple(result), dropped)


@public(facade=True)
def flash_attn_varlen_func(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
                           dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Any = None) -> Any:
    """flash_attn_func of sequences one after the other: q [total_q, nheads, headdim], k and v [total_k, nheads_k, headdim].

    cu_seqlens_q and cu_seqlens_k int32 [batch + 1]: where sequences begin, and the end. max_seqlen_q and max_seqlen_k: the longest
    ones (no sequence may be longer). With a block_table int32 [batch, max_num_blocks_per_seq] k and v are pages [num_blocks,
    page_block_size, nheads_k, headdim]. return_attn_probs: softmax_lse [nheads, total_q], S_dmask
    [batch, nheads, max_seqlen_q, max_seqlen_k], 0 beyond a sequence.
    """
    has_form("q", q, VARLEN)
    for name, tensor in (("k", k), ("v", v)):
        has_form(name, tensor, VARLEN if block_table is None else PAGES)
    check_same(("k", "v"), k, v, {0: "total"} if block_table is None else {0: "num_blocks", 1: "page_block_size"})
    return _varlen(q, k, v, ("q", "k"), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs, block_table)


@public(facade=True)
def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
                                    dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                                    window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
                                    deterministic: bool = False, return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func of keys and values in one tensor kv [total_k, 2, nheads_k, headdim]."""
    has_form("q", q, VARLEN)
    k, v = unpacked("kv", kv, 2, _VARLEN_KV)
    return _varlen(q, k, v, ("q", "kv"), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs)


@public(facade=True)
def flash_attn_varlen_qkvpacked_func(qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                                     causal: bool = False, window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False) -> Any:
    """flash_attn_varlen_func of one tensor qkv [total, 3, nheads, headdim]."""
    q, k, v = unpacked("qkv", qkv, 3, _VARLEN_QKV)
    return _varlen(q, k, v, ("qkv", "qkv"), (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs)

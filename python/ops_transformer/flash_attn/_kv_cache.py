"""Attention of new tokens over a cache, which the call may append to, with the arguments of flash_attn_with_kvcache."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .._calls import option, public
from .._core import UNBOUNDED
from ..kv_cache import paged_attention, scatter_pa_kv_cache
from ..rowwise import rope_cached
from ._checks import DENSE, PAGES, check_heads, check_same, has_form, in_range, integers, is_tensor, marked, rule


def _as_pages(k_cache: Tensor, batch: int, cache_batch_idx: Any, block_table: Any) -> Any:
    """The block table: a dense cache [batch_cache, seqlen_cache, ..] is pages of seqlen_cache rows, one for each sequence."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx and block_table are both given, but a table says already where each sequence lies")
        return integers("block_table", block_table, (batch, None), f"[batch, max_num_blocks_per_seq] with batch = {batch}")
    if cache_batch_idx is not None:
        rows = integers("cache_batch_idx", cache_batch_idx, (batch,), f"[batch] = [{batch}]")
        in_range("cache_batch_idx", rows.tolist(), k_cache.shape[0] - 1, ", a sequence of k_cache")
        return rows[:, None]
    if batch > k_cache.shape[0]:
        raise ValueError(f"k_cache.shape[0] (batch_cache) is {k_cache.shape[0]}, but q has batch {batch}")
    return np.arange(batch)[:, None]


def _lengths(cache_seqlens: Any, batch: int, capacity: int, added: Optional[int]) -> np.ndarray:
    """int64 [batch]: tokens of each sequence in the cache before the call."""
    if cache_seqlens is None:
        if added is not None:
            raise ValueError("cache_seqlens is None, but k and v are given: it says where they are written")
        return np.full(batch, capacity)
    if isinstance(cache_seqlens, Tensor):
        lengths = integers("cache_seqlens", cache_seqlens, (batch,), f"an int, or [batch] = [{batch}]").tolist()
    else:
        lengths = [option("flash_attn_with_kvcache", "cache_seqlens", "int", cache_seqlens)] * batch
    behind = "" if added is None else f": {added} new tokens behind it, and a sequence of the cache holds {capacity}"
    in_range("cache_seqlens", lengths, capacity - (added or 0), behind)
    return np.array(lengths, np.int64)


def _check_rotary(rotary_cos: Any, rotary_sin: Any, q: Tensor, last: int, added: Optional[int]) -> None:
    if rotary_sin is None or rotary_cos is None:
        raise ValueError(f"rotary_{'sin' if rotary_sin is None else 'cos'} is None, but the other one is given: they go together")
    if added is None:
        raise ValueError("rotary_cos and rotary_sin are given, but k and v are not: the cache's keys are rotated already")
    for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        has_form(name, tensor, "[seqlen_ro, rotary_dim / 2]")
        if tensor.dtype not in (q.dtype, torch.float32):
            raise ValueError(f"{name} has dtype {tensor.dtype}, must be that of q, {q.dtype}")
    check_same(("rotary_cos", "rotary_sin"), rotary_cos, rotary_sin, {0: "seqlen_ro", 1: "rotary_dim / 2"})
    if 2 * rotary_cos.shape[1] > q.shape[-1]:
        raise ValueError(f"rotary_cos.shape[1] is {rotary_cos.shape[1]}, so rotary_dim is {2 * rotary_cos.shape[1]}, but headdim is {q.shape[-1]}")
    if last > rotary_cos.shape[0]:
        raise ValueError(f"rotary_cos.shape[0] (seqlen_ro) is {rotary_cos.shape[0]}, but the last token is the {last}th")


def _check_new(new: Tuple[Any, Any], caches: Tuple[Tensor, Tensor], q: Tensor) -> int:
    """seqlen_new of k and v, which fit their caches and q."""
    for name, tensor, cache in zip("kv", new, caches):
        has_form(name, tensor, DENSE)
        if tensor.shape[2:] != cache.shape[2:]:
            check_same((f"{name}_cache", name), cache, tensor, {2: "nheads_k", 3: "headdim"})
        if tensor.dtype != cache.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but {name}_cache has {cache.dtype}")
        if tensor.dtype == torch.float64:
            raise ValueError(f"{name} has dtype torch.float64, but tokens are appended in float16, bfloat16 or float32 only")
    k, v = new
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        check_same(("q", "k"), q, k, {0: "batch"})
        check_same(("k", "v"), k, v, {0: "batch", 1: "seqlen_new"})
    return k.shape[1]


def _slots(table: Any, places: np.ndarray, page: int, blocks: int) -> np.ndarray:
    """int64 [batch, seqlen_new]: where in the cache the tokens at `places` of their sequences lie."""
    if not isinstance(table, Tensor):  # one page for each sequence
        return table * page + places
    ids = table.numpy()
    found = ids[np.arange(len(ids))[:, None], places // page]
    for b, of_sequence in enumerate(found.tolist()):
        in_range(f"block_table[{b}]", of_sequence, blocks - 1, ", a block of k_cache, which k is written to")
    return found.astype(np.int64) * page + places % page


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: np.ndarray) -> None:
    """Writes tokens [batch, seqlen_new, ..], where they lie one after the other as one, into their slots."""
    if all(x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v)):
        scatter_pa_kv_cache(k.flatten(0, 1), v.flatten(0, 1), slots.reshape(-1), k_cache, v_cache)
        return
    for key, value, slot in zip(k, v, slots):
        scatter_pa_kv_cache(key, value, slot, k_cache, v_cache)


def _check_writable(tensors: Tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise RuntimeError("k and v are written into the cache, which has no gradients, but an argument requires them: call it under "
                           "torch.no_grad(), or pass tensors that were detached")


@public(facade=True)
def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
                            cache_seqlens: Optional[Union[int, Tensor]] = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
                            block_table: Any = None, softmax_scale: Optional[float] = None, causal: bool = False,
                            window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
                            alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False) -> Any:
    """flash_attn_func of q [batch, seqlen_q, nheads, headdim] over a cache, to which k and v are appended first.

    k_cache, v_cache [batch_cache, seqlen_cache, nheads_k, headdim]; cache_batch_idx int32 [batch] tells which of them is whose. With
    a block_table int32 [batch, max_num_blocks_per_seq] they are pages [num_blocks, page_block_size, nheads_k, headdim].
    cache_seqlens, an int or int32 [batch]: tokens of each sequence in the cache, those of its padding included; None: all.
    k, v [batch, seqlen_new, nheads_k, headdim] are written there, behind them, and the cache changes. cache_leftpad int32 [batch]:
    where a sequence begins, keys before it are padding.

    rotary_cos, rotary_sin [seqlen_ro, rotary_dim / 2], with k and v only: turn k at positions cache_seqlens, cache_seqlens + 1, ..,
    and q at the same where causal or with a window, else all of it at cache_seqlens. rotary_interleaved: pairs (0, 1), (2, 3) ..,
    else (0, rotary_dim / 2), (1, ..). The last query stands at the last key, with the appended ones. num_splits changes nothing.

    return_softmax_lse: (out, softmax_lse [batch, nheads, seqlen_q]). Without k and v there are gradients.
    """
    has_form("q", q, DENSE)
    form = DENSE if block_table is None else PAGES
    has_form("k_cache", k_cache, form)
    has_form("v_cache", v_cache, form)
    check_heads(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    check_same(("k_cache", "v_cache"), k_cache, v_cache, {0: form[1:].split(",")[0], 1: form.split(", ")[1]})
    batch = q.shape[0]
    table = _as_pages(k_cache, batch, cache_batch_idx, block_table)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None, but the other one is given: they go together")
    added = None if k is None else _check_new((k, v), (k_cache, v_cache), q)
    lengths = _lengths(cache_seqlens, batch, table.shape[1] * k_cache.shape[1], added)
    options = rule(q, batch, softmax_scale, causal, window_size, softcap, alibi_slopes)
    total = lengths if added is None else lengths + added
    if cache_leftpad is not None:
        first = integers("cache_leftpad", cache_leftpad, (batch,), f"[batch] = [{batch}]")
        in_range("cache_leftpad", first.tolist(), total.tolist(), ", where the sequence ends")
        options["mask"] = (torch.arange(int(total.max(initial=0))) >= first[:, None])[:, None, None]
    turns = rotary_cos is not None or rotary_sin is not None
    if turns:
        is_local = causal or tuple(window_size) != (-1, -1)
        last = int(lengths.max(initial=0)) + max(added or 0, q.shape[1] if is_local else 1)
        _check_rotary(rotary_cos, rotary_sin, q, last, added)
    if added is not None:
        _check_writable((q, k, v, k_cache, v_cache, rotary_cos, rotary_sin))
        places = lengths[:, None] + np.arange(added)
        slots = _slots(table, places, k_cache.shape[1], k_cache.shape[0])
        if turns:
            style, rows = "pairs" if rotary_interleaved else "halves", q.shape[1]
            same = rows == added and (is_local or rows == 1)
            turned = places if same else lengths[:, None] + np.arange(rows) * is_local
            k, q = (rope_cached(x.flatten(0, 1), at.reshape(-1), rotary_cos, rotary_sin, style=style).view(x.shape)
                    for x, at in ((k, places), (q, turned)))
        _append(k, v, k_cache, v_cache, slots)
    del options["alignment"]  # which is the default of paged_attention, as an open side is
    if options["window_right"] == UNBOUNDED:
        del options["window_right"]
    result = paged_attention(q, k_cache, v_cache, table, total, causal=False, query_layout="BSND", return_lse=return_softmax_lse,
                             scale_value=options.pop("softmax_scale", None), **options)
    return (result.out, marked(result.softmax_lse)) if return_softmax_lse else result

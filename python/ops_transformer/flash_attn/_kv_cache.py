"""Attention of new tokens over a cache, which the call may append to, with the arguments of flash_attn_with_kvcache."""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from .._calls import option, public
from .._core import UNBOUNDED
from .._torch_door import records
from ..kv_cache import paged_attention, rope_scatter_pa_kv_cache, scatter_pa_kv_cache
from ..rowwise import rope_cached
from ._checks import DENSE, FLOATS, PAGES, check_heads, check_same, has_form, in_range, integers, is_tensor, marked, rule


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
    return _page_of_each(batch)


@functools.lru_cache(maxsize=64)
def _page_of_each(batch: int) -> np.ndarray:
    """int64 [batch, 1], made once: sequence b has page b."""
    return np.arange(batch)[:, None]


def _lengths(cache_seqlens: Any, batch: int, capacity: int, added: Optional[int]) -> List[int]:
    """Tokens of each sequence in the cache before the call."""
    if cache_seqlens is None:
        if added is not None:
            raise ValueError("cache_seqlens is None, but k and v are given: it says where they are written")
        return [capacity] * batch
    if isinstance(cache_seqlens, Tensor):
        lengths = integers("cache_seqlens", cache_seqlens, (batch,), f"an int, or [batch] = [{batch}]").tolist()
    else:
        lengths = [option("flash_attn_with_kvcache", "cache_seqlens", "int", cache_seqlens)] * batch
    most = capacity - (added or 0)
    if lengths and not 0 <= min(lengths) <= max(lengths) <= most:
        behind = "" if added is None else f": {added} new tokens behind it, and a sequence of the cache holds {capacity}"
        in_range("cache_seqlens", lengths, most, behind)
    return lengths


def _check_rotary(rotary_cos: Any, rotary_sin: Any, q: Tensor, last: int, added: Optional[int]) -> None:
    if rotary_sin is None or rotary_cos is None:
        raise ValueError(f"rotary_{'sin' if rotary_sin is None else 'cos'} is None, but the other one is given: they go together")
    if added is None:
        raise ValueError("rotary_cos and rotary_sin are given, but k and v are not: the cache's keys are rotated already")
    for name, tensor in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        has_form(name, tensor, "[seqlen_ro, rotary_dim / 2]")
        if tensor.dtype not in (q.dtype, torch.float32):
            raise ValueError(f"{name} has dtype {tensor.dtype}, must be that of q, {q.dtype}")
    if rotary_cos.shape != rotary_sin.shape:
        check_same(("rotary_cos", "rotary_sin"), rotary_cos, rotary_sin, {0: "seqlen_ro", 1: "rotary_dim / 2"})
    if 2 * rotary_cos.shape[1] > q.shape[-1]:
        raise ValueError(f"rotary_cos.shape[1] is {rotary_cos.shape[1]}, so rotary_dim is {2 * rotary_cos.shape[1]}, but headdim is {q.shape[-1]}")
    if last > rotary_cos.shape[0]:
        raise ValueError(f"rotary_cos.shape[0] (seqlen_ro) is {rotary_cos.shape[0]}, but the last token is the {last}th")


def _fit(q: Any, k: Any, v: Any) -> bool:
    """Whether all is plainly as has_form, check_heads and check_same ask, which then need not look for what is wrong: small calls are
    mostly such questions."""
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    return len(of_q) == len(of_k) == len(of_v) == 4 and of_k[:3] == of_v[:3] and of_q[3] == of_k[3] and of_k[2] > 0 and \
        of_q[2] % of_k[2] == 0 and q.dtype is k.dtype is v.dtype and q.dtype in FLOATS


def _check_new(new: Tuple[Any, Any], caches: Tuple[Tensor, Tensor], q: Tensor) -> int:
    """seqlen_new of k and v, which fit their caches and q."""
    k, v = new
    if _fit(q, k, v) and q.dtype is caches[0].dtype and q.dtype is not torch.float64 and q.shape[0] == k.shape[0] and \
            k.shape[2:] == caches[0].shape[2:] and v.shape[3] == caches[1].shape[3]:
        return k.shape[1]
    for name, tensor, cache in zip("kv", new, caches):
        has_form(name, tensor, DENSE)
        check_same((f"{name}_cache", name), cache, tensor, {2: "nheads_k", 3: "headdim"})
        if tensor.dtype != cache.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but {name}_cache has {cache.dtype}")
        if tensor.dtype == torch.float64:
            raise ValueError(f"{name} has dtype torch.float64, but tokens are appended in float16, bfloat16 or float32 only")
    check_same(("q", "k"), q, k, {0: "batch"})
    check_same(("k", "v"), k, v, {0: "batch", 1: "seqlen_new"})
    return k.shape[1]


def _places(begins: List[int], count: int, steps: int = 1) -> np.ndarray:
    """int64 [batch, count]: begin, begin + steps, .. of each sequence."""
    if count == 1:  # a decoded token; a sum of NumPy's costs 3 us
        return np.array([begins], np.int64).T
    return np.array(begins, np.int64)[:, None] + np.arange(count) * steps


def _slots(table: Any, lengths: List[int], added: int, page: int, blocks: int) -> np.ndarray:
    """int64 [batch, seqlen_new]: where in the cache the tokens behind `lengths` of their sequences lie."""
    if not isinstance(table, Tensor):  # one page for each sequence
        return _places([b * page + length for b, length in enumerate(lengths)], added)
    ids, places = table.numpy(), _places(lengths, added)
    found = ids[np.arange(len(ids))[:, None], places // page]
    for b, of_sequence in enumerate(found.tolist()):
        in_range(f"block_table[{b}]", of_sequence, blocks - 1, ", a block of k_cache, which k is written to")
    return found.astype(np.int64) * page + places % page


def _in_a_row(*tensors: Tensor) -> bool:
    """Whether the tokens of [batch, seqlen, ..] lie one after the other as those of one sequence do."""
    return all([x.is_contiguous() or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors])


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: np.ndarray) -> None:
    """Writes tokens [batch, seqlen_new, ..] into their slots."""
    if _in_a_row(k, v):
        scatter_pa_kv_cache(k.flatten(0, 1), v.flatten(0, 1), slots.reshape(-1), k_cache, v_cache)
        return
    for key, value, slot in zip(k, v, slots):
        scatter_pa_kv_cache(key, value, slot, k_cache, v_cache)


def _turn_and_append(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rotary: Tuple[Tensor, Tensor], style: str,
                     places: Tuple[np.ndarray, np.ndarray], slots: np.ndarray) -> Tensor:
    """q with its rotation at the first of `places`; k with its own at the second and v are written into their slots."""
    if places[0] is places[1] and _in_a_row(q, k, v):  # in one pass over the three
        at = torch.from_numpy(places[0].reshape(-1))
        cos, sin = [table.index_select(0, at) for table in rotary]
        if cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
            cos, sin = cos.float(), sin.float()
        return rope_scatter_pa_kv_cache(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cos, sin, slots.reshape(-1), k_cache, v_cache,
                                        style=style).view(q.shape)
    q, k = (rope_cached(x.flatten(0, 1), at.reshape(-1), *rotary, style=style).view(x.shape) for x, at in zip((q, k), places))
    _append(k, v, k_cache, v_cache, slots)
    return q


def _check_writable(tensors: Tuple[Any, ...]) -> None:
    if records(*tensors):
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
    if not _fit(q, k_cache, v_cache):
        form = DENSE if block_table is None else PAGES
        for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            has_form(name, tensor, DENSE if name == "q" else form)
        check_heads(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
        check_same(("k_cache", "v_cache"), k_cache, v_cache, {0: form[1:].split(",")[0], 1: form.split(", ")[1]})
    batch = q.shape[0]
    table = _as_pages(k_cache, batch, cache_batch_idx, block_table)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None, but the other one is given: they go together")
    added = None if k is None else _check_new((k, v), (k_cache, v_cache), q)
    lengths = _lengths(cache_seqlens, batch, table.shape[1] * k_cache.shape[1], added)
    options = rule(q, batch, softmax_scale, causal, window_size, softcap, alibi_slopes)
    total = lengths if added is None else [length + added for length in lengths]
    if cache_leftpad is not None:
        first = integers("cache_leftpad", cache_leftpad, (batch,), f"[batch] = [{batch}]")
        in_range("cache_leftpad", first.tolist(), total, ", where the sequence ends")
        options["mask"] = (torch.arange(max(total, default=0)) >= first[:, None])[:, None, None]
    turns = rotary_cos is not None or rotary_sin is not None
    if turns:
        is_local = causal or tuple(window_size) != (-1, -1)
        last = max(lengths, default=0) + max(added or 0, q.shape[1] if is_local else 1)
        _check_rotary(rotary_cos, rotary_sin, q, last, added)
    if added is not None:
        _check_writable((q, k, v, k_cache, v_cache, rotary_cos, rotary_sin))
        slots = _slots(table, lengths, added, k_cache.shape[1], k_cache.shape[0])
        if turns:
            rows, places = q.shape[1], _places(lengths, added)
            at = places if rows == added and (is_local or rows == 1) else _places(lengths, rows, is_local)
            q = _turn_and_append(q, k, v, k_cache, v_cache, (rotary_cos, rotary_sin), "pairs" if rotary_interleaved else "halves",
                                 (at, places), slots)
        else:
            _append(k, v, k_cache, v_cache, slots)
    # What is the default of paged_attention is not looked at again.
    del options["alignment"]
    for side in ("window_left", "window_right"):
        if options[side] == UNBOUNDED:
            del options[side]
    if "softmax_scale" in options:
        options["scale_value"] = options.pop("softmax_scale")
    total = np.array(total, np.int64)
    if not return_softmax_lse:
        return paged_attention(q, k_cache, v_cache, table, total, causal=False, query_layout="BSND", **options)
    result = paged_attention(q, k_cache, v_cache, table, total, causal=False, query_layout="BSND", return_lse=True, **options)
    return result.out, marked(result.softmax_lse)

"""Paged caches and merging: writing, reading, decoding over pages, and joining attention over parts of the keys.

A cache in form NZ, [blocks, heads * D / e, block_size, e], cuts the heads * D numbers of a token in chunks of e (16 of two bytes,
32 of one). It is read and written through a view [blocks, block_size, 1, heads * D]: no copy.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..flash_attention import merge_attention
from ..kv_cache import gather_pa_kv_cache, paged_attention, scatter_pa_kv_cache
from ._arguments import eightfold
from ._edge import device_function, is_tensor, refuse_given

_COMPRESSED = "which rows that form keeps is not stated for the device, so it is not implemented"


def _is_nz(cache: Tensor, heads: int, width: int) -> bool:
    return cache.dim() == 4 and cache.shape[2:] != (heads, width) and cache.shape[1] * cache.shape[3] == heads * width


def _places(tensor: Tensor, cache: Tensor, slots: Tensor, mode: Optional[str], name: str) -> Tuple[Tensor, int]:
    """Checks a write; the cache as a view [blocks, block_size, ..], and its block_size."""
    if tensor.dim() != 3:
        raise NotImplementedError(f"{name} has {tensor.dim()} dimensions, must be [tokens, heads, D]: {_COMPRESSED}")
    if tensor.dtype != cache.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, but its cache is {cache.dtype}")
    tokens, heads, width = tensor.shape
    if cache.dim() != 4:
        raise ValueError(f"the cache of {name} has {cache.dim()} dimensions, must have 4")
    nz = mode == "PA_NZ"
    if nz:
        chunk = 32 if cache.element_size() == 1 else 16 if cache.element_size() == 2 else cache.shape[3]
        if cache.shape[1] * cache.shape[3] != heads * width or cache.shape[3] != chunk:
            raise ValueError(f"the cache of {name} is {list(cache.shape)}, must be [blocks, {heads * width} / {chunk}, block_size, {chunk}] "
                             f"with cache_mode PA_NZ ({name} is {list(tensor.shape)})")
        rows, size = cache.permute(0, 2, 1, 3), cache.shape[2]
    else:
        if tuple(cache.shape[2:]) != (heads, width):
            raise ValueError(f"the cache of {name} is {list(cache.shape)}, must be [blocks, block_size, {heads}, {width}]")
        rows, size = cache, cache.shape[1]
    if slots.dim() != 1 or slots.shape[0] != tokens:
        raise ValueError(f"slot_mapping is {list(slots.shape)}, must be [{tokens}], one slot for each token of {name}")
    most = cache.shape[0] * size
    if tokens and int(slots.max()) >= most:
        raise ValueError(f"slot_mapping has {int(slots.max())}, but the cache has {most} slots")
    return rows, size


def _write(pairs: Sequence[Tuple[str, Tensor, Tensor]], slots: Tensor, modes: Sequence[Optional[str]]) -> None:
    """Rows of tensors [tokens, heads, D] into the slots of their caches; slots below 0 are skipped, and all is checked first."""
    places = [_places(tensor, cache, slots, mode, name) for (name, tensor, cache), mode in zip(pairs, modes)]
    taken = slots >= 0
    where = slots[taken].long()
    with torch.no_grad():
        for (_, tensor, _), (rows, size) in zip(pairs, places):
            rows[where // size, where % size] = tensor[taken].reshape(-1, *rows.shape[2:])


def _check_pair(key: Tensor, value: Tensor, slots: Tensor, mode: Optional[str]) -> None:
    for name, tensor in (("key", key), ("value", value), ("slot_mapping", slots)):
        is_tensor(name, tensor)
    if mode not in ("PA_NZ", "Norm", None):
        raise ValueError(f'cache_mode is "{mode}", must be PA_NZ or Norm')
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, but value is {value.dtype}")


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _write_pair(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, mode: Optional[str]) -> None:
    if mode != "PA_NZ" and key.dtype in _FLOATS and key.dim() == 3 and key_cache.dtype == value_cache.dtype == key.dtype:
        negative = slots < 0
        scatter_pa_kv_cache(key, value, slots.masked_fill(negative, -1), key_cache, value_cache)
        return
    _write([("key", key, key_cache), ("value", value, value_cache)], slots, [mode, mode])


def _nothing(*_: Any, **__: Any) -> None:
    return None


@device_function(fake=_nothing, mutates=("key_cache", "value_cache"))
def npu_scatter_pa_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
                            compress_lens: Optional[Tensor] = None, compress_seq_offsets: Optional[Tensor] = None,
                            seq_lens: Optional[Tensor] = None, cache_mode: Optional[str] = "PA_NZ") -> None:
    """Writes tokens into their slots of the caches, in place. The default form is PA_NZ; "Norm" or None is [blocks, rows, heads, D]."""
    refuse_given("npu_scatter_pa_kv_cache", _COMPRESSED, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets,
                 seq_lens=seq_lens)
    _check_pair(key, value, slot_mapping, cache_mode)
    _write_pair(key, value, key_cache, value_cache, slot_mapping, cache_mode)


def _like_caches(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


@device_function(fake=_like_caches)
def npu_scatter_pa_kv_cache_functional(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
                                       compress_lens: Optional[Tensor] = None, compress_seq_offsets: Optional[Tensor] = None,
                                       seq_lens: Optional[Tensor] = None,
                                       cache_mode: Optional[str] = "PA_NZ") -> Tuple[Tensor, Tensor]:
    """npu_scatter_pa_kv_cache into copies, which are the result."""
    refuse_given("npu_scatter_pa_kv_cache_functional", _COMPRESSED, compress_lens=compress_lens,
                 compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    _check_pair(key, value, slot_mapping, cache_mode)
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    _write_pair(key, value, key_cache, value_cache, slot_mapping, cache_mode)
    return key_cache, value_cache


# ---- reading ---------------------------------------------------------------------------------------------------------


def _pages(cache: Tensor, heads: int, width: int) -> Tensor:
    """[blocks, rows, heads, D], or [blocks, rows, chunks, e] of NZ, whose token is the same vector."""
    return cache.permute(0, 2, 1, 3) if _is_nz(cache, heads, width) else cache


def _rows_of(tables: Tensor, lengths: List[int], offsets: List[int], size: int, blocks: int, most: int) -> Tuple[Tensor, Tensor]:
    """(rows of the flat cache, whether they exist) of all tokens."""
    found, exists = [], []
    for table, length, offset in zip(tables, lengths, offsets):
        position = torch.arange(length)
        column = position // size + offset // size
        inside = column < table.shape[0]
        block = table[column.clamp(max=table.shape[0] - 1)].long() if table.shape[0] else torch.full_like(position, -1)
        good = inside & (block >= 0) & (block < blocks)
        found.append(torch.where(good, block * size + position % size, 0))
        exists.append(good)
    return (torch.cat(found)[:most], torch.cat(exists)[:most]) if found else (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))


def _gather(key_cache: Tensor, value_cache: Tensor, tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor, offsets: Optional[Tensor],
            is_cumulative: bool) -> None:
    numbers = seq_lens.tolist()
    lengths = [end - start for start, end in zip(numbers, numbers[1:])] if is_cumulative else numbers
    if any(length < 0 for length in lengths) or (is_cumulative and (not numbers or numbers[0] != 0)):
        raise ValueError(f"seq_lens is {numbers}, must be " + ("running totals from 0 on" if is_cumulative else "not negative"))
    if len(lengths) != tables.shape[0]:
        raise ValueError(f"seq_lens has {len(lengths)} sequences, but block_tables {tables.shape[0]}")
    is_norm = not (_is_nz(key_cache, *key.shape[1:]) or _is_nz(value_cache, *value.shape[1:]))
    if is_norm and sum(lengths) == key.shape[0] == value.shape[0] and offsets is None and key.dtype in _FLOATS and value.dtype == key.dtype:
        found = gather_pa_kv_cache(key_cache, value_cache, tables, seq_lens, cumulative_lengths=is_cumulative, zero_fill=True)
        key.copy_(found[0]), value.copy_(found[1])
        return
    starts = [0] * len(lengths) if offsets is None else offsets.tolist()
    for cache, out in ((key_cache, key), (value_cache, value)):
        pages = _pages(cache, *out.shape[1:])
        size = pages.shape[1]
        rows, exists = _rows_of(tables, lengths, starts, size, pages.shape[0], out.shape[0])
        flat = pages[rows // size, rows % size].reshape(len(rows), *out.shape[1:])
        out[:len(rows)] = flat.masked_fill(~exists[:, None, None], 0)


@device_function(fake=_nothing, mutates=("key", "value"))
def npu_gather_pa_kv_cache(key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor, *,
                           seq_offset: Optional[Tensor] = None, is_seq_lens_cumsum: bool = False) -> None:
    """Copies cached tokens, batch after batch, into key and value [tokens, heads, D], in place. What no block holds becomes zeros."""
    _gather(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum)


@device_function(fake=lambda key_cache, value_cache, block_tables, seq_lens, key, value, **_: (torch.empty_like(key), torch.empty_like(value)))
def npu_gather_pa_kv_cache_functional(key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor,
                                      value: Tensor, *, seq_offset: Optional[Tensor] = None,
                                      is_seq_lens_cumsum: bool = False) -> Tuple[Tensor, Tensor]:
    """npu_gather_pa_kv_cache into copies of key and value."""
    key, value = key.clone(), value.clone()
    _gather(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum)
    return key, value


# ---- the older names, whose arguments have no documented names -------------------------------------------------------


@device_function(fake=_nothing, mutates=("out",))
def _npu_paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, num_heads: int, scale: float,
                         block_table: Tensor, context_lens: Tensor, out: Tensor, workspace: Optional[Tensor] = None) -> None:
    """One query token [B, N, D] of each sequence over pages [blocks, rows, N, D]; out is written in place."""
    for name, count, wanted in (("query", query.shape[1], num_heads), ("key_cache", key_cache.shape[2], num_kv_heads)):
        if count != wanted:
            raise ValueError(f"{name} has {count} heads, but {'num_heads' if name == 'query' else 'num_kv_heads'} is {wanted}")
    paged_attention(query.detach()[:, :, None], key_cache.detach(), value_cache.detach(), block_table, context_lens, scale_value=float(scale),
                    causal=False, out=out[:, :, None])


@device_function(fake=_nothing, mutates=("key_cache", "value_cache"))
def _npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Writes tokens into their slots, in place; the form of the caches is seen by their shapes."""
    pairs = [("key", key, key_cache), ("value", value, value_cache)]
    _write(pairs, slot_indices, ["PA_NZ" if _is_nz(cache, *tensor.shape[1:]) else None for _, tensor, cache in pairs])


@device_function(fake=_nothing, mutates=("key_cache",))
def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """The same of one cache."""
    _write([("key", key, key_cache)], slot_indices, ["PA_NZ" if _is_nz(key_cache, *key.shape[1:]) else None])


@device_function(mutates=("key_cache",))
def npu_scatter_pa_cache(key: Tensor, slot_mapping: Tensor, *, compress_lens: Optional[Tensor] = None,
                         compress_seq_offsets: Optional[Tensor] = None, seq_lens: Optional[Tensor] = None, key_cache: Tensor) -> Tensor:
    """key_cache [blocks, rows, heads, D], into whose slots tokens are written, in place."""
    refuse_given("npu_scatter_pa_cache", _COMPRESSED, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets,
                 seq_lens=seq_lens)
    if key.dim() == 3 and _is_nz(key_cache, *key.shape[1:]):
        raise ValueError(f"key_cache is {list(key_cache.shape)}, must be [blocks, block_size, {key.shape[1]}, {key.shape[2]}]")
    _npu_reshape_and_cache_siso(key, key_cache, slot_mapping)
    return key_cache


# ---- merging ---------------------------------------------------------------------------------------------------------


@device_function
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> Tuple[Tensor, Tensor]:
    """(out, lse) of parts over different keys: lse [N] and local_out [N, H] each. update_type 1 gives lse, 0 an empty tensor."""
    if not isinstance(lse, (list, tuple)) or not isinstance(local_out, (list, tuple)) or len(lse) != len(local_out) or not lse:
        raise ValueError("lse and local_out must be lists of one length, of at least one tensor")
    if update_type not in (0, 1):
        raise ValueError(f"update_type is {update_type}, must be 0 or 1")
    merged = merge_attention(torch.stack(list(local_out)), torch.stack(list(lse)))
    return merged.attention_out, merged.softmax_lse if update_type == 1 else merged.softmax_lse.new_empty(0)


@device_function
def npu_ring_attention_update(prev_attn_out: Tensor, prev_softmax_max: Tensor, prev_softmax_sum: Tensor, cur_attn_out: Tensor,
                              cur_softmax_max: Tensor, cur_softmax_sum: Tensor, *, actual_seq_qlen: Optional[Tensor] = None,
                              input_layout: str = "SBH", input_softmax_layout: str = "") -> Tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum) of two parts: out [S, B, H] with [B, N, S, 8], or TND [T, N, D] with [T, N, 8]."""
    if input_layout not in ("SBH", "TND"):
        raise ValueError(f'input_layout is "{input_layout}", must be SBH or TND')
    parts = [(prev_attn_out, prev_softmax_max, prev_softmax_sum), (cur_attn_out, cur_softmax_max, cur_softmax_sum)]
    outs, tops, sums = zip(*parts)
    if any(out.dim() != 3 or top.dim() != (4 if input_layout == "SBH" else 3) or top.shape != total.shape for out, top, total in parts):
        raise ValueError(f"input_layout {input_layout} means parts of " + ("[S, B, H] with [B, N, S, 8]" if input_layout == "SBH" else
                         "[T, N, D] with [T, N, 8]") + f", but they are {[list(tensor.shape) for part in parts for tensor in part]}")
    if input_layout == "SBH":
        heads = tops[0].shape[1]
        outs = [out.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for out in outs]
    tops, sums = ([part[..., 0] for part in group] for group in (tops, sums))
    if cur_attn_out.dtype != prev_attn_out.dtype:
        outs = [outs[0], outs[1].to(outs[0].dtype)]
    merged = merge_attention(torch.stack(list(outs)), softmax_max=torch.stack(tops), softmax_sum=torch.stack(sums))
    out = merged.attention_out
    if input_layout == "SBH":
        out = out.permute(2, 0, 1, 3).flatten(2)
    return out, eightfold(merged.softmax_max), eightfold(merged.softmax_sum)

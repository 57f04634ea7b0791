"""One call of attention for inference, for npu_fused_infer_attention_score and what is a part of it.

One problem in the core's words: views of query, keys and values by heads, lengths for each sequence, the rule of the mask; then
flash_attention or, with a block table, paged_attention. What is left open by the device's pages:

    rows that see no key     zeros, and lse = +inf
    rows behind a length     zeros (queries), never read (keys)
    pse_shift                is added after scaling
    int8 keys and values     (q + offset) * scale; pages with scales for each token are read where they are, other dense or paged
                             ones become float32 first
    *_NBSD                   results are [N, B, S, D]
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..flash_attention import flash_attention
from ..kv_cache import ScaledPages, paged_attention
from ._arguments import (Rule, by_heads, head_dim_of, in_layout, integers, lengths_of, per_batch, quantised,
                         rule_of, running, starts_tensor, totals, unpack_int4)
from ._edge import missing

_LAYOUTS = {"BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD", "TND": "TND", "NTD": "NTD", "BNSD_BSND": "BSND", "BSH_NBSD": "NBSD",
            "BSND_NBSD": "NBSD", "BNSD_NBSD": "NBSD", "TND_NTD": "NTD", "NTD_TND": "TND", "BSH_BNSD": "BNSD", "BSND_BNSD": "BNSD",
            "SH": "SH"}


class Kv(NamedTuple):
    """Scales of keys or values of small integers."""

    scale: Optional[Tensor]
    offset: Optional[Tensor]
    mode: int


class Problem(NamedTuple):
    query: Tensor  # [B, N, S, D], or [T, N, D]
    key: Any  # likewise, or pages, or ScaledPages
    value: Any
    out_layout: str
    q_lengths: Optional[List[int]]  # of each sequence, where they are not all of S
    q_starts: Optional[List[int]]  # where its rows begin, behind left padding
    kv_lengths: Optional[List[int]]
    varlen: bool  # query, and keys that are no pages, are TND
    block_table: Optional[Tensor]
    rule: Rule
    more: Dict[str, Any]  # further options of the core


# ---- keys and values -------------------------------------------------------------------------------------------------


def _spread(scale: Tensor, shape: Sequence[int], mode: int, is_paged: bool) -> Tensor:
    """A scale that broadcasts against keys [B, N, S, D] (pages [blocks, rows, N, D])."""
    heads, width = (shape[2], shape[3]) if is_paged else (shape[1], shape[3])
    if scale.numel() == 1:
        return scale.reshape(())
    if mode == 0:  # per channel: [N, 1, D], [N, D] or [H]
        per_head = scale.reshape(heads, width)
        return per_head if is_paged else per_head[:, None]
    if mode == 2:  # per head
        return scale.reshape(heads, 1) if is_paged else scale.reshape(heads, 1, 1)
    if mode == 1 and not is_paged:  # per token [B, S]
        return scale.reshape(shape[0], 1, -1, 1)[:, :, :shape[2]]
    if mode == 3 and not is_paged:  # per token and head [B, N, S]
        return scale.reshape(shape[0], heads, -1, 1)[:, :, :shape[2]]
    raise ValueError(f"antiquant_mode {mode} does not go with {'pages' if is_paged else 'keys that are no pages'}")


def _floats(name: str, tensor: Tensor, kv: Kv, is_paged: bool) -> Any:
    """Integers as float32; pages with a scale for each token as ScaledPages, which attention reads where they are."""
    if tensor.dtype not in (torch.int8, torch.int32):
        return tensor
    if kv.scale is None:
        raise ValueError(f"{name} has dtype {tensor.dtype}, but no scales of it are given")
    if tensor.dtype == torch.int32:
        tensor = unpack_int4(tensor)
    if is_paged and kv.mode in (4, 5):
        blocks, rows, heads = tensor.shape[:3]
        wide = [None if number is None else (number.reshape(blocks, rows, 1) if kv.mode == 4 else
                                             number.reshape(blocks, heads, rows).transpose(1, 2)).float().expand(blocks, rows, heads)
                .unsqueeze(-1) for number in (kv.scale, kv.offset)]
        return ScaledPages(tensor, *wide)
    numbers = tensor.float()
    if kv.offset is not None:
        numbers = numbers + _spread(kv.offset.float(), tensor.shape, kv.mode, is_paged)
    return numbers * _spread(kv.scale.float(), tensor.shape, kv.mode, is_paged)


def joined_scales(joined: Tuple[Optional[Tensor], Optional[Tensor]], mode: int, split: Tuple[Tuple[Optional[Tensor], Optional[Tensor], int], ...]
            ) -> Tuple[Kv, Kv]:
    """Of keys and of values: given apart, or joined along the first dimension."""
    if any(scale is not None for scale, _, _ in split):
        return Kv(*split[0]), Kv(*split[1])
    scale, offset = joined
    if scale is None:
        return Kv(None, None, 0), Kv(None, None, 0)
    return tuple(Kv(scale[i], None if offset is None else offset[i], mode) for i in (0, 1))  # type: ignore[return-value]


def _pages(name: str, cache: Tensor, layout: str, kv_heads: int) -> Tensor:
    """[blocks, rows, N, D] of a cache in one of its three forms; the one of 16 columns a tile is copied."""
    if cache.dim() == 3:
        if cache.shape[2] % kv_heads:
            raise ValueError(f"{name} is {list(cache.shape)}, whose last dimension is not {kv_heads} heads of one size")
        return cache.unflatten(2, (kv_heads, cache.shape[2] // kv_heads))
    if cache.dim() == 4:
        if cache.shape[1] != kv_heads:
            raise ValueError(f"{name} is {list(cache.shape)}, must be [blocks, num_key_value_heads = {kv_heads}, block_size, D]")
        return cache.transpose(1, 2)
    if cache.dim() == 5:
        return cache.permute(0, 3, 1, 2, 4).flatten(3)
    raise ValueError(f"{name} has {cache.dim()} dimensions, must be pages of 3 to 5 with a block_table")


# ---- the problem -----------------------------------------------------------------------------------------------------


def _starts(lengths: Sequence[int], size: int, padding: Tensor) -> List[int]:
    """Where the rows of every sequence begin that stand at the right end of `size`, before `padding` rows."""
    return [size - max(int(padding), 0) - length for length in lengths]


def _moved(tensor: Tensor, starts: Sequence[int]) -> Tensor:
    """[B, N, S, D] whose rows begin at `starts`, moved to the left end."""
    return torch.stack([row.roll(-start, 1) for row, start in zip(tensor, starts)])


def _without_padding(k: Tensor, v: Tensor, lengths: Sequence[int], padding: Tensor, query_len: int) -> Tuple[Tensor, Tensor, List[int]]:
    """Keys and values at the left end, and their lengths: none where one query's keys would begin before the tensor."""
    starts = _starts(lengths, k.shape[2], padding)
    for i, (start, length) in enumerate(zip(starts, lengths)):
        if start < 0 and query_len > 1:
            raise ValueError(f"kv_padding_size is {int(padding)} and the length of sequence {i} is {length}, more than the {k.shape[2]} rows of key")
    kept = [0 if start < 0 else length for start, length in zip(starts, lengths)]
    return _moved(k, starts), _moved(v, starts), kept


def _joined(tensors: Sequence[Tensor], name: str, layout: str, kv_heads: int) -> Tuple[Tensor, List[int]]:
    """Tensors of batch 1 one after the other: [T, N, D], and their lengths."""
    rows = [by_heads(name, tensor, layout, kv_heads)[0].transpose(0, 1) for tensor in tensors]
    return torch.cat(rows), [row.shape[0] for row in rows]


def _mask(mask: Optional[Tensor], mode: int, query_len: int, batch: int, varlen: bool) -> Optional[Tensor]:
    """A mask of 4 dimensions: (S, S), (B, S) of one query, (B, S, S) and (1, S, S) are other forms of it."""
    if mask is None or mode in (2, 3, 4) or mask.dim() == 4:
        return mask
    if mask.dim() == 2 and not varlen and query_len == 1 and mask.shape[0] == batch:
        return mask[:, None, None]
    return mask[:, None] if mask.dim() == 3 else mask


def _columns(tensor: Optional[Tensor], rows: int, columns: int) -> Optional[Tensor]:
    """The part that a call reads of a mask or pse whose last dimensions may be larger."""
    if tensor is None or tensor.dim() < 2:
        return tensor
    return tensor[..., :rows if tensor.shape[-2] > 1 else 1, :columns]


def _answer(p: Problem, wants_lse: bool) -> Tuple[Tensor, Optional[Tensor]]:
    """(out, lse) by heads: [B, N, S, D] and [B, N, S], or [T, N, D] and [N, T]."""
    query, packed = p.query, None
    options = {**p.rule.options(), **p.more}
    if not p.varlen and p.q_lengths is not None and any(length != query.shape[2] for length in p.q_lengths):
        row, first = torch.arange(query.shape[2])[None], 0 if p.q_starts is None else torch.tensor(p.q_starts)[:, None]
        inside = (row >= first) & (row < first + torch.tensor(p.q_lengths)[:, None])
        packed = inside
        query = query.transpose(1, 2)[inside]
        if "query_rope" in options:
            options["query_rope"] = options["query_rope"].transpose(1, 2)[inside]
    ends = running(p.q_lengths) if p.varlen or packed is not None else None
    if p.block_table is not None:
        options.setdefault("alignment", "top_left")
        given = paged_attention(query, p.key, p.value, p.block_table, p.kv_lengths, causal=False, return_lse=wants_lse,
                                scale_value=options.pop("softmax_scale"), actual_seq_qlen=ends, **options)
    else:
        if ends is not None:
            options["cu_seqlens_q"] = starts_tensor(ends)
        if p.key.dim() == 3:
            options["cu_seqlens_k"] = starts_tensor(running(p.kv_lengths))
        elif p.kv_lengths is not None:
            options["kv_lengths"] = p.kv_lengths
        given = flash_attention(query, p.key, p.value, return_lse=wants_lse, **options)
    out, lse = given if wants_lse else (given, None)
    if packed is not None:
        wide = out.new_zeros((*packed.shape, *out.shape[1:]))
        wide[packed] = out
        out = wide.transpose(1, 2)
        if lse is not None:
            all_rows = lse.new_full((*packed.shape, lse.shape[0]), -torch.inf)
            all_rows[packed] = lse.transpose(0, 1)
            lse = all_rows.transpose(1, 2)
    return out, lse


def result(p: Problem, lse_flag: bool, quant: Tuple[Optional[Tensor], Optional[Tensor]]) -> Tuple[Tensor, Tensor]:
    """Attention in the layout of results, int8 where a scale of the output is given; and lse."""
    out, lse = _answer(p, lse_flag)
    scale, offset = quant
    if scale is not None:
        heads, width = out.shape[1], out.shape[-1]
        shaped = [None if t is None else (t.reshape(()) if t.numel() == 1 else
                                          (t.reshape(heads, width) if p.varlen else t.reshape(heads, 1, width))).float() for t in quant]
        out = out.float() * shaped[0]
        out = quantised(out if offset is None else out + shaped[1])
    if lse is None:
        return in_layout(out, p.out_layout), torch.zeros(1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return in_layout(out, p.out_layout), (lse.transpose(0, 1) if p.varlen else lse).unsqueeze(-1).contiguous()


def _check_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f'input_layout is "{layout}", must be one of {", ".join(_LAYOUTS)}')


def problem(name: str, query: Tensor, key: Union[Tensor, Sequence[Tensor]], value: Union[Tensor, Sequence[Tensor]], *, layout: str,
             heads: int, kv_heads: int, scale: float, pse: Optional[Tensor], mask: Optional[Tensor], mode: int, pre: int, following: int,
             q_lengths: Any, kv_lengths: Any, block_table: Optional[Tensor], block_size: int = 0,
             scales: Tuple[Kv, Kv] = (Kv(None, None, 0), Kv(None, None, 0)), padding: Tuple[Optional[Tensor], Optional[Tensor]] = (None, None),
             shared: Tuple[Optional[Tensor], Optional[Tensor], Any] = (None, None, None), ropes: Tuple[Optional[Tensor], Optional[Tensor]] = (None, None),
             sink: Optional[Tensor] = None) -> Problem:
    _check_layout(layout)
    if (ropes[0] is None) != (ropes[1] is None):
        raise ValueError("query_rope and key_rope go together, but one of them is not given")
    given, varlen = layout.partition("_")[0], layout.partition("_")[0] in ("TND", "NTD")
    width = head_dim_of(query, given, heads)
    q = by_heads("query", query, given, heads)
    if q.shape[1] != heads:
        raise ValueError(f"num_heads is {heads}, but query has {q.shape[1]} heads in input_layout {layout}")
    kv_heads = kv_heads or heads
    is_list = isinstance(key, (list, tuple))
    more: Dict[str, Any] = {"softmax_scale": float(scale)}
    q_starts: Optional[List[int]] = None
    if query.dtype == torch.int8:
        missing(name, "int8 queries: the core has no attention of integer products (full quantisation)")
    if is_list and len(key) == 1:
        key, value, is_list = key[0], value[0], False
    if block_table is not None:
        k, v = (_pages(what, cache, given, kv_heads) for what, cache in (("key", key), ("value", value)))
        if block_size and k.shape[1] != block_size:
            raise ValueError(f"block_size is {block_size}, but a page of key has {k.shape[1]} rows")
        if kv_lengths is None:
            raise ValueError("block_table is given, but the lengths of keys are not")
        batch = block_table.shape[0]
    elif is_list:
        if kv_lengths is not None:
            missing(name, "lengths of keys beside lists of tensors")
        (k, lengths), (v, _) = _joined(key, "key", given, kv_heads), _joined(value, "value", given, kv_heads)
        kv_lengths, batch = lengths, len(lengths)
    else:
        if "H" in given and key.shape[-1] % kv_heads:
            raise ValueError(f"{layout}: the last dimension of key is {key.shape[-1]}, which is not num_key_value_heads = {kv_heads} "
                             "heads of one size")
        k, v = (by_heads(what, tensor, given, kv_heads) for what, tensor in (("key", key), ("value", value)))
        batch = q.shape[0]
    k, v = (_floats(what, tensor, kv, block_table is not None) for what, tensor, kv in zip(("key", "value"), (k, v), scales))
    if varlen:
        if q_lengths is None or (kv_lengths is None and not is_list):
            raise ValueError(f"input_layout {layout} needs the lengths of queries and keys, running totals without a leading 0")
        q_list = lengths_of(totals("actual_seq_qlen", q_lengths))
        kv_list = integers("actual_seq_kvlen", kv_lengths) if block_table is not None or is_list else \
            lengths_of(totals("actual_seq_kvlen", kv_lengths))
        query_len, batch = max(q_list, default=0), len(q_list)
        if len(kv_list) < batch or (block_table is None and len(kv_list) != batch):
            raise ValueError(f"the lengths of queries are {batch}, those of keys {len(kv_list)}")
        kv_list = kv_list[:batch]
    else:
        query_len = q.shape[2]
        q_list = None if query_len == 1 and padding[0] is None else per_batch("actual_seq_qlen", q_lengths, batch)
        kv_list = kv_lengths if is_list else per_batch("actual_seq_kvlen", kv_lengths, batch)
        for i, length in enumerate(q_list or ()):
            if not 0 <= length <= query_len:
                raise ValueError(f"the lengths of queries have {length} for sequence {i}, must be 0 to the {query_len} of query")
        if padding != (None, None) and (mask is not None or pse is not None):
            missing(name, "a mask or pse_shift beside left padding: which of their rows and columns are meant is not stated")
        if padding[0] is not None:
            if q_list is None:
                raise ValueError("query_padding_size needs lengths of queries")
            q_starts = _starts(q_list, query_len, padding[0])
            if min(q_starts, default=0) < 0:
                raise ValueError(f"query_padding_size is {int(padding[0])} and the lengths of queries are {q_list}, more than the {query_len} rows of query")
        if padding[1] is not None:
            if kv_list is None or block_table is not None or is_list:
                raise ValueError("kv_padding_size needs lengths of keys, and goes with neither pages nor lists of tensors")
            k, v, kv_list = _without_padding(k, v, kv_list, padding[1], query_len)
    if shared[0] is not None:
        if block_table is not None or is_list or varlen:
            raise ValueError("a shared prefix goes with neither pages, lists of tensors nor TND")
        k, v, kv_list = _behind_prefix(k, v, kv_list, shared, given, kv_heads)
    if ropes[0] is not None:
        more["query_rope"] = by_heads("query_rope", ropes[0], given, heads)
        more["key_rope"] = _pages("key_rope", ropes[1], given, kv_heads) if block_table is not None else \
            by_heads("key_rope", ropes[1], given, kv_heads)
    if sink is not None:
        more["sinks"] = sink.float()
    columns = _keys(k, block_table, kv_list)
    if pse is not None:
        more["bias"] = _columns(pse, query_len, columns)
    if mode not in (0, 1, 2, 3, 4):
        if mode == 9:
            missing(name, "sparse_mode 9, the mask of a tree: kv_cache.paged_attention(tree_mask=) has trees")
        raise ValueError(f"sparse_mode is {mode}, must be 0 to 4")
    if query_len == 1 and not varlen and ropes[0] is None:
        if mode in (2, 3, 4) and mask is not None and mask.shape[-2:] == (2048, 2048) and batch != 2048:
            raise ValueError(f"atten_mask is {list(mask.shape)}, the compressed one of sparse_mode {mode}, which does not count for one query: "
                             "pass none, or one of (B, Skv)")
        mode = 1  # sparse_mode, pre and next tokens do not count for one query
    rule = rule_of(mode, _mask(mask, mode, query_len, batch, varlen), pre, following)
    if rule.mask is not None:
        rule = rule._replace(mask=_columns(rule.mask, query_len, columns))
    return Problem(q, k, v, _LAYOUTS[layout], q_list, q_starts, kv_list, varlen, block_table, rule, more)


def _keys(key: Any, block_table: Optional[Tensor], lengths: Optional[List[int]]) -> int:
    """Columns that a mask needs: those of the longest sequence."""
    if block_table is not None or key.dim() == 3:
        return max(lengths or [0], default=0)
    return key.shape[2]


def _behind_prefix(key: Tensor, value: Tensor, lengths: Optional[List[int]], shared: Tuple[Any, Any, Any], layout: str,
                   kv_heads: int) -> Tuple[Tensor, Tensor, List[int]]:
    """Keys and values of every sequence behind those that all of them share."""
    count = shared[0].shape[layout.index("S")] if shared[2] is None else integers("actual_shared_prefix_len", shared[2])[0]
    joined = []
    for tensor, prefix in ((key, shared[0]), (value, shared[1])):
        first = by_heads("shared_prefix", prefix, layout, kv_heads)[:, :, :count]
        joined.append(torch.cat([first.expand(tensor.shape[0], -1, -1, -1).to(tensor.dtype), tensor], 2))
    lengths = [key.shape[2]] * key.shape[0] if lengths is None else lengths
    return joined[0], joined[1], [count + length for length in lengths]


def no_keys(query: Tensor, key: Any) -> bool:
    return query.numel() == 0 or (isinstance(key, Tensor) and key.numel() == 0)


def of_no_keys(query: Tensor, value: Tensor, layout: str, heads: int, kv_heads: int, lse_flag: bool) -> Tuple[Tensor, Tensor]:
    """Zeros, where there is no query or no key."""
    _check_layout(layout)
    given = layout.partition("_")[0]
    q = by_heads("query", query, given, heads)
    width = value.shape[-1] // (kv_heads or heads) if "H" in given else value.shape[-1]
    out = in_layout(q.new_zeros((*q.shape[:-1], width)), _LAYOUTS[layout])
    lse = torch.full((*q.shape[:-1], 1), torch.inf) if lse_flag else torch.zeros(1)
    return out, lse

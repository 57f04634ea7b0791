"""Tokens sorted for the experts, and back: npu_moe_init_routing (v1, v2, quant), npu_moe_finalize_routing, npu_moe_re_routing."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..moe import moe_finalize, moe_permute, moe_routing
from ..quant import dynamic_quant
from ._arguments import quantised
from ._edge import device_function, is_tensor, missing, without_gradient
from ._rows import routing


def _init_shapes(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Tuple[Tensor, Tensor, Tensor]:
    n, k = expert_idx.shape
    return (x.new_empty((min(n, active_num) * k, x.shape[1])), expert_idx.new_empty(n * k, dtype=torch.int32),
            expert_idx.new_empty(n * k, dtype=torch.int32))


@device_function(fake=_init_shapes, gradients=("x",))
def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expanded_x, expanded_row_idx, expanded_expert_idx). row_idx[t, k] = k * n + t, and expanded_row_idx is by such indices."""
    if row_idx.shape != expert_idx.shape or expert_idx.dim() != 2 or expert_idx.shape[0] != x.shape[0]:
        raise ValueError(f"row_idx is {list(row_idx.shape)} and expert_idx {list(expert_idx.shape)}, must both be [n = {x.shape[0]}, K]")
    n, k = expert_idx.shape
    slots = routing(expert_idx).slot_of_row.long()
    rows = row_idx.reshape(-1).long()[slots]
    places = torch.empty(n * k, dtype=torch.int32)
    places[rows] = torch.arange(n * k, dtype=torch.int32)
    kept = rows[:min(n, max(active_num, 0)) * k] % max(n, 1)
    return moe_permute(x, kept, 1), places, expert_idx.reshape(-1)[slots].to(torch.int32)


# ---- v2 and quant ----------------------------------------------------------------------------------------------------


def _expanded(x: Tensor, found: Any, top_k: int, experts: Tensor, scale: Optional[Tensor], offset: Optional[Tensor], quant_mode: int
              ) -> Tuple[Tensor, Tensor]:
    """Rows, and a scale for each: quant_mode -1 as they are, 0 by one scale and offset, 1 by a scale for each row. experts [rows], -1
    where a row is nobody's."""
    slots = found.slot_of_row
    if quant_mode != -1:
        without_gradient("numbers of eight bits have none", x=x, scale=scale, offset=offset)
    rows = moe_permute(x, slots, top_k)
    none = x.new_empty(0, dtype=torch.float32)
    if x.dtype == torch.int8 or quant_mode == -1:
        if scale is None:
            return rows, none
        if scale.shape != x.shape[:1]:
            raise ValueError(f"scale is {list(scale.shape)}, must be [{x.shape[0]}], one for each row of x")
        tokens = (slots.long() // top_k).clamp(min=0)
        return rows, scale.float()[tokens].masked_fill(slots < 0, 0)
    if quant_mode == 0:
        if scale is None or offset is None:
            raise ValueError("quant_mode is 0, which needs scale and offset")
        return quantised(rows.half() * scale.half() + offset.half()), none
    if quant_mode != 1:
        missing("npu_moe_init_routing_v2", f"quant_mode {quant_mode}: int8 (-1, 0, 1) is implemented")
    if scale is not None:
        by_expert = scale if scale.shape[0] == 1 else scale[experts.clamp(min=0).long()]
        rows = rows.float() * by_expert.float()
    return dynamic_quant(rows)


def _experts_of_rows(found: Any, ids: Tensor, start: int) -> Tensor:
    slots = found.slot_of_row.long()
    return torch.where(slots < 0, -1, ids.reshape(-1)[slots.clamp(min=0)].long() - start) if ids.numel() else slots


def _pairs(counts: Tensor, start: int, experts: int) -> Tensor:
    """int64 [experts, 2]: (id, rows) of those that have any, then zeros."""
    filled = counts.nonzero().flatten()
    pairs = torch.zeros((experts, 2), dtype=torch.int64)
    pairs[:len(filled)] = torch.stack([filled + start, counts[filled]], 1)
    return pairs


def _v2_shapes(x: Tensor, expert_idx: Tensor, *, scale: Optional[Tensor] = None, offset: Optional[Tensor] = None, active_num: int = -1,
               expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0, expert_tokens_num_type: int = 0,
               expert_tokens_num_flag: bool = False, quant_mode: int = -1, active_expert_range: Optional[Sequence[int]] = None, row_idx_type: int = 0,
               x_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    if expert_num < 0:
        raise NotImplementedError("npu_moe_init_routing_v2 in a compiled graph needs expert_num: results have its size")
    slots = expert_idx.shape[0] * expert_idx.shape[1]
    lead = (expert_num, expert_capacity) if drop_pad_mode == 1 else (min(active_num, slots) if active_num > 0 else slots,)
    span = active_expert_range[1] - active_expert_range[0] if active_expert_range else expert_num
    rows = x.new_empty((*lead, x.shape[1]), dtype=x.dtype if quant_mode == -1 or x.dtype == torch.int8 else torch.int8)
    has_scales = quant_mode == 1 or scale is not None and quant_mode == -1
    total = 1
    for size in lead:
        total *= size
    return (rows, x.new_empty(slots, dtype=torch.int32), x.new_empty((expert_num, 2) if expert_tokens_num_type == 2 else (span,), dtype=torch.int64),
            x.new_empty(total if has_scales else 0, dtype=torch.float32))


@device_function(fake=_v2_shapes, gradients=("x", "scale", "offset"))
def npu_moe_init_routing_v2(x: Tensor, expert_idx: Tensor, *, scale: Optional[Tensor] = None, offset: Optional[Tensor] = None,
                            active_num: int = -1, expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0,
                            expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
                            active_expert_range: Sequence[int] = [], row_idx_type: int = 0,
                            x_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(expanded_x, expanded_row_idx, expert_tokens, expanded_scale), by slots t * K + k. Rows of nobody are zeros."""
    if is_tensor("expert_idx", expert_idx).dim() != 2 or expert_idx.shape[0] != x.shape[0]:
        raise ValueError(f"expert_idx is {list(expert_idx.shape)}, must be [{x.shape[0]}, K]")
    for name, value, allowed in (("drop_pad_mode", drop_pad_mode, (0, 1)), ("row_idx_type", row_idx_type, (0, 1)),
                                 ("expert_tokens_num_type", expert_tokens_num_type, (0, 1, 2))):
        if value not in allowed:
            raise ValueError(f"{name} is {value}, must be one of {', '.join(map(str, allowed))}")
    experts = expert_num if expert_num >= 0 else (int(expert_idx.max()) + 1 if expert_idx.numel() else 0)
    active_expert_range = active_expert_range or ()
    if len(active_expert_range) not in (0, 2):
        raise ValueError(f"active_expert_range has {len(active_expert_range)} numbers, must be empty or [start, end)")
    start, end = tuple(active_expert_range) or (0, experts)
    n, k = expert_idx.shape
    if drop_pad_mode == 1:
        if (start, end) != (0, experts) or expert_tokens_num_type != 1 or row_idx_type != 0:
            raise ValueError("drop_pad_mode is 1, which needs the full active_expert_range, expert_tokens_num_type 1 and row_idx_type 0")
        found = moe_routing(expert_idx, experts, capacity=expert_capacity)
    else:
        rows = min(active_num, n * k) if active_num > 0 else n * k
        found = moe_routing(expert_idx, experts, rows=rows, expert_begin=start, expert_end=end)
    expanded, scales = _expanded(x, found, k, _experts_of_rows(found, expert_idx, start), scale, offset, quant_mode)
    if drop_pad_mode == 1:
        expanded = expanded.view(experts, expert_capacity, x.shape[1])
    if row_idx_type == 1:
        places = torch.full((n * k,), -1, dtype=torch.int32)
        places[:len(found.slot_of_row)] = found.slot_of_row.to(torch.int32)
    else:
        places = found.row_of_slot.reshape(-1).to(torch.int32)
    counts = found.expert_tokens
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    elif expert_tokens_num_type == 2:
        counts = _pairs(counts, start, experts)
    return expanded, places, counts, scales


@device_function
def npu_moe_init_routing_quant(x: Tensor, expert_idx: Tensor, *, scale: Optional[Tensor] = None, offset: Optional[Tensor] = None,
                               active_num: int = 1024, expert_capacity: int = 0, expert_num: int = 256, drop_pad_mode: int = 0,
                               expert_tokens_num_mode: int = 0, expert_tokens_before_capacity_flag: bool = False,
                               quant_mode: int = 1) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(expanded_x int8, expanded_row_idx, counts, expert_tokens_before_capacity, expanded_scale). expert_tokens_num_mode 1: running
    totals, 2: counts, both int32; 0: empty."""
    if expert_tokens_num_mode not in (0, 1, 2):
        raise ValueError(f"expert_tokens_num_mode is {expert_tokens_num_mode}, must be 0, 1 or 2")
    expanded, places, counts, scales = npu_moe_init_routing_v2(
        x, expert_idx, scale=scale, offset=offset, active_num=active_num, expert_capacity=expert_capacity, expert_num=expert_num,
        drop_pad_mode=drop_pad_mode, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=quant_mode)
    counts, none = counts.to(torch.int32), counts.new_empty(0, dtype=torch.int32)
    asked = none if expert_tokens_num_mode == 0 else counts if expert_tokens_num_mode == 2 else counts.cumsum(0).to(torch.int32)
    return expanded, places, asked, counts if expert_tokens_before_capacity_flag else none, scales


# ---- back ------------------------------------------------------------------------------------------------------------


@device_function
def npu_moe_finalize_routing(expanded_permuted_rows: Tensor, skip1: Optional[Tensor], skip2: Optional[Tensor], bias: Optional[Tensor],
                             scales: Optional[Tensor], expanded_src_to_dst_row: Tensor, export_for_source_row: Optional[Tensor],
                             drop_pad_mode: Optional[int] = 0, k: Optional[int] = 1) -> Tensor:
    """skip1 + skip2 + sum over k of scales * (row + bias of its expert). expanded_src_to_dst_row is column after column, k * n + i, in
    drop_pad_mode 0 and 1, and row after row, i * K + k, in 2 and 3."""
    mode = 0 if drop_pad_mode is None else drop_pad_mode
    if mode not in (0, 1, 2, 3):
        raise ValueError(f"drop_pad_mode is {mode}, must be 0 to 3")
    if skip1 is None and skip2 is not None:
        raise ValueError("skip2 is given, but skip1 is not")
    if (bias is None) != (export_for_source_row is None) and bias is not None:
        raise ValueError("bias is given, but export_for_source_row, the experts of the slots, is not")
    wanted = 3 if mode in (1, 3) else 2
    if expanded_permuted_rows.dim() != wanted:
        raise ValueError(f"expanded_permuted_rows is {list(expanded_permuted_rows.shape)}, must have {wanted} dimensions in "
                         f"drop_pad_mode {mode}")
    rows = expanded_permuted_rows.flatten(0, 1) if wanted == 3 else expanded_permuted_rows
    top_k = 1 if scales is None else scales.shape[1]
    places = expanded_src_to_dst_row
    if places.numel() % top_k:
        raise ValueError(f"expanded_src_to_dst_row has {places.numel()} places, which are not rows of K = {top_k}")
    places = places.view(top_k, -1).t().contiguous() if mode in (0, 1) else places.view(-1, top_k)
    return moe_finalize(rows, places, scales, skip1=skip1, skip2=skip2, bias=bias,
                        topk_ids=export_for_source_row if bias is not None else None)


@device_function
def npu_moe_re_routing(tokens: Tensor, expert_token_num_per_rank: Tensor, *, per_token_scales: Optional[Tensor] = None,
                       expert_token_num_type: int = 1, idx_type: int = 0,
                       tokens_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens expert after expert, their scales, the source row of each, counts [E]) of rows that lie rank after rank."""
    if expert_token_num_type != 1 or idx_type != 0:
        raise ValueError(f"expert_token_num_type is {expert_token_num_type} and idx_type {idx_type}, must be 1 and 0")
    counts = expert_token_num_per_rank
    if counts.dim() != 2:
        raise ValueError(f"expert_token_num_per_rank is {list(counts.shape)}, must be [ranks, experts]")
    flat = counts.reshape(-1).long()
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0]).repeat_interleave(flat)
    if len(experts) > len(tokens):
        raise ValueError(f"expert_token_num_per_rank counts {len(experts)} rows, but tokens has {len(tokens)}")
    source = routing(experts[:, None], counts.shape[1]).slot_of_row.to(torch.int32)
    scales = tokens.new_empty(0, dtype=torch.float32) if per_token_scales is None else per_token_scales[source.long()]
    return moe_permute(tokens.detach(), source, 1), scales, source, counts.sum(0).to(counts.dtype)

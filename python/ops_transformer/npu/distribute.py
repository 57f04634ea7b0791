"""Rows of tokens to the ranks of their experts, and back as weighted sums, over moe_dispatch and moe_combine of ops_transformer.mc2.

Ranks 0 to R - 1 have the shared experts, one each, and the others the routed ones; that is how the core counts experts here:
R copies of shared experts, then the routed ones. No function has gradients.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import mc2
from ._edge import device_function, is_tensor, missing, refuse_given, without_gradient
from ._groups import group_of
from .activation import npu_dynamic_quant

_GRADIENTS = "rows between ranks have none"
_ELASTIC = "groups whose ranks change are not implemented"
_TIMES = "the times of ranks are not taken"
_DTYPES = "numbers of eight bits other than int8 are not implemented"


class _Spread(NamedTuple):
    """Which experts are where. Of `shared` experts each has shared_ranks / shared ranks, the copies."""

    group: Any
    shared: int
    shared_ranks: int
    routed: int

    @property
    def copies(self) -> int:
        return self.shared_ranks // self.shared if self.shared else 0

    @property
    def experts(self) -> List[int]:
        others = self.group.world_size - self.shared_ranks
        return [1] * self.shared_ranks + [self.routed // others] * others

    @property
    def local(self) -> int:
        return self.experts[self.group.rank]

    def rows(self, tokens: int, top_k: int) -> int:
        """The most that can come to this rank, with so many tokens on each."""
        ranks = self.group.world_size
        if self.group.rank < self.shared_ranks:
            return tokens * -(-ranks // self.copies)
        return tokens * ranks * min(self.local, top_k)


def _spread(name: str, group_ep: Any, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, tp_world_size: int, expert_shard_type: int,
            shared_expert_num: int, shared_expert_rank_num: int) -> _Spread:
    if tp_world_size not in (0, 1):
        missing(name, f"tp_world_size is {tp_world_size}, but ranks that share an expert's columns are not implemented")
    if expert_shard_type != 0:
        missing(name, f"expert_shard_type is {expert_shard_type}, but shared experts have the first ranks: 0")
    group = group_of("group_ep", group_ep, ep_world_size)
    if ep_rank_id != group.rank:
        raise ValueError(f"ep_rank_id is {ep_rank_id}, but this rank of group_ep is {group.rank}")
    if not 0 <= shared_expert_rank_num < ep_world_size:
        raise ValueError(f"shared_expert_rank_num is {shared_expert_rank_num}, must be from 0 to {ep_world_size - 1}, as ep_world_size is "
                         f"{ep_world_size}")
    if shared_expert_rank_num and (shared_expert_num < 1 or shared_expert_rank_num % shared_expert_num):
        raise ValueError(f"shared_expert_num is {shared_expert_num}, must divide shared_expert_rank_num, {shared_expert_rank_num}")
    others = ep_world_size - shared_expert_rank_num
    if moe_expert_num < 1 or moe_expert_num % others:
        raise ValueError(f"moe_expert_num is {moe_expert_num}, must be a multiple of the {others} ranks that have such experts")
    return _Spread(group, shared_expert_num if shared_expert_rank_num else 0, shared_expert_rank_num, moe_expert_num)


def _matrix(name: str, tensor: Tensor, rows: Optional[int] = None) -> Tensor:
    if is_tensor(name, tensor).dim() != 2:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, must have 2")
    if rows is not None and tensor.shape[0] != rows:
        raise ValueError(f"{name} has {tensor.shape[0]} rows, must have {rows}: one for each token")
    return tensor


def _alike(name: str, tensor: Tensor, shape: Any) -> Tensor:
    if tuple(is_tensor(name, tensor).shape) != tuple(shape):
        raise ValueError(f"{name} is {list(tensor.shape)}, must be {list(shape)}")
    return tensor


def _active(expert_ids: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Which slots [BS, K] go anywhere by x_active_mask [BS] or [BS, K]."""
    if mask is None:
        return torch.ones(expert_ids.shape, dtype=torch.bool)
    _alike("x_active_mask", mask, expert_ids.shape[:1] if mask.dim() == 1 else expert_ids.shape)
    return (mask.bool() if mask.dim() == 2 else mask.bool()[:, None]).expand(expert_ids.shape)


def _slots(spread: _Spread, expert_ids: Tensor, active: Tensor, special: int) -> Tensor:
    """The core's experts of all slots [BS, K + shared] int64, -1 where one goes nowhere."""
    ids = expert_ids.long()
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < spread.routed + special:
        raise ValueError(f"expert_ids are from {int(ids.min())} to {int(ids.max())}, must be below {spread.routed + special} experts, or -1")
    ids = torch.where(active & (ids >= 0) & (ids < spread.routed), ids + spread.shared_ranks, -1)
    if not spread.shared:
        return ids
    copies = torch.arange(spread.shared) * spread.copies + spread.group.rank % spread.copies
    return torch.cat([ids, torch.where(active.any(1, keepdim=True), copies, -1)], 1)


def _places(ids: Tensor) -> Tensor:
    """Of each of these slots, how many before it are of its expert; int32, -1 for those that go nowhere."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ascending = flat[order]
    places = torch.empty_like(flat)
    places[order] = torch.arange(flat.numel()) - torch.searchsorted(ascending, ascending)
    return torch.where(flat < 0, -1, places).int()


def _tokens_of_each_rank(spread: _Spread, tokens: int, global_bs: int) -> int:
    ranks = spread.group.world_size
    if global_bs and (global_bs % ranks or global_bs // ranks < tokens):
        raise ValueError(f"global_bs is {global_bs}, must be 0 or ep_world_size, {ranks}, times the most tokens of a rank, and this one has {tokens}")
    return global_bs // ranks if global_bs else tokens


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int8)


def _to_experts(spread: _Spread, x: Tensor, ids: Tensor, capacity: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(rows [capacity, columns], rows of each expert, rows of each expert from each rank)."""
    rows = x.new_zeros(capacity, x.shape[1])
    found = mc2.moe_dispatch(spread.group, x.contiguous(), ids, sum(spread.experts), out=rows, experts=spread.experts)
    return rows, found.expert_tokens, found.rank_tokens


def _quantised(spread: _Spread, x: Tensor, expert_ids: Tensor, scales: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """int8 rows of all slots [BS, K + shared, H], and their scales [BS, K + shared]."""
    slots = expert_ids.shape[1] + spread.shared
    if scales is None:
        q, scale = npu_dynamic_quant(x)
        return q[:, None].expand(-1, slots, -1), scale[:, None].expand(-1, slots)
    _alike("scales", scales, (spread.shared + spread.routed, x.shape[1]))
    shared = torch.arange(spread.shared).expand(x.shape[0], -1)
    of_slot = torch.cat([expert_ids.long().clamp(0, spread.routed - 1) + spread.shared, shared], 1)
    return npu_dynamic_quant(x.float()[:, None] * scales.float()[of_slot])


def _dispatch(name: str, spread: _Spread, x: Tensor, expert_ids: Tensor, *, scales: Optional[Tensor], x_active_mask: Optional[Tensor],
              expert_scales: Optional[Tensor], quant_mode: int, global_bs: int, expert_token_nums_type: int, special: int = 0) -> Tuple[Any, ...]:
    """(expand_x, dynamic_scales, places of slots, expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales)"""
    if quant_mode not in (0, 2):
        missing(name, f"quant_mode is {quant_mode}, but 0 (none) and 2 (int8, a scale for each row) are implemented")
    if expert_token_nums_type not in (0, 1):
        raise ValueError(f"expert_token_nums_type is {expert_token_nums_type}, must be 0 (running totals) or 1 (counts)")
    without_gradient(_GRADIENTS, x=x, scales=scales, expert_scales=expert_scales)
    _matrix("x", x)
    _matrix("expert_ids", expert_ids, x.shape[0])
    tokens, top_k = expert_ids.shape
    active = _active(expert_ids, x_active_mask)
    ids = _slots(spread, expert_ids, active, special)
    rows, beside = x[:, None].expand(-1, ids.shape[1], -1), []
    if x.dtype == torch.int32 and quant_mode == 0:
        if scales is None:
            raise ValueError("x is int32, numbers of four bits, but scales [BS] is None")
        beside.append(_alike("scales", scales, (tokens,)).float()[:, None].expand_as(ids))
    elif not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} with quant_mode {quant_mode}, must be floats" + (", or int32 with scales" if quant_mode == 0 else ""))
    elif quant_mode == 2:
        rows, scale = _quantised(spread, x, expert_ids, scales)
        beside.append(scale)
    elif scales is not None:
        raise ValueError("scales is given, but quant_mode is 0, must be 2")
    if expert_scales is not None:
        weights = _alike("expert_scales", expert_scales, expert_ids.shape).float()
        beside.append(torch.cat([weights, weights.new_ones(tokens, spread.shared)], 1))
    capacity = spread.rows(_tokens_of_each_rank(spread, tokens, global_bs), top_k)
    if beside:  # scales travel behind the bytes of their rows
        payload = torch.cat([_bytes(rows.flatten(0, 1)), *(_bytes(b.reshape(-1, 1)) for b in beside)], 1)
        arrived, of_experts, of_ranks = _to_experts(spread, payload, ids.reshape(-1, 1), capacity)
        width = payload.shape[1] - 4 * len(beside)
        expand_x = arrived[:, :width].clone(memory_format=torch.contiguous_format).view(rows.dtype)
        columns = arrived[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scale_of = [column.contiguous() for column in columns.unbind(1)]
    else:
        expand_x, of_experts, of_ranks = _to_experts(spread, x, ids, capacity)
        scale_of = []
    expand_scales = scale_of.pop() if expert_scales is not None else torch.empty(0)
    totals = of_ranks.reshape(-1).cumsum(0).int()
    counts = of_experts if expert_token_nums_type else of_experts.cumsum(0)
    none = torch.empty(0, dtype=torch.int32)
    return expand_x, scale_of[0] if scale_of else None, _places(ids[:, :top_k]), counts, totals, none, expand_scales


@device_function
def npu_moe_distribute_dispatch(x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int,
                                moe_expert_num: int, *, scales: Optional[Tensor] = None, x_active_mask:
                                Optional[Tensor] = None, expert_scales: Optional[Tensor] = None, group_tp: str = "",
                                tp_world_size: int = 0, tp_rank_id: int = 0, expert_shard_type: int = 0,
                                shared_expert_num: int = 1, shared_expert_rank_num: int = 0, quant_mode: int = 0,
                                global_bs: int = 0, expert_token_nums_type: int = 1) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(expand_x, dynamic_scales, expand_idx, expert_token_nums, ep_recv_counts, tp_recv_counts, expand_scales).

    x [BS, H], expert_ids [BS, K] of routed experts, which the ranks behind the first R = shared_expert_rank_num have in order. Each token
    also goes to a copy of every shared expert: of expert j to rank j * c + ep_rank_id % c, c = R / shared_expert_num. expand_x [A, H]: rows
    by local expert, the rank they are from, and token, then zeros; A is the most that can come. With quant_mode 2 int8 rows of
    x * scales[expert] (scales [shared_expert_num + moe_expert_num, H], the shared ones first), and dynamic_scales [A] float32, else
    None. expand_idx int32 [BS * K]: the place of each slot among those of its expert on this rank, -1 where x_active_mask [BS] hides the
    token. expert_token_nums int64: rows of each local expert, or with type 0 running totals. ep_recv_counts int32 [local experts * ranks]:
    running totals by expert, then rank. expand_scales [A]: expert_scales [BS, K] of the rows, 1 for shared experts, without them empty."""
    name = "npu_moe_distribute_dispatch"
    spread = _spread(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, tp_world_size, expert_shard_type, shared_expert_num,
                     shared_expert_rank_num)
    return _dispatch(name, spread, x, expert_ids, scales=scales, x_active_mask=x_active_mask, expert_scales=expert_scales, quant_mode=quant_mode,
                     global_bs=global_bs, expert_token_nums_type=expert_token_nums_type)


def _special(zero: int, copy: int, const: int) -> int:
    for name, count in (("zero_expert_num", zero), ("copy_expert_num", copy), ("const_expert_num", const)):
        if count < 0:
            raise ValueError(f"{name} is {count}, must not be negative")
    return zero + copy + const


@device_function
def npu_moe_distribute_dispatch_v2(x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int,
                                   moe_expert_num: int, *, scales: Optional[Tensor] = None, x_active_mask:
                                   Optional[Tensor] = None, expert_scales: Optional[Tensor] = None, elastic_info:
                                   Optional[Tensor] = None, performance_info: Optional[Tensor] = None, group_tp: str =
                                   "", tp_world_size: int = 0, tp_rank_id: int = 0, expert_shard_type: int = 0,
                                   shared_expert_num: int = 1, shared_expert_rank_num: int = 0, quant_mode: int = 0,
                                   global_bs: int = 0, expert_token_nums_type: int = 1, comm_alg: str = "",
                                   zero_expert_num: int = 0, copy_expert_num: int = 0, const_expert_num: int = 0,
                                   y_dtype: Optional[int] = None, x_dtype: Optional[int] = None, scales_dtype:
                                   Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As npu_moe_distribute_dispatch, but the third result is assist_info_for_combine, int32 [A * 128] zeros: the combine finds its rows by
    expert_ids. x_active_mask may be [BS, K]; a token goes to shared experts where it has a slot that is not hidden. Ids from
    moe_expert_num on are of zero, copy and const experts, in this order, and go nowhere. comm_alg has no effect."""
    name = "npu_moe_distribute_dispatch_v2"
    refuse_given(name, _ELASTIC, elastic_info=elastic_info)
    refuse_given(name, _TIMES, performance_info=performance_info)
    refuse_given(name, _DTYPES, y_dtype=y_dtype, x_dtype=x_dtype, scales_dtype=scales_dtype)
    spread = _spread(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, tp_world_size, expert_shard_type, shared_expert_num,
                     shared_expert_rank_num)
    first, scale, _, *others = _dispatch(
        name, spread, x, expert_ids, scales=scales, x_active_mask=x_active_mask, expert_scales=expert_scales, quant_mode=quant_mode,
        global_bs=global_bs, expert_token_nums_type=expert_token_nums_type, special=_special(zero_expert_num, copy_expert_num, const_expert_num))
    return (first, scale, torch.zeros(first.shape[0] * 128, dtype=torch.int32), *others)


def _combine(name: str, spread: _Spread, expand_x: Tensor, expert_ids: Tensor, ep_send_counts: Tensor, expert_scales: Tensor, *,
             x_active_mask: Optional[Tensor], shared_expert_x: Optional[Tensor], comm_quant_mode: int, special: int = 0,
             more: Any = None) -> Tensor:
    """more(weights): a float32 [BS, H] to be added, of the weights [BS, K] of slots that are not hidden."""
    if comm_quant_mode:
        missing(name, f"comm_quant_mode is {comm_quant_mode}, but rows are not sent as int8")
    without_gradient(_GRADIENTS, expand_x=expand_x, expert_scales=expert_scales, shared_expert_x=shared_expert_x)
    _matrix("expand_x", expand_x)
    tokens = _matrix("expert_ids", expert_ids).shape[0]
    needed = spread.local * spread.group.world_size
    if is_tensor("ep_send_counts", ep_send_counts).numel() != needed:
        raise ValueError(f"ep_send_counts has {ep_send_counts.numel()} counts, must have {needed}: one for each local expert and rank")
    if int(ep_send_counts.reshape(-1)[-1]) > expand_x.shape[0]:
        raise ValueError(f"ep_send_counts end at {int(ep_send_counts.reshape(-1)[-1])}, but expand_x has {expand_x.shape[0]} rows")
    active = _active(expert_ids, x_active_mask)
    weights = _alike("expert_scales", expert_scales, expert_ids.shape).float()
    residual = shared_expert_x
    if residual is not None:
        if residual.dtype != expand_x.dtype:
            raise ValueError(f"shared_expert_x is {residual.dtype}, but expand_x {expand_x.dtype}")
        residual = residual.reshape(-1, residual.shape[-1])
        _alike("shared_expert_x", residual, (tokens, expand_x.shape[1]))
    ids = _slots(spread, expert_ids, active, special)
    if more is not None:
        added = more(weights * active)
        residual = (added if residual is None else added + residual).to(expand_x.dtype)
    out = expand_x.new_empty(tokens, expand_x.shape[1])
    slot_weights = torch.cat([weights, weights.new_ones(tokens, spread.shared)], 1)
    options = {} if residual is None else {"residual": residual.contiguous()}
    mc2.moe_combine(spread.group, expand_x.contiguous(), ids, sum(spread.experts), topk_weights=slot_weights, out=out, experts=spread.experts,
                           **options)
    return out


@device_function
def npu_moe_distribute_combine(expand_x: Tensor, expert_ids: Tensor, expand_idx: Tensor, ep_send_counts: Tensor,
                               expert_scales: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int,
                               moe_expert_num: int, *, tp_send_counts: Optional[Tensor] = None, x_active_mask:
                               Optional[Tensor] = None, activation_scale: Optional[Tensor] = None, weight_scale:
                               Optional[Tensor] = None, group_list: Optional[Tensor] = None, expand_scales:
                               Optional[Tensor] = None, shared_expert_x: Optional[Tensor] = None, group_tp: str = "",
                               tp_world_size: int = 0, tp_rank_id: int = 0, expert_shard_type: int = 0,
                               shared_expert_num: int = 1, shared_expert_rank_num: int = 0, global_bs: int = 0,
                               out_dtype: int = 0, comm_quant_mode: int = 0, group_list_type: int = 0) -> Tensor:
    """out[t] = sum over k of expert_scales[t, k] * the row of slot t, k, plus the rows of shared experts and shared_expert_x[t], unscaled.

    expand_x [A, H]: what the experts made of the rows of npu_moe_distribute_dispatch, in its order; expert_ids and x_active_mask as there,
    ep_send_counts its ep_recv_counts. [BS, H] in the dtype of expand_x; a hidden token has shared_expert_x or zeros. expand_idx,
    tp_send_counts and expand_scales are not read."""
    name = "npu_moe_distribute_combine"
    refuse_given(name, "the device reserves the argument", activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list)
    for argument, value in (("out_dtype", out_dtype), ("group_list_type", group_list_type)):
        if value != 0:
            missing(name, f"{argument} is {value}, but the device reserves the argument: 0")
    spread = _spread(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, tp_world_size, expert_shard_type, shared_expert_num,
                     shared_expert_rank_num)
    if is_tensor("expand_idx", expand_idx).numel() != expert_ids.numel():
        raise ValueError(f"expand_idx has {expand_idx.numel()} elements, but expert_ids {expert_ids.numel()}")
    _tokens_of_each_rank(spread, expert_ids.shape[0], global_bs)
    return _combine(name, spread, expand_x, expert_ids, ep_send_counts, expert_scales, x_active_mask=x_active_mask, shared_expert_x=shared_expert_x,
                    comm_quant_mode=comm_quant_mode)


def _of_special_experts(expert_ids: Tensor, weights: Tensor, first_copy: int, first_const: int, constants: int, ori_x: Tensor,
                        alpha_1: Optional[Tensor], alpha_2: Optional[Tensor], v: Optional[Tensor]) -> Tensor:
    """The part of copy and const experts, float32 [BS, H]."""
    x = ori_x.float()
    total = (weights * ((expert_ids >= first_copy) & (expert_ids < first_const))).sum(1, keepdim=True) * x
    for c in range(constants):
        one, two, vector = (t.reshape(constants, -1)[c].float() for t in (alpha_1, alpha_2, v))
        total += (weights * (expert_ids == first_const + c)).sum(1, keepdim=True) * (one * x + two * vector)
    return total


@device_function
def npu_moe_distribute_combine_v2(expand_x: Tensor, expert_ids: Tensor, assist_info_for_combine: Tensor,
                                  ep_send_counts: Tensor, expert_scales: Tensor, group_ep: str, ep_world_size: int,
                                  ep_rank_id: int, moe_expert_num: int, *, tp_send_counts: Optional[Tensor] = None,
                                  x_active_mask: Optional[Tensor] = None, expand_scales: Optional[Tensor] = None,
                                  shared_expert_x: Optional[Tensor] = None, elastic_info: Optional[Tensor] = None,
                                  ori_x: Optional[Tensor] = None, const_expert_alpha_1: Optional[Tensor] = None,
                                  const_expert_alpha_2: Optional[Tensor] = None, const_expert_v: Optional[Tensor] =
                                  None, performance_info: Optional[Tensor] = None, group_tp: str = "", tp_world_size:
                                  int = 0, tp_rank_id: int = 0, expert_shard_type: int = 0, shared_expert_num: int =
                                  1, shared_expert_rank_num: int = 0, global_bs: int = 0, comm_quant_mode: int = 0,
                                  comm_alg: str = "", zero_expert_num: int = 0, copy_expert_num: int = 0,
                                  const_expert_num: int = 0) -> Tensor:
    """As npu_moe_distribute_combine; a slot of a zero expert gives 0, of a copy expert ori_x [BS, H], of const expert c
    const_expert_alpha_1[c] * ori_x + const_expert_alpha_2[c] * const_expert_v[c] (each [const_expert_num, H]), all times expert_scales."""
    name = "npu_moe_distribute_combine_v2"
    refuse_given(name, _ELASTIC, elastic_info=elastic_info)
    refuse_given(name, _TIMES, performance_info=performance_info)
    is_tensor("assist_info_for_combine", assist_info_for_combine)
    special = _special(zero_expert_num, copy_expert_num, const_expert_num)
    spread = _spread(name, group_ep, ep_world_size, ep_rank_id, moe_expert_num, tp_world_size, expert_shard_type, shared_expert_num,
                     shared_expert_rank_num)
    _tokens_of_each_rank(spread, expert_ids.shape[0], global_bs)
    more = None
    if copy_expert_num or const_expert_num:
        without_gradient(_GRADIENTS, ori_x=ori_x, const_expert_alpha_1=const_expert_alpha_1, const_expert_alpha_2=const_expert_alpha_2,
                         const_expert_v=const_expert_v)
        _alike("ori_x", ori_x, (expert_ids.shape[0], expand_x.shape[1]))
        if const_expert_num:
            for argument, tensor in (("const_expert_alpha_1", const_expert_alpha_1), ("const_expert_alpha_2", const_expert_alpha_2),
                                     ("const_expert_v", const_expert_v)):
                _alike(argument, tensor, (const_expert_num, expand_x.shape[1]))
        first_copy = moe_expert_num + zero_expert_num

        def more(weights: Tensor) -> Tensor:
            return _of_special_experts(expert_ids, weights, first_copy, first_copy + copy_expert_num, const_expert_num, ori_x, const_expert_alpha_1,
                                       const_expert_alpha_2, const_expert_v)
    return _combine(name, spread, expand_x, expert_ids, ep_send_counts, expert_scales, x_active_mask=x_active_mask, shared_expert_x=shared_expert_x,
                    comm_quant_mode=comm_quant_mode, special=special, more=more)

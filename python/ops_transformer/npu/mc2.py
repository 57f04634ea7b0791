"""Products fused with communication (MC2): the names, which raise NotImplementedError until the core's room of them is in Python."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ._edge import device_function, missing

_WHY = "products fused with communication are not in Python yet"


@device_function
def npu_mm_all_reduce_base(x1: Tensor, x2: Tensor, hcom: str, *, reduce_op: str = "sum", bias: Optional[Tensor] =
                           None, antiquant_scale: Optional[Tensor] = None, antiquant_offset: Optional[Tensor] = None,
                           x3: Optional[Tensor] = None, dequant_scale: Optional[Tensor] = None, pertoken_scale:
                           Optional[Tensor] = None, comm_quant_scale_1: Optional[Tensor] = None, comm_quant_scale_2:
                           Optional[Tensor] = None, antiquant_group_size: int = 0, comm_turn: int = 0, group_sizes:
                           Optional[Sequence[int]] = None, y_dtype: Optional[int] = None, x1_dtype: Optional[int] =
                           None, x2_dtype: Optional[int] = None, dequant_scale_dtype: Optional[int] = None,
                           pertoken_scale_dtype: Optional[int] = None, comm_quant_mode: int = 0, comm_mode:
                           Optional[str] = None) -> Tensor:
    """Not implemented."""
    missing("npu_mm_all_reduce_base", _WHY)


@device_function
def npu_all_gather_base_mm(self: Tensor, x2: Tensor, hcom: str, world_size: int, *, bias: Optional[Tensor] = None,
                           x1_scale: Optional[Tensor] = None, x2_scale: Optional[Tensor] = None, gather_index: int =
                           0, gather_output: bool = True, comm_turn: int = 0, output_dtype: Optional[torch.dtype] =
                           None, comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """Not implemented."""
    missing("npu_all_gather_base_mm", _WHY)


@device_function
def npu_mm_reduce_scatter_base(self: Tensor, x2: Tensor, hcom: str, world_size: int, *, reduce_op: str = "sum", bias:
                               Optional[Tensor] = None, x1_scale: Optional[Tensor] = None, x2_scale: Optional[Tensor]
                               = None, comm_turn: int = 0, output_dtype: Optional[torch.dtype] = None, comm_mode:
                               Optional[str] = None) -> Tensor:
    """Not implemented."""
    missing("npu_mm_reduce_scatter_base", _WHY)


@device_function
def npu_matmul_all_to_all(x1: Tensor, x2: Tensor, hcom: str, world_size: int, bias: Optional[Tensor] = None,
                          all2all_axes: Optional[Sequence[int]] = None, comm_mode: Optional[str] = None) -> Tensor:
    """Not implemented."""
    missing("npu_matmul_all_to_all", _WHY)


@device_function
def npu_all_to_all_matmul(x1: Tensor, x2: Tensor, hcom: str, world_size: int, bias: Optional[Tensor] = None,
                          all2all_axes: Optional[Sequence[int]] = None, all2all_out_flag: bool = True, comm_mode:
                          Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """Not implemented."""
    missing("npu_all_to_all_matmul", _WHY)


@device_function
def npu_alltoallv_gmm(gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: Sequence[int],
                      recv_counts: Sequence[int], *, send_counts_tensor: Optional[Tensor] = None, recv_counts_tensor:
                      Optional[Tensor] = None, mm_x: Optional[Tensor] = None, mm_weight: Optional[Tensor] = None,
                      trans_gmm_weight: bool = False, trans_mm_weight: bool = False, permute_out_flag: bool = False,
                      comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """Not implemented."""
    missing("npu_alltoallv_gmm", _WHY)


@device_function
def npu_gmm_alltoallv(gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: Sequence[int],
                      recv_counts: Sequence[int], *, send_counts_tensor: Optional[Tensor] = None, recv_counts_tensor:
                      Optional[Tensor] = None, mm_x: Optional[Tensor] = None, mm_weight: Optional[Tensor] = None,
                      trans_gmm_weight: bool = False, trans_mm_weight: bool = False, comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """Not implemented."""
    missing("npu_gmm_alltoallv", _WHY)


@device_function
def npu_attention_to_ffn(x: Tensor, session_id: Tensor, micro_batch_id: Tensor, layer_id: Tensor, expert_ids: Tensor,
                         expert_rank_table: Tensor, group: str, world_size: int, ffn_token_info_table_shape:
                         Sequence[int], ffn_token_data_shape: Sequence[int], attn_token_info_table_shape:
                         Sequence[int], moe_expert_num: int, *, scales: Optional[Tensor] = None, active_mask:
                         Optional[Tensor] = None, quant_mode: int = 0, sync_flag: int = 0, ffn_start_rank_id: int = 0) -> None:
    """Not implemented."""
    missing("npu_attention_to_ffn", _WHY)


@device_function
def npu_ffn_to_attention(x: Tensor, session_ids: Tensor, micro_batch_ids: Tensor, token_ids: Tensor, expert_offsets:
                         Tensor, actual_token_num: Tensor, group: str, world_size: int, token_info_table_shape:
                         Sequence[int], token_data_shape: Sequence[int], *, attn_rank_table: Optional[Tensor] = None) -> None:
    """Not implemented."""
    missing("npu_ffn_to_attention", _WHY)


@device_function
def npu_moe_distribute_dispatch(x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int,
                                moe_expert_num: int, *, scales: Optional[Tensor] = None, x_active_mask:
                                Optional[Tensor] = None, expert_scales: Optional[Tensor] = None, group_tp: str = "",
                                tp_world_size: int = 0, tp_rank_id: int = 0, expert_shard_type: int = 0,
                                shared_expert_num: int = 1, shared_expert_rank_num: int = 0, quant_mode: int = 0,
                                global_bs: int = 0, expert_token_nums_type: int = 1) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Not implemented."""
    missing("npu_moe_distribute_dispatch", _WHY)


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
    """Not implemented."""
    missing("npu_moe_distribute_dispatch_v2", _WHY)


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
    """Not implemented."""
    missing("npu_moe_distribute_combine", _WHY)


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
    """Not implemented."""
    missing("npu_moe_distribute_combine_v2", _WHY)

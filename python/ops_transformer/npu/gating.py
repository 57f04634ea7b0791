"""The experts of each token: npu_moe_gating_top_k_softmax (v1, v2), npu_moe_gating_top_k and npu_moe_compute_expert_tokens.

Experts are chosen by the unrounded softmax of the core: where the device rounds 16-bit softmax first, and so makes ties, the
choice among those may differ. NaN logits come last. Weights and scores have gradients.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..moe import moe_compute_expert_tokens, moe_gating, moe_gating_backward
from ._edge import device_function, is_tensor, missing


@device_function(fake=lambda sorted_expert_for_source_row, num_expert: sorted_expert_for_source_row.new_empty(num_expert, dtype=torch.int32))
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """int32 [num_expert]: how many ids, which ascend, are at most e."""
    return moe_compute_expert_tokens(sorted_expert_for_source_row, num_expert)


def _check(x: Tensor, k: int) -> Tensor:
    if is_tensor("x", x).dim() not in (2, 3):
        raise ValueError(f"x is {list(x.shape)}, must be [rows, experts], or have one dimension more in front")
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"k is {k}, must be 1 to the {x.shape[-1]} experts of x")
    return x.reshape(-1, x.shape[-1])


def _finished(ids: Tensor, finished: Optional[Tensor], experts: int) -> Tensor:
    """Ids of rows that are done are the number of experts."""
    if finished is None:
        return ids
    if finished.numel() != ids.shape[0]:
        raise ValueError(f"finished has {finished.numel()} rows, but x has {ids.shape[0]}")
    return ids.masked_fill(finished.reshape(-1, 1).bool(), experts)


@device_function
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Optional[Tensor] = None, k: int = 1) -> Tuple[Tensor, Tensor, Tensor]:
    """(y, expert_idx, row_idx): the k largest of the softmax, best first. row_idx[t, k] = k * rows + t, column after column."""
    rows = _check(x, k)
    ids, weights = moe_gating(rows, k)
    count, shape = rows.shape[0], (*x.shape[:-1], k)
    row_idx = torch.arange(k * count, dtype=torch.int32).view(k, count).t().contiguous()
    return weights.to(x.dtype).view(shape), _finished(ids, finished, x.shape[-1]).view(shape), row_idx.view(shape)


@device_function
def npu_moe_gating_top_k_softmax_v2(x: Tensor, *, k: int = 1, finished: Optional[Tensor] = None, renorm: Optional[int] = 0,
                                    output_softmax: Optional[bool] = False) -> Tuple[Tensor, Tensor, Tensor]:
    """(y, expert_idx, softmax): renorm 0 is softmax, then the k largest; 1 is the k largest, then their softmax. The third is float32
    of all experts with renorm 0 and output_softmax, else empty."""
    rows = _check(x, k)
    if renorm not in (0, 1, None):
        raise ValueError(f"renorm is {renorm}, must be 0 or 1")
    wants = bool(output_softmax) and not renorm
    ids, weights, *scores = moe_gating(rows, k, renormalise=bool(renorm), return_scores=wants)
    shape = (*x.shape[:-1], k)
    everything = scores[0].view(x.shape) if wants else x.new_empty(0, dtype=torch.float32)
    return weights.to(x.dtype).view(shape), _finished(ids, finished, x.shape[-1]).view(shape), everything


_SCORES = {0: "softmax", 1: "sigmoid"}


@device_function
def npu_moe_gating_top_k(x: Tensor, k: int, *, bias: Optional[Tensor] = None, input_ids: Optional[Tensor] = None,
                         tid2eid: Optional[Tensor] = None, k_group: int = 1, group_count: int = 1, group_select_mode: int = 0,
                         renorm: int = 0, norm_type: int = 0, out_flag: bool = False, routed_scaling_factor: float = 1.0,
                         eps: float = 1e-20) -> Tuple[Tensor, Tensor, Tensor]:
    """(y, expert_idx, scores of all experts as float32). norm_type 0: softmax; 1: sigmoid, divided by the sum of the chosen + eps."""
    if input_ids is not None or tid2eid is not None:
        missing("npu_moe_gating_top_k", "input_ids and tid2eid: what experts that a table names weigh is not stated for the device")
    if renorm != 0:
        raise ValueError(f"renorm is {renorm}, must be 0")
    for name, value in (("norm_type", norm_type), ("group_select_mode", group_select_mode)):
        if value not in (0, 1):
            raise ValueError(f"{name} is {value}, must be 0 or 1")
    rows = _check(x, k)
    given = moe_gating(rows, k, scores=_SCORES[norm_type], bias=None if bias is None else bias.detach().float(),
                       renormalise=norm_type == 1, routed_scaling_factor=routed_scaling_factor, eps=eps, num_groups=group_count,
                       kept_groups=k_group, group_score="top2_sum" if group_select_mode else "max", return_scores=True)
    return given.topk_weights.to(x.dtype), given.topk_ids, given.scores


@device_function(fake=lambda x_norm, grad_y, expertIdx, **_: grad_y.new_empty(x_norm.shape))
def npu_moe_gating_top_k_backward(x_norm: Tensor, grad_y: Tensor, expertIdx: Tensor, *, renorm: int = 0, norm_type: int = 0,
                                  routed_scaling_factor: float = 1.0, eps: float = 1e-20) -> Tensor:
    """The gradient of x, from the scores x_norm (third result of the forward) and the gradient of y."""
    if renorm != 0 or norm_type not in (0, 1):
        raise ValueError(f"renorm is {renorm} and norm_type {norm_type}, must be 0, and 0 or 1")
    scores = x_norm.detach().float()
    logits = scores.log() if norm_type == 0 else scores.log() - (-scores).log1p()  # the scores are those of these logits
    grad = moe_gating_backward(logits, expertIdx, grad_y.detach().float().contiguous(), scores=_SCORES[norm_type],
                               renormalise=norm_type == 1, routed_scaling_factor=routed_scaling_factor, eps=eps)
    return grad.to(grad_y.dtype)

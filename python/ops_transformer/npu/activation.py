"""The gate of a feed-forward block, and numbers as int8: npu_swiglu, npu_swiglu_quant, npu_dequant_swiglu_quant, npu_dynamic_quant.

A row of zeros has scale 0 where max / 127 is returned, and an infinite one where 127 / max is (npu_swiglu_quant).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from ..quant import dynamic_quant
from ..rowwise import swiglu, swiglu_backward
from ._arguments import dtype_of, integers, lengths_of, pack_int4, quantised
from ._edge import device_function, missing, without_gradient


def _to_last(x: Tensor, dim: int) -> Tensor:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}, but self has {x.dim()} dimensions")
    if x.shape[dim] % 2:
        raise ValueError(f"dimension {dim} of self is {x.shape[dim]}, must be even")
    return x.movedim(dim, -1)


@device_function
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half along dim."""
    out = swiglu(_to_last(self, dim))
    return out if dim in (-1, self.dim() - 1) else out.movedim(-1, dim).contiguous()


@device_function
def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    """The gradient of self."""
    grad = swiglu_backward(grad_output.detach().movedim(dim, -1), _to_last(self.detach(), dim))
    return grad if dim in (-1, self.dim() - 1) else grad.movedim(-1, dim).contiguous()


def _groups(group_index: Tensor, kind: int, rows: int) -> Tensor:
    """The group of each row; the last one for rows behind all groups."""
    counts = integers("group_index", group_index)
    counts = lengths_of(counts) if kind == 0 else counts
    if min(counts, default=0) < 0 or sum(counts) > rows:
        raise ValueError(f"group_index counts {counts}, but x has {rows} rows")
    found = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return torch.nn.functional.pad(found, (0, rows - len(found)), value=max(len(counts) - 1, 0))


def _by_group(scale: Optional[Tensor], group_index: Optional[Tensor], kind: int, rows: int) -> Optional[Tensor]:
    """[rows, N] or [rows, 1] of [G, N] or [G]; without groups what broadcasts."""
    if scale is None:
        return None
    scale = scale.float()
    if group_index is None:
        return scale
    scale = scale if scale.dim() == 2 else scale[:, None]
    return scale[_groups(group_index, kind, rows)] if scale.shape[0] > 1 else scale


@device_function
def npu_swiglu_quant(x: Tensor, *, smooth_scales: Optional[Tensor] = None, offsets: Optional[Tensor] = None,
                     group_index: Optional[Tensor] = None, activate_left: bool = False, quant_mode: int = 0, group_list_type: int = 0,
                     dst_type: Optional[torch.dtype] = None) -> Tuple[Tensor, Tensor]:
    """(q, scale). The second half is activated unless activate_left. quant_mode 1: scale is 127 / largest of the row, and q = y * scale;
    0: q = y * smooth_scales + offsets, and scale holds zeros."""
    if quant_mode not in (0, 1):
        raise ValueError(f"quant_mode is {quant_mode}, must be 0 or 1")
    is_int4 = dst_type is not None and dst_type is getattr(torch, "quint4x2", None)
    if dst_type not in (None, torch.int8) and not is_int4:
        missing("npu_swiglu_quant", f"dst_type {dst_type}: int8 and quint4x2 are implemented")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    y = swiglu(x.detach().float().reshape(-1, x.shape[-1]), swapped=not activate_left)
    smooth = _by_group(smooth_scales, group_index, group_list_type, y.shape[0])
    y = y if smooth is None else y * smooth
    low, high = (-8, 7) if is_int4 else (-128, 127)
    if quant_mode == 1:
        scale = high / y.abs().amax(-1)
        q = quantised(torch.nan_to_num(y * scale[:, None]), low, high)
    else:
        added = _by_group(offsets, group_index, group_list_type, y.shape[0])
        scale = y.new_zeros(y.shape[0])
        q = quantised(y if added is None else y + added, low, high)
    q = q.view(shape)
    return pack_int4(q) if is_int4 else q, scale.view(shape[:-1])


def _rounded(x: Tensor, mode: Optional[int]) -> Tensor:
    """0 half to even, 1 half away from zero, 2 down, 3 up, 4 towards zero."""
    if mode in (None, 0):
        return x.round()
    if mode == 1:
        return torch.where(x < 0, (x - 0.5).ceil(), (x + 0.5).floor())
    if mode not in (2, 3, 4):
        raise ValueError(f"round_mode is {mode}, must be 0 to 4")
    return {2: torch.floor, 3: torch.ceil, 4: torch.trunc}[mode](x)


def _gated(x: Tensor, activate_left: bool, mode: int, limit: float, alpha: float, bias: float) -> Tensor:
    if mode == 0:
        return swiglu(x, swapped=not activate_left)
    if mode not in (1, 2):
        raise ValueError(f"swiglu_mode is {mode}, must be 0, 1 or 2")
    gate, linear = (x[..., ::2], x[..., 1::2]) if mode == 1 else (x.chunk(2, -1) if activate_left else x.chunk(2, -1)[::-1])
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + bias)


@device_function
def npu_dequant_swiglu_quant(x: Tensor, *, weight_scale: Optional[Tensor] = None, activation_scale: Optional[Tensor] = None,
                             bias: Optional[Tensor] = None, quant_scale: Optional[Tensor] = None, quant_offset: Optional[Tensor] = None,
                             group_index: Optional[Tensor] = None, activate_left: bool = False, quant_mode: int = 0,
                             dst_type: Optional[int] = None, round_mode: Optional[int] = None, activate_dim: Optional[int] = None,
                             swiglu_mode: int = 0, clamp_limit: float = 7.0, glu_alpha: float = 1.702,
                             glu_bias: float = 1.0) -> Tuple[Tensor, Tensor]:
    """(q, scale). group_index is counts. quant_mode 1: times quant_scale, then scale = largest of the row / 127; 0: DIVIDED by
    quant_scale, plus quant_offset, and scale holds zeros."""
    if dtype_of("dst_type", dst_type, torch.int8) != torch.int8:
        missing("npu_dequant_swiglu_quant", f"dst_type {dst_type}: int8 is implemented")
    if activate_dim not in (None, -1, x.dim() - 1):
        if group_index is not None:
            raise ValueError("group_index goes with activate_dim of the last dimension")
        missing("npu_dequant_swiglu_quant", "activate_dim other than the last")
    rows = x.reshape(-1, x.shape[-1])
    if group_index is not None and (bias is not None or quant_offset is not None):
        raise ValueError("bias and quant_offset must be None beside group_index")
    pick = lambda scale: _by_group(scale, group_index, 1, rows.shape[0])  # noqa: E731
    if x.dtype == torch.int32:
        if weight_scale is None:
            raise ValueError("x is int32, but weight_scale is not given")
        sums = rows if bias is None or bias.dtype != torch.int32 else rows + bias
        values = sums.float() * pick(weight_scale)
        if activation_scale is not None:
            values = values * activation_scale.float().reshape(-1, 1)
        if bias is not None and bias.dtype != torch.int32:
            values = values + bias.float()
    else:
        values = rows.detach().float()
    values = _gated(values, activate_left, swiglu_mode, clamp_limit, glu_alpha, glu_bias)
    smooth = pick(quant_scale)
    if quant_mode == 1:
        values = values if smooth is None else values * smooth
        top = values.abs().amax(-1)
        q, scale = torch.nan_to_num(values * (127 / top)[:, None]), top / 127
    else:
        values = values if smooth is None else values / smooth
        q, scale = values if quant_offset is None else values + quant_offset.float(), values.new_zeros(values.shape[0])
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return _rounded(q, round_mode).clamp(-128, 127).to(torch.int8).view(shape), scale.view(shape[:-1])


@device_function
def npu_dynamic_quant(input: Tensor, *, smooth_scales: Optional[Tensor] = None, group_index: Optional[Tensor] = None,
                      dst_type: Optional[int] = None, quant_mode: str = "pertoken", dst_type_max: float = 0.0) -> Tuple[Tensor, Tensor]:
    """(q, scale = largest of the row / 127). group_index: running totals, whose smooth_scales are [G, D]."""
    if quant_mode != "pertoken":
        missing("npu_dynamic_quant", f'quant_mode "{quant_mode}": "pertoken" is implemented')
    if dst_type_max != 0.0:
        missing("npu_dynamic_quant", "dst_type_max: it belongs to dtypes of eight bits other than int8")
    is_int4 = dst_type is not None and dst_type is getattr(torch, "quint4x2", None)
    if not is_int4 and dtype_of("dst_type", dst_type, torch.int8) != torch.int8:
        missing("npu_dynamic_quant", f"dst_type {dst_type}: int8 and quint4x2 are implemented")
    without_gradient("numbers of eight and four bits have none", input=input, smooth_scales=smooth_scales)
    x = input.detach()
    if smooth_scales is not None and (smooth_scales.dim() == 2 or is_int4):
        picked = smooth_scales.float()
        if group_index is not None:
            totals = integers("group_index", group_index)
            rows = x.numel() // max(x.shape[-1], 1)
            if totals and totals[-1] != rows:
                raise ValueError(f"group_index ends at {totals[-1]}, but input has {rows} rows")
            picked = picked[_groups(group_index, 0, rows)].view(x.shape)
        x, smooth_scales = x.float() * picked, None
    if is_int4:
        scale = x.float().abs().amax(-1) / 7
        return pack_int4(torch.nan_to_num(x.float() / scale.unsqueeze(-1)).round().clamp(-8, 7)), scale
    return dynamic_quant(x, smooth_scales=None if smooth_scales is None else smooth_scales.float())

"""Products with quantised weights, and of groups of rows: npu_quant_matmul, npu_ffn, npu_grouped_matmul and its two epilogues.

Every product is the core's matmul, matmul_int or, where one tensor has the weights of all groups, grouped_matmul. Sums of integers are
exact int32; scales, biases and rounding around them are torch's. Rows behind the last group are zeros.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..matmul import grouped_matmul, grouped_matmul_swiglu_quant, matmul, matmul_int, pack_int, pack_int_stack
from ._arguments import dtype_of, integers, lengths_of, quantised, unpack_int4, wide
from ._edge import device_function, missing, refuse_given

_EIGHT_BITS = "dtypes of eight bits other than int8, and of four, are not implemented"


def _bias_of(bias: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """A bias that the core takes beside x."""
    return bias.to(x.dtype) if bias is not None and x.dtype == torch.float64 else bias


def _plain(function: str, name: str, weight: Tensor) -> None:
    """Refuses weights cut in tiles of 16 rows and 16 or 32 columns."""
    if weight.dim() == 5:
        missing(function, f"{name} in 5-D form NZ: give [K, N] of each group")


def float_product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x [m, k] times weight [k, n], + bias [n]."""
    return matmul(x, weight.t(), bias=_bias_of(bias, x))


def grouped_product(x: Tensor, weight: Tensor, counts: List[int], bias: Optional[Tensor] = None) -> Tensor:
    """x [m, k] of groups times weight [G, k, n]: floats + bias [G, n], or the int32 sums of int8."""
    if x.dtype != torch.int8:
        return grouped_matmul(x, weight.transpose(1, 2), counts=counts, bias=_bias_of(bias, x))
    ones = weight.new_ones((weight.shape[0], weight.shape[2], 1), dtype=torch.float32)
    return grouped_matmul(x, pack_int_stack(weight.transpose(1, 2).contiguous(), ones), counts=counts, dtype="i32")


def int_product(x: Tensor, weight: Tensor) -> Tensor:
    """The int32 sums of int8 x [m, k] times int8 weight [k, n]."""
    if 0 in (*x.shape, *weight.shape):
        return x.new_zeros((x.shape[0], weight.shape[1]), dtype=torch.int32)
    return matmul_int(x.contiguous(), pack_int(weight.t().contiguous()), dtype="i32")


def as_int8(tensor: Tensor) -> Tensor:
    """int8, of int8 or of int32 words of eight numbers each."""
    return unpack_int4(tensor) if tensor.dtype == torch.int32 else tensor


def scale_of(scale: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """(float32 scale, offset or None) of floats, or of the 64-bit form: a float32 in the low word, nine bits of offset at 37."""
    if scale.dtype not in (torch.int64, torch.uint64):
        return scale.float(), None
    words = scale.view(torch.int64)
    low = words & 0xFFFFFFFF
    low = torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)
    offset = (words >> 37) & 0x1FF
    offset = torch.where(offset >= 256, offset - 512, offset)
    return low.view(torch.float32), offset.float() if bool((offset != 0).any()) else None


# ---- npu_quant_matmul, npu_ffn ---------------------------------------------------------------------------------------


def _batched(x1: Tensor, x2: Tensor) -> Tensor:
    """int32 x1 [.., m, k] times x2 [.., k, n], batches broadcast."""
    if x1.shape[-1] != x2.shape[-2]:
        raise ValueError(f"x1 is {list(x1.shape)} and x2 {list(x2.shape)}: {x1.shape[-1]} columns meet {x2.shape[-2]} rows")
    if x2.dim() == 2:
        return int_product(x1.reshape(-1, x1.shape[-1]), x2).view(*x1.shape[:-1], x2.shape[1])
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    left = x1.expand(*batch, *x1.shape[-2:]).reshape(-1, *x1.shape[-2:])
    right = x2.expand(*batch, *x2.shape[-2:]).reshape(-1, *x2.shape[-2:])
    return torch.stack([int_product(a, b) for a, b in zip(left, right)]).view(*batch, x1.shape[-2], x2.shape[-1])


@device_function
def npu_quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Optional[Tensor] = None, pertoken_scale: Optional[Tensor] = None,
                     bias: Optional[Tensor] = None, output_dtype: Optional[int] = None, x1_dtype: Optional[int] = None,
                     x2_dtype: Optional[int] = None, pertoken_scale_dtype: Optional[int] = None, scale_dtype: Optional[int] = None,
                     group_sizes: Optional[Sequence[int]] = None, y_scale: Optional[Tensor] = None) -> Tensor:
    """(x1 x2 + int32 bias) * scale [* pertoken_scale of each row] + float bias; with int8 output + offset. output_dtype None is int8."""
    refuse_given("npu_quant_matmul", _EIGHT_BITS, x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype,
                 scale_dtype=scale_dtype, group_sizes=group_sizes, y_scale=y_scale)
    for name, tensor in (("x1", x1), ("x2", x2)):
        if tensor.dtype not in (torch.int8, torch.int32):
            raise ValueError(f"{name} is {tensor.dtype}, must be int8, or int32 of eight int4 each")
    if x2.dtype == torch.int32 and scale.dim() == 2 and scale.shape[0] > 1:
        missing("npu_quant_matmul", "scales of groups along k (int4 with a 2-D scale)")
    wanted = dtype_of("output_dtype", output_dtype, torch.int8)
    sums = _batched(as_int8(x1), as_int8(x2))
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
        bias = None
    if wanted == torch.int32:
        return sums
    factor, packed_offset = scale_of(scale)
    out = sums.float() * factor
    if pertoken_scale is not None:
        out = out * pertoken_scale.float().unsqueeze(-1)
    if bias is not None:
        out = out + bias.float()
    if wanted != torch.int8:
        if offset is not None:
            raise ValueError(f"offset is given, but goes with int8 output, not {wanted}")
        return out.to(wanted)
    for added in (offset, packed_offset):
        out = out if added is None else out + added.float()
    return quantised(out)


@device_function
def npu_trans_quant_param(scale: Tensor, offset: Optional[Tensor] = None, round_mode: Optional[int] = 0) -> Tensor:
    """int64: float32 scales with their low 13 bits cleared, bit 46 set, and an offset of nine bits from bit 37 on."""
    words = (scale.float().view(torch.int32).to(torch.int64) & 0xFFFFE000) | (1 << 46)
    if offset is not None:
        words = words | ((offset.round().clamp(-256, 255).to(torch.int64) & 0x1FF) << 37)
    return words


_ACTIVATIONS = {
    "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def _expert_of_row(weight: Tensor, counts: List[int], rows: int) -> Tensor:
    """int64 [rows]."""
    if weight.dim() != 3 or len(counts) != weight.shape[0]:
        raise ValueError(f"weight1 is {list(weight.shape)}, but there are {len(counts)} groups of tokens")
    if sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"the groups of tokens are {counts}, but x has {rows} rows")
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))


def _by_row(tensor: Optional[Tensor], of_row: Tensor, default: Any = None) -> Any:
    """What each row's expert has, of [E] or [E, n]; what serves all as it is."""
    if tensor is None:
        return default
    if tensor.numel() == 1:
        return tensor.reshape(())
    return tensor[of_row] if tensor.dim() > 1 else tensor[of_row][:, None]


def _whole(bias: Optional[Tensor], weight: Tensor) -> Optional[Tensor]:
    """A bias for each expert and column, where it may be one number."""
    return bias.expand(weight.shape[0], weight.shape[2]) if bias is not None and bias.numel() == 1 else bias


def _weight_only(weight: Tensor, scale: Optional[Tensor], offset: Optional[Tensor], like: Tensor) -> Tensor:
    """Weights [E, k, n] of small integers in the dtype of `like`: (w + offset) * scale, both [E, n], or [E, groups along k, n]."""
    if scale is None:
        return weight
    weight = as_int8(weight).float()
    groups = scale.shape[1] if scale.dim() == 3 else 1
    scale, offset = (t if t is None or t.numel() == 1 else t.reshape(weight.shape[0], groups, 1, -1) for t in (scale, offset))
    weight = weight.unflatten(1, (groups, -1))
    weight = (weight if offset is None else weight + offset.float()) * scale.float()
    return weight.flatten(1, 2).to(like.dtype)


@device_function
def npu_ffn(x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, *, expert_tokens: Optional[Sequence[int]] = None,
            expert_tokens_index: Optional[Sequence[int]] = None, bias1: Optional[Tensor] = None, bias2: Optional[Tensor] = None,
            scale: Optional[Tensor] = None, offset: Optional[Tensor] = None, deq_scale1: Optional[Tensor] = None,
            deq_scale2: Optional[Tensor] = None, antiquant_scale1: Optional[Tensor] = None, antiquant_scale2: Optional[Tensor] = None,
            antiquant_offset1: Optional[Tensor] = None, antiquant_offset2: Optional[Tensor] = None, inner_precise: Optional[int] = None,
            output_dtype: Optional[torch.dtype] = None) -> Tensor:
    """activation(x w1 + b1) w2 + b2. expert_tokens are counts, expert_tokens_index running totals."""
    if activation in ("geglu", "swiglu", "reglu"):
        missing("npu_ffn", f'activation "{activation}": which half of its columns is activated is not stated for the device')
    for name, weight in (("weight1", weight1), ("weight2", weight2)):
        _plain("npu_ffn", name, weight)
    act = _ACTIVATIONS.get(activation)
    if act is None or activation == "gelu_tanh":
        raise ValueError(f'activation is "{activation}", must be one of fastgelu, gelu, relu, silu')
    if expert_tokens is not None and expert_tokens_index is not None:
        raise ValueError("expert_tokens and expert_tokens_index are both given")
    counts = None if expert_tokens is None else integers("expert_tokens", expert_tokens)
    if expert_tokens_index is not None:
        counts = lengths_of(integers("expert_tokens_index", expert_tokens_index))
    rows = x.reshape(-1, x.shape[-1])
    is_int8 = x.dtype == torch.int8
    if is_int8 and (scale is None or deq_scale1 is None or deq_scale2 is None):
        raise ValueError("x is int8, which needs scale, deq_scale1 and deq_scale2")
    wanted = (output_dtype or torch.float16) if is_int8 else x.dtype
    of_experts = [weight1, weight2, bias1, bias2, scale, offset, deq_scale1, deq_scale2, antiquant_scale1, antiquant_scale2,
                  antiquant_offset1, antiquant_offset2]
    if counts is None:  # one expert
        counts, of_experts = [rows.shape[0]], [t if t is None or t.numel() == 1 and t.dim() < 2 else t[None] for t in of_experts]
    w1, w2, b1, b2, scale, offset, deq1, deq2, anti1, anti2, shift1, shift2 = of_experts
    of_row = _expert_of_row(w1, counts, rows.shape[0])
    if is_int8:
        sums = grouped_product(rows, w1, counts) + _by_row(b1, of_row, 0)
        hidden = act(sums.float() * _by_row(scale_of(deq1)[0], of_row))
        hidden = quantised(hidden * _by_row(scale, of_row).float() + _by_row(offset, of_row, 0.0))
        sums = grouped_product(hidden, w2, counts) + _by_row(b2, of_row, 0)
        out = (sums.float() * _by_row(scale_of(deq2)[0], of_row)).to(wanted)
    else:
        hidden = act(wide(grouped_product(rows, _weight_only(w1, anti1, shift1, x), counts, _whole(b1, w1)))).to(x.dtype)
        out = grouped_product(hidden, _weight_only(w2, anti2, shift2, x), counts, _whole(b2, w2))
    return out.view(*x.shape[:-1], out.shape[-1])


# ---- groups ----------------------------------------------------------------------------------------------------------


def group_counts(group_list: Any, kind: int, groups: int, name: str = "group_list") -> List[int]:
    """Rows of each group, of running totals (0), counts (1), or pairs of a group and its rows (2)."""
    if kind == 2:
        if not isinstance(group_list, Tensor) or group_list.dim() != 2 or group_list.shape[1] != 2:
            shape = list(group_list.shape) if isinstance(group_list, Tensor) else f"a {type(group_list).__name__}"
            raise ValueError(f"{name} is {shape}, must be a tensor [groups, 2] of pairs in group_list_type 2")
        counts, before = [0] * groups, -1
        for group, count in group_list.tolist():
            if count == 0:
                continue
            if count < 0 or not before < group < groups:
                raise ValueError(f"{name} has the pair ({group}, {count}) behind group {before}, must have ascending groups below {groups}, "
                                 "those of weight, with their rows")
            counts[group], before = count, group
        return counts
    if kind not in (0, 1):
        raise ValueError(f"{name.replace('list', 'list_type')} is {kind}, must be 0, 1 or 2")
    numbers = integers(name, group_list)
    counts = lengths_of(numbers) if kind == 0 else numbers
    if min(counts, default=0) < 0:
        raise ValueError(f"{name} is {numbers}, must be {'running totals' if kind == 0 else 'counts'}, so not "
                         f"{'decreasing' if kind == 0 else 'negative'}")
    if len(counts) != groups:
        raise ValueError(f"{name} has {len(counts)} groups, but weight has {groups}")
    return counts


class _Epilogue(NamedTuple):
    """What the products of one group take besides x."""

    bias: Optional[Tensor]
    scale: Optional[Tensor]
    antiquant_scale: Optional[Tensor]
    antiquant_offset: Optional[Tensor]
    act: int
    dtype: Any


_ACTS = {1: "relu", 2: "gelu_tanh", 4: "fastgelu", 5: "silu"}


def _product(x: Tensor, weight: Tensor, e: _Epilogue, per_token: Optional[Tensor]) -> Tensor:
    shape, x = x.shape, as_int8(x).reshape(-1, as_int8(x).shape[-1])
    if x.shape[1] != weight.shape[0]:
        raise ValueError(f"x has {x.shape[1]} columns, but weight {weight.shape[0]} rows")
    if x.dtype != torch.int8:
        if e.antiquant_scale is not None:
            given = (None if t is None else t[None] for t in (e.antiquant_scale, e.antiquant_offset))
            weight = _weight_only(weight[None], *given, x)[0]
        out = float_product(x, weight, e.bias)
        return out.to(dtype_of("output_dtype", e.dtype, x.dtype)).view(*shape[:-1], out.shape[-1])
    return _dequantised(int_product(x, as_int8(weight)), e, per_token)


def _dequantised(sums: Tensor, e: _Epilogue, per_token: Optional[Tensor]) -> Tensor:
    """int32 sums of one group with its scales, bias and activation."""
    bias = e.bias
    if bias is not None and bias.dtype == torch.int32:
        sums, bias = sums + bias, None
    if e.scale is None:
        return sums
    factor, offset = scale_of(e.scale)
    out = sums.float() * factor
    if per_token is not None:
        out = out * per_token.float().reshape(-1, 1)
    if bias is not None:
        out = out + bias.float()
    if e.act:
        out = _ACTIVATIONS[_ACTS[e.act]](out)
    default = {torch.int64: torch.int8, torch.bfloat16: torch.bfloat16}.get(e.scale.dtype, torch.float16)
    wanted = dtype_of("output_dtype", e.dtype, default)
    if wanted == torch.int8:
        return quantised(out if offset is None else out + offset)
    return out.to(wanted)


def _each(tensors: Optional[Sequence[Tensor]], groups: int, name: str) -> List[Optional[Tensor]]:
    """One of a list for each group; a list of one tensor [G, ..] by its first dimension."""
    if not tensors:
        return [None] * groups
    if isinstance(tensors, Tensor):
        raise TypeError(f"{name} is a tensor, must be a list of tensors")
    if len(tensors) == groups and (groups > 1 or tensors[0].dim() < 2 or tensors[0].shape[0] != 1):
        return list(tensors)
    if len(tensors) == 1 and tensors[0].shape[0] == groups:
        return list(tensors[0])
    raise ValueError(f"{name} has {len(tensors)} tensors, but there are {groups} groups")


@device_function
def npu_grouped_matmul(x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Optional[Sequence[Tensor]] = None,
                       scale: Optional[Sequence[Tensor]] = None, offset: Optional[Sequence[Tensor]] = None,
                       antiquant_scale: Optional[Sequence[Tensor]] = None, antiquant_offset: Optional[Sequence[Tensor]] = None,
                       per_token_scale: Optional[Sequence[Tensor]] = None, group_list: Optional[Tensor] = None,
                       activation_input: Optional[Sequence[Tensor]] = None, activation_quant_scale: Optional[Sequence[Tensor]] = None,
                       activation_quant_offset: Optional[Sequence[Tensor]] = None, split_item: Optional[int] = 0,
                       group_type: Optional[int] = None, group_list_type: Optional[int] = 0, act_type: Optional[int] = 0,
                       tuning_config: Optional[Sequence[int]] = None, output_dtype: Optional[int] = None, x_dtype: Optional[int] = None,
                       weight_dtype: Optional[int] = None, scale_dtype: Optional[int] = None,
                       per_token_scale_dtype: Optional[int] = None) -> List[Tensor]:
    """x w + b of every group. group_type -1: lists of both; 0: group_list cuts the rows of x; 2: it cuts the columns of x, one result
    for each group. group_list_type 0: running totals; 1: counts; 2: pairs. A Python list as group_list is running totals."""
    for name, tensors in (("x", x), ("weight", weight)):
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise TypeError(f"{name} is a {type(tensors).__name__}, must be a list of tensors, of at least one")
    for name, given in (("offset", offset), ("activation_input", activation_input), ("activation_quant_scale", activation_quant_scale),
                        ("activation_quant_offset", activation_quant_offset)):
        if given:
            raise ValueError(f"{name} is given, but must be None")
    refuse_given("npu_grouped_matmul", _EIGHT_BITS, x_dtype=x_dtype, weight_dtype=weight_dtype, scale_dtype=scale_dtype,
                 per_token_scale_dtype=per_token_scale_dtype)
    is_list = isinstance(group_list, (list, tuple))
    if group_type is None:
        if not is_list and group_list is not None:
            raise ValueError("Requires manual passing group_type: -1, 0 or 2")
        group_type = 0 if is_list else -1
    if group_type not in (-1, 0, 2):
        raise ValueError(f"The group type must be -1, 0 or 2, but it is {group_type}")
    act = act_type or 0
    if act not in (0, *_ACTS) or (act and not per_token_scale):
        raise ValueError(f"act_type is {act_type}, must be 0, or with per_token_scale 1, 2, 4 or 5")
    for w in weight:
        _plain("npu_grouped_matmul", "weight", w)
    if any(tensor.is_floating_point() for tensor in x):
        for name, given in (("scale", scale), ("per_token_scale", per_token_scale)):
            if given:
                raise ValueError(f"{name} is given, but x is {x[0].dtype}: it goes with an x of integers")
    if group_type == -1 and group_list is not None:
        raise ValueError("group_list is given, but group_type is -1: every x has a weight of its own")
    if (split_item or 0) not in (0, 1, 2, 3):
        raise ValueError(f"split_item is {split_item}, must be 0 to 3")
    if group_type == 2:
        return _by_columns(x, weight, group_list, 0 if is_list else group_list_type or 0)
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    groups = len(weights)
    biases, scales, anti, anti_offset = (_each(given, groups, name) for name, given in (
        ("bias", bias), ("scale", scale), ("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)))
    rest, stack = 0, None
    if group_type == 0 and len(x) == 1:
        if group_list is None:
            raise ValueError("group_type is 0 and x one tensor, but group_list is not given")
        counts = group_counts(group_list, 0 if is_list else group_list_type or 0, groups)
        if sum(counts) > x[0].shape[0]:
            raise ValueError(f"group_list counts {sum(counts)} rows, but x has {x[0].shape[0]}")
        rest = x[0].shape[0] - sum(counts)
        stack = weight[0] if len(weight) == 1 and weight[0].dim() == 3 and x[0].dim() == 2 and not antiquant_scale else None
        if stack is not None and x[0].is_floating_point():
            every = None if not bias else bias[0] if len(bias) == 1 and bias[0].dim() == 2 else torch.stack(biases)
            joined = grouped_product(x[0], stack, counts, every).to(dtype_of("output_dtype", output_dtype, x[0].dtype))
            return [joined] if (split_item or 0) > 1 else list(joined[:sum(counts)].split(counts))
        parts = list(x[0][:sum(counts)].split(counts))
        tokens = [None] * groups if not per_token_scale else list(per_token_scale[0][:sum(counts)].split(counts))
    else:
        if len(x) != groups:
            raise ValueError(f"x has {len(x)} tensors, but weight {groups}")
        parts, tokens = list(x), _each(per_token_scale, groups, "per_token_scale")
    epilogues = [_Epilogue(*each, act, output_dtype) for each in zip(biases, scales, anti, anti_offset)]
    if stack is not None:
        sums = grouped_product(as_int8(x[0]), as_int8(stack), counts)[:sum(counts)].split(counts)
        out = [_dequantised(part, e, token) for part, e, token in zip(sums, epilogues, tokens)]
    else:
        out = [_product(*each) for each in zip(parts, weights, epilogues, tokens)]
    if (split_item or 0) in (0, 1):
        return out
    joined = torch.cat(out)
    return [joined if rest == 0 else torch.cat([joined, joined.new_zeros((rest, joined.shape[1]))])]


def _by_columns(x: Sequence[Tensor], weight: Sequence[Tensor], group_list: Any, kind: int) -> List[Tensor]:
    """[G, M, N]: each group of columns of x [M, K] times its rows of weight [K, N]; no columns give zeros."""
    if len(x) != 1 or len(weight) != 1 or not x[0].is_floating_point():
        raise ValueError("group_type is 2, which needs one x and one weight of floats")
    counts = group_counts(group_list, kind, len(group_list))
    pairs = zip(x[0][:, :sum(counts)].split(counts, 1), weight[0][:sum(counts)].split(counts))
    return [torch.stack([float_product(a, b) for a, b in pairs])]


def _swiglu_quantised(x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor, counts: List[int]) -> Tuple[Tensor, Tensor]:
    stack = pack_int_stack(weight.transpose(1, 2).contiguous(), weight_scale.float().unsqueeze(-1).contiguous())
    return grouped_matmul_swiglu_quant(x, x_scale.float().reshape(-1), stack, counts=counts)


@device_function
def npu_grouped_matmul_swiglu_quant(x: Tensor, weight: Tensor, group_list: Tensor, weight_scale: Tensor, x_scale: Tensor, *,
                                    bias: Optional[Tensor] = None, offset: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(int8 of silu(first half) * second half, a scale for each row, an empty offset); group_list is running totals."""
    refuse_given("npu_grouped_matmul_swiglu_quant", "the device takes none", bias=bias, offset=offset)
    _plain("npu_grouped_matmul_swiglu_quant", "weight", weight)
    q, scales = _swiglu_quantised(x, weight, weight_scale, x_scale, group_counts(group_list, 0, weight.shape[0]))
    return q, scales, scales.new_zeros(())


@device_function
def npu_grouped_matmul_swiglu_quant_v2(x: Tensor, weight: Sequence[Tensor], weight_scale: Sequence[Tensor], x_scale: Tensor,
                                       group_list: Tensor, *, smooth_scale: Optional[Tensor] = None,
                                       weight_assist_matrix: Optional[Sequence[Tensor]] = None, bias: Optional[Tensor] = None,
                                       dequant_mode: Optional[int] = 0, dequant_dtype: Optional[int] = 0, quant_mode: Optional[int] = 0,
                                       quant_dtype: Optional[int] = 1, group_list_type: Optional[int] = 0,
                                       tuning_config: Optional[Sequence[int]] = None, x_dtype: Optional[int] = None,
                                       weight_dtype: Optional[int] = None, weight_scale_dtype: Optional[int] = None,
                                       x_scale_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor]:
    """(q, scales); weights and scales as lists of one tensor [E, K, N] and [E, N]. group_list_type 0: running totals, 1: counts."""
    name = "npu_grouped_matmul_swiglu_quant_v2"
    refuse_given(name, "it belongs to int4 weights, which are not implemented here", smooth_scale=smooth_scale,
                 weight_assist_matrix=weight_assist_matrix, bias=bias)
    refuse_given(name, _EIGHT_BITS, x_dtype=x_dtype, weight_dtype=weight_dtype, weight_scale_dtype=weight_scale_dtype,
                 x_scale_dtype=x_scale_dtype)
    if dequant_mode or quant_mode or quant_dtype not in (0, 1, None):
        missing(name, f"dequant_mode {dequant_mode}, quant_mode {quant_mode}, quant_dtype {quant_dtype}: int8 by channel is implemented")
    if len(weight) != 1 or len(weight_scale) != 1:
        raise ValueError(f"weight has {len(weight)} tensors and weight_scale {len(weight_scale)}, must have 1 each")
    _plain(name, "weight", weight[0])
    counts = group_counts(group_list, group_list_type or 0, weight[0].shape[0])
    return _swiglu_quantised(x, weight[0], weight_scale[0], x_scale, counts)


@device_function
def npu_grouped_matmul_finalize_routing(x: Tensor, w: Tensor, group_list: Tensor, *, scale: Optional[Tensor] = None,
                                        bias: Optional[Tensor] = None, offset: Optional[Tensor] = None,
                                        pertoken_scale: Optional[Tensor] = None, shared_input: Optional[Tensor] = None,
                                        logit: Optional[Tensor] = None, row_index: Optional[Tensor] = None,
                                        dtype: Optional[torch.dtype] = None, shared_input_weight: Optional[float] = 1.0,
                                        shared_input_offset: Optional[int] = 0, output_bs: Optional[int] = 0,
                                        group_list_type: Optional[int] = 1, tuning_config: Optional[Sequence[int]] = None,
                                        x_dtype: Optional[int] = None, w_dtype: Optional[int] = None, scale_dtype: Optional[int] = None,
                                        pertoken_scale_dtype: Optional[int] = None) -> Tensor:
    """float32 [output_bs, n]: rows of all groups, times scale, pertoken_scale and logit, added up at row_index, beside shared_input."""
    name = "npu_grouped_matmul_finalize_routing"
    refuse_given(name, "it belongs to int4 weights, which are not implemented here", bias=bias, offset=offset)
    refuse_given(name, _EIGHT_BITS, x_dtype=x_dtype, w_dtype=w_dtype, scale_dtype=scale_dtype, pertoken_scale_dtype=pertoken_scale_dtype)
    _plain(name, "w", w)
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype is {dtype}, must be float32")
    if scale is None or row_index is None:
        raise ValueError("scale and row_index are needed")
    counts = group_counts(group_list, 1 if group_list_type is None else group_list_type, w.shape[0])
    used = sum(counts)
    rows = grouped_product(x, w, counts)[:used].float() * scale.float().repeat_interleave(torch.tensor(counts), 0)
    for factor in (pertoken_scale, logit):
        rows = rows if factor is None else rows * factor[:used].float()[:, None]
    out = torch.zeros((output_bs or x.shape[0], rows.shape[1]), dtype=torch.float32)
    if shared_input is not None:
        start = shared_input_offset or 0
        out[start:start + shared_input.shape[0]] += float(shared_input_weight) * shared_input.float()
    return out.index_add_(0, row_index[:used].long(), rows)

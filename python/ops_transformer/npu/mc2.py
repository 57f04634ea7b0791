"""Products fused with communication (MC2) over ops_transformer.mc2: NotImplementedError of the forms that the messages name. No function
has gradients."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import mc2
from ..matmul import pack_int
from ._arguments import dtype_of
from ._edge import device_function, is_tensor, missing, refuse_given, without_gradient
from ._groups import group_of
from .products import _EIGHT_BITS, _weight_only, float_product, scale_of

_WINDOWS = ("the device writes into memory of other ranks, which kernels of theirs read without a call of this library, and CPUs have no such "
            "memory; ops_transformer.mc2 has the exchange as a call of all ranks: ")
_INT8 = "this function has no scales for int8 activations"
_TWO = "products over ranks have no gradients"


def _fixed(argument: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}, must be {' or '.join(map(repr, allowed))}")


def _floats(**tensors: Any) -> None:
    """What the products take: tensors of one floating dtype, without gradients."""
    without_gradient(_TWO, **tensors)
    (first, x), *others = tensors.items()
    for name, tensor in tensors.items():
        if is_tensor(name, tensor).dtype == torch.int8:
            raise NotImplementedError(f"{name} is int8: {_INT8}")
    for name, tensor in others:
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but {first} {x.dtype}")


def _matrices(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, must have 2")


def _meet(left: str, columns: int, rows: int) -> None:
    if columns != rows:
        raise ValueError(f"{left} has {columns} columns, but x2 {rows} rows")


def _shares(n: int, parts: int) -> List[int]:
    """n divided over ranks, the first ones one more if need be."""
    return [n // parts + (part < n % parts) for part in range(parts)]


def _options(bias: Optional[Tensor]) -> dict:
    return {} if bias is None else {"bias": bias}


def _packed(x2: Tensor, factor: Tensor, argument: str) -> Any:
    """A weight of int8 with its scales, float32 of one number or [n]."""
    k, n = x2.shape
    if factor.numel() not in (1, n):
        raise ValueError(f"{argument} has {factor.numel()} elements, but x2 {n} columns: must be one for each, or one")
    return pack_int(x2.t().contiguous(), factor.reshape(-1, 1).expand(n, 1).contiguous())


def _row_scales(argument: str, scale: Optional[Tensor], rows: int) -> dict:
    if scale is None:
        return {}
    if scale.numel() != rows:
        raise ValueError(f"{argument} has {scale.numel()} elements, but there are {rows} rows")
    return {"x_scales": scale.float().reshape(-1).contiguous()}


def _two_of_int8(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if is_tensor(name, tensor).dtype != torch.int8:
            raise ValueError(f"{name} is {tensor.dtype}, must be int8 beside scales")


def _call(x: Tensor, x2: Tensor, bias: Optional[Tensor], x1_scale: Optional[Tensor], x2_scale: Optional[Tensor],
          output_dtype: Any) -> Tuple[Any, dict, torch.dtype]:
    """The weight, options and dtype of the product of a gather or a reduce-scatter: floats, or int8 with scales."""
    wanted = dtype_of("output_dtype", output_dtype, None)
    without_gradient(_TWO, x1_scale=x1_scale, x2_scale=x2_scale)
    if x1_scale is None and x2_scale is None:
        _floats(self=x, x2=x2, **_options(bias))
        if wanted not in (None, x.dtype):
            raise NotImplementedError(f"output_dtype is {wanted}, but the forms of floats give the dtype of self, {x.dtype}")
        options, dtype = _options(bias), x.dtype
    else:
        _two_of_int8(self=x, x2=x2)
        without_gradient(_TWO, bias=bias)
        if x2_scale is None:
            raise ValueError("x1_scale is given, but x2_scale is None")
        packed = x2_scale.dtype in (torch.int64, torch.uint64)
        dtype = torch.float16 if packed else wanted or torch.bfloat16
        if wanted not in (None, dtype):
            raise ValueError(f"output_dtype is {wanted}, but an x2_scale of int64 gives float16")
        if not dtype.is_floating_point:
            raise ValueError(f"output_dtype is {dtype}, must be float16, bfloat16 or float32")
        options = {**_options(None if bias is None else bias.float()), **_row_scales("x1_scale", x1_scale, x.shape[0])}
    _matrices(self=x, x2=x2)
    _meet("self", x.shape[1], x2.shape[0])
    weight = x2.t().contiguous() if x.dtype != torch.int8 else _packed(x2, scale_of(x2_scale)[0], "x2_scale")
    return weight, options, dtype


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
    """The sum over ranks of x1 x2 + bias + x3: bias and x3 of each rank are added. x1 [m, k] or [b, s, k], x2 [k, n], bias [n], x3 as the
    result, in the dtype of x1. Weight-only: x2 int8, (x2 + antiquant_offset) * antiquant_scale, which have one number, [n] or
    [k / antiquant_group_size, n]. With dequant_scale, one number or [n], int8 x1 and x2: the sum of
    (x1 x2 + int32 bias) * dequant_scale [* pertoken_scale [m]] + x3, bfloat16 for a dequant_scale of that dtype, else float16.

    x3 costs a product with a unit matrix of n x n, as the core adds a residual of all ranks once."""
    name = "npu_mm_all_reduce_base"
    _fixed("reduce_op", reduce_op, ("sum",))
    _fixed("comm_turn", comm_turn, (0,))
    refuse_given(name, _EIGHT_BITS, y_dtype=y_dtype, x1_dtype=x1_dtype, x2_dtype=x2_dtype, dequant_scale_dtype=dequant_scale_dtype,
                 pertoken_scale_dtype=pertoken_scale_dtype, group_sizes=group_sizes)
    refuse_given(name, "results are not sent as int8", comm_quant_scale_1=comm_quant_scale_1, comm_quant_scale_2=comm_quant_scale_2)
    if comm_quant_mode:
        missing(name, f"comm_quant_mode is {comm_quant_mode}, but results are not sent as int8")
    if dequant_scale is not None:
        return _int8_all_reduce(mc2, group_of("hcom", hcom), x1, x2, bias, x3, dequant_scale, pertoken_scale)
    if pertoken_scale is not None:
        raise ValueError("pertoken_scale is given, but dequant_scale is None")
    if antiquant_scale is not None:
        x2 = _restored(x1, x2, antiquant_scale, antiquant_offset, antiquant_group_size)
    _floats(x1=x1, x2=x2, **_options(bias), **({} if x3 is None else {"x3": x3}))
    _matrices(x2=x2)
    _meet("x1", x1.shape[-1], x2.shape[0])
    ranks, n = group_of("hcom", hcom), x2.shape[1]
    rows, weight = [x1.reshape(-1, x1.shape[-1])], [x2]
    if bias is not None:
        if bias.numel() != n:
            raise ValueError(f"bias has {bias.numel()} elements, but x2 {n} columns")
        rows, weight = [*rows, x1.new_ones(rows[0].shape[0], 1)], [*weight, bias.reshape(1, n)]
    if x3 is not None:
        if x3.shape != (*x1.shape[:-1], n):
            raise ValueError(f"x3 is {list(x3.shape)}, but the result {[*x1.shape[:-1], n]}")
        rows, weight = [*rows, x3.reshape(-1, n)], [*weight, torch.eye(n, dtype=x1.dtype)]
    out = x1.new_empty(rows[0].shape[0], n)
    mc2.matmul_all_reduce(ranks, torch.cat(rows, 1), torch.cat(weight).t().contiguous(), out=out)
    return out.view(*x1.shape[:-1], n)


def _int8_all_reduce(mc2: Any, ranks: Any, x1: Tensor, x2: Tensor, bias: Optional[Tensor], x3: Optional[Tensor], dequant_scale: Tensor,
                     pertoken_scale: Optional[Tensor]) -> Tensor:
    """Bias and x3 of the ranks are summed apart, in float32."""
    without_gradient(_TWO, x3=x3, dequant_scale=dequant_scale, pertoken_scale=pertoken_scale)
    _two_of_int8(x1=x1, x2=x2)
    _matrices(x2=x2)
    _meet("x1", x1.shape[-1], x2.shape[0])
    dtype = torch.bfloat16 if dequant_scale.dtype == torch.bfloat16 else torch.float16
    rows, n = x1.reshape(-1, x1.shape[-1]).contiguous(), x2.shape[1]
    factor = scale_of(dequant_scale)[0].float()
    options = _row_scales("pertoken_scale", pertoken_scale, rows.shape[0])
    weight, beside = _packed(x2, factor, "dequant_scale"), None
    if bias is not None:
        if bias.dtype != torch.int32 or bias.numel() != n:
            raise ValueError(f"bias is {bias.dtype} of {bias.numel()} elements, must be int32 of {n} beside dequant_scale")
        of_row = options["x_scales"][:, None] if options else torch.ones(rows.shape[0], 1)
        beside = bias.reshape(1, n).float() * factor.reshape(1, -1) * of_row
    if x3 is not None:
        if x3.shape != (*x1.shape[:-1], n) or x3.dtype != dtype:
            raise ValueError(f"x3 is {list(x3.shape)} {x3.dtype}, but the result {[*x1.shape[:-1], n]} {dtype}")
        beside = x3.reshape(-1, n).float() + (0 if beside is None else beside)
    out = torch.empty(rows.shape[0], n, dtype=dtype if beside is None else torch.float32)
    mc2.matmul_all_reduce(ranks, rows, weight, out=out, **options)
    if beside is not None:
        added = torch.empty_like(out)
        mc2.matmul_all_reduce(ranks, beside.contiguous(), torch.eye(n), out=added)
        out = (out + added).to(dtype)
    return out.view(*x1.shape[:-1], n)


def _restored(x1: Tensor, x2: Tensor, scale: Tensor, offset: Optional[Tensor], group_size: int) -> Tensor:
    """A weight of int8 in the dtype of x1."""
    k, n = x2.shape
    if group_size:
        groups = -(-k // group_size)
        scale, offset = (t if t is None else t.expand(groups, n).repeat_interleave(group_size, 0)[:k] for t in (scale, offset))
        return _weight_only(x2[None], scale[None], None if offset is None else offset[None], x1)[0]
    scale, offset = (t if t is None else t.expand(n) if t.numel() == 1 else t.reshape(n) for t in (scale, offset))
    return _weight_only(x2[None], scale[None], None if offset is None else offset[None], x1)[0]


@device_function
def npu_all_gather_base_mm(self: Tensor, x2: Tensor, hcom: str, world_size: int, *, bias: Optional[Tensor] = None,
                           x1_scale: Optional[Tensor] = None, x2_scale: Optional[Tensor] = None, gather_index: int =
                           0, gather_output: bool = True, comm_turn: int = 0, output_dtype: Optional[torch.dtype] =
                           None, comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """(gathered x2 + bias, gathered): gathered [world_size * m, k] is self [m, k] of all ranks, one below another; empty without
    gather_output. x2 [k, n], bias [n], all of one dtype, which the results have.

    With x2_scale [n] self and x2 are int8, x1_scale [m] those of this rank's rows; the product has output_dtype, bfloat16 without it,
    and float16 where x2_scale is int64 (npu_trans_quant_param)."""
    name = "npu_all_gather_base_mm"
    _fixed("gather_index", gather_index, (0,))
    _fixed("comm_turn", comm_turn, (0,))
    _fixed("comm_mode", comm_mode, (None, "ai_cpu", "aiv"))
    weight, options, dtype = _call(self, x2, bias, x1_scale, x2_scale, output_dtype)
    ranks = group_of("hcom", hcom, world_size)
    m, k = self.shape
    out = self.new_empty(world_size * m, x2.shape[1], dtype=dtype)
    gathered = self.new_empty((world_size * m, k) if gather_output else (0,))
    more = {"exchanged": gathered} if gather_output else {}
    mc2.all_gather_matmul(ranks, self.contiguous(), weight, out=out, **more, **options)
    return out, gathered


@device_function
def npu_mm_reduce_scatter_base(self: Tensor, x2: Tensor, hcom: str, world_size: int, *, reduce_op: str = "sum", bias:
                               Optional[Tensor] = None, x1_scale: Optional[Tensor] = None, x2_scale: Optional[Tensor]
                               = None, comm_turn: int = 0, output_dtype: Optional[torch.dtype] = None, comm_mode:
                               Optional[str] = None) -> Tensor:
    """This rank's rows [m / world_size, n] of the sum over ranks of self x2, self [m, k], x2 [k, n]; where m does not divide, the first
    ranks have one row more. bias [n], zeros on the device, is added once, and must be the same on all ranks. int8 as in
    npu_all_gather_base_mm; scales count before ranks are summed."""
    name = "npu_mm_reduce_scatter_base"
    _fixed("reduce_op", reduce_op, ("sum",))
    _fixed("comm_turn", comm_turn, (0,))
    _fixed("comm_mode", comm_mode, (None, "ai_cpu", "aiv"))
    weight, options, dtype = _call(self, x2, bias, x1_scale, x2_scale, output_dtype)
    ranks = group_of("hcom", hcom, world_size)
    out = self.new_empty(_shares(self.shape[0], world_size)[ranks.rank], x2.shape[1], dtype=dtype)
    mc2.matmul_reduce_scatter(ranks, self.contiguous(), weight, out=out, **options)
    return out


@device_function
def npu_matmul_all_to_all(x1: Tensor, x2: Tensor, hcom: str, world_size: int, bias: Optional[Tensor] = None,
                          all2all_axes: Optional[Sequence[int]] = None, comm_mode: Optional[str] = None) -> Tensor:
    """x1 [BS, H1] times x2 [H1, H2], plus bias [H2], and this rank's columns of it from all ranks: [world_size * BS, H2 / world_size];
    where H2 does not divide, the first ranks have one column more. bias in float32, or the dtype of x1."""
    _fixed("all2all_axes", None if all2all_axes is None else list(all2all_axes), (None, [-1, -2]))
    without_gradient(_TWO, bias=bias)
    _floats(x1=x1, x2=x2)
    _matrices(x1=x1, x2=x2)
    _meet("x1", x1.shape[1], x2.shape[0])
    ranks, widths = group_of("hcom", hcom, world_size), _shares(x2.shape[1], world_size)
    out = x1.new_empty(world_size * x1.shape[0], widths[ranks.rank])
    mc2.matmul_all_to_all(ranks, x1, [part.contiguous() for part in x2.t().split(widths)], out=out, **_options(bias))
    return out


@device_function
def npu_all_to_all_matmul(x1: Tensor, x2: Tensor, hcom: str, world_size: int, bias: Optional[Tensor] = None,
                          all2all_axes: Optional[Sequence[int]] = None, all2all_out_flag: bool = True, comm_mode:
                          Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """(a x2 + bias, a): a [BS / world_size, world_size * H] is this rank's block of rows of the x1 [BS, H] of all ranks, side by side; where
    BS does not divide, the first ranks have one row more. Without all2all_out_flag the second is empty. x2 [world_size * H, N]."""
    _fixed("all2all_axes", None if all2all_axes is None else list(all2all_axes), (None, [-2, -1]))
    without_gradient(_TWO, bias=bias)
    _floats(x1=x1, x2=x2)
    _matrices(x1=x1, x2=x2)
    _meet(f"x1 of {world_size} ranks", world_size * x1.shape[1], x2.shape[0])
    ranks = group_of("hcom", hcom, world_size)
    rows = _shares(x1.shape[0], world_size)[ranks.rank]
    out = x1.new_empty(rows, x2.shape[1])
    exchanged = x1.new_empty((rows, x2.shape[0]) if all2all_out_flag else (0,))
    more = {"exchanged": exchanged} if all2all_out_flag else {}
    mc2.all_to_all_matmul(ranks, x1, x2.t().contiguous(), out=out, **more, **_options(bias))
    return out, exchanged


def _stack(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Weights [e, n, k] as the core has them."""
    if weight.dim() != 3:
        raise ValueError(f"gmm_weight has {weight.dim()} dimensions, must have 3")
    _matrices(gmm_x=x)
    weight = (weight if transposed else weight.transpose(1, 2)).contiguous()
    if x.shape[1] != weight.shape[2]:
        raise ValueError(f"gmm_x has {x.shape[1]} columns, but gmm_weight {weight.shape[2]} rows")
    return weight


def _counted(needed: int, rows: int, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
    for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if len(counts) != needed:
            raise ValueError(f"{name} has {len(counts)} counts, must have {needed}: one for each rank's experts")
        if min(counts) < 0:
            raise ValueError(f"{name} has {min(counts)}, must not be negative")
    if sum(send_counts) != rows:
        raise ValueError(f"send_counts are {sum(send_counts)} in all, but gmm_x has {rows} rows")


def _beside(x: Optional[Tensor], weight: Optional[Tensor], transposed: bool) -> Any:
    """The product that the device computes meanwhile; None without one."""
    if (x is None) != (weight is None):
        raise ValueError("of mm_x and mm_weight one is given, must be both or none")
    if x is None:
        return None
    without_gradient(_TWO, mm_x=x, mm_weight=weight)
    return float_product(x, weight.t() if transposed else weight)


@device_function
def npu_alltoallv_gmm(gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: Sequence[int],
                      recv_counts: Sequence[int], *, send_counts_tensor: Optional[Tensor] = None, recv_counts_tensor:
                      Optional[Tensor] = None, mm_x: Optional[Tensor] = None, mm_weight: Optional[Tensor] = None,
                      trans_gmm_weight: bool = False, trans_mm_weight: bool = False, permute_out_flag: bool = False,
                      comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(gmm_y, mm_y, permute_out). gmm_x [BSK, H1]: rows by destination rank, then its expert; send_counts[rank * e + expert] of them.
    recv_counts[rank * e + expert] rows come here, A in all; permute_out [A, H1] has them by expert, then rank, and gmm_y [A, N1] is
    their product with gmm_weight [e, H1, N1] ([e, N1, H1] with trans_gmm_weight). permute_out is None without permute_out_flag, mm_y =
    mm_x mm_weight without them."""
    name = "npu_alltoallv_gmm"
    refuse_given(name, "the device takes none", send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
    _floats(gmm_x=gmm_x, gmm_weight=gmm_weight)
    weight = _stack(gmm_x, gmm_weight, trans_gmm_weight)
    ranks = group_of("hcom", hcom, ep_world_size)
    _counted(ep_world_size * weight.shape[0], gmm_x.shape[0], send_counts, recv_counts)
    arriving = sum(recv_counts)
    out = gmm_x.new_empty(arriving, weight.shape[1])
    permuted = gmm_x.new_empty(arriving, gmm_x.shape[1]) if permute_out_flag else None
    more = {"exchanged": permuted} if permute_out_flag else {}
    mc2.all_to_allv_grouped_matmul(ranks, gmm_x, send_counts=torch.tensor(send_counts), weight=weight, out=out,
                                   experts=[weight.shape[0]] * ep_world_size, **more)
    return out, _beside(mm_x, mm_weight, trans_mm_weight), permuted


@device_function
def npu_gmm_alltoallv(gmm_x: Tensor, gmm_weight: Tensor, hcom: str, ep_world_size: int, send_counts: Sequence[int],
                      recv_counts: Sequence[int], *, send_counts_tensor: Optional[Tensor] = None, recv_counts_tensor:
                      Optional[Tensor] = None, mm_x: Optional[Tensor] = None, mm_weight: Optional[Tensor] = None,
                      trans_gmm_weight: bool = False, trans_mm_weight: bool = False, comm_mode: Optional[str] = None) -> Tuple[Tensor, Tensor]:
    """(y, mm_y). gmm_x [A, H1]: rows by expert, then the rank whose tokens they are, send_counts[rank * e + expert] of them; their product
    with gmm_weight goes back to that rank. y [BSK, N1]: rows by answering rank, then its expert, recv_counts[rank * e + expert] of them.
    mm_y as in npu_alltoallv_gmm."""
    name = "npu_gmm_alltoallv"
    refuse_given(name, "the device takes none", send_counts_tensor=send_counts_tensor, recv_counts_tensor=recv_counts_tensor)
    _floats(gmm_x=gmm_x, gmm_weight=gmm_weight)
    weight = _stack(gmm_x, gmm_weight, trans_gmm_weight)
    ranks = group_of("hcom", hcom, ep_world_size)
    _counted(ep_world_size * weight.shape[0], gmm_x.shape[0], send_counts, recv_counts)
    out = gmm_x.new_empty(sum(recv_counts), weight.shape[1])
    mc2.grouped_matmul_all_to_allv(ranks, gmm_x, send_counts=torch.tensor(recv_counts), weight=weight, out=out,
                                   experts=[weight.shape[0]] * ep_world_size)
    return out, _beside(mm_x, mm_weight, trans_mm_weight)


@device_function
def npu_attention_to_ffn(x: Tensor, session_id: Tensor, micro_batch_id: Tensor, layer_id: Tensor, expert_ids: Tensor,
                         expert_rank_table: Tensor, group: str, world_size: int, ffn_token_info_table_shape:
                         Sequence[int], ffn_token_data_shape: Sequence[int], attn_token_info_table_shape:
                         Sequence[int], moe_expert_num: int, *, scales: Optional[Tensor] = None, active_mask:
                         Optional[Tensor] = None, quant_mode: int = 0, sync_flag: int = 0, ffn_start_rank_id: int = 0) -> None:
    """Not implemented: the results stand in windows of other ranks."""
    missing("npu_attention_to_ffn", _WINDOWS + "attention_to_ffn")


@device_function
def npu_ffn_to_attention(x: Tensor, session_ids: Tensor, micro_batch_ids: Tensor, token_ids: Tensor, expert_offsets:
                         Tensor, actual_token_num: Tensor, group: str, world_size: int, token_info_table_shape:
                         Sequence[int], token_data_shape: Sequence[int], *, attn_rank_table: Optional[Tensor] = None) -> None:
    """Not implemented: the results stand in windows of other ranks."""
    missing("npu_ffn_to_attention", _WINDOWS + "ffn_to_attention")

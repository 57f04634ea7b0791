"""Products of activations x [m, k] with a weight [n, k]: out = residual + activation(x . weight^T + bias).

Of torch tensors that require gradients `matmul` gives a result that has them; a packed weight has none, x, bias and
residual beside it have.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from . import _core
from ._arrays import empty, int64, integers, optional_view, output, rank, view, view_of_new
from ._calls import option, public
from ._context import Context, default_context
from ._core import PackedIntWeight, PackedWeight
from ._grouped_results import GroupedGradients

__all__ = ["GroupedGradients", "PackedIntWeight", "PackedWeight", "grouped_matmul", "grouped_matmul_backward",
           "grouped_matmul_swiglu_quant", "lookup_rows", "matmul", "matmul_backward", "matmul_int", "pack", "pack_blocks",
           "pack_blocks_stack", "pack_int", "pack_int_stack", "pack_stack", "plan", "read_ahead"]


PackedIntStack = PackedIntWeight  # what pack_int_stack gives


def _torch_forms() -> Dict[str, Any]:
    # Statements, which torch.compile follows where a compiled call is a process's first one.
    from ._torch_grouped import FORMS as GROUPED
    from ._torch_matmul import FORMS

    return {**FORMS, **GROUPED}


@public
def pack(weight: Any, *, context: Optional[Context] = None) -> PackedWeight:
    """A weight that many products use, repacked once; kept in its own dtype."""
    return PackedWeight.pack(context or default_context(), view(weight))


@public
def pack_blocks(blocks: Any, format: str, rows: Any, cols: int, *, context: Optional[Context] = None) -> PackedWeight:
    """The same of a GGUF matrix [rows, cols]: uint8 blocks of a format such as "q4_1". It stays quantised.

    Lists of blocks and of rows: several matrices of one format and cols, one below another, so that what is multiplied with
    the same x goes in one product. Each but the last has a multiple of 16 rows.
    """
    context = context or default_context()
    if isinstance(blocks, (list, tuple)):
        counts = int64(rows, "rows")
        if counts.shape != (len(blocks),):  # before they are looked at: a repeated element may be many
            raise ValueError(f"rows must be {len(blocks)} numbers, one for each of blocks")
        counts = [int(count) for count in rows]
        parts = [view(part, f"blocks[{i}]") for i, part in enumerate(blocks)]
        return PackedWeight.pack_parts(context, parts, format, counts, cols)
    return PackedWeight.pack_blocks(context, view(blocks), format, option("pack_blocks", "rows", "int", rows), cols)


@public
def pack_int(q: Any, scales: Any = None, zeros: Any = None, *, context: Optional[Context] = None) -> PackedIntWeight:
    """An int8 weight [n, k], or int4 as uint8 [n, k / 2], with float32 scales [n, groups] (quant.quantize).

    Without scales: int8 [n, k] as it is, every scale is 1.
    """
    context = context or default_context()
    if scales is None:
        if zeros is not None:
            raise ValueError("zeros are given without scales")
        return PackedIntWeight.pack_plain(context, view(q))
    return PackedIntWeight.pack(context, view(q), view(scales), optional_view(zeros))


@public
def pack_stack(weights: Any, *, context: Optional[Context] = None) -> PackedWeight:
    """The weights [E, n, k] of E groups, repacked once into one buffer, for grouped_matmul; kept in their own dtype."""
    return PackedWeight.pack_stack(context or default_context(), rank(view(weights), weights, 3, "[E, n, k]"))


@public
def pack_blocks_stack(blocks: Any, format: str, count: int, rows: int, cols: int, *,
                      context: Optional[Context] = None) -> PackedWeight:
    """The same of `count` GGUF matrices [rows, cols], one behind another in `blocks`, as files have a mixture's experts."""
    return PackedWeight.pack_blocks_stack(context or default_context(), view(blocks), format, count, rows, cols)


@public
def pack_int_stack(q: Any, scales: Any, zeros: Any = None, *, context: Optional[Context] = None) -> PackedIntWeight:
    """The same of int8 weights [E, n, k], or int4 as uint8 [E, n, k / 2], with float32 scales [E, n, groups] and perhaps int8
    zeros like them: quant.quantize of the rows of all weights, reshaped."""
    return PackedIntWeight.pack_stack(context or default_context(), view(q, "q"), view(scales, "scales"),
                                      optional_view(zeros, "zeros"))


@public(torch=_torch_forms)
def matmul(x: Any, weight: Any, *, bias: Any = None, activation: str = "none", residual: Any = None, out: Any = None,
           int8_activations: bool = False, batch_invariant: bool = False, out_scales: bool = False,
           context: Optional[Context] = None) -> Any:
    """residual + activation(x . weight^T + bias); weight is an array [n, k] or packed.

    activation: none, silu, gelu_erf, gelu_tanh, swiglu or swiglu_swapped (the weight's rows are a gate's and an up
    projection's, out is [m, n / 2]). int8_activations rounds x where it meets a quantised weight. batch_invariant: the bits
    of a row do not depend on how many rows there are, with quantised weights too. out_scales: the result is (out, scales),
    out int8 with each row by its own scale, float32 [m], as quant.dynamic_quant would make them.
    """
    run, arguments, out, scales = _product("matmul", x, weight, bias, activation, residual, out, int8_activations,
                                           batch_invariant, out_scales)
    run(context or default_context(), *arguments)
    return (out, scales) if out_scales else out


def _product(name: str, x: Any, weight: Any, bias: Any, activation: str, residual: Any, out: Any, int8_activations: bool,
             batch_invariant: bool, out_scales: bool) -> Tuple[Any, Tuple[Any, ...], Any, Any]:
    """(the core's function of this name for such a weight, its arguments, out, scales)."""
    tensor = rank(view(x), x, 2, "[m, k]")
    packed = isinstance(weight, PackedWeight)
    if isinstance(weight, PackedIntWeight):
        raise TypeError("weight is a PackedIntWeight; matmul.matmul_int multiplies with it")
    weights = weight if packed else rank(view(weight), weight, 2, "[n, k] (or what matmul.pack gives)")
    n = weights.n if packed else weights.shape[0]
    if out is None:
        width = n // 2 if activation.startswith("swiglu") else n
        out = empty(x, (tensor.shape[0], width), "i8" if out_scales else tensor.dtype)
    scales = empty(x, tensor.shape[:1], "f32") if out_scales else None
    arguments = (tensor, weights, output(out), optional_view(bias), activation, optional_view(residual), int8_activations,
                 batch_invariant, optional_view(scales))
    return getattr(_core, name + "_packed" if packed else name), arguments, out, scales


@public
def matmul_backward(grad_out: Any, x: Any, weight: Any, *, context: Optional[Context] = None) -> Tuple[Any, Any, Any]:
    """(grad_x, grad_weight, grad_bias) of sum(grad_out * (x . weight^T + bias))."""
    tensors = view(grad_out), view(x), rank(view(weight), weight, 2, "[n, k]")
    grad_x = empty(x, tensors[1].shape, tensors[1].dtype)
    grad_weight = empty(weight, tensors[2].shape, tensors[2].dtype)
    grad_bias = empty(weight, (tensors[2].shape[0],), tensors[2].dtype)
    _core.matmul_backward(context or default_context(), *tensors, view(grad_x), view(grad_weight), view(grad_bias))
    return grad_x, grad_weight, grad_bias


@public
def matmul_int(x: Any, weight: PackedIntWeight, *, x_scales: Any = None, bias: Any = None, activation: str = "none",
               residual: Any = None, dtype: Optional[str] = None, out: Any = None, out_scales: bool = False,
               context: Optional[Context] = None) -> Any:
    """residual + activation(x . value^T + bias) with an integer weight: x int8 with x_scales [m] (quant.dynamic_quant), or x
    float.

    dtype of the result: "i32" (x int8, the bare sums, to which an int32 bias is added), "f32", "bf16" or "f16"; default f32
    for int8, else that of x. The sums are exact; one that leaves 32 bits with its int32 bias wraps around, as those of
    torch._int_mm(x, q) + bias do. activation, residual and out_scales are those of matmul.
    """
    if dtype not in (None, "i32", "f32", "bf16", "f16"):
        raise ValueError(f'dtype is "{dtype}", must be one of i32, f32, bf16, f16')
    if dtype is not None and out_scales:
        raise ValueError(f'dtype is "{dtype}", but with out_scales the result is int8')
    arguments, out, scales = _integer_product(x, weight, x_scales, bias, activation, residual, dtype, out, out_scales)
    _core.matmul_int(context or default_context(), *arguments)
    return (out, scales) if out_scales else out


def _integer_product(x: Any, weight: PackedIntWeight, x_scales: Any, bias: Any, activation: str, residual: Any,
                     dtype: Optional[str], out: Any, out_scales: bool) -> Tuple[Tuple[Any, ...], Any, Any]:
    """(the core's arguments, out, scales)."""
    tensor = rank(view(x), x, 2, "[m, k]")
    if out is None:
        width = weight.n // 2 if activation.startswith("swiglu") else weight.n
        kind = "i8" if out_scales else dtype or ("f32" if tensor.dtype == "i8" else tensor.dtype)
        out = empty(x, (tensor.shape[0], width), kind)
    elif dtype is not None and dtype != view(out).dtype:
        raise ValueError(f'dtype is "{dtype}", but out is {view(out).dtype}')
    scales = empty(x, tensor.shape[:1], "f32") if out_scales else None
    return (tensor, weight, output(out), optional_view(x_scales), optional_view(bias), activation, optional_view(residual),
            optional_view(scales)), out, scales


def _group_list(counts: Any, ends: Any) -> Tuple[Any, bool]:
    """(the list that is given, whether it is counts)."""
    if (counts is None) == (ends is None):
        raise ValueError(f"counts and ends are {'both' if ends is not None else 'not'} given; one of them says which rows are whose")
    name, values = ("ends", ends) if counts is None else ("counts", counts)
    return rank(integers(values, name), values, 1, "[E]"), counts is not None


@public(torch=_torch_forms)
def grouped_matmul(x: Any, weight: Any, counts: Any = None, *, ends: Any = None, bias: Any = None, activation: str = "none",
                   residual: Any = None, x_scales: Any = None, smooth_scales: Any = None, dtype: Optional[str] = None, out: Any = None,
                   int8_activations: bool = False, batch_invariant: bool = False, out_scales: bool = False,
                   context: Optional[Context] = None) -> Any:
    """residual + activation(x . weight[e]^T + bias[e]) for the rows of each group e: the experts of a mixture.

    The rows of a group lie next to each other, groups in ascending order: counts [E] is how many rows each has, or ends [E]
    the first row behind each. Groups may be empty; rows behind the last one become zeros. weight [E, n, k] is an array, or
    pack_stack, pack_blocks_stack or pack_int_stack made it. bias [E, n]. A group's rows have the bits of their own product.

    activation, residual, int8_activations, batch_invariant, out_scales as in matmul; x_scales [m] of an int8 x, which an integer
    weight may meet. smooth_scales float32 [E, width of out] or [E]: multiplied into a group's rows before out_scales quantises
    them. dtype of the result: that of x, float32 for an int8 x, or "f32", "bf16", "f16" ("i32": the bare sums of integers).

    Source: the operator GroupedMatmul of Ascend processors.
    """
    if dtype not in (None, "i32", "f32", "bf16", "f16", "f64"):
        raise ValueError(f'dtype is "{dtype}", must be one of i32, f32, bf16, f16, f64')
    if dtype is not None and out_scales:
        raise ValueError(f'dtype is "{dtype}", but with out_scales the result is int8')
    groups, are_counts = _group_list(counts, ends)
    tensor = rank(view(x), x, 2, "[m, k]")
    packed = isinstance(weight, (PackedWeight, PackedIntWeight))
    weights = weight if packed else rank(view(weight), weight, 3, "[E, n, k] (or a packed stack)")
    n = weights.n if packed else weights.shape[1]
    if out is None:
        width = n // 2 if activation.startswith("swiglu") else n
        kind = "i8" if out_scales else dtype or ("f32" if tensor.dtype == "i8" else tensor.dtype)
        out = empty(x, (tensor.shape[0], width), kind)
    elif dtype is not None and dtype != view(out).dtype:
        raise ValueError(f'dtype is "{dtype}", but out is {view(out).dtype}')
    scales = empty(x, tensor.shape[:1], "f32") if out_scales else None
    run = (_core.grouped_matmul_packed if isinstance(weight, PackedWeight) else
           _core.grouped_matmul_int if packed else _core.grouped_matmul)
    run(context or default_context(), tensor, weights, groups, are_counts, output(out), optional_view(bias), activation,
        optional_view(residual), int8_activations, batch_invariant, optional_view(x_scales), optional_view(scales),
        optional_view(smooth_scales))
    return (out, scales) if out_scales else out


@public(torch=_torch_forms)
def grouped_matmul_swiglu_quant(x: Any, x_scales: Any, weight: PackedIntStack, counts: Any = None, *, ends: Any = None,
                                bias: Any = None, smooth_scales: Any = None, context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(out int8 [m, n / 2], scales float32 [m]) of silu(C[:, :n/2]) * C[:, n/2:], where C is the product of int8 rows x with
    x_scales [m] and the integer weight of their group (pack_int_stack): a quantised mixture's gate and up projections.

    counts or ends as in grouped_matmul. bias [E, n] int32 joins the sums, float32 is added to C. smooth_scales float32
    [E, n / 2] or [E] are multiplied into the rows before they are quantised.

    Source: the operator GroupedMatmulSwigluQuant of Ascend processors.
    """
    groups, are_counts = _group_list(counts, ends)
    tensor = rank(view(x), x, 2, "[m, k]")
    out, scales = empty(x, (tensor.shape[0], weight.n // 2), "i8"), empty(x, tensor.shape[:1], "f32")
    _core.grouped_matmul_swiglu_quant(context or default_context(), tensor, view(x_scales), weight, groups, are_counts,
                                      view_of_new(out), view_of_new(scales), optional_view(bias), optional_view(smooth_scales))
    return out, scales


@public(torch=_torch_forms)
def grouped_matmul_backward(grad_out: Any, x: Any, weight: Any, counts: Any = None, *, ends: Any = None,
                            context: Optional[Context] = None) -> GroupedGradients:
    """Gradients of sum(grad_out * (x . weight[e]^T + bias[e])) over the rows of all groups; weight is an array [E, n, k]."""
    groups, are_counts = _group_list(counts, ends)
    g, tensor, weights = view(grad_out), view(x), rank(view(weight), weight, 3, "[E, n, k]")
    found = GroupedGradients(empty(x, tensor.shape, tensor.dtype), empty(weight, weights.shape, weights.dtype),
                             empty(weight, weights.shape[:2], weights.dtype))
    _core.grouped_matmul_backward(context or default_context(), g, tensor, weights, groups, are_counts,
                                  *(view_of_new(gradient) for gradient in found))
    return found


@public
def lookup_rows(weight: PackedWeight, indices: Any, *, context: Optional[Context] = None, like: Any = None) -> Any:
    """Float32 [count, k]: the rows `indices` [count] of a packed weight, an embedding that is also multiplied with.

    An array of the kind of `like`, NumPy's without it. ValueError for an index out of range. Index e * n + r of a stack is
    row r of its weight e.
    """
    where = rank(int64(indices), indices, 1, "[count]")
    out = empty(like, (*where.shape, weight.k), "f32")
    _core.lookup_packed_rows(context or default_context(), weight, where, view(out))
    return out


@public
def plan(x: Any, weight: Any, *, bias: Any = None, activation: str = "none", residual: Any = None, int8_activations: bool = False,
         batch_invariant: bool = False, out_scales: bool = False, x_scales: Any = None, context: Optional[Context] = None) -> str:
    """How `matmul` would multiply these, or `matmul_int` where weight is a PackedIntWeight: which kernel, in which tasks, with
    how much memory, and why. Nothing is computed. A call that would be refused is refused.
    """
    context = context or default_context()
    if isinstance(weight, PackedIntWeight):
        if int8_activations or batch_invariant:
            raise TypeError("int8_activations and batch_invariant are not for a PackedIntWeight")
        arguments, _, _ = _integer_product(x, weight, x_scales, bias, activation, residual, None, None, out_scales)
        return _core.plan_matmul_int(context, *arguments)
    if x_scales is not None:
        raise TypeError("x_scales are given, but weight is no PackedIntWeight")
    tell, arguments, _, _ = _product("plan_matmul", x, weight, bias, activation, residual, None, int8_activations,
                                     batch_invariant, out_scales)
    return tell(context, *arguments)


@public
def read_ahead(weight: PackedWeight, activation: str = "none", *, context: Optional[Context] = None) -> None:
    """Says that the next product of few rows will be with this weight, so that idle threads fetch it first: changes time
    alone."""
    _core.read_ahead(context or default_context(), weight, activation)

"""Products of activations x [m, k] with a weight [n, k]: out = residual + activation(x . weight^T + bias)."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import _core
from ._arrays import default_context, empty, optional_view, view
from ._core import Context, PackedIntWeight, PackedWeight

__all__ = ["PackedIntWeight", "PackedWeight", "matmul", "matmul_backward", "matmul_int", "pack", "pack_blocks", "pack_int"]


def pack(weight: Any, *, context: Optional[Context] = None) -> PackedWeight:
    """A weight that many products use, repacked once; kept in its own dtype."""
    return PackedWeight.pack(context or default_context(), view(weight))


def pack_blocks(blocks: Any, format: str, rows: int, cols: int, *, context: Optional[Context] = None) -> PackedWeight:
    """The same of a GGUF matrix [rows, cols]: uint8 blocks of a format such as "q4_1". It stays quantised."""
    return PackedWeight.pack_blocks(context or default_context(), view(blocks), format, rows, cols)


def pack_int(q: Any, scales: Any, zeros: Any = None, *, context: Optional[Context] = None) -> PackedIntWeight:
    """An int8 weight [n, k], or int4 as uint8 [n, k / 2], with float32 scales [n, groups] (quant.quantize)."""
    return PackedIntWeight.pack(context or default_context(), view(q), view(scales), optional_view(zeros))


def matmul(x: Any, weight: Any, *, bias: Any = None, activation: str = "none", residual: Any = None, out: Any = None,
           int8_activations: bool = False, context: Optional[Context] = None) -> Any:
    """residual + activation(x . weight^T + bias); weight is an array [n, k] or packed.

    activation: none, silu, gelu_erf, gelu_tanh, swiglu or swiglu_swapped (the weight's rows are a gate's and an up
    projection's, out is [m, n / 2]). int8_activations rounds x where it meets a quantised weight.
    """
    tensor = view(x)
    n = weight.n if isinstance(weight, PackedWeight) else view(weight).shape[0]
    if out is None:
        out = empty(x, (tensor.shape[0], n // 2 if activation.startswith("swiglu") else n), tensor.dtype)
    common = view(out), optional_view(bias), activation, optional_view(residual)
    context = context or default_context()
    if isinstance(weight, PackedWeight):
        _core.matmul_packed(context, tensor, weight, *common, int8_activations)
    else:
        _core.matmul(context, tensor, view(weight), *common)
    return out


def matmul_backward(grad_out: Any, x: Any, weight: Any, *, context: Optional[Context] = None) -> Tuple[Any, Any, Any]:
    """(grad_x, grad_weight, grad_bias) of sum(grad_out * (x . weight^T + bias))."""
    tensors = view(grad_out), view(x), view(weight)
    grad_x = empty(x, tensors[1].shape, tensors[1].dtype)
    grad_weight = empty(weight, tensors[2].shape, tensors[2].dtype)
    grad_bias = empty(weight, (tensors[2].shape[0],), tensors[2].dtype)
    _core.matmul_backward(context or default_context(), *tensors, view(grad_x), view(grad_weight), view(grad_bias))
    return grad_x, grad_weight, grad_bias


def matmul_int(x: Any, weight: PackedIntWeight, *, x_scales: Any = None, bias: Any = None, dtype: Optional[str] = None,
               out: Any = None, context: Optional[Context] = None) -> Any:
    """x . value^T + bias with an integer weight: x int8 with x_scales [m] (quant.dynamic_quant), or x float.

    dtype of the result: "i32" (x int8, the bare sums), "f32", "bf16" or "f16"; default f32 for int8, else that of x.
    """
    tensor = view(x)
    if out is None:
        out = empty(x, (tensor.shape[0], weight.n), dtype or ("f32" if tensor.dtype == "i8" else tensor.dtype))
    _core.matmul_int(context or default_context(), tensor, weight, view(out), optional_view(x_scales), optional_view(bias))
    return out

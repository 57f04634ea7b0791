"""matmul.matmul as an operator of torch, with the gradients of x, weight, bias and residual.

    y = x . weight^T + bias,   out = residual + activation(y)

The backward computes y again where there is an activation, in float32 (float64), multiplies by the activation's derivative
with torch's own formulas, and gives the products to the core. A packed weight has no gradient, x beside it has: it is
multiplied with the unpacked rows.
"""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import Tensor

from . import _core
from . import _torch_door as door
from ._arrays import is_torch, optional_view, view
from ._calls import function_of
from ._core import PackedIntWeight, PackedWeight
from ._torch_forms import Form, define, not_traced, unpacked, wanted_results
from ._torch_operator import context, using

_public_matmul = function_of("matmul", "matmul")
_plain_matmul = _public_matmul.__wrapped__  # without its checks
HALVES = ("swiglu", "swiglu_swapped")


def _matmul(x, weight, bias, residual, activation):
    return _plain_matmul(x, weight, bias=bias, residual=residual, activation=activation, context=context())


def _matmul_fake(x, weight, bias, residual, activation):
    n = weight.shape[0]
    return x.new_empty((x.shape[0], n // 2 if activation in HALVES else n))


def before_activation(grad_out: Tensor, y: Tensor, activation: str) -> Tensor:
    """The gradient of y, of that of activation(y)."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad_out, y)
    if activation in ("gelu_erf", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(grad_out, y, approximate="tanh" if activation == "gelu_tanh" else "none")
    first, second = y.chunk(2, 1)
    gate, up = (first, second) if activation == "swiglu" else (second, first)
    grad_gate = torch.ops.aten.silu_backward(grad_out * up, gate)
    grad_up = grad_out * torch.nn.functional.silu(gate)
    return torch.cat((grad_gate, grad_up) if activation == "swiglu" else (grad_up, grad_gate), 1)


def _grad_y(grad_out: Tensor, x: Tensor, weight: Any, bias: Any, activation: str) -> Tensor:
    if activation == "none":
        return grad_out
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = weight.n if isinstance(weight, PackedWeight) else weight.shape[0]
    y = torch.empty((x.shape[0], n), dtype=wide)
    _plain_matmul(x, weight, bias=bias, out=y, context=context())
    return before_activation(grad_out.to(wide), y, activation)


def _memory(x, weight, bias, wanted):
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0)
                 for tensor, want in zip((x, weight, bias), wanted))


def _backward(grad_out, x, weight, bias, activation, wanted):
    gradients = _memory(x, weight, bias, wanted)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    grad_y = _grad_y(grad_out, x, weight, bias, activation)
    _core.matmul_backward(context(), view(grad_y), view(x), view(weight), *views)
    return gradients


_backward_operator = define(
    "matmul_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? bias, str activation, bool[3] wanted) -> "
    "(Tensor, Tensor, Tensor)", _backward,
    lambda grad_out, x, weight, bias, activation, wanted: _memory(x, weight, bias, wanted))


def _save(ctx, inputs, output):
    x, weight, bias, residual, ctx.activation = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, weight, bias)


def _gradients(ctx, grad_out):
    if grad_out is None:
        return (None,) * 5
    wanted = list(ctx.needs_input_grad[:3])
    gradients = (None,) * 3
    if any(wanted):
        found = _backward_operator(grad_out, *ctx.saved_tensors, ctx.activation, wanted)
        gradients = wanted_results(found, wanted)
    residual = grad_out.to(ctx.residual_dtype) if ctx.needs_input_grad[3] else None
    return (*gradients, residual, None)


_operator = define("matmul(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation) -> Tensor", _matmul,
                   _matmul_fake, _save, _gradients)


class _Packed(torch.autograd.Function):
    """The product with a packed weight, which no schema of an operator has a word for."""

    @staticmethod
    def forward(ctx, x, bias, residual, weight, activation, options, given):
        ctx.save_for_backward(x, bias)
        ctx.weight, ctx.activation, ctx.given = weight, activation, given
        ctx.residual_dtype = None if residual is None else residual.dtype
        return _plain_matmul(x, weight, bias=bias, residual=residual, activation=activation, context=given, **options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        x, bias = ctx.saved_tensors
        grad_x, grad_bias, residual = None, None, None
        with using(ctx.given):
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                grad_y = _grad_y(grad_out, x, ctx.weight, bias, ctx.activation)
                grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
                grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[1] else None
                _core.matmul_backward(context(), view(grad_y), view(x), view(unpacked(ctx.weight)[0]), optional_view(grad_x),
                                      None, optional_view(grad_bias))
        if ctx.needs_input_grad[2]:
            residual = grad_out.to(ctx.residual_dtype)
        return grad_x, grad_bias, residual, None, None, None, None


class _MatmulForm(Form):
    """matmul takes packed weights, and has results without gradients, which are no operators."""

    def _run(self, bound: Dict[str, Any]) -> Any:
        tensors = [value for value in bound.values() if is_torch(value)]
        packed = isinstance(bound["weight"], PackedWeight)
        if bound["out_scales"] or packed:
            if torch.compiler.is_compiling():
                not_traced("matmul", "a packed weight and out_scales")
            if bound["out_scales"] and door.records(*tensors):
                raise RuntimeError("matmul: an input requires gradients, and the int8 result of out_scales has none; call it under "
                                   "torch.no_grad()")
        options = {name: bound[name] for name in ("int8_activations", "batch_invariant")}
        if bound["out_scales"]:
            return _plain_matmul(bound["x"], bound["weight"], bias=bound["bias"], activation=bound["activation"],
                                 residual=bound["residual"], out_scales=True, context=bound["context"], **options)
        if packed:
            return _Packed.apply(bound["x"], bound["bias"], bound["residual"], bound["weight"], bound["activation"], options,
                                 bound["context"])
        return super()._run(bound)


def _prepare(bound: Dict[str, Any]) -> None:
    if isinstance(bound["weight"], PackedIntWeight):
        raise TypeError("matmul: weight is a PackedIntWeight; matmul.matmul_int multiplies with it")


FORMS = {"matmul": _MatmulForm(_public_matmul, _operator, ("x", "weight", "bias", "residual", "activation"), prepare=_prepare,
                               casts=("x", "weight", "bias", "residual"), packed=("weight",))}

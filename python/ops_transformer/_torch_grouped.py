"""matmul.grouped_matmul as an operator of torch, with the gradients of x, weight, bias and residual.

As in _torch_matmul, group by group: the backward computes the products again where there is an activation. Rows behind the
last group get no gradient and give none. A packed weight of floats or blocks has no gradient, x beside it has; beside an
integer weight nothing has.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from . import _core
from . import _torch_door as door
from ._arrays import integer_tensor, integers, is_torch, optional_view, view
from ._calls import function_of
from ._core import PackedIntWeight, PackedWeight
from ._grouped_results import GroupedGradients
from ._torch_forms import Form, PackedForm, define, not_traced, unpacked, wanted_results
from ._torch_matmul import HALVES, before_activation
from ._torch_operator import context, using

_public = function_of("matmul", "grouped_matmul")
_plain = _public.__wrapped__  # without its checks


def _groups(counts: Optional[Tensor], ends: Optional[Tensor]) -> Any:
    """The core's two arguments that tell the groups."""
    return integers(ends if counts is None else counts), counts is not None


def _forward(x, weight, counts, ends, bias, residual, activation):
    return _plain(x, weight, counts=counts, ends=ends, bias=bias, residual=residual, activation=activation, context=context())


def _fake(x, weight, counts, ends, bias, residual, activation):
    n = weight.shape[1]
    return x.new_empty((x.shape[0], n // 2 if activation in HALVES else n))


def _grad_y(grad_out: Tensor, x: Tensor, weight: Any, counts: Any, ends: Any, bias: Any, activation: str) -> Tensor:
    """The gradient of the products, before the activation. Of rows behind the last group nobody reads it."""
    if activation == "none":
        return grad_out
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    n = weight.n if isinstance(weight, PackedWeight) else weight.shape[1]
    y = torch.empty((x.shape[0], n), dtype=wide)
    _plain(x, weight, counts=counts, ends=ends, bias=bias, out=y, context=context())
    return before_activation(grad_out.to(wide), y, activation)


def _memory(x, weight, bias, wanted):
    return tuple(tensor.new_empty(tensor.shape) if want else x.new_empty(0)
                 for tensor, want in zip((x, weight, bias), wanted))


def _backward(grad_out, x, weight, counts, ends, bias, activation, wanted):
    gradients = _memory(x, weight, bias, wanted)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    grad_y = _grad_y(grad_out, x, weight, counts, ends, bias, activation)
    _core.grouped_matmul_backward(context(), view(grad_y), view(x), view(weight), *_groups(counts, ends), *views)
    return gradients


_backward_operator = define(
    "grouped_matmul_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? counts, Tensor? ends, Tensor? bias, "
    "str activation, bool[3] wanted) -> (Tensor, Tensor, Tensor)", _backward,
    lambda grad_out, x, weight, counts, ends, bias, activation, wanted: _memory(x, weight, bias, wanted))


def _grad_residual(grad_out: Tensor, counts: Optional[Tensor], ends: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """That of out, but zeros behind the last group, where out is zeros."""
    count = counts.sum() if counts is not None else ends[-1:].sum()
    inside = torch.arange(grad_out.shape[0]) < count
    return torch.where(inside[:, None], grad_out, torch.zeros((), dtype=grad_out.dtype)).to(dtype)


def _save(ctx, inputs, output):
    x, weight, counts, ends, bias, residual, ctx.activation = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, weight, counts, ends, bias)


def _gradients(ctx, grad_out):
    if grad_out is None:
        return (None,) * 7
    x, weight, counts, ends, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[4]]
    gradients = (None,) * 3
    if any(wanted):
        found = _backward_operator(grad_out, x, weight, counts, ends, bias, ctx.activation, wanted)
        gradients = wanted_results(found, wanted)
    residual = _grad_residual(grad_out, counts, ends, ctx.residual_dtype) if needs[5] else None
    return (*gradients[:2], None, None, gradients[2], residual, None)


_ORDER = ("x", "weight", "counts", "ends", "bias", "residual", "activation")
_operator = define("grouped_matmul(Tensor x, Tensor weight, Tensor? counts, Tensor? ends, Tensor? bias, Tensor? residual, "
                   "str activation) -> Tensor", _forward, _fake, _save, _gradients)


class _Packed(torch.autograd.Function):
    """The product with a packed stack, which no schema of an operator has a word for."""

    @staticmethod
    def forward(ctx, x, bias, residual, bound):
        ctx.save_for_backward(x, bias, bound["counts"], bound["ends"])
        ctx.weight, ctx.activation, ctx.given = bound["weight"], bound["activation"], bound["context"]
        ctx.residual_dtype = None if residual is None else residual.dtype
        return _plain(**{**bound, "x": x, "bias": bias, "residual": residual})

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        x, bias, counts, ends = ctx.saved_tensors
        weight = ctx.weight
        grad_x, grad_bias, residual = None, None, None
        with using(ctx.given):
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                grad_y = _grad_y(grad_out, x, weight, counts, ends, bias, ctx.activation)
                grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
                grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[1] else None
                _core.grouped_matmul_backward(context(), view(grad_y), view(x), view(unpacked(weight)), *_groups(counts, ends),
                                              optional_view(grad_x), None, optional_view(grad_bias))
        if ctx.needs_input_grad[2]:
            residual = _grad_residual(grad_out, counts, ends, ctx.residual_dtype)
        return grad_x, grad_bias, residual, None


def _prepare(bound: Dict[str, Any]) -> None:
    if (bound["counts"] is None) == (bound["ends"] is None):
        raise ValueError("one of counts and ends must be given")
    for name in ("counts", "ends"):
        if bound[name] is not None:
            bound[name] = integer_tensor(bound[name], name)


class _GroupedForm(Form):
    """grouped_matmul takes packed stacks, and has results and operands without gradients, which are no operators."""

    def _run(self, bound: Dict[str, Any]) -> Any:
        weight = bound["weight"]
        quantised = [name for name in ("out_scales", "x_scales", "smooth_scales") if bound[name] is not None and bound[name] is not False]
        integer = isinstance(weight, PackedIntWeight)
        other_dtype = bound["dtype"] is not None
        if not (quantised or integer or other_dtype or isinstance(weight, PackedWeight)):
            return super()._run(bound)
        if torch.compiler.is_compiling():
            not_traced("grouped_matmul", "a packed weight, dtype, and scales")
        tensors = [bound[name] for name in ("x", "weight", "bias", "residual", "x_scales", "smooth_scales") if is_torch(bound[name])]
        if (quantised or integer) and door.records(*tensors):
            what = "an integer weight" if integer else f"{quantised[0]}, which has to do with integers"
            raise RuntimeError(f"grouped_matmul: an input requires gradients, but beside {what} there are none; call it under "
                               "torch.no_grad()")
        if other_dtype and door.records(*tensors):
            raise RuntimeError("grouped_matmul: dtype is given and an input requires gradients, which a result of the dtype of x has "
                               "alone: leave dtype out and cast the result, or call under torch.no_grad()")
        if isinstance(weight, PackedWeight) and door.records(*tensors):
            return _Packed.apply(bound["x"], bound["bias"], bound["residual"], {**bound, "out": None})
        return _plain(**{**bound, "out": None})


def _bias_and_wanted(bound: Dict[str, Any]) -> Dict[str, Any]:
    """Of a backward for its caller: all gradients, that of a bias too, whose shape alone is read."""
    weight = bound["weight"]
    return {"bias": weight.new_empty(weight.shape[:2]), "activation": "none", "wanted": [True, True, True]}


FORMS = {
    "grouped_matmul": _GroupedForm(_public, _operator, _ORDER, prepare=_prepare, casts=("x", "weight", "bias", "residual"),
                                   packed=("weight",)),
    "grouped_matmul_backward": Form(
        function_of("matmul", "grouped_matmul_backward"), _backward_operator,
        ("grad_out", "x", "weight", "counts", "ends", "bias", "activation", "wanted"), prepare=_prepare, differentiable=False,
        complete=_bias_and_wanted, finish=lambda bound, found: GroupedGradients(*found)),
    "grouped_matmul_swiglu_quant": PackedForm(function_of("matmul", "grouped_matmul_swiglu_quant")),
}

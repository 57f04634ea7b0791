"""The functions of rowwise as operators of torch, with their gradients."""

from __future__ import annotations

from typing import Any, Callable, Dict

import torch
from torch import Tensor

from . import _core
from ._arrays import integer_tensor, optional_view, view
from ._calls import function_of
from ._torch_forms import Form, define
from ._torch_operator import context


def _bare(name: str) -> Callable[..., Any]:
    """A function of rowwise without its checks."""
    return function_of("rowwise", name).__wrapped__


def _wanted_like(tensor: Any, wanted: bool) -> Tensor:
    """Memory for a gradient, or the empty tensor that stands for one which nobody wants."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted else tensor.new_empty(0)


def _given(gradient: Tensor, wanted: bool) -> Any:
    return gradient if wanted else None


def _row_statistic(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[:-1] if wanted else (0,), dtype=torch.float32)


# ---- norms -----------------------------------------------------------------------------------------------------------


def _rms_norm(x, weight, eps, rstd):
    got = _bare("rms_norm")(x, weight, eps, return_rstd=rstd, context=context())
    return got if rstd else (got, _row_statistic(x, False))


def _rms_norm_backward(grad_out, x, weight, grad_sum, eps, wanted):
    grad_x, grad_weight = (_wanted_like(t, w) for t, w in zip((x, weight), wanted))
    _core.rms_norm_backward(context(), view(grad_out), view(x), view(weight), view(grad_x) if wanted[0] else None,
                            view(grad_weight) if wanted[1] else None, eps, optional_view(grad_sum))
    return grad_x, grad_weight


def _rms_norm_backward_fake(grad_out, x, weight, grad_sum, eps, wanted):
    return _wanted_like(x, wanted[0]), _wanted_like(weight, wanted[1])


_rms_norm_backward_operator = define(
    "rms_norm_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? grad_sum, float eps, bool[2] wanted) -> "
    "(Tensor, Tensor)", _rms_norm_backward, _rms_norm_backward_fake)


def _rms_norm_save(ctx, inputs, output):
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])


def _rms_norm_gradients(ctx, grad_out, _):
    if grad_out is None:
        return None, None, None, None
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    gradients = _rms_norm_backward_operator(grad_out, x, weight, None, ctx.eps, wanted)
    return (*map(_given, gradients, wanted), None, None)


_rms_norm_operator = define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool rstd) -> (Tensor, Tensor)", _rms_norm,
    lambda x, weight, eps, rstd: (x.new_empty(x.shape), _row_statistic(x, rstd)), _rms_norm_save, _rms_norm_gradients)


def _add_rms_norm(a, b, weight, eps, rstd):
    got = _bare("add_rms_norm")(a, b, weight, eps, return_rstd=rstd, context=context())
    return got if rstd else (*got, _row_statistic(a, False))


def _add_rms_norm_save(ctx, inputs, output):
    _, _, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.mark_non_differentiable(output[2])


def _add_rms_norm_gradients(ctx, grad_out, grad_sum, _):
    total, weight = ctx.saved_tensors
    if grad_out is None:
        return grad_sum, grad_sum, None, None, None
    wanted = [ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    grad_x, grad_weight = _rms_norm_backward_operator(grad_out, total, weight, grad_sum if wanted[0] else None, ctx.eps, wanted)
    return (_given(grad_x, ctx.needs_input_grad[0]), _given(grad_x, ctx.needs_input_grad[1]), _given(grad_weight, wanted[1]),
            None, None)


_add_rms_norm_operator = define(
    "add_rms_norm(Tensor a, Tensor b, Tensor weight, float eps, bool rstd) -> (Tensor, Tensor, Tensor)", _add_rms_norm,
    lambda a, b, weight, eps, rstd: (a.new_empty(a.shape), a.new_empty(a.shape), _row_statistic(a, rstd)),
    _add_rms_norm_save, _add_rms_norm_gradients)


def _layer_norm(x, weight, bias, eps, statistics):
    got = _bare("layer_norm")(x, weight, bias, eps, return_statistics=statistics, context=context())
    return got if statistics else (got, _row_statistic(x, False), _row_statistic(x, False))


def _layer_norm_memory(x, weight, bias, wanted):
    return tuple(x.new_empty(0) if tensor is None else _wanted_like(tensor, want)
                 for tensor, want in zip((x, weight, bias), wanted))


def _layer_norm_backward(grad_out, x, weight, bias, eps, wanted):
    gradients = _layer_norm_memory(x, weight, bias, wanted)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    _core.layer_norm_backward(context(), view(grad_out), view(x), optional_view(weight), *views, eps)
    return gradients


_layer_norm_backward_operator = define(
    "layer_norm_backward(Tensor grad_out, Tensor x, Tensor? weight, Tensor? bias, float eps, bool[3] wanted) -> "
    "(Tensor, Tensor, Tensor)", _layer_norm_backward,
    lambda grad_out, x, weight, bias, eps, wanted: _layer_norm_memory(x, weight, bias, wanted))


def _layer_norm_save(ctx, inputs, output):
    x, weight, bias, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.mark_non_differentiable(output[1], output[2])


def _layer_norm_gradients(ctx, grad_out, *_):
    if grad_out is None:
        return None, None, None, None, None
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _layer_norm_backward_operator(grad_out, *ctx.saved_tensors, ctx.eps, wanted)
    return (*map(_given, gradients, wanted), None, None)


_layer_norm_operator = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool statistics) -> (Tensor, Tensor, Tensor)", _layer_norm,
    lambda x, weight, bias, eps, statistics: (x.new_empty(x.shape), _row_statistic(x, statistics),
                                              _row_statistic(x, statistics)), _layer_norm_save, _layer_norm_gradients)

# ---- softmax ---------------------------------------------------------------------------------------------------------

_softmax_backward_operator = define(
    "softmax_backward(Tensor grad_out, Tensor out, float scale) -> Tensor",
    lambda grad_out, out, scale: _bare("softmax_backward")(grad_out, out, scale, context=context()),
    lambda grad_out, out, scale: out.new_empty(out.shape))


def _softmax_save(ctx, inputs, output):
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _softmax_gradients(ctx, grad_out):
    if grad_out is None:
        return None, None
    return _softmax_backward_operator(grad_out, ctx.saved_tensors[0], ctx.scale), None


_softmax_operator = define(
    "softmax(Tensor x, float scale) -> Tensor", lambda x, scale: _bare("softmax")(x, scale, context=context()),
    lambda x, scale: x.new_empty(x.shape), _softmax_save, _softmax_gradients)

# ---- rotation: its gradient is the rotation by the negative angle ----------------------------------------------------


def _rope_save(ctx, inputs, output):
    _, cos, sin, ctx.style, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rope_gradients(ctx, grad_out):
    if grad_out is None:
        return (None,) * 5
    return _rope_operator(grad_out, *ctx.saved_tensors, ctx.style, not ctx.inverse), None, None, None, None


_rope_operator = define(
    "rope(Tensor x, Tensor cos, Tensor sin, str style, bool inverse) -> Tensor",
    lambda x, cos, sin, style, inverse: _bare("rope")(x, cos, sin, style=style, inverse=inverse, context=context()),
    lambda x, cos, sin, style, inverse: x.new_empty(x.shape), _rope_save, _rope_gradients)


def _rope_cached(x, positions, cos, sin, style, inverse, sections):
    axes = None if sections is None else (*sections[:3], bool(sections[3]))  # a schema has lists of integers alone
    return _bare("rope_cached")(x, positions, cos, sin, style=style, inverse=inverse, sections=axes, context=context())


def _rope_cached_save(ctx, inputs, output):
    _, positions, cos, sin, ctx.style, ctx.inverse, ctx.sections = inputs
    ctx.save_for_backward(positions, cos, sin)


def _rope_cached_gradients(ctx, grad_out):
    if grad_out is None:
        return (None,) * 7
    grad_x = _rope_cached_operator(grad_out, *ctx.saved_tensors, ctx.style, not ctx.inverse, ctx.sections)
    return (grad_x, *(None,) * 6)


_rope_cached_operator = define(
    "rope_cached(Tensor x, Tensor positions, Tensor cos, Tensor sin, str style, bool inverse, int[]? sections) -> Tensor",
    _rope_cached, lambda x, positions, cos, sin, style, inverse, sections: x.new_empty(x.shape), _rope_cached_save,
    _rope_cached_gradients)


def _rope_cached_arguments(bound: Dict[str, Any]) -> None:
    bound["positions"] = integer_tensor(bound["positions"], "positions").to(torch.int64)


# ---- the gate, the sum -----------------------------------------------------------------------------------------------


def _halved(gate: Tensor) -> tuple:
    return (*gate.shape[:-1], gate.shape[-1] // 2)


def _swiglu_backward(grad_out, gate, up, swapped):
    got = _bare("swiglu_backward")(grad_out, gate, up, swapped=swapped, context=context())
    return (got, gate.new_empty(0)) if up is None else got


_swiglu_backward_operator = define(
    "swiglu_backward(Tensor grad_out, Tensor gate, Tensor? up, bool swapped) -> (Tensor, Tensor)", _swiglu_backward,
    lambda grad_out, gate, up, swapped: (gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)))


def _swiglu_save(ctx, inputs, output):
    gate, up, ctx.swapped = inputs
    ctx.save_for_backward(gate, up)


def _swiglu_gradients(ctx, grad_out):
    if grad_out is None:
        return None, None, None
    gate, up = ctx.saved_tensors
    gradients = _swiglu_backward_operator(grad_out, gate, up, ctx.swapped)
    return (*map(_given, gradients, ctx.needs_input_grad[:2]), None)


_swiglu_operator = define(
    "swiglu(Tensor gate, Tensor? up, bool swapped) -> Tensor",
    lambda gate, up, swapped: _bare("swiglu")(gate, up, swapped=swapped, context=context()),
    lambda gate, up, swapped: gate.new_empty(_halved(gate) if up is None else gate.shape), _swiglu_save, _swiglu_gradients)

_add_operator = define(
    "add(Tensor a, Tensor b) -> Tensor", lambda a, b: _bare("add")(a, b, context=context()),
    lambda a, b: a.new_empty(a.shape), lambda ctx, inputs, output: None, lambda ctx, grad_out: (grad_out, grad_out))

# ---- which function is which operator --------------------------------------------------------------------------------


def _without(option: str, last: int) -> Callable[[Dict[str, Any], Any], Any]:
    """The results that were asked for: all of them, or without the statistics behind the first `last`."""
    def finish(bound: Dict[str, Any], result: Any) -> Any:
        if bound[option]:
            return tuple(result)
        return result[0] if last == 1 else tuple(result[:last])

    return finish


_OPERATORS = {
    "rms_norm": (_rms_norm_operator, ("x", "weight", "eps", "return_rstd"), {"finish": _without("return_rstd", 1)}),
    "add_rms_norm": (_add_rms_norm_operator, ("a", "b", "weight", "eps", "return_rstd"), {"finish": _without("return_rstd", 2)}),
    "layer_norm": (_layer_norm_operator, ("x", "weight", "bias", "eps", "return_statistics"),
                   {"finish": _without("return_statistics", 1)}),
    "softmax": (_softmax_operator, ("x", "scale"), {}),
    "rope": (_rope_operator, ("x", "cos", "sin", "style", "inverse"), {"without_gradient": ("cos", "sin")}),
    "rope_cached": (_rope_cached_operator, ("x", "positions", "cos_cache", "sin_cache", "style", "inverse", "sections"),
                    {"without_gradient": ("cos_cache", "sin_cache"), "prepare": _rope_cached_arguments}),
    "swiglu": (_swiglu_operator, ("gate", "up", "swapped"), {}),
    "add": (_add_operator, ("a", "b"), {}),
}
FORMS = {name: Form(function_of("rowwise", name), operator, order, **more)
         for name, (operator, order, more) in _OPERATORS.items()}

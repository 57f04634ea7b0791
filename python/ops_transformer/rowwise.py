"""What works a row at a time: norms, softmax, rotary positions, the gate of a feed-forward block; and their gradients.

Arrays [.., features] in float32, bfloat16 or float16, with any strides; arithmetic in float32. `out` may be given, and may
be an input itself (in place). Of torch tensors that require gradients the functions without `_backward` in their names give
results that have them (docs/python.md).
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

from . import _core
from ._arrays import empty, int64, optional_view, output, view
from ._calls import public
from ._context import Context, default_context

__all__ = ["add", "add_rms_norm", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "rope", "rope_cached",
           "rope_table", "RopeSections", "softmax", "softmax_backward", "swiglu", "swiglu_backward"]


def _torch_forms() -> Dict[str, Any]:
    # A statement, which torch.compile follows where a compiled call is a process's first one.
    from ._torch_rowwise import FORMS

    return FORMS


def _like(x: Any, out: Any = None) -> Any:
    if out is not None:
        return out
    tensor = view(x)
    return empty(x, tensor.shape, tensor.dtype)


def _statistic(x: Any, wanted: bool) -> Any:
    """Float32 [..]: one number a row of x [.., features]."""
    return empty(x, view(x).shape[:-1], "f32") if wanted else None


@public(torch=_torch_forms)
def rms_norm(x: Any, weight: Any, eps: float = 1e-5, *, return_rstd: bool = False, out: Any = None,
             context: Optional[Context] = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight. return_rstd: (out, rstd), rstd = 1 / sqrt(mean(x^2) + eps) float32 [..].

    Squares are summed in float32: a row whose sum is above 3.4e38 (elements from about 1.8e19 on) has rstd = 0 and gives
    zeros, as torch's rms_norm does.
    """
    out, rstd = _like(x, out), _statistic(x, return_rstd)
    _core.rms_norm(context or default_context(), view(x), view(weight), output(out), eps, optional_view(rstd))
    return (out, rstd) if return_rstd else out


@public(torch=_torch_forms)
def add_rms_norm(a: Any, b: Any, weight: Any, eps: float = 1e-5, *, return_rstd: bool = False,
                 context: Optional[Context] = None) -> Tuple[Any, ...]:
    """(rms_norm(a + b), a + b), and with return_rstd the rstd of rms_norm behind them."""
    out, total, rstd = _like(a), _like(a), _statistic(a, return_rstd)
    _core.add_rms_norm(context or default_context(), view(a), view(b), view(weight), view(out), view(total), eps,
                       optional_view(rstd))
    return (out, total, rstd) if return_rstd else (out, total)


@public
def rms_norm_backward(grad_out: Any, x: Any, weight: Any, eps: float = 1e-5, *, grad_sum: Any = None,
                      context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(grad_x, grad_weight). With x = a + b of add_rms_norm and grad_sum the gradient of that sum, grad_x is the gradient
    of a and of b. Rows of rstd = 0 (rms_norm) give zeros, or NaN where products of grad_out, weight and x overflow as well."""
    grad_x, grad_weight = _like(x), _like(weight)
    _core.rms_norm_backward(context or default_context(), view(grad_out), view(x), view(weight), view(grad_x),
                            view(grad_weight), eps, optional_view(grad_sum))
    return grad_x, grad_weight


@public(torch=_torch_forms)
def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, return_statistics: bool = False,
               out: Any = None, context: Optional[Context] = None) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias. return_statistics: (out, mean, rstd), the latter float32 [..],
    rstd = 1 / sqrt(var(x) + eps).

    A row whose squared differences to the mean sum to more than 3.4e38 has rstd = 0 and gives its bias (torch's layer_norm:
    NaN); one whose elements do gives NaN.
    """
    out = _like(x, out)
    mean, rstd = _statistic(x, return_statistics), _statistic(x, return_statistics)
    _core.layer_norm(context or default_context(), view(x), optional_view(weight), optional_view(bias), output(out), eps,
                     optional_view(mean), optional_view(rstd))
    return (out, mean, rstd) if return_statistics else out


@public
def layer_norm_backward(grad_out: Any, x: Any, weight: Any = None, eps: float = 1e-5, *,
                        context: Optional[Context] = None) -> Tuple[Any, Any, Any]:
    """(grad_x, grad_weight, grad_bias); without a weight (grad_x, None, None)."""
    grad_x = _like(x)
    grad_weight, grad_bias = (None, None) if weight is None else (_like(weight), _like(weight))
    _core.layer_norm_backward(context or default_context(), view(grad_out), view(x), optional_view(weight), view(grad_x),
                              optional_view(grad_weight), optional_view(grad_bias), eps)
    return grad_x, grad_weight, grad_bias


@public(torch=_torch_forms)
def softmax(x: Any, scale: float = 1.0, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """Softmax of scale * x over the last dimension; a row of -inf gives zeros."""
    out = _like(x, out)
    _core.softmax(context or default_context(), view(x), output(out), scale)
    return out


@public
def softmax_backward(grad_out: Any, out: Any, scale: float = 1.0, *, context: Optional[Context] = None) -> Any:
    """The gradient of x, from what softmax gave."""
    grad_x = _like(out)
    _core.softmax_backward(context or default_context(), view(grad_out), view(out), view(grad_x), scale)
    return grad_x


class RopeSections(NamedTuple):
    """Positions in three axes: how many pairs of a head turn by each. Together they are all of them.

    In turn: the first `temporal` pairs by the first axis, the next `height` by the second, the others by the third.
    interleaved: pairs 1, 4, 7 .. by the second, 2, 5, 8 .. by the third, the others by the first.
    """

    temporal: int
    height: int
    width: int
    interleaved: bool = False


@public
def rope_table(positions: Any, half: int, theta: float = 10000.0, *, sections: Optional[RopeSections] = None,
               context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(cos, sin) float32 [tokens, half] of positions * theta^(-i / half); positions int64 [tokens], with sections
    [3, tokens]. Computed in float64."""
    tokens = int64(positions)
    if len(tokens.shape) != (1 if sections is None else 2) or half < 0:
        raise ValueError(f"positions must be [tokens], or with sections [3, tokens], and half at least 0, but they are "
                         f"{list(tokens.shape)} and {half}")
    shape = (tokens.shape[-1], half)
    cos, sin = empty(positions, shape, "f32"), empty(positions, shape, "f32")
    _core.rope_table(context or default_context(), tokens, view(cos), view(sin), theta, sections)
    return cos, sin


@public(torch=_torch_forms)
def rope(x: Any, cos: Any, sin: Any, *, style: str = "halves", inverse: bool = False, out: Any = None,
         context: Optional[Context] = None) -> Any:
    """Turns pairs of elements of x [tokens, num_heads, head_dim]: i and i + half ("halves") or 2i and 2i + 1 ("pairs").

    cos and sin float32 [tokens, half], 2 * half <= head_dim; elements behind are copied. inverse turns back, and turns the
    gradient of the result into that of x. cos and sin have no gradients.
    """
    out = _like(x, out)
    _core.rope(context or default_context(), view(x), view(cos), view(sin), output(out), style, inverse)
    return out


@public(torch=_torch_forms)
def rope_cached(x: Any, positions: Any, cos_cache: Any, sin_cache: Any, *, style: str = "halves", inverse: bool = False,
                sections: Optional[RopeSections] = None, out: Any = None, context: Optional[Context] = None) -> Any:
    """rope with the angles of all positions in a cache [max_positions, half], float32 or of the dtype of x.

    positions int64 [tokens], with sections [3, tokens]; ValueError for one that the cache does not have.
    """
    out = _like(x, out)
    _core.rope_cached(context or default_context(), view(x), int64(positions), view(cos_cache), view(sin_cache), output(out),
                      style, inverse, sections)
    return out


@public(torch=_torch_forms)
def swiglu(gate: Any, up: Any = None, *, swapped: bool = False, out: Any = None, context: Optional[Context] = None) -> Any:
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)).

    Without `up` gate holds both, [.., 2n], and the result is [.., n]: the gate is the first half, or with `swapped` the
    second. Then `out` may be exactly one of the halves.
    """
    if up is not None:
        if swapped:
            raise ValueError("swapped is True, which says where the gate is in one array [.., 2n], but up is given")
        out = _like(gate, out)
        _core.swiglu(context or default_context(), view(gate), view(up), output(out))
        return out
    both = view(gate)
    if out is None:
        if not both.shape or both.shape[-1] % 2:
            raise ValueError(f"gate must be [.., 2n] where up is not given, but its shape is {list(both.shape)}")
        out = empty(gate, (*both.shape[:-1], both.shape[-1] // 2), both.dtype)
    _core.swiglu_halves(context or default_context(), both, output(out), swapped)
    return out


@public
def swiglu_backward(grad_out: Any, gate: Any, up: Any = None, *, swapped: bool = False,
                    context: Optional[Context] = None) -> Any:
    """(grad_gate, grad_up); without `up`, as swiglu was called, the one gradient of gate [.., 2n]."""
    if up is None:
        grad_both = _like(gate)
        _core.swiglu_halves_backward(context or default_context(), view(grad_out), view(gate), view(grad_both), swapped)
        return grad_both
    if swapped:
        raise ValueError("swapped is True, which says where the gate is in one array [.., 2n], but up is given")
    grad_gate, grad_up = _like(gate), _like(up)
    _core.swiglu_backward(context or default_context(), view(grad_out), view(gate), view(up), view(grad_gate),
                          view(grad_up))
    return grad_gate, grad_up


@public(torch=_torch_forms)
def add(a: Any, b: Any, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """a + b, of one shape and dtype."""
    out = _like(a, out)
    _core.add(context or default_context(), view(a), view(b), output(out))
    return out

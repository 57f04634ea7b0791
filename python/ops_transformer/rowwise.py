"""What works a row at a time: norms, softmax, rotary positions, the gate of a feed-forward block; and their gradients.

Arrays [.., features] in float32, bfloat16 or float16, with any strides; arithmetic in float32. `out` may be given, and may
be an input itself (in place).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

from . import _core
from ._arrays import default_context, empty, int64, optional_view, view
from ._core import Context

__all__ = ["add", "add_rms_norm", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward", "rope", "rope_cached",
           "rope_table", "RopeSections", "softmax", "softmax_backward", "swiglu", "swiglu_backward"]


def _like(x: Any, out: Any = None) -> Any:
    if out is not None:
        return out
    tensor = view(x)
    return empty(x, tensor.shape, tensor.dtype)


def rms_norm(x: Any, weight: Any, eps: float = 1e-5, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight."""
    out = _like(x, out)
    _core.rms_norm(context or default_context(), view(x), view(weight), view(out), eps)
    return out


def add_rms_norm(a: Any, b: Any, weight: Any, eps: float = 1e-5, *, context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(rms_norm(a + b), a + b)."""
    out, total = _like(a), _like(a)
    _core.add_rms_norm(context or default_context(), view(a), view(b), view(weight), view(out), view(total), eps)
    return out, total


def rms_norm_backward(grad_out: Any, x: Any, weight: Any, eps: float = 1e-5, *,
                      context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(grad_x, grad_weight)."""
    grad_x, grad_weight = _like(x), _like(weight)
    _core.rms_norm_backward(context or default_context(), view(grad_out), view(x), view(weight), view(grad_x),
                            view(grad_weight), eps)
    return grad_x, grad_weight


def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, out: Any = None,
               context: Optional[Context] = None) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""
    out = _like(x, out)
    _core.layer_norm(context or default_context(), view(x), optional_view(weight), optional_view(bias), view(out), eps)
    return out


def layer_norm_backward(grad_out: Any, x: Any, weight: Any, eps: float = 1e-5, *,
                        context: Optional[Context] = None) -> Tuple[Any, Any, Any]:
    """(grad_x, grad_weight, grad_bias)."""
    grad_x, grad_weight, grad_bias = _like(x), _like(weight), _like(weight)
    _core.layer_norm_backward(context or default_context(), view(grad_out), view(x), view(weight), view(grad_x),
                              view(grad_weight), view(grad_bias), eps)
    return grad_x, grad_weight, grad_bias


def softmax(x: Any, scale: float = 1.0, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """Softmax of scale * x over the last dimension; a row of -inf gives zeros."""
    out = _like(x, out)
    _core.softmax(context or default_context(), view(x), view(out), scale)
    return out


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


def rope_table(positions: Any, half: int, theta: float = 10000.0, *, sections: Optional[RopeSections] = None,
               context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(cos, sin) float32 [tokens, half] of positions * theta^(-i / half); positions int64 [tokens], with sections
    [3, tokens]. Computed in float64."""
    tokens = int64(positions)
    shape = (tokens.shape[-1], half)
    cos, sin = empty(positions, shape, "f32"), empty(positions, shape, "f32")
    _core.rope_table(context or default_context(), tokens, view(cos), view(sin), theta, sections)
    return cos, sin


def rope(x: Any, cos: Any, sin: Any, *, style: str = "halves", inverse: bool = False, out: Any = None,
         context: Optional[Context] = None) -> Any:
    """Turns pairs of elements of x [tokens, num_heads, head_dim]: i and i + half ("halves") or 2i and 2i + 1 ("pairs").

    cos and sin float32 [tokens, half], 2 * half <= head_dim; elements behind are copied. inverse turns back, and turns the
    gradient of the result into that of x.
    """
    out = _like(x, out)
    _core.rope(context or default_context(), view(x), view(cos), view(sin), view(out), style, inverse)
    return out


def rope_cached(x: Any, positions: Any, cos_cache: Any, sin_cache: Any, *, style: str = "halves", inverse: bool = False,
                sections: Optional[RopeSections] = None, out: Any = None, context: Optional[Context] = None) -> Any:
    """rope with the angles of all positions in a cache [max_positions, half], float32 or of the dtype of x.

    positions int64 [tokens], with sections [3, tokens]; ValueError for one that the cache does not have.
    """
    out = _like(x, out)
    _core.rope_cached(context or default_context(), view(x), int64(positions), view(cos_cache), view(sin_cache), view(out),
                      style, inverse, sections)
    return out


def swiglu(gate: Any, up: Any, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """silu(gate) * up."""
    out = _like(gate, out)
    _core.swiglu(context or default_context(), view(gate), view(up), view(out))
    return out


def swiglu_backward(grad_out: Any, gate: Any, up: Any, *, context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(grad_gate, grad_up)."""
    grad_gate, grad_up = _like(gate), _like(up)
    _core.swiglu_backward(context or default_context(), view(grad_out), view(gate), view(up), view(grad_gate),
                          view(grad_up))
    return grad_gate, grad_up


def add(a: Any, b: Any, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """a + b, of one shape and dtype."""
    out = _like(a, out)
    _core.add(context or default_context(), view(a), view(b), view(out))
    return out

"""Attention as an operator of torch: what the dispatcher, autograd, vmap and the compiler know of it."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ._context import default_context
from ._core import AttentionCall
from ._torch_door import is_plain, records
from ._torch_operator import map_one_by_one, no_second_derivative, statistics_dtype, view, view_of_input

# query [batch, num_heads, query_len, head_dim], key, value [batch, num_kv_heads, kv_len, ..]; mask broadcasts to
# [batch, num_heads, query_len, kv_len]. seed: int64 [1], with dropout_p > 0. causal: 0 no, 1 from the top left, 2 from the
# bottom right. follow: the result is laid out in memory as query is, else row after row.
CAUSAL_NO, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 0, 1, 2
_ALIGNMENT = {CAUSAL_TOP_LEFT: "top_left", CAUSAL_BOTTOM_RIGHT: "bottom_right"}

_library = torch.library.Library("ops_transformer", "DEF")
_library.define(
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, float dropout_p, int causal, "
    "float? scale, bool follow) -> (Tensor, Tensor)"
)
_library.define(
    "sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor out, "
    "Tensor softmax_lse, float dropout_p, int causal, float? scale, bool follow, bool[4] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def attention_call(query, key, value, mask, seed, dropout_p, causal, scale) -> AttentionCall:
    call = AttentionCall(view_of_input(query), view_of_input(key), view_of_input(value))
    if scale is not None:
        call.softmax_scale = scale
    if causal:
        call.causal, call.alignment = True, _ALIGNMENT[causal]
    if mask is not None:
        if mask.dtype == torch.bool:
            call.mask = view_of_input(mask)
        else:
            call.bias = view_of_input(mask)
    if dropout_p > 0:
        call.keep_prob, call.seed = 1 - dropout_p, int(seed) & (2**64 - 1)
    return call


def new_out(query: Tensor, value: Tensor, follow: bool) -> Tensor:
    """[batch, num_heads, query_len, value_head_dim]"""
    if follow:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:3], value.shape[-1]))


def _statistics(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=statistics_dtype(query))


def _forward(query, key, value, mask, seed, dropout_p, causal, scale, follow, lse=None):
    if dropout_p >= 1:
        return query.new_zeros((*query.shape[:3], value.shape[-1]))
    out = new_out(query, value, follow)
    call = attention_call(query, key, value, mask, seed, dropout_p, causal, scale)
    call.forward(default_context(), view(out), None if lse is None else view(lse))
    return out


def _sdpa(query, key, value, mask, seed, dropout_p, causal, scale, follow):
    lse = _statistics(query)
    if dropout_p >= 1:
        lse.zero_()
    return _forward(query, key, value, mask, seed, dropout_p, causal, scale, follow, lse), lse


def _token_major(tensor: Tensor) -> Tensor:
    """As torch has these gradients: the heads of a token beside each other."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty_strided(tensor.shape, (length * heads * dim, dim, heads * dim, 1))


def _new_gradients(query, key, value, mask, follow, wanted):
    def like(tensor, want):
        if not want:
            return tensor.new_empty(0)
        return _token_major(tensor) if follow else tensor.new_empty(tensor.shape)

    grad_mask = query.new_empty(0)
    if wanted[3]:
        grad_mask = query.new_empty(mask.shape, dtype=statistics_dtype(query))
    return like(query, wanted[0]), like(key, wanted[1]), like(value, wanted[2]), grad_mask


def _sdpa_backward(grad_out, query, key, value, mask, seed, out, lse, dropout_p, causal, scale, follow, wanted):
    gradients = _new_gradients(query, key, value, mask, follow, wanted)
    if dropout_p >= 1:
        return tuple(gradient.zero_() for gradient in gradients)
    call = attention_call(query, key, value, mask, seed, dropout_p, causal, scale)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    call.backward(default_context(), view(out), view_of_input(grad_out), view(lse), grad_query=views[0], grad_key=views[1],
                  grad_value=views[2], grad_bias=views[3])
    return gradients


_library.impl("sdpa", _sdpa, "CPU")
_library.impl("sdpa_backward", _sdpa_backward, "CPU")


@torch.library.register_fake("ops_transformer::sdpa", lib=_library)
def _(query, key, value, mask, seed, dropout_p, causal, scale, follow):
    return new_out(query, value, follow), _statistics(query)


@torch.library.register_fake("ops_transformer::sdpa_backward", lib=_library)
def _(grad_out, query, key, value, mask, seed, out, lse, dropout_p, causal, scale, follow, wanted):
    return _new_gradients(query, key, value, mask, follow, wanted)


map_one_by_one(_library, "sdpa", "sdpa_backward")

# ---- gradients -------------------------------------------------------------------------------------------------------


def _save(ctx, inputs, output):
    query, key, value, mask, seed, *options = inputs
    ctx.save_for_backward(query, key, value, mask, seed, *output)
    ctx.options = options
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _):
    if grad_out is None:
        return (None,) * 9
    query, key, value, mask, seed, out, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3]) + [ctx.needs_input_grad[3] and mask.dtype != torch.bool]
    arguments = grad_out, query, key, value, mask, seed, out, lse, *ctx.options, wanted
    direct = not torch.is_grad_enabled() and is_plain(*arguments[:6])
    gradients = _sdpa_backward(*arguments) if direct else torch.ops.ops_transformer.sdpa_backward(*arguments)
    gradients = [gradient if want else None for gradient, want in zip(gradients, wanted)]
    if wanted[3]:
        gradients[3] = gradients[3].to(mask.dtype)
    return (*gradients, None, None, None, None, None)


torch.library.register_autograd("ops_transformer::sdpa", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("ops_transformer::sdpa_backward", no_second_derivative, lib=_library)
_operator = torch.ops.ops_transformer.sdpa.default


class _Differentiable(torch.autograd.Function):
    """The operator with its gradients, without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _sdpa(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], seed: Optional[Tensor], dropout_p: float,
           causal: int, scale: Optional[float], follow: bool, direct: bool) -> Tensor:
    """Attention of tensors that are in order. direct: nobody needs the dispatcher (_torch_door.is_plain), which costs as much
    as a short call itself."""
    arguments = query, key, value, mask, seed, dropout_p, causal, scale, follow
    if not direct:
        return _operator(*arguments)[0]
    if records(query, key, value, mask):
        return _Differentiable.apply(*arguments)[0]
    return _forward(*arguments)

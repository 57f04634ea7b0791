"""torch's scaled_dot_product_attention on the CPU, forward and backward in O(N) memory.

    import ops_transformer.torch as ot

    out = ot.scaled_dot_product_attention(q, k, v, is_causal=True)   # the same signature and semantics

    with ot.sdpa():                        # torch.nn.functional.scaled_dot_product_attention goes through us
        model(tokens)
    ot.enable_sdpa()                       # from here on; ot.disable_sdpa() takes it back

    print(ot.explain(q, k, v, is_causal=True))

A call that is not covered (see explain) goes to torch with one warning for each reason. Calls whose tensors are on another
device go to torch as they are.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._arrays import default_context
from ._core import AttentionCall, View, attend_plain

__all__ = ["Explanation", "FlashAttention", "FlashCrossAttention", "disable_sdpa", "enable_sdpa", "explain",
           "scaled_dot_product_attention", "sdpa"]

# torch's own, whatever F.scaled_dot_product_attention is now.
_torch_sdpa = torch._C._nn.scaled_dot_product_attention
_to_dlpack = torch.utils.dlpack.to_dlpack
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_MAX_HEAD_DIM = 768

# ---- the operators ---------------------------------------------------------------------------------------------------
# query [batch, num_heads, query_len, head_dim], key, value [batch, num_kv_heads, kv_len, ..]; mask broadcasts to
# [batch, num_heads, query_len, kv_len]. seed: int64 [1], with dropout_p > 0.

_library = torch.library.Library("ops_transformer", "DEF")
_library.define(
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, float dropout_p, bool is_causal, "
    "float? scale) -> (Tensor, Tensor)"
)
_library.define(
    "sdpa_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor out, "
    "Tensor softmax_lse, float dropout_p, bool is_causal, float? scale, bool[4] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def _view(tensor: Tensor) -> View:
    return View(_to_dlpack(tensor))


def _call(query, key, value, mask, seed, dropout_p, is_causal, scale) -> AttentionCall:
    call = AttentionCall(_view(query), _view(key), _view(value))
    if scale is not None:
        call.softmax_scale = scale
    if is_causal:
        call.causal, call.alignment = True, "top_left"
    if mask is not None:
        if mask.dtype == torch.bool:
            call.mask = _view(mask)
        else:
            call.bias = _view(mask)
    if dropout_p > 0:
        call.keep_prob, call.seed = 1 - dropout_p, int(seed) & (2**64 - 1)
    return call


def _new_out(query: Tensor, value: Tensor) -> Tensor:
    """[batch, num_heads, query_len, value_head_dim] with the heads of a token beside each other, as torch's has it."""
    batch, heads, length, _ = query.shape
    dim = value.shape[-1]
    return query.new_empty_strided((batch, heads, length, dim), (length * heads * dim, dim, heads * dim, 1))


def _statistics(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


def _forward(query, key, value, mask, seed, dropout_p, is_causal, scale, lse=None):
    out = _new_out(query, value)
    if dropout_p >= 1:
        return out.zero_()
    call = _call(query, key, value, mask, seed, dropout_p, is_causal, scale)
    call.forward(default_context(), _view(out), None if lse is None else _view(lse))
    return out


def _sdpa(query, key, value, mask, seed, dropout_p, is_causal, scale):
    lse = _statistics(query)
    if dropout_p >= 1:
        lse.zero_()
    return _forward(query, key, value, mask, seed, dropout_p, is_causal, scale, lse), lse


def _new_gradients(query, key, value, mask, wanted):
    def like(tensor, want):
        return torch.empty_like(tensor) if want else tensor.new_empty(0)

    grad_mask = query.new_empty(0)
    if wanted[3]:
        grad_mask = torch.empty(mask.shape, dtype=_statistics_dtype(query))
    return like(query, wanted[0]), like(key, wanted[1]), like(value, wanted[2]), grad_mask


def _statistics_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _sdpa_backward(grad_out, query, key, value, mask, seed, out, lse, dropout_p, is_causal, scale, wanted):
    gradients = _new_gradients(query, key, value, mask, wanted)
    if dropout_p >= 1:
        return tuple(gradient.zero_() for gradient in gradients)
    call = _call(query, key, value, mask, seed, dropout_p, is_causal, scale)
    views = [_view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    call.backward(default_context(), _view(out), _view(grad_out), _view(lse), grad_query=views[0], grad_key=views[1],
                  grad_value=views[2], grad_bias=views[3])
    return gradients


_library.impl("sdpa", _sdpa, "CPU")
_library.impl("sdpa_backward", _sdpa_backward, "CPU")


@torch.library.register_fake("ops_transformer::sdpa", lib=_library)
def _(query, key, value, mask, seed, dropout_p, is_causal, scale):
    return _new_out(query, value), _statistics(query)


@torch.library.register_fake("ops_transformer::sdpa_backward", lib=_library)
def _(grad_out, query, key, value, mask, seed, out, lse, dropout_p, is_causal, scale, wanted):
    return _new_gradients(query, key, value, mask, wanted)


def _save(ctx, inputs, output):
    query, key, value, mask, seed, dropout_p, is_causal, scale = inputs
    ctx.save_for_backward(query, key, value, mask, seed, *output)
    ctx.options = dropout_p, is_causal, scale
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _):
    if grad_out is None:
        return (None,) * 8
    query, key, value, mask, seed, out, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3]) + [ctx.needs_input_grad[3] and mask.dtype != torch.bool]
    arguments = grad_out, query, key, value, mask, seed, out, lse, *ctx.options, wanted
    direct = _is_eager(*arguments[:6]) and not torch.is_grad_enabled()
    gradients = _sdpa_backward(*arguments) if direct else torch.ops.ops_transformer.sdpa_backward(*arguments)
    gradients = [gradient if want else None for gradient, want in zip(gradients, wanted)]
    if wanted[3]:
        gradients[3] = gradients[3].to(mask.dtype)
    return (*gradients, None, None, None, None)


torch.library.register_autograd("ops_transformer::sdpa", _backward, setup_context=_save, lib=_library)


def _second_derivative(ctx, *_):
    raise NotImplementedError("ops_transformer: second derivatives of attention are not implemented; torch's math path has them")


torch.library.register_autograd("ops_transformer::sdpa_backward", _second_derivative, lib=_library)
_operator = torch.ops.ops_transformer.sdpa.default


class _Differentiable(torch.autograd.Function):
    """The operator with its gradients, without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _sdpa(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


# ---- torch's function ------------------------------------------------------------------------------------------------


def _reason_for_torch(query, key, value, attn_mask) -> Optional[str]:
    """Why torch must take this call; None: it is ours. What torch refuses is torch's too, so that its message is seen."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return "an argument is no tensor"
        if tensor.device.type != "cpu" and tensor.device.type != "meta":
            return "not on the CPU"
        if tensor.layout != torch.strided or tensor.is_nested:
            return "a tensor is nested or sparse"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a transform of torch.func"
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    if query.dtype != key.dtype or query.dtype != value.dtype:
        return "query, key and value differ in dtype"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"a mask of dtype {attn_mask.dtype} with a query of {query.dtype}"
    if attn_mask is not None and query.dtype == torch.float64 and attn_mask.dtype == torch.float32:
        return "a mask of dtype torch.float32 with a query of torch.float64"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "fewer than two dimensions"
    if not (1 <= query.shape[-1] <= _MAX_HEAD_DIM and 1 <= value.shape[-1] <= _MAX_HEAD_DIM):
        return f"head_dim {query.shape[-1]} and value_head_dim {value.shape[-1]}: 1 to {_MAX_HEAD_DIM} are covered"
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "sizes that disagree"
    return None


# Not the user's choice or not a matter of speed: torch takes these calls without a word.
_SILENT = {"not on the CPU", "an argument is no tensor", "query, key and value differ in dtype", "sizes that disagree",
           "fewer than two dimensions"}
_warned = set()


def _warn_once(reason: str) -> None:
    if reason in _SILENT or reason in _warned or torch.compiler.is_compiling():
        return
    _warned.add(reason)
    warnings.warn(f"ops_transformer: this call of scaled_dot_product_attention goes to torch: {reason}", stacklevel=3)


def _autocast(tensors: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """What torch's autocast does to the arguments of scaled_dot_product_attention."""
    dtype = torch.get_autocast_dtype("cpu")

    def cast(tensor):
        eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return tuple(cast(tensor) for tensor in tensors)


def _heads(lead_q, lead_k, lead_v, enable_gqa: bool):
    """The leading dimensions that query, key and value are expanded to, or None where they do not fit together."""
    if lead_q == lead_k == lead_v and not (enable_gqa and 0 in lead_q):
        return lead_q, lead_k, lead_v
    if enable_gqa:
        if min(len(lead_q), len(lead_k), len(lead_v)) < 1:
            return None
        hq, hk, hv = lead_q[-1], lead_k[-1], lead_v[-1]
        if hk != hv or hk == 0 or hq % hk:
            return None
        try:
            batch = torch.broadcast_shapes(lead_q[:-1], lead_k[:-1], lead_v[:-1])
        except RuntimeError:
            return None
        return (*batch, hq), (*batch, hk), (*batch, hk)
    try:
        lead = torch.broadcast_shapes(lead_q, lead_k, lead_v)
    except RuntimeError:
        return None
    kv = lead
    # One KV head for all query heads needs no copies of it.
    if lead and len(lead_k) and len(lead_v) and lead_k[-1] == 1 and lead_v[-1] == 1:
        kv = (*lead[:-1], 1)
    return lead, kv, kv


def _four(tensor: Tensor, lead: Tuple[int, ...]) -> Tensor:
    """[batch, heads, .., ..]"""
    if tensor.shape[:-2] != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 2:
        return tensor
    if len(lead) < 2:
        return tensor.reshape((1,) * (2 - len(lead)) + tuple(tensor.shape))
    return tensor.flatten(0, len(lead) - 2)


def _is_watched() -> bool:
    """Whether somebody needs to see each operator: a compiler, a tracer or a mode."""
    return bool(torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
                or torch._C._len_torch_dispatch_stack())


def _is_eager(*tensors: Optional[Tensor]) -> bool:
    """Whether nobody needs to see the operator: no compiler, no mode, no transform. Then the dispatcher is left out, which
    costs as much as a short call itself."""
    if _is_watched():
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor or tensor.is_meta:
            return False
        # The dispatcher makes memory of views that are not what their bytes say.
        if tensor.is_neg() or tensor._is_zerotensor():
            return False
    return True


def _attention(query, key, value, mask, seed, dropout_p, is_causal, scale, eager: bool) -> Tensor:
    """What is left once the arguments are in order."""
    arguments = query, key, value, mask, seed, dropout_p, is_causal, scale
    if not eager:
        return _operator(*arguments)[0]
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad
                                    or (mask is not None and mask.requires_grad)):
        return _Differentiable.apply(*arguments)[0]
    return _forward(*arguments)


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, is_causal, scale, enable_gqa) -> Optional[Tensor]:
    """A call of everyday, without mask, dropout and gradients, in the fewest steps: a short one takes no longer than the
    questions of the general way. None where one of them has to be asked."""
    if (type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor
            or _is_watched() or torch._C._functorch.peek_interpreter_stack() is not None
            or torch.is_autocast_enabled("cpu") or query.is_neg() or key.is_neg() or value.is_neg()
            or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))):
        return None
    if query.dim() != 4 or value.dim() != 4 or not query.is_cpu:
        return None
    out = _new_out(query, value)
    try:
        attended = attend_plain(default_context(), _to_dlpack(query), _to_dlpack(key), _to_dlpack(value), _to_dlpack(out),
                                is_causal, scale, enable_gqa)
    except (BufferError, RuntimeError, TypeError, ValueError):  # no tensors of the host's memory, or another dtype
        return None
    return out if attended else None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: the same arguments, the same result.

    Rows that see no key give 0. A masked key (bool mask, is_causal) never reaches the result, whatever it holds. Dropout
    takes one number from torch's generator, so torch.manual_seed repeats it, but drops other weights than torch does.
    """
    if attn_mask is None and dropout_p == 0:
        out = _attend_plain(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        query, key, value, attn_mask = _autocast((query, key, value, attn_mask))
    reason = _reason_for_torch(query, key, value, attn_mask)
    lead = None
    if reason is None:
        if attn_mask is not None and is_causal:
            raise RuntimeError("scaled_dot_product_attention: attn_mask is given and is_causal is True; only one may be")
        if not 0 <= dropout_p <= 1:
            raise RuntimeError(f"scaled_dot_product_attention: dropout_p is {dropout_p}, must be from 0 to 1")
        lead = _heads(query.shape[:-2], key.shape[:-2], value.shape[:-2], enable_gqa)
        if lead is None:
            shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
            raise RuntimeError(
                f"scaled_dot_product_attention: query, key, value {shapes} do not fit together"
                + ("" if enable_gqa else " (enable_gqa is False)")
            )
        if attn_mask is not None and len(lead[0]) != 2 and attn_mask.dim() > 2:
            attn_mask = _four(attn_mask.expand(*lead[0], *attn_mask.shape[-2:]), lead[0])
    if reason is not None:
        _warn_once(reason)
        return _torch_sdpa(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                           scale=scale, enable_gqa=enable_gqa)

    q, k, v = (_four(tensor, dims) for tensor, dims in zip((query, key, value), lead))
    seed = torch.randint(-(2**63), 2**63 - 1, (1,)) if 0 < dropout_p < 1 else None
    out = _attention(q, k, v, attn_mask, seed, float(dropout_p), bool(is_causal), scale, _is_eager(q, k, v, attn_mask))
    if len(lead[0]) == 2:
        return out
    return out.reshape(*lead[0], *out.shape[-2:])


# ---- the switch ------------------------------------------------------------------------------------------------------

_switch = threading.Lock()
_depth = 0


def enable_sdpa() -> None:
    """From here on torch.nn.functional.scaled_dot_product_attention is ours, for all threads.

    Names that a module has imported before (`from torch.nn.functional import ...`) stay torch's.
    """
    global _depth
    with _switch:
        _depth += 1
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def disable_sdpa() -> None:
    """Takes one enable_sdpa back."""
    global _depth
    with _switch:
        _depth = max(_depth - 1, 0)
        if _depth == 0:
            torch.nn.functional.scaled_dot_product_attention = _torch_sdpa


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """enable_sdpa for the block."""
    enable_sdpa()
    try:
        yield
    finally:
        disable_sdpa()


# ---- which path ------------------------------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """Which path a call takes."""

    path: str  # "ops_transformer" or "torch"
    reason: str
    plan: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" + (f"\n{self.plan}" if self.plan else "")


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Which path scaled_dot_product_attention takes with these arguments, why, and by which plan. Nothing is computed."""
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        query, key, value, attn_mask = _autocast((query, key, value, attn_mask))
    reason = _reason_for_torch(query, key, value, attn_mask)
    if reason is not None:
        return Explanation("torch", reason)
    if attn_mask is not None and is_causal:
        return Explanation("refused", "attn_mask is given and is_causal is True")
    lead = _heads(query.shape[:-2], key.shape[:-2], value.shape[:-2], enable_gqa)
    if lead is None:
        return Explanation("refused", "query, key and value do not fit together")
    if dropout_p >= 1:
        return Explanation("ops_transformer", "every weight is dropped: the result is 0")
    q, k, v = (_four(tensor.detach(), dims) for tensor, dims in zip((query, key, value), lead))
    call = _call(q, k, v, None, 0, dropout_p, is_causal, scale)
    if attn_mask is not None:
        setattr(call, "mask" if attn_mask.dtype == torch.bool else "bias", _view(attn_mask.detach()))
    return Explanation("ops_transformer", "covered: CPU, " + str(query.dtype).replace("torch.", ""),
                       call.plan(default_context()))


# ---- modules ---------------------------------------------------------------------------------------------------------


class FlashAttention(torch.nn.Module):
    """Self-attention of a language model: x [batch, length, dim] -> [batch, length, dim].

    num_kv_heads: fewer heads of keys and values, each for num_heads / num_kv_heads of the query's. dropout applies to the
    weights while training. Whether the whole score matrix is cheaper (short x) is the plan's choice, see explain.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: Optional[int] = None, *, causal: bool = True,
                 bias: bool = False, dropout: float = 0.0):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"dim = {dim}, num_heads = {num_heads}, num_kv_heads = {num_kv_heads} do not divide")
        self.num_heads, self.num_kv_heads, self.causal, self.dropout = num_heads, num_kv_heads, causal, dropout
        kv_dim = dim // num_heads * num_kv_heads
        self.query = torch.nn.Linear(dim, dim, bias)
        self.key = torch.nn.Linear(dim, kv_dim, bias)
        self.value = torch.nn.Linear(dim, kv_dim, bias)
        self.out = torch.nn.Linear(dim, dim, bias)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        """attn_mask as in scaled_dot_product_attention; takes the place of the causal mask."""
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask, self.dropout if self.training else 0.0, self.causal and attn_mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads)
        return self.out(out.transpose(1, 2).flatten(-2))


class FlashCrossAttention(torch.nn.Module):
    """Cross-attention of a diffusion model: x [batch, length, query_dim] and context [batch, context_len, context_dim]
    -> [batch, length, query_dim]. Without a context x attends to itself, which needs context_dim = query_dim.
    """

    def __init__(self, query_dim: int, context_dim: int, num_heads: int, head_dim: Optional[int] = None, *,
                 bias: bool = False, dropout: float = 0.0):
        super().__init__()
        if head_dim is None:
            if query_dim % num_heads:
                raise ValueError(f"query_dim = {query_dim} is not num_heads = {num_heads} heads of one size")
            head_dim = query_dim // num_heads
        self.num_heads, self.dropout = num_heads, dropout
        self.query = torch.nn.Linear(query_dim, num_heads * head_dim, bias)
        self.key = torch.nn.Linear(context_dim, num_heads * head_dim, bias)
        self.value = torch.nn.Linear(context_dim, num_heads * head_dim, bias)
        self.out = torch.nn.Linear(num_heads * head_dim, query_dim)

    def forward(self, x: Tensor, context: Optional[Tensor] = None, attn_mask: Optional[Tensor] = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in ((self.query, x), (self.key, context), (self.value, context))
        )
        out = scaled_dot_product_attention(q, k, v, attn_mask, self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(-2))

"""torch's scaled_dot_product_attention: who takes a call, and the call."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import _torch_door as door
from . import _torch_sdpa_operator as operator
from ._context import default_context
from ._core import attend_plain
from ._torch_operator import to_dlpack
from ._torch_switch import torch_sdpa

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_MAX_HEAD_DIM = 768
_NAME = "scaled_dot_product_attention"

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_flash_allowed = torch._C._get_flash_sdp_enabled
_math_allowed = torch._C._get_math_sdp_enabled
_is_grad_enabled = torch.is_grad_enabled


class Decision(NamedTuple):
    """Who takes a call."""

    path: str  # "ops_transformer", "torch" or "torch's math"
    reason: str
    silent: bool = False  # not the user's choice or not a matter of speed: torch takes the call without a word
    tensors: Tuple = ()  # query, key, value, mask as torch or the operator takes them
    lead: Tuple[int, ...] = ()  # the result's dimensions before the last two
    causal: int = operator.CAUSAL_NO
    follow: bool = False
    direct: bool = False  # the operator may be called without the dispatcher


# ---- sizes -----------------------------------------------------------------------------------------------------------


def _lead(lead_q: torch.Size, lead_k: torch.Size, lead_v: torch.Size, enable_gqa: bool):
    """The leading dimensions that query, key and value are expanded to; None where they do not fit together."""
    if lead_q == lead_k == lead_v and not (enable_gqa and 0 in lead_q):
        return lead_q, lead_k, lead_v
    if enable_gqa:
        if min(len(lead_q), len(lead_k), len(lead_v)) < 1:
            return None
        hq, hk, hv = lead_q[-1], lead_k[-1], lead_v[-1]
        if hk == 0 or hv == 0 or hq % hk or hq % hv:
            return None
        try:
            batch = torch.broadcast_shapes(lead_q[:-1], lead_k[:-1], lead_v[:-1])
        except RuntimeError:
            return None
        return (*batch, hq), (*batch, hk), (*batch, hv)
    try:
        lead = torch.broadcast_shapes(lead_q, lead_k, lead_v)
    except RuntimeError:
        return None
    kv = lead
    # One KV head for all query heads needs no copies of it.
    if lead and len(lead_k) and len(lead_v) and lead_k[-1] == 1 and lead_v[-1] == 1:
        kv = (*lead[:-1], 1)
    return lead, kv, kv


def _misfit(shapes: Tuple[torch.Size, ...], what: str) -> RuntimeError:
    return RuntimeError(f"{_NAME}: {what}query, key, value {', '.join(str(list(shape)) for shape in shapes)} do not fit together")


def _check_sizes(shapes: Tuple[torch.Size, ...], mask: Optional[Tensor], enable_gqa: bool):
    """The leading dimensions; RuntimeError where sizes disagree, whoever is to compute: torch reads past the end of some."""
    query, key, value = shapes
    if query[-1] != key[-1]:
        raise _misfit(shapes, f"key dim -1 (head_dim) is {key[-1]}, but query has {query[-1]}: ")
    if key[-2] != value[-2]:
        raise _misfit(shapes, f"value dim -2 (kv_len) is {value[-2]}, but key has {key[-2]}: ")
    lead = _lead(query[:-2], key[:-2], value[:-2], enable_gqa)
    if lead is None:
        raise _misfit(shapes, "" if enable_gqa else "enable_gqa is False: ")
    if mask is not None:
        scores, given = (*lead[0], query[-2], key[-2]), mask.shape
        fits = len(given) <= len(scores)
        for size, wanted in zip(reversed(given), reversed(scores)):
            fits = fits and (size == 1 or size == wanted)
        if not fits:
            raise RuntimeError(f"{_NAME}: attn_mask {list(given)} does not broadcast to the scores {list(scores)}")
    return lead


# ---- who takes the call ----------------------------------------------------------------------------------------------


def _autocast(tensors: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """What torch's autocast does to the arguments of scaled_dot_product_attention."""
    dtype = torch.get_autocast_dtype("cpu")

    def cast(tensor):
        eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return tuple(cast(tensor) for tensor in tensors)


def _without_bias(query: Tensor, key: Tensor, bias: CausalBias, is_causal: bool):
    """(mask, causal) in the place of torch.nn.attention.bias: as torch reads it, but no mask is made where a rule does."""
    if is_causal:
        raise ValueError("CausalBias should not be used with causal=True")
    if bias.variant == CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return None, operator.CAUSAL_TOP_LEFT
    if query.dim() >= 2 and key.dim() >= 2 and (query.shape[-2], key.shape[-2]) == (bias.seq_len_q, bias.seq_len_kv):
        return None, operator.CAUSAL_BOTTOM_RIGHT
    return bias._materialize(query.device), operator.CAUSAL_NO


def _reason_of_tensor(tensor: Tensor, first: Tensor) -> Optional[Tuple[str, bool]]:
    """Why torch has to be asked before the tensor's sizes are: (reason, whether it is silent)."""
    device = tensor.device.type
    if device != "cpu" and device != "meta" or device != first.device.type:
        return "not on the CPU", True
    if tensor.layout != torch.strided or tensor.is_nested:
        return "a tensor is nested or sparse", False
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or door.is_compiling() or isinstance(tensor, door.TRACED):
        return None
    return f"a tensor is a {kind.__name__}", False


def _is_real(number) -> bool:
    return type(number) is float or isinstance(number, numbers.Real)


def _reason_of_callers(tensors, plain, dropout_p, is_causal, scale, enable_gqa) -> Optional[Tuple[str, bool]]:
    """Why torch has to be asked before sizes are, of the whole call: (reason, whether it is silent)."""
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool) and _is_real(dropout_p)
            and (scale is None or _is_real(scale))):
        return "an option of another type", True
    if not door.is_compiling() and door.overridden(*tensors):
        return "__torch_function__ of a tensor subclass or a mode takes the call", True
    if not plain:
        for tensor in tensors:
            reason = _reason_of_tensor(tensor, tensors[0])
            if reason is not None:
                return reason
    dtype = tensors[0].dtype
    if tensors[1].dtype != dtype or tensors[2].dtype != dtype:
        return "query, key and value differ in dtype", True
    return None


def _reason_of_state() -> Optional[Tuple[str, bool]]:
    """Why torch must take any call now: (reason, whether it is silent)."""
    if door.is_compiling():
        return None
    if door.in_transform():
        return "inside a transform of torch.func", False
    if not (_flash_allowed() and _math_allowed()):
        return "torch.nn.attention.sdpa_kernel or torch.backends.cuda names torch's own kernels", False
    return None


def _reason_of_kinds(dtype, head_dim, value_head_dim, mask) -> Optional[str]:
    """Why these kernels do not do it."""
    if dtype not in _DTYPES:
        return f"dtype {dtype}"
    if mask is not None:
        mask_dtype = mask.dtype
        if mask_dtype not in (torch.bool, dtype, torch.float32) or dtype == torch.float64 and mask_dtype == torch.float32:
            return f"a mask of dtype {mask_dtype} with a query of {dtype}"
    if not (1 <= head_dim <= _MAX_HEAD_DIM and 1 <= value_head_dim <= _MAX_HEAD_DIM):
        return f"head_dim {head_dim} and value_head_dim {value_head_dim}: 1 to {_MAX_HEAD_DIM} are covered"
    return None


def _between_elements(*tensors: Optional[Tensor]) -> Optional[str]:
    """The name of an argument that these kernels cannot read where it lies."""
    for name, tensor in zip(("query", "key", "value", "attn_mask"), tensors):
        if tensor is not None and door.between_elements(tensor):
            return name
    return None


def _follows_query(tensors, shapes, mask, dropout_p, enable_gqa) -> bool:
    """Whether torch lays its result out as query is: its flash kernel does. Its math path and other ranks: row after row."""
    (query, key, value), (shape_q, shape_k, shape_v) = tensors, shapes
    if len(shape_q) != 4 or len(shape_k) != 4 or len(shape_v) != 4 or shape_q[3] != shape_v[3] or dropout_p != 0:
        return False
    if shape_q[0] != shape_k[0] or shape_k[:2] != shape_v[:2] or not (enable_gqa or shape_q[1] == shape_k[1]):
        return False
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1 or 0 in shape_q or shape_k[2] == 0:
        return False
    return mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)


def decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Decision:
    """Who takes a call, and with which tensors. RuntimeError (ValueError, TypeError), as torch has it, where nobody may."""
    theirs = query, key, value, attn_mask
    causal = operator.CAUSAL_TOP_LEFT if is_causal is True else operator.CAUSAL_NO
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
            and (attn_mask is None or isinstance(attn_mask, Tensor))):
        return Decision("torch", "an argument is no tensor", True, theirs)
    if type(attn_mask) is CausalBias:
        attn_mask, causal = _without_bias(query, key, attn_mask, is_causal)
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    compiling = door.is_compiling()
    plain = not compiling and all(map(door.has_plain_bytes, given))
    reason = _reason_of_callers(given, plain, dropout_p, is_causal, scale, enable_gqa)
    if reason is not None:
        return Decision("torch", *reason, tensors=theirs)
    shapes = query.shape, key.shape, value.shape
    if len(shapes[0]) < 2 or len(shapes[1]) < 2 or len(shapes[2]) < 2:
        return Decision("torch", "fewer than two dimensions", True, theirs)
    if not compiling and door.in_jit_trace():
        with door.untraced():
            _check_sizes((query.shape, key.shape, value.shape), attn_mask, enable_gqa)
        return Decision("torch", "torch.jit traces it, and the graph is to hold torch's operators alone", True, theirs)
    if _is_any_autocast_enabled() and torch.is_autocast_enabled("cpu") and query.device.type == "cpu":
        query, key, value, attn_mask = _autocast((query, key, value, attn_mask))
    lead = _check_sizes(shapes, attn_mask, enable_gqa)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"{_NAME}: dropout_p is {dropout_p}, must be from 0 to 1")
    state = _reason_of_state()
    if state is not None:
        return Decision("torch", *state, tensors=theirs)
    kinds = _reason_of_kinds(query.dtype, shapes[0][-1], shapes[2][-1], attn_mask)
    if kinds is not None:
        return Decision("torch", kinds, tensors=theirs)
    if not compiling and door.has_tangent(query, key, value, attn_mask):
        return Decision("torch's math", "a tensor carries a tangent of forward-mode autograd", tensors=theirs)
    if scale is not None and not compiling and not math.isfinite(scale):
        return Decision("torch's math", f"scale is {scale}", tensors=theirs)
    misplaced = None if compiling else _between_elements(query, key, value, attn_mask)
    if misplaced is not None:
        return Decision("torch", f"{misplaced} lies at an address between elements", tensors=theirs)
    follow = _follows_query((query, key, value), shapes, attn_mask, dropout_p, enable_gqa)
    if enable_gqa and lead[1][-1:] != lead[2][-1:]:  # the kernels know one number of KV heads
        heads = lead[0][-1]
        key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
        lead = lead[0], (*lead[1][:-1], heads), (*lead[2][:-1], heads)
    return Decision("ops_transformer", "covered: CPU, ", False, (query, key, value, attn_mask), lead, causal, follow,
                    plain and door.watcher() is None)


# ---- the call --------------------------------------------------------------------------------------------------------

_warned = set()


def _warn_once(reason: str) -> None:
    if reason in _warned or door.is_compiling():
        return
    _warned.add(reason)
    warnings.warn(f"ops_transformer: this call of {_NAME} goes to torch: {reason}", stacklevel=4)


def _by_torch(decision: Decision, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    if not decision.silent:
        _warn_once(decision.reason)
    query, key, value, mask = decision.tensors
    options = dict(attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if decision.path == "torch":
        return torch_sdpa(query, key, value, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return torch_sdpa(query, key, value, **options)


def _four(tensor: Tensor, lead: Tuple[int, ...]) -> Tensor:
    """[batch, heads, .., ..]"""
    if tensor.shape[:-2] != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) == 2:
        return tensor
    if len(lead) < 2:
        return tensor.reshape((1,) * (2 - len(lead)) + tuple(tensor.shape))
    return tensor.flatten(0, len(lead) - 2)


def operands(decision: Decision) -> Tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """query, key, value [batch, heads, length, ..] and the mask of a call that is ours."""
    query, key, value, mask = decision.tensors
    lead_q, lead_k, lead_v = decision.lead
    if mask is not None and len(lead_q) != 2 and mask.dim() > 2:
        mask = _four(mask.expand(*lead_q, *mask.shape[-2:]), lead_q)
    return _four(query, lead_q), _four(key, lead_k), _four(value, lead_v), mask


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, is_causal, scale, enable_gqa) -> Optional[Tensor]:
    """A call of everyday, without mask, dropout and gradients, in the fewest steps: a short one takes no longer than the
    questions of the general way. None where one of them has to be asked."""
    if (type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor
            or door.watcher() is not None or forward_ad._current_level >= 0 or _is_any_autocast_enabled()
            or not _flash_allowed() or not _math_allowed() or query.is_neg() or key.is_neg() or value.is_neg()
            or (_is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            or (scale is not None and not _is_real(scale))):  # the core would read a tensor's number, and cut off its gradient
        return None
    if not query.is_cpu or query.layout != torch.strided or query.dim() != 4 or value.dim() != 4:
        return None
    try:
        # Where torch does not lay its result out as query is, attend_plain refuses this `out`.
        out = operator.new_out(query, value, query.size(3) == value.size(3))
        attended = attend_plain(default_context(), to_dlpack(query), to_dlpack(key), to_dlpack(value), to_dlpack(out), is_causal,
                                scale, enable_gqa)
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

    Rows that see no key give 0. A masked key (bool mask, is_causal) never reaches the result, whatever it holds. A mask and
    is_causal together: both apply. Dropout takes one number from torch's generator, so torch.manual_seed repeats it, but
    drops other weights than torch does.
    """
    if attn_mask is None and dropout_p == 0:
        out = _attend_plain(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    decision = decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if decision.path != "ops_transformer":
        return _by_torch(decision, dropout_p, is_causal, scale, enable_gqa)
    query, key, value, mask = operands(decision)
    # On the CPU whatever the default device is.
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), device="cpu") if 0 < dropout_p < 1 else None
    out = operator.attend(query, key, value, mask, seed, float(dropout_p), decision.causal,
                          None if scale is None else float(scale), decision.follow, decision.direct)
    lead = decision.lead[0]
    if len(lead) == 2:
        return out
    if out.requires_grad:  # backward needs what is in this memory: as a view it shares the counter of changes
        return out.reshape(*lead, *out.shape[-2:])
    # No view, as torch's result is none; nobody else has the tensor of four dimensions.
    return torch.ops.aten._unsafe_view.default(out, [*lead, *out.shape[-2:]])


# ---- which path ------------------------------------------------------------------------------------------------------


class Explanation(NamedTuple):
    """Which path a call takes."""

    path: str  # "ops_transformer", "torch" or "refused"
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
    """Which path scaled_dot_product_attention takes with these arguments, why, and by which plan. Nothing is computed.

    The answer is for here and now: autocast, transforms, modes and sdpa_kernel(..) take part in the decision.
    """
    try:
        decision = decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (RuntimeError, TypeError, ValueError) as error:
        return Explanation("refused", str(error))
    if decision.path != "ops_transformer":
        return Explanation("torch", decision.reason)
    covered = decision.reason + str(decision.tensors[0].dtype).replace("torch.", "")
    if dropout_p >= 1:
        return Explanation("ops_transformer", "every weight is dropped: the result is 0")
    tensors = [None if tensor is None else tensor.detach() for tensor in operands(decision)]
    if any(tensor is not None and door.why_no_bytes(tensor) is not None for tensor in tensors):
        return Explanation("ops_transformer", covered)
    query, key, value, mask = (None if tensor is None else door.bytes_of(tensor, "explain", "a tensor") for tensor in tensors)
    plan = operator.attention_call(query, key, value, mask, 0, dropout_p, decision.causal, scale).plan(default_context())
    return Explanation("ops_transformer", covered, plan)

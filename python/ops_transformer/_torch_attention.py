"""Attention of torch tensors as one operator of torch, with its gradients: every option of the core.

`ops_transformer::attention` has a kernel for the CPU, one for shapes alone (torch.compile), gradients for query, key, value
(paged: for the cache), bias, sinks and ropes apart, also through softmax_lse and softmax_sum, and a rule for vmap. Imported
with the first call that has a torch tensor.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from . import _torch_door as door
from ._arrays import integer_array, integer_tensor, refusal
from ._attention import DIFFERENTIABLE, INTEGERS, KINDS, Options, Tensors, check_mask, core_call, forward, shown, to_view
from ._core import Context, View
from ._pages import row_elements
from ._torch_operator import (calling, context as context_of_call, given_context, map_one_by_one, no_second_derivative,
                              one_by_one, statistics_dtype, using, view, view_of_input)

_TENSORS = Tensors._fields
_DEFAULTS = Options._field_defaults
_NUM_INPUTS = len(_TENSORS) + len(Options._fields) + 2  # and order, statistics

# ---- the operators ---------------------------------------------------------------------------------------------------
# Tensors in the core's shapes. order: which dimensions of `out` lie how in memory; statistics: softmax_max and softmax_sum
# are wanted, else they are empty. softmax_lse is always there: gradients need it.

_TYPES = {"Optional[float]": "float?", "float": "float", "bool": "bool", "str": "str", "int": "SymInt"}
_tensors = ", ".join(f"Tensor{'' if i < 3 else '?'} {name}" for i, name in enumerate(_TENSORS))
_options = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in KINDS.items())

_library = torch.library.Library("ops_transformer", "FRAGMENT")
_library.define(f"attention({_tensors}, {_options}, str order, bool statistics) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor softmax_lse, {_tensors}, {_options},"
                f" bool[{len(DIFFERENTIABLE)}] wanted) -> ({', '.join(['Tensor'] * len(DIFFERENTIABLE))})")


def _signed(number: int) -> int:
    """64 bits without a sign as torch's integers."""
    return number - 2**64 if number >= 2**63 else number


def _views(arguments: Tuple[Any, ...]) -> Tuple[Dict[str, View], Dict[str, Any]]:
    """Views of the tensors, and the numbers that are not the defaults."""
    tensors = {name: view(tensor) for name, tensor in zip(_TENSORS, arguments) if tensor is not None}
    numbers = {name: number for (name, default), number in zip(_DEFAULTS.items(), arguments[len(_TENSORS):])
               if number != default}
    for name in ("seed", "offset"):
        if name in numbers:
            numbers[name] &= 2**64 - 1
    return tensors, numbers


_ORDERS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3), "TND": (0, 1, 2)}


def _new_outputs(arguments: Tuple[Any, ...], order: str, statistics: bool) -> List[Tensor]:
    named = dict(zip(_TENSORS, arguments))
    query, value = named["query"], named["value"]
    width = value.shape[-1]
    if named["block_table"] is not None:
        layout = arguments[len(_TENSORS) + Options._fields.index("page_layout")]
        kind = {torch.bfloat16: "bf16", torch.uint8: "u8"}.get(value.dtype, "f32")
        width = row_elements(layout, kind, "value", value.shape)
    shape = (*query.shape[:-1], width)
    axes = _ORDERS[order]
    out = query.new_empty([shape[axis] for axis in axes]).permute([axes.index(d) for d in range(len(axes))])
    rows = query.shape[:3] if len(axes) == 4 else (query.shape[1], query.shape[0])
    dtype = statistics_dtype(query)
    return [out, query.new_empty(rows, dtype=dtype)] + [query.new_empty(rows if statistics else (0,), dtype=dtype)
                                                         for _ in range(2)]


def _forward(arguments: Tuple[Any, ...], context: Optional[Context] = None) -> Tuple[Tensor, ...]:
    *inputs, order, statistics = arguments
    outputs = _new_outputs(arguments, order, statistics)
    views = [view(output) for output in outputs[: 4 if statistics else 2]]
    forward(*_views(tuple(inputs)), context or context_of_call(), *views)
    return tuple(outputs)


def _new_gradients(inputs: Tuple[Any, ...], wanted: List[bool]) -> List[Tensor]:
    named = dict(zip(_TENSORS, inputs))
    query = named["query"]
    real = statistics_dtype(query)
    gradients = []
    for name, want in zip(DIFFERENTIABLE, wanted):
        tensor = named[name]
        if not want:
            gradients.append(query.new_empty(0))
        elif name in ("bias", "sinks"):
            gradients.append(tensor.new_empty(tensor.shape, dtype=real))
        else:
            gradients.append(torch.empty_like(tensor))
    return gradients


def _backward(grad_out, grad_lse, out, lse, inputs, wanted, context=None) -> Tuple[Tensor, ...]:
    gradients = _new_gradients(inputs, wanted)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    core_call(*_views(tuple(inputs))).backward(
        context or context_of_call(), view(out), view_of_input(grad_out), view(lse),
        grad_lse=None if grad_lse is None else view_of_input(grad_lse),
        **{f"grad_{name}": gradient for name, gradient in zip(DIFFERENTIABLE, views)})
    return tuple(gradients)


_library.impl("attention", lambda *arguments: _forward(arguments), "CPU")
_library.impl("attention_backward", lambda grad_out, grad_lse, out, lse, *rest:
              _backward(grad_out, grad_lse, out, lse, rest[:-1], rest[-1]), "CPU")


@torch.library.register_fake("ops_transformer::attention", lib=_library)
def _(*arguments):
    return tuple(_new_outputs(arguments, *arguments[-2:]))


@torch.library.register_fake("ops_transformer::attention_backward", lib=_library)
def _(grad_out, grad_lse, out, lse, *rest):
    return tuple(_new_gradients(rest[:-1], rest[-1]))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _save(ctx, inputs, output):
    tensors = inputs[: len(_TENSORS)]
    out, lse, largest, total = output
    ctx.save_for_backward(*tensors, out, lse, total)
    ctx.options = inputs[len(_TENSORS):len(_TENSORS) + len(Options._fields)]
    ctx.context = inputs[_NUM_INPUTS] if len(inputs) > _NUM_INPUTS else given_context()
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(largest)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out, grad_lse, _, grad_sum):
    if grad_out is None and grad_lse is None and grad_sum is None:
        return (None,) * ctx.num_inputs
    *tensors, out, lse, total = ctx.saved_tensors
    if grad_sum is not None and grad_sum.numel() > 0:
        # log(sum) + max = lse, and max moves nothing that depends on both of them.
        through_sum = grad_sum * total
        grad_lse = through_sum if grad_lse is None else grad_lse + through_sum
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[: len(DIFFERENTIABLE)])
    inputs = (*tensors, *ctx.options)
    if door.is_plain(grad_out, grad_lse, *tensors) and not torch.is_grad_enabled():
        gradients = _backward(grad_out, grad_lse, out, lse, inputs, wanted, ctx.context)
    else:
        with using(ctx.context):
            gradients = _call_backward(grad_out, grad_lse, out, lse, *inputs, wanted)
    gradients = [gradient.to(tensor.dtype) if want else None
                 for gradient, tensor, want in zip(gradients, tensors, wanted)]
    return (*gradients, *[None] * (ctx.num_inputs - len(gradients)))


_FORWARD_MODE = ("ops_transformer: forward-mode derivatives of attention are not implemented (torch.func.jvp, jacfwd, dual "
                 "tensors); reverse mode has them (torch.func.vjp, jacrev, backward)")


torch.library.register_autograd("ops_transformer::attention", _gradients, setup_context=_save, lib=_library)
torch.library.register_autograd("ops_transformer::attention_backward", no_second_derivative, lib=_library)
_operator = torch.ops.ops_transformer.attention.default
_backward_operator = torch.ops.ops_transformer.attention_backward.default


def _is_transformed() -> bool:
    """Whether a transform of torch.func runs, which asks for an autograd.Function and not for an operator."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _call_backward(*arguments):
    """attention_backward through the dispatcher."""
    if _is_transformed():
        return _Gradients.apply(*arguments[:-1], *arguments[-1])
    return _backward_operator(*arguments)


class _Differentiable(torch.autograd.Function):
    """The operator with its gradients, without the dispatcher. The last argument is the Context."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(inputs[:_NUM_INPUTS], inputs[_NUM_INPUTS])
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


class _Transformable(torch.autograd.Function):
    """The same for the transforms of torch.func, which ask for setup_context; it takes tens of microseconds more."""

    @staticmethod
    def forward(*inputs):
        return _operator(*inputs)

    setup_context = staticmethod(_save)
    backward = staticmethod(_gradients)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_Transformable.apply, info, in_dims, inputs)


class _Gradients(torch.autograd.Function):
    """attention_backward for the transforms of torch.func. `wanted` comes last, one argument each."""

    @staticmethod
    def forward(*inputs):
        arguments, wanted = inputs[: -len(DIFFERENTIABLE)], list(inputs[-len(DIFFERENTIABLE):])
        return _backward_operator(*arguments, wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(no_second_derivative)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_Gradients.apply, info, in_dims, inputs)


map_one_by_one(_library, "attention", "attention_backward")

# ---- what the package's functions call -------------------------------------------------------------------------------


def is_needed(tensors: List[Tensor]) -> bool:
    """Whether a call of these tensors is more than reading their bytes."""
    return not door.is_plain(*tensors) or door.records(*tensors)


def _refuse_without_values(name: str, tensor: Tensor) -> None:
    """TypeError for sparse and nested tensors, other devices, and subclasses whose memory may mean anything (the masks of
    torch.nn.attention.bias hold no values). Tracers' own tensors, and those of the device meta, go through the operator."""
    if (torch.compiler.is_compiling() or tensor.device.type == "meta"
            or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)):
        return
    reason = door.why_no_bytes(tensor)
    if reason is not None:
        raise refusal(TypeError, tensor, f"is {reason}; a dense tensor of the host's memory is needed", shown(name))


def _refuse_between_elements(name: str, array: Any, tensor: Tensor) -> None:
    """ValueError, as without the operator, where the memory of `array`, which is the tensor's, cannot be read where it lies."""
    if not torch.compiler.is_compiling() and door.between_elements(tensor):
        with torch.no_grad():
            to_view(name, array)


def _shared(array: np.ndarray) -> Tensor:
    """The same memory; a copy of what is read-only, which torch has no tensors of."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def to_tensor(name: str, array: Any) -> Tensor:
    """An argument of the operator: torch's as they are, others as torch tensors of the same memory."""
    if isinstance(array, Tensor):
        _refuse_without_values(name, array)
        _refuse_between_elements(name, array, array)
        if name == "mask":
            check_mask(array, str(array.dtype))
        return integer_tensor(array, shown(name)) if name in INTEGERS else array
    if name in ("block_mask_row_offsets", "block_mask_columns") and isinstance(array, np.ndarray):
        if torch.compiler.is_compiling():
            return integer_tensor(torch.from_numpy(array), shown(name))
        return _shared(integer_array(array, shown(name)))  # a mask of many blocks is large
    if name in INTEGERS:
        return integer_tensor(array, shown(name))
    if isinstance(array, np.ndarray):
        if name == "mask":
            check_mask(array, str(array.dtype))
        tensor = _shared(array)
        _refuse_between_elements(name, array, tensor)
        return tensor
    raise refusal(TypeError, array, f"is a {type(array).__name__}, but must be a torch tensor or a NumPy array, as another "
                  "argument is a torch tensor that needs more than its bytes read (gradients, a compiler, ..)", shown(name))


_FLOATS = frozenset((*DIFFERENTIABLE, "alibi_slopes"))


def _without_values(arrays: Dict[str, Any], given: List[Tensor]) -> Optional[Tensor]:
    """A tensor of the device meta that would leave the result or a gradient unwritten. The result lies where query does, a gradient
    where its tensor does: beside a query of the device meta, lengths and masks of the host are no harm."""
    query = arrays["query"]
    if isinstance(query, Tensor) and query.device.type == "meta":
        beside = [arrays[name] for name in DIFFERENTIABLE if arrays.get(name) is not None]
        if not all(isinstance(array, Tensor) for array in beside):
            return query  # NumPy's arrays lie in the host's memory
        return door.without_values_beside(beside)
    found = [tensor for tensor in given if tensor.device.type == "meta"]
    return found[0] if found else None


def read(arrays: Dict[str, Any], others: Tuple[Any, ...], autocast: bool, writes: bool) -> Tuple[bool, Dict[str, Any]]:
    """_attention_reader.read, of arrays with a torch tensor among them; whether the operator is needed comes first."""
    if autocast and torch.is_autocast_enabled("cpu"):
        arrays = {**arrays, **dict(zip(("query", "key", "value"), _cast(arrays)))}
    given = [array for array in (*arrays.values(), *others) if isinstance(array, Tensor)]
    if is_needed(given):
        empty = _without_values(arrays, given)
        if empty is not None:
            raise refusal(TypeError, empty, "is on the device meta, which holds no values, but another tensor is not")
        if not writes or door.is_watched() or door.records(*given):
            return True, {name: to_tensor(name, array) for name, array in arrays.items()}
        return False, {name: to_view(name, array) for name, array in arrays.items()}
    views = {}
    for name, array in arrays.items():
        # What a tensor is was asked just now, but for lists of integers and masks.
        try:
            views[name] = view(array) if name in _FLOATS and isinstance(array, Tensor) else to_view(name, array)
        except (BufferError, RuntimeError, TypeError, ValueError):
            views[name] = to_view(name, array)  # names it
    return False, views


def _cast(arrays: Dict[str, Any]) -> List[Any]:
    """query, key and value under autocast."""
    dtype = torch.get_autocast_dtype("cpu")
    given = [arrays[name] for name in ("query", "key", "value")]
    return [array.to(dtype) if isinstance(array, Tensor) and array.is_floating_point() and array.dtype != torch.float64
            else array for array in given]


def is_traced(array: Any) -> bool:
    """Whether the numbers of an array are not there to be looked at."""
    if isinstance(array, Tensor):
        return not door.is_plain(array)
    return torch.compiler.is_compiling()


def starts(name: str, ends: Any) -> Tensor:
    """Where sequences begin, of where they end."""
    ends = integer_tensor(ends, name)
    return torch.cat([ends.new_zeros(1), ends])


def _arguments(tensors: Dict[str, Tensor], numbers: Dict[str, Any]) -> Tuple[Any, ...]:
    """Tensors and options in the order of the operators."""
    options = {**_DEFAULTS, **numbers}
    options.update(seed=_signed(options["seed"]), offset=_signed(options["offset"]))
    return (*[tensors.get(name) for name in _TENSORS], *options.values())


def _check_gradients(tensors: Dict[str, Tensor], numbers: Dict[str, Any], names: Dict[str, str]) -> None:
    """Refuses in the call pages and lists beside which no backward computes them."""
    needing = [name for name in DIFFERENTIABLE if name in tensors and tensors[name].requires_grad]
    if not needing:
        return
    reason, key = None, tensors["key"]
    cache = names.get("key", "key")
    if key.dtype.itemsize == 1:
        kind = str(key.dtype).replace("torch.", "")
        reason = (f"{cache} is {'ScaledPages of ' if 'key_scales' in tensors else ''}{kind}, and gradients are taken beside float32, "
                  "bfloat16, float16 and float64 alone")
    elif numbers.get("page_layout", "norm") != "norm":
        reason = f"{cache} is pages of layout {numbers['page_layout']}, and gradients are taken of norm pages alone"
    elif "sparse_indices" in tensors and "bias" in needing:
        needing, reason = ["bias"], "beside sparse_indices bias has none"
    if reason is not None:
        name = names.get(needing[0], needing[0])
        raise RuntimeError(f"{name} requires gradients, but {reason}: pass {name}.detach(), or call under torch.no_grad()")


def attend(tensors: Dict[str, Tensor], numbers: Dict[str, Any], *, order: str = "BNSD", statistics: bool = False,
           context: Optional[Context] = None, names: Optional[Dict[str, str]] = None) -> Tuple[Tensor, ...]:
    """(out, softmax_lse, softmax_max, softmax_sum); the last two empty without `statistics`. names: the caller's arguments, by
    those of the tensors, where they are others."""
    given = [tensors.get(name) for name in _TENSORS]
    if torch.is_grad_enabled():
        _check_gradients(tensors, numbers, names or {})
        for name, tensor in zip(_TENSORS[len(DIFFERENTIABLE):], given[len(DIFFERENTIABLE):]):
            if tensor is not None and tensor.requires_grad:
                raise refusal(RuntimeError, tensor, f"requires gradients, but attention has none for it: pass {name}.detach()")
    arguments = (*_arguments(tensors, numbers), order, statistics)
    if door.has_tangent(*given):
        raise NotImplementedError(_FORWARD_MODE)
    if door.is_plain(*given):
        return _Differentiable.apply(*arguments, context)
    with calling(context):
        return _Transformable.apply(*arguments) if _is_transformed() else _operator(*arguments)


def gradients(tensors: Dict[str, Tensor], numbers: Dict[str, Any], saved: Dict[str, Tensor], wanted: Tuple[str, ...],
              context: Optional[Context]) -> Dict[str, Tensor]:
    """What flash_attention_grad gives, of tensors that a compiler or a transform has to see. It has no gradients itself."""
    everything = (*tensors.values(), *saved.values())
    if door.records(*everything):
        raise RuntimeError("flash_attention_grad: an argument requires gradients, but this function has none: call it under "
                           "torch.no_grad(), or let torch differentiate flash_attention_score")
    lse = saved.get("softmax_lse")
    if lse is None:
        lse = saved["softmax_max"] + saved["softmax_sum"].log()
    arguments = (saved["grad_out"], saved.get("grad_lse"), saved["attention_out"], lse,
                 *_arguments(tensors, numbers), [name in wanted for name in DIFFERENTIABLE])
    with calling(context):
        found = _call_backward(*arguments)
    return dict(zip(DIFFERENTIABLE, found))

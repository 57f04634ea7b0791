"""moe.moe_layer as an operator of torch, with the gradients of the tokens, of logits or weights, and of the experts.

The core computes everything between again: inputs alone are kept. Its gradient is of gate rows above up rows in one tensor:
where they are apart, or the other way round, they are put together for it, and their gradient is taken apart. Packed weights
of floats or blocks have no gradient and are unpacked for that of the tokens; beside integer weights nothing has one.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _torch_door as door
from ._arrays import integer_tensor, is_torch
from ._calls import function_of
from ._core import PackedIntWeight, PackedWeight
from ._moe_layer import LAYER_WEIGHTS, NEEDED, check_layer, layer_gradients
from ._moe_results import Layer, LayerGradients
from ._torch_forms import Form, define, not_traced, unpacked
from ._torch_moe import gating_backward_operator
from ._torch_operator import context, using

_public = function_of("moe", "moe_layer")
_plain = _public.__wrapped__  # without its checks

# The operator's arguments and their types. GRADIENTS are those that have one, beside residual, whose gradient is that of out.
_TYPES = {
    **dict.fromkeys(("x", "gate_up", "down"), "Tensor"), "logits": "Tensor?", "top_k": "int?",
    **dict.fromkeys(("topk_ids", "topk_weights", "up", "gate_up_bias", "down_bias"), "Tensor?"), "activation": "str",
    "scores": "str", "gate_bias": "Tensor?", "finished": "Tensor?", "renormalise": "bool", "routed_scaling_factor": "float",
    "eps": "float", "num_groups": "int", "kept_groups": "int", "group_score": "str", "nan_is_error": "bool",
    **dict.fromkeys(("shared_gate_up", "shared_down", "shared_up", "shared_gate", "residual"), "Tensor?"),
    "num_experts": "int?", "expert_begin": "int", "expert_end": "int?", "int8_activations": "bool", "batch_invariant": "bool"}
_ORDER = (*_TYPES, "return_routes")
_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())
GRADIENTS = ("x", "logits", "topk_weights", "gate_up", "down", "up", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down",
             "shared_up", "shared_gate")
_CAST = tuple(name for name in (*GRADIENTS, "residual") if name not in ("logits", "topk_weights"))


def _forward(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dict(zip(_ORDER, arguments))
    result = _plain(**given, context=context())
    parts = tuple(result) if given["return_routes"] else (result, None, None, None)
    kinds = (None, torch.int32, torch.float32, torch.int64)
    return tuple(given["x"].new_empty(0, dtype=kind) if part is None else part for part, kind in zip(parts, kinds))


def _fake(*arguments: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dict(zip(_ORDER, arguments))
    x, routes = given["x"], given["return_routes"]
    chosen = (x.shape[0], given["top_k"]) if routes and given["logits"] is not None else (0,)
    return (x.new_empty(x.shape), x.new_empty(chosen, dtype=torch.int32), x.new_empty(chosen, dtype=torch.float32),
            x.new_empty(given["gate_up"].shape[:1] if routes else (0,), dtype=torch.int64))


# ---- gradients ---------------------------------------------------------------------------------------------------------


def _memory(given: Dict[str, Any], wanted: Sequence[bool]) -> Tuple[Tensor, ...]:
    return tuple(given[name].new_empty(given[name].shape) if want else given["x"].new_empty(0)
                 for name, want in zip(GRADIENTS, wanted))


def _as_core_takes_it(given: Dict[str, Any], gradients: Dict[str, Tensor]) -> Tuple[Dict[str, Any], Dict[str, Tensor], Callable[[], None]]:
    """(arguments, gradients, what is done behind the call) with gate rows above up rows in one tensor."""
    swapped = given["activation"] == "swiglu_swapped"
    given, of_core = {**given, "activation": "swiglu"}, dict(gradients)
    steps: List[Callable[[], None]] = []

    def join(name: str, parts: List[Tensor], to: List[Optional[Tensor]], dim: int) -> None:
        order = slice(None, None, -1) if swapped else slice(None)
        given[name] = joined = torch.cat(parts[order], dim)
        if all(tensor is None for tensor in to):
            return
        of_core[name] = whole = torch.empty_like(joined)
        sizes = [part.shape[dim] for part in parts[order]]

        def split() -> None:
            for tensor, part in zip(to[order], whole.split(sizes, dim)):
                if tensor is not None:
                    tensor.copy_(part)

        steps.append(split)

    for name, apart in (("gate_up", "up"), ("shared_gate_up", "shared_up"), ("gate_up_bias", None)):
        dim = 1 if name == "gate_up_bias" else -2
        if apart is not None and given[apart] is not None:
            of_core.pop(apart, None)
            join(name, [given[name], given[apart]], [gradients.get(name), gradients.get(apart)], dim)
            given[apart] = None
        elif swapped and given[name] is not None:
            to = gradients.get(name)
            join(name, list(given[name].chunk(2, dim)), [None, None] if to is None else list(to.chunk(2, dim)), dim)
    return given, of_core, lambda: [step() for step in steps]


def _backward(grad_out: Tensor, *arguments: Any) -> Tuple[Tensor, ...]:
    given, wanted = dict(zip(_TYPES, arguments)), arguments[-1]
    memory = _memory(given, wanted)
    gradients = {name: tensor for name, tensor, want in zip(GRADIENTS, memory, wanted) if want}
    given, of_core, finish = _as_core_takes_it(given, gradients)
    layer_gradients(context(), grad_out, given, of_core)
    finish()
    return memory


_backward_operator = define(
    f"moe_layer_backward(Tensor grad_out, {_SCHEMA}, bool[{len(GRADIENTS)}] wanted) -> ({', '.join(['Tensor'] * len(GRADIENTS))})",
    _backward, lambda grad_out, *arguments: _memory(dict(zip(_TYPES, arguments)), arguments[-1]))


def _gradients_of(given: Dict[str, Any], needs: Dict[str, bool], ids: Tensor, grad_out: Optional[Tensor],
                  grad_weights: Optional[Tensor]) -> Dict[str, Tensor]:
    """By name, of those that need one. grad_weights: of the topk_weights that gating chose, which the layer gave back."""
    found: Dict[str, Tensor] = {}
    wanted = [needs.get(name, False) for name in GRADIENTS]
    if grad_out is not None and any(wanted):
        options = {**given, "residual": None, "int8_activations": False, "batch_invariant": False}
        results = _backward_operator(grad_out, *(options[name] for name in _TYPES), wanted)
        found = {name: result for name, result, want in zip(GRADIENTS, results, wanted) if want}
    if grad_out is not None and needs.get("residual", False):
        found["residual"] = grad_out
    if grad_weights is not None and needs.get("logits", False):
        more = gating_backward_operator(given["logits"], ids, grad_weights, None, given["scores"], given["renormalise"],
                                        given["routed_scaling_factor"], given["eps"])
        found["logits"] = found["logits"] + more if "logits" in found else more
    return found


def _save(ctx, inputs, output):
    given = dict(zip(_ORDER, inputs))
    ctx.names = [name for name, value in given.items() if isinstance(value, Tensor)]
    ctx.options = {name: None if name in ctx.names else value for name, value in given.items()}
    ctx.save_for_backward(output[1], *(given[name] for name in ctx.names))
    _mark(ctx, output, given)


def _mark(ctx, output, given):
    has_weights = given["return_routes"] and given["logits"] is not None
    ctx.mark_non_differentiable(output[1], output[3], *(() if has_weights else (output[2],)))


def _gradients(ctx, grad_out, _, grad_weights, __):
    ids, *tensors = ctx.saved_tensors
    given = {**ctx.options, **dict(zip(ctx.names, tensors))}
    found = _gradients_of(given, dict(zip(_ORDER, ctx.needs_input_grad)), ids, grad_out, grad_weights)
    return tuple(found.get(name) for name in _ORDER)


_operator = define(f"moe_layer({_SCHEMA}, bool return_routes) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _fake, _save, _gradients)


class _Packed(torch.autograd.Function):
    """The layer with packed weights, which no schema of an operator has a word for. `tensors` are those of (GRADIENTS, residual)
    that are given as such."""

    @staticmethod
    def forward(ctx, given, names, *tensors):
        ctx.set_materialize_grads(False)
        ctx.names, ctx.context = names, given["context"]
        given = {**given, **dict(zip(names, tensors))}
        with using(ctx.context):
            output = _forward(*(given[name] for name in _ORDER))
        ctx.given = {name: None if name in names else given[name] for name in _ORDER}
        ctx.save_for_backward(output[1], *tensors)
        _mark(ctx, output, given)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, _, grad_weights, __):
        ids, *tensors = ctx.saved_tensors
        with using(ctx.context):
            given = {**ctx.given, **dict(zip(ctx.names, tensors))}
            for name in LAYER_WEIGHTS:
                if isinstance(given[name], PackedWeight):
                    stack = unpacked(given[name])
                    given[name] = stack[0] if name.startswith("shared_") else stack
            found = _gradients_of(given, dict(zip(ctx.names, ctx.needs_input_grad[2:])), ids, grad_out, grad_weights)
        return (None, None, *(found.get(name) for name in ctx.names))


# ---- the function ------------------------------------------------------------------------------------------------------


def _prepare(bound: Dict[str, Any]) -> None:
    check_layer(bound)
    if bound["topk_ids"] is not None:
        bound["topk_ids"] = integer_tensor(bound["topk_ids"], "topk_ids")


class _LayerForm(Form):
    """moe_layer takes packed stacks, which are no operators, and has activations without gradients."""

    def _run(self, bound: Dict[str, Any]) -> Any:
        weights = [bound[name] for name in LAYER_WEIGHTS]
        packed = any(isinstance(weight, (PackedWeight, PackedIntWeight)) for weight in weights)
        if packed and torch.compiler.is_compiling():
            not_traced("moe_layer", "a packed weight")
        if not door.records(*(value for value in bound.values() if is_torch(value))):
            return self._without_gradients(bound) if packed else super()._run(bound)
        if bound["activation"] not in ("swiglu", "swiglu_swapped"):
            raise RuntimeError(f'moe_layer: an input requires gradients, but activation is "{bound["activation"]}", of which there are '
                               "none: the layer in steps (moe_gating, moe_routing, moe_permute, grouped_matmul, moe_finalize) has "
                               "them; or call it under torch.no_grad()")
        if any(isinstance(weight, PackedIntWeight) for weight in weights):
            raise RuntimeError("moe_layer: an input requires gradients, but beside an integer weight there are none; call it under "
                               "torch.no_grad()")
        if not packed:
            return super()._run(bound)
        names = [name for name in (*GRADIENTS, "residual") if is_torch(bound[name])]
        return _Packed.apply(bound, names, *(bound[name] for name in names))

    def _without_gradients(self, bound: Dict[str, Any]) -> Any:
        with using(bound["context"]):
            return _forward(*(bound[name] for name in _ORDER))


def _finish(bound: Dict[str, Any], result: Any) -> Any:
    if not bound["return_routes"]:
        return result[0]
    return Layer(*result) if bound["logits"] is not None else Layer(result[0], None, None, result[3])


# What a backward for its caller has no word for: it is of one activation, and of gate rows and up rows in one tensor.
_OF_BACKWARD = {"activation": "swiglu", "int8_activations": False, "batch_invariant": False,
                **dict.fromkeys(("up", "shared_up", "residual"))}


def _wanted(bound: Dict[str, Any]) -> List[bool]:
    """The gradients of all that is given."""
    return [name in LayerGradients._fields and (name in NEEDED or bound[name] is not None) for name in GRADIENTS]


def _finish_backward(bound: Dict[str, Any], results: Any) -> LayerGradients:
    found = {name: result for name, result, want in zip(GRADIENTS, results, _wanted(bound)) if want}
    return LayerGradients(*(found.get(name) for name in LayerGradients._fields))


_backward_form = Form(function_of("moe", "moe_layer_backward"), _backward_operator, ("grad_out", *_TYPES, "wanted"), prepare=_prepare,
                      finish=_finish_backward, differentiable=False,
                      complete=lambda bound: {**_OF_BACKWARD, "wanted": _wanted(bound)})

FORMS = {"moe_layer_backward": _backward_form, "moe_layer": _LayerForm(_public, _operator, _ORDER, prepare=_prepare, finish=_finish, casts=_CAST, packed=tuple(LAYER_WEIGHTS),
                                 without_gradient=("gate_bias",))}

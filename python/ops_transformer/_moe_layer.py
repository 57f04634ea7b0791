"""The arguments of a layer of experts, as the core takes them: for arrays and for the operator of torch."""

from __future__ import annotations

import math
from typing import Any, Dict

from . import _core
from ._arrays import integers, rank, view, view_of_new
from ._calls import of_the_core
from ._context import Context
from ._core import PackedIntWeight, PackedWeight, View

# Weights, which may be packed, and how many dimensions arrays have; of others the core says what they must be.
_STACK, _ONE = (3, "[E, n, k] (or a packed stack)"), (2, "[n, k] (or packed)")
LAYER_WEIGHTS = {"gate_up": _STACK, "down": _STACK, "up": _STACK, "shared_gate_up": _ONE, "shared_down": _ONE, "shared_up": _ONE}
_DIMS = {**LAYER_WEIGHTS, "x": (2, "[tokens, hidden]"), "logits": (2, "[tokens, num_experts]"), "topk_ids": (2, "[tokens, top_k]")}
NEEDED = ("x", "gate_up", "down")
_OF_LAYER = (*_DIMS, "gate_bias", "finished", "topk_weights", "gate_up_bias", "down_bias", "shared_gate", "residual")
LAYER_FIELDS = {"shared.": "shared_"}  # as the core's messages name the shared expert's weights, and the arguments here
# Options that may be left out, as the core has them then, and those of which the gradient has one value.
_ABSENT = {"top_k": 0, "num_experts": -1, "expert_end": -1}
_OF_GRADIENT = {"activation": "swiglu", "int8_activations": False, "batch_invariant": False}
_FLOAT32_END = 2.0**128 - 2.0**103  # what rounds to an infinity
_LAYER_OPTIONS = ("scores", "renormalise", "routed_scaling_factor", "eps", "num_groups", "kept_groups", "group_score",
                  "nan_is_error", "expert_begin", *_ABSENT, *_OF_GRADIENT)


def _layer_input(name: str, array: Any) -> Any:
    """What the core reads of an argument: a view, or a packed weight as it is."""
    if name in LAYER_WEIGHTS and isinstance(array, (PackedWeight, PackedIntWeight)):
        return array
    tensor = integers(array, name) if name == "topk_ids" else view(array, name)
    return rank(tensor, array, *_DIMS[name]) if name in _DIMS else tensor


def _as_stacks(views: Dict[str, Any]) -> Dict[str, Any]:
    """The same by name, where a shared expert's weight that is no packed one is a stack of one."""
    return {name: value.unsqueezed() if LAYER_WEIGHTS.get(name) is _ONE and isinstance(value, View) else value
            for name, value in views.items()}


def float32(name: str, value: float) -> float:
    """A number that the core holds in float32; refused where it would become an infinity."""
    if _FLOAT32_END <= abs(value) < math.inf:
        raise ValueError(f"{name} is {value}, but must be a number of float32, at most 3.4028235e38")
    return value


def check_layer(given: Dict[str, Any]) -> None:
    """Refuses a choice of experts that is not given, and the numbers by which the core is told that an option is None."""
    if given["logits"] is None and (given["topk_ids"] is None or given["topk_weights"] is None):
        raise ValueError("logits are not given, and topk_ids and topk_weights are not both: either says which experts a token has")
    if given["logits"] is not None and given["top_k"] is None:
        raise ValueError("top_k is None, but with logits it must say how many experts a token has")
    for name, other in (("shared_gate_up", "shared_down"), ("shared_down", "shared_gate_up")):
        if given[name] is not None and given[other] is None:
            raise ValueError(f"{name} is given, but {other} is not")
    for name in ("shared_up", "shared_gate"):
        if given.get(name) is not None and given["shared_gate_up"] is None:
            raise ValueError(f"{name} is given, but shared_gate_up and shared_down are not")
    for name in _ABSENT:
        if given[name] is not None and given[name] < 0:
            raise ValueError(f"{name} is {given[name]}, must not be negative")


def layer_call(given: Dict[str, Any]) -> Any:
    """(inputs, options) of the core, of a function's arguments by name."""
    check_layer(given)
    for name in ("routed_scaling_factor", "eps"):
        float32(name, given[name])
    names = [name for name in _OF_LAYER if name in NEEDED or given.get(name) is not None]
    inputs = _as_stacks({name: _layer_input(name, given[name]) for name in names})
    options = {name: given.get(name, _OF_GRADIENT.get(name)) for name in _LAYER_OPTIONS}
    return inputs, {name: _ABSENT[name] if value is None else value for name, value in options.items()}


def layer_gradients(context: Context, grad_out: Any, given: Dict[str, Any], gradients: Dict[str, Any]) -> None:
    """Into new arrays by the names of LayerGradients; of a layer whose arguments are given by name."""
    inputs, options = layer_call(given)
    views = _as_stacks({name: view_of_new(gradient) for name, gradient in gradients.items()})
    of_the_core(_core.moe_layer_backward, LAYER_FIELDS, context, view(grad_out, "grad_out"), inputs, options, views)

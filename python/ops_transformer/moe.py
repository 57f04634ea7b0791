"""Mixture of experts: the whole layer in one call, and its steps around the products: which experts a token goes to, where
its rows lie, and the ways there and back.

    out = moe_layer(x, gate_up, down, logits, 2, renormalise=True)

    ids, weights = moe_gating(logits, 2, renormalise=True)
    rows, slots, counts = moe_routing(ids, num_experts)
    expanded = moe_permute(x, slots, 2)                  # the rows of expert 0, of expert 1, ..; counts is the list of groups
    out = moe_finalize(expert_outputs, rows, weights)

Slot t * top_k + k is the k-th choice of token t; a row is a place among the expanded tokens. Arrays float32, bfloat16 or
float16 with any strides, integers int32 or int64; arithmetic in float32; the same bits for any number of threads. Of torch
tensors that require gradients the functions give results that have them; those named `_backward` compute them for others.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

from . import _core
from ._arrays import empty, integers, optional_view, output, rank, view, view_of_new
from ._calls import of_the_core, public
from ._context import Context, default_context
from ._core import View
from ._moe_layer import LAYER_FIELDS, NEEDED, float32, layer_call, layer_gradients
from ._moe_results import FinalizeGradients, Gating, Layer, LayerGradients, Routing

__all__ = ["FinalizeGradients", "Gating", "Layer", "LayerGradients", "moe_compute_expert_tokens", "moe_finalize",
           "moe_finalize_backward", "moe_gating", "moe_gating_backward", "moe_layer", "moe_layer_backward", "moe_permute",
           "moe_routing", "Routing"]


def _torch_forms() -> Dict[str, Any]:
    # Statements, which torch.compile follows where a compiled call is a process's first one.
    from ._torch_moe import FORMS
    from ._torch_moe_layer import FORMS as LAYER

    return {**FORMS, **LAYER}


@public(torch=_torch_forms)
def moe_gating(logits: Any, top_k: int, *, scores: str = "softmax", bias: Any = None, finished: Any = None,
           renormalise: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20, num_groups: int = 1,
           kept_groups: int = 1, group_score: str = "max", nan_is_error: bool = False, return_scores: bool = False,
           context: Optional[Context] = None) -> Any:
    """(topk_ids, topk_weights): the top_k experts of each token, best first, and what each weighs.

    logits [tokens, num_experts]. s = softmax(logits), or with scores="sigmoid" 1 / (1 + exp(-logits)); the experts with the
    largest s + bias are chosen, and weigh routed_scaling_factor * s, without the bias [num_experts]. renormalise: the weights of
    a token are divided by their sum (softmax: they are the softmax of the chosen logits; sigmoid: eps is added to the sum).
    num_groups > 1: only experts of the kept_groups best groups are chosen; a group counts as its best expert
    (group_score="max") or the sum of its two best ("top2_sum"). finished bool [tokens]: ids of -1 and weights 0.

    Equal ones go to the lower index; without a bias the logits are compared. NaN comes last, or is refused with nan_is_error. A
    token whose logits are all -inf or NaN has experts 0 .. top_k - 1 with equal weights. return_scores: a Gating, with s of all
    experts. ids are int32, weights float32.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.1.2.
    """
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}, must not be negative")
    x = rank(view(logits, "logits"), logits, 2, "[tokens, num_experts]")
    tokens, num_experts = x.shape
    ids, weights = empty(logits, (tokens, top_k), "i32"), empty(logits, (tokens, top_k), "f32")
    all_scores = empty(logits, (tokens, num_experts), "f32") if return_scores else None
    _core.moe_gating(context or default_context(), x, optional_view(bias, "bias"), optional_view(finished, "finished"),
                     view_of_new(ids), view_of_new(weights), None if all_scores is None else view_of_new(all_scores), scores,
                     renormalise, float32("routed_scaling_factor", routed_scaling_factor), float32("eps", eps), num_groups, kept_groups,
                     group_score, nan_is_error)
    return Gating(ids, weights, all_scores) if return_scores else (ids, weights)


@public(torch=_torch_forms)
def moe_gating_backward(logits: Any, topk_ids: Any, grad_topk_weights: Any, *, grad_scores: Any = None, scores: str = "softmax",
                    renormalise: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
                    context: Optional[Context] = None) -> Any:
    """The gradient of logits, from those of topk_weights [tokens, top_k] and, if given, of scores (float32 [tokens,
    num_experts]); the choice is constant. Slots of id -1 give nothing."""
    x = rank(view(logits, "logits"), logits, 2, "[tokens, num_experts]")
    grad_logits = empty(logits, x.shape, x.dtype)
    _core.moe_gating_backward(context or default_context(), x, integers(topk_ids, "topk_ids"),
                              view(grad_topk_weights, "grad_topk_weights"), optional_view(grad_scores, "grad_scores"),
                              view_of_new(grad_logits), scores, renormalise,
                              float32("routed_scaling_factor", routed_scaling_factor), float32("eps", eps))
    return grad_logits


@public(torch=_torch_forms)
def moe_routing(topk_ids: Any, num_experts: int, *, capacity: Optional[int] = None, rows: Optional[int] = None,
            expert_begin: int = 0, expert_end: Optional[int] = None, cumulative_ends: bool = False,
            context: Optional[Context] = None) -> Routing:
    """Sorts the slots of topk_ids [tokens, top_k] by expert, equal ones in their order.

    Ids are in [0, num_experts), or -1: the slot goes nowhere. Without a capacity the rows of an expert lie behind those of the
    one before; rows (default: tokens * top_k) is how many there are, and slots behind the last are dropped. With a capacity
    expert e has rows e * capacity to (e + 1) * capacity - 1, and the slots of the last tokens of an expert that has more are dropped.
    Only experts from expert_begin to expert_end - 1 have rows. expert_tokens counts slots of each of them, dropped ones too;
    with cumulative_ends it is running totals.
    """
    ids = rank(integers(topk_ids, "topk_ids"), topk_ids, 2, "[tokens, top_k]")
    end = num_experts if expert_end is None else expert_end
    if not 0 <= expert_begin <= end <= num_experts:
        raise ValueError(f"the range of experts is [{expert_begin}, {end}), but must lie in [0, {num_experts})")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity is {capacity}, must be at least 1, or None")
    if rows is not None and (rows < 0 or capacity is not None):
        raise ValueError(f"rows is {rows}, must not be negative, and None with a capacity, which tells the number of rows")
    if rows is None:
        rows = ids.shape[0] * ids.shape[1] if capacity is None else (end - expert_begin) * capacity
    dtype = "i32" if max(rows, ids.shape[0] * ids.shape[1]) < 2**31 else "i64"
    found = Routing(empty(topk_ids, ids.shape, dtype), empty(topk_ids, (rows,), dtype),
                    empty(topk_ids, (end - expert_begin,), "i64"))
    _core.moe_routing(context or default_context(), ids, num_experts, *(view_of_new(array) for array in found),
                      -1 if capacity is None else capacity, expert_begin, end, cumulative_ends)
    return found


@public(torch=_torch_forms)
def moe_compute_expert_tokens(sorted_ids: Any, num_experts: int, *, context: Optional[Context] = None) -> Any:
    """int32 [num_experts]: how many of the ids, which ascend and are in [0, num_experts), are at most e."""
    if num_experts < 0:
        raise ValueError(f"num_experts is {num_experts}, must not be negative")
    ids = rank(integers(sorted_ids, "sorted_ids"), sorted_ids, 1, "[n]")
    tokens = empty(sorted_ids, (num_experts,), "i32")
    _core.moe_compute_expert_tokens(context or default_context(), ids, view_of_new(tokens))
    return tokens


@public(torch=_torch_forms)
def moe_permute(tokens: Any, slot_of_row: Any, top_k: int, *, out: Any = None, context: Optional[Context] = None) -> Any:
    """[rows, features]: row r is tokens[slot_of_row[r] // top_k], zeros where slot_of_row[r] is -1. tokens [tokens, features] of
    any dtype. The gradient of tokens is moe_finalize(gradient, row_of_slot)."""
    x = rank(view(tokens, "tokens"), tokens, 2, "[tokens, features]")
    slots = rank(integers(slot_of_row, "slot_of_row"), slot_of_row, 1, "[rows]")
    if out is None:
        out = empty(tokens, (slots.shape[0], x.shape[1]), x.dtype)
    _core.moe_permute(context or default_context(), x, slots, top_k, output(out))
    return out


def _optional_integers(values: Any, name: str) -> Any:
    return None if values is None else integers(values, name)


@public(torch=_torch_forms)
def moe_finalize(expanded: Any, row_of_slot: Any, topk_weights: Any = None, *, skip1: Any = None, skip2: Any = None,
             bias: Any = None, topk_ids: Any = None, out: Any = None, context: Optional[Context] = None) -> Any:
    """out[t] = skip1[t] + skip2[t] + sum over k of topk_weights[t, k] * (expanded[row_of_slot[t, k]] + bias[topk_ids[t, k]]), in
    ascending order of k.

    expanded [rows, features], row_of_slot [tokens, top_k]; -1 counts as a row of zeros. topk_weights float32 or of the dtype
    of expanded, without them 1. skip1, skip2 [tokens, features]; bias [num_experts, features] and topk_ids, of which -1 has
    none, go together.
    """
    x = rank(view(expanded, "expanded"), expanded, 2, "[rows, features]")
    rows = rank(integers(row_of_slot, "row_of_slot"), row_of_slot, 2, "[tokens, top_k]")
    if out is None:
        out = empty(expanded, (rows.shape[0], x.shape[1]), x.dtype)
    _core.moe_finalize(context or default_context(), x, rows, optional_view(topk_weights, "topk_weights"),
                       optional_view(skip1, "skip1"), optional_view(skip2, "skip2"), optional_view(bias, "bias"),
                       _optional_integers(topk_ids, "topk_ids"), output(out))
    return out


@public(torch=_torch_forms)
def moe_finalize_backward(grad_out: Any, expanded: Any, row_of_slot: Any, topk_weights: Any = None, *, bias: Any = None,
                      topk_ids: Any = None, context: Optional[Context] = None) -> FinalizeGradients:
    """Gradients of expanded, and of topk_weights and bias where these are given. The gradient of either skip is grad_out. No two
    slots may have one row."""
    x = rank(view(expanded, "expanded"), expanded, 2, "[rows, features]")
    weights, biases = optional_view(topk_weights, "topk_weights"), optional_view(bias, "bias")
    grads = FinalizeGradients(empty(expanded, x.shape, x.dtype),
                              None if weights is None else empty(expanded, weights.shape, weights.dtype),
                              None if biases is None else empty(expanded, biases.shape, biases.dtype))
    _core.moe_finalize_backward(context or default_context(), view(grad_out, "grad_out"), x,
                                integers(row_of_slot, "row_of_slot"), weights, biases,
                                _optional_integers(topk_ids, "topk_ids"),
                                *(None if grad is None else view_of_new(grad) for grad in grads))
    return grads


# ---- the whole layer -------------------------------------------------------------------------------------------------

@public(torch=_torch_forms)
def moe_layer(x: Any, gate_up: Any, down: Any, logits: Any = None, top_k: Optional[int] = None, *, topk_ids: Any = None,
              topk_weights: Any = None, up: Any = None, gate_up_bias: Any = None, down_bias: Any = None,
              activation: str = "swiglu", scores: str = "softmax", gate_bias: Any = None, finished: Any = None,
              renormalise: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20, num_groups: int = 1,
              kept_groups: int = 1, group_score: str = "max", nan_is_error: bool = False, shared_gate_up: Any = None,
              shared_down: Any = None, shared_up: Any = None, shared_gate: Any = None, residual: Any = None,
              num_experts: Optional[int] = None, expert_begin: int = 0, expert_end: Optional[int] = None,
              int8_activations: bool = False, batch_invariant: bool = False, out: Any = None, return_routes: bool = False,
              context: Optional[Context] = None) -> Any:
    """A layer of experts in one call, with the bits of its steps and without a copy of the tokens:

        out[t] = residual[t] + sum over k of topk_weights[t, k] * expert(topk_ids[t, k], x[t]) + share[t] * shared_expert(x[t])
        expert(e, x) = down[e] . activation(gate_up[e] . x + gate_up_bias[e]) + down_bias[e]
        share[t] = 1, or sigmoid(x[t] . shared_gate)

    x [tokens, hidden]. Either logits [tokens, num_experts] and top_k, with the options of moe_gating (gate_bias is its bias), or
    topk_ids [tokens, top_k], of which -1 is a slot that gives nothing, and topk_weights, float32 or of the dtype of x.

    gate_up [E, 2 * intermediate, hidden], gate rows above up rows ([E, intermediate, hidden] where activation is none, silu,
    gelu_erf or gelu_tanh), and down [E, hidden, intermediate] are arrays, or what matmul.pack_stack, pack_blocks_stack or
    pack_int_stack made. up: then gate_up is the gate rows alone. shared_gate_up, shared_up, shared_down: one weight [n, k]
    each, or packed; shared_gate [hidden]. int8_activations rounds rows that meet a quantised weight; batch_invariant as in
    matmul. E is num_experts, or expert_end - expert_begin: only these experts have weights here, slots of others give nothing.

    return_routes: a Layer, with what gating chose, and the slots of each expert.
    """
    inputs, options = layer_call(locals())
    tokens, weights = inputs["x"].shape[0], inputs["gate_up"]
    if out is None:
        out = empty(x, inputs["x"].shape, inputs["x"].dtype)
    ids, chosen, counts = None, None, None
    if return_routes:
        counts = empty(x, (weights.shape[0] if isinstance(weights, View) else weights.count,), "i64")
        if logits is not None:
            ids, chosen = empty(x, (tokens, top_k), "i32"), empty(x, (tokens, top_k), "f32")
    outputs = {"topk_ids": ids, "topk_weights": chosen, "expert_tokens": counts}
    views = {name: view_of_new(array) for name, array in outputs.items() if array is not None}
    of_the_core(_core.moe_layer_forward, LAYER_FIELDS, context or default_context(), inputs, options, {"out": output(out), **views})
    return Layer(out, ids, chosen, counts) if return_routes else out


@public(torch=_torch_forms)
def moe_layer_backward(grad_out: Any, x: Any, gate_up: Any, down: Any, logits: Any = None, top_k: Optional[int] = None, *,
                       topk_ids: Any = None, topk_weights: Any = None, gate_up_bias: Any = None, down_bias: Any = None,
                       scores: str = "softmax", gate_bias: Any = None, finished: Any = None, renormalise: bool = False,
                       routed_scaling_factor: float = 1.0, eps: float = 1e-20, num_groups: int = 1, kept_groups: int = 1,
                       group_score: str = "max", nan_is_error: bool = False, shared_gate_up: Any = None,
                       shared_down: Any = None, shared_gate: Any = None, num_experts: Optional[int] = None,
                       expert_begin: int = 0, expert_end: Optional[int] = None,
                       context: Optional[Context] = None) -> LayerGradients:
    """Gradients of sum(grad_out * moe_layer(..)), whose activation is swiglu and whose weights are arrays. What lies between is
    computed again; which experts are chosen is constant. The gradient of residual is grad_out."""
    given = locals()
    gradients = {name: empty(given[name], view(given[name], name).shape, view(given[name], name).dtype)
                 for name in LayerGradients._fields if name in NEEDED or given[name] is not None}
    layer_gradients(context or default_context(), grad_out, given, gradients)
    return LayerGradients(*(gradients.get(name) for name in LayerGradients._fields))

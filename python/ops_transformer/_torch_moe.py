"""The functions of moe as operators of torch, with their gradients: weights and scores of a gating, tokens that are permuted,
rows that are combined. Which experts are chosen, and where rows lie, are integers and constants of a backward."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from . import _core
from ._arrays import integer_tensor, integers, optional_view, view
from ._calls import function_of
from ._moe_results import FinalizeGradients, Gating, Routing
from ._torch_forms import Form, define, wanted_results
from ._torch_operator import context


def _bare(name: str) -> Callable[..., Any]:
    """A function of moe without its checks."""
    return function_of("moe", name).__wrapped__


# ---- gating ----------------------------------------------------------------------------------------------------------

_GATING = ("logits", "top_k", "scores", "bias", "finished", "renormalise", "routed_scaling_factor", "eps", "num_groups",
           "kept_groups", "group_score", "nan_is_error", "return_scores")


def _gating(logits, top_k, scores, bias, finished, renormalise, routed_scaling_factor, eps, num_groups, kept_groups,
            group_score, nan_is_error, return_scores):
    got = _bare("moe_gating")(logits, top_k, scores=scores, bias=bias, finished=finished, renormalise=renormalise,
                              routed_scaling_factor=routed_scaling_factor, eps=eps, num_groups=num_groups, kept_groups=kept_groups,
                              group_score=group_score, nan_is_error=nan_is_error, return_scores=return_scores, context=context())
    return tuple(got) if return_scores else (*got, logits.new_empty(0, dtype=torch.float32))


def _gating_fake(logits, top_k, *options):
    chosen = (logits.shape[0], top_k)
    return (logits.new_empty(chosen, dtype=torch.int32), logits.new_empty(chosen, dtype=torch.float32),
            logits.new_empty(logits.shape if options[-1] else (0,), dtype=torch.float32))


gating_backward_operator = define(
    "moe_gating_backward(Tensor logits, Tensor topk_ids, Tensor grad_topk_weights, Tensor? grad_scores, str scores, "
    "bool renormalise, float routed_scaling_factor, float eps) -> Tensor",
    lambda logits, ids, grad, grad_scores, scores, renormalise, factor, eps: _bare("moe_gating_backward")(
        logits, ids, grad, grad_scores=grad_scores, scores=scores, renormalise=renormalise, routed_scaling_factor=factor, eps=eps,
        context=context()),
    lambda logits, *_: logits.new_empty(logits.shape))


def _gating_save(ctx, inputs, output):
    given = dict(zip(_GATING, inputs))
    ctx.save_for_backward(given["logits"], output[0])
    ctx.options = given["scores"], given["renormalise"], given["routed_scaling_factor"], given["eps"]
    ctx.mark_non_differentiable(output[0], *(() if given["return_scores"] else (output[2],)))


def _gating_gradients(ctx, _, grad_weights, grad_scores):
    nothing = (None,) * (len(_GATING) - 1)
    if grad_weights is None and grad_scores is None:
        return (None, *nothing)
    logits, ids = ctx.saved_tensors
    if grad_weights is None:
        grad_weights = torch.zeros(ids.shape, dtype=torch.float32)
    return (gating_backward_operator(logits, ids, grad_weights, grad_scores, *ctx.options), *nothing)


_gating_operator = define(
    "moe_gating(Tensor logits, int top_k, str scores, Tensor? bias, Tensor? finished, bool renormalise, "
    "float routed_scaling_factor, float eps, int num_groups, int kept_groups, str group_score, bool nan_is_error, "
    "bool return_scores) -> (Tensor, Tensor, Tensor)", _gating, _gating_fake, _gating_save, _gating_gradients)


def _gating_results(bound: Dict[str, Any], result: Any) -> Any:
    return Gating(*result) if bound["return_scores"] else tuple(result[:2])


# ---- routing: integers -----------------------------------------------------------------------------------------------


def _routing(topk_ids, num_experts, capacity, rows, expert_begin, expert_end, cumulative_ends):
    return tuple(_bare("moe_routing")(topk_ids, num_experts, capacity=capacity, rows=rows, expert_begin=expert_begin,
                                      expert_end=expert_end, cumulative_ends=cumulative_ends, context=context()))


def _routing_fake(topk_ids, num_experts, capacity, rows, expert_begin, expert_end, cumulative_ends):
    experts = (num_experts if expert_end is None else expert_end) - expert_begin
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    if rows is None:
        rows = slots if capacity is None else experts * capacity
    dtype = torch.int32 if rows < 2**31 and slots < 2**31 else torch.int64
    return (topk_ids.new_empty(topk_ids.shape, dtype=dtype), topk_ids.new_empty((rows,), dtype=dtype),
            topk_ids.new_empty((experts,), dtype=torch.int64))


_routing_operator = define(
    "moe_routing(Tensor topk_ids, int num_experts, int? capacity, SymInt? rows, int expert_begin, int? expert_end, "
    "bool cumulative_ends) -> (Tensor, Tensor, Tensor)", _routing, _routing_fake)


def _routing_results(bound: Dict[str, Any], result: Any) -> Any:
    return Routing(*result)


_expert_tokens_operator = define(
    "moe_compute_expert_tokens(Tensor sorted_ids, int num_experts) -> Tensor",
    lambda ids, num_experts: _bare("moe_compute_expert_tokens")(ids, num_experts, context=context()),
    lambda ids, num_experts: ids.new_empty((num_experts,), dtype=torch.int32))

# ---- the ways there and back -----------------------------------------------------------------------------------------


def _row_of_slot(slot_of_row: Tensor, slots: int) -> Optional[Tensor]:
    """The gather form of slot_of_row; None where a slot has several rows."""
    has_slot = slot_of_row >= 0
    rows = torch.arange(slot_of_row.shape[0])[has_slot]
    filled = slot_of_row[has_slot].long()
    row_of_slot = torch.full((slots,), -1)
    row_of_slot[filled] = rows
    return row_of_slot if torch.equal(row_of_slot[filled], rows) else None


def _permute_backward(grad_out, slot_of_row, tokens, top_k):
    if grad_out.dtype != torch.float64:
        row_of_slot = _row_of_slot(slot_of_row, tokens * top_k)
        if row_of_slot is not None:
            return _bare("moe_finalize")(grad_out, row_of_slot.view(tokens, top_k), context=context())
    # What moe_finalize has no word for: a slot with several rows, and float64.
    sums = torch.zeros((tokens, grad_out.shape[1]), dtype=torch.promote_types(grad_out.dtype, torch.float32))
    has_slot = slot_of_row >= 0
    sums.index_add_(0, slot_of_row[has_slot].long() // top_k, grad_out[has_slot].to(sums.dtype))
    return sums.to(grad_out.dtype)


_permute_backward_operator = define(
    "moe_permute_backward(Tensor grad_out, Tensor slot_of_row, SymInt tokens, int top_k) -> Tensor", _permute_backward,
    lambda grad_out, slot_of_row, tokens, top_k: grad_out.new_empty((tokens, grad_out.shape[1])))


def _permute_save(ctx, inputs, output):
    tokens, slot_of_row, ctx.top_k = inputs
    ctx.tokens = tokens.shape[0]
    ctx.save_for_backward(slot_of_row)


def _permute_gradients(ctx, grad_out):
    if grad_out is None:
        return None, None, None
    return _permute_backward_operator(grad_out, *ctx.saved_tensors, ctx.tokens, ctx.top_k), None, None


_permute_operator = define(
    "moe_permute(Tensor tokens, Tensor slot_of_row, int top_k) -> Tensor",
    lambda tokens, slot_of_row, top_k: _bare("moe_permute")(tokens, slot_of_row, top_k, context=context()),
    lambda tokens, slot_of_row, top_k: tokens.new_empty((slot_of_row.shape[0], tokens.shape[1])), _permute_save,
    _permute_gradients)

_FINALIZE = ("expanded", "row_of_slot", "topk_weights", "skip1", "skip2", "bias", "topk_ids")


def _finalize(expanded, row_of_slot, topk_weights, skip1, skip2, bias, topk_ids):
    return _bare("moe_finalize")(expanded, row_of_slot, topk_weights, skip1=skip1, skip2=skip2, bias=bias, topk_ids=topk_ids,
                                 context=context())


def _finalize_memory(expanded, topk_weights, bias, wanted):
    return tuple(expanded.new_empty(tensor.shape, dtype=tensor.dtype) if want else expanded.new_empty(0)
                 for tensor, want in zip((expanded, topk_weights, bias), wanted))


def _finalize_backward(grad_out, expanded, row_of_slot, topk_weights, bias, topk_ids, wanted):
    gradients = _finalize_memory(expanded, topk_weights, bias, wanted)
    views = [view(gradient) if want else None for gradient, want in zip(gradients, wanted)]
    _core.moe_finalize_backward(context(), view(grad_out), view(expanded), integers(row_of_slot), optional_view(topk_weights),
                                optional_view(bias), None if topk_ids is None else integers(topk_ids), *views)
    return gradients


_finalize_backward_operator = define(
    "moe_finalize_backward(Tensor grad_out, Tensor expanded, Tensor row_of_slot, Tensor? topk_weights, Tensor? bias, "
    "Tensor? topk_ids, bool[3] wanted) -> (Tensor, Tensor, Tensor)", _finalize_backward,
    lambda grad_out, expanded, row_of_slot, topk_weights, bias, topk_ids, wanted:
    _finalize_memory(expanded, topk_weights, bias, wanted))


def _finalize_save(ctx, inputs, output):
    expanded, row_of_slot, topk_weights, _, _, bias, topk_ids = inputs
    ctx.save_for_backward(expanded, row_of_slot, topk_weights, bias, topk_ids)


def _finalize_gradients(ctx, grad_out):
    if grad_out is None:
        return (None,) * len(_FINALIZE)
    needs = dict(zip(_FINALIZE, ctx.needs_input_grad))
    wanted = [needs["expanded"], needs["topk_weights"], needs["bias"]]
    gradients = (None,) * 3
    if any(wanted):
        found = _finalize_backward_operator(grad_out, *ctx.saved_tensors, wanted)
        gradients = wanted_results(found, wanted)
    skips = [grad_out if needs[name] else None for name in ("skip1", "skip2")]
    return gradients[0], None, gradients[1], *skips, gradients[2], None


_finalize_operator = define(
    "moe_finalize(Tensor expanded, Tensor row_of_slot, Tensor? topk_weights, Tensor? skip1, Tensor? skip2, Tensor? bias, "
    "Tensor? topk_ids) -> Tensor", _finalize,
    lambda expanded, row_of_slot, *_: expanded.new_empty((row_of_slot.shape[0], expanded.shape[1])), _finalize_save,
    _finalize_gradients)

# ---- which function is which operator --------------------------------------------------------------------------------


def _integers(*names: str) -> Callable[[Dict[str, Any]], None]:
    """Turns these arguments into tensors of integers, where they are given."""
    def prepare(bound: Dict[str, Any]) -> None:
        for name in names:
            if bound[name] is not None:
                bound[name] = integer_tensor(bound[name], name)

    return prepare


def _form(name: str, operator: Any, order: Sequence[str], **more: Any) -> Form:
    return Form(function_of("moe", name), operator, order, **more)


def _wanted(bound: Dict[str, Any]) -> List[bool]:
    """The gradients of all that is given."""
    return [True, bound["topk_weights"] is not None, bound["bias"] is not None]


_BACKWARDS = {
    "moe_gating_backward": _form(
        "moe_gating_backward", gating_backward_operator,
        ("logits", "topk_ids", "grad_topk_weights", "grad_scores", "scores", "renormalise", "routed_scaling_factor", "eps"),
        prepare=_integers("topk_ids"), differentiable=False),
    "moe_finalize_backward": _form(
        "moe_finalize_backward", _finalize_backward_operator,
        ("grad_out", "expanded", "row_of_slot", "topk_weights", "bias", "topk_ids", "wanted"),
        prepare=_integers("row_of_slot", "topk_ids"), differentiable=False, complete=lambda bound: {"wanted": _wanted(bound)},
        finish=lambda bound, found: FinalizeGradients(*wanted_results(found, _wanted(bound)))),
}

FORMS = {
    **_BACKWARDS,
    "moe_gating": _form("moe_gating", _gating_operator, _GATING, finish=_gating_results, without_gradient=("bias",)),
    "moe_routing": _form("moe_routing", _routing_operator, ("topk_ids", "num_experts", "capacity", "rows", "expert_begin",
                                                            "expert_end", "cumulative_ends"),
                         finish=_routing_results, prepare=_integers("topk_ids")),
    "moe_compute_expert_tokens": _form("moe_compute_expert_tokens", _expert_tokens_operator, ("sorted_ids", "num_experts"),
                                       prepare=_integers("sorted_ids")),
    "moe_permute": _form("moe_permute", _permute_operator, ("tokens", "slot_of_row", "top_k"), prepare=_integers("slot_of_row")),
    "moe_finalize": _form("moe_finalize", _finalize_operator, _FINALIZE, prepare=_integers("row_of_slot", "topk_ids")),
}

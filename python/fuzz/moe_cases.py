"""Cases of mixtures of experts: every public function of moe, and the grouped products and stacks of matmul."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from cases import ACTIVATIONS, BLOCKS, case, given, int_matrix, out_of
from draws import Draw
from judge import Call, Made

from ops_transformer import matmul, moe

# ---- around the products -------------------------------------------------------------------------------------------------


def _slots(d: Draw, tokens: int, top_k: int, end: int) -> Any:
    """Integers [tokens, top_k] in [-1, end)."""
    high = max(end - 1, 0) if not d.wildly(16) else end
    return d.integers([d.integer(-1, high) for _ in range(tokens * top_k)], (tokens, top_k))


@case
def moe_gating(d: Draw) -> Call:
    tokens, groups = d.outward(1, 5), d.pick((1, 2, 4))
    experts = groups * d.size(1, 20)
    x = d.array(d.real(), [tokens, experts])
    return Call(moe.moe_gating, given(
        logits=x, top_k=d.option((1, 2, 3)), scores=d.option(("softmax", "sigmoid")), bias=d.maybe(lambda: d.array("f32", [experts])),
        renormalise=d.option((False, True)), routed_scaling_factor=d.option((1.0, 2.5)), num_groups=d.option((groups,)),
        kept_groups=d.option((groups, 1)), group_score=d.option(("max", "top2_sum")), nan_is_error=d.option((False, True)),
        return_scores=d.option((False, True))))


@case
def moe_gating_backward(d: Draw) -> Call:
    tokens, experts, top_k, x = d.size(1, 5), d.size(1, 40), d.size(1, 2), d.real()
    return Call(moe.moe_gating_backward, given(
        logits=d.array(x, [tokens, experts]), topk_ids=_slots(d, tokens, top_k, experts),
        grad_topk_weights=d.array(d.pick((x, "f32")), [tokens, top_k]), grad_scores=d.maybe(lambda: d.array("f32", [tokens, experts])),
        scores=d.option(("softmax", "sigmoid")), renormalise=d.option((False, True))))


@case
def moe_routing(d: Draw) -> Call:
    tokens, experts, top_k = d.size(1, 30), d.size(1, 9), d.size(1, 4)
    return Call(moe.moe_routing, given(
        topk_ids=_slots(d, tokens, top_k, experts), num_experts=d.option((experts,)), capacity=d.maybe(lambda: d.option((1, 5))),
        rows=d.maybe(lambda: d.option((0, 7, 200)), 4), expert_begin=d.option((0, 0, experts // 2)), cumulative_ends=d.option((False, True))),
        tolerance=0.0)


@case
def moe_compute_expert_tokens(d: Draw) -> Call:
    ids = sorted(d.integer(0, 6) for _ in range(d.size(1, 20)))
    return Call(moe.moe_compute_expert_tokens, given(sorted_ids=d.integers(ids), num_experts=d.option((7, 9))), tolerance=0.0)


@case
def moe_permute(d: Draw) -> Call:
    tokens, rows, x, shape = d.size(1, 5), d.outward(1, 9), d.real(), [d.size(1, 70)]
    tensor = d.array(x, [tokens, *shape])
    slots = d.integers([d.integer(-1, max(2 * tokens - 1, 0)) for _ in range(rows)] if 0 <= rows < 10 else [-1])
    return Call(moe.moe_permute, given(tokens=tensor, slot_of_row=slots, top_k=d.option((2, 2, 3)), out=out_of(d, tensor, x, [rows, *shape])),
                tolerance=0.0)


@case
def moe_finalize(d: Draw) -> Call:
    tokens, rows, top_k, features, x, experts = d.size(1, 5), d.size(1, 9), d.size(1, 4), d.size(1, 70), d.real(), d.size(1, 3)
    expanded, biased = d.array(x, [rows, features]), d.coin()
    return Call(moe.moe_finalize, given(
        expanded=expanded, row_of_slot=_slots(d, tokens, top_k, rows),
        topk_weights=d.maybe(lambda: d.array(d.pick((x, "f32")), [tokens, top_k])),
        skip1=d.maybe(lambda: d.array(x, [tokens, features])), skip2=d.maybe(lambda: d.array(x, [tokens, features])),
        bias=d.array(x, [experts, features]) if biased else None, topk_ids=_slots(d, tokens, top_k, experts) if biased else None,
        out=out_of(d, expanded, x, [tokens, features])))


@case
def moe_finalize_backward(d: Draw) -> Call:
    tokens, top_k, features, x, experts = d.size(1, 5), d.size(1, 4), d.size(1, 70), d.real(), d.size(1, 3)
    rows, biased = d.integer(1, 25), d.coin()
    slots = [slot if slot < rows else -1 for slot in range(tokens * top_k)]
    return Call(moe.moe_finalize_backward, given(
        grad_out=d.array(x, [tokens, features]), expanded=d.array(x, [rows, features]), row_of_slot=d.integers(slots, (tokens, top_k)),
        topk_weights=d.maybe(lambda: d.array(d.pick((x, "f32")), [tokens, top_k])),
        bias=d.array(x, [experts, features]) if biased else None, topk_ids=_slots(d, tokens, top_k, experts) if biased else None))


# ---- grouped products ----------------------------------------------------------------------------------------------------


def _groups(d: Draw, m: int) -> Tuple[int, Dict[str, Any]]:
    """(number of groups, the list): now and then one that decreases, is negative or has more rows than there are."""
    count = d.pick((1, 2, 3, 5, d.size(1, 9)))
    counts, left = [], max(m, 0) if m < 1000 else 0
    for _ in range(max(count, 0) if count < 1000 else 0):
        counts.append(d.integer(0, left) if not d.wildly(24) else d.integer(-2, left + 3))
        left -= min(max(counts[-1], 0), left)
    if d.coin():
        return count, {"counts": d.integers(counts, (len(counts),))}
    ends, end = [], 0
    for rows in counts:
        end += rows
        ends.append(end)
    return count, {"ends": d.integers(ends, (len(ends),))}


def _stack(d: Draw, count: int, x: str):
    """(weight, the dtype of x, n, k, whether it is of integers)."""
    n, k = 2 * d.size(1, 20), d.pick((1, 7, 32, 64, 130))
    kind = d.integer(0, 4)
    if kind == 0:
        name = d.pick(tuple(BLOCKS))
        values, size = BLOCKS[name]
        k = values * d.integer(1, 2)
        blocks = d.array("u8", (max(0, min(count, 20)) * max(0, min(n, 100)) * (k // values) * size,), low=0, high=60)
        return Made(Call(matmul.pack_blocks_stack, given(blocks=blocks, format=name, count=count, rows=n, cols=k))), "f32", n, k, False
    if kind == 1:
        groups = d.pick((1, 2, 4))
        k = groups * 2 * d.integer(1, 20)
        q, scales, zeros = int_matrix(d, [count, n], groups, k, d.pick((4, 8)))
        return Made(Call(matmul.pack_int_stack, given(q=q, scales=scales, zeros=zeros))), x, n, k, True
    weight = d.array(x if x == "f64" else d.pick((x, "f32", "bf16", "f16")), (count, n, k))
    return d.pick((weight, weight, Made(Call(matmul.pack_stack, given(weights=weight))))), x, n, k, False


def _experts(d: Draw, count: int, n: int, k: int, x: str, packs: bool = True):
    """E of [n, k]: an array, or a stack of floats or integers; k is even."""
    kind = d.integer(0, 5) if packs else 2
    if kind == 0:
        q, scales, zeros = int_matrix(d, [count, n], 1, k, d.pick((4, 8)))
        return Made(Call(matmul.pack_int_stack, given(q=q, scales=scales, zeros=zeros)))
    weight = d.array(d.pick((x, "f32")), (count, n, k))
    return Made(Call(matmul.pack_stack, given(weights=weight))) if kind == 1 else weight


def _layer(d: Draw, x: str, packs: bool):
    """Arguments of a layer, (tokens, hidden)."""
    tokens, hidden, inner, experts, top_k = d.size(1, 8), 2 * d.size(1, 20), 2 * d.size(1, 12), d.size(1, 6), d.size(1, 3)
    apart, shared, biased = packs and d.rarely(4), d.rarely(3), d.rarely(3)
    n = inner if apart else 2 * inner
    of = given(
        x=d.array(x, (tokens, hidden)), gate_up=_experts(d, experts, n, hidden, x, packs), down=_experts(d, experts, hidden, inner, x, packs),
        up=_experts(d, experts, inner, hidden, x) if apart else None,
        gate_up_bias=d.array(d.pick((x, "f32")), (experts, n)) if biased else None,
        down_bias=d.array(d.pick((x, "f32")), (experts, hidden)) if biased else None,
        shared_gate_up=d.array(x, (2 * inner, hidden)) if shared else None, shared_down=d.array(x, (hidden, inner)) if shared else None,
        shared_gate=d.array(x, (hidden,)) if shared and d.coin() else None)
    if d.coin():
        of.update(given(
            logits=d.array(d.pick((x, "f32")), (tokens, experts)), top_k=d.option((1, 2)), scores=d.option(("softmax", "sigmoid")),
            renormalise=d.option((False, True)), gate_bias=d.maybe(lambda: d.array("f32", (experts,)), 3),
            nan_is_error=d.option((False, False, True)), routed_scaling_factor=d.option((1.0, 2.5)), num_groups=d.option((1, 1, 1, 2))))
    else:
        of.update(given(topk_ids=_slots(d, tokens, top_k, experts), topk_weights=d.array(d.pick((x, "f32")), (tokens, top_k)),
                        num_experts=d.maybe(lambda: d.option((experts, experts + 2)), 3), expert_begin=d.option((0, 0, 0, 1))))
    return of, (tokens, hidden)


@case
def moe_layer(d: Draw) -> Call:
    x = d.real()
    of, shape = _layer(d, x, True)
    # Equal logits of other bits, or rounding to int8, make other results: their values are not those of copies.
    rounds = d.option((False, False, False, True))
    return Call(moe.moe_layer, given(
        **of, activation=d.option(("swiglu", "swiglu", "swiglu", "swiglu_swapped", "silu")), residual=d.maybe(lambda: d.array(x, shape), 3),
        int8_activations=rounds, batch_invariant=d.option((False, True)), return_routes=d.option((False, True)),
        out=d.maybe(lambda: d.array(x, shape, written=True), 3)), tolerance=0.05 if rounds is True else None)


@case
def moe_layer_backward(d: Draw) -> Call:
    x = d.real()
    of, shape = _layer(d, x, False)
    return Call(moe.moe_layer_backward, given(grad_out=d.array(x, shape), **of))


@case
def pack_stack(d: Draw) -> Call:
    return Call(matmul.pack_stack, given(weights=d.array(d.real("f64"), (d.size(1, 5), d.size(1, 40), d.size(1, 40)))))


@case
def pack_blocks_stack(d: Draw) -> Call:
    name = d.pick(tuple(BLOCKS))
    values, size = BLOCKS[name]
    count, rows, cols = d.size(1, 4), d.size(1, 20), values * d.integer(1, 2)
    blocks = d.array("u8", (max(count, 0) * max(rows, 0) * (cols // values) * size,), low=0, high=60)
    return Call(matmul.pack_blocks_stack, given(blocks=blocks, format=d.option((name,)), count=d.option((count,)), rows=d.option((rows,)),
                                                cols=d.option((cols,))))


@case
def pack_int_stack(d: Draw) -> Call:
    groups = d.pick((1, 2, 4))
    q, scales, zeros = int_matrix(d, [d.size(1, 4), d.size(1, 20)], groups, groups * 2 * d.size(1, 20), d.pick((4, 8)))
    return Call(matmul.pack_int_stack, given(q=q, scales=scales, zeros=zeros))


@case
def grouped_matmul(d: Draw) -> Call:
    m = d.pick((1, 2, 3, 17, d.outward(1, 40)))
    count, groups = _groups(d, m)
    weight, x, n, k, integers = _stack(d, count, d.real("f64"))
    if integers and d.coin():
        x = "i8"
    activation = d.option(ACTIVATIONS)
    columns = n // 2 if isinstance(activation, str) and activation.startswith("swiglu") else n
    quantised = d.option((False, False, False, True))
    real = "f32" if x == "i8" else x
    kind = "i8" if quantised is True else real
    return Call(matmul.grouped_matmul, given(
        x=d.array(x, (m, k), low=-128, high=127) if x == "i8" else d.array(x, (m, k)), weight=weight, **groups,
        bias=d.maybe(lambda: d.array(real, (count, n))), activation=activation, residual=d.maybe(lambda: d.array(real, (m, columns)), 3),
        x_scales=d.array("f32", (m,)) if x == "i8" and d.coin() else None,
        smooth_scales=d.array("f32", d.pick(((count,), (count, columns)))) if quantised is True and d.coin() else None,
        int8_activations=d.option((False, False, True)), batch_invariant=d.option((False, True)), out_scales=quantised,
        dtype=d.maybe(lambda: d.option(("f32", "bf16", "f16")), 6),
        out=d.maybe(lambda: d.array(kind, (m, columns), written=True), 3)), tolerance=0.03 if quantised is True else None)


@case
def grouped_matmul_swiglu_quant(d: Draw) -> Call:
    m, n, groups = d.outward(1, 20), 2 * d.size(1, 20), d.pick((1, 2, 4))
    count, lists = _groups(d, m)
    k = groups * 2 * d.integer(1, 20)
    q, scales, zeros = int_matrix(d, [count, n], groups, k, d.pick((4, 8)))
    return Call(matmul.grouped_matmul_swiglu_quant, given(
        x=d.array("i8", (m, k), low=-128, high=127), x_scales=d.array("f32", (m,)), **lists,
        weight=Made(Call(matmul.pack_int_stack, given(q=q, scales=scales, zeros=zeros))),
        bias=d.maybe(lambda: d.array(d.pick(("f32", "i32")), (count, n), high=100), 3),
        smooth_scales=d.maybe(lambda: d.array("f32", d.pick(((count,), (count, n // 2)))), 3)), tolerance=0.03)


@case
def grouped_matmul_backward(d: Draw) -> Call:
    m, n, k, x = d.outward(1, 30), d.size(1, 30), d.size(1, 40), d.real("f64")
    count, groups = _groups(d, m)
    return Call(matmul.grouped_matmul_backward, given(grad_out=d.array(x, (m, n)), x=d.array(x, (m, k)), weight=d.array(x, (count, n, k)),
                                                      **groups))

"""Operators between ranks: products fused with the exchange of what they read or give, experts and sequences spread over ranks.

    ranks = mc2.create_threads(2)                       # or, in processes, mc2.join, mc2.from_group, mc2.from_mpi4py
    def work(rank):
        out = mc2.matmul_all_to_all(ranks[rank], x, mc2.pack_columns(weight, 2), context=contexts[rank])

Every rank makes the same calls in the same order with tensors of its own; r is the calling rank, P how many there are, R_s the rows that
belong to rank s. What the core refuses a rank's tensors or options for is its ValueError and a RuntimeError on the others; RuntimeError
also where ranks disagree, one is gone or one is waited for in vain. Then the communicator is poisoned: its later calls raise at once.
What is refused before the core is called (no array, a wrong number of dimensions, options of a wrong kind, an unknown dtype) the other
ranks are not told: they wait for their timeout, unless the communicator is closed. Results have the bits of the unfused form and do not
depend on timing.

Gradients of torch tensors have the functions whose gradient is one between ranks: matmul_all_to_all, all_to_all_matmul, all_gather_matmul,
matmul_reduce_scatter, sequence_to_heads, heads_to_sequence, ring_attention_forward; the others refuse tensors that require them. All ranks
call backward, and the same tensors require gradients on all of them. Gradients are those of the sum of all ranks' losses; that of a weight
or bias is of this rank's copy: ranks that hold the same one add theirs.

Arrays as elsewhere, a product's weight an array [n, k] or packed by `matmul.pack`, `pack_blocks`, `pack_int`; an array is packed in each
call. Lists of sizes have P numbers.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _core
from ._arrays import empty, integers, output, rank, view
from ._calls import of_the_core, public
from ._context import Context, default_context
from ._core import Communicator, PackedIntWeight, PackedParts, PackedWeight, RankMemory
from ._moe_layer import LAYER_FIELDS, layer_call
from ._ranks import (allocate_shared, create_memory, create_threads, from_group, from_mpi4py, join, pack_columns, pack_columns_blocks,
                     pack_columns_int)

__all__ = ["Communicator", "Dispatched", "PackedParts", "RankMemory", "RingGradients", "all_gather_matmul", "all_to_all_matmul",
           "all_to_allv_grouped_matmul", "allocate_shared", "attention_to_ffn", "create_memory", "create_threads", "ffn_to_attention",
           "from_group", "from_mpi4py", "grouped_matmul_all_to_allv", "heads_to_sequence", "join", "matmul_all_reduce",
           "matmul_all_to_all", "matmul_reduce_scatter", "moe_combine", "moe_dispatch", "moe_layer_forward", "pack_columns",
           "pack_columns_blocks", "pack_columns_int", "ring_attention_backward", "ring_attention_forward", "sequence_to_heads"]


def _torch_forms() -> Dict[str, Any]:
    from ._torch_mc2 import FORMS

    return FORMS


_PACKED = (PackedWeight, PackedIntWeight, PackedParts)


class Dispatched(NamedTuple):
    """Rows that arrived, sorted by expert, then by the rank they are from."""

    rows: Any  # [arrived, hidden]
    expert_tokens: Any  # int64 [E_r]: rows of each of my experts
    rank_tokens: Any  # int64 [E_r, P]: those from each rank


class RingGradients(NamedTuple):
    query: Any
    key: Any
    value: Any


def _call(name: str, context: Optional[Context], communicator: Communicator, inputs: Dict[str, Any], options: Dict[str, Any],
          outputs: Dict[str, Any]) -> None:
    """The core's operator. Who is None is left out."""
    def given(values: Dict[str, Any]) -> Dict[str, Any]:
        return {key: value for key, value in values.items() if value is not None}

    getattr(_core, name)(context or default_context(), communicator, given({key: _read(key, value) for key, value in inputs.items()}),
                         options, given({key: None if value is None else output(value, key) for key, value in outputs.items()}))


def _read(name: str, value: Any) -> Any:
    if value is None or isinstance(value, _PACKED):
        return value
    return integers(value, name) if name in ("topk_ids", "send_counts") else view(value, name)


def _sizes(values: Any, name: str) -> List[int]:
    """A list of sizes, which may be left out."""
    if values is None:
        return []
    rank(integers(values, name), values, 1, "[P]")
    return [int(value) for value in values]


def _shares(n: int, communicator: Communicator) -> List[int]:
    return [_core.share_of(n, communicator.world_size, part) for part in range(communicator.world_size)]


def _weight(weights: Any, context: Optional[Context], columns: int = 0) -> Any:
    """Packed; columns: for so many ranks, that many parts."""
    if weights is None or isinstance(weights, _PACKED):
        return weights
    context = context or default_context()
    if isinstance(weights, (list, tuple)) and columns:
        return _core.pack_each(context, [rank(view(w, f"weights[{i}]"), w, 2, "[n, k]") for i, w in enumerate(weights)])
    tensor = rank(view(weights), weights, 2, "[n, k] (or packed)")
    return _core.pack_columns(context, tensor, columns) if columns else PackedWeight.pack(context, tensor)


def _kind(x: Any, tensor: Any, dtype: Optional[str]) -> str:
    if dtype not in (None, "i32", "f32", "bf16", "f16"):
        raise ValueError(f'dtype is "{dtype}", must be one of i32, f32, bf16, f16')
    return dtype or ("f32" if tensor.dtype == "i8" else tensor.dtype)


def _product(name: str, communicator: Communicator, x: Any, weights: Any, rows: Any, out_rows: Any, dtype: Optional[str], out: Any,
             context: Optional[Context], arrays: Dict[str, Any], exchanged: Any = None, inputs: Any = None,
             int8_activations: bool = False, tile_rows: int = 0) -> Any:
    """out_rows(rows of x, sizes given): those of out."""
    tensor, ranks = rank(view(x), x, 2, "[rows, k]"), communicator.world_size
    packed = _weight(weights, context, ranks if name == "matmul_all_to_all" else 0)
    given = _sizes(rows, "rows")
    if out is None:
        mine = packed.n(communicator.rank) if isinstance(packed, PackedParts) and communicator.rank < len(packed) else \
            0 if isinstance(packed, PackedParts) else packed.n
        sizes = given if len(given) == ranks else None
        out = empty(x, (max(out_rows(tensor.shape[0], sizes), 0), mine), _kind(x, tensor, dtype))
    elif dtype is not None and dtype != view(out).dtype:
        raise ValueError(f'dtype is "{dtype}", but out is {view(out).dtype}')
    options = {"rows": given, "inputs": _sizes(inputs, "inputs"), "int8_activations": int8_activations, "tile_rows": tile_rows}
    _call(name, context, communicator, {"x": x, "weights": packed, **arrays}, options, {"out": out, "exchanged": exchanged})
    return out


@public(torch=_torch_forms)
def matmul_all_to_all(communicator: Communicator, x: Any, weights: Any, *, bias: Any = None, x_scales: Any = None,
                      int8_activations: bool = False, rows: Any = None, tile_rows: int = 0, dtype: Optional[str] = None,
                      out: Any = None, context: Optional[Context] = None) -> Any:
    """Rows sharded -> columns sharded: out [sum of R_s, n_r] = (x [R_s, k] of every rank, one below another) . weights[r]^T + bias.

    weights: pack_columns, or an array [n, k] that it divides, or a list of P arrays [n_d, k]. bias [n of all ranks]; x_scales [R_r] of an
    int8 x; int8_activations as in matmul. rows: R_s (default: as many for every rank as x has here). tile_rows 0: the plan's choice. dtype of
    the result: that of x, float32 for an int8 x, or "f32", "bf16", "f16", "i32".
    """
    everybody = lambda here, given: sum(given) if given else here * communicator.world_size  # noqa: E731
    return _product("matmul_all_to_all", communicator, x, weights, rows, everybody, dtype, out, context,
                    {"bias": bias, "x_scales": x_scales}, int8_activations=int8_activations, tile_rows=tile_rows)


@public(torch=_torch_forms)
def all_to_all_matmul(communicator: Communicator, x: Any, weights: Any, *, bias: Any = None, int8_activations: bool = False,
                      rows: Any = None, inputs: Any = None, exchanged: Any = None, tile_rows: int = 0, dtype: Optional[str] = None,
                      out: Any = None, context: Optional[Context] = None) -> Any:
    """Columns sharded -> rows sharded: out [R_r, n] = (my rows of the x [sum of R_s, inputs of s] of every rank, side by side) .
    weights^T + bias.

    weights [n, sum of inputs]. rows: R_s (default: the rows of x divided, the first ranks one more if need be). inputs: columns of each
    rank's x (default: as many as here). exchanged: an array [R_r, sum of inputs] to which the rows that are multiplied are written.
    """
    return _product("all_to_all_matmul", communicator, x, weights, rows, _my_rows(communicator), dtype, out, context, {"bias": bias},
                    exchanged, inputs, int8_activations, tile_rows)


@public(torch=_torch_forms)
def all_gather_matmul(communicator: Communicator, x: Any, weights: Any, *, bias: Any = None, x_scales: Any = None,
                      int8_activations: bool = False, rows: Any = None, exchanged: Any = None, tile_rows: int = 0,
                      dtype: Optional[str] = None, out: Any = None, context: Optional[Context] = None) -> Any:
    """out [sum of R_s, n] = (the x [R_s, k] of all ranks, one below another) . weights^T + bias; exchanged: an array [sum of R_s, k] for
    that x. rows: R_s (default: as many for every rank as x has here)."""
    everybody = lambda here, given: sum(given) if given else here * communicator.world_size  # noqa: E731
    return _product("all_gather_matmul", communicator, x, weights, rows, everybody, dtype, out, context,
                    {"bias": bias, "x_scales": x_scales}, exchanged, None, int8_activations, tile_rows)


@public(torch=_torch_forms)
def matmul_reduce_scatter(communicator: Communicator, x: Any, weights: Any, *, bias: Any = None, x_scales: Any = None,
                          residual: Any = None, int8_activations: bool = False, rows: Any = None, tile_rows: int = 0,
                          dtype: Optional[str] = None, out: Any = None, context: Optional[Context] = None) -> Any:
    """out [R_r, n] = residual + my rows of the sum over ranks of x [sum of R_s, k_r] . weights^T [n, k_r] + bias.

    bias and residual are added once and are the same on all ranks. rows: R_s (default: the rows of x divided).
    """
    return _product("matmul_reduce_scatter", communicator, x, weights, rows, _my_rows(communicator), dtype, out, context,
                    {"bias": bias, "x_scales": x_scales, "residual": residual}, None, None, int8_activations, tile_rows)


@public
def matmul_all_reduce(communicator: Communicator, x: Any, weights: Any, *, bias: Any = None, x_scales: Any = None,
                      residual: Any = None, int8_activations: bool = False, tile_rows: int = 0, dtype: Optional[str] = None,
                      out: Any = None, context: Optional[Context] = None) -> Any:
    """out [m, n] = residual + the sum over ranks of x [m, k_r] . weights^T [n, k_r] + bias, the same on all ranks; bias and residual are
    added once and are the same on all ranks."""
    return _product("matmul_all_reduce", communicator, x, weights, None, lambda here, given: here, dtype, out, context,
                    {"bias": bias, "x_scales": x_scales, "residual": residual}, None, None, int8_activations, tile_rows)


def _my_rows(communicator: Communicator) -> Any:
    return lambda here, given: (given or _shares(here, communicator))[communicator.rank]


# ---- Experts spread over ranks: 0 .. E - 1 in ascending order, E_s of them on rank s (experts=; default: divided) -----


def _room(x: Any, out: Any, capacity: Optional[int], width: int, dtype: str) -> Any:
    """Rows for what arrives."""
    if (out is None) == (capacity is None):
        raise ValueError(f"out and capacity are {'both' if out is not None else 'not'} given; one of them says how many rows may arrive")
    if out is not None:
        return out
    if capacity < 0:
        raise ValueError(f"capacity is {capacity}, must not be negative")
    new = empty(x, (capacity, width), dtype)
    memory = getattr(new, "array", new)
    memory.zero_() if hasattr(memory, "zero_") else memory.fill(0)
    return new


def _arrived(x: Any, experts: int, sources: int) -> Tuple[Any, Any]:
    return empty(x, (experts,), "i64"), empty(x, (experts, sources), "i64")


def _cut(rows: Any, expert_tokens: Any, rank_tokens: Any) -> Dispatched:
    arrived = int(expert_tokens.sum())
    cut = type(rows)(rows.array[:arrived], rows.dtype) if hasattr(rows, "array") else rows[:arrived]
    return Dispatched(cut, expert_tokens, rank_tokens)


@public
def moe_dispatch(communicator: Communicator, x: Any, topk_ids: Any, num_experts: int, *, experts: Any = None,
                 capacity: Optional[int] = None, tile_rows: int = 0, out: Any = None, context: Optional[Context] = None) -> Dispatched:
    """Rows of x [tokens, hidden] to the ranks that own their experts, topk_ids int [tokens, top_k] in [-1, num_experts).

    out [capacity, hidden], or capacity alone, has room for what arrives; the result's rows are the part of it that did. An id of -1 goes
    nowhere.
    """
    tensor, shards = rank(view(x), x, 2, "[tokens, hidden]"), _sizes(experts, "experts")
    rows = _room(x, out, capacity, tensor.shape[1], tensor.dtype)
    owned = shards if len(shards) == communicator.world_size else _shares(num_experts, communicator)
    tokens = _arrived(x, max(owned[communicator.rank], 0), communicator.world_size)
    _call("moe_dispatch", context, communicator, {"x": x, "topk_ids": topk_ids},
          {"experts": shards, "num_experts": num_experts, "tile_rows": tile_rows},
          {"rows": rows, "expert_tokens": tokens[0], "rank_tokens": tokens[1]})
    return _cut(rows, *tokens)


@public
def moe_combine(communicator: Communicator, rows: Any, topk_ids: Any, num_experts: int, *, topk_weights: Any = None,
                residual: Any = None, experts: Any = None, tile_rows: int = 0, out: Any = None,
                context: Optional[Context] = None) -> Any:
    """out[t] = residual[t] + sum over k of topk_weights[t, k] * (the row of slot t, k), in ascending k; rows as moe_dispatch gave them
    [arrived, hidden], topk_ids [tokens, top_k] as it took them. Without topk_weights these are 1."""
    tensor = rank(view(rows, "rows"), rows, 2, "[rows, hidden]")
    if out is None:
        out = empty(rows, (integers(topk_ids, "topk_ids").shape[0], tensor.shape[1]), tensor.dtype)
    _call("moe_combine", context, communicator,
          {"rows": rows, "topk_ids": topk_ids, "topk_weights": topk_weights, "residual": residual},
          {"experts": _sizes(experts, "experts"), "num_experts": num_experts, "tile_rows": tile_rows}, {"out": out})
    return out


def _stack(weight: Any) -> Any:
    return weight if isinstance(weight, _PACKED) else rank(view(weight, "weight"), weight, 3, "[E, n, k] (or a packed stack)")


@public
def all_to_allv_grouped_matmul(communicator: Communicator, x: Any, send_counts: Any, weight: Any, *, experts: Any = None,
                               bias: Any = None, activation: str = "none", x_scales: Any = None, int8_activations: bool = False,
                               exchanged: Any = None, capacity: Optional[int] = None, tile_rows: int = 0, dtype: Optional[str] = None,
                               out: Any = None, context: Optional[Context] = None) -> Any:
    """Rows of x [sum of send_counts, k], sorted by expert, to their experts, times these experts' weights as they arrive.

    send_counts int [E]: rows of each expert. weight [E_r, n, k] or a packed stack (matmul.pack_stack ..), bias [E_r, n]. out [capacity, n],
    or capacity alone, has room for what arrives: rows by expert, then by rank; those behind stay as they are (zeros, where out is made
    here). exchanged: an array of as many rows for x as it arrives.
    """
    tensor, stack = rank(view(x), x, 2, "[rows, k]"), _stack(weight)
    n = stack.n if isinstance(stack, _PACKED) else stack.shape[1]
    width = n // 2 if activation.startswith("swiglu") else n
    out = _room(x, out, capacity, width, _kind(x, tensor, dtype))
    _call("all_to_allv_grouped_matmul", context, communicator,
          {"x": x, "send_counts": send_counts, "weight": stack, "bias": bias, "x_scales": x_scales},
          {"experts": _sizes(experts, "experts"), "activation": activation, "int8_activations": int8_activations,
           "tile_rows": tile_rows}, {"out": out, "exchanged": exchanged})
    return out


@public
def grouped_matmul_all_to_allv(communicator: Communicator, x: Any, send_counts: Any, weight: Any, *, experts: Any = None,
                               bias: Any = None, int8_activations: bool = False, tile_rows: int = 0, dtype: Optional[str] = None,
                               out: Any = None, context: Optional[Context] = None) -> Any:
    """Rows of my experts [rows, k], as all_to_allv_grouped_matmul gave them, times their weights, back to where the tokens are:
    out [sum of send_counts, n], sorted by expert; send_counts as that function took them."""
    tensor, stack = rank(view(x), x, 2, "[rows, k]"), _stack(weight)
    if out is None:
        n = stack.n if isinstance(stack, _PACKED) else stack.shape[1]
        back = sum(max(count, 0) for count in _sizes(send_counts, "send_counts"))
        out = empty(x, (back, n), _kind(x, tensor, dtype))
    _call("grouped_matmul_all_to_allv", context, communicator, {"x": x, "send_counts": send_counts, "weight": stack, "bias": bias},
          {"experts": _sizes(experts, "experts"), "activation": "none", "int8_activations": int8_activations, "tile_rows": tile_rows},
          {"out": out})
    return out


@public
def moe_layer_forward(communicator: Communicator, x: Any, gate_up: Any, down: Any, logits: Any = None, top_k: Optional[int] = None, *,
                      topk_ids: Any = None, topk_weights: Any = None, gate_up_bias: Any = None, down_bias: Any = None,
                      activation: str = "swiglu", scores: str = "softmax", gate_bias: Any = None, finished: Any = None,
                      renormalise: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20, num_groups: int = 1,
                      kept_groups: int = 1, group_score: str = "max", nan_is_error: bool = False, shared_gate_up: Any = None,
                      shared_down: Any = None, shared_gate: Any = None, residual: Any = None, num_experts: Optional[int] = None,
                      int8_activations: bool = False, experts: Any = None, tile_rows: int = 0, out: Any = None,
                      return_expert_tokens: bool = False, context: Optional[Context] = None) -> Any:
    """moe.moe_layer of this rank's tokens with experts that are spread over the ranks, with the bits that it has with
    batch_invariant=True where one process has all experts.

    gate_up, down, their biases: of this rank's E_r experts. logits [tokens, E] and num_experts count those of all ranks; the shared expert
    is whole on every rank. return_expert_tokens: (out, int64 [E_r]), slots of each of my experts. Other options: moe.moe_layer.
    """
    given = {"x": x, "gate_up": gate_up, "down": down, "logits": logits, "top_k": top_k, "topk_ids": topk_ids, "topk_weights": topk_weights,
             "up": None, "gate_up_bias": gate_up_bias, "down_bias": down_bias, "activation": activation, "scores": scores,
             "gate_bias": gate_bias, "finished": finished, "renormalise": renormalise, "routed_scaling_factor": routed_scaling_factor,
             "eps": eps, "num_groups": num_groups, "kept_groups": kept_groups, "group_score": group_score, "nan_is_error": nan_is_error,
             "shared_gate_up": shared_gate_up, "shared_down": shared_down, "shared_up": None, "shared_gate": shared_gate,
             "residual": residual, "num_experts": num_experts, "expert_begin": 0, "expert_end": None,
             "int8_activations": int8_activations, "batch_invariant": True}
    inputs, options = layer_call(given)
    tensor = inputs["x"]
    out = empty(x, tensor.shape, tensor.dtype) if out is None else out
    outputs = {"out": output(out)}
    if return_expert_tokens:
        stack = inputs["gate_up"]
        tokens = empty(x, (stack.count if isinstance(stack, _PACKED) else stack.shape[0],), "i64")
        outputs["expert_tokens"] = output(tokens)
    of_the_core(_core.moe_layer_of_ranks, LAYER_FIELDS, context or default_context(), communicator, inputs,
                {**options, "experts": _sizes(experts, "experts"), "tile_rows": tile_rows}, outputs)
    return (out, tokens) if return_expert_tokens else out


@public
def attention_to_ffn(communicator: Communicator, x: Any, topk_ids: Any = None, *, attention_ranks: int = 1, num_experts: int = 0,
                     experts: Any = None, weight: Any = None, bias: Any = None, capacity: Optional[int] = None, tile_rows: int = 0,
                     out: Any = None, context: Optional[Context] = None) -> Dispatched:
    """From ranks that attend (0 .. attention_ranks - 1) to those that are feed-forward networks (the others).

    x [tokens, k] and topk_ids [tokens, top_k] on ranks that attend; [0, k] and [0, top_k] on the others, where out [capacity, hidden] or
    capacity has room for what arrives (0 on those that attend). num_experts 0: no experts; an attention rank's tokens are divided over the
    feed-forward ranks, and weight [hidden, k] with bias [hidden] may be multiplied on the way. experts: of the feed-forward ranks.
    """
    tensor, shards = rank(view(x), x, 2, "[tokens, k]"), _sizes(experts, "experts")
    packed = _weight(weight, context)
    rows = _room(x, out, capacity, tensor.shape[1] if packed is None else packed.n, tensor.dtype)
    place, networks = communicator.rank - attention_ranks, communicator.world_size - attention_ranks
    if place < 0 or networks < 1:
        owned = 0
    elif num_experts == 0:
        owned = 1
    else:
        owned = shards[place] if len(shards) == networks else _core.share_of(num_experts, networks, place)
    tokens = _arrived(x, max(owned, 0), communicator.world_size)
    _call("attention_to_ffn", context, communicator, {"x": x, "topk_ids": topk_ids, "weight": packed, "bias": bias},
          {"attention_ranks": attention_ranks, "num_experts": num_experts, "experts": shards, "tile_rows": tile_rows},
          {"rows": rows, "expert_tokens": tokens[0], "rank_tokens": tokens[1]})
    return _cut(rows, *tokens)


@public
def ffn_to_attention(communicator: Communicator, rows: Any, topk_ids: Any = None, *, attention_ranks: int = 1, num_experts: int = 0,
                     experts: Any = None, topk_weights: Any = None, residual: Any = None, weight: Any = None, bias: Any = None,
                     tokens: Optional[int] = None, tile_rows: int = 0, out: Any = None, context: Optional[Context] = None) -> Any:
    """The way back of attention_to_ffn, as moe_combine: rows [arrived, k] on the feed-forward ranks ([0, k] on the others), out
    [tokens, hidden] on those that attend, where tokens says how many if neither topk_ids nor out does. weight [hidden, k] and bias, without
    experts: a product on the way, of the feed-forward ranks."""
    tensor, packed = rank(view(rows, "rows"), rows, 2, "[rows, k]"), _weight(weight, context)
    if out is None:
        if tokens is None and communicator.rank < attention_ranks:
            if topk_ids is None:
                raise ValueError("tokens, topk_ids and out are not given; one of them says how many tokens come back")
            tokens = integers(topk_ids, "topk_ids").shape[0]
        out = empty(rows, (max(tokens or 0, 0), tensor.shape[1] if packed is None else packed.n), tensor.dtype)
    _call("ffn_to_attention", context, communicator,
          {"rows": rows, "topk_ids": topk_ids, "topk_weights": topk_weights, "residual": residual, "weight": packed, "bias": bias},
          {"attention_ranks": attention_ranks, "num_experts": num_experts, "experts": _sizes(experts, "experts"),
           "tile_rows": tile_rows}, {"out": out})
    return out


# ---- Sequences spread over ranks -------------------------------------------------------------------------------------


@public(torch=_torch_forms)
def sequence_to_heads(communicator: Communicator, x: Any, *, rows: Any = None, heads: Any = None, tile_rows: int = 0, out: Any = None,
                      context: Optional[Context] = None) -> Any:
    """x [R_r, sum of H_s, head_dim], any dtype -> out [sum of R_s, H_r, head_dim]: my heads of all rows. rows: R_s (default: as many for
    every rank as x has here); heads: H_s (default: all heads divided). Its gradient is heads_to_sequence."""
    tensor, given = rank(view(x), x, 3, "[rows, heads, head_dim]"), _sizes(rows, "rows")
    if out is None:
        mine, ranks = _sizes(heads, "heads"), communicator.world_size
        mine = mine if len(mine) == ranks else _shares(tensor.shape[1], communicator)
        every = sum(given) if len(given) == ranks else tensor.shape[0] * ranks
        out = empty(x, (max(every, 0), max(mine[communicator.rank], 0), tensor.shape[2]), tensor.dtype)
    _call("sequence_to_heads", context, communicator, {"x": x},
          {"rows": given, "heads": _sizes(heads, "heads"), "tile_rows": tile_rows}, {"out": out})
    return out


@public(torch=_torch_forms)
def heads_to_sequence(communicator: Communicator, x: Any, *, rows: Any = None, heads: Any = None, tile_rows: int = 0, out: Any = None,
                      context: Optional[Context] = None) -> Any:
    """The way back: x [sum of R_s, H_r, head_dim] -> out [R_r, sum of H_s, head_dim]. rows: default the rows of x divided; heads: default
    as many for every rank as x has here. Its gradient is sequence_to_heads."""
    tensor, given, shared = rank(view(x), x, 3, "[rows, heads, head_dim]"), _sizes(rows, "rows"), _sizes(heads, "heads")
    if out is None:
        ranks = communicator.world_size
        mine = given if len(given) == ranks else _shares(tensor.shape[0], communicator)
        every = sum(shared) if shared else tensor.shape[1] * ranks
        out = empty(x, (max(mine[communicator.rank], 0), max(every, 0), tensor.shape[2]), tensor.dtype)
    _call("heads_to_sequence", context, communicator, {"x": x}, {"rows": given, "heads": shared, "tile_rows": tile_rows}, {"out": out})
    return out


def _ring(rows: Any, softmax_scale: Optional[float], causal: bool, window_left: Optional[int], window_right: Optional[int],
          softcap: float, order: str, tile_rows: int) -> Dict[str, Any]:
    return {"softmax_scale": softmax_scale, "causal": causal, "window_left": window_left, "window_right": window_right,
            "softcap": softcap, "order": order, "rows": _sizes(rows, "rows"), "tile_rows": tile_rows}


@public(torch=_torch_forms)
def ring_attention_forward(communicator: Communicator, query: Any, key: Any, value: Any, *, softmax_scale: Optional[float] = None,
                           causal: bool = False, window_left: Optional[int] = None, window_right: Optional[int] = None,
                           softcap: float = 0.0, order: str = "contiguous", rows: Any = None, tile_rows: int = 0,
                           return_lse: bool = False, out: Any = None, context: Optional[Context] = None) -> Any:
    """Attention of my queries [batch, num_heads, R_r, head_dim] with the keys and values [batch, num_kv_heads, R_s, ..] of all ranks, exact.

    Masks and windows count in tokens of the whole sequence. order: "contiguous", or "zigzag": of 2 P chunks rank r has chunks r and
    2 P - 1 - r, so that under a causal mask all ranks have the same work. rows: R_s (default: as many as here). out [batch, num_heads, R_r,
    value_head_dim] in the dtype of query; return_lse: (out, softmax_lse float32 [batch, num_heads, R_r]).
    """
    q, v = (rank(view(t, n), t, 4, "[batch, heads, rows, head_dim]") for t, n in ((query, "query"), (value, "value")))
    if out is None:
        out = empty(query, (*q.shape[:3], v.shape[3]), q.dtype)
    lse = empty(query, q.shape[:3], "f32") if return_lse else None
    _call("ring_attention_forward", context, communicator, {"query": query, "key": key, "value": value},
          _ring(rows, softmax_scale, causal, window_left, window_right, softcap, order, tile_rows), {"out": out, "softmax_lse": lse})
    return (out, lse) if return_lse else out


@public
def ring_attention_backward(communicator: Communicator, grad_out: Any, query: Any, key: Any, value: Any, attention_out: Any,
                            softmax_lse: Any, *, softmax_scale: Optional[float] = None, causal: bool = False,
                            window_left: Optional[int] = None, window_right: Optional[int] = None, softcap: float = 0.0,
                            order: str = "contiguous", rows: Any = None, tile_rows: int = 0,
                            context: Optional[Context] = None) -> RingGradients:
    """Gradients of my query, key and value, in their dtypes; attention_out and softmax_lse as ring_attention_forward gave them, options as
    it took them."""
    found = RingGradients(*(empty(t, rank(view(t, n), t, 4, "[batch, heads, rows, head_dim]").shape, view(t).dtype)
                            for t, n in ((query, "query"), (key, "key"), (value, "value"))))
    _call("ring_attention_backward", context, communicator,
          {"query": query, "key": key, "value": value, "attention_out": attention_out, "softmax_lse": softmax_lse, "grad_out": grad_out},
          _ring(rows, softmax_scale, causal, window_left, window_right, softcap, order, tile_rows),
          {"grad_query": found.query, "grad_key": found.key, "grad_value": found.value})
    return found

"""What the functions of moe give, as tuples with names: for arrays and for the operators of torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gating(NamedTuple):
    """What moe_gating gives with return_scores."""

    topk_ids: Any  # int32 [tokens, top_k], best first; -1 of finished tokens
    topk_weights: Any  # float32 [tokens, top_k]
    scores: Any  # float32 [tokens, num_experts]


class Routing(NamedTuple):
    """Where the rows of all slots lie."""

    row_of_slot: Any  # int32 or int64 [tokens, top_k], -1: no row
    slot_of_row: Any  # [rows], -1: a row of nobody
    expert_tokens: Any  # int64 [experts of the range]


class FinalizeGradients(NamedTuple):
    """None: not wanted."""

    expanded: Any
    topk_weights: Any
    bias: Any


class Layer(NamedTuple):
    """What moe_layer gives with return_routes."""

    out: Any  # [tokens, hidden]
    topk_ids: Any  # int32 [tokens, top_k], what gating chose; None where ids were given
    topk_weights: Any  # float32 [tokens, top_k], likewise
    expert_tokens: Any  # int64 [experts of the range]: slots of each


class LayerGradients(NamedTuple):
    """What moe_layer_backward gives; None: of what was not given."""

    x: Any
    logits: Any
    topk_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any
    shared_gate_up: Any
    shared_down: Any
    shared_gate: Any

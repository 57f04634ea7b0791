"""Attention over chosen keys: npu_sparse_flash_attention, npu_lightning_indexer, npu_block_sparse_attention.

What is left open by the device's pages: rows that see no key are zeros with max -inf and sum 0; unused indices are -1; of equal
scores the lower index comes first; placeholders have 0 elements. npu_sparse_flash_attention takes the maximum of a row from its
logarithm of the sum: softmax_max holds that (a sink included), and softmax_sum is 1 (0 where no key is seen).
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..flash_attention import BlockMask, flash_attention, lightning_indexer, sparse_flash_attention
from ._arguments import integers, running, starts_tensor
from ._edge import device_function, is_tensor, missing

_FULL = 9223372036854775807


def _check_rule(mode: Optional[int], pre: Optional[int], following: Optional[int]) -> None:
    if mode not in (0, 3):
        raise ValueError(f"sparse_mode is {mode}, must be 0 or 3")
    if (pre, following) != (_FULL, _FULL):
        raise ValueError(f"pre_tokens and next_tokens are {pre} and {following}, must be their defaults, 2^63 - 1")


def _totals(name: str, lengths: Any) -> Tensor:
    if lengths is None:
        raise ValueError(f"{name} is not given, but TND needs it: running totals without a leading 0")
    return starts_tensor(integers(name, lengths))


def _lengths(options: Dict[str, Any], q_layout: str, kv_layout: str, q_lengths: Any, kv_lengths: Any, table: Optional[Tensor],
             names: Tuple[str, str]) -> None:
    """The lengths of both sides, as options of the core."""
    for name, layout, allowed in (("layout_query", q_layout, ("BSND", "TND")), ("layout_kv", kv_layout, ("BSND", "TND", "PA_BSND"))):
        if layout not in allowed:
            raise ValueError(f'{name} is "{layout}", must be one of {", ".join(allowed)}')
    if q_layout == "TND":
        options["cu_seqlens_q"] = _totals(names[0], q_lengths)
    if kv_layout == "TND":
        options["cu_seqlens_k"] = _totals(names[1], kv_lengths)
    elif kv_lengths is not None:
        options["kv_lengths"] = kv_lengths
    if kv_layout == "PA_BSND":
        if table is None or kv_lengths is None:
            raise ValueError(f"PA_BSND needs block_table and {names[1]}")
        options["block_table"] = table
    elif table is not None:
        raise ValueError("block_table goes with PA_BSND")


def _heads(tensor: Optional[Tensor], layout: str) -> Optional[Tensor]:
    """[B, N, S, D] of BSND; TND and pages as they are."""
    return tensor.transpose(1, 2) if tensor is not None and layout == "BSND" else tensor


def _packed(query: List[Optional[Tensor]], lengths: Sequence[int]) -> Tuple[List[Optional[Tensor]], Tensor]:
    """Queries [B, S, ..] of several lengths as tokens."""
    inside = torch.arange(query[0].shape[1])[None] < torch.tensor(lengths)[:, None]
    return [None if tensor is None else tensor[inside] for tensor in query], inside


def _sparse(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float, table: Optional[Tensor], q_lengths: Any, kv_lengths: Any,
            ropes: Tuple[Optional[Tensor], Optional[Tensor]], block: int, q_layout: str, kv_layout: str, mode: Optional[int],
            sinks: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """(out in the layout of query, lse [B, N, S] or [N, T])."""
    options: Dict[str, Any] = dict(sparse_block_size=block, softmax_scale=float(scale), causal=mode == 3, return_lse=True)
    inside = None
    if q_layout == "BSND" and q_lengths is not None:
        lengths = integers("actual_seq_lengths_query", q_lengths)
        if any(length != query.shape[1] for length in lengths):
            whole = query
            (query, indices, rope), inside = _packed([query, indices, ropes[0]], lengths)
            ropes, q_layout, q_lengths = (rope, ropes[1]), "TND", running(lengths)
    _lengths(options, q_layout, kv_layout, q_lengths, kv_lengths, table, ("actual_seq_lengths_query", "actual_seq_lengths_kv"))
    if sinks is not None:
        options["sinks"] = sinks.float()
    if ropes[0] is not None:
        options.update(query_rope=_heads(ropes[0], q_layout), key_rope=_heads(ropes[1], kv_layout))
    out, lse = sparse_flash_attention(_heads(query, q_layout), _heads(key, kv_layout), _heads(value, kv_layout), indices, **options)
    if inside is not None:
        spread, rows = out.new_zeros((*whole.shape[:-1], out.shape[-1])), lse.new_full((*inside.shape, lse.shape[0]), -torch.inf)
        spread[inside], rows[inside] = out, lse.t()
        return spread, rows.transpose(1, 2)
    return (out.transpose(1, 2).contiguous() if q_layout == "BSND" else out), lse


@device_function
def npu_sparse_flash_attention(query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, *,
                               block_table: Optional[Tensor] = None, actual_seq_lengths_query: Optional[Tensor] = None,
                               actual_seq_lengths_kv: Optional[Tensor] = None, query_rope: Optional[Tensor] = None,
                               key_rope: Optional[Tensor] = None, sparse_block_size: int = 1, layout_query: str = "BSND",
                               layout_kv: str = "BSND", sparse_mode: int = 3, pre_tokens: int = 9223372036854775807,
                               next_tokens: int = 9223372036854775807, attention_mode: int = 0, return_softmax_lse: bool = False,
                               sinks: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum) of attention over the keys that sparse_indices name; the values are those of the keys' rows.
    attention_mode must be 2."""
    is_tensor("sparse_indices", sparse_indices)
    if attention_mode != 2:
        raise ValueError(f"attention_mode is {attention_mode}, but only 2 (MLA absorbed) is supported")
    _check_rule(sparse_mode, pre_tokens, next_tokens)
    out, lse = _sparse(query, key, value, sparse_indices, scale_value, block_table, actual_seq_lengths_query, actual_seq_lengths_kv,
                       (query_rope, key_rope), sparse_block_size, layout_query, layout_kv, sparse_mode, sinks)
    if not return_softmax_lse:
        none = out.new_empty(0, dtype=torch.float32)
        return out, none, none.clone()
    rows = (lse.transpose(1, 2)[:, None] if lse.dim() == 3 else lse.t()[None]).detach().contiguous()
    return out, rows, (rows != -torch.inf).to(torch.float32)


@device_function
def npu_sparse_flash_attention_grad(query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, d_out: Tensor, out: Tensor,
                                    softmax_max: Tensor, softmax_sum: Tensor, scale_value: float, sparse_block_size: int,
                                    query_rope: Optional[Tensor] = None, key_rope: Optional[Tensor] = None,
                                    actual_seq_qlen: Optional[Tensor] = None, actual_seq_kvlen: Optional[Tensor] = None,
                                    layout: Optional[str] = "BSND", sparse_mode: Optional[int] = 3,
                                    pre_tokens: Optional[int] = 9223372036854775807, next_tokens: Optional[int] = 9223372036854775807,
                                    attention_mode: Optional[int] = 0) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dq_rope, dk_rope); dk and dv apart, absent ropes with 0 elements. The forward is computed once more."""
    if attention_mode != 2:
        raise ValueError(f"attention_mode is {attention_mode}, but only 2 (MLA absorbed) is supported")
    _check_rule(sparse_mode, pre_tokens, next_tokens)
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value, query_rope, key_rope) if tensor is not None]
    with torch.enable_grad():
        again, _ = _sparse(*inputs[:3], sparse_indices, scale_value, None, actual_seq_qlen, actual_seq_kvlen,
                           (inputs[3], inputs[4]) if query_rope is not None else (None, None), sparse_block_size, layout or "BSND", layout or "BSND",
                           sparse_mode, None)
    found = list(torch.autograd.grad(again, inputs, d_out.detach()))
    return tuple(found + [query.new_empty(0)] * (5 - len(found)))  # type: ignore[return-value]


# ---- the indexer -----------------------------------------------------------------------------------------------------


def _indexer_shapes(query: Tensor, key: Tensor, weights: Tensor, *, layout_query: str = "BSND", layout_key: str = "BSND",
                    sparse_count: int = 2048, return_value: bool = False, **_: Any) -> Tuple[Tensor, Tensor]:
    shape = (*query.shape[:-2], key.shape[1 if layout_key == "TND" else 2], sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape if return_value else (0,))


@device_function(fake=_indexer_shapes)
def npu_lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: Optional[Tensor] = None,
                          actual_seq_lengths_key: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
                          layout_query: str = "BSND", layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3,
                          pre_tokens: int = 9223372036854775807, next_tokens: int = 9223372036854775807,
                          return_value: bool = False) -> Tuple[Tensor, Tensor]:
    """(indices int32, values): the sparse_count keys with the largest scores of each query, best first, then -1."""
    _check_rule(sparse_mode, pre_tokens, next_tokens)
    options: Dict[str, Any] = dict(causal=sparse_mode == 3, return_values=True,
                                   values_dtype={torch.bfloat16: "bf16", torch.float16: "f16"}.get(query.dtype, "f32"))
    _lengths(options, layout_query, layout_key, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
             ("actual_seq_lengths_query", "actual_seq_lengths_key"))
    if layout_query == "BSND" and actual_seq_lengths_query is not None:
        options["query_lengths"] = actual_seq_lengths_query
    given = [tensor.detach() for tensor in (query, key, weights)]
    weights = given[2].transpose(1, 2) if layout_query == "BSND" else given[2]
    found = lightning_indexer(_heads(given[0], layout_query), _heads(given[1], layout_key), weights, sparse_count, **options)
    return found.indices, found.values if return_value else found.values.new_empty(0)


@device_function
def npu_lightning_indexer_grad(query: Tensor, key: Tensor, dy: Tensor, sparse_indices: Tensor, weights: Tensor,
                               actual_seq_lengths_query: Optional[Tensor] = None, actual_seq_lengths_key: Optional[Tensor] = None,
                               layout: Optional[str] = "BSND", sparse_mode: Optional[int] = 3,
                               pre_tokens: Optional[int] = 9223372036854775807,
                               next_tokens: Optional[int] = 9223372036854775807) -> Tuple[Tensor, Tensor, Tensor]:
    """Not implemented: the core's indexer has no gradient."""
    missing("npu_lightning_indexer_grad", "the core's lightning_indexer has no gradient")


# ---- block masks -----------------------------------------------------------------------------------------------------


def _block_call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, block_shape: Sequence[int], layouts: Tuple[str, str], kv_heads: int,
                scale: float, q_lengths: Any, kv_lengths: Any) -> Tuple[Tensor, Tensor]:
    """(out in the layout of query, lse [B, N, S] or [N, T])."""
    if layouts[0] != layouts[1] or layouts[0] not in ("TND", "BNSD"):
        raise ValueError(f'q_input_layout and kv_input_layout are "{layouts[0]}" and "{layouts[1]}", must both be TND or BNSD')
    if (q_lengths is None) != (kv_lengths is None) or (layouts[0] == "TND" and q_lengths is None):
        raise ValueError("actual_seq_lengths must be specified: the lengths of queries and of keys, of each sequence")
    if len(block_shape) != 2:
        raise ValueError(f"block_shape is {list(block_shape)}, must be [query rows, key columns]")
    heads = 2 if layouts[0] == "TND" else 1
    if key.shape[heads - (layouts[0] == "TND")] != kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}, but key is {list(key.shape)} in {layouts[0]}")
    options: Dict[str, Any] = dict(softmax_scale=float(scale), return_lse=True)
    if mask.dim() != 4:
        raise ValueError(f"block_sparse_mask is {list(mask.shape)}, must be [batch, heads, query blocks, key blocks]")
    seen = mask.bool()
    rows = torch.nn.functional.pad(seen.sum(-1).reshape(-1).cumsum(0), (1, 0)).to(torch.int64)
    batch, count, blocks = seen.shape[:3]
    starts = (torch.arange(batch * count).view(batch, count, 1) * blocks) + torch.arange(blocks + 1)
    options["block_mask"] = BlockMask(rows[starts], seen.nonzero()[:, 3].contiguous(), int(block_shape[0]), int(block_shape[1]))
    if layouts[0] == "TND":
        q_list, kv_list = integers("actual_seq_lengths", q_lengths), integers("actual_seq_lengths_kv", kv_lengths)
        options.update(cu_seqlens_q=starts_tensor(running(q_list)), cu_seqlens_k=starts_tensor(running(kv_list)))
    elif q_lengths is not None:
        if any(length != query.shape[2] for length in q_lengths):
            missing("npu_block_sparse_attention", "lengths of queries shorter than the tensor, in BNSD")
        options["kv_lengths"] = integers("actual_seq_lengths_kv", kv_lengths)
    return flash_attention(query, key, value, **options)


@device_function
def npu_block_sparse_attention(query: Tensor, key: Tensor, value: Tensor, block_sparse_mask: Tensor, block_shape: Sequence[int], *,
                               q_input_layout: str = "TND", kv_input_layout: str = "TND", num_key_value_heads: int = 1,
                               scale_value: float = 0.0, inner_precise: int = 1, actual_seq_lengths: Optional[Sequence[int]] = None,
                               actual_seq_lengths_kv: Optional[Sequence[int]] = None,
                               softmax_lse_flag: Optional[int] = 0) -> Tuple[Tensor, Tensor]:
    """(out, lse) over the blocks whose mask is 1. scale_value is 0 (all seen keys weigh the same) unless it is given: pass D^-0.5.
    Lengths are one for each sequence, in TND too."""
    out, lse = _block_call(query, key, value, block_sparse_mask, block_shape, (q_input_layout, kv_input_layout), num_key_value_heads, scale_value,
                           actual_seq_lengths, actual_seq_lengths_kv)
    return out, (lse.t() if q_input_layout == "TND" else lse).unsqueeze(-1).contiguous()


@device_function
def npu_block_sparse_attention_backward(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attention_out: Tensor, softmax_lse: Tensor,
                                        block_sparse_mask: Tensor, block_shape: Optional[Sequence[int]],
                                        actual_seq_lengths: Optional[Sequence[int]], actual_seq_lengths_kv: Optional[Sequence[int]],
                                        q_input_layout: str, kv_input_layout: str, num_key_value_heads: int,
                                        scale_value: float) -> Tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). The forward is computed once more."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        out, _ = _block_call(*inputs, block_sparse_mask, block_shape or (), (q_input_layout, kv_input_layout), num_key_value_heads, scale_value,
                             actual_seq_lengths, actual_seq_lengths_kv)
    return torch.autograd.grad(out, inputs, d_out.detach())  # type: ignore[return-value]

"""Tokens to the experts and back by Megatron's forms: npu_moe_token_permute and unpermute, by ids or by a routing map, with gradients.

sorted_indices[t * K + k] is the row of token t's k-th choice.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..moe import moe_finalize, moe_finalize_backward, moe_permute
from ._arguments import wide
from ._edge import device_function, missing
from ._rows import routing, within

_PADDED = "padded_mode: its meaning is not stated for the device"


def _by_token(indices: Tensor, tokens: int, name: str) -> Tensor:
    """[tokens, K]"""
    if tokens == 0 or indices.numel() % tokens:
        if indices.numel() == 0:
            return indices.reshape(tokens, 0)
        raise ValueError(f"{name} has {indices.numel()} places, which are not those of {tokens} tokens")
    return indices.reshape(tokens, -1)


@device_function
def npu_moe_token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: Optional[int] = None,
                          padded_mode: bool = False) -> Tuple[Tensor, Tensor]:
    """(rows expert after expert, sorted_indices int32 [tokens * K])."""
    if padded_mode:
        missing("npu_moe_token_permute", _PADDED)
    if indices.dim() not in (1, 2) or indices.shape[0] != tokens.shape[0]:
        raise ValueError(f"indices is {list(indices.shape)}, must be [{tokens.shape[0]}] or [{tokens.shape[0]}, K]")
    ids = indices if indices.dim() == 2 else indices.unsqueeze(1)
    found = routing(ids)
    count = ids.numel()
    if num_out_tokens:
        count = min(num_out_tokens, count) if num_out_tokens > 0 else max(count + num_out_tokens, 0)
    rows = found.row_of_slot
    return moe_permute(tokens, found.slot_of_row[:count], ids.shape[1]), rows.reshape(-1).to(torch.int32)


def _unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Optional[Tensor], padded_mode: bool, name: str) -> Tensor:
    if padded_mode:
        missing(name, _PADDED)
    top_k = 1 if probs is None else probs.shape[1]
    rows = _by_token(sorted_indices, sorted_indices.numel() // max(top_k, 1), "sorted_indices")
    if probs is not None and probs.shape != rows.shape:
        raise ValueError(f"probs is {list(probs.shape)}, but sorted_indices has {sorted_indices.numel()} places")
    return moe_finalize(permuted_tokens, within(rows, permuted_tokens.shape[0]), probs)


@device_function
def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Optional[Tensor] = None, padded_mode: bool = False,
                            restore_shape: Optional[Sequence[int]] = None) -> Tensor:
    """out[t] = sum over k of probs[t, k] * its row; without probs K is 1. Rows that a permute left out count as zeros."""
    return _unpermute(permuted_tokens, sorted_indices, probs, padded_mode, "npu_moe_token_unpermute")


@device_function
def _npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Optional[Tensor] = None, padded_mode: bool = False,
                             restore_shape: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """npu_moe_token_unpermute, and what its backward needs: permuted_tokens."""
    return _unpermute(permuted_tokens, sorted_indices, probs, padded_mode, "_npu_moe_token_unpermute"), permuted_tokens


@device_function
def npu_moe_token_permute_grad(tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor,
                               padded_mode: bool = False) -> Tensor:
    """The gradient of tokens."""
    if padded_mode:
        missing("npu_moe_token_permute_grad", _PADDED)
    rows = _by_token(sorted_indices, tokens.shape[0], "sorted_indices")
    return moe_finalize(grad_permuted_tokens.detach(), within(rows, grad_permuted_tokens.shape[0]))


@device_function
def npu_moe_token_permute_grad_v2(grad_permuted_tokens: Tensor, sorted_indices: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype,
                                  num_topK: int, padded_mode: bool = False) -> Tensor:
    """The gradient of tokens, in their dtype."""
    if padded_mode:
        missing("npu_moe_token_permute_grad_v2", _PADDED)
    if sorted_indices.numel() != tokens_size_0 * num_topK:
        raise ValueError(f"sorted_indices has {sorted_indices.numel()} places, but {tokens_size_0} tokens of {num_topK} have "
                         f"{tokens_size_0 * num_topK}")
    rows = sorted_indices.view(tokens_size_0, num_topK)
    return moe_finalize(grad_permuted_tokens.detach(), within(rows, grad_permuted_tokens.shape[0])).to(tokens_dtype)


def _unpermute_grad(permuted_tokens: Tensor, grad: Tensor, sorted_indices: Tensor, probs: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    rows = within(_by_token(sorted_indices, grad.shape[0], "sorted_indices"), permuted_tokens.shape[0])
    given = moe_finalize_backward(grad.detach(), permuted_tokens.detach(), rows, None if probs is None else probs.detach())
    return given.expanded, grad.new_empty(0) if probs is None else given.topk_weights


@device_function
def npu_moe_token_unpermute_grad(permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor,
                                 probs: Optional[Tensor] = None, padded_mode: bool = False,
                                 restore_shape: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """(gradient of permuted_tokens, gradient of probs)."""
    if padded_mode:
        missing("npu_moe_token_unpermute_grad", _PADDED)
    return _unpermute_grad(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs)


@device_function
def npu_moe_token_unpermute_grad_v2(grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, permuted_tokens_size_0: int,
                                    permuted_tokens_dtype: torch.dtype, probs: Optional[Tensor] = None, padded_mode: bool = False,
                                    restore_shape: Optional[Sequence[int]] = None,
                                    permuted_tokens: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """(gradient of permuted_tokens, gradient of probs); permuted_tokens is needed with probs alone."""
    if padded_mode:
        missing("npu_moe_token_unpermute_grad_v2", _PADDED)
    if probs is not None and permuted_tokens is None:
        raise ValueError("probs is given, but permuted_tokens, which its gradient needs, is not")
    if permuted_tokens is None:
        permuted_tokens = grad_unpermuted_tokens.new_zeros((permuted_tokens_size_0, grad_unpermuted_tokens.shape[1]), dtype=permuted_tokens_dtype)
    return _unpermute_grad(permuted_tokens, grad_unpermuted_tokens.to(permuted_tokens_dtype), sorted_indices, probs)


# ---- by a routing map ------------------------------------------------------------------------------------------------


def _capacity_ids(routing_map: Tensor, capacity: int) -> Tensor:
    """int64 [experts, capacity]: the first tokens of a stable descending sort of each expert's column."""
    return routing_map.t().to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :capacity]


@device_function
def npu_moe_token_permute_with_routing_map(tokens: Tensor, routing_map: Tensor, *, probs: Optional[Tensor] = None,
                                           num_out_tokens: Optional[int] = None,
                                           drop_and_pad: bool = False) -> Tuple[Tensor, Tensor, Tensor]:
    """(rows expert after expert, their probs or None, sorted_indices int32). drop_and_pad: num_out_tokens / experts rows of each."""
    if routing_map.dim() != 2 or routing_map.shape[0] != tokens.shape[0]:
        raise ValueError(f"routing_map is {list(routing_map.shape)}, must be [{tokens.shape[0]}, experts]")
    count, experts = routing_map.shape
    if drop_and_pad:
        if num_out_tokens is None:
            raise ValueError("drop_and_pad needs num_out_tokens")
        ids = _capacity_ids(routing_map, num_out_tokens // experts)
        picked = None if probs is None else probs.t().gather(1, ids).reshape(-1)
        return tokens.index_select(0, ids.reshape(-1)), picked, ids.reshape(-1).to(torch.int32)
    by_expert = routing_map.bool().t()
    places = torch.zeros((experts, count), dtype=torch.int32)
    total = int(by_expert.sum())
    places[by_expert] = torch.arange(total, dtype=torch.int32)
    token_of_row = by_expert.nonzero()[:, 1]
    picked = None if probs is None else probs.t()[by_expert]
    return tokens.index_select(0, token_of_row), picked, places.t()[routing_map.bool()]


@device_function
def npu_moe_token_permute_with_routing_map_grad(permuted_token_out_grad: Tensor, probs_grad: Optional[Tensor], sorted_indices: Tensor,
                                                routing_map: Tensor, experts_num: int, tokens_num: int,
                                                drop_and_pad: bool) -> Tuple[Tensor, Tensor]:
    """(gradient of tokens, gradient of probs or None)."""
    shape = (tokens_num, permuted_token_out_grad.shape[1])
    by_expert = routing_map.bool().t()
    ids = sorted_indices.long() if drop_and_pad else by_expert.nonzero()[:, 1]
    rows = wide(permuted_token_out_grad)
    grad = torch.zeros(shape, dtype=rows.dtype).index_add_(0, ids, rows).to(permuted_token_out_grad.dtype)
    if probs_grad is None:
        return grad, None
    grad_probs = probs_grad.new_zeros((experts_num, tokens_num))
    if drop_and_pad:
        grad_probs.scatter_(1, ids.view(experts_num, -1), probs_grad.view(experts_num, -1))
    else:
        grad_probs[by_expert] = probs_grad
    return grad, grad_probs.t().contiguous()


def _by_map(permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Sequence[int], probs: Optional[Tensor],
            routing_map: Optional[Tensor], drop_and_pad: bool) -> Tensor:
    count, width = restore_shape
    if drop_and_pad:
        ids, rows = sorted_indices.long(), wide(permuted_tokens)
        if probs is not None:
            rows = rows * probs.t().gather(1, ids.view(probs.shape[1], -1)).reshape(-1, 1).to(rows.dtype)
        return torch.zeros((count, width), dtype=rows.dtype).index_add(0, ids, rows).to(permuted_tokens.dtype)
    if probs is not None and routing_map is None:
        raise ValueError("probs is given, but routing_map is not")
    rows = _by_token(sorted_indices, count, "sorted_indices")
    return moe_finalize(permuted_tokens, rows, None if probs is None else probs[routing_map.bool()].view(rows.shape))


@device_function
def npu_moe_token_unpermute_with_routing_map(permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Sequence[int], *,
                                             probs: Optional[Tensor] = None, routing_map: Optional[Tensor] = None,
                                             drop_and_pad: bool = False) -> Tensor:
    """out[t] = the sum of its rows, each times the prob that routing_map selects."""
    return _by_map(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)


@device_function
def _npu_moe_token_unpermute_with_routing_map(permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Sequence[int], *,
                                              probs: Optional[Tensor] = None, routing_map: Optional[Tensor] = None,
                                              drop_and_pad: bool = False) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, out_index, permuted_token_id, permute_probs): what the gradient takes; of drop_and_pad alone the last three are more than [1]."""
    out = _by_map(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    if not drop_and_pad:
        one = torch.zeros(1, dtype=torch.int32)
        return out, one, one.clone(), out.new_zeros(1)
    ids = sorted_indices
    picked = out.new_zeros(1) if probs is None else probs.t().gather(1, ids.long().view(probs.shape[1], -1)).reshape(-1)
    return out, torch.arange(len(ids), dtype=torch.int32), ids.clone(), picked


@device_function
def npu_moe_token_unpermute_with_routing_map_grad(unpermuted_tokens_grad: Tensor, out_index: Tensor, permuted_token_id: Tensor,
                                                  routing_map: Optional[Tensor], permuted_tokens: Optional[Tensor],
                                                  probs: Optional[Tensor], drop_and_pad: bool,
                                                  restore_shape: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """(gradient of permuted_tokens, gradient of probs)."""
    if drop_and_pad:
        ids = permuted_token_id.long()
    elif routing_map is None:
        raise ValueError("routing_map is not given")
    else:
        ids = routing_map.bool().t().nonzero()[:, 1]
    rows = unpermuted_tokens_grad.index_select(0, ids)
    if probs is None:
        return rows, rows.new_empty(0)
    if permuted_tokens is None:
        raise ValueError("probs is given, but permuted_tokens, which its gradient needs, is not")
    products = (wide(rows) * wide(permuted_tokens)).sum(-1).to(probs.dtype)
    grad_probs = torch.zeros_like(probs.t().contiguous())
    if drop_and_pad:
        picked = probs.t().gather(1, ids.view(probs.shape[1], -1)).reshape(-1, 1)
        grad_probs.scatter_(1, ids.view(probs.shape[1], -1), products.view(probs.shape[1], -1))
    else:
        by_expert = routing_map.bool().t()
        picked = probs.t()[by_expert].unsqueeze(-1)
        grad_probs[by_expert] = products
    return (wide(rows) * wide(picked)).to(rows.dtype), grad_probs.t().contiguous()

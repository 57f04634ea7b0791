"""Rows of tokens to the experts and back, with gradients: the two steps that every function of permuting is made of."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..moe import moe_finalize, moe_finalize_backward, moe_permute, moe_routing


def routing(ids: Tensor, experts: Optional[int] = None) -> Any:
    """The Routing of ids [n, K], which may be any numbers from 0 on."""
    if experts is None:
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if low < 0:
            raise ValueError(f"an expert's id is {low}, must not be negative")
        experts = high + 1
    return moe_routing(ids, experts)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, rows: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(rows)
        return moe_permute(tokens.detach(), slots, top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        rows, = ctx.saved_tensors
        return moe_finalize(grad.contiguous(), rows), None, None, None


def permuted(tokens: Tensor, slots: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Row r is tokens[slots[r] // top_k], zeros where slots[r] is -1. rows [tokens, K]: where the slots lie, -1 nowhere."""
    if tokens.requires_grad and torch.is_grad_enabled():
        return _Permuted.apply(tokens, slots, rows, top_k)
    return moe_permute(tokens.detach(), slots, top_k)


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, expanded: Tensor, rows: Tensor, weights: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(expanded, rows, weights)
        return moe_finalize(expanded.detach(), rows, None if weights is None else weights.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        expanded, rows, weights = ctx.saved_tensors
        given = moe_finalize_backward(grad.contiguous(), expanded.detach(), rows, None if weights is None else weights.detach())
        return given.expanded, None, given.topk_weights


def combined(expanded: Tensor, rows: Tensor, weights: Optional[Tensor]) -> Tensor:
    """out[t] = sum over k of weights[t, k] * expanded[rows[t, k]]; a row of -1 is zeros."""
    if torch.is_grad_enabled() and (expanded.requires_grad or (weights is not None and weights.requires_grad)):
        return _Combined.apply(expanded, rows, weights)
    return moe_finalize(expanded.detach(), rows, None if weights is None else weights.detach())


def within(rows: Tensor, count: int) -> Tensor:
    """Rows that exist; -1 for those from `count` on."""
    return rows.masked_fill(rows >= count, -1)

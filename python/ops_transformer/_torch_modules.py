"""Modules of torch whose attention is this package's."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ._torch_sdpa import scaled_dot_product_attention


class FlashAttention(torch.nn.Module):
    """Self-attention of a language model: x [batch, length, dim] -> [batch, length, dim].

    num_kv_heads: fewer heads of keys and values, each for num_heads / num_kv_heads of the query's. dropout applies to the
    weights while training.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: Optional[int] = None, *, causal: bool = True,
                 bias: bool = False, dropout: float = 0.0):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if dim % num_heads or num_heads % num_kv_heads:
            raise ValueError(f"dim = {dim}, num_heads = {num_heads}, num_kv_heads = {num_kv_heads} do not divide")
        self.num_heads, self.num_kv_heads, self.causal, self.dropout = num_heads, num_kv_heads, causal, dropout
        kv_dim = dim // num_heads * num_kv_heads
        self.query = torch.nn.Linear(dim, dim, bias)
        self.key = torch.nn.Linear(dim, kv_dim, bias)
        self.value = torch.nn.Linear(dim, kv_dim, bias)
        self.out = torch.nn.Linear(dim, dim, bias)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None) -> Tensor:
        """attn_mask as in scaled_dot_product_attention; takes the place of the causal mask."""
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask, self.dropout if self.training else 0.0, self.causal and attn_mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads)
        return self.out(out.transpose(1, 2).flatten(-2))


class FlashCrossAttention(torch.nn.Module):
    """Cross-attention of a diffusion model: x [batch, length, query_dim] and context [batch, context_len, context_dim]
    -> [batch, length, query_dim]. Without a context x attends to itself, which needs context_dim = query_dim.
    """

    def __init__(self, query_dim: int, context_dim: int, num_heads: int, head_dim: Optional[int] = None, *,
                 bias: bool = False, dropout: float = 0.0):
        super().__init__()
        if head_dim is None:
            if query_dim % num_heads:
                raise ValueError(f"query_dim = {query_dim} is not num_heads = {num_heads} heads of one size")
            head_dim = query_dim // num_heads
        self.num_heads, self.dropout = num_heads, dropout
        self.query = torch.nn.Linear(query_dim, num_heads * head_dim, bias)
        self.key = torch.nn.Linear(context_dim, num_heads * head_dim, bias)
        self.value = torch.nn.Linear(context_dim, num_heads * head_dim, bias)
        self.out = torch.nn.Linear(num_heads * head_dim, query_dim)

    def forward(self, x: Tensor, context: Optional[Tensor] = None, attn_mask: Optional[Tensor] = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, t in ((self.query, x), (self.key, context), (self.value, context))
        )
        out = scaled_dot_product_attention(q, k, v, attn_mask, self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(-2))

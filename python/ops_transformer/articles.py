"""The functions and modules that articles about flash attention on Ascend cards define in their samples, under the same names.

    from ops_transformer.articles import FlashAttentionLLM, find_optimal_block_size, gather_paged_kv_cache, select_tile_size

Sizes of tiles are formulas of those articles; this library plans its own (`opst plan attention`). The modules have the parameters of the
samples, so that their state dicts load, and train.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from ._calls import public
from .flash_attention import flash_attention
from .kv_cache import gather_pa_kv_cache

__all__ = ["FlashAttentionLLM", "FlashCrossAttention", "find_optimal_block_size", "gather_paged_kv_cache", "select_tile_size"]

_BLOCKS = (256, 128, 64, 32)
_TILES = ((256, 256), (256, 128), (128, 128), (128, 64), (64, 64), (64, 32))  # rows of queries, keys


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, must be at least 1")


@public
def find_optimal_block_size(seq_len: int, head_dim: int, sram_size: int) -> int:
    """The largest of 256, 128, 64 and 32 that is at most sram_size / (16 head_dim), else 32. sram_size in bytes; seq_len changes
    nothing, as in the article."""
    _positive(seq_len=seq_len, head_dim=head_dim, sram_size=sram_size)
    return next((block for block in _BLOCKS if block * 16 * head_dim <= sram_size), 32)


@public
def select_tile_size(seq_len: int, head_dim: int, sram_bytes: int, num_heads: int) -> Tuple[int, int]:
    """(rows of queries, keys) of the largest tile that fits: 2 d rows + 4 d keys + 2 rows keys <= sram_bytes / num_heads, which are
    16-bit queries, keys with values, and scores; else (32, 32). seq_len changes nothing."""
    _positive(seq_len=seq_len, head_dim=head_dim, sram_bytes=sram_bytes, num_heads=num_heads)
    for rows, keys in _TILES:
        if (2 * head_dim * rows + 4 * head_dim * keys + 2 * rows * keys) * num_heads <= sram_bytes:
            return rows, keys
    return 32, 32


@public(facade=True)
def gather_paged_kv_cache(key_cache_blocks: Any, value_cache_blocks: Any, block_tables: Any, seq_len: int, head_indices: Any = None
                          ) -> Tuple[Any, Any]:
    """(key, value) [seq_len, heads, head_dim] of one sequence in a cache of blocks [num_blocks, block_size, heads, head_dim].

    block_tables [blocks]: those of the sequence, in order. head_indices: the heads to read, in this order; None: all.
    """
    if seq_len < 0:
        raise ValueError(f"seq_len is {seq_len}, must not be negative")
    table = torch.as_tensor(block_tables)
    if table.dim() == 2 and table.shape[0] == 1:
        table = table[0]
    if table.dim() != 1:
        raise ValueError(f"block_tables has shape {list(table.shape)}, must be [blocks], of one sequence")
    return gather_pa_kv_cache(key_cache_blocks, value_cache_blocks, table[None], [seq_len], head_indices=head_indices)


def _of(config: Any, *names: str) -> int:
    """A number of a config, which has attributes or is a dict."""
    for name in names:
        value = config.get(name) if isinstance(config, Dict) else getattr(config, name, None)
        if value is not None:
            return int(value)
    raise ValueError(f"FlashAttentionLLM: config has no {' or '.join(names)}")


class FlashAttentionLLM(torch.nn.Module):
    """Causal self-attention: x [batch, length, hidden_size] -> the same. config has hidden_size and num_heads (or
    num_attention_heads). Linear `qkv` gives [batch, length, 3, heads, head_dim], Linear `out` joins the heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.num_heads = _of(config, "hidden_size"), _of(config, "num_heads", "num_attention_heads")
        if hidden < 1 or self.num_heads < 1 or hidden % self.num_heads:
            raise ValueError(f"FlashAttentionLLM: hidden_size is {hidden}, which is not num_heads = {self.num_heads} heads of one size")
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, use_flash: bool = True) -> Tensor:
        """use_flash=False: the whole matrix of scores in memory, to compare with."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        out = flash_attention(q, k, v, True, layout="BSND", path="automatic" if use_flash else "standard")
        return self.out(out.flatten(-2))


class FlashCrossAttention(torch.nn.Module):
    """Attention of x [batch, length, query_dim] to context [batch, context_length, context_dim] -> x's shape. Linear `to_q`; `to_kv`,
    which gives [batch, context_length, 2, heads, head_dim]; `to_out`."""

    def __init__(self, query_dim: int, context_dim: int, num_heads: int) -> None:
        super().__init__()
        if query_dim < 1 or num_heads < 1 or query_dim % num_heads:
            raise ValueError(f"FlashCrossAttention: query_dim is {query_dim}, which is not num_heads = {num_heads} heads of one size")
        self.num_heads = num_heads
        self.to_q = torch.nn.Linear(query_dim, query_dim)
        self.to_kv = torch.nn.Linear(context_dim, 2 * query_dim)
        self.to_out = torch.nn.Linear(query_dim, query_dim)

    def forward(self, x: Tensor, context: Optional[Tensor] = None) -> Tensor:
        """Without a context x attends to itself, which needs context_dim = query_dim."""
        q = self.to_q(x).unflatten(-1, (self.num_heads, -1))
        k, v = self.to_kv(x if context is None else context).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        return self.to_out(flash_attention(q, k, v, layout="BSND").flatten(-2))

"""S_dmask: the matrix of weights, with signs that tell which were dropped. For looking at, small sizes only."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from ..flash_attention import attention_weights, dropout_mask


def _weights(q: Tensor, k: Tensor, options: Dict[str, Any], kept: np.ndarray) -> np.ndarray:
    """Of q and k [batch, length, heads, D]."""
    weights = attention_weights(q.detach().transpose(1, 2), k.detach().transpose(1, 2), **options)
    return np.where(kept, weights, -weights)


def dropped_weights(q: Tensor, k: Tensor, options: Dict[str, Any], dropout: Dict[str, Any],
                    sequences: Optional[Tuple[List[int], List[int], Tuple[int, int]]] = None) -> Tensor:
    """[batch, nheads, seqlen_q, seqlen_k] of q's dtype, negative where dropped. sequences: where they begin in q and in k, and the
    lengths of the result."""
    keep, seed = dropout["keep_prob"], dropout["seed"]
    options = dict(options)
    slopes = options.pop("alibi_slopes", None)
    slopes = None if slopes is None else slopes.double()
    if sequences is None:
        batch, query_len, heads, _ = q.shape
        kept = dropout_mask(batch, heads, query_len, k.shape[1], keep, seed=seed)
        given = {} if slopes is None else {"alibi_slopes": slopes}
        return torch.from_numpy(_weights(q, k, {**options, **given}, kept)).to(q.dtype)
    starts_q, starts_k, (rows, columns) = sequences
    heads = q.shape[1]
    found = torch.zeros(len(starts_q) - 1, heads, rows, columns, dtype=q.dtype)
    for b in range(len(starts_q) - 1):
        part_q, part_k = q[None, starts_q[b]:starts_q[b + 1]], k[None, starts_k[b]:starts_k[b + 1]]
        # The heads of sequence b are b * heads and those behind it.
        kept = dropout_mask(1, heads, part_q.shape[1], part_k.shape[1], keep, seed=seed, first_head=b * heads,
                            total_heads=(b + 1) * heads)
        given = {} if slopes is None else {"alibi_slopes": slopes if slopes.dim() == 1 else slopes[b]}
        weights = _weights(part_q, part_k, {**options, **given}, kept)
        found[b, :, :part_q.shape[1], :part_k.shape[1]] = torch.from_numpy(weights)
    return found

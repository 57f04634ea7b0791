"""merge_attention in torch's own operators: for gradients of every kind and order, torch.compile and the transforms."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


def merge(parts: Tensor, lse: Optional[Tensor], largest: Optional[Tensor], total: Optional[Tensor],
          dtype: Optional[str]) -> Tuple[Optional[Tensor], ...]:
    """(out, softmax_lse, None, None), or (out, None, softmax_max, softmax_sum)."""
    if parts.dtype not in _DTYPES.values():
        raise ValueError(f"attention_out is {parts.dtype}, must be float32, bfloat16, float16 or float64")
    if not 2 <= parts.dim() <= 5:
        raise ValueError(f"attention_out must be [parts, .., D] of at most 5 dimensions, but its shape is {list(parts.shape)}")
    if not 1 <= parts.shape[0] <= 4096:
        raise ValueError(f"attention_out dim 0 (parts) is {parts.shape[0]}, must be 1 to 4096")
    if dtype is not None and (dtype == "f64") != (parts.dtype == torch.float64):
        raise ValueError(f"dtype is {dtype}, but the parts are {parts.dtype}: float64 goes with float64 alone")
    real = torch.float64 if parts.dtype == torch.float64 else torch.float32
    wanted = parts.shape[:-1]
    for name, tensor in (("softmax_lse", lse), ("softmax_max", largest), ("softmax_sum", total)):
        if tensor is None:
            continue
        if tensor.shape != wanted:
            raise ValueError(f"{name} must be attention_out's shape without D, {list(wanted)}, but its shape is {list(tensor.shape)}")
        if tensor.dtype != real:
            raise ValueError(f"{name} is {tensor.dtype}, must be {real} for attention_out of {parts.dtype}")
    by_lse = lse is not None
    top = lse if by_lse else largest.detach()
    seen = ~top.isinf() if by_lse else ~top.isinf() & (total != 0)
    # Exponents of parts that saw nothing are kept finite: what is not taken must not bring NaN into a gradient either.
    highest = top.detach().masked_fill(~seen, -torch.inf).amax(0)
    base = highest.masked_fill(highest.isinf(), 0)
    weight = torch.where(seen, top, base).sub(base).exp()
    if not by_lse:
        weight = weight * torch.where(seen, total, 0)
    weight = torch.where(seen, weight, 0)
    sum_of_weights = weight.sum(0)
    empty = ~seen.any(0)
    share = weight / sum_of_weights.masked_fill(empty, 1)
    out = (share.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), parts, 0).to(real)).sum(0)
    out = out.to(parts.dtype if dtype is None else _DTYPES[dtype])
    if by_lse:
        return out, (base + sum_of_weights.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf), None, None
    return out, None, highest, sum_of_weights

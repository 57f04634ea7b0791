"""What every function of the interface asks of its tensors and of the options that they share."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core import UNBOUNDED

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)

DENSE = "[batch, seqlen, nheads, headdim]"
VARLEN = "[total, nheads, headdim]"
PAGES = "[num_blocks, page_block_size, nheads_k, headdim]"


def is_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {'None' if value is None else 'a ' + type(value).__name__}, must be a torch tensor")
    return value


def has_form(name: str, tensor: Tensor, form: str) -> None:
    rank = form.count(",") + 1
    if is_tensor(name, tensor).dim() != rank:
        raise ValueError(f"{name} has {tensor.dim()} dimensions {list(tensor.shape)}, must have {rank}: {form}")


def unpacked(name: str, packed: Any, count: int, form: str) -> Tuple[Tensor, ...]:
    """Views of q, k, v or k, v in a tensor whose third last dimension holds them."""
    has_form(name, packed, form)
    if packed.shape[-3] != count:
        raise ValueError(f"{name}.shape[{packed.dim() - 3}] is {packed.shape[-3]}, must be {count}: {form}")
    return packed.unbind(-3)


def check_heads(q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("q", "k", "v")) -> None:
    """dtypes, heads and head_dim, the last two dimensions."""
    for name, tensor in zip(names, (q, k, v)):
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}, must be float16, bfloat16, float32 or float64")
        if tensor.dtype != q.dtype and not torch.is_autocast_enabled("cpu"):
            raise ValueError(f"{name} has dtype {tensor.dtype}, but {names[0]} has {q.dtype}: they must be of one dtype")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{names[2]} has {v.shape[-2]} heads, but {names[1]} has {k.shape[-2]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[1]} has headdim {k.shape[-1]}, but {names[0]} has {q.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{names[0]} has {q.shape[-2]} heads, which is no multiple of the {k.shape[-2]} heads of {names[1]}")


def check_same(names: Tuple[str, str], a: Tensor, b: Tensor, axes: Dict[int, str]) -> None:
    for axis, what in axes.items():
        if a.shape[axis] != b.shape[axis]:
            raise ValueError(f"{names[1]}.shape[{axis}] ({what}) is {b.shape[axis]}, but {names[0]} has {a.shape[axis]}")


def integers(name: str, tensor: Any, shape: Sequence[Optional[int]], form: str) -> Tensor:
    """An int32 or int64 tensor; None in `shape` is any size."""
    is_tensor(name, tensor)
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{name} has dtype {tensor.dtype}, must be int32")
    if tensor.dim() != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape)):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {form}")
    return tensor


def is_readable(tensor: Tensor) -> bool:
    """Whether the numbers are there to be looked at: not under a compiler or of a tracer."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def in_range(name: str, numbers: Any, limits: Any, of: str, low: int = 0) -> None:
    """low <= number <= limit, of lists of the host's integers (a list of limits: one for each)."""
    for i, number in enumerate(numbers):
        limit = limits[i] if isinstance(limits, list) else limits
        if not low <= number <= limit:
            raise ValueError(f"{name}[{i}] is {number}, must be from {low} to {limit}{of}")


def window(window_size: Any, causal: bool) -> Dict[str, int]:
    """window_left and window_right: -1 leaves a side open, causal closes the right one."""
    if type(window_size) is tuple and window_size == (-1, -1) and type(window_size[0]) is type(window_size[1]) is int:
        return {"window_left": UNBOUNDED, "window_right": 0 if causal else UNBOUNDED}
    try:
        left, right = (side.__index__() for side in window_size)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(f"window_size is {window_size!r}, must be two integers (left, right)") from None
    for name, side in (("left", left), ("right", right)):
        if side < -1:
            raise ValueError(f"window_size is {(left, right)}: its {name} side is {side}, must be -1 (open) or a number of keys")
    return {"window_left": UNBOUNDED if left == -1 else left,
            "window_right": 0 if causal else UNBOUNDED if right == -1 else right}


def slopes(alibi_slopes: Any, q: Tensor, batch: int) -> Optional[Tensor]:
    """ALiBi's slopes of heads, or of the heads of each sequence."""
    if alibi_slopes is None:
        return None
    heads = q.shape[-2]
    if is_tensor("alibi_slopes", alibi_slopes).dtype not in (torch.float32, torch.float64):
        raise ValueError(f"alibi_slopes has dtype {alibi_slopes.dtype}, must be float32")
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes has shape {list(alibi_slopes.shape)}, must be [nheads] = [{heads}] or [batch, nheads] = [{batch}, {heads}]")
    return alibi_slopes.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def rule(q: Tensor, batch: int, softmax_scale: Optional[float], causal: bool, window_size: Any, softcap: float,
         alibi_slopes: Any) -> Dict[str, Any]:
    """What says which scores are how large, in the words of flash_attention."""
    options: Dict[str, Any] = {"alignment": "bottom_right", **window(window_size, causal)}
    if softmax_scale is not None:
        options["softmax_scale"] = softmax_scale
    if softcap != 0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = slopes(alibi_slopes, q, batch)
    return options


def marked(lse: Tensor) -> Tensor:
    """softmax_lse in this interface: +inf where a row sees no key."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))

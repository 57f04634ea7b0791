"""The device's conventions as options of the core: layouts, masks, sparse modes, lists of lengths.

    layouts         BSH, BSND, BNSD, SBH, TND, NTD, and of inference INPUT_OUTPUT, read as views [batch, N, length, D] or [tokens, N, D]
    masks           1 hides a key; the core's true shows one
    sparse_mode     which keys a mask and pre/next tokens leave visible: window, corner and prefix of the core
    lengths         running totals without a leading 0 (TND), or one number for each sequence
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core import UNBOUNDED
from .._layouts import heads_first

LARGEST = 2**31 - 1  # pre_tokens and next_tokens from here on hide nothing

# ---- layouts ---------------------------------------------------------------------------------------------------------


def head_dim_of(query: Tensor, layout: str, heads: int) -> int:
    """D of a query."""
    if "H" not in layout:
        return query.shape[-1]
    if heads < 1 or query.shape[-1] % heads:
        raise ValueError(f"{layout}: the last dimension of query is {query.shape[-1]}, which is not {heads} heads of one size")
    return query.shape[-1] // heads


def kv_heads_of(key: Tensor, layout: str, head_dim: int) -> int:
    """N of keys, which BSH and SBH show by the width alone."""
    if "H" not in layout:
        return key.shape[layout.index("N")]
    if head_dim < 1 or key.shape[-1] % head_dim:
        raise ValueError(f"{layout}: the last dimension of key is {key.shape[-1]}, which is no multiple of the {head_dim} elements of "
                         "a head of query")
    return key.shape[-1] // head_dim


def by_heads(name: str, tensor: Tensor, layout: str, heads: int) -> Tensor:
    """A view [batch, N, length, D], or [tokens, N, D] of TND and NTD."""
    if layout == "NTD":
        if tensor.dim() != 3:
            raise ValueError(f"NTD means 3 dimensions, but {name} has {tensor.dim()}: {list(tensor.shape)}")
        return tensor.transpose(0, 1)
    return heads_first(name, tensor, layout, heads)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """[batch, N, length, D], or [tokens, N, D], in a layout of results; contiguous, as the device's are."""
    if layout == "TND":
        return tensor
    if layout == "NTD":
        return tensor.transpose(0, 1).contiguous()
    if layout == "NBSD":
        return tensor.transpose(0, 1).contiguous()
    if layout == "BNSD":
        return tensor.contiguous()
    tensor = tensor.transpose(1, 2).contiguous()
    return tensor if layout == "BSND" else tensor.flatten(2)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def integers(name: str, values: Any) -> List[int]:
    """A list of lengths, of a list or of an integer tensor of the host."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.dim() != 1:
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)}, must be integers of one dimension")
        return values.tolist()
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} is a {type(values).__name__}, must be a list of integers")
    return list(values)


def totals(name: str, values: Any) -> List[int]:
    """Running totals; zeros at the end switch the last sequences off, which are empty then."""
    ends = integers(name, values)
    last = len(ends)
    while last > 0 and ends[last - 1] == 0:
        last -= 1
    return ends[:last] + [ends[last - 1] if last else 0] * (len(ends) - last)


def running(lengths: Sequence[int]) -> List[int]:
    """Lengths as running totals without a leading 0."""
    ends, total = [], 0
    for length in lengths:
        total += length
        ends.append(total)
    return ends


def lengths_of(ends: Sequence[int]) -> List[int]:
    """Running totals as lengths."""
    return [end - start for start, end in zip([0, *ends], ends)]


def per_batch(name: str, values: Any, batch: int) -> Optional[List[int]]:
    """One length for each sequence: a list of one serves all, of a longer list the first count."""
    if values is None:
        return None
    lengths = integers(name, values)
    if len(lengths) == 1:
        return lengths * batch
    if len(lengths) < batch:
        raise ValueError(f"{name} has {len(lengths)} lengths, but the batch has {batch}")
    return lengths[:batch]


def starts_tensor(ends: Sequence[int]) -> Tensor:
    """int64 [batch + 1] where sequences begin."""
    return torch.tensor([0, *ends], dtype=torch.int64)


# ---- masks and sparse modes ------------------------------------------------------------------------------------------


def visible(name: str, hidden: Tensor) -> Tensor:
    """The core's mask (true shows) of the device's (1 hides)."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"{name} is a {type(hidden).__name__}, must be a torch tensor")
    if hidden.dtype not in (torch.bool, torch.uint8, torch.int8):
        raise ValueError(f"{name} has dtype {hidden.dtype}, must be bool, uint8 or int8 (1 hides a key)")
    return hidden.logical_not()


class Rule(NamedTuple):
    """Which keys a call shows, in the core's words."""

    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    alignment: str = "top_left"
    mask: Optional[Tensor] = None  # true shows
    prefix: Optional[List[int]] = None

    def options(self) -> dict:
        """Those that are not defaults, by the names of flash_attention."""
        given = {"alignment": self.alignment}
        if self.window_left != UNBOUNDED:
            given["window_left"] = self.window_left
        if self.window_right != UNBOUNDED:
            given["window_right"] = self.window_right
        if self.mask is not None:
            given["mask"] = self.mask
        if self.prefix is not None:
            given["prefix"] = self.prefix
        return given


def side(tokens: int) -> int:
    return UNBOUNDED if tokens >= LARGEST else tokens


def rule_of(sparse_mode: int, mask: Optional[Tensor], pre: int, following: int, prefix: Optional[Sequence[int]] = None) -> Rule:
    """The rule of modes 0 to 6; 7 and 8 are two calls. Without a mask every key is visible, whatever the mode."""
    if not 0 <= sparse_mode <= 6:
        raise ValueError(f"sparse_mode is {sparse_mode}, must be 0 to 6 here")
    if mask is None:
        if sparse_mode in (5, 6):
            raise ValueError(f"sparse_mode is {sparse_mode}, which needs atten_mask and prefix, but atten_mask is not given")
        return Rule()
    if sparse_mode == 0:
        return Rule(side(pre), side(following), "top_left", visible("atten_mask", mask))
    if sparse_mode == 1:
        return Rule(mask=visible("atten_mask", mask))
    if sparse_mode == 2:
        return Rule(window_right=0)
    if sparse_mode == 3:
        return Rule(window_right=0, alignment="bottom_right")
    if sparse_mode == 4:
        return Rule(side(pre), side(following), "bottom_right")
    if prefix is None:
        raise ValueError(f"sparse_mode is {sparse_mode}, but prefix is not given")
    return Rule(window_right=0, alignment="bottom_right", prefix=integers("prefix", prefix))


# ---- statistics ------------------------------------------------------------------------------------------------------


def eightfold(rows: Tensor) -> Tensor:
    """[.., 8]: how the device gives one number of a row."""
    return (rows.unsqueeze(-1) * rows.new_ones(8)).contiguous()  # half the time of copying an expanded view


def wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is: what arithmetic is done in."""
    return x if x.dtype == torch.float64 else x.float()


def quantised(x: Tensor, low: int = -128, high: int = 127) -> Tensor:
    """int8, half to even, ends of the range for what is beyond."""
    return x.round().clamp_(low, high).to(torch.int8)


def unpack_int4(words: Tensor) -> Tensor:
    """int8 [.., 8 n] of int32 words [.., n]: eight signed values each, the lowest half byte first."""
    halves = words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)
    return (((halves & 15) ^ 8) - 8).to(torch.int8).flatten(-2)


def pack_int4(values: Tensor) -> Tensor:
    """int32 words [.., n] of values [.., 8 n]."""
    if values.shape[-1] % 8:
        raise ValueError(f"the result has {values.shape[-1]} columns, must have a multiple of 8: a word holds eight int4")
    halves = (values.to(torch.int32) & 15).unflatten(-1, (-1, 8)).to(torch.int64)
    words = (halves << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def dtype_of(name: str, code: Any, default: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """A dtype of torch, or of the device's integer codes."""
    if code is None:
        return default
    if isinstance(code, torch.dtype):
        return code
    if code == 1:
        return torch.int8
    known = {5: torch.float16, 15: torch.bfloat16, 6: torch.float32, 3: torch.int32}
    if code in known:
        return known[code]
    raise NotImplementedError(f"{name} is {code}: dtypes of eight bits other than int8, and of four, are not implemented")


def split(tensor: Tensor, ends: Sequence[int], dim: int = 0) -> Tuple[Tensor, ...]:
    """Views of the sequences."""
    return tuple(tensor.narrow(dim, start, end - start) for start, end in zip([0, *ends], ends))

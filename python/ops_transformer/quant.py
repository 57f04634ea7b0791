"""Numbers stored as small integers: int8 and int4 with scales beside them, and the block formats of GGUF files."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from . import _core
from ._arrays import empty, int64, integers_shape, optional_view, rank, view
from ._calls import public
from ._context import Context, default_context

__all__ = ["dequantize", "dequantize_blocks", "dynamic_quant", "lookup_rows", "quantize"]


def _torch_forms() -> Dict[str, Any]:
    # A statement, which torch.compile follows where a compiled call is a process's first one.
    from ._torch_quant import FORMS

    return FORMS


def _integers_for(x: Any, bits: int) -> Any:
    return empty(x, integers_shape(x, view(x).shape, bits), "i8" if bits == 8 else "u8")


@public
def quantize(x: Any, *, bits: int = 8, groups: int = 1, zero_points: bool = False, scales: Any = None, zeros: Any = None,
             context: Optional[Context] = None) -> Tuple[Any, Any, Any]:
    """(q, scales, zeros) of x [rows, cols]: x is about (q - zero) * scale, by groups of cols / groups along a row.

    q int8 [rows, cols], or for bits = 4 uint8 [rows, cols / 2] with two values a byte, the lower half first; scales
    float32 [rows, groups]; zeros int8 likewise, None without zero_points. Rounded to nearest, ties to even.

    With `scales` (and `zeros`) given, any strides, these are taken: static quantisation, values beyond the range become
    its ends. groups and zero_points, which say how scales are made, may say then what these are.
    """
    given = scales is not None
    if given:
        shape = view(scales).shape
        if groups != 1 and len(shape) == 2 and groups != shape[1]:
            raise ValueError(f"groups is {groups}, but scales are {list(shape)}")
        if zero_points and zeros is None:
            raise ValueError("zero_points is True, but scales are given without zeros")
    rank(view(x), x, 2, "[rows, cols]")
    q = _integers_for(x, bits)
    if not given:
        if zeros is not None:
            raise ValueError("zeros are given without scales")
        if groups < 1:
            raise ValueError(f"groups is {groups}, must be at least 1")
        rows = view(x).shape[0]
        scales = empty(x, (rows, groups), "f32")
        zeros = empty(x, (rows, groups), "i8") if zero_points else None
    _core.quantize(context or default_context(), view(x), view(q), view(scales), optional_view(zeros), given)
    return q, scales, zeros


@public
def dequantize(q: Any, scales: Any, zeros: Any = None, *, context: Optional[Context] = None) -> Any:
    """(q - zero) * scale, float32 [rows, cols]."""
    tensor = rank(view(q), q, 2, "[rows, cols]")
    rows, width = tensor.shape
    out = empty(q, (rows, width * 2 if tensor.dtype == "u8" else width), "f32")
    _core.dequantize(context or default_context(), tensor, view(scales), optional_view(zeros), view(out))
    return out


@public(torch=_torch_forms)
def dynamic_quant(x: Any, *, bits: int = 8, smooth_scales: Any = None, context: Optional[Context] = None) -> Tuple[Any, Any]:
    """(q, scales) of x [.., k], every row by its own scale; smooth_scales float32 [k] are multiplied in first."""
    q, scales = _integers_for(x, bits), empty(x, view(x).shape[:-1], "f32")
    _core.dynamic_quant(context or default_context(), view(x), view(q), view(scales), optional_view(smooth_scales))
    return q, scales


def _sizes(rows: int, cols: int) -> None:
    for name, size in (("rows", rows), ("cols", cols)):
        if size < 0:
            raise ValueError(f"{name} is {size}, must not be negative")


@public
def dequantize_blocks(blocks: Any, format: str, rows: int, cols: int, *, context: Optional[Context] = None) -> Any:
    """Float32 [rows, cols] of a GGUF matrix: uint8 blocks of a format such as "q4_1"."""
    _sizes(rows, cols)
    out = empty(blocks, (rows, cols), "f32")
    _core.dequantize_blocks(context or default_context(), view(blocks), format, rows, cols, view(out))
    return out


@public
def lookup_rows(blocks: Any, format: str, rows: int, cols: int, indices: Any, *, context: Optional[Context] = None) -> Any:
    """Float32 [count, cols]: the rows `indices` [count] of a GGUF matrix [rows, cols] (dequantize_blocks), an embedding.

    ValueError for an index out of range.
    """
    _sizes(rows, cols)
    where = rank(int64(indices), indices, 1, "[count]")
    out = empty(blocks, (*where.shape, cols), "f32")
    _core.dequantize_rows(context or default_context(), view(blocks), format, rows, cols, where, view(out))
    return out

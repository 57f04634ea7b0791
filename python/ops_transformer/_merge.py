"""Attention over parts of the keys, joined."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

from . import _core
from ._arrays import empty, output, refusal, view
from ._attention_reader import operator_for
from ._calls import public
from ._context import Context, default_context

_DTYPES = ("f32", "bf16", "f16", "f64")


class MergedAttention(NamedTuple):
    """Attention over all keys, of which the parts had some each."""

    attention_out: Any
    softmax_lse: Any  # of the form with softmax_lse, else None
    softmax_max: Any = None  # of the form with softmax_max and softmax_sum, else None
    softmax_sum: Any = None


@public
def merge_attention(attention_out: Any, softmax_lse: Any = None, softmax_max: Any = None, softmax_sum: Any = None, *,
                    dtype: Optional[str] = None, out: Optional[Tuple[Any, ...]] = None, accumulate: bool = False,
                    context: Optional[Context] = None) -> MergedAttention:
    """Joins attention over parts of the keys into attention over all of them.

    attention_out [parts, .., D], float32, bfloat16, float16 or float64, up to four more dimensions. Either softmax_lse, or
    softmax_max and softmax_sum, float32 (float64) and of its shape without D; the result has the same form. A part whose lse
    is -inf or +inf (max -inf, sum 0) has seen no key and adds nothing. dtype of the result: "f32", "bf16", "f16", "f64";
    default that of the parts. Sums are in float32 (float64), each element of the result is rounded once.

    out: a MergedAttention to write into, which is given back. With accumulate what it holds is the first part, so a ring adds
    what arrives to what is there, in place; in float32 it is rounded to 16 bits once, at the end:

        ring = merge_attention(part[None], lse[None], dtype="f32")
        merge_attention(next_part[None], next_lse[None], out=ring, accumulate=True)

    Torch tensors: gradients for all four, where `out` is not given (softmax_max counts as a constant, as in
    flash_attention_score).
    """
    if (softmax_lse is None) == (softmax_max is None) or (softmax_max is None) != (softmax_sum is None):
        raise ValueError("merge_attention takes softmax_lse, or softmax_max and softmax_sum")
    if dtype not in (None, *_DTYPES):
        raise ValueError(f'dtype is "{dtype}", must be one of {", ".join(_DTYPES)}')
    if accumulate and out is None:
        raise ValueError("accumulate adds to what out holds, but out is not given")
    given = (attention_out, softmax_lse, softmax_max, softmax_sum)
    operator = operator_for(given) if out is None else None
    if operator is not None:
        from ._torch_merge import merge

        names = ("attention_out", "softmax_lse", "softmax_max", "softmax_sum")
        return MergedAttention(*merge(*(None if array is None else operator.to_tensor(name, array)
                                        for name, array in zip(names, given)), dtype))
    parts = view(attention_out, "attention_out")
    if len(parts.shape) < 2:
        raise refusal(ValueError, attention_out, f"must be [parts, .., D], but its shape is {list(parts.shape)}",
                      "attention_out")
    names = ("softmax_lse", "softmax_max", "softmax_sum")
    if out is None:
        dtype = dtype or parts.dtype
        real = "f64" if parts.dtype == "f64" else "f32"
        merged = MergedAttention(empty(attention_out, parts.shape[1:], dtype),
                                 *(None if array is None else empty(array, parts.shape[1:-1], real) for array in given[1:]))
        outputs = [None if array is None else view(array) for array in merged]
    else:
        if not isinstance(out, tuple) or not 1 <= len(out) <= 4:
            raise refusal(TypeError, out, f"is a {type(out).__name__}, must be a MergedAttention", "out")
        merged = MergedAttention(*out)
        outputs = [None if array is None else output(array, name)
                   for name, array in zip(("out.attention_out", *(f"out.{name}" for name in names)), merged)]
        if outputs[0] is None:
            raise ValueError("out.attention_out is None, but it is what is written")
        if dtype is not None and dtype != outputs[0].dtype:
            raise ValueError(f'dtype is "{dtype}", but out.attention_out is {outputs[0].dtype}')
    _core.merge_attention(context or default_context(), parts,
                          *(None if array is None else view(array, name) for name, array in zip(names, given[1:])),
                          *outputs, accumulate)
    return merged

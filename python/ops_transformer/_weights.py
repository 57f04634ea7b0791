"""The matrix of weights or scores, which attention itself never makes: for looking at, small sizes only."""

from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np

from ._arrays import Tagged, is_torch, view
from ._attention import Options, Tensors, check_dropout, core_call, split_options, to_view
from ._calls import public
from ._context import Context, default_context

_COLUMNS = 512  # keys asked for in one call; a value is at most 768 wide

# Options that each stage has beside softmax_scale, in the order of the equation.
_CAPPED = ("softcap",)
_SCORES = (*_CAPPED, "alibi_form", "alibi_key_start", "alibi_query_start", "alibi_slopes", "alignment", "bias", "bias_scale",
           "block_mask", "causal", "kv_lengths", "mask", "prefix", "window_left", "window_right")
_WEIGHTS = (*_SCORES, "drop_mask", "first_head", "first_key", "first_query", "keep_prob", "offset", "seed", "sinks", "total_heads")
_STAGES = {"scaled": (), "capped": _CAPPED, "scores": _SCORES, "weights": _WEIGHTS}
# What becomes of the option block_mask.
_BLOCK_MASK = tuple(name for name in (*Tensors._fields, *Options._fields) if name.startswith("block_mask_"))
OPTIONS = tuple(name for name in (*_WEIGHTS, "softmax_scale") if name != "causal")


def _double(array: Any) -> np.ndarray:
    """Numbers of any floating dtype, exactly."""
    if isinstance(array, Tagged):
        bits = np.asarray(array.array)
        array = (bits.astype(np.uint32) << 16).view(np.float32) if array.dtype == "bf16" else bits.view(np.float16)
    elif is_torch(array):
        array = array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


@public
def attention_weights(q: Any, k: Any, causal: bool = False, *, stage: str = "weights", context: Optional[Context] = None,
                      **options: Any) -> np.ndarray:
    """The weights with which flash_attention(q, k, v, causal, **options) sums v: float64 [batch, heads, query_len, kv_len].

    stage says how far the equation is followed (the qk_matmul outputs of ONNX's Attention):

        "scaled"   softmax_scale q k^T
        "capped"   and softcap
        "scores"   and ALiBi and bias; -inf where a key is hidden
        "weights"  softmax, with the sink among the scores, and dropout: dropped weights are 0, kept ones divided by keep_prob

    Options as flash_attention's, for dense keys; those of a later stage change nothing. The kernel itself is asked, with the
    unit matrix as values, in float64: query_len * kv_len^2 products, so for small sizes. Scores more than 700 below their
    row's largest are -inf. No gradients.
    """
    if stage not in _STAGES:
        raise ValueError(f'stage is "{stage}", must be one of {", ".join(_STAGES)}')
    arrays, numbers = split_options("attention_weights", options, OPTIONS)
    check_dropout("attention_weights", arrays, numbers)
    if causal:
        numbers["causal"] = True
    known = (*_STAGES[stage], "softmax_scale", *(_BLOCK_MASK if "block_mask" in _STAGES[stage] else ()))
    numbers = {name: number for name, number in numbers.items() if name in known}
    for name, array in (("q", q), ("k", k)):
        if len(view(array, name).shape) != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], but its shape is {list(view(array, name).shape)}")
    query, key = _double(q), _double(k)
    tensors: Dict[str, Any] = {"query": view(query), "key": view(key)}
    for name, array in arrays.items():
        if name in known:
            floats = name in ("bias", "alibi_slopes", "sinks")
            if floats:
                view(array, name)  # refuses what is no array
            tensors[name] = to_view(name, _double(array) if floats else array)
    batch, kv_heads, kv_len, _ = key.shape
    weights, lse = np.empty((*query.shape[:3], kv_len)), np.empty(query.shape[:3])
    for first in range(0, kv_len, _COLUMNS):
        width = min(_COLUMNS, kv_len - first)
        value = np.broadcast_to(np.eye(kv_len, width, -first), (batch, kv_heads, kv_len, width))
        tensors["value"] = view(value)
        core_call({name: tensors[name] for name in ("query", "key", "value", *tensors)}, numbers).forward(
            context or default_context(), view(weights[..., first:first + width]), view(lse))
    if stage == "weights" or kv_len == 0:
        return weights
    with np.errstate(divide="ignore"):
        return np.where(weights > 0, np.log(weights) + lse[..., None], -np.inf)

"""Which weights attention drops: the function of seed, offset and position that opst/attention.h states, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import Tagged, refusal
from ._calls import public

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def _philox(counter: Any, key: Any) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., 2011): four words, in a last dimension, of counters that broadcast."""
    c = [np.asarray(word, dtype=np.uint64) & _LOW for word in counter]
    low, high = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c[0], _MULTIPLIERS[1] * c[2]
        c = [(second >> np.uint64(32)) ^ c[1] ^ np.uint64(low), second & _LOW,
             (first >> np.uint64(32)) ^ c[3] ^ np.uint64(high), first & _LOW]
        low, high = (low + _KEY_STEPS[0]) & 0xFFFFFFFF, (high + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(*c), axis=-1)


@public
def dropout_mask(batch: int, num_heads: int, query_len: int, kv_len: int, keep_prob: float, *, seed: int = 0, offset: int = 0,
                 first_query: int = 0, first_key: int = 0, first_head: int = 0, total_heads: int = 0) -> np.ndarray:
    """The weights that attention with these options keeps: bool [batch, num_heads, query_len, kv_len].

    What other libraries return beside the result (S_dmask): dropped weights are False, kept ones are scaled by 1 / keep_prob.
    For sequences one after the other, each has its own [num_heads, its query_len, its kv_len], with its own batch index.
    """
    if not 0 < keep_prob <= 1:
        raise ValueError(f"keep_prob is {keep_prob}, must be above 0 and at most 1")
    for name, size in (("batch", batch), ("num_heads", num_heads), ("query_len", query_len), ("kv_len", kv_len)):
        if size < 0:
            raise ValueError(f"{name} is {size}, must not be negative")
    heads = np.arange(batch)[:, None] * (total_heads or num_heads) + first_head + np.arange(num_heads)
    keys = first_key + np.arange(kv_len)
    words = _philox((np.arange(first_key // 4, (first_key + kv_len + 3) // 4), (first_query + np.arange(query_len))[:, None],
                     heads[:, :, None, None], offset), (seed & 0xFFFFFFFF, seed >> 32))
    words = words.reshape(*words.shape[:-2], words.shape[-2] * 4)[..., keys - first_key // 4 * 4]
    return words < keep_prob * 2.0**32


@public
def pack_drop_mask(keep: Any) -> np.ndarray:
    """bool [batch, num_heads, query_len, kv_len], true = keep, as the packed bits that drop_mask takes."""
    tagged = isinstance(keep, Tagged) and isinstance(keep.dtype, str) and keep.dtype == "bool"
    try:
        bits = np.asarray(keep.array if tagged else keep)
    except Exception as error:  # NumPy's, or the object's own
        raise refusal(TypeError, keep, f"must be an array of bool (true: keep): {error}", "keep") from None
    if tagged and bits.dtype == np.uint8:
        bits = bits != 0
    elif tagged and bits.dtype != np.bool_:
        raise refusal(TypeError, keep, f"has dtype {bits.dtype}, must be uint8 or bool where tagged \"bool\"", "keep")
    if bits.dtype != np.bool_:
        raise refusal(TypeError, keep, f"has dtype {bits.dtype}, must be bool (true: keep)", "keep")
    return np.packbits(bits.reshape(-1), bitorder="little")

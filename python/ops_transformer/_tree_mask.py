"""Trees of draft tokens (speculative decoding) as the words of bits that the option tree_mask takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import integer_array, is_torch, refusal
from ._calls import public


@public
def tree_mask(parents: Any) -> np.ndarray:
    """int64 words, of the shape of `parents` [..., query_len]: for each draft token the index of its parent, or -1 for one that
    follows the context itself. Parents come before their children, of up to 64 tokens.

    Bit j of word i is 1 where token j is token i or an ancestor of it, so that attention with tree_mask=tree_mask(parents) lets
    each token see the context and its own path:

        tree_mask([-1, 0, 0, 1])    [0b1, 0b11, 0b101, 0b1011]    a root, its two children, a child of the first
    """
    array = integer_array(parents.detach().cpu().numpy() if is_torch(parents) else parents, "parents")
    if array.ndim == 0 or array.shape[-1] > 64:
        raise refusal(ValueError, parents, f"has shape {list(array.shape)}, must be [..., query_len] of up to 64 tokens", "parents")
    words = np.zeros(array.shape, np.uint64)
    rows = words.reshape(int(np.prod(array.shape[:-1])), array.shape[-1])
    for row, of in zip(rows, array.reshape(rows.shape).tolist()):
        for i, parent in enumerate(of):
            if not -1 <= parent < i:
                raise refusal(ValueError, parents, f"says {parent} of token {i}, must be -1 to {i - 1}", "parents")
            row[i] = (row[parent] if parent >= 0 else np.uint64(0)) | np.uint64(1 << i)
    return words.view(np.int64)

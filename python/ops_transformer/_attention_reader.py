"""Who computes an attention call: the core, of views, or torch's operator, of torch tensors.

Arrays are read as views of the core. Where a torch tensor needs more than that (gradients, a compiler, a transform, a
mode), `_torch_attention` makes the call one operator of torch.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Tuple

import numpy as np

from ._arrays import integer_array, is_torch, view
from ._attention import to_view


def operator_for(arrays: Iterable[Any]) -> Optional[Any]:
    """The module with torch's operator, where one of `arrays` is a torch tensor whose bytes are not all that it is."""
    tensors = [array for array in arrays if is_torch(array)]
    if not tensors:
        return None
    from . import _torch_attention

    return _torch_attention if _torch_attention.is_needed(tensors) else None


def read(arrays: Dict[str, Any], others: Tuple[Any, ...] = (), *, autocast: bool = False,
         writes: bool = False) -> Tuple[Optional[Any], Dict[str, Any]]:
    """(None, views), or (torch's operator, torch tensors) where one of the arrays or `others` asks for it. With autocast query,
    key and value of torch become what torch's autocast makes of those of scaled_dot_product_attention. writes: the result goes
    into memory of the user's, which no operator does; only gradients and those who must see the call ask for one then."""
    if not (is_torch(arrays["query"]) or any(map(is_torch, (*arrays.values(), *others)))):
        return None, {name: to_view(name, array) for name, array in arrays.items()}
    from . import _torch_attention

    needed, tensors = _torch_attention.read(arrays, others, autocast, writes)
    return _torch_attention if needed else None, tensors


def starts(operator: Optional[Any], name: str, ends: Any, of: str, tokens: int) -> Any:
    """Where sequences begin, of where they end in the `tokens` rows of `of`: a zero in front. Refused in the caller's words."""
    if operator is not None and operator.is_traced(ends):
        return operator.starts(name, ends)
    array = integer_array(ends.detach().numpy() if is_torch(ends) else ends, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a sequence of ends, but its shape is {list(array.shape)}")
    previous = 0
    for i, end in enumerate(array.tolist()):
        if end < previous:
            rule = f"less than {name}[{i - 1}] = {previous}" if i else "must not be negative"
            raise ValueError(f"{name}[{i}] is {end}, {rule}")
        if end > tokens:
            raise ValueError(f"{name}[{i}] is {end}, but {of} has {tokens} tokens")
        previous = end
    array = np.concatenate([[0], array.astype(np.int64)])
    return view(array) if operator is None else operator.to_tensor("cu_seqlens_q", array)

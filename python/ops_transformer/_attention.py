"""One attention call: its options, its tensors, and who computes it. What flash_attention, flash_attention_score and
paged_attention share.

Arrays are read as views of the core. Where a torch tensor needs more than that (gradients, a compiler, a transform, a
mode), `_torch_attention` makes the call one operator of torch.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple

import numpy as np

from ._arrays import integer_array, integers, refusal, view
from ._calls import _kind_of, checked
from ._core import UNBOUNDED, AttentionCall, View


class Options(NamedTuple):
    """AttentionOptions and DropoutOptions of opst/attention.h, by their names, and the layout of pages."""

    softmax_scale: Optional[float] = None  # default 1 / sqrt(head_dim)
    causal: bool = False
    alignment: str = "top_left"  # or "bottom_right": the last query sees the last key
    path: str = "automatic"  # or "standard", "flash": for tests and comparison
    block_q: int = 0  # query rows of a task; 0: the plan's choice
    block_kv: int = 0  # keys of a tile; 0: likewise
    window_left: int = UNBOUNDED  # keys beside the diagonal, both ends included; negative: bands away from it
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    bias_scale: float = 1.0
    alibi_form: str = "linear"  # or "square_root"
    alibi_query_start: int = 0  # of a sequence that was cut: index of the first query, and of the first key
    alibi_key_start: int = 0
    keep_prob: float = 1.0
    seed: int = 0
    offset: int = 0
    first_query: int = 0  # of a call that holds a piece of a larger problem, for dropout
    first_key: int = 0
    first_head: int = 0
    total_heads: int = 0  # 0: all are here
    page_layout: str = "norm"


class Tensors(NamedTuple):
    """AttentionInputs of opst/attention.h, by their names; views, or torch tensors."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    drop_mask: Any = None
    block_table: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    prefix: Any = None


DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
INTEGERS = frozenset(("block_table", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "prefix"))
# The annotations' texts, and what checks them.
KINDS = {name: getattr(kind, "__forward_arg__", kind) for name, kind in Options.__annotations__.items()}
_CHECKS = {name: _kind_of(kind) for name, kind in KINDS.items()}
_WORDS = {"alignment": ("top_left", "bottom_right"), "path": ("automatic", "standard", "flash"),
          "alibi_form": ("linear", "square_root"), "page_layout": ("norm", "panel32")}


def split_options(function: str, options: Dict[str, Any], known: Tuple[str, ...]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """(tensors, numbers and words) of a function's further keywords `options`, of which `known` are taken; numbers are
    checked."""
    tensors, numbers = {}, {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{function}: there is no option {name}; the further options are {', '.join(sorted(known))}")
        if name in _CHECKS:
            numbers[name] = checked(function, name, _CHECKS[name], value)
            check_word(name, numbers[name])
        elif value is not None:
            tensors[name] = value
    return tensors, numbers


def check_dropout(function: str, arrays: Dict[str, Any], numbers: Dict[str, Any]) -> None:
    """Refuses what says which weights a seed would drop beside a mask that says so itself."""
    if arrays.get("drop_mask") is None:
        return
    for name in ("seed", "offset", "first_query", "first_key", "first_head", "total_heads"):
        if numbers.get(name, 0) != 0:
            raise ValueError(f"{function}: {name} is {numbers[name]}, but drop_mask says which weights are kept: give one of them")


def check_word(name: str, value: Any, shown: Optional[str] = None) -> None:
    words = _WORDS.get(name)
    if words is not None and value not in words:
        raise ValueError(f'{shown or name} is "{value}", must be one of {", ".join(words)}')


# ---- tensors ---------------------------------------------------------------------------------------------------------


def check_mask(mask: Any, dtype: str) -> None:
    """A mask says which keys are seen; numbers could be meant as anything."""
    if dtype in ("bool", "torch.bool"):
        return
    if "float" in dtype or dtype in ("f32", "f64", "bf16", "f16"):
        said = "numbers that are added to the scores are a bias: bias=mask"
    else:
        said = "true shows a key: mask != 0, or Tagged(mask, \"bool\") for bytes of 0 and 1"
    raise refusal(ValueError, mask, f"has dtype {dtype.replace('torch.', '')}, must be bool; {said}", "mask")


def shown(name: str) -> Optional[str]:
    """A tensor's name in messages; of these three the caller's function finds its own."""
    return None if name in ("query", "key", "value") else name


def to_view(name: str, array: Any) -> View:
    if name in INTEGERS:
        return integers(array, name)
    tensor = view(array, shown(name))
    if name == "mask":
        check_mask(array, tensor.dtype)
    return tensor


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def operator_for(arrays: Iterable[Any]) -> Optional[Any]:
    """The module with torch's operator, where one of `arrays` is a torch tensor whose bytes are not all that it is."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
    if not tensors:
        return None
    from . import _torch_attention

    return _torch_attention if _torch_attention.is_needed(tensors) else None


def read(arrays: Dict[str, Any], others: Tuple[Any, ...] = (), *, autocast: bool = False,
         writes: bool = False) -> Tuple[Optional[Any], Dict[str, Any]]:
    """(None, views), or (torch's operator, torch tensors) where one of the arrays or `others` asks for it. With autocast query,
    key and value of torch become what torch's autocast makes of those of scaled_dot_product_attention. writes: the result goes
    into memory of the user's, which no operator does; only gradients and those who must see the call ask for one then."""
    torch = sys.modules.get("torch")
    if torch is None or not (isinstance(arrays["query"], torch.Tensor) or any(map(is_torch, (*arrays.values(), *others)))):
        return None, {name: to_view(name, array) for name, array in arrays.items()}
    from . import _torch_attention

    needed, tensors = _torch_attention.read(arrays, others, autocast, writes)
    return _torch_attention if needed else None, tensors


# ---- the core's call -------------------------------------------------------------------------------------------------


def core_call(tensors: Dict[str, View], numbers: Dict[str, Any]) -> AttentionCall:
    """The call of views, with the numbers and words that are not the defaults of Options."""
    call = AttentionCall(tensors["query"], tensors["key"], tensors["value"])
    call.alignment = "top_left"  # the core's default is the other one
    for name, number in numbers.items():
        setattr(call, name, number)
    for name, tensor in tensors.items():
        if name not in ("query", "key", "value"):
            setattr(call, name, tensor)
    return call


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

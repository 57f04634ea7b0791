"""One attention call: its options, its tensors, and the core's call of views. What every function of attention and torch's
operator of it share."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

from ._arrays import int64, integers, refusal, view
from ._block_mask import option_parts
from ._calls import _kind_of, checked, of_the_core
from ._core import UNBOUNDED, AttentionCall, Context, View


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
    shared_prefix: int = -1  # keys that all sequences hold in the same pages; 0: none; -1: what the block table shows
    block_mask_block_q: int = 0  # of the option block_mask: queries and keys of a block
    block_mask_block_kv: int = 0
    sparse_block_size: int = 1  # of sparse_indices: keys of a block


class Tensors(NamedTuple):
    """AttentionInputs of opst/attention.h, by their names; views, or torch tensors."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None
    query_rope: Any = None
    key_rope: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    drop_mask: Any = None
    block_table: Any = None
    kv_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    prefix: Any = None
    tree_mask: Any = None
    key_scales: Any = None
    value_scales: Any = None
    key_offsets: Any = None
    value_offsets: Any = None
    block_mask_row_offsets: Any = None
    block_mask_columns: Any = None
    sparse_indices: Any = None


GRADIENTS = ("query", "key", "value", "bias", "sinks")  # of flash_attention_grad
DIFFERENTIABLE = (*GRADIENTS, "query_rope", "key_rope")  # the first of Tensors
INTEGERS = frozenset(("block_table", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "prefix", "tree_mask",
                      "block_mask_row_offsets", "block_mask_columns"))
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
        if name == "block_mask":
            if value is not None:
                arrays, sizes = option_parts(function, value)
                tensors.update(arrays)
                numbers.update(sizes)
        elif name in _CHECKS:
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


_SHOWN = {"query": None, "key": None, "value": None, "block_mask_row_offsets": "block_mask.row_offsets",
          "block_mask_columns": "block_mask.columns"}


def shown(name: str) -> Optional[str]:
    """A tensor's name in messages; of the first three the caller's function finds its own."""
    return _SHOWN.get(name, name)


def to_view(name: str, array: Any) -> View:
    if name in INTEGERS:
        return (int64 if name == "tree_mask" else integers)(array, shown(name))
    tensor = view(array, shown(name))
    if name == "mask":
        check_mask(array, tensor.dtype)
    return tensor


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


# The core's names of what has others here.
_FIELDS = {"sparse_indices.indices": "sparse_indices", "sparse_indices.block_size": "sparse_block_size"}


def forward(tensors: Dict[str, View], numbers: Dict[str, Any], context: Context, *outputs: Optional[View]) -> None:
    """Computes the call into views."""
    of_the_core(core_call(tensors, numbers).forward, _FIELDS, context, *outputs)

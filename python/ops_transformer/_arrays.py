"""Arrays of any kind as views of the core, and new ones of the same kind."""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from ._core import Context, View

_default: Optional[Context] = None
_lock = threading.Lock()


def default_context() -> Context:
    """The process's own Context, made at the first call that needs one."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = Context()
    return _default


def set_num_threads(num_threads: int) -> None:
    """Number of threads of the default Context from now on; 0: OPST_NUM_THREADS, else all cores."""
    global _default
    context = Context(num_threads=num_threads)
    with _lock:
        _default = context


class Tagged(NamedTuple):
    """An array of 16-bit (8-bit) unsigned integers whose elements are really "bf16" or "f16" ("bool")."""

    array: Any
    dtype: str


def _is_ml_bfloat16(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.name == "bfloat16"


def view(array: Any) -> View:
    """What the core reads and writes: the array's own memory."""
    if isinstance(array, View):
        return array
    if isinstance(array, Tagged):
        return View(array.array, array.dtype)
    if _is_jax(array):
        array = np.asarray(array)  # the same memory, and read-only, which JAX's DLPack does not say
    if _is_ml_bfloat16(array):
        return View(array.view(np.uint16), "bf16")
    if _is_torch(array) and array.requires_grad:
        array = array.detach()
    return View(array)


def optional_view(array: Any) -> Optional[View]:
    return None if array is None else view(array)


def integers(values: Any) -> View:
    """Lengths and offsets: an integer array as it is, or any sequence of numbers."""
    if isinstance(values, (list, tuple, range)):
        values = np.asarray(values, dtype=np.int64)
    return view(values)


def int64(values: Any) -> View:
    """The same where only 64 bits are taken."""
    tensor = integers(values)
    return view(np.asarray(values, dtype=np.int64)) if tensor.dtype == "i32" else tensor


def offsets(ends: Any) -> View:
    """Where sequences begin, of where they end: a zero in front."""
    return integers(np.concatenate([[0], np.asarray(ends, dtype=np.int64).reshape(-1)]))


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_jax(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


_NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i8": np.int8, "u8": np.uint8, "i32": np.int32,
          "i64": np.int64, "bool": np.bool_}


def empty(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """A new array of the kind of `like`: torch for torch, else NumPy; bf16 tagged or of ml_dtypes, as `like` is."""
    shape = tuple(shape)
    if _is_torch(like):
        torch = sys.modules["torch"]
        types = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
                 "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
        return torch.empty(shape, dtype=types[dtype])
    if dtype == "bf16":
        bits = np.empty(shape, np.uint16)
        if isinstance(like, Tagged) or "ml_dtypes" not in sys.modules:
            return Tagged(bits, "bf16")
        return bits.view(sys.modules["ml_dtypes"].bfloat16)
    return np.empty(shape, _NUMPY[dtype])

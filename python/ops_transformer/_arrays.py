"""Arrays of any kind as views of the core, and new ones of the same kind.

A value that is taken is taken as it is: no cast, no copy of memory, no gradient cut off without a word. What cannot be taken
so raises TypeError or ValueError; `_calls.public` puts the function's and the argument's name into the message.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from ._core import Context, View

_default: Optional[Context] = None
_lock = threading.Lock()
# Another thread of the parent may have held it when a child was forked.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)


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


def refusal(kind: type, value: Any, text: str, name: Optional[str] = None) -> Exception:
    """An error about `value`, `name text`. Where the name is not known here, `_calls.public` finds the argument that is
    `value` and names it."""
    error = kind(f"{name or 'an argument'} {text}")
    if name is None:
        error.value, error.text = value, text
    return error


def view(array: Any, name: Optional[str] = None) -> View:
    """What the core reads: the array's own memory. A torch tensor that is more than its bytes (gradients, subclasses,
    other devices) is refused."""
    if isinstance(array, View):
        return array
    if array is None:
        raise refusal(TypeError, array, "is None, but an array is needed", name)
    tagged, dtype = (array.array, array.dtype) if isinstance(array, Tagged) else (array, None)
    if _is_torch(tagged):
        memory = _torch_memory(tagged, array, name)
    else:
        memory, dtype = _numpy_memory(tagged, dtype, array, name)
    try:
        return View(memory, dtype)
    except (TypeError, ValueError) as error:
        raise refusal(type(error), array, f"cannot be taken: {error}", name) from None


def view_of_new(array: Any) -> View:
    """The same of an array that `empty` made: what it is need not be asked."""
    return View(sys.modules["torch"].utils.dlpack.to_dlpack(array)) if _is_torch(array) else view(array)


def output(array: Any, name: str = "out") -> View:
    """What the core writes: memory of the user's or of `empty`."""
    if _is_torch(array):
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise RuntimeError(f"{name} requires gradients, and what is written into it would have none: leave {name} out, or "
                               "call under torch.no_grad()")
        if array.is_neg() or array.is_conj():
            raise ValueError(f"{name} is a view with the negative or conjugate bit set, which cannot be written")
        sys.modules["torch"].autograd.graph.increment_version(array)
    return view(array, name)


def optional_view(array: Any, name: Optional[str] = None) -> Optional[View]:
    return None if array is None else view(array, name)


def optional_output(array: Any, name: str = "out") -> Optional[View]:
    return None if array is None else output(array, name)


def rank(tensor: View, array: Any, wanted: int, form: str) -> View:
    """The view itself; refused where it has another number of dimensions than `form`, such as "[m, k]"."""
    if len(tensor.shape) != wanted:
        raise refusal(ValueError, array, f"must be {form}, but its shape is {list(tensor.shape)}")
    return tensor


# ---- integers --------------------------------------------------------------------------------------------------------


def integers(values: Any, name: Optional[str] = None) -> View:
    """Lengths, offsets, slots, positions: int32 and int64 arrays as they are, other integers as int64.

    The one conversion of integers. Refused: numbers with a fraction or of a floating dtype, bools, text and bytes, masked
    values, and what int64 does not hold.
    """
    if isinstance(values, View):
        return values
    if _is_torch(values):
        torch = sys.modules["torch"]
        if values.dtype in (torch.int32, torch.int64):
            return view(values, name)
        if values.dtype == torch.bool or values.is_floating_point() or values.is_complex():
            raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {_dtype_name(values)}", name)
        values = values.to(torch.int64) if values.dtype != torch.uint64 else values.numpy()
        if _is_torch(values):
            return view(values, name)
    return view(integer_array(values, name), name)


def int64(values: Any, name: Optional[str] = None) -> View:
    """The same where only 64 bits are taken."""
    tensor = integers(values, name)
    if tensor.dtype != "i32":
        return tensor
    return view(np.asarray(values.detach() if _is_torch(values) else values, dtype=np.int64), name)


def integer_array(values: Any, name: Optional[str] = None) -> np.ndarray:
    """The integers of `values`, which is no torch tensor, as int32 or int64; refused as by `integers`."""
    if values is None or isinstance(values, (str, bytes, bytearray, set, frozenset, dict)):
        raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {_kind(values)}", name)
    shown = _unmasked(values, values, name)
    try:
        array = np.asarray(shown)
    except (TypeError, ValueError, OverflowError) as error:
        raise refusal(type(error) if isinstance(error, (TypeError, ValueError)) else ValueError, values,
                      f"must be integers (int32 or int64): {error}", name) from None
    if isinstance(values, (list, tuple)):
        array = _checked_list(values, array, name)
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise refusal(ValueError, values, f"holds {int(array.max())}, which int64 does not", name)
    if array.dtype.kind not in "iu":
        raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {array.dtype}", name)
    plain = array.dtype in (np.dtype(np.int32), np.dtype(np.int64)) and array.dtype.isnative
    return array if plain else array.astype(np.int64)


def _checked_list(values: Sequence[Any], array: np.ndarray, name: Optional[str]) -> np.ndarray:
    """NumPy's array of a list, or what in the list is no integer. NumPy turns a list with one bool, or with numbers too large
    for int64, into an array of another kind."""
    if array.size == 0:
        return array.astype(np.int64)
    for index, element in _elements(values):
        place = "element " + (str(index[0]) if len(index) == 1 else str(list(index)))
        if isinstance(element, (bool, np.bool_)):
            raise refusal(TypeError, values, f"must be integers, but its {place} is the bool {element}", name)
        try:
            number = element.__index__()
        except (AttributeError, TypeError):
            raise refusal(TypeError, values, f"must be integers, but its {place} is {element!r} ({_kind(element)})",
                          name) from None
        if not -(2**63) <= number < 2**63:
            raise refusal(ValueError, values, f"holds {number} as {place}, which int64 does not", name)
    return array.astype(np.int64, copy=False)


def _elements(values: Sequence[Any], at: tuple = ()):
    for i, element in enumerate(values):
        if isinstance(element, (list, tuple)) or (hasattr(element, "shape") and element.shape != ()):
            yield from _elements(element, (*at, i))
        else:
            yield (*at, i), element


# ---- NumPy and other exporters of memory -----------------------------------------------------------------------------


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).replace("torch.", "")


def _unmasked(memory: Any, value: Any, name: Optional[str]) -> Any:
    """The values of an array of numpy.ma; refused where one of them is hidden."""
    if not isinstance(memory, np.ma.MaskedArray):
        return memory
    if np.ma.is_masked(memory):
        raise refusal(ValueError, value, "is a masked array of which some values are hidden; say what stands in their place "
                      "with .filled(value)", name)
    return memory.data


def _numpy_memory(memory: Any, dtype: Optional[str], value: Any, name: Optional[str]):
    if _is_jax(memory):
        memory = np.asarray(memory)  # the same memory, and read-only, which JAX's DLPack does not say
    memory = _unmasked(memory, value, name)
    # The name of a dtype takes a microsecond to find, the kind of ml_dtypes' types none.
    if isinstance(memory, np.ndarray) and memory.dtype.kind == "V" and memory.dtype.name == "bfloat16" and dtype is None:
        return memory.view(np.uint16), "bf16"
    if dtype is None and getattr(memory, "dtype", None) == np.uint16:
        raise refusal(ValueError, value, 'has dtype uint16, which says nothing about its elements: '
                      'ops_transformer.Tagged(array, "bf16") (or "f16") says what the 16 bits are', name)
    return memory, dtype


def _is_jax(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


# ---- torch -----------------------------------------------------------------------------------------------------------


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch_memory(tensor: Any, value: Any, name: Optional[str]) -> Any:
    """A tensor's bytes as a DLPack capsule, where they are all that it is. Bits that flip signs are resolved."""
    from . import _torch_door as door  # imports torch, which is there

    if not door.has_plain_bytes(tensor):
        reason = door.why_no_bytes(tensor)
        if reason is not None:
            raise refusal(TypeError, value, f"is {reason}; a dense tensor of the host's memory is needed", name)
    if door.records(tensor):
        raise refusal(RuntimeError, value, "requires gradients and this function has none; call it under torch.no_grad() or "
                      "pass a detached tensor (.detach())", name)
    if door.has_tangent(tensor):
        raise refusal(RuntimeError, value, "carries a forward-mode tangent and this function has no derivative", name)
    memory = door.bytes_of(tensor, "view", "the tensor")
    try:
        return sys.modules["torch"].utils.dlpack.to_dlpack(memory)
    except (BufferError, RuntimeError, TypeError) as error:
        raise refusal(TypeError, value, f"has dtype {_dtype_name(tensor)}: {error}", name) from None


# ---- new arrays ------------------------------------------------------------------------------------------------------

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

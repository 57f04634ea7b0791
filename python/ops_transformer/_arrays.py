"""Arrays of any kind as views of the core, and new ones of the same kind.

A value that is taken is taken as it is: no cast, no copy of memory, no gradient cut off without a word. What cannot be taken
so raises TypeError or ValueError; `_calls.public` puts the function's and the argument's name into the message.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _core
from ._core import Context, View


class Tagged(NamedTuple):
    """An array of unsigned integers whose elements are really "bf16" or "f16" (16 bits), "bool", "f8_e4m3" or "f8_e5m2"
    (8 bits)."""

    array: Any
    dtype: str


def short(value: Any) -> str:
    """A value as a message shows it. Not all have a text: integers of many thousand digits, foreign objects."""
    try:
        shape = getattr(value, "shape", None)
        if shape is not None and not isinstance(value, np.generic):
            return f"{type(value).__name__} {list(shape)}" if shape != () else f"{type(value).__name__} {value}"
        text = repr(value)
    except Exception:
        many = type(value) is int
        return f"an integer of {value.bit_length()} bits" if many else f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def refusal(kind: type, value: Any, text: str, name: Optional[str] = None) -> Exception:
    """An error about `value`, `name text`. Where the name is not known here, `_calls.public` finds the argument that is
    `value` and names it."""
    error = kind(f"{name or 'an argument'} {text}")
    error.value, error.text, error.name_given = value, text, name
    return error


def gradients_refused(value: Any, name: Optional[str] = None) -> Exception:
    """Of a tensor that requires gradients, to a function that has none of anything."""
    return refusal(RuntimeError, value, "requires gradients and this function has none; call it under torch.no_grad() or pass a "
                   "detached tensor (.detach())", name)


def view(array: Any, name: Optional[str] = None) -> View:
    """What the core reads: the array's own memory. A torch tensor that is more than its bytes (gradients, subclasses,
    other devices) is refused."""
    # At once, as most are; ml_dtypes calls float8_e5m2 of the kind "f", too.
    if type(array) is np.ndarray and array.dtype.kind == "f" and array.dtype.itemsize > 1 and array.dtype.isnative:
        try:
            return View(array)
        except (TypeError, ValueError) as error:
            raise _unreadable(error, array, array, name) from None
    if is_torch(array):
        return _torch_view(array, None, array, name)
    if isinstance(array, View):
        return array
    if array is None:
        raise refusal(TypeError, array, "is None, but an array is needed", name)
    tagged, dtype = (array.array, array.dtype) if isinstance(array, Tagged) else (array, None)
    if tagged is None or not (dtype is None or isinstance(dtype, str)):
        raise refusal(TypeError, array, f"is {array!r}, must be Tagged(array, \"bf16\") (or \"f16\", \"bool\")", name)
    if is_torch(tagged):
        return _torch_view(tagged, dtype, array, name)
    memory, dtype = _numpy_memory(tagged, dtype, array, name)
    try:
        return View(memory, dtype)
    except (TypeError, ValueError) as error:
        raise _unreadable(error, memory, array, name) from None


def _unreadable(error: Exception, memory: Any, value: Any, name: Optional[str]) -> Exception:
    """The error of the core about an array, which does not know NumPy's dtypes, in words that name this one."""
    dtype = memory.dtype if isinstance(memory, np.ndarray) else None
    if dtype in _TAKEN and any(stride % dtype.itemsize for stride in memory.strides):
        return refusal(ValueError, value, f"has strides of {list(memory.strides)} bytes, must be multiples of its elements' "
                       f"{dtype.itemsize}; a copy has such strides", name)
    if dtype is None or dtype in _TAKEN or isinstance(value, Tagged):
        return refusal(type(error), value, f"cannot be taken: {error}", name)
    if not dtype.isnative and dtype.newbyteorder("=") in _TAKEN:
        native = dtype.newbyteorder("=")
        return refusal(type(error), value, f"has dtype {dtype.str}, {native} in the byte order of other machines; "
                       f".astype(\"{native}\") turns it", name)
    return refusal(type(error), value, f"has dtype {dtype}, which is not supported ({', '.join(_NUMPY)} and bf16 are)", name)


def view_of_new(array: Any) -> View:
    """The view of an array that `empty` made, without the questions that `view` asks."""
    return View(sys.modules["torch"].utils.dlpack.to_dlpack(array)) if is_torch(array) else view(array)


def output(array: Any, name: str = "out") -> View:
    """What the core writes: memory of the user's or of `empty`."""
    if is_torch(array):
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise RuntimeError(f"{name} requires gradients, and what is written into it would have none: leave {name} out, or "
                               "call under torch.no_grad()")
        if not (_door or _load_door()).has_plain_bytes(array):
            raise TypeError(f"{name} is {_door.why_no_bytes(array) or 'a view with the negative or conjugate bit'}; what is written "
                            "needs a dense tensor of the host's memory")
        if not array.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(array)
        try:
            return View(_to_dlpack(array))
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype that view names
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


def integers_shape(x: Any, shape: Sequence[int], bits: int) -> Tuple[int, ...]:
    """That of the integers which stand for x of this shape: two int4 share a byte."""
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, must be 4 or 8")
    if len(shape) == 0:
        raise refusal(ValueError, x, "must have at least one dimension, but its shape is []")
    if bits == 4 and shape[-1] % 2:
        raise ValueError(f"int4 holds two values a byte, but a row of x has {shape[-1]}")
    return tuple(shape) if bits == 8 else (*shape[:-1], shape[-1] // 2)


# ---- integers --------------------------------------------------------------------------------------------------------


def integers(values: Any, name: Optional[str] = None) -> View:
    """Lengths, offsets, slots, positions: int32 and int64 arrays as they are, other integers as int64.

    The one conversion of integers. Refused: numbers with a fraction or of a floating dtype, bools, text and bytes, masked
    values, and what int64 does not hold.
    """
    if isinstance(values, View):
        return values
    return view(integer_tensor(values, name) if is_torch(values) else integer_array(values, name), name)


def int64(values: Any, name: Optional[str] = None) -> View:
    """`integers` for functions that take int64 alone."""
    tensor = integers(values, name)
    if tensor.dtype != "i32":
        return tensor
    return view(np.asarray(values.detach() if is_torch(values) else values, dtype=np.int64), name)


def integer_tensor(values: Any, name: Optional[str]) -> Any:
    """`integers` as a torch tensor, for operators of torch."""
    torch = sys.modules["torch"]
    tensor = values
    if not is_torch(values):
        if not torch.compiler.is_compiling() or not isinstance(values, (list, tuple, range)):
            return torch.from_numpy(integer_array(values, name).copy())
        tensor = torch.tensor(values) if len(values) > 0 else torch.empty(0, dtype=torch.int64)
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {_dtype_name(tensor)}", name)
    if tensor.dtype == torch.uint64 and not torch.compiler.is_compiling():  # may hold what int64 does not
        return torch.from_numpy(integer_array(tensor.numpy(), name))
    return tensor.to(torch.int64)


def integer_array(values: Any, name: Optional[str] = None) -> np.ndarray:
    """The integers of `values`, which is no torch tensor, as int32 or int64; refused as by `integers`."""
    if values is None or isinstance(values, (str, bytes, bytearray, set, frozenset, dict)):
        raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {_kind(values)}", name)
    shown = _unmasked(values, values, name)
    try:
        array = np.asarray(shown)
    except MemoryError:
        raise refusal(MemoryError, values, "holds more integers than memory does", name) from None
    except Exception as error:  # NumPy's, or the object's own
        said = _ragged(values) or f"must be integers (int32 or int64): {error}"
        raise refusal(type(error) if type(error) in (TypeError, ValueError) else
                      ValueError if isinstance(error, OverflowError) else TypeError, values, said, name) from None
    if isinstance(values, (list, tuple)):
        array = _checked_list(values, array, name)
    if array.dtype.kind not in "iu":
        raise refusal(TypeError, values, f"must be integers (int32 or int64), but is {array.dtype}", name)
    if array.dtype in (np.dtype(np.int32), np.dtype(np.int64)) and array.dtype.isnative:
        return array
    # The copy first: a repeated element may be too many to be looked at, and then there is no memory for them.
    copy = array.astype(np.int64)
    if array.dtype.kind == "u" and array.itemsize == 8 and copy.size and int(copy.min()) < 0:
        raise refusal(ValueError, values, f"holds {int(array.max())}, which int64 does not", name)
    return copy


def _checked_list(values: Sequence[Any], array: np.ndarray, name: Optional[str]) -> np.ndarray:
    """NumPy's array of a list, or what in the list is no integer. NumPy turns a list with one bool, or with numbers too large
    for int64, into an array of another kind."""
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype == np.int64 and array.ndim == 1 and set(map(type, values)) == {int}:
        return array  # plain numbers that int64 holds, as most lists are
    for index, element in _elements(values):
        place = "element " + (str(index[0]) if len(index) == 1 else str(list(index)))
        if isinstance(element, (bool, np.bool_)):
            raise refusal(TypeError, values, f"must be integers, but its {place} is the bool {element}", name)
        try:
            number = element.__index__()
        except Exception:  # of an object that is no integer, or of its own
            raise refusal(TypeError, values, f"must be integers, but its {place} is {short(element)} ({_kind(element)})",
                          name) from None
        if not -(2**63) <= number < 2**63:
            raise refusal(ValueError, values, f"holds {short(number)} as {place}, which int64 does not", name)
    return array.astype(np.int64, copy=False)


def _ragged(values: Any) -> Optional[str]:
    """Which rows of a list of rows differ in length, in words; None: none of them."""
    if not isinstance(values, (list, tuple)):
        return None
    lengths = [len(row) if hasattr(row, "__len__") else None for row in values]
    for i, length in enumerate(lengths):
        if length != lengths[0]:
            said = ["a number" if n is None else f"{n} long" for n in (lengths[0], length)]
            return f"must have rows of one length, but row 0 is {said[0]} and row {i} is {said[1]}"
    return None


def _shape_of(element: Any) -> Any:
    try:
        return getattr(element, "shape", ())
    except Exception:  # the object's own
        return ()


def _elements(values: Sequence[Any], at: tuple = ()):
    for i, element in enumerate(values):
        if isinstance(element, (list, tuple)) or _shape_of(element) != ():
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
    if dtype is None and isinstance(memory, np.ndarray) and memory.dtype.itemsize == 1 and memory.dtype.name in _FLOAT8:
        return memory.view(np.uint8), _FLOAT8[memory.dtype.name]
    if dtype is None and isinstance(memory, (np.ndarray, np.generic)) and memory.dtype == np.uint16:
        raise refusal(ValueError, value, 'has dtype uint16, which says nothing about its elements: '
                      'ops_transformer.Tagged(array, "bf16") (or "f16") says what the 16 bits are', name)
    return memory, dtype


def _is_jax(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


# ---- torch -----------------------------------------------------------------------------------------------------------


# Kinds that are no tensor, asked before torch, whose own question costs as much as a view.
_NO_TENSORS = frozenset((np.ndarray, list, tuple, range, int, float, bool, str, type(None), View, Context))


def is_torch(array: Any) -> bool:
    if type(array) in _NO_TENSORS:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and (type(array) is torch.Tensor or isinstance(array, torch.Tensor))


_door: Any = None
_to_dlpack: Any = None


def _load_door() -> Any:
    """The module that knows torch, imported with the first tensor."""
    global _door, _to_dlpack
    if _door is None:
        from . import _torch_door

        _door, _to_dlpack = _torch_door, sys.modules["torch"].utils.dlpack.to_dlpack
    return _door


def _torch_view(tensor: Any, dtype: Optional[str], value: Any, name: Optional[str]) -> View:
    """A tensor's bytes, where they are all that it is. Bits that flip signs are resolved."""
    door = _door or _load_door()
    if not door.has_plain_bytes(tensor):
        reason = door.why_no_bytes(tensor)
        if reason is not None:
            raise refusal(TypeError, value, f"is {reason}; a dense tensor of the host's memory is needed", name)
        memory = door.bytes_of(tensor, "view", "the tensor")
    else:
        memory = tensor
    if door.records(tensor):
        raise gradients_refused(value, name)
    if door.has_tangent(tensor):
        raise refusal(RuntimeError, value, "carries a forward-mode tangent and this function has no derivative", name)
    if dtype is None and memory.element_size() == 1 and _dtype_name(memory) in _FLOAT8:
        memory, dtype = memory.view(sys.modules["torch"].uint8), _FLOAT8[_dtype_name(memory)]
    try:
        return View(_to_dlpack(memory), dtype)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        which = "" if door.between_elements(memory) else f"has dtype {_dtype_name(tensor)}, which "
        raise refusal(ValueError if isinstance(error, ValueError) else TypeError, value, f"{which}cannot be taken: {error}",
                      name) from None


# ---- new arrays ------------------------------------------------------------------------------------------------------

# Names of ml_dtypes and torch.
_FLOAT8 = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}
_NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i8": np.int8, "u8": np.uint8, "i32": np.int32,
          "i64": np.int64, "bool": np.bool_}
_TAKEN = frozenset(np.dtype(kind) for kind in _NUMPY.values())


# Bytes from which on the system has huge pages to give.
_HUGE_BYTES = 2 << 20


def _huge_bytes(shape: Sequence[int], item: int) -> Optional[np.ndarray]:
    """The bytes of an array, in huge pages where the system has any; None where they are too few."""
    size = 0 if min(shape, default=0) < 0 else math.prod(shape) * item
    if size > 2**56:
        raise MemoryError("more bytes than a tensor can have")
    return _core.huge_bytes(size) if size >= _HUGE_BYTES else None


def empty(like: Any, shape: Sequence[int], dtype: str, huge: bool = False) -> Any:
    """A new array of the kind of `like`: torch for torch, else NumPy; bf16 and f8 tagged or of ml_dtypes, as `like` is.

    huge: from 2 MiB on in huge pages. MemoryError where no memory holds it.
    """
    shape = tuple(shape)

    def new(kind: Any) -> np.ndarray:
        memory = _huge_bytes(shape, np.dtype(kind).itemsize) if huge else None
        return np.empty(shape, kind) if memory is None else memory.view(kind).reshape(shape)
    try:
        if is_torch(like):
            torch = sys.modules["torch"]
            types = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
                     "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool}
            for name, kind in _FLOAT8.items():
                if kind == dtype:
                    types[kind] = getattr(torch, name)
            memory = _huge_bytes(shape, types[dtype].itemsize) if huge else None
            if memory is None:
                return torch.empty(shape, dtype=types[dtype])
            return torch.from_numpy(memory).view(types[dtype]).reshape(shape)
        if dtype == "bf16":
            bits = new(np.uint16)
            if isinstance(like, Tagged) or "ml_dtypes" not in sys.modules:
                return Tagged(bits, "bf16")
            return bits.view(sys.modules["ml_dtypes"].bfloat16)
        if dtype in _FLOAT8.values():
            bits = new(np.uint8)
            if isinstance(like, Tagged) or "ml_dtypes" not in sys.modules:
                return Tagged(bits, dtype)
            name = next(name for name, kind in _FLOAT8.items() if kind == dtype)
            return bits.view(getattr(sys.modules["ml_dtypes"], name))
        return new(_NUMPY[dtype])
    # NumPy has a ValueError where the bytes cannot be counted, torch a RuntimeError for both.
    except (MemoryError, ValueError, RuntimeError) as error:
        if any(size < 0 for size in shape):
            raise
        raise MemoryError(f"a result of {dtype} {list(shape)} is needed, for which there is no memory") from error

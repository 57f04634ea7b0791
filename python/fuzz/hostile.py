"""Python objects that are no arrays, or hardly: what nobody means to give and somebody will."""

from __future__ import annotations

import array
import copy
import ctypes
import importlib.util
from typing import Any

import numpy as np

from ops_transformer import Context, Tagged

torch: Any = None  # once load_torch was called
bfloat16: Any = None
if importlib.util.find_spec("ml_dtypes") is not None:
    import ml_dtypes

    bfloat16 = ml_dtypes.bfloat16


def load_torch() -> bool:
    """Whether torch can be imported."""
    global torch
    if torch is None and importlib.util.find_spec("torch") is not None:
        import torch as module

        torch = module
        torch.set_num_threads(1)
    return torch is not None


def is_torch(value: Any) -> bool:
    return torch is not None and isinstance(value, torch.Tensor)


class _Raises:
    """One protocol of arrays or numbers, and what an object of it raises."""

    def __init__(self, name: str, error: type) -> None:
        self._name, self._error = name, error

    def __repr__(self) -> str:
        return f"an object whose {self._name} raises {self._error.__name__}"


def _raising(name: str, error: type) -> Any:
    def fail(self: Any, *_: Any, **__: Any) -> Any:
        raise error(f"{name} of a foreign object")

    held = property(fail) if name in ("__array_interface__", "__array_struct__", "shape", "dtype") else fail
    return type("Foreign", (_Raises,), {name: held})(name, error)


def _giving(name: str, result: Any) -> Any:
    held = property(lambda self: result) if name in ("__array_interface__", "shape", "dtype") else lambda self, *_, **__: result
    return type("Foreign", (), {name: held, "__repr__": lambda self: f"an object whose {name} gives {result!r}"})()


class _NoAttributes:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name} of a foreign object")


class _NoText:
    def __repr__(self) -> str:
        raise KeyError("no text of a foreign object")


class _Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_float)]


class _Subclass(np.ndarray):
    pass


def _released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


# Where a number is expected. Whoever prints 10^5000 hears ValueError of Python itself.
NUMBERS = (0, 1, -1, 2, 3, 1.0, 0.0, -1.0, 2.5, float("nan"), float("inf"), -float("inf"), 1e-300, 1e300, 2**33, 2**62, 2**63 - 1,
           2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**400, 10**5000, True, False, np.bool_(True), np.int64(3),
           np.uint64(2**64 - 1), np.int8(-1), np.float32(0.5), np.float16(2), np.float64(1), np.array(3), np.array(0.5), np.array([3]),
           np.longdouble(1), 1j, None)

_RAISING = [_raising(name, error)
            for name in ("__array_interface__", "__array_struct__", "__array__", "__dlpack__", "__dlpack_device__", "__len__",
                         "__getitem__", "__iter__", "__index__", "__float__", "__int__", "shape", "dtype", "__bool__", "__eq__")
            for error in (KeyError, AttributeError, AssertionError, RuntimeError, TypeError, BufferError, ValueError)]
_GIVING = [_giving(name, result)
           for name in ("__array_interface__", "__array__", "__dlpack__", "__dlpack_device__", "__index__", "__float__", "__len__",
                        "shape", "dtype")
           for result in (None, 3, "text", {}, {"shape": (2,)}, {"version": 3, "shape": (-1,), "typestr": "<f4", "data": None},
                          (1, 2), [], -1, 2**70)]

_OBJECTS = (
    None, [], (), [1.0], [0.5, 2], [[1], [1, 2]], [[]], [None], [True, 2], ["a"], [2**63], [2**64], [-1], [10**5000], [np.int64(1)],
    [np.array([1, 2])], "", "text", "\udc80", "none", "norm", "f32", b"", b"bytes", bytearray(b"some bytes"), object(), {}, {1: 2},
    {1, 2}, range(3), range(0), range(2**62), len, int, np, ..., NotImplemented, slice(1, 2), Exception("an error"),
    np.array(1.0, np.float32), np.array([], np.float32), np.array([1, "a"], object), np.array(["a", "bc"]), np.array([b"a"]),
    np.array([1 + 2j]), np.zeros(3, np.longdouble), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4"), ("b", "i4")]),
    np.zeros((2, 2), ">f4"), np.zeros((1,) * 20, np.float32), np.zeros(3, np.uint16), np.zeros((0, 2**60), np.float32),
    np.broadcast_to(np.float32(1), (2**40, 3)), np.broadcast_to(np.uint64(1), (2**40,)), np.broadcast_to(np.int32(1), (2**40,)),
    np.broadcast_to(np.int8(1), (2**31, 2**20)), np.ma.masked_array([1.0, 2.0], [True, False]), np.ma.masked_array([1, 2], [True, False]),
    np.ma.masked_array([1.0, 2.0]), np.ma.masked, np.zeros(3, np.float32).view(_Subclass),
    np.rec.array([(1, 2.0)]), np.dtype("f4"), np.float32, np.float32(2), np.str_("f32"), np.bytes_(b"f32"), np.datetime64("2020"),
    memoryview(b"some bytes"), memoryview(bytearray(12)).cast("f"), memoryview(bytearray(24)).cast("f", [2, 3]), _released(),
    array.array("f", [1, 2, 3]), array.array("q", [1, 2]), array.array("u", "text"), array.array("b"), (ctypes.c_float * 3)(),
    ((ctypes.c_float * 3) * 2)(), (ctypes.c_int64 * 2)(1, 1), (ctypes.c_char * 4)(), (_Pair * 2)(), _Pair(), ctypes.c_float(1),
    ctypes.py_object(3), Tagged(None, "bf16"), Tagged(np.zeros((2, 2), np.uint16), "f99"), Tagged(np.zeros((2, 2), np.uint16), 3),
    Tagged(np.zeros((2, 2), np.uint16), None), Tagged("text", "bf16"), Tagged([1, 2], "bf16"), Tagged(np.zeros(2, np.float32), "bf16"),
    Tagged(Tagged(np.zeros(2, np.uint16), "bf16"), "bf16"), Tagged(np.zeros((2, 2), np.float32), "f32"),
    Tagged(None, "bool"), Tagged("text", "bool"), Tagged([[1], [1, 2]], "bool"), Tagged(np.zeros((2, 2)), "bool"),
    Tagged(_raising("__array__", KeyError), "bool"), Tagged(np.zeros(2, np.uint8), "\udc80"),
    (np.zeros((2, 2), np.uint16), "bf16"), _NoAttributes(), _NoText(), Context(1), 0.5, 1, 2**64,
)


def draw(choose: Any) -> Any:
    """One of them; where the draw is one of torch tensors, also one that is more than its bytes."""
    if choose.with_torch and choose.coin():
        return _own(choose.pick(_tensors()))
    return _own(choose.pick(choose.pick((_OBJECTS, _OBJECTS, _OBJECTS, _RAISING, _GIVING, NUMBERS))))


def _own(value: Any) -> Any:
    """A copy of what a call may write, so that no call finds what another one left."""
    if type(value) is np.ndarray:
        return value.copy() if value.flags.writeable else value
    if torch is not None and type(value) is torch.Tensor:
        plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_nested and not value.requires_grad
        return value.clone() if plain and value.numel() < 1000 else value
    return copy.deepcopy(value) if isinstance(value, (bytearray, array.array, ctypes.Array)) else value


def dressed(choose: Any, view: np.ndarray) -> Any:
    """The same memory as another kind of array."""
    kind = choose.pick(("masked", "hidden", "memoryview", "subclass"))
    if view.size > 10_000 and kind in ("masked", "hidden"):
        return view  # a mask takes a byte of memory for each element
    try:
        if kind == "masked":
            return np.ma.masked_array(view)
        if kind == "hidden":
            return np.ma.masked_array(view, np.ones(view.shape, bool))
        if kind == "memoryview":
            return memoryview(view)
    except (ValueError, TypeError, BufferError):
        return view
    return view.view(_Subclass) if kind == "subclass" else view


_made: Any = None


def _tensors() -> Any:
    global _made
    if _made is None:
        class Subclass(torch.Tensor):
            pass

        plain = torch.ones(2, 3)
        _made = (
            plain, plain.to_sparse(), plain.to("meta"), plain.to(torch.complex64), plain.bool(), plain.to(torch.int16),
            plain.to(torch.uint16), plain.to(torch.float8_e5m2), torch.ones(2, 3).requires_grad_(), torch.nn.Parameter(torch.ones(3)),
            torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), torch.nested.nested_tensor([plain, plain]),
            plain.as_subclass(Subclass), torch.ones(()), torch.empty(0), torch.ones(1).expand(2**40, 3), torch.tensor(3),
            torch.tensor([1, 2]), torch.tensor([2.7]), torch.tensor([True]), torch.zeros(2, 0), torch._neg_view(torch.ones(2, 3)),
            torch.complex(plain, plain).conj().imag, torch.tensor([2**63 - 1]), torch.tensor([1, 2], dtype=torch.uint64),
            torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.zeros(3, dtype=torch.uint8), torch.int64)
    return _made

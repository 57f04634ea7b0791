"""What the fuzz target of the Python package draws: numbers, options, and arrays of any form in memory that is watched.

    draw = Draw(seed=7)
    x = draw.array("f32", (3, 8))                   # an Operand: x.value is what the function is given
    out = draw.array("f32", (3, 8), written=True)   # one that a call may write

Every choice comes from the seed. Memory of an operand lies between guard bytes, and what it held before the call is kept.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import Any, List, Optional, Sequence, Tuple

import hostile
import numpy as np

from ops_transformer import Tagged

GUARD_BYTES = 64
# Of an operand that a call may really go through, and whose values are compared.
MOST_ELEMENTS = 200_000
EXTREMES = (2**33, 2**40, 2**55, 2**60)

NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16, "i8": np.int8, "u8": np.uint8,
         "i32": np.int32, "i64": np.int64, "bool": np.bool_}
FLOATS = ("f32", "f64", "f16", "bf16")
_FOREIGN = ("int16", "uint16", "uint32", "uint64", "complex64", "longdouble", "datetime64[s]", "S3", "U2", "V4")


class Operand:
    """An argument that is memory, and what the memory held before the call."""

    def __init__(self, value: Any, view: np.ndarray, memory: np.ndarray, written: bool, dtype: str) -> None:
        self.value, self.view, self.memory, self.written, self.dtype = value, view, memory, written, dtype
        self.before = memory.copy()

    def restore(self) -> None:
        self.memory[...] = self.before

    def changed(self) -> np.ndarray:
        """Which bytes are not what they were."""
        return np.flatnonzero(self.memory != self.before)

    def own_bytes(self) -> np.ndarray:
        """The indices of the bytes of its elements, in `memory`."""
        first = self.view.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
        at = np.full((1,) * self.view.ndim, first, np.int64)
        for axis, (size, stride) in enumerate(zip(self.view.shape, self.view.strides)):
            at = at + (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(self.view.ndim)])
        return (at[..., None] + np.arange(self.view.itemsize)).reshape(-1)

    def is_small(self) -> bool:
        return math.prod(self.view.shape) <= MOST_ELEMENTS

    def clone(self) -> Any:
        """The same values, contiguous, of the same kind and in memory of its own."""
        if hostile.is_torch(self.value):
            copy = self.value.detach().resolve_neg().resolve_conj()
            return copy.clone(memory_format=hostile.torch.contiguous_format)
        copy = np.array(self.view, order="C")
        if isinstance(self.value, Tagged):
            return Tagged(copy, self.value.dtype)
        return copy.view(self.value.dtype) if isinstance(self.value, np.ndarray) and self.value.ndim else copy

    def numbers(self) -> np.ndarray:
        return to_numbers(Tagged(self.view, "bf16") if self.dtype == "bf16" else self.view)

    def __repr__(self) -> str:
        kind = type(self.value).__module__ + "." + type(self.value).__name__
        read_only = "" if self.view.flags.writeable else " read-only"
        return (f"{kind} {self.dtype} {list(self.view.shape)} strides {list(self.view.strides)} bytes"
                f"{' written' if self.written else ''}{read_only}")


def to_numbers(value: Any) -> np.ndarray:
    """Any array's elements as float64, or as they are where they are integers."""
    if hostile.is_torch(value):
        value = value.detach().resolve_neg().resolve_conj()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, Tagged):
        bits = np.asarray(value.array)
        value = (bits.astype(np.uint32) << 16).view(np.float32) if value.dtype == "bf16" else bits.view(np.float16)
    value = np.asarray(value)
    return value if value.dtype.kind in "iub" else value.astype(np.float64)


class Draw:
    """Choices out of a seed. with_torch: arrays are mostly torch tensors."""

    def __init__(self, seed: int, with_torch: bool = False) -> None:
        self._random = random.Random(seed)
        self._values = np.random.default_rng(seed)
        self.with_torch = with_torch
        self.operands: List[Operand] = []
        # Calls of mostly usual arguments reach the operators; one in three is full of surprises.
        self.wildness = self.pick((8, 2, 1))

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self._random.randrange(len(values))]

    def coin(self) -> bool:
        return self._random.random() < 0.5

    def rarely(self, rarity: int) -> bool:
        return self._random.random() * rarity < 1

    def wildly(self, rarity: int) -> bool:
        """What most calls have none of: a surprise."""
        return self._random.random() * rarity * self.wildness < 1

    def maybe(self, make: Any, rarity: int = 2) -> Any:
        return make() if self.rarely(rarity) else None

    def real(self, *more: str) -> str:
        return self.pick(("f32", "f32", "bf16", "f16", *more))

    def size(self, low: int, high: int) -> int:
        return 0 if self.wildly(30) else self.integer(low, high)

    def outward(self, low: int, high: int) -> int:
        """The size of a dimension that new results have as well: an extreme one asks for more memory than there is."""
        return self.pick(EXTREMES) if self.wildly(60) else self.size(low, high)

    def option(self, usual: Sequence[Any]) -> Any:
        """One of the usual values, now and then something else."""
        if self.wildly(25):
            return self.pick(hostile.NUMBERS) if self.coin() else hostile.draw(self)
        return self.pick(usual)

    def any_integer(self) -> int:
        return self.pick((0, 1, -1, 2, 7, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)))

    # ---- arrays ------------------------------------------------------------------------------------------------------

    def array(self, dtype: str, shape: Sequence[int], *, written: bool = False, low: int = 0, high: int = 1,
              values: Any = None) -> Any:
        """An Operand; rarely something that is none, or not what was asked for."""
        if self.wildly(40):
            return hostile.draw(self)
        if self.wildly(60):
            dtype = self.pick((*NUMPY, *_FOREIGN))
        shape = self._shape(list(shape))
        kind = np.dtype(NUMPY.get(dtype, dtype))
        if self.wildly(80):
            kind = kind.newbyteorder()
        view, memory = self._memory(kind, shape, written)
        self._fill(view, dtype, low, high, values)
        return self._operand(view, memory, dtype, written)

    def _shape(self, shape: List[int]) -> Tuple[int, ...]:
        if self.wildly(50):
            where = self.integer(0, len(shape))
            what = self.integer(0, 5)
            if what == 0:
                shape.insert(where, self.integer(0, 2))
            elif what == 1:
                shape = shape[:where]
            elif what == 2:
                shape = [1] * self.integer(0, 9) + shape
            elif shape:
                where = min(where, len(shape) - 1)
                shape[where] = max(0, self.pick((shape[where] + 1, shape[where] - 1, 0, 1, *EXTREMES)))
        return tuple(shape)

    def _memory(self, kind: np.dtype, shape: Tuple[int, ...], written: bool) -> Tuple[np.ndarray, np.ndarray]:
        """An array of any strides, in bytes between guards; dimensions that are too large repeat one element."""
        order = list(range(len(shape)))
        form = self.pick(("plain",) * 4 + ("gaps", "turned", "negative", "steps", "repeated"))
        if form == "repeated" and written and not self.wildly(4):
            form = "plain"
        if form == "turned":
            self._random.shuffle(order)
        strides, step = [0] * len(shape), kind.itemsize
        for axis in reversed(order):
            strides[axis] = step
            step = min(step * max(shape[axis], 1), 1 << 40)
            if form == "gaps":
                step += kind.itemsize * self.integer(0, 3)
        if shape and form in ("negative", "steps", "repeated"):
            for axis in range(len(shape)):
                if self.coin():
                    strides[axis] *= {"negative": -1, "steps": 2, "repeated": 0}[form]
        first = last = 0
        for axis, size in enumerate(shape):
            reach = (size - 1) * strides[axis] if size > 1 else 0
            if abs(reach) > 1 << 20:
                strides[axis], reach = 0, 0
            first, last = first + min(reach, 0), last + max(reach, 0)
        empty = 0 in shape
        span = 0 if empty else last - first + kind.itemsize
        start = GUARD_BYTES + (1 if self.wildly(80) else 0)
        memory = np.empty(span + 2 * GUARD_BYTES + 1, np.uint8)
        memory[...] = self._values.integers(0, 255, memory.shape, dtype=np.uint8)
        try:
            return np.ndarray(shape, kind, memory, start - (0 if empty else first), strides), memory
        except ValueError:  # more bytes than NumPy counts, or more dimensions
            return self._memory(kind, tuple(min(size, 3) for size in shape[:5]), written)

    def _fill(self, view: np.ndarray, dtype: str, low: int, high: int, values: Any) -> None:
        if math.prod(view.shape) > MOST_ELEMENTS:  # of a repeated element the value is written once
            view = view[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.strides)]
        if dtype in _FOREIGN or not 0 < math.prod(view.shape) <= MOST_ELEMENTS:
            return
        if values is not None and np.shape(values) == view.shape:
            numbers = np.asarray(values)
        elif dtype in FLOATS:
            numbers = self._values.standard_normal(view.shape)
            if self.wildly(16) and numbers.size:
                special = self._values.choice([np.inf, -np.inf, np.nan, 0.0], view.shape)
                numbers = np.where(self._values.random(view.shape) < 0.05, special, numbers)
        else:
            numbers = self._values.integers(low, max(low, high), view.shape, endpoint=True)
        with np.errstate(all="ignore"):
            if dtype == "bf16":
                view[...] = numbers.astype(np.float32).view(np.uint32) >> 16
            else:
                view[...] = numbers

    def _operand(self, view: np.ndarray, memory: np.ndarray, dtype: str, written: bool) -> Operand:
        value: Any = view
        if self.with_torch and not self.rarely(8) and self._torch_takes(view, dtype):
            value = self._tensor(view, dtype, written)
        else:
            if self.wildly(40):
                view.flags.writeable = False
            if dtype == "bf16":
                bfloat16 = hostile.bfloat16
                value = view.view(bfloat16) if bfloat16 is not None and view.dtype.isnative and self.coin() else Tagged(view, "bf16")
            elif dtype == "f16" and view.dtype.isnative and self.rarely(8):
                value = Tagged(view.view(np.uint16), "f16")
            elif dtype == "bool" and self.rarely(8):
                value = Tagged(view.view(np.uint8), "bool")
            elif self.wildly(60):
                value = hostile.dressed(self, view)
        operand = Operand(value, view, memory, written, dtype)
        self.operands.append(operand)
        return operand

    @staticmethod
    def _torch_takes(view: np.ndarray, dtype: str) -> bool:
        return (dtype in NUMPY and view.dtype.isnative and view.flags.aligned and all(stride >= 0 for stride in view.strides)
                and all(stride % view.itemsize == 0 for stride in view.strides))

    def _tensor(self, view: np.ndarray, dtype: str, written: bool) -> Any:
        torch = hostile.torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.from_numpy(view.view(np.int16) if dtype == "bf16" else view)
        if dtype == "bf16":
            tensor = tensor.view(torch.bfloat16)
        if dtype in FLOATS and not written:
            if self.rarely(12):
                tensor.requires_grad_(True)
            elif self.wildly(30):
                tensor = torch._neg_view(tensor)
        return tensor

    def integers(self, values: Sequence[int], shape: Optional[Sequence[int]] = None) -> Any:
        """Given integers in one of the many forms in which they are taken: lists, tuples, arrays of any integers."""
        if self.wildly(40):
            return hostile.draw(self)
        values = list(values)
        if self.wildly(20) and values:
            values[self.integer(0, len(values) - 1)] = self.pick((self.any_integer(), *hostile.NUMBERS))
        form = self.pick(("array", "array", "array", "list", "tuple", "other"))
        exact = all(type(value) is int and -(2**31) <= value < 2**31 for value in values)
        if form in ("list", "tuple") and (shape is None or len(shape) == 1):
            return values if form == "list" else tuple(values)
        if not exact:
            return values
        shape = (len(values),) if shape is None else tuple(shape)
        given = np.array(values, np.int64).reshape(shape)
        if form == "other":
            kind = self.pick((np.int8, np.int16, np.uint8, np.uint32, np.uint64, ">i4", ">i8"))
            with np.errstate(all="ignore"):
                return given.astype(kind)
        return self.array(self.pick(("i32", "i64")), shape, values=given)

    def aliased(self, operand: Any) -> Any:
        """The operand itself as an output, or the same memory the other way round."""
        if not isinstance(operand, Operand):
            return operand
        operand.written = True
        if self.rarely(3) and type(operand.value) is np.ndarray and operand.view.ndim:
            view = operand.view[::-1]
            other = Operand(operand.value[::-1], view, operand.memory, True, operand.dtype)
            self.operands.append(other)
            return other
        return operand

"""The oracle of the fuzz target: what every call of the package keeps, whatever it is given.

    verdict = judge(call)      # "accepted" or "refused"; BrokenPromise where a promise is broken

A refused call raises one of five kinds of errors, names its function, and has written nothing. An accepted one writes its
outputs alone, gives the same bits on one thread as on three, and the values that contiguous copies of its arguments give at
the generic level, within TOLERANCE times the largest number of the result.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import hostile
import numpy as np
from draws import MOST_ELEMENTS, Operand, to_numbers

from ops_transformer import Context, Tagged, matmul

# By the coarsest floating dtype among arguments and results.
TOLERANCE = {"f64": 1e-9, "f32": 3e-4, "f16": 1e-2, "bf16": 8e-2}
_LARGEST = {"f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "f16": 65504.0, "f64": 1.7976931348623157e308}
_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, MemoryError)
# Words of Python, NumPy and the binding about the package's inside, which say nothing to a caller.
_INSIDE = re.compile(r"incompatible function arguments|nanobind|_core\b|has no attribute|unsupported operand|truth value|ufunc"
                     r"|object is not (iterable|subscriptable|callable)|not supported between|unhashable"
                     r"|cannot unpack|could not be broadcast|can't multiply|positional argument|integer string conversion")

THREADS = Context(3)
ONE = Context(1)
GENERIC = Context(1, "generic")


class BrokenPromise(Exception):
    """What a call did that it must not."""


class Call(NamedTuple):
    """A function and its arguments by name; each an Operand, a Made or a value as it is."""

    function: Callable[..., Any]
    arguments: Dict[str, Any]
    tolerance: Optional[float] = None  # None: that of the dtypes
    compared: bool = True  # whether the values are those of copies; not where an argument makes no sense
    names: bool = True  # whether errors are the package's own
    state: Optional[Callable[[], Any]] = None  # of an object that a refused call must not change
    takes_context: bool = True
    given_back: Tuple[str, ...] = ()  # inputs that are a part of the result

    @property
    def name(self) -> str:
        return self.function.__qualname__

    def shown(self) -> str:
        lines = [f"{self.function.__module__}.{self.name}("]
        for name, value in self.arguments.items():
            try:
                text = repr(value)
            except Exception as error:  # a hostile object, or a number of too many digits
                text = f"a {type(value).__name__} without a text ({type(error).__name__})"
            lines.append(f"  {name}={text if len(text) <= 300 else text[:300] + '...'}")
        return "\n".join((*lines, ")"))


class Made(NamedTuple):
    """An argument that another public function makes of its own: a packed weight."""

    call: Call


def _given(value: Any, context: Context, clone: bool) -> Any:
    if isinstance(value, Operand):
        return value.clone() if clone else value.value
    if not isinstance(value, Made):
        return value
    try:
        return _run(value.call, context, clone)
    except BaseException as error:
        error.in_making = value.call
        raise


@functools.lru_cache(maxsize=None)
def _needed(function: Callable[..., Any]) -> Tuple[str, ...]:
    """The arguments that have no default: None where nothing else is given."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)


def _run(call: Call, context: Context, clone: bool = False, filled: Optional[Dict[str, Any]] = None) -> Any:
    arguments = {name: _given(value, context, clone) for name, value in call.arguments.items()}
    for name in _needed(call.function):
        arguments.setdefault(name, None)
    if filled is not None:
        filled.update(arguments)
    if call.takes_context and "context" not in arguments:
        arguments["context"] = context
    return call.function(**arguments)


def _flat(result: Any) -> List[Any]:
    if isinstance(result, (tuple, list)) and not isinstance(result, Tagged):
        return [part for element in result for part in _flat(element)]
    if result is None:
        return []
    if hostile.is_torch(result):
        return [] if result.device.type == "meta" else [result]  # which holds no values
    if isinstance(result, (Tagged, np.ndarray)):
        return [result]
    if isinstance(result, (matmul.PackedWeight, matmul.PackedIntWeight)):
        return [np.asarray([result.n, result.k, result.size_bytes])]
    return [np.asarray(result)]  # an `out` of another kind, or numbers


def _dtype_of(value: Any) -> str:
    if isinstance(value, Tagged):
        return value.dtype
    name = str(getattr(value, "dtype", "")).replace("torch.", "")
    return {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}.get(name, name)


def _memory_of(value: Any) -> Optional[np.ndarray]:
    value = value.array if isinstance(value, Tagged) else value
    if hostile.is_torch(value):
        value = value.detach()
        value = value.view(hostile.torch.int16) if value.dtype == hostile.torch.bfloat16 else value
        return value.resolve_neg().numpy()
    return value if isinstance(value, np.ndarray) else None


def _all_operands(call: Call) -> List[Tuple[str, Operand]]:
    found = []
    for name, value in call.arguments.items():
        if isinstance(value, Operand):
            found.append((name, value))
        elif isinstance(value, Made):
            found.extend((f"{name}.{inner}", operand) for inner, operand in _all_operands(value.call))
    return found


def _near(got: np.ndarray, want: np.ndarray, tolerance: float, dtype: str) -> Optional[str]:
    """Where two results differ, in words."""
    if got.shape != want.shape:
        return f"shapes {list(got.shape)} and {list(want.shape)}"
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
        same |= np.abs(got - want) <= tolerance * scale
        # At the end of the dtype's range rounding decides between a number and infinity.
        finite = np.where(np.isinf(got), want, got)
        at_the_end = np.abs(finite) >= (1 - tolerance) * _LARGEST.get(dtype, math.inf)
        same |= (tolerance > 0) & (np.isinf(got) != np.isinf(want)) & (np.sign(got) == np.sign(want)) & at_the_end
    if tolerance == 0:  # 0.0 and -0.0 are equal, but other bits
        same &= np.isnan(got) | (np.signbit(got) == np.signbit(want))
    if same.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"element {list(place)} is {got[place]:.9g} and {want[place]:.9g}, largest {scale:.3g}, tolerance {tolerance}"


def check_refusal(call: Call, error: BaseException, operands: List[Tuple[str, Operand]]) -> None:
    # In front of the questions about the error: what is written is worse than how it is said.
    for name, operand in operands:
        changed = operand.changed()
        if changed.size:
            raise BrokenPromise(f"a refused call wrote {changed.size} bytes of {name}: {type(error).__name__}: {error}")
    text = str(error)
    refusals = _REFUSALS if call.names else (*_REFUSALS, IndexError, OverflowError)  # torch's own
    if type(error) not in refusals:
        raise BrokenPromise(f"a call ended as {type(error).__name__}: {text}") from error
    if not text:
        raise BrokenPromise(f"a {type(error).__name__} says nothing") from error
    if call.names and (_INSIDE.search(text) or not text.startswith(call.name.split(".")[0])):
        raise BrokenPromise(f"a refusal speaks of the inside, or not of {call.name}: {type(error).__name__}: {text}") from error


def _check_written(operands: List[Tuple[str, Operand]]) -> None:
    by_memory: Dict[int, List[Operand]] = {}
    for _, operand in operands:
        by_memory.setdefault(id(operand.memory), []).append(operand)
    for name, operand in operands:
        changed = operand.changed()
        if not changed.size:
            continue
        writers = [other for other in by_memory[id(operand.memory)] if other.written]
        own = np.concatenate([other.own_bytes() for other in writers]) if writers else np.empty(0, np.int64)
        foreign = np.setdiff1d(changed, own)
        if foreign.size:
            kind = "between or beside the elements of an output" if writers else "of an input"
            raise BrokenPromise(f"an accepted call wrote {foreign.size} bytes {kind}, {name}")


def _results(call: Call, result: Any, filled: Dict[str, Any]) -> List[Tuple[str, Any]]:
    """What a call gave and what it wrote, by name."""
    # Of an output that is an input as well only the former: the copies are two.
    written = {id(value.memory): name for name, value in call.arguments.items() if isinstance(value, Operand) and value.written}
    return [(f"result {i}", part) for i, part in enumerate(_flat(result))] + [(name, filled[name]) for name in written.values()]


def _numbers(results: List[Tuple[str, Any]]) -> List[Tuple[str, np.ndarray, str]]:
    return [(name, np.array(to_numbers(part)), _dtype_of(part)) for name, part in results
            if math.prod(np.shape(getattr(part, "array", part))) <= MOST_ELEMENTS]


def _tolerance(call: Call, operands: List[Tuple[str, Operand]], results: List[Tuple[str, np.ndarray, str]]) -> float:
    if call.tolerance is not None:
        return call.tolerance
    dtypes = [operand.dtype for _, operand in operands] + [dtype for _, _, dtype in results]
    return max([TOLERANCE["f64"], *(TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE)])


def _again(call: Call, context: Context, clone: bool, what: str) -> List[Tuple[str, np.ndarray, str]]:
    filled: Dict[str, Any] = {}
    try:
        result = _run(call, context, clone, filled)
    except Exception as error:
        raise BrokenPromise(f"{what} are refused: {type(error).__name__}: {error}") from error
    return _numbers(_results(call, result, filled))


def judge(call: Call) -> str:
    operands = _all_operands(call)
    state = call.state() if call.state else None
    filled: Dict[str, Any] = {}
    try:
        result = _run(call, THREADS, filled=filled)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        call = getattr(error, "in_making", call)
        check_refusal(call, error, operands)
        if call.state and call.state() != state:
            raise BrokenPromise("a refused call changed its object") from error
        return "refused"
    _check_written(operands)
    results = _results(call, result, filled)
    for name, part in results:
        memory = _memory_of(part)
        for given, operand in operands:
            allowed = operand.written or given in call.given_back
            if memory is not None and not allowed and np.may_share_memory(memory, operand.memory):
                raise BrokenPromise(f"{name} is memory of the input {given}")
    # What is written into memory that is nobody's operand is not put back for a second call.
    foreign = any(not isinstance(call.arguments.get(name), (Operand, type(None))) for name in ("out", "key_cache", "value_cache"))
    if call.state or foreign:
        return "accepted"
    got = _numbers(results)
    promises = [(ONE, False, 0.0, "the same bits on one thread")]
    if call.compared and all(operand.is_small() for _, operand in operands):
        promises.append((GENERIC, True, _tolerance(call, operands, got), "the values of contiguous copies at the generic level"))
    for context, clone, tolerance, promise in promises:
        for _, operand in operands:
            operand.restore()
        want = _again(call, context, clone, "contiguous copies" if clone else "the same arguments")
        if len(got) != len(want):
            raise BrokenPromise(f"{promise}: {len(got)} results, but {len(want)}")
        for (name, mine, dtype), (_, other, _) in zip(got, want):
            said = _near(mine, other, tolerance, dtype)
            if said is not None:
                raise BrokenPromise(f"{promise}: {name}: {said}")
    return "accepted"

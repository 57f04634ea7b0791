"""What the operators of torch in this package share: the Context that computes them, their memory, their rule under vmap.

Operators have no argument for a Context. The one of a call is kept beside it, by thread, and its backward uses the same.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from ._context import Context, default_context
from ._core import View
from ._torch_door import between_elements

to_dlpack = torch.utils.dlpack.to_dlpack
_of_thread = threading.local()


def given_context() -> Optional[Context]:
    """The Context of the call that is under way, where it was given."""
    return getattr(_of_thread, "context", None)


def context() -> Context:
    return given_context() or default_context()


@contextlib.contextmanager
def using(given: Optional[Context]) -> Iterator[None]:
    """The Context of the operators that this thread calls in the block; None changes nothing."""
    if given is None:
        yield
        return
    before = given_context()
    _of_thread.context = given
    try:
        yield
    finally:
        _of_thread.context = before


def calling(given: Optional[Context]) -> Any:
    """The same around a call of the user's. A graph that is compiled or traced runs later, without the Context."""
    if given is None:
        return contextlib.nullcontext()
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        raise ValueError("context is given, but a call that is compiled or traced is computed by the process's own Context: leave "
                         "context out (set_num_threads says how many threads that one has)")
    return using(given)


# DLPack may not know them.
_FLOAT8 = {torch.float8_e4m3fn: "f8_e4m3", torch.float8_e5m2: "f8_e5m2"}


def view(tensor: Tensor) -> View:
    """The core's view of a tensor that is its bytes."""
    float8 = _FLOAT8.get(tensor.dtype)
    return View(to_dlpack(tensor)) if float8 is None else View(to_dlpack(tensor.view(torch.uint8)), float8)


def readable(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """A gradient as it is, or a copy where it lies at an address between elements: torch computes with it."""
    return tensor.clone() if tensor is not None and between_elements(tensor) else tensor


def view_of_input(tensor: Tensor) -> View:
    """The view of a gradient, or of an argument of a compiled call, wherever it lies."""
    try:
        return view(tensor)
    except ValueError:
        return view(readable(tensor.detach()))


def statistics_dtype(query: Tensor) -> torch.dtype:
    """Of sums and maxima, and of the gradients of bias and sinks."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def one_by_one(function: Callable[..., Tuple[Tensor, ...]], info: Any, in_dims: Tuple[Any, ...], arguments: Tuple[Any, ...]):
    """vmap: one call for each element of the mapped dimension, which keeps the bits that it has alone. No rule of the core
    takes one dimension more."""
    results = []
    for i in range(info.batch_size):
        results.append(function(*[argument.select(dim, i) if isinstance(argument, Tensor) and dim is not None else argument
                                  for argument, dim in zip(arguments, in_dims)]))
    if not results:
        raise RuntimeError("ops_transformer: torch.func.vmap over a dimension of size 0 has no result")
    stacked = tuple(torch.stack(parts) for parts in zip(*results))
    return stacked, (0,) * len(stacked)


def map_one_by_one(library: torch.library.Library, *names: str) -> None:
    """Registers that rule for operators of the library."""
    for name in names:
        operator = getattr(torch.ops.ops_transformer, name).default
        torch.library.register_vmap(f"ops_transformer::{name}", lambda info, in_dims, *arguments, operator=operator:
                                    one_by_one(operator, info, in_dims, arguments), lib=library)


def no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError("ops_transformer: second derivatives of attention are not implemented; torch's math path has them: "
                              "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), and torch's own function")

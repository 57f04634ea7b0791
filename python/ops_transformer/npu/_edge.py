"""The edge of the facade: what surrounds each function of the device's names.

    @device_function
    def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor: ...

A function's signature is the device's, to the letter: names, order, defaults, keyword-only marks. Beside it every function
takes strict=True, which refuses what the device refuses (`_strict`); errors carry the function's name in front.

Functions that read the bytes of tensors (experts, quantisation, caches) are no operators of torch by themselves. They give
`fake=`, which makes empty results of the right shapes: then torch.compile sees one operator, `ops_transformer_npu::NAME`,
and in all other calls the Python function runs at once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

import torch
from torch import Tensor

from .._calls import without_names
from .._torch_door import records
from . import _strict

FUNCTIONS: Dict[str, Callable[..., Any]] = {}  # every function of the facade by its name
FAKES: Dict[str, Callable[..., Any]] = {}
MUTATED: Dict[str, Sequence[str]] = {}  # arguments that a function writes into

_is_compiling = torch.compiler.is_compiling
_library = torch.library.Library("ops_transformer_npu", "DEF")


def device_function(function: Optional[Callable[..., Any]] = None, *, fake: Optional[Callable[..., Any]] = None,
                    mutates: Sequence[str] = (), gradients: Sequence[str] = ()) -> Any:
    """Registers a function under its name; see above. gradients: arguments whose gradients the operator would lose, so that a
    compiler follows the Python function where one of them requires any."""
    if function is None:
        return functools.partial(device_function, fake=fake, mutates=mutates, gradients=gradients)
    name = function.__name__
    operator = None if fake is None else _operator(function, fake, mutates)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        strict = kwargs.pop("strict", None) if "strict" in kwargs else None
        try:
            if _strict.is_on(strict):
                _strict.check(name, call.__signature__.bind(*args, **kwargs))
            if operator is not None and _is_compiling() and not (gradients and records(*_given(call, gradients, args, kwargs))):
                return operator(*args, **kwargs)
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            text = str(error).replace("attn_head_num", "head_num")  # the core's name of it
            if text.startswith(name):
                raise
            raise type(error)(f"{name}: {without_names(text)}") from None
        except NotImplementedError as error:
            if str(error).startswith(("npu_", "_npu_")):
                raise
            raise NotImplementedError(f"{name}: {error}") from None
        except (AttributeError, IndexError) as error:
            raise _misfit(name, call.__signature__, args, kwargs, error) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError or str(error).startswith(name):
                raise
            raise RuntimeError(f"{name}: {error}") from error

    call.__signature__ = inspect.signature(function)
    FUNCTIONS[name] = call
    MUTATED[name] = tuple(mutates)
    if fake is not None:
        FAKES[name] = fake
    return call


def _given(call: Any, names: Sequence[str], args: Any, kwargs: Any) -> List[Any]:
    arguments = call.__signature__.bind(*args, **kwargs).arguments
    return [arguments.get(name) for name in names]


def _misfit(name: str, signature: inspect.Signature, args: Any, kwargs: Any, error: Exception) -> Exception:
    """What to say where a call went on with an argument that is no tensor, or has too few dimensions."""
    for argument, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[argument].annotation
        if not isinstance(value, Tensor) and (kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None)):
            shown = "None" if value is None else f"a {type(value).__name__}"
            return TypeError(f"{name}: {argument} is {shown}, must be a torch tensor")
    return ValueError(f"{name}: the dimensions of an argument do not fit: {error}")


_KINDS = {"Tensor": "Tensor", "int": "SymInt", "float": "float", "bool": "bool", "str": "str", "torch.dtype": "ScalarType", "None": "()"}


def _kind(annotation: str) -> str:
    """torch's word for a kind."""
    for generic, form in (("Optional", "{}?"), ("Sequence", "{}[]"), ("List", "{}[]"), ("Tuple", "({})")):
        if annotation.startswith(generic + "["):
            inner = annotation[len(generic) + 1:-1]
            parts = inner.split(", ") if generic == "Tuple" else [inner]
            return form.format(", ".join(map(_kind, parts)))
    return _KINDS[annotation]


def schema(function: Callable[..., Any], mutates: Sequence[str] = ()) -> str:
    """torch's schema of a function, from its annotations."""
    signature = inspect.signature(inspect.unwrap(function))
    parts, keyword_only = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        kind = _kind(parameter.annotation)
        if name in mutates:
            kind = kind.replace("Tensor", f"Tensor({chr(ord('a') + list(mutates).index(name))}!)")
        default = parameter.default
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        parts.append(f"{kind} {name}" + ("" if default is parameter.empty else f"={shown}"))
    return f"({', '.join(parts)}) -> {_kind(signature.return_annotation)}"


def _operator(function: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str]) -> Any:
    name = function.__name__
    _library.define(name + schema(function, mutates))
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"ops_transformer_npu::{name}", fake, lib=_library)
    return getattr(torch.ops.ops_transformer_npu, name).default


# ---- words for what is refused ---------------------------------------------------------------------------------------


def missing(function: str, what: str) -> NoReturn:
    """Of a form that these operators do not have."""
    raise NotImplementedError(f"{function}: {what}")


def refuse_given(function: str, why: str, **arguments: Any) -> None:
    """NotImplementedError for the first of the arguments that is given (not None)."""
    for name, value in arguments.items():
        if value is not None:
            missing(function, f"{name} is given, but {why}")


def without_gradient(why: str, **tensors: Any) -> None:
    """RuntimeError where one of them asks for gradients, which would be lost."""
    for name, tensor in tensors.items():
        if records(tensor):
            raise RuntimeError(f"{name} requires gradients, but {why}: pass {name}.detach(), or call it under torch.no_grad()")


def is_tensor(name: str, value: Any) -> Tensor:
    """The tensor itself; TypeError for lists, arrays and None, which the device's functions do not take either."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {'None' if value is None else 'a ' + type(value).__name__}, must be a torch tensor")
    return value

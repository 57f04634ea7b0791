"""The edge of the package: what every public function asks of its options, and how it names what it refuses.

`public` reads a function's annotations once. At each call an option is taken where it is of its kind and refused with the
function's name, its own and the value where it is not, before anything else happens; nothing is rounded or cut off on the
way. Arguments of kind Any are arrays: `_arrays` refuses them, and the name is put in here.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Callable, Dict, Optional, TypeVar

import numpy as np

from ._arrays import is_torch, short
from ._core import Communicator, Context, PackedIntWeight, PackedWeight

F = TypeVar("F", bound=Callable[..., Any])

# Options that the core takes as 64 bits without a sign.
_UNSIGNED = {"seed", "offset"}


class _Misfit(Exception):
    """Of (the error's kind, what an option must be instead). Without a constructor, which torch.compile could not follow."""


def _integer(name: str, value: Any) -> int:
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)):
            raise _Misfit(TypeError, "an integer")
        try:
            value = value.__index__()
        except Exception:  # of an object that is no integer, or of its own
            raise _Misfit(TypeError, "an integer") from None
        if not isinstance(value, int):
            raise _Misfit(TypeError, "an integer")
    low, high = (0, 2**64) if name in _UNSIGNED else (-(2**63), 2**63)
    if not low <= value < high:
        raise _Misfit(ValueError, f"from {low} to {high - 1}")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if is_torch(value):
        raise _Misfit(TypeError, f"a number (float({name})): no gradient flows through it")
    if isinstance(value, (bool, np.bool_, str, bytes, complex)):
        raise _Misfit(TypeError, "a number")
    try:
        if hasattr(value, "__float__") or hasattr(value, "__index__"):
            return float(value)
    except Exception:  # the object's own
        pass
    raise _Misfit(TypeError, "a number")


def _truth(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise _Misfit(TypeError, "True or False")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _Misfit(TypeError, "a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Misfit(ValueError, "a text of whole characters") from None
    return value


def _instance(kind: type, said: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _Misfit(TypeError, said)
        return value

    return check


def _packed_int(maker: str, product: str) -> Callable[[str, Any], Any]:
    """maker makes such a weight, product is the function that takes a weight of floats or blocks."""
    def check(name: str, value: Any) -> Any:
        if isinstance(value, PackedWeight):
            raise _Misfit(TypeError, f"a PackedIntWeight ({maker}); with a PackedWeight call {product}")
        if not isinstance(value, PackedIntWeight):
            raise _Misfit(TypeError, f"a PackedIntWeight, what {maker} gives")
        return value

    return check


def _sections(name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 4):
        raise _Misfit(TypeError, "a RopeSections (temporal, height, width, interleaved)")
    sizes = (*value, False) if len(value) == 3 else value
    return (*(_integer(name, size) for size in sizes[:3]), _truth(name, sizes[3]))


_KINDS: Dict[str, Callable[[str, Any], Any]] = {
    "int": _integer, "float": _number, "bool": _truth, "str": _text,
    "Context": _instance(Context, "a Context of ops_transformer"),
    "Communicator": _instance(Communicator, "a Communicator of ops_transformer.mc2"),
    "PackedIntWeight": _packed_int("matmul.pack_int", "matmul.matmul"),
    "PackedIntStack": _packed_int("matmul.pack_int_stack", "matmul.grouped_matmul"),
    "PackedWeight": _instance(PackedWeight, "a PackedWeight, what matmul.pack gives"),
    "RopeSections": _sections,
}


def _kind_of(annotation: Any):
    """(check, whether None is taken) of an annotation's text; None where it names no option."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    optional = text.startswith("Optional[")
    check = _KINDS.get(text[len("Optional["):-1] if optional else text)
    return None if check is None else (check, optional)


def checked(function: str, name: str, kind: Any, value: Any) -> Any:
    """An option of its kind, or the error that names it."""
    check, optional = kind
    if value is None and optional:
        return None
    try:
        return check(name, value)
    except _Misfit as misfit:
        kind, text = misfit.args
        if is_torch(value):  # its values may be those of a compiler or a transform, which have no text
            raise kind(f"{function}: {name} is a torch tensor, must be {text}") from None
        none = " or None" if optional else ""
        shown = f"{short(value)} ({type(value).__name__})" if kind is TypeError and value is not None else short(value)
        raise kind(f"{function}: {name} is {shown}, must be {text}{none}") from None


def option(function: str, name: str, kind: str, value: Any) -> Any:
    """The same by the kind's name, for an argument that takes several kinds."""
    return checked(function, name, _kind_of(kind), value)


def of_the_core(function: Callable[..., Any], fields: Dict[str, str], *arguments: Any) -> Any:
    """What a function of the core gives; what it refuses names arguments of Python. fields: those, by the core's own names."""
    try:
        return function(*arguments)
    except ValueError as error:
        text = str(error)
        for field, argument in fields.items():
            text = text.replace(field, argument)
        raise ValueError(text) from None


_OF_THE_CORE = re.compile(r"(?:[a-z0-9]+(?:_[a-z0-9]+)+: )+")


def without_names(text: str) -> str:
    """A message without the names of functions in front of it: whoever called those has a name of its own."""
    return _OF_THE_CORE.sub("", text, count=1) if _OF_THE_CORE.match(text) else text


def _named(error: Exception, function: str, arguments: Dict[str, Any], facade: bool = False) -> Exception:
    """The error with the names of function and argument in front."""
    text = str(error)
    if facade and not text.startswith(f"{function}:"):
        text = without_names(text)
    if "incompatible function arguments" in text:
        if "self" in arguments:  # the methods' other arguments are checked before
            return TypeError(f"{function}: this {type(arguments['self']).__name__} was never made: its __init__ did not run")
        kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in arguments.items())
        return TypeError(f"{function}: an argument is of a kind that is not taken, among {kinds}")
    if text.startswith(f"{function}:"):  # asked first, as torch.compile cannot follow the next question
        return error
    if hasattr(error, "name_given"):
        found = [error.name_given] if error.name_given else [name for name, value in arguments.items() if value is error.value]
        return type(error)(f"{function}: {found[0] if found else 'an argument'} {error.text}")
    if type(error).__module__.partition(".")[0] not in ("builtins", "numpy"):
        return error  # of the caller's own kind, such as what a signal's handler raises
    for kind in (TypeError, ValueError, MemoryError):
        # NumPy and Python have narrower kinds, such as UnicodeError, which may be made of other things than a text.
        if isinstance(error, kind) and not (type(error) is kind and text.startswith(function)):
            return kind(f"{function}: {text}")
    if type(error) is RuntimeError and not text.startswith(function):
        return RuntimeError(f"{function}: {text}")
    return error


def _has_tensor(args: tuple, kwargs: Dict[str, Any]) -> bool:
    for value in args:
        if is_torch(value):
            return True
    for value in kwargs.values():
        if is_torch(value):
            return True
    return False


# Every public function by its module and name, such as "rowwise.softmax". The operators of torch, which lie below the modules
# that define these functions, find them here; without its checks each is its __wrapped__.
_functions: Dict[str, Callable[..., Any]] = {}


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A public function of a module that has been imported."""
    return _functions[f"{module}.{name}"]


_forms: Dict[Any, Any] = {}


def _form(forms: Callable[[], Dict[str, Any]], function: Callable[..., Any]) -> Any:
    form = _forms.get(function)
    if form is None:
        form = _forms[function] = forms()[function.__name__]
    return form


def public(function: Optional[F] = None, *, torch: Optional[Callable[[], Dict[str, Any]]] = None, facade: bool = False) -> Any:
    """Checks options before the call and names function and argument in what it refuses.

    torch: imports and gives the functions of the module that are operators of torch, with gradients: a _torch_forms.Form by
    each name. It is called with the first torch tensor; the form takes the calls of which torch's dispatcher must know.
    facade: the function calls other public ones, whose names in what they refuse give way to its own.
    """
    if function is None:
        return functools.partial(public, torch=torch, facade=facade)
    parameters = inspect.signature(function).parameters
    kinds = {name: _kind_of(parameter.annotation) for name, parameter in parameters.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind is not None}
    names = list(parameters)
    options = [(i, name) for i, name in enumerate(names) if name in kinds]
    title = function.__qualname__.replace(".__init__", "")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if name in kinds:
                kwargs[name] = checked(title, name, kinds[name], value)
        for i, name in options:
            if i >= len(args):
                break
            value = checked(title, name, kinds[name], args[i])
            if value is not args[i]:
                args = (*args[:i], value, *args[i + 1:])
        try:
            if torch is not None and _has_tensor(args, kwargs):
                form = _form(torch, function)
                if form.is_wanted(args, kwargs):
                    return form.call(args, kwargs)
            return function(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError, MemoryError) as error:
            named = _named(error, title, {**dict(zip(names, args)), **kwargs}, facade)
            if named is error:
                raise
            raise named from None

    _functions[f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"] = call
    return call  # type: ignore[return-value]

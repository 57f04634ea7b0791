"""Functions of the package as operators of torch: what their homes (_torch_rowwise, _torch_matmul, _torch_moe ..) share.

A call whose tensors are plain and need no gradients reads memory at once. Every other call with a torch tensor goes through
an operator of the library "ops_transformer", so that autograd, torch.compile, modes, subclasses and transforms see it:

    form = Form(rms_norm, operator, order, finish=..)   # order: the function's arguments in the operator's order
    form.is_wanted(args, kwargs)                        # whether somebody has to see the call
    form.call(args, kwargs)
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch._C._functorch import TransformType

from . import _core
from . import _torch_door as door
from ._arrays import gradients_refused, is_torch, refusal
from ._core import PackedIntWeight, PackedWeight
from ._torch_operator import calling, context, given_context, readable, using, view

library = torch.library.Library("ops_transformer", "FRAGMENT")
_function_modes = torch._C._len_torch_function_stack


def plain(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """Of a tensor in a kernel: the dispatcher has asked what its subclass asks for."""
    return tensor if tensor is None or type(tensor) is Tensor else tensor.as_subclass(Tensor)


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], save: Optional[Callable[..., None]] = None,
           backward: Optional[Callable[..., Any]] = None) -> Any:
    """An operator: its kernel on plain tensors, shapes and dtypes of its results, and its gradient."""
    name = schema.split("(")[0]
    library.define(schema)

    def run(*arguments: Any) -> Any:
        return kernel(*(plain(a) if isinstance(a, Tensor) else a for a in arguments))

    def save_with_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.context = given_context()
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    def backward_with_context(ctx: Any, *gradients: Any) -> Any:
        with using(ctx.context):
            return backward(ctx, *(readable(gradient) for gradient in gradients))

    library.impl(name, run, "CPU")
    torch.library.register_fake(f"ops_transformer::{name}", fake, lib=library)
    if backward is None:
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(f"ops_transformer: {name} has no derivative (second derivatives are not implemented)")

        def save(ctx: Any, inputs: Any, output: Any) -> None:
            pass
    torch.library.register_autograd(f"ops_transformer::{name}", backward_with_context, setup_context=save_with_context,
                                    lib=library)
    return getattr(torch.ops.ops_transformer, name).default


def wanted_results(results: Sequence[Tensor], wanted: Sequence[bool]) -> List[Optional[Tensor]]:
    """Gradients of an operator, None in the place of those that nobody wants."""
    return [result if want else None for result, want in zip(results, wanted)]


def unpacked(weight: PackedWeight) -> Tensor:
    """The stack as float32 [count, n, k]."""
    rows = torch.empty((weight.count * weight.n, weight.k), dtype=torch.float32)
    _core.lookup_packed_rows(context(), weight, view(torch.arange(rows.shape[0])), view(rows))
    return rows.view(weight.count, weight.n, weight.k)


def not_traced(function: str, what: str) -> NoReturn:
    raise RuntimeError(f"{function}: {what} cannot be traced by torch.compile; keep the call out of it with torch.compiler.disable")


class Form:
    """One public function as an operator."""

    def __init__(self, function: Callable[..., Any], operator: Any, order: Sequence[str], *,
                 finish: Optional[Callable[[Dict[str, Any], Any], Any]] = None,
                 prepare: Optional[Callable[[Dict[str, Any]], None]] = None, without_gradient: Sequence[str] = (),
                 casts: Sequence[str] = (), packed: Sequence[str] = (), differentiable: bool = True,
                 complete: Optional[Callable[[Dict[str, Any]], Dict[str, Any]]] = None) -> None:
        """function: as users call it; finish: the function's result of its arguments and the operator's; prepare: changes
        arguments to what the operator takes; without_gradient: tensors that may not require gradients; casts: tensors that
        autocast casts, as those of a linear layer; packed: arguments that may be packed weights; differentiable: the results
        have gradients, else no tensor may require them; complete: what the operator takes beside the function's arguments, by
        their names in `order`."""
        self.public, self.function, self.operator, self.order = function, function.__wrapped__, operator, tuple(order)
        self.finish, self.prepare, self.without_gradient = finish, prepare, tuple(without_gradient)
        self.casts, self.packed, self.complete = tuple(casts), tuple(packed), complete
        parameters = inspect.signature(self.function).parameters
        self.names = tuple(parameters)
        self.defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.arrays = [name for name in self.order if name in parameters and parameters[name].annotation == "Any"]
        self.differentiable = differentiable

    def is_wanted(self, args: tuple, kwargs: Dict[str, Any]) -> bool:
        if torch.compiler.is_compiling() or (self.casts and torch.is_autocast_enabled("cpu")):
            return True
        # door.is_plain and door.records in one pass: a short call has little time for questions.
        if door.watcher() is not None or _function_modes() or forward_ad._current_level >= 0:
            return True
        records = torch.is_grad_enabled()
        for value in (*args, *kwargs.values()):
            if is_torch(value) and (not door.has_plain_bytes(value) or (records and value.requires_grad)):
                return True
        return False

    def call(self, args: tuple, kwargs: Dict[str, Any]) -> Any:
        bound = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            self._check(name, tensor)
        empty = door.without_values_beside(tensors.values())
        if empty is None and any(isinstance(bound[name], np.ndarray) for name in self.arrays):
            empty = next((tensor for tensor in tensors.values() if tensor.device.type == "meta"), None)
        if empty is not None:
            raise refusal(TypeError, empty, "is on the device meta, which holds no values, but another tensor is not")
        if door.overridden(*tensors.values()):
            return torch.overrides.handle_torch_function(self.public, tuple(tensors.values()), *args, **kwargs)
        self._check_transform(tensors)
        if not self.differentiable and door.records(*tensors.values()):
            name = next(name for name, tensor in tensors.items() if door.records(tensor))
            raise gradients_refused(tensors[name], name)
        for name in self.without_gradient:
            if name in tensors and door.records(tensors[name]):
                raise refusal(RuntimeError, bound[name], f"requires gradients, but {self.function.__name__} has none of it: pass "
                              f"{name}.detach()", name)
        out = bound.get("out")
        if is_torch(out) and door.records(out):
            raise RuntimeError(f"{self.function.__name__}: out requires gradients, and what is written into it would have none: "
                               "leave out out, or call under torch.no_grad()")
        if out is not None and door.records(*tensors.values()):
            raise RuntimeError(f"{self.function.__name__}: out is given and an input requires gradients; what is written into "
                               "out has none: leave out out, or call under torch.no_grad()")
        self._cast(bound)
        if self.prepare is not None:
            self.prepare(bound)
        if out is not None and not door.is_watched() and all(door.why_no_bytes(tensor) is None for tensor in tensors.values()):
            return self.function(**bound)
        self._share_arrays(bound)
        result = self._run(bound)
        result = result if self.finish is None else self.finish(bound, result)
        return result if out is None else self._written(out, result)

    def _run(self, bound: Dict[str, Any]) -> Any:
        with calling(bound.get("context")):
            given = bound if self.complete is None else {**bound, **self.complete(bound)}
            return self.operator(*[given[name] for name in self.order])

    def _check(self, name: str, tensor: Tensor) -> None:
        if (tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided
                or tensor.device.type not in ("cpu", "meta")):
            raise refusal(TypeError, tensor, f"is {door.why_no_bytes(tensor)}; a dense tensor of the host's memory is needed",
                          name)

    def _check_transform(self, tensors: Dict[str, Tensor]) -> None:
        """Refuses derivatives that would be lost: the operators have gradients of autograd, and batches by torch's fallback."""
        if torch.compiler.is_compiling():
            return
        name = self.function.__name__
        if door.has_tangent(*tensors.values()):
            raise RuntimeError(f"{name}: an input carries a forward-mode tangent, and {name} has no forward derivative")
        for level in torch._C._functorch.get_interpreter_stack() or ():
            if level.key() in (TransformType.Grad, TransformType.Jvp):
                transform = "grad" if level.key() == TransformType.Grad else "jvp"
                raise RuntimeError(f"{name}: inside torch.func.{transform}, for which {name} has no rule; torch.autograd.grad and "
                                   "backward have its gradient")

    def _cast(self, bound: Dict[str, Any]) -> None:
        """What torch's autocast does to the arguments of a linear layer."""
        if not self.casts or not torch.is_autocast_enabled("cpu"):
            return
        dtype = torch.get_autocast_dtype("cpu")
        for name in self.casts:
            value = bound[name]
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                bound[name] = value.to(dtype)

    def _share_arrays(self, bound: Dict[str, Any]) -> None:
        """NumPy's arrays beside torch tensors as tensors of the same memory."""
        for name in self.arrays:
            value = bound[name]
            if isinstance(value, Tensor) or (value is None and self.defaults[name] is None):
                continue
            if name in self.packed and isinstance(value, (PackedWeight, PackedIntWeight)):
                continue
            if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
                raise TypeError(f"{self.function.__name__}: {name} is {type(value).__name__}, but another argument is a torch "
                                "tensor that torch's dispatcher has to see: pass a torch tensor here too")
            bound[name] = torch.from_numpy(value if value.flags.writeable else value.copy())

    def _written(self, out: Any, result: Any) -> Any:
        """The result in memory of the user's, as the function without an operator leaves it."""
        first, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(out, Tensor):
            raise TypeError(f"{self.function.__name__}: out is {type(out).__name__}, but torch's dispatcher has to see the call: pass "
                            "a torch tensor here too")
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ValueError(f"{self.function.__name__}: out is {out.dtype} {list(out.shape)}, but the result is {first.dtype} "
                             f"{list(first.shape)}")
        out.copy_(first)
        if not rest:
            return out
        return result._replace(out=out) if hasattr(result, "_fields") else (out, *rest)


class PackedForm(Form):
    """A function whose weight is always packed, which no schema of an operator has a word for: it reads memory, whoever looks on,
    and is in no graph."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, None, tuple(inspect.signature(function).parameters), differentiable=False)

    def _run(self, bound: Dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            not_traced(self.function.__name__, "a packed weight")
        return self.function(**bound)

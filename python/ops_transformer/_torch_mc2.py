"""Operators between ranks with gradients of torch: those whose gradient is another operator between ranks.

    matmul_all_to_all  <->  all_to_all_matmul         sequence_to_heads  <->  heads_to_sequence
    all_gather_matmul  <->  matmul_reduce_scatter     ring_attention_forward  ->  ring_attention_backward

The loss is the sum of all ranks' losses. A rank's gradient of x is complete. Its gradients of weights and bias are those of its own
copies: the product between ranks gives, as `exchanged`, the rows that they are made of.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _core
from . import _torch_door as door
from ._arrays import is_torch, refusal
from ._calls import function_of
from ._context import default_context
from ._torch_operator import view_of_input


def _mc2(name: str) -> Callable[..., Any]:
    return function_of("mc2", name)


class _NoDerivative(torch.autograd.Function):
    """A gradient, of (name of the function, it, what it depends on), that says so where a second derivative is wanted."""

    @staticmethod
    def forward(ctx, name, gradient, *_):
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise NotImplementedError(f"{ctx.name}: second derivatives are not implemented")


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose results have no gradients themselves."""
    @functools.wraps(backward)
    def run(ctx: Any, grad_out: Tensor) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, grad_out)
        if torch.is_grad_enabled():  # create_graph
            gradients = tuple(gradient if gradient is None else _NoDerivative.apply(ctx.name, gradient, grad_out, *ctx.saved_tensors)
                              for gradient in gradients)
        return gradients
    return run


def _own(grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], wanted: Sequence[bool],
         context: Any) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(grad^T . x, the sum of grad's rows) for a weight [n, k] and bias [n], of the rows that this rank has."""
    grad_weight = weight.new_empty(weight.shape) if wanted[0] else None
    if wanted[0]:
        _core.matmul_backward(context or default_context(), view_of_input(grad), view_of_input(x), view_of_input(weight.detach()), None,
                              view_of_input(grad_weight), None)
    grad_bias = grad.sum(0, dtype=torch.float32).to(bias.dtype) if wanted[1] else None
    return grad_weight, grad_bias


class _Product(torch.autograd.Function):
    """Of (kind, communicator, options, x, weight [n, k], bias, residual); kind holds the ways to and back."""

    @staticmethod
    def forward(ctx, kind, communicator, options, x, weight, bias, residual):
        weight_wanted = ctx.needs_input_grad[4]
        ctx.name, ctx.kind, ctx.ranks, ctx.options = kind.name, kind, communicator, options
        ctx.residual_dtype = None if residual is None else residual.dtype
        out, seen = kind.forward(communicator, x, weight, bias, residual, options, weight_wanted)
        ctx.save_for_backward(x if kind.reads_x else None, weight, bias, seen)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    @_once
    def backward(ctx, grad_out):
        x, weight, bias, seen = ctx.saved_tensors
        grad_out, wanted = grad_out.contiguous(), ctx.needs_input_grad[3:]
        grad_x, grad_weight, grad_bias = ctx.kind.backward(ctx.ranks, grad_out, x, weight, bias, seen, ctx.options, ctx.dtype, wanted)
        residual = grad_out.to(ctx.residual_dtype) if wanted[3] else None
        return None, None, None, grad_x, grad_weight, grad_bias, residual


class _Kind:
    """A product between ranks, and how it and its gradient are computed. options: rows and inputs are lists of P sizes."""

    name = ""
    reads_x = False

    @classmethod
    def call(cls, name: str, ranks: Any, x: Tensor, weights: Any, options: Dict[str, Any], **more: Any) -> Tensor:
        return _mc2(name)(ranks, x, weights, rows=options["rows"], tile_rows=options["tile_rows"], context=options["context"], **more)


def _dtype(tensor: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[tensor]


class _MatmulAllToAll(_Kind):
    name = "matmul_all_to_all"
    reads_x = True

    @classmethod
    def forward(cls, ranks, x, weight, bias, residual, options, weight_wanted):
        parts = list(weight.split(options["outputs"]))
        return cls.call("matmul_all_to_all", ranks, x, parts, options, bias=bias, dtype=options["dtype"]), None

    @classmethod
    def backward(cls, ranks, grad_out, x, weight, bias, seen, options, dtype, wanted):
        """My rows of the gradients of all columns come here: out's are spread over the ranks by columns."""
        rows = grad_out.new_empty(x.shape[0], weight.shape[0])
        grad_x = cls.call("all_to_all_matmul", ranks, grad_out, weight.t().contiguous(), options, inputs=options["outputs"], exchanged=rows,
                          dtype=_dtype(dtype))
        return grad_x, *_own(rows, x, weight, bias, wanted[1:], options["context"])


class _AllToAllMatmul(_Kind):
    name = "all_to_all_matmul"

    @classmethod
    def forward(cls, ranks, x, weight, bias, residual, options, weight_wanted):
        seen = x.new_empty(max(options["rows"][ranks.rank], 0), weight.shape[1]) if weight_wanted else None
        out = cls.call("all_to_all_matmul", ranks, x, weight, options, bias=bias, inputs=options["inputs"], exchanged=seen,
                       dtype=options["dtype"])
        return out, seen

    @classmethod
    def backward(cls, ranks, grad_out, x, weight, bias, seen, options, dtype, wanted):
        grad_x = None
        if wanted[0]:
            parts = [part.t().contiguous() for part in weight.split(options["inputs"], 1)]
            grad_x = cls.call("matmul_all_to_all", ranks, grad_out, parts, options, dtype=_dtype(dtype))
        return grad_x, *_own(grad_out, seen, weight, bias, wanted[1:], options["context"])


class _AllGatherMatmul(_Kind):
    name = "all_gather_matmul"

    @classmethod
    def forward(cls, ranks, x, weight, bias, residual, options, weight_wanted):
        seen = x.new_empty(max(sum(options["rows"]), 0), x.shape[1]) if weight_wanted else None
        return cls.call("all_gather_matmul", ranks, x, weight, options, bias=bias, exchanged=seen, dtype=options["dtype"]), seen

    @classmethod
    def backward(cls, ranks, grad_out, x, weight, bias, seen, options, dtype, wanted):
        grad_x = None
        if wanted[0]:
            grad_x = cls.call("matmul_reduce_scatter", ranks, grad_out, weight.t().contiguous(), options, dtype=_dtype(dtype))
        return grad_x, *_own(grad_out, seen, weight, bias, wanted[1:], options["context"])


class _MatmulReduceScatter(_Kind):
    name = "matmul_reduce_scatter"
    reads_x = True

    @classmethod
    def forward(cls, ranks, x, weight, bias, residual, options, weight_wanted):
        return cls.call("matmul_reduce_scatter", ranks, x, weight, options, bias=bias, residual=residual, dtype=options["dtype"]), None

    @classmethod
    def backward(cls, ranks, grad_out, x, weight, bias, seen, options, dtype, wanted):
        """Of bias, which is added once on all ranks, the part of my rows of out; of weight, from the gradients of all rows.

        all_gather_matmul has as many columns on all ranks, but k_r may differ: the rows are gathered beside one column alone."""
        grad_x, grad_weight = None, None
        if wanted[0] or wanted[1]:
            rows = grad_out.new_empty(x.shape[0], weight.shape[0])
            cls.call("all_gather_matmul", ranks, grad_out, grad_out.new_zeros(1, weight.shape[0]), options, exchanged=rows)
            grad_weight = _own(rows, x, weight, None, (wanted[1], False), options["context"])[0]
            if wanted[0]:
                grad_x = function_of("matmul", "matmul")(rows, weight.t(), out=x.new_empty(x.shape), context=options["context"])
        return grad_x, grad_weight, _own(grad_out, x, weight, bias, (False, wanted[2]), options["context"])[1]


class _Heads(torch.autograd.Function):
    """The exchange of that name, and the other one back."""

    @staticmethod
    def forward(ctx, names, communicator, options, x):
        ctx.names, ctx.ranks, ctx.options = names, communicator, options
        return _mc2(names[0])(communicator, x, **options)

    @staticmethod
    def backward(ctx, grad_out):
        return None, None, None, _Heads.apply(ctx.names[::-1], ctx.ranks, ctx.options, grad_out.contiguous())


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, communicator, options, query, key, value):
        out, lse = _mc2("ring_attention_forward")(communicator, query, key, value, return_lse=True, **options)
        ctx.name, ctx.ranks, ctx.options = "ring_attention_forward", communicator, options
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @_once
    def backward(ctx, grad_out):
        gradients = _mc2("ring_attention_backward")(ctx.ranks, grad_out.contiguous(), *ctx.saved_tensors, **ctx.options)
        return (None, None, *(gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad[2:])))


# ---- What calls become -----------------------------------------------------------------------------------------------


class _Recorded:
    """A public function in calls of which autograd has to hear; `run` takes the arguments by name."""

    def __init__(self, name: str, run: Callable[[Dict[str, Any]], Any], gradients: Sequence[str]) -> None:
        self.name, self.run, self.gradients = name, run, tuple(gradients)
        parameters = inspect.signature(_mc2(name)).parameters
        self.names, self.defaults = tuple(parameters), {key: parameter.default for key, parameter in parameters.items()}

    def is_wanted(self, args: tuple, kwargs: Dict[str, Any]) -> bool:
        return any(_records(value) for value in (*args, *kwargs.values()))

    def call(self, args: tuple, kwargs: Dict[str, Any]) -> Any:
        bound = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        for name, value in bound.items():
            if name in ("out", "exchanged") and value is not None:
                raise RuntimeError(f"{self.name}: {name} is given and an input requires gradients; what is written into {name} has none: "
                                   f"leave out {name}, or call under torch.no_grad()")
            if name not in self.gradients and _records(value):
                raise refusal(RuntimeError, value, f"requires gradients, but {self.name} has none of it: pass {name}.detach()", name)
        return self.run(bound)


def _records(value: Any) -> bool:
    return door.records(*value) if isinstance(value, (list, tuple)) else door.records(value)


def _tensor(name: str, value: Any) -> Tensor:
    if not is_torch(value):
        raise refusal(TypeError, value, f"is {type(value).__name__}, but another argument is a torch tensor that requires gradients: pass a "
                      "torch tensor here too", name)
    return value


def _sizes(values: Any, otherwise: Callable[[], List[int]]) -> List[int]:
    return otherwise() if values is None else [int(size) for size in values]


def _shares(n: int, ranks: Any) -> List[int]:
    return [_core.share_of(n, ranks.world_size, part) for part in range(ranks.world_size)]


def _matrices(x: Any, weights: Any) -> Tuple[Tensor, Tensor, Optional[List[int]]]:
    """(x, weight [n, k], the outputs of each part of a list)."""
    if not _tensor("x", x).dtype.is_floating_point:
        raise refusal(TypeError, x, f"is {x.dtype}, but another argument requires gradients, which products with integers have not", "x")
    parts = [_tensor(f"weights[{i}]", part) for i, part in enumerate(weights)] if isinstance(weights, (list, tuple)) else None
    for part in parts or [_tensor("weights", weights)]:
        if part.dim() != 2 or x.dim() != 2:
            raise ValueError(f"x must be [rows, k] and weights [n, k], but their shapes are {list(x.shape)} and {list(part.shape)}")
        if part.dtype != x.dtype:
            raise ValueError(f"weights is {part.dtype}, must be {x.dtype} as x, where gradients are required")
    return x, weights if parts is None else torch.cat(parts), None if parts is None else [part.shape[0] for part in parts]


def _product(kind: Any, here_alone: bool) -> Callable[[Dict[str, Any]], Tensor]:
    """here_alone: x has this rank's rows, not those of all ranks."""
    def run(bound: Dict[str, Any]) -> Tensor:
        ranks = bound["communicator"]
        x, weight, outputs = _matrices(bound["x"], bound["weights"])
        options = {"rows": _sizes(bound["rows"], lambda: [x.shape[0]] * ranks.world_size if here_alone else _shares(x.shape[0], ranks)),
                   "inputs": _sizes(bound.get("inputs"), lambda: [x.shape[1]] * ranks.world_size),
                   "outputs": outputs or _shares(weight.shape[0], ranks), "tile_rows": bound["tile_rows"], "dtype": bound["dtype"],
                   "context": bound["context"]}
        if bound.get("x_scales") is not None:
            raise ValueError("x_scales is given, which belongs to an int8 x, but an input requires gradients")
        if bound["dtype"] == "i32":
            raise ValueError('dtype is "i32", but an input requires gradients, which products with integers have not')
        if len(options["rows"]) != ranks.world_size or len(options["inputs"]) != ranks.world_size:
            raise ValueError(f"rows and inputs have {len(options['rows'])} and {len(options['inputs'])} sizes, must have {ranks.world_size}")
        others = [None if bound.get(name) is None else _tensor(name, bound[name]) for name in ("bias", "residual")]
        return _Product.apply(kind, ranks, options, x, weight, *others)
    return run


def _heads(names: Tuple[str, str], here_alone: bool) -> Callable[[Dict[str, Any]], Tensor]:
    """here_alone: x has this rank's rows and the heads of all ranks, else the other way round."""
    def run(bound: Dict[str, Any]) -> Tensor:
        x, ranks = bound["x"], bound["communicator"]
        if x.dim() != 3:
            raise ValueError(f"x must be [rows, heads, head_dim], but its shape is {list(x.shape)}")
        options = {name: _sizes(bound[name], lambda dim=dim, equal=equal: [x.shape[dim]] * ranks.world_size if equal
                                else _shares(x.shape[dim], ranks))
                   for dim, name, equal in ((0, "rows", here_alone), (1, "heads", not here_alone))}
        return _Heads.apply(names, ranks, {**options, "tile_rows": bound["tile_rows"], "context": bound["context"]}, x)
    return run


def _ring(bound: Dict[str, Any]) -> Tensor:
    if bound["return_lse"]:
        raise RuntimeError("return_lse is True and an input requires gradients, of which softmax_lse has none: leave out return_lse, or "
                           "call under torch.no_grad()")
    tensors = [_tensor(name, bound[name]) for name in ("query", "key", "value")]
    taken = ("communicator", "query", "key", "value", "return_lse", "out")
    return _Ring.apply(bound["communicator"], {name: value for name, value in bound.items() if name not in taken}, *tensors)


_OF_PRODUCT = ("x", "weights", "bias")
_WAYS = ("sequence_to_heads", "heads_to_sequence")
FORMS = {form.name: form for form in (
    _Recorded("matmul_all_to_all", _product(_MatmulAllToAll, True), _OF_PRODUCT),
    _Recorded("all_to_all_matmul", _product(_AllToAllMatmul, False), _OF_PRODUCT),
    _Recorded("all_gather_matmul", _product(_AllGatherMatmul, True), _OF_PRODUCT),
    _Recorded("matmul_reduce_scatter", _product(_MatmulReduceScatter, False), (*_OF_PRODUCT, "residual")),
    _Recorded(_WAYS[0], _heads(_WAYS, True), ("x",)),
    _Recorded(_WAYS[1], _heads(_WAYS[::-1], False), ("x",)),
    _Recorded("ring_attention_forward", _ring, ("query", "key", "value")))}

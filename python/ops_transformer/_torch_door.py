"""What torch's dispatcher asks before it reads a tensor, for code that reads tensors without the dispatcher.

A torch tensor is not its bytes: a subclass gives them another meaning, the negative bit flips their sign, a zero tensor has
none, a dual tensor carries a tangent beside them, and a mode, a compiler or a transform has to see each operator. Whoever
replaces a torch function, or reads torch tensors through their memory, asks here first:

    overridden(*arguments)      a subclass or a mode has its own way of this call: torch.overrides.handle_torch_function
    watcher()                   who has to see each operator: call it through torch.ops
    is_watched()                the same question, of those who would get other results otherwise
    is_plain(*tensors)          nobody, and the tensors are their bytes: the dispatcher may be left out
    records(*tensors)           autograd has to hear of it
    has_tangent(*tensors)       forward-mode autograd has to hear of it
    between_elements(tensor)    it lies at an address that the core does not read
    bytes_of(tensor, ...)       the tensor whose memory holds these values; TypeError where there is none
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic
from torch.utils._device import DeviceContext

# Bound here: a name looked up in three modules costs as much as the question itself, and a short call asks ten of them.
is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
_dispatch_keys = torch._C._dispatch_keys
_grad_enabled = torch.is_grad_enabled


# What stands for a plain tensor while a compiler or a tracer looks on.
TRACED = (FakeTensor, FunctionalTensor)


def _plain_keys() -> frozenset:
    with torch.inference_mode(False):
        usual = torch.empty(0, device="cpu")
    with torch.inference_mode():
        of_inference = torch.empty(0, device="cpu")
    return frozenset(_dispatch_keys(tensor).raw_repr() for tensor in (usual, of_inference))


# The dispatch keys of dense tensors of the host's memory. Whatever else a tensor is (negative, conjugate, zero, sparse,
# nested, quantised, batched, meta, of another device) is one more key or another one.
_PLAIN_KEYS = _plain_keys()


def is_watched() -> bool:
    """Whether somebody has to see each operator who does more than measure time, as a profiler does."""
    return watcher() not in (None, _PROFILER)


_PROFILER = "a profiler is active"


def watcher() -> Optional[str]:
    """Who has to see each operator, in words; None: nobody."""
    if is_compiling():
        return "a compiler traces the call"
    if _tracing_state() is not None:
        return "torch.jit traces the call"
    if _dispatch_modes():
        return "a TorchDispatchMode is active"
    if _transform() is not None:
        return "inside a transform of torch.func"
    if _function_modes() and not _is_default_device_only():
        return "a TorchFunctionMode is active"
    if _profiler_enabled():
        return _PROFILER
    return None


def _is_default_device_only() -> bool:
    """Whether the modes are those of `with torch.device(..)` and torch.set_default_device alone, which change nothing but
    where new tensors are made."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp ..) is under way."""
    return _transform() is not None


def in_jit_trace() -> bool:
    return _tracing_state() is not None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """torch.jit.trace records nothing of the block: comparisons of sizes are no part of a graph."""
    state = _tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)


def overridden(*arguments: Any) -> bool:
    """Whether __torch_function__ of a mode or of a tensor subclass among the arguments has its own way of the call."""
    if not has_torch_function_variadic(*arguments):
        return False
    if not _function_modes() or not _is_default_device_only():
        return True
    return torch._C._is_torch_function_enabled() and any(_has_own_function(argument) for argument in arguments)


def _has_own_function(argument: Any) -> bool:
    function = getattr(type(argument), "__torch_function__", None)
    return function is not None and type(argument) is not Tensor and function is not torch._C._disabled_torch_function_impl


def has_plain_bytes(tensor: Tensor) -> bool:
    """Whether the memory of the tensor is dense, the host's, and says what the tensor says. Nothing of gradients."""
    kind = type(tensor)
    return (kind is Tensor or kind is Parameter) and _dispatch_keys(tensor).raw_repr() in _PLAIN_KEYS


def is_plain(*tensors: Optional[Tensor]) -> bool:
    """Whether the dispatcher may be left out: nobody has to see the operator, and each tensor (None: not given) is its
    bytes. Whether autograd has to hear of it is another question: records, has_tangent."""
    if watcher() is not None:
        return False
    for tensor in tensors:
        if tensor is not None and not has_plain_bytes(tensor):
            return False
    return not has_tangent(*tensors)


def records(*values: Any) -> bool:
    """Whether gradients are recorded and one of the values is a tensor that needs one."""
    if not _grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def has_tangent(*tensors: Optional[Tensor]) -> bool:
    """Whether one of the tensors is a dual tensor of forward-mode autograd."""
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def why_no_bytes(tensor: Tensor) -> Optional[str]:
    """What keeps the tensor from being read through memory, in words; None: nothing, or a bit that bytes_of resolves."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return f"a {kind.__module__}.{kind.__qualname__}, whose memory need not hold its values"
    if tensor.is_nested:
        return "a nested tensor (its parts are tensors: call once for each)"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout} (.to_dense() gives a strided one)"
    if tensor.device.type == "meta":
        return "on the device meta, which holds no values"
    if tensor.device.type != "cpu":
        return f"on the device {tensor.device} (.cpu() copies it)"
    if tensor.is_quantized:
        return "a quantised tensor (.int_repr() gives its integers)"
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        return "inside a transform of torch.func"
    return None


def without_values_beside(tensors: Iterable[Optional[Tensor]]) -> Optional[Tensor]:
    """A tensor of the device meta beside one of the host: torch's dispatcher computes shapes then, and gives memory that nobody
    has written."""
    given = [tensor for tensor in tensors if tensor is not None]
    found = [tensor for tensor in given if tensor.device.type == "meta"]
    return found[0] if found and len(found) < len(given) else None


def between_elements(tensor: Tensor) -> bool:
    """Whether a tensor that is its bytes lies at an address between elements, such as torch.frombuffer(.., offset=1) gives. torch
    computes with it; the core refuses it, as it is undefined behaviour to read."""
    return has_plain_bytes(tensor) and tensor.numel() > 0 and tensor.data_ptr() % tensor.element_size() != 0


def bytes_of(tensor: Tensor, function: str, name: str) -> Tensor:
    """The tensor whose memory holds the values: itself, or a copy where it has the negative or conjugate bit or is a zero
    tensor. TypeError where no memory does. For inputs only: what is written to a copy is lost. Autograd is not asked."""
    if has_plain_bytes(tensor):
        return tensor
    reason = why_no_bytes(tensor)
    if reason is not None:
        raise TypeError(f"{function}: {name} is {reason}; a dense tensor of the host's memory is needed")
    with torch.no_grad():
        if tensor._is_zerotensor():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        return tensor.resolve_neg().resolve_conj()

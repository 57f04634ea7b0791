"""The facade in the place of torch_npu: for scripts that import it, call torch.ops.npu, or name the device "npu"."""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, Dict, List

import torch

from .. import _installation
from ._edge import FAKES, FUNCTIONS, MUTATED, schema

_FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
              "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like")


def _is_npu(device: Any) -> bool:
    return isinstance(device, str) and device.partition(":")[0] == "npu"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with "npu" and "npu:3", wherever they stand, as "cpu"."""
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_is_npu, args)):
            args = tuple("cpu" if _is_npu(value) else value for value in args)
        if _is_npu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    """.npu(): everything is on the CPU already."""
    return self


def _device_module() -> types.ModuleType:
    """torch.npu: one device, which is always ready."""
    module = types.ModuleType("torch.npu", "What scripts ask of the device: there is one, and it is this CPU.")
    answers: Dict[str, Any] = {"is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
                               "empty_cache": None, "manual_seed": None, "manual_seed_all": None, "get_device_name": "CPU (ops_transformer.npu)"}
    for name, answer in answers.items():
        setattr(module, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("manual_seed", "manual_seed_all"):
        setattr(module, name, torch.manual_seed)
    return module


class Installation(_installation.Installation):
    """The device's names in torch and in sys.modules. By undo(), or at the end of the outermost block, they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._library: Any = None
        self._names: List[str] = []

    def _register(self) -> None:
        """torch.ops.npu.NAME, of all functions."""
        self._library = torch.library.Library("npu", "FRAGMENT")
        for name, function in FUNCTIONS.items():
            self._library.define(name + schema(function, MUTATED[name]))
            run = getattr(torch.ops.ops_transformer_npu, name).default if name in FAKES else function
            self._library.impl(name, run, "CompositeImplicitAutograd")
            self._names.append(name)

    def _install(self) -> None:
        module = self._add_module("torch_npu", "ops_transformer.npu under the device's name: CPU tensors.",
                                  {**FUNCTIONS, "__version__": "0.0+ops_transformer", "npu": _device_module()})
        self._set(torch, "npu", module.npu)
        for owner in (torch.Tensor, torch.nn.Module):
            self._set(owner, "npu", _itself)
            self._set(owner, "to", _on_cpu(owner.to))
        for name in _FACTORIES:
            self._set(torch, name, _on_cpu(getattr(torch, name)))
        self._register()

    def undo(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        for name in self._names:
            torch.ops.npu.__dict__.pop(name, None)
        self._names.clear()
        super().undo()


def install() -> Installation:
    """From here on, or for a block (`with install():`), scripts for the device run on CPU tensors:

    import torch_npu            is the facade. RuntimeError where a torch_npu can be imported
    torch.ops.npu.NAME          are its functions as operators of torch
    .npu(), .to("npu"), device="npu" in torch's factories, torch.npu.is_available() and the like: the CPU

    torch.device("npu") stays an error of torch, as this device is none. A second call while installed gives the first Installation,
    and the end of an inner block leaves what the outer one, or a call without a block, installed.
    """
    return _installation.install(Installation, "torch_npu", "ops_transformer.npu")

"""The facade in the place of torch_npu: for scripts that import it, call torch.ops.npu, or name the device "npu"."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Callable, Dict, List, Tuple

import torch

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


class Installation:
    """What install() changed. By undo(), or at the end of the outermost block, everything is as it was before."""

    def __init__(self) -> None:
        self._blocks = 0  # that have not ended
        self._is_held = False  # by a call without a block, which undo() alone ends
        self._library: Any = None
        self._names: List[str] = []
        self._before: List[Tuple[Any, str, Any]] = []

    def __enter__(self) -> "Installation":
        self._blocks += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self._blocks -= 1
        if self._blocks == 0 and not self._is_held:
            self.undo()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__.get(name, Installation)))
        setattr(owner, name, value)

    def _register(self) -> None:
        """torch.ops.npu.NAME, of all functions."""
        self._library = torch.library.Library("npu", "FRAGMENT")
        for name, function in FUNCTIONS.items():
            self._library.define(name + schema(function, MUTATED[name]))
            run = getattr(torch.ops.ops_transformer_npu, name).default if name in FAKES else function
            self._library.impl(name, run, "CompositeImplicitAutograd")
            self._names.append(name)

    def _install(self) -> None:
        module = types.ModuleType("torch_npu", "ops_transformer.npu under the device's name: CPU tensors.")
        module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)  # scripts ask find_spec whether there is one
        module.__dict__.update(FUNCTIONS, __version__="0.0+ops_transformer", npu=_device_module())
        sys.modules["torch_npu"] = module
        self._set(torch, "npu", module.npu)
        for owner in (torch.Tensor, torch.nn.Module):
            self._set(owner, "npu", _itself)
            self._set(owner, "to", _on_cpu(owner.to))
        for name in _FACTORIES:
            self._set(torch, name, _on_cpu(getattr(torch, name)))
        self._register()

    def undo(self) -> None:
        """Takes everything back; a second time nothing."""
        global _installed
        if _installed is not self:
            return
        for owner, name, value in reversed(self._before):
            if value is Installation:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._library._destroy()
        for name in self._names:
            torch.ops.npu.__dict__.pop(name, None)
        sys.modules.pop("torch_npu", None)
        _installed = None


_installed: Any = None


def install() -> Installation:
    """From here on, or for a block (`with install():`), scripts for the device run on CPU tensors:

    import torch_npu            is the facade. RuntimeError where a torch_npu can be imported
    torch.ops.npu.NAME          are its functions as operators of torch
    .npu(), .to("npu"), device="npu" in torch's factories, torch.npu.is_available() and the like: the CPU

    torch.device("npu") stays an error of torch, as this device is none. A second call while installed gives the first Installation,
    and the end of an inner block leaves what the outer one, or a call without a block, installed.
    """
    global _installed
    if _installed is not None:
        _installed._is_held |= _installed._blocks == 0
        return _installed
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError("install: torch_npu can be imported here, so its name is not taken: import ops_transformer.npu")
    installation = Installation()
    _installed = installation
    try:
        installation._install()
    except BaseException:
        installation.undo()
        raise
    return installation

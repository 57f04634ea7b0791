"""The switch: torch's own names for attention lead to another function while it is on."""

from __future__ import annotations

import contextlib
import threading
from typing import Callable, Iterator, List

import torch
from torch.nn.attention.bias import CausalBias

# torch's own, whatever F.scaled_dot_product_attention is now.
torch_sdpa = torch._C._nn.scaled_dot_product_attention


class Switch:
    """Puts `replacement` in the place of torch.nn.functional.scaled_dot_product_attention, as often as it is turned on, and
    gives back what it found as often as it is turned off. What somebody else has put there in between stays."""

    def __init__(self, replacement: Callable):
        self._replacement = replacement
        self._lock = threading.Lock()
        self._found: List[Callable] = []

    def on(self) -> None:
        with self._lock:
            if not self._found:
                self._enter()
            self._found.append(torch.nn.functional.scaled_dot_product_attention)
            torch.nn.functional.scaled_dot_product_attention = self._replacement

    def off(self) -> None:
        with self._lock:
            if not self._found:
                return
            found = self._found.pop()
            if torch.nn.functional.scaled_dot_product_attention is self._replacement:
                torch.nn.functional.scaled_dot_product_attention = found
            if not self._found:
                self._leave()

    def _enter(self) -> None:
        # In inference MultiheadAttention and TransformerEncoderLayer otherwise call a fused operator, not the function.
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # CausalBias knows torch's function by what torch.nn.functional holds at the time. To a caller who has torch's own,
        # it would take part as a tensor, which has memory and no values.
        self._bias = CausalBias.__dict__["__torch_function__"]
        CausalBias.__torch_function__ = classmethod(_by_either_name(self._bias.__func__))

    def _leave(self) -> None:
        if not torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(self._fastpath)
        CausalBias.__torch_function__ = self._bias


def _by_either_name(torch_function: Callable) -> Callable:
    def of_causal_bias(cls, func, types, args=(), kwargs=None):
        if func is torch_sdpa:
            func = torch.nn.functional.scaled_dot_product_attention
        return torch_function(cls, func, types, args, kwargs)

    return of_causal_bias


@contextlib.contextmanager
def for_a_block(switch: Switch) -> Iterator[None]:
    switch.on()
    try:
        yield
    finally:
        switch.off()


def script_as_torch(function: Callable) -> None:
    """Lets torch.jit.script compile calls of `function` as calls of torch's own: TorchScript holds no Python."""
    torch.jit._builtins._register_builtin(function, "aten::scaled_dot_product_attention")

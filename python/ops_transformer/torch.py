"""torch's scaled_dot_product_attention on the CPU, forward and backward in O(N) memory.

    import ops_transformer.torch as ot

    out = ot.scaled_dot_product_attention(q, k, v, is_causal=True)   # the same signature and semantics

    with ot.sdpa():                        # torch.nn.functional.scaled_dot_product_attention goes through us
        model(tokens)
    ot.enable_sdpa()                       # from here on; ot.disable_sdpa() takes it back

    print(ot.explain(q, k, v, is_causal=True))                       # who would compute this call, and why

FlashAttention and FlashCrossAttention are modules with projections around it.

A call that is not covered (see explain) goes to torch with one warning for each reason; a call that is torch's by its
nature (tensors on another device, a tensor subclass with a __torch_function__ of its own) goes there without. Calls
whose sizes disagree are refused, whoever would compute them.
"""

from __future__ import annotations

from typing import ContextManager

from ._torch_sdpa import Explanation, explain, scaled_dot_product_attention
from ._torch_modules import FlashAttention, FlashCrossAttention
from ._torch_switch import Switch, for_a_block, script_as_torch

__all__ = ["Explanation", "FlashAttention", "FlashCrossAttention", "disable_sdpa", "enable_sdpa", "explain",
           "scaled_dot_product_attention", "sdpa"]

_switch = Switch(scaled_dot_product_attention)
script_as_torch(scaled_dot_product_attention)


def enable_sdpa() -> None:
    """From here on torch.nn.functional.scaled_dot_product_attention is ours, for all threads.

    Names that a module has imported before (`from torch.nn.functional import ...`) stay torch's. In inference
    MultiheadAttention and TransformerEncoderLayer take the function, not their fused path (torch.backends.mha).
    """
    _switch.on()


def disable_sdpa() -> None:
    """Takes one enable_sdpa back: the function that it found is there again."""
    _switch.off()


def sdpa() -> ContextManager[None]:
    """enable_sdpa for the block."""
    return for_a_block(_switch)

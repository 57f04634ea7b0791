"""The interface of the package flash-attn (version 2) on CPU tensors: the same names, arguments and results, with gradients.

    from ops_transformer.flash_attn import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)                      # q, k, v [batch, length, heads, head_dim]

    with ops_transformer.flash_attn.install():                       # for scripts that import flash_attn themselves
        from flash_attn import flash_attn_func

A facade translates and checks; flash_attention and kv_cache compute. The diagonal of causal masks, windows and ALiBi lies at the
bottom right, -1 leaves a side of window_size open, and softmax_lse is +inf in rows that see no key. docs/flash_attn.md: every
function, and what differs.
"""

from . import bert_padding, flash_attn_interface
from ._install import Installation, install
from .flash_attn_interface import *  # noqa: F401,F403

__all__ = ["Installation", "bert_padding", "flash_attn_interface", "install", *flash_attn_interface.__all__]

"""Transformer operators for CPUs: exact attention in O(N) memory, forward and backward, and what goes around it.

    import numpy as np
    from ops_transformer.flash_attention import flash_attention

    q = k = v = np.random.rand(1, 8, 4096, 64).astype(np.float32)
    out = flash_attention(q, k, v, causal=True)

Operators: flash_attention, rowwise, matmul, quant, kv_cache. `Model` runs a language model of a GGUF file.
`ops_transformer.torch` is the drop-in for torch's scaled_dot_product_attention; it alone imports torch.
"""

from ._arrays import Tagged, default_context, set_num_threads
from ._core import Context
from .model import Generation, Model

__version__ = "0.1.0"
__all__ = ["Context", "Generation", "Model", "Tagged", "default_context", "set_num_threads"]

"""Transformer operators for CPUs: exact attention in O(N) memory, forward and backward, and what goes around it.

    import numpy as np
    from ops_transformer.flash_attention import flash_attention

    q = k = v = np.random.rand(1, 8, 4096, 64).astype(np.float32)
    out = flash_attention(q, k, v, causal=True)

Operators: flash_attention, rowwise, matmul, moe, quant, kv_cache, and mc2 between ranks. `Model` runs a language model of a GGUF file.
`ops_transformer.torch` is the drop-in for torch's scaled_dot_product_attention, `ops_transformer.hf` the attention of
the package transformers, `ops_transformer.npu` the functions of torch_npu on CPU tensors, `ops_transformer.flash_attn` those of
flash_attn, `ops_transformer.articles` the samples of articles; these five alone import torch. Submodules are imported when they are first named:
`ops_transformer.rowwise.rms_norm(x, weight)` needs no import of its own.
"""

import importlib.util

from ._arrays import Tagged
from ._context import Context, default_context, set_num_threads
from .model import Generation, Model

__version__ = "0.1.0"
__all__ = ["Context", "Generation", "Model", "Tagged", "default_context", "set_num_threads"]


def __getattr__(name: str):
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), "articles", "flash_attention", "flash_attn", "hf", "kv_cache", "matmul", "mc2", "moe", "npu", "quant", "rowwise",
                   "torch"})

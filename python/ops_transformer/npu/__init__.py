"""torch_npu's functions on CPU tensors."""

from ._edge import FUNCTIONS
from . import activation, fusion_attention, gating, infer_attention, norms, paged, permute, products, routing

globals().update(FUNCTIONS)

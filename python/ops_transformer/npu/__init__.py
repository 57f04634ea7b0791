"""torch_npu's functions on CPU tensors."""

from ._edge import FUNCTIONS
from . import activation, fusion_attention, gating, infer_attention, mc2, norms, nsa, paged, permute, products, routing, sparse

globals().update(FUNCTIONS)

"""torch_npu's functions on CPU tensors: the same names, arguments and meanings, over the operators of this package.

    import ops_transformer.npu as torch_npu

    out, softmax_max, softmax_sum, *_ = torch_npu.npu_fusion_attention(q, k, v, 8, "BNSD", atten_mask=mask, sparse_mode=2, scale=D**-0.5)

A facade translates and checks; the core computes. Masks hide where they are 1, scale is 1 unless it is given, and lengths are running
totals without a leading 0 or one for each sequence, as each function says. docs/npu.md: which core operator stands behind each
function, what differs from the device, and what is not implemented (NotImplementedError names it).

    install()           for scripts that import torch_npu, call torch.ops.npu or name the device "npu"; `with install():` for a block
    register_group()    the name of a communicator, for the arguments hcom and group
    strict()            calls in the block refuse what the device refuses; also strict=True in a call, and OPST_NPU_STRICT=1
    compare(case, out)  what the device gave beside what comes out here, and which convention explains the difference
"""

from . import activation, distribute, fusion_attention, gating, infer_attention, mc2, norms  # noqa: F401
from . import nsa, paged, permute, products, routing, sparse  # noqa: F401
from ._edge import FUNCTIONS
from ._groups import register_group, unregister_group
from ._install import Installation, install
from ._strict import strict
from ._compare import Case, Comparison, compare

globals().update(FUNCTIONS)
__all__ = ["Case", "Comparison", "Installation", "compare", "install", "register_group", "strict", "unregister_group", *FUNCTIONS]

"""torch's own samples of scaled_dot_product_attention (its OpInfo database), through the switch: the outputs and gradients
of torch, and a gradcheck of each sample that has gradients."""

import pytest
from conftest import required

if required("torch"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="torch is not installed (OPST_TEST_TORCH=1 installs it)")
pytest.importorskip("expecttest", reason="expecttest is not installed (scripts/requirements-torch.txt)")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402

NAME = "nn.functional.scaled_dot_product_attention"
OPERATOR = next(op for op in op_db if op.name == NAME)
BOUND = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def samples(dtype):
    # Dropout draws other weights than torch's.
    return [s for s in OPERATOR.sample_inputs("cpu", dtype, requires_grad=True) if s.kwargs.get("dropout_p", 0) == 0]


def call(sample):
    """The output, and the gradients of the sample's tensors."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in (sample.input, *sample.args)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, **sample.kwargs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out) / 3)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_samples(dtype):
    torch.manual_seed(3)
    chosen = samples(dtype)
    assert len(chosen) >= 12
    for sample in chosen:
        want = call(sample)
        with ot.sdpa():
            got = call(sample)
        # Strides of gradients are those of torch's products, other ones for each of its paths.
        assert got[0].stride() == want[0].stride()
        for ours, theirs in zip(got, want):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            scale = max(1.0, theirs.abs().max().item())
            assert (ours - theirs).abs().max().item() <= BOUND[dtype] * scale, sample


def test_gradients():
    torch.manual_seed(4)
    # Finite differences of the smaller half: each costs two calls for every element.
    chosen = sorted(samples(torch.float64), key=lambda s: s.input.numel())[::2]
    for sample in chosen:
        tensors = [t.detach().flatten()[:0].new_tensor(t.tolist()).requires_grad_(t.requires_grad)
                   for t in (sample.input, *sample.args)]
        assert torch.autograd.gradcheck(lambda *t: ot.scaled_dot_product_attention(*t, **sample.kwargs), tensors, fast_mode=True)

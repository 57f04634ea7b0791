"""torch's own samples of scaled_dot_product_attention (its OpInfo database), through the switch: the outputs and gradients
of torch, and a gradcheck of each sample that has gradients."""

import pytest
from conftest import import_torch

torch = import_torch()

pytest.importorskip("expecttest", reason="expecttest is not installed (scripts/requirements-torch.txt)")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402

NAME = "nn.functional.scaled_dot_product_attention"
OPERATOR = next(op for op in op_db if op.name == NAME)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def samples(dtype):
    # Dropout draws other weights than torch's.
    return [s for s in OPERATOR.sample_inputs("cpu", dtype, requires_grad=True) if s.kwargs.get("dropout_p", 0) == 0]


def call(sample, dtype=None):
    """The output, and the gradients of the sample's tensors; in `dtype` of the same numbers."""

    def cast(tensor):
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    leaves = [cast(t.detach().clone()).requires_grad_(t.requires_grad) for t in (sample.input, *sample.args)]
    options = {name: cast(value) if isinstance(value, torch.Tensor) else value for name, value in sample.kwargs.items()}
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, **options)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, torch.full_like(out, 0.25))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(dtype):
    torch.manual_seed(3)
    chosen = samples(dtype)
    assert len(chosen) >= 12
    for sample in chosen:
        # A score's rounding is relative to the products behind it, and its exponential has it as a relative error.
        query, key = sample.input.detach().double(), sample.args[0].detach().double()
        accumulator = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        rounding = accumulator * query.abs().max().item() * key.abs().max().item() * query.shape[-1] ** 0.5
        want = call(sample)
        with ot.sdpa():
            got = call(sample)
        # Strides of gradients are those of torch's products, other ones for each of its paths.
        assert got[0].stride() == want[0].stride()
        for ours, theirs, exact in zip(got, want, call(sample, torch.float64)):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            scale = max(1.0, exact.abs().max().item())
            error, theirs_error = ((x.double() - exact).abs().max().item() for x in (ours, theirs))
            assert error <= 2 * theirs_error + (8 * torch.finfo(dtype).eps + rounding) * scale, sample


def test_gradients():
    torch.manual_seed(4)
    # Finite differences of the smaller half: each costs two calls for every element.
    chosen = sorted(samples(torch.float64), key=lambda s: s.input.numel())[::2]
    for sample in chosen:
        tensors = [t.detach().flatten()[:0].new_tensor(t.tolist()).requires_grad_(t.requires_grad)
                   for t in (sample.input, *sample.args)]
        assert torch.autograd.gradcheck(lambda *t: ot.scaled_dot_product_attention(*t, **sample.kwargs), tensors, fast_mode=True)

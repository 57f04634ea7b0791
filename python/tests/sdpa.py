"""What the tests of the drop-in share: torch's scaled_dot_product_attention beside ours, and how their results are compared."""

from conftest import assert_near, import_torch

torch = import_torch()

from ops_transformer.torch import scaled_dot_product_attention as ours  # noqa: E402, F401

theirs = torch._C._nn.scaled_dot_product_attention


def heads(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def assert_same(got, want, dtype=None, factor=2.0):
    name = str(dtype or want.dtype).replace("torch.", "")
    assert got.dtype == want.dtype
    assert_near(got.detach().double().numpy(), want.detach().double().numpy(), name, factor)


def in_double(function, *tensors, **options):
    """The call with everything in float64, on torch's math path."""
    double = [t.detach().double() for t in tensors]
    if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].detach().double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return function(*double, **options)

"""ops_transformer.torch against torch's own scaled_dot_product_attention: values, gradients, compilers, modules, random calls."""

import warnings

import pytest
from conftest import import_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = import_torch()

import torch.nn.functional as F  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
from sdpa import assert_same, heads, in_double, ours, theirs  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa as attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("what", ["plain", "causal", "bool", "float", "scale", "gqa"])
def test_forward_and_backward(dtype, what):
    kv_heads = 2 if what == "gqa" else 4
    q, k, v = heads(2, 4, 21, 24, dtype=dtype, grad=True), *(heads(2, kv_heads, 21, 24, dtype=dtype, grad=True) for _ in "kv")
    options = {"plain": {}, "causal": dict(is_causal=True), "scale": dict(scale=0.2), "gqa": dict(enable_gqa=True),
               "bool": dict(attn_mask=torch.rand(2, 1, 21, 21) < 0.7),
               "float": dict(attn_mask=torch.randn(4, 21, 21).to(dtype))}[what]
    out = ours(q, k, v, **options)
    assert out.dtype == dtype
    grad = torch.randn(out.shape, dtype=dtype)
    out.backward(grad)
    double = [t.detach().double().requires_grad_() for t in (q, k, v)]
    options = {n: o.double() if n == "attn_mask" and o.dtype != torch.bool else o for n, o in options.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = theirs(*double, **options)
    want.backward(grad.double())
    assert_same(out, want.to(out.dtype))
    for tensor, reference in zip((q, k, v), double):
        assert_same(tensor.grad, reference.grad.to(dtype), factor=6)


@pytest.mark.parametrize("shapes", [((5, 8), (7, 8), (7, 6)), ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
                                    ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6)),
                                    ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)), ((2, 3, 5, 8), (3, 7, 8), (1, 1, 7, 6))])
def test_any_leading_dimensions(shapes):
    q, k, v = (heads(*shape, grad=True) for shape in shapes)
    out, want = ours(q, k, v), in_double(theirs, q, k, v).float()
    assert_same(out, want)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    copies = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    for got, reference in zip(gradients, torch.autograd.grad(theirs(*copies).sum(), copies)):
        assert_same(got, reference, factor=6)


def test_gradient_of_a_float_mask():
    q, k, v = (heads(2, 3, 9, 8, dtype=torch.float64) for _ in "qkv")
    mask = torch.randn(3, 1, 9, dtype=torch.float64, requires_grad=True)
    got, = torch.autograd.grad((ours(q, k, v, attn_mask=mask) ** 2).sum(), mask)
    want, = torch.autograd.grad((theirs(q, k, v, attn_mask=mask) ** 2).sum(), mask)
    assert_same(got, want, factor=10)


def test_gradcheck():
    q, k, v = heads(1, 4, 5, 3, dtype=torch.float64, grad=True), *(heads(1, 2, 6, 3, dtype=torch.float64, grad=True) for _ in "kv")
    mask = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *t: ours(*t[:3], attn_mask=t[3], enable_gqa=True), (q, k, v, mask))
    torch.autograd.gradcheck(lambda *t: ours(*t, is_causal=True, enable_gqa=True), (q, k, v))

    def dropped(*tensors):
        torch.manual_seed(5)
        return ours(*tensors, dropout_p=0.3, enable_gqa=True)

    torch.autograd.gradcheck(dropped, (q, k, v))


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_opcheck(mask):
    q, k, v = (heads(2, 3, 9, 8, grad=True) for _ in "qkv")
    tensor = {None: None, "bool": torch.rand(9, 9) < 0.8, "float": torch.randn(9, 9, requires_grad=True)}[mask]
    seed = torch.tensor([11])
    torch.library.opcheck(torch.ops.ops_transformer.sdpa.default, (q, k, v, tensor, seed, 0.25, 0, 0.3, False))


def test_compile_without_graph_breaks():
    q, k, v = (heads(2, 3, 16, 8, grad=True) for _ in "qkv")

    def layer(q, k, v):
        with ot.sdpa():
            return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    def plain(q, k, v):
        return ours(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    for a, b in zip(got, want):
        assert_same(a, b)


def test_compile_with_the_default_backend():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    layer = ot.FlashAttention(16, 2, 1, dropout=0.1)
    x = torch.randn(2, 12, 16, requires_grad=True)
    mask = torch.rand(12, 12) < 0.8

    def step(function):
        torch.manual_seed(4)
        out = function(x) + function(x, mask)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    layer.eval()
    for got, want in zip(step(torch.compile(layer, fullgraph=True)), step(layer)):
        assert_same(got, want, factor=6)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
    layer.train()
    assert torch.compile(layer, fullgraph=True)(x).isfinite().all()


def test_compile_with_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: ours(q, q, q, is_causal=True), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 9, 33):
        q = heads(1, 2, length, 8)
        assert torch.equal(compiled(q), ours(q, q, q, is_causal=True))


def test_compile_of_a_model_behind_the_switch():
    q, k, v = (heads(1, 2, 16, 8) for _ in "qkv")
    ot.enable_sdpa()
    try:
        compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), fullgraph=True,
                                 backend="aot_eager")
        assert torch.equal(compiled(q, k, v), ours(q, k, v, is_causal=True))
    finally:
        ot.disable_sdpa()


def test_a_second_derivative_is_refused_not_forgotten():
    x = heads(1, 2, 5, 8, grad=True)
    first, = torch.autograd.grad(ours(x, x, x).square().sum() + x.pow(3).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_go_to_torch(transform):
    x = heads(3, 1, 2, 5, 8)
    attention._warned.clear()

    def result(function):
        if transform == "vmap":
            return torch.func.vmap(lambda t: function(t, t, t))(x)
        return torch.func.grad(lambda t: function(t, t, t).square().sum())(x)

    with pytest.warns(UserWarning, match="inside a transform of torch.func"):
        got = result(ours)
    assert torch.equal(got, result(theirs))


def test_views_that_are_not_what_their_bytes_say():
    q = heads(1, 2, 5, 8)
    assert torch.equal(ours(q._neg_view(), q, q), ours(-q, q, q))
    with torch.no_grad():
        zeros = torch._efficientzerotensor((1, 2, 5, 8))
        assert torch.equal(ours(zeros, q, q), ours(torch.zeros(1, 2, 5, 8), q, q))


def test_checkpoint():
    x, y = (heads(1, 2, 5, 8, grad=True) for _ in "xy")
    y.data.copy_(x.data)
    torch.utils.checkpoint.checkpoint(lambda t: ours(t, t, t, is_causal=True), x, use_reentrant=False).sum().backward()
    ours(y, y, y, is_causal=True).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_autocast():
    q, k, v = (heads(1, 2, 33, 16) for _ in "qkv")
    mask = torch.randn(33, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({}, dict(attn_mask=mask)):
            assert ours(q, k, v, **options).dtype == theirs(q, k, v, **options).dtype == torch.bfloat16


def test_one_training_step_of_an_encoder_layer():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 17, 32), torch.zeros(2, 17, dtype=torch.bool)
    padding[1, 11:] = True
    results = []
    for context in (ot.sdpa, lambda: warnings.catch_warnings()):
        layer.zero_grad()
        with context():
            out = layer(x, src_key_padding_mask=padding)
            out.square().mean().backward()
        results.append((out, *(p.grad.clone() for p in layer.parameters())))
    for got, want in zip(*results):
        assert_same(got, want, factor=10)


def test_modules():
    x, context = torch.randn(2, 10, 24), torch.randn(2, 7, 16)
    layer = ot.FlashAttention(24, 4, 2)
    out = layer(x)
    assert out.shape == x.shape
    changed = x.clone()
    changed[:, 6:] += 1
    assert torch.equal(layer(changed)[:, :6], out[:, :6]) and not torch.equal(layer(changed)[:, 6:], out[:, 6:])
    q = layer.query(x).reshape(2, 10, 4, 6).transpose(1, 2)
    k, v = (p(x).reshape(2, 10, 2, 6).transpose(1, 2) for p in (layer.key, layer.value))
    want = theirs(q, k, v, is_causal=True, enable_gqa=True)
    assert_same(out, layer.out(want.transpose(1, 2).reshape(2, 10, 24)))
    cross = ot.FlashCrossAttention(24, 16, 3)
    cross(x, context).sum().backward()
    assert all(p.grad.isfinite().all() for p in cross.parameters())
    with pytest.raises(ValueError, match="num_heads = 5"):
        ot.FlashAttention(24, 5)


# ---- random calls ----------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([1, 2, 3, 7, 16, 17, 33, 70])


def strided(tensor, kind):
    """The same values otherwise in memory."""
    if kind == "heads beside each other":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "transposed":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == "a part of more":
        return torch.nn.functional.pad(tensor, (2, 3, 1, 0))[..., 1:, 2:-3]
    if kind == "every second":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    return tensor


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 2), kv_heads=st.integers(1, 3), group=st.integers(1, 3), query_len=SIZES, kv_len=SIZES, d=SIZES, dv=SIZES,
       dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]),
       kind=st.lists(st.sampled_from(["plain", "heads beside each other", "transposed", "a part of more", "every second"]),
                     min_size=4, max_size=4),
       mask=st.sampled_from([None, "causal", "bool", "float", "float32"]), mask_shape=st.sampled_from(["full", "keys", "rows", "heads"]),
       scale=st.sampled_from([None, 0.3, -0.5]), seed=st.integers(0, 999))
def test_random_calls_against_float64(batch, kv_heads, group, query_len, kv_len, d, dv, dtype, kind, mask, mask_shape, scale, seed):
    torch.manual_seed(seed)
    full = batch, kv_heads * group, query_len, kv_len
    q, k, v = heads(batch, full[1], query_len, d), heads(batch, kv_heads, kv_len, d), heads(batch, kv_heads, kv_len, dv)
    inputs = [strided(t.to(dtype), how).detach().requires_grad_() for t, how in zip((q, k, v), kind)]
    options = dict(scale=scale, enable_gqa=True, is_causal=mask == "causal")
    wanted = dict(options)
    if mask in ("bool", "float", "float32"):
        shape = {"full": full, "keys": full[3:], "rows": (query_len, 1), "heads": (full[1], 1, kv_len)}[mask_shape]
        if mask == "bool":
            options["attn_mask"] = wanted["attn_mask"] = torch.rand(shape) < 0.7
        else:
            bias = torch.randn(shape).to(dtype if mask == "float" or dtype == torch.float64 else torch.float32)
            options["attn_mask"], wanted["attn_mask"] = bias, bias.double()
    out = ours(*inputs, **options)
    grad = strided(torch.randn(out.shape).to(dtype), kind[3])
    double = [t.detach().double().requires_grad_() for t in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = theirs(*double, **wanted)
    assert_same(out, want.to(dtype))
    got = torch.autograd.grad(out, inputs, grad)
    for gradient, reference in zip(got, torch.autograd.grad(want, double, grad.double())):
        assert_same(gradient, reference.to(dtype), factor=8)

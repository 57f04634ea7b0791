"""ops_transformer.torch against torch's own scaled_dot_product_attention, and the reported cases of SDPA by number."""

import inspect
import mmap
import os
import threading
import warnings

import numpy as np
import pytest
from conftest import assert_near, attention_reference, between_elements, required
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if required("torch"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="torch is not installed (OPST_TEST_TORCH=1 installs it)")

import torch.nn.functional as F  # noqa: E402
import torch.utils.checkpoint  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa as attention  # noqa: E402
from ops_transformer.torch import scaled_dot_product_attention as ours  # noqa: E402

theirs = torch._C._nn.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


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


# ---- values and gradients --------------------------------------------------------------------------------------------


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


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_the_switch_nests_and_is_taken_back(monkeypatch):
    before = F.scaled_dot_product_attention
    with ot.sdpa():
        with ot.sdpa():
            assert F.scaled_dot_product_attention is ours
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is before
    with pytest.raises(KeyError), ot.sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is before


def test_explain_is_called_as_what_it_explains():
    told, asked = inspect.signature(ot.explain), inspect.signature(ours)
    assert list(told.parameters.values()) == list(asked.parameters.values())
    assert not hasattr(ot.explain, "__signature__")  # what a static checker reads is what there is
    with pytest.raises(TypeError, match="explain.*missing.*'key'"):
        ot.explain(heads(1, 1, 2, 8))


def test_explain():
    q = heads(2, 4, 64, 32, grad=True)
    told = ot.explain(q, q, q, is_causal=True)
    assert told.path == "ops_transformer" and ("flash" in told.plan or "standard" in told.plan)
    assert ot.explain(q, q, q, dropout_p=1.0).path == "ops_transformer"
    assert ot.explain(q, q, q, attn_mask=torch.ones(64, 64, dtype=torch.bool), dropout_p=0.5).plan
    wide = heads(1, 1, 64, 800)
    for arguments, path, why in [
        ((wide, wide, q[:1, :1]), "torch", "768"),
        ((q.to(torch.complex64),) * 3, "torch", "complex64"),
        ((q, q.double(), q), "torch", "dtype"),
        ((q.to_sparse(),) * 3, "torch", "sparse"),
        ((q, q[:, :3], q[:, :3]), "refused", "fit together"),
        ((q, q, q, torch.ones(63, 64, dtype=torch.bool)), "refused", "attn_mask [63, 64]"),
        ((q, q, q, None, 1.5), "refused", "dropout_p is 1.5"),
    ]:
        told = ot.explain(*arguments)
        assert told.path == path and why in told.reason and str(told).startswith(path)


def test_a_custom_scale_is_taken_in_double():
    q, k, v = (heads(1, 2, 9, 8, dtype=torch.float64) for _ in "qkv")
    got, want = ours(q, k, v, scale=0.1), theirs(q, k, v, scale=0.1)
    assert (got - want).abs().max() < 1e-14
    assert (ours(q, k, v, scale=float(np.float32(0.1))) - want).abs().max() > 1e-11  # so that the bound means something


def test_what_is_not_covered_goes_to_torch_with_one_warning():
    q = heads(1, 1, 4, 800)
    attention._warned.clear()
    with pytest.warns(UserWarning, match="goes to torch: head_dim 800"):
        out = ours(q, q, q)
    assert_same(out, theirs(q, q, q))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(q, q, q)


@pytest.mark.filterwarnings("ignore:ops_transformer.*lies at an address between elements")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask"])
def test_tensors_between_elements_go_to_torch(dtype, which):
    given = dict(zip(("query", "key", "value"), (heads(1, 2, 5, 8, dtype=dtype) for _ in "qkv")), attn_mask=heads(5, 5, dtype=dtype))
    between = {**given, which: between_elements(given[which])}
    told = ot.explain(**between)
    assert (told.path, told.reason) == ("torch", f"{which} lies at an address between elements")
    attention._warned.clear()
    with pytest.warns(UserWarning, match=f"goes to torch: {which} lies at an address between elements"):
        assert_same(ours(**between), theirs(**given))
    with ot.sdpa():
        assert_same(F.scaled_dot_product_attention(**between), theirs(**given))
    for tensors in (given, between):
        for tensor in tensors.values():
            tensor.requires_grad_()
    got = torch.autograd.grad(ours(**between).sum(), list(between.values()))
    for gradient, want in zip(got, torch.autograd.grad(theirs(**given).sum(), list(given.values()))):
        assert_same(gradient, want, factor=8.0)
    if which != "attn_mask":  # the shortest way
        between.pop("attn_mask"), given.pop("attn_mask")
        with torch.no_grad():
            assert_same(ours(**between), theirs(**given))
    # Nothing is there to be read.
    none = between_elements(heads(1, 2, 5, 8, dtype=dtype))[:0]
    assert ot.explain(none, none, none).path == "ops_transformer"


def test_tensors_between_elements_that_torch_chooses():
    q, weight = heads(1, 2, 5, 8, grad=True), heads(1, 2, 5, 8)
    (got,) = torch.autograd.grad(ours(q, q, q), q, between_elements(weight))
    (want,) = torch.autograd.grad(ours(q, q, q), q, weight)
    assert torch.equal(got, want)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    q, mask = q.detach(), heads(5, 5)
    assert torch.equal(compiled(between_elements(q), q, q, between_elements(mask)), ours(q, q, q, mask))


def test_threads_at_once_beside_torch_in_one_process():
    q = heads(1, 4, 96, 32)
    want = ours(q, q, q)
    wrong = []

    def work():
        for _ in range(10):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            if not torch.equal(ours(q, q, q), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_case_b87_fork_after_use_of_both():
    q = heads(1, 4, 200, 64, grad=True)

    def step():
        return torch.autograd.grad(ours(q, q, q, is_causal=True).square().sum(), q)[0]

    want = step()
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # torch's own threads do not outlive a fork
        os._exit(0 if torch.equal(step(), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


class OneAttentionEach(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        q = torch.full((1, 2, 70, 16), float(index))
        return ours(q, q, q)


def test_case_b87_workers_of_a_data_loader():
    ours(*(heads(1, 2, 70, 16) for _ in "qkv"))
    for loaded in torch.utils.data.DataLoader(OneAttentionEach(), num_workers=2, timeout=300):
        assert torch.equal(loaded, loaded.mean().expand_as(loaded))


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


# ---- reported cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, row", [(6, 5), (130, 129)])
def test_case_b01_b08_fully_masked_row(length, row):
    q, k, v = heads(1, 2, length, 8, grad=True), *(heads(1, 2, length + 4, 8, grad=True) for _ in "kv")
    mask = torch.ones(length, length + 4, dtype=torch.bool).tril()
    mask[row] = False
    out = ours(q, k, v, attn_mask=mask, scale=0.125)
    assert (out[:, :, row] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, row] == 0).all()
    keep = [i for i in range(length) if i != row]
    shorter = torch.autograd.grad(ours(q[:, :, keep], k, v, attn_mask=mask[keep], scale=0.125).sum(), (k, v))
    assert_same(grads[1], shorter[0])
    assert_same(grads[2], shorter[1])


def test_case_b02_float_masks_are_added():
    q, k, v = (heads(1, 1, 8, 8) for _ in "qkv")
    m = torch.zeros(8, 8)
    m[:4, :4] = torch.rand(4, 4) * 0.9 + 0.05
    results = [ours(q, k, v, attn_mask=x) for x in (m, m.bool().float(), m.bool())]
    plain = ours(q, k, v)
    assert_same(results[0][:, :, 4:], plain[:, :, 4:])
    assert_same(results[1][:, :, 4:], plain[:, :, 4:])
    assert (results[2][:, :, 4:] == 0).all()
    assert all(r.isfinite().all() for r in results) and not torch.allclose(results[0], results[1])


def test_case_b03_first_tile_fully_masked():
    q, k, v = (heads(1, 1, 441, 64, grad=True) for _ in "qkv")
    mask = torch.zeros(441, 441)
    mask[:, :128] = torch.finfo(torch.float32).min
    out = ours(q, k, v, attn_mask=mask)
    assert_same(out, ours(q, k[:, :, 128:], v[:, :, 128:]))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][:, :, :128] == 0).all() and (grads[2][:, :, :128] == 0).all()


def test_case_b05_band_of_infinities():
    q, v = torch.zeros(1, 1, 640, 4, requires_grad=True), torch.ones(1, 1, 640, 4)
    i, j = torch.arange(640)[:, None], torch.arange(640)[None]
    mask = torch.zeros(640, 640).masked_fill(~((i - j >= 0) & (i - j < 10)), -torch.inf)
    out = ours(q, q, v, attn_mask=mask)
    assert (out == 1).all()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("stored", [None, 1e10, float("nan")])
def test_case_b06_masked_bytes_never_matter(stored):
    q = torch.arange(8.0).reshape(1, 2, 4)
    k, v = q.clone(), q.clone()
    if stored is not None:
        k[0, 1, 0] = stored
        v[0, 1, 0] = stored
    mask = torch.tensor([[True, False], [True, False]])
    assert torch.equal(ours(q, k, v, attn_mask=mask), torch.arange(4.0).expand(1, 2, 4))


def test_case_b12_true_means_visible():
    q, v = torch.zeros(1, 1, 4, 1), torch.tensor([1.0, 2, 4, 8]).reshape(1, 1, 4, 1)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    out = ours(q, q, v, attn_mask=mask).flatten()
    assert torch.allclose(out, torch.tensor([1, 1.5, 7 / 3, 3.75])) and torch.equal(out, ours(q, q, v, is_causal=True).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("value_dim", [8, 6])  # torch's math path, which takes 6, refuses the pair that its flash kernel has
def test_case_b14_a_mask_and_is_causal_both_apply(dtype, kind, value_dim):
    q, k, v = (heads(2, 3, *size, dtype=dtype, grad=True) for size in ((5, 8), (7, 8), (7, value_dim)))
    mask = torch.rand(5, 7) < 0.6 if kind == "bool" else torch.randn(5, 7, dtype=dtype)
    tril = torch.ones(5, 7, dtype=torch.bool).tril()
    both = mask & tril if kind == "bool" else mask.masked_fill(~tril, -torch.inf)
    out, want = ours(q, k, v, mask, is_causal=True), theirs(q, k, v, both)
    assert_same(out, want)
    for got, reference in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        assert_same(got, reference, factor=6)
    assert ot.explain(q, k, v, mask, is_causal=True).path == "ops_transformer"


def test_case_b15_mask_dtypes():
    q, k, v = (heads(1, 8, 64, 32, dtype=torch.bfloat16) for _ in "qkv")
    plain = ours(q, k, v)
    for mask in (torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bool)):
        out = ours(q, k, v, attn_mask=mask)
        assert out.dtype == torch.bfloat16
        assert_same(out, plain)
    # 256 + 1/2 has no bf16: an f32 mask is not rounded to it first.
    fine = torch.full((64, 64), 256.0)
    fine[:, 0] = 256.5
    assert_same(ours(q * 0, k, v, attn_mask=fine), in_double(theirs, q * 0, k, v, attn_mask=fine).bfloat16())
    with pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(q, k, v, attn_mask=torch.zeros(64, 64, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 7), (3, 1, 7), (3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_case_b16_mask_shapes(shape, kind):
    q, k, v = heads(2, 3, 5, 4), heads(2, 1, 7, 4), heads(2, 1, 7, 4)
    mask = torch.rand(shape) < 0.6 if kind == "bool" else torch.randn(shape)
    full = mask.expand(2, 3, 5, 7)
    want = ours(q, k, v, attn_mask=full.contiguous())
    assert torch.equal(ours(q, k, v, attn_mask=full), want)
    assert torch.equal(ours(q, k, v, attn_mask=mask), want)
    assert_same(want, in_double(theirs, q, k.expand(2, 3, 7, 4), v.expand(2, 3, 7, 4), attn_mask=full).float())
    assert torch.equal(ours(q, k, v, attn_mask=torch.ones(shape, dtype=torch.bool)), ours(q, k, v))


def test_case_b17_is_causal_is_top_left():
    v = torch.tensor([1.0, 2, 4, 8, 16]).reshape(1, 1, 5, 1)
    q = torch.zeros(1, 1, 5, 1)
    assert ours(q[:, :, :2], q, v, is_causal=True).flatten().tolist() == [1, 1.5]
    assert ours(q, q[:, :, :2], v[:, :, :2], is_causal=True).flatten().tolist() == [1, 1.5, 1.5, 1.5, 1.5]


def test_case_b27_bf16_blocks():
    x = heads(1, 2, 600, 80, dtype=torch.bfloat16)
    blocks = [(0, 128), (128, 256), (256, 384), (543, 600)]
    mask = torch.zeros(600, 600, dtype=torch.bool)
    for begin, end in blocks:
        mask[begin:end, begin:end] = True
    out = ours(x, x, x, attn_mask=mask)
    for begin, end in blocks:
        part = x[:, :, begin:end]
        assert_same(out[:, :, begin:end], in_double(theirs, part, part, part).bfloat16())
    assert (out[:, :, 384:543] == 0).all()


def test_case_b32_zero_sizes():
    for b, h, length, keys, d in [(2, 2, 3, 0, 8), (2, 2, 0, 5, 8), (0, 2, 3, 5, 8), (2, 0, 3, 5, 8), (1, 1, 0, 0, 8)]:
        for causal in (False, True):
            out = ours(heads(b, h, length, d), heads(b, h, keys, d), heads(b, h, keys, 6), is_causal=causal)
            assert out.shape == (b, h, length, 6) and (out == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours(heads(1, 1, 3, 0), heads(1, 1, 5, 0), heads(1, 1, 5, 2)).shape == (1, 1, 3, 2)
        for shape in [(7, 9, 0, 7), (0, 0, 2, 0)]:
            other = (shape[0], 7 if shape[1] else 0, 13, shape[3])
            try:
                ours(heads(*shape), heads(*other), heads(*other))
            except (RuntimeError, ValueError):
                pass


def test_case_b34_f16_logits():
    q = torch.full((1, 1, 1, 192), 20.0, dtype=torch.float16)
    k = torch.full((1, 1, 2, 192), 20.0, dtype=torch.float16)
    k[:, :, 1] = 19.5
    v = torch.tensor([1.0, 2.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    assert ours(q, k, v).item() == 1
    assert ours(q[..., :128] * 12.8, k[..., :128] * 12.8, v).item() == 1


@pytest.mark.parametrize("level", ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_case_b38_b90_bf16_at_every_level(level):
    from ops_transformer import Context
    from ops_transformer.flash_attention import flash_attention

    q, k, v = (heads(2, 4, 64, 64, dtype=torch.bfloat16) for _ in "qkv")
    context = Context(isa=level)
    if context.isa != level:
        pytest.skip(f"this processor has no {level}")
    want = in_double(theirs, q, k, v)
    assert_same(flash_attention(q, k, v, context=context), want.bfloat16())


def untouched(elements, dtype):
    """Memory that takes no room until it is written."""
    no_reserve = 0x4000  # MAP_NORESERVE, which the module mmap does not name
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_case_b43_strides_beyond_32_bits(axis):
    shape = [1, 1, 3, 8]
    shape[axis] = 3
    values = [heads(*shape) for _ in "qkv"]
    stride = [64, 64, 8, 1]
    stride[axis] = 1_100_000_000  # the third begins behind 2^31
    far = []
    for value in values:
        tensor = untouched(2 * stride[axis] + 100, torch.float32).as_strided(shape, stride)
        tensor.copy_(value)
        far.append(tensor.requires_grad_())
    near = [value.requires_grad_() for value in values]
    outs = [ours(*tensors, is_causal=True) for tensors in (far, near)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out, tensors in zip(outs, (far, near))]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_case_b45_rows_of_a_mask_beyond_32_bits(dtype):
    keys = 200
    stride = (2**32 + 64) // dtype.itemsize
    mask = untouched(stride + keys, dtype).as_strided((2, keys), (stride, 1))
    mask.copy_(torch.rand(2, keys) < 0.5)
    q, k, v = heads(1, 2, 2, 8, grad=True), heads(1, 2, keys, 8), heads(1, 2, keys, 8)
    got, want = ours(q, k, v, attn_mask=mask), ours(q, k, v, attn_mask=mask.clone())
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (got, want)))


def test_case_b39_inner_stride():
    base = heads(1, 2, 8, 16)
    q = base.transpose(2, 3)
    same = q.contiguous()
    mask = (torch.rand(16, 32) < 0.7)[:, ::2]
    assert torch.equal(ours(q, q, q, attn_mask=mask), ours(same, same, same, attn_mask=mask.contiguous()))


def test_case_b40_v_as_a_view_of_bsnd():
    q, k, vh = heads(1, 16, 62, 128, dtype=torch.bfloat16), heads(1, 16, 62, 128, dtype=torch.bfloat16), heads(1, 62, 2048, dtype=torch.bfloat16)
    v = vh.view(1, 62, 16, 128).transpose(1, 2)
    assert torch.equal(ours(q, k, v), ours(q, k, v.contiguous()))


def test_case_b42_strides_of_grad_out():
    q, k, v = (heads(2, 2, 49, 32, grad=True) for _ in "qkv")
    grad = torch.randn(2, 2, 49, 32)
    out = ours(q, k, v)
    permuted = grad.transpose(1, 2).contiguous().transpose(1, 2)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), permuted, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    one = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones(2, 2, 49, 32))
    assert all(torch.equal(a, b) for a, b in zip(one, ones))


@pytest.mark.parametrize("hq, hk", [(33, 2), (3, 2), (2, 4), (2, 0)])
def test_case_b47_heads_that_do_not_divide(hq, hk):
    with pytest.raises(RuntimeError, match="do not fit together"):
        ours(heads(1, hq, 4, 8), heads(1, hk, 4, 8), heads(1, hk, 4, 8), enable_gqa=True)


def test_case_b48_gqa_with_a_mask_per_head():
    q, k, v = heads(3, 8, 8, 64, dtype=torch.float16), *(heads(3, 2, 8, 64, dtype=torch.float16) for _ in "kv")
    full_k, full_v = (x.repeat_interleave(4, 1) for x in (k, v))
    for mask in (torch.rand(3, 8, 8, 8) < 0.7, torch.randn(3, 8, 8, 8, dtype=torch.float16)):
        assert_same(ours(q, k, v, attn_mask=mask, enable_gqa=True), ours(q, full_k, full_v, attn_mask=mask))
    with pytest.raises(RuntimeError):
        ours(q, k, v)


@pytest.mark.parametrize("width", [24, 48, 1])
def test_case_b52_the_output_is_as_wide_as_value(width):
    q, k, v = heads(1, 1, 16, 32), heads(1, 1, 16, 32), heads(1, 1, 16, width)
    out = ours(q, k, v)
    assert out.shape == (1, 1, 16, width)
    assert_near(out.numpy(), attention_reference(q.numpy(), k.numpy(), v.numpy())[0])


def test_case_b56_dropout():
    q, k = heads(1, 2, 64, 32), heads(1, 2, 64, 32)
    v = torch.ones(1, 2, 64, 32)

    def drop(p, seed):
        torch.manual_seed(seed)
        return ours(q, k, v, dropout_p=p)

    assert torch.equal(drop(0.5, 1), drop(0.5, 1)) and not torch.equal(drop(0.5, 1), drop(0.5, 2))
    mean = torch.stack([drop(0.5, seed) for seed in range(20)]).mean().item()
    assert abs(mean - 1) < 0.02
    # With one column for each key the zeros are the weights that were dropped.
    weights = ours(q, k, torch.eye(64).expand(1, 2, 64, 64), dropout_p=0.25)
    assert abs((weights == 0).float().mean().item() - 0.25) < 0.02
    kept = weights / in_double(theirs, q, k, torch.eye(64).expand(1, 2, 64, 64)).float()
    assert torch.allclose(kept[weights > 0], torch.tensor(1 / 0.75), rtol=1e-4)
    before = torch.get_rng_state()
    assert torch.equal(ours(q, k, v), ours(q, k, v)) and torch.equal(before, torch.get_rng_state())
    w = v.clone().requires_grad_()
    out = ours(q, k, w, dropout_p=1.0)
    assert (out == 0).all() and (torch.autograd.grad(out.sum(), w)[0] == 0).all()
    for p in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match="dropout_p"):
            ours(q, k, v, dropout_p=p)


def test_case_b57_dropout_keeps_memory_linear():
    q = heads(1, 1, 32768, 8)

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = peak()
    ours(q, q, q, dropout_p=0.1)
    assert peak() - before < 64 << 20  # the score matrix alone would be 4 GiB


def test_case_b91_memory_stands_still():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    lengths = np.random.default_rng(1).integers(16, 256, 150)
    sizes = []
    for n in lengths:
        q = heads(2, 2, int(n), 32)
        ours(q, q, q)
        sizes.append(resident())
    assert max(sizes[60:]) - sizes[60] < 5 << 20

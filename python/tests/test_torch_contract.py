"""What a caller may rely on beside values: strides, kinds of errors, aliasing, and that explain() tells what happens."""

import contextlib
import warnings

import pytest
from conftest import assert_near, import_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = import_torch()

import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa as attention  # noqa: E402
from ops_transformer import _torch_sdpa_operator as operator  # noqa: E402
from ops_transformer.torch import scaled_dot_product_attention as ours  # noqa: E402

theirs = torch._C._nn.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


# ---- strides ---------------------------------------------------------------------------------------------------------


def swapped(tensor, a, b):
    return tensor.transpose(a, b).contiguous().transpose(a, b)


LAYOUTS = {
    "contiguous": lambda t: t,
    "tokens first": lambda t: swapped(t, -3, -2) if t.dim() > 2 else t,
    "batch inside": lambda t: swapped(t, 0, 1) if t.dim() > 2 else t,
    "transposed": lambda t: swapped(t, -2, -1),
    "reversed": lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))),
    "batch expanded": lambda t: t[:1].expand(t.shape),
    "heads expanded": lambda t: t[..., :1, :, :].expand(t.shape) if t.dim() > 2 else t,
    "rows expanded": lambda t: t[..., :1, :].expand(t.shape),
    "columns expanded": lambda t: t[..., :1].expand(t.shape),
    "tokens first, expanded": lambda t: swapped(t, -3, -2)[:1].expand(t.shape) if t.dim() > 2 else t,
    "part of more": lambda t: torch.nn.functional.pad(t, (2, 3, 1, 0))[..., 1:, 2:-3],
    "part of packed": lambda t: swapped(torch.nn.functional.pad(t, (0, 2 * t.shape[-1])), -3, -2)[..., :t.shape[-1]]
    if t.dim() > 2 else t,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (1, 3), (2, 1), (2, 2, 3)])
def test_strides(lead, dtype, layout):
    q, k, v = (torch.randn(*lead, *rows).to(dtype) for rows in ((5, 8), (7, 8), (7, 8)))
    q = LAYOUTS[layout](q)
    calls = [(), (torch.ones(5, 7, dtype=torch.bool),), (torch.zeros(5, 7, dtype=dtype),)]
    if len(lead) == 2:
        calls += [(torch.zeros(1, *lead[1:], 5, 7, dtype=dtype),), (torch.zeros(1, 5, 7, dtype=dtype),)]
    for arguments in calls:
        assert ours(q, k, v, *arguments).stride() == theirs(q, k, v, *arguments).stride()
    for options in (dict(is_causal=True), dict(dropout_p=0.5), dict(scale=2)):
        assert ours(q, k, v, **options).stride() == theirs(q, k, v, **options).stride()
    for other in (k.transpose(-1, -2).contiguous().transpose(-1, -2), k[..., :1].expand(k.shape)):
        assert ours(q, other, v).stride() == theirs(q, other, v).stride()
        assert ours(q, k, other).stride() == theirs(q, k, other).stride()
    assert ours(q, k, v[..., :6]).stride() == theirs(q, k, v[..., :6]).stride()
    assert ours(q[..., :1, :], k, v).stride() == theirs(q[..., :1, :], k, v).stride()
    out, want = (f(q, k, v) for f in (ours, theirs))
    if len(lead) == 2:
        try:
            want.view(-1, *want.shape[2:])
        except RuntimeError:
            return
        out.view(-1, *out.shape[2:])


@pytest.mark.parametrize("layout", ["contiguous", "tokens first", "transposed", "batch expanded", "part of packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_strides_of_gradients(lead, dtype, layout):
    def gradients(function, value_dim):
        torch.manual_seed(1)
        tensors = [LAYOUTS[layout](torch.randn(*lead, *rows).to(dtype)).detach().requires_grad_()
                   for rows in ((5, 8), (7, 8), (7, value_dim))]
        return torch.autograd.grad(function(*tensors).sum(), tensors)

    for value_dim in (8, 6):
        got, want = gradients(ours, value_dim), gradients(theirs, value_dim)
        for i, (a, b) in enumerate(zip(got, want)):
            if i != 1 and len(lead) > 1 or b.is_contiguous() or attention_is_flash(lead, layout, value_dim):
                assert a.stride() == b.stride()
            else:
                assert a.is_contiguous()  # torch's math path leaves the gradient of key transposed: no view of it does


def attention_is_flash(lead, layout, value_dim):
    return len(lead) == 2 and value_dim == 8 and layout != "transposed"


@pytest.mark.parametrize("shapes", [((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), ((2, 6, 5, 8), (2, 3, 7, 8), (2, 2, 7, 8)),
                                    ((2, 6, 5, 8), (2, 2, 7, 8), (2, 6, 7, 4)), ((6, 5, 8), (3, 7, 8), (1, 7, 8)),
                                    ((2, 6, 5, 8), (1, 3, 7, 8), (2, 6, 7, 8)), ((2, 6, 5, 8), (3, 7, 8), (3, 7, 8)),
                                    ((2, 2, 6, 5, 8), (2, 2, 6, 7, 8), (2, 2, 3, 7, 8))])
def test_grouped_heads_of_key_and_value_may_differ(shapes):
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.rand(5, 7) < 0.8
    for options in ({}, dict(is_causal=True), dict(attn_mask=mask)):
        got, want = (f(*tensors, enable_gqa=True, **options) for f in (ours, theirs))
        assert got.stride() == want.stride() and ot.explain(*tensors, enable_gqa=True, **options).path == "ops_transformer"
        assert_near(got.detach().numpy(), want.detach().numpy(), "float64")
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in (got, want))):
            assert_near(a.numpy(), b.numpy(), "float64", 10)


# ---- errors ----------------------------------------------------------------------------------------------------------

Q, K, V = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
BAD = {
    "rows of key and value": ((Q, K[:, :, :5], V[:, :, :6]), {}),
    "rows of key and value, long": ((Q, K[:, :, :5], torch.ones(1).expand(2, 3, 4_000_000, 8)), {}),
    "rows of key and value, no rows": ((Q, K[:, :, :0], V), {}),
    "rows of key and value, rank 3": ((Q[0], K[0, :, :5], V[0, :, :6]), {}),
    "rows of key and value, wide": ((torch.ones(1, 1, 3, 800), torch.ones(1, 1, 5, 800), torch.ones(1, 1, 6, 800)), {}),
    "rows of key and value, int": ((Q.int(), K[:, :, :5].int(), V.int()), {}),
    "rows of key and value, meta": ((Q.to("meta"), K[:, :, :5].to("meta"), V.to("meta")), {}),
    "rows of key and value, grouped": ((Q, K[:, :, :5], V), dict(enable_gqa=True)),
    "rows of key and value, dropout": ((Q, K[:, :, :5], V), dict(dropout_p=0.5)),
    "rows of key and value, mask": ((Q, K[:, :, :5], V, torch.ones(5, 5, dtype=torch.bool)), {}),
    "head_dim": ((Q, K[..., :7], V), {}),
    "head_dim, flash": ((Q[..., :7], K, V[..., :7]), {}),
    "heads": ((Q, K[:, :2], V[:, :2]), {}),
    "heads of key": ((Q, K[:, :2], V), {}),
    "batch": ((Q, torch.ones(3, 3, 7, 8), torch.ones(3, 3, 7, 8)), {}),
    "heads do not divide": ((Q, K[:, :2], V[:, :2]), dict(enable_gqa=True)),
    "one does not divide": ((torch.ones(2, 6, 5, 8), K, torch.ones(2, 4, 7, 8)), dict(enable_gqa=True)),
    "mask keys": ((Q, K, V, torch.ones(5, 6)), {}),
    "mask rows": ((Q, K, V, torch.ones(4, 7)), {}),
    "mask heads": ((Q, K, V, torch.ones(2, 2, 5, 7)), {}),
    "mask of more batches": ((Q[:1], K[:1], V[:1], torch.ones(2, 1, 5, 7)), {}),
    "mask of more heads": ((Q[:, :1], K[:, :1], V[:, :1], torch.ones(3, 5, 7)), {}),
    "mask of more dimensions": ((Q, K, V, torch.ones(1, 2, 3, 5, 7)), {}),
    "mask of more rows": ((Q[:, :, :1], K, V, torch.ones(5, 7)), {}),
    "mask of more keys": ((Q, K[:, :, :1], V[:, :, :1], torch.ones(5, 7)), {}),
    "mask of integers": ((Q, K, V, torch.ones(5, 7, dtype=torch.int64)), {}),
    "mask of another float": ((Q, K, V, torch.ones(5, 7).half()), {}),
    "one dimension": ((Q[0, 0, 0], K, V), {}),
    "no dimension": ((torch.ones(()),) * 3, {}),
    "dtypes": ((Q, K.double(), V), {}),
    "integers": ((Q.int(), K.int(), V.int()), {}),
    "dropout over 1": ((Q, K, V), dict(dropout_p=1.5)),
    "dropout below 0": ((Q, K, V), dict(dropout_p=-0.5)),
    "dropout nan": ((Q, K, V), dict(dropout_p=float("nan"))),
    "devices": ((Q, K.to("meta"), V), {}),
    "NumPy": ((Q.numpy(), K, V), {}),
    "nothing": ((None, K, V), {}),
    "mask is a list": ((Q, K, V, [1.0]), {}),
    "is_causal is a number": ((Q, K, V), dict(is_causal=1)),
    "is_causal is None": ((Q, K, V), dict(is_causal=None)),
    "enable_gqa is a number": ((Q, K, V), dict(enable_gqa=1)),
    "scale is text": ((Q, K, V), dict(scale="1")),
    "dropout is text": ((Q, K, V), dict(dropout_p="0.5")),
    "dropout is None": ((Q, K, V), dict(dropout_p=None)),
    "out": ((Q, K, V), dict(out=Q)),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_kinds_of_errors(name, grad):
    arguments, options = BAD[name]
    if grad and isinstance(arguments[0], torch.Tensor) and arguments[0].is_floating_point():
        arguments = (arguments[0].clone().requires_grad_(), *arguments[1:])
    reads_past = name.startswith("rows of key and value")  # torch does not always see it, and must not be asked
    with pytest.raises(Exception) as ours_says:
        ours(*arguments, **options)
    if reads_past:
        assert ours_says.type is RuntimeError and "value dim -2 (kv_len)" in str(ours_says.value)
    else:
        with pytest.raises(Exception) as theirs_says:
            theirs(*arguments, **options)
        assert ours_says.type is theirs_says.type
    if "out" not in options:
        assert ot.explain(*arguments, **options).path in ("refused",) if reads_past else ("refused", "torch")


@pytest.mark.parametrize("by", ["sdpa_kernel", "autocast", "vmap", "dual", "compile"])
def test_sizes_are_checked_whoever_computes(by):
    def call():
        ours(Q, K[:, :, :5], V)

    with pytest.raises(Exception, match=r"value dim -2 \(kv_len\) is 7, but key has 5"):
        if by == "sdpa_kernel":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                call()
        elif by == "autocast":
            with torch.autocast("cpu"):
                call()
        elif by == "vmap":
            torch.func.vmap(lambda q: ours(q, K[0, :, :5], V[0]))(Q)
        elif by == "dual":
            with forward_ad.dual_level():
                ours(forward_ad.make_dual(Q, Q), K[:, :, :5], V)
        else:
            torch.compile(lambda q: ours(q, K[:, :, :5], V), backend="eager", fullgraph=True)(Q)


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_no_number(scale, dtype):
    q, k, v = (t.to(dtype).requires_grad_() for t in (Q.clone(), K.clone(), V.clone()))
    for options in ({}, dict(is_causal=True)):
        out = ours(q, k, v, scale=scale, **options)
        assert out.isnan().all() and torch.autograd.grad(out.sum(), q)[0].isnan().all()
        assert "scale is" in ot.explain(q, k, v, scale=scale).reason


# ---- aliasing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_the_result_is_nobodys_memory(lead, grad):
    tensors = [torch.randn(*lead, 5, 8, requires_grad=grad) for _ in "qkv"]
    mask = torch.zeros(5, 5)
    for options in ({}, dict(attn_mask=mask), dict(dropout_p=1.0), dict(is_causal=True)):
        got, want = (f(*tensors, **options) for f in (ours, theirs))
        assert got._version == want._version == 0
        # Backward reads the result again, and a view says when it was changed in between.
        assert not got._is_view() or grad and len(lead) != 2
        assert (got.requires_grad, got.is_leaf) == (want.requires_grad, want.is_leaf)
        storage = got.untyped_storage()
        assert storage.data_ptr() not in [t.untyped_storage().data_ptr() for t in tensors]
        assert storage.nbytes() == got.numel() * got.element_size()
        assert all(t._version == 0 for t in tensors)
        got.mul_(2)  # in place, as models do
        if grad and dict(dropout_p=1.0) != options:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                got.sum().backward()


def test_a_saved_tensor_that_changes_is_noticed():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    k = torch.randn(1, 2, 5, 8)
    out = ours(q, k, k)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- explain ---------------------------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    pass


KINDS = {
    "plain": lambda t: t, "grad": lambda t: t.requires_grad_() if t.is_floating_point() else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "negative": lambda t: t._neg_view() if t.dtype not in (torch.bool, torch.int32) else t,
    "subclass": lambda t: t.as_subclass(Marked), "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)) if t.dim() > 2 else t,
    "meta": lambda t: t.to("meta"), "NumPy": lambda t: t.float().numpy(),
    "dual": lambda t: forward_ad.make_dual(t.clone(), torch.ones_like(t)) if t.is_floating_point() else t,
    "other dtype": lambda t: t.double() if t.dtype != torch.float64 else t.float(),
    "fewer rows": lambda t: t[..., 1:, :], "fewer heads": lambda t: t[..., :1, :, :] if t.dim() > 2 else t,
    "fewer columns": lambda t: t[..., :-1],
}
KIND = st.one_of(st.sampled_from(["plain", "grad"]), st.sampled_from(list(KINDS)))
CONTEXTS = {
    "none": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), "device": lambda: torch.device("meta"),
    "mode": lambda: torch.overrides.BaseTorchFunctionMode(), "profile": torch.profiler.profile,
}
MASKS = {
    "none": lambda n, m, dtype: None, "bool": lambda n, m, dtype: torch.rand(n, m) < 0.8,
    "float": lambda n, m, dtype: torch.randn(n, m).to(dtype if dtype.is_floating_point else torch.float32),
    "f32": lambda n, m, dtype: torch.randn(n, m), "int": lambda n, m, dtype: torch.ones(n, m, dtype=torch.int32),
    "too many": lambda n, m, dtype: torch.ones(n + 1, m, dtype=torch.bool), 
    "grad": lambda n, m, dtype: torch.randn(n, m, requires_grad=True),
    "upper left": lambda n, m, dtype: causal_upper_left(n, m), "lower right": lambda n, m, dtype: causal_lower_right(n, m),
    "negative": lambda n, m, dtype: torch.randn(n, m)._neg_view(),
}


def mostly(usual, *rare):
    return st.one_of(st.just(usual), st.just(usual), st.sampled_from([usual, *rare]))


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lead=st.sampled_from([(), (2,), (2, 2), (2, 2), (1, 2, 2)]),
       rows=st.sampled_from([(3, 5), (4, 4), (1, 6), (0, 3), (3, 0)]),
       dims=mostly((8, 8), (8, 6), (800, 8), (8, 0)), dtype=mostly(torch.float32, *DTYPES, torch.complex64, torch.int32),
       kinds=st.tuples(KIND, KIND, KIND), layout=st.sampled_from(list(LAYOUTS)), mask=mostly("none", *MASKS),
       context=mostly("none", *CONTEXTS), dropout=mostly(0.0, 0.3, 1.0, 1.5), is_causal=st.booleans(), gqa=mostly(False, True),
       scale=mostly(None, 0.3, 2, float("inf")))
def test_explain_tells_what_happens(lead, rows, dims, dtype, kinds, layout, mask, context, dropout, is_causal, gqa, scale):
    happened = []

    def watched(function, name):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            if result is not False:
                happened.append(name)
            return result

        return call

    def asked(*arguments, **options):
        happened.append("torch")
        return theirs(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(attention, "torch_sdpa", asked)
        patch.setattr(operator, "_forward", watched(operator._forward, "ops_transformer"))
        patch.setattr(attention, "attend_plain", watched(attention.attend_plain, "ops_transformer"))
        patch.setattr(operator, "_statistics", watched(operator._statistics, "ops_transformer"))  # of the fake kernel too
        shapes = (rows[0], dims[0]), (rows[1], dims[0]), (rows[1], dims[1])
        tensors = [torch.randn(*lead, *shape).to(dtype) for shape in shapes]
        tensors[0] = LAYOUTS[layout](tensors[0]) if 0 not in rows else tensors[0]
        tensors = [KINDS[kind](tensor) for kind, tensor in zip(kinds, tensors)]
        bias = MASKS[mask](*rows, dtype)
        with CONTEXTS[context]():
            arguments = *tensors, bias, dropout, is_causal
            told = ot.explain(*arguments, scale=scale, enable_gqa=gqa)
            assert not happened  # nothing is computed
            out = error = None
            try:
                out = ours(*arguments, scale=scale, enable_gqa=gqa)
            except Exception as exception:
                error = exception
            by = set(happened)
            if told.path == "refused":
                assert not by and str(error) == told.reason
            else:
                assert by == {told.path} and (error is None or told.path == "torch")
            if out is None or told.path != "ops_transformer" or 0 in rows:  # without rows torch answers before it broadcasts
                return
            try:
                want = theirs(*arguments, scale=scale, enable_gqa=gqa)
            except Exception:
                return  # wider, not worse
            assert (out.shape, out.stride(), out.dtype, type(out)) == (want.shape, want.stride(), want.dtype, type(want))
            assert out.requires_grad == want.requires_grad
            if dropout == 0 and out.device.type == "cpu":
                name = str(out.dtype).replace("torch.", "")
                assert_near(out.detach().double().numpy(), want.detach().double().numpy(), name, 8)

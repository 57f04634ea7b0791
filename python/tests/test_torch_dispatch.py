"""The drop-in sees what torch's dispatcher would have seen: subclasses, modes, transforms, tangents, scripts and the switch."""

import importlib.util
import warnings

import pytest
from conftest import assert_near, import_torch

torch = import_torch()

import torch.autograd.forward_ad as forward_ad  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa as attention  # noqa: E402
from ops_transformer import _torch_sdpa_operator as operator  # noqa: E402
from ops_transformer.torch import scaled_dot_product_attention as ours  # noqa: E402

theirs = torch._C._nn.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


@pytest.fixture
def qkv():
    return torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)


def same(got, want, factor=4.0):
    assert got.dtype == want.dtype
    assert_near(got.detach().double().numpy(), want.detach().double().numpy(), str(want.dtype).replace("torch.", ""), factor)


class Counted:
    """How often the core has computed."""

    def __init__(self, monkeypatch):
        self.calls = 0
        for module, name in ((operator, "_forward"), (attention, "attend_plain")):
            monkeypatch.setattr(module, name, self._of(getattr(module, name)))

    def _of(self, function):
        def counted(*arguments):
            result = function(*arguments)
            self.calls += result is not False
            return result

        return counted


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


# ---- subclasses and modes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, sizes", [(causal_upper_left, (5, 7)), *((causal_lower_right, sizes)
                                                                        for sizes in [(5, 7), (7, 7), (1, 7), (7, 3)])])
@pytest.mark.parametrize("switched", [True, False])
def test_causal_bias(make, sizes, switched, counted):
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (sizes[0], sizes[1], sizes[1]))
    bias = make(*sizes)
    want = theirs(q, k, v, bias)
    gradients = torch.autograd.grad(want.sum(), (q, k, v))
    if switched:
        with ot.sdpa():
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, bias), got)
            assert torch.equal(theirs(q, k, v, bias), got)  # by a name that a module took before: torch's own
    else:
        got = ours(q, k, v, bias)
    same(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), gradients):
        same(a, b)
    assert counted.calls
    assert ot.explain(q, k, v, bias).path == "ops_transformer"
    torch.manual_seed(1)
    dropped = ours(q, k, v, bias, dropout_p=0.5)
    assert dropped.isfinite().all() and not torch.equal(dropped, got)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        ours(q, k, v, bias, is_causal=True)
    same(theirs(q, k, v, bias), want)  # as before, with the switch off


def test_causal_bias_makes_no_mask(qkv, monkeypatch):
    bias = causal_lower_right(5, 7)
    want = theirs(*qkv, bias)
    monkeypatch.setattr(type(bias), "_materialize", lambda *a: pytest.fail("a mask was made"))
    same(ours(*qkv, bias), want)


class Marked(torch.Tensor):
    seen = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Ones(TorchFunctionMode):
    """Takes attention over whole, as a mode may."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is theirs:
            return torch.ones(3)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", range(4))
def test_a_subclass_has_its_way(which, qkv):
    arguments = [*qkv, torch.zeros(5, 7)]
    want = theirs(*arguments)
    arguments[which] = arguments[which].as_subclass(Marked)
    Marked.seen.clear()
    with ot.sdpa():
        assert "__torch_function__" in ot.explain(*arguments).reason
        out = F.scaled_dot_product_attention(*arguments)
    assert theirs in Marked.seen and type(out) is Marked
    same(out.as_subclass(torch.Tensor), want)


def test_a_function_mode_has_its_way(qkv):
    with ot.sdpa(), Ones():
        assert F.scaled_dot_product_attention(*qkv).tolist() == [1, 1, 1]
        assert ot.explain(*qkv).path == "torch"


def test_a_dispatch_mode_sees_the_operator(qkv):
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Log():
        out = ours(*qkv)
    assert any("ops_transformer.sdpa" in name for name in seen) and torch.equal(out, ours(*qkv))


def test_a_default_device_changes_nothing(qkv, counted):
    want = ours(*qkv)
    mask = torch.zeros(5, 7, requires_grad=True)
    for device in ("cpu", "meta"):
        with torch.device(device):
            assert torch.equal(ours(*qkv), want) and ot.explain(*qkv).path == "ops_transformer"
            assert ours(*qkv, dropout_p=0.5).device.type == "cpu"
            gradient, = torch.autograd.grad(ours(*qkv, mask).sum(), mask)
            assert gradient.device.type == "cpu"
    assert counted.calls == 7


def test_jagged_and_strided_nested_tensors_go_to_torch():
    parts = [torch.randn(3, 5, 8), torch.randn(3, 4, 8)]
    jagged = torch.nested.nested_tensor([p.transpose(0, 1) for p in parts], layout=torch.jagged).transpose(1, 2)
    nested = torch.nested.nested_tensor(parts)
    for tensor in (jagged, nested):
        assert ot.explain(tensor, tensor, tensor).path == "torch"
    with ot.sdpa():
        outs = F.scaled_dot_product_attention(jagged, jagged, jagged).transpose(1, 2).unbind()
    for out, part in zip(outs, parts):
        same(out.transpose(0, 1), theirs(part[None], part[None], part[None])[0])
    with torch.no_grad():
        try:
            want = theirs(nested, nested, nested)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                ours(nested, nested, nested)
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours(nested, nested, nested).unbind(), want.unbind()))
    sparse = torch.randn(1, 2, 4, 8).to_sparse()
    with pytest.raises(RuntimeError, match="Sparse"):
        ours(sparse, sparse, sparse)


# ---- transforms and derivatives --------------------------------------------------------------------------------------


def test_forward_mode(qkv):
    q, k, v = qkv
    tangents = [torch.randn_like(t) for t in qkv]
    mask = torch.randn(5, 7)

    def derivative(function, **options):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(qkv, tangents)]
            return forward_ad.unpack_dual(function(*duals, **options)).tangent

    def by_math(*arguments, **options):
        with sdpa_kernel(SDPBackend.MATH):
            return theirs(*arguments, **options)

    for options in ({}, dict(is_causal=True), dict(attn_mask=mask), dict(scale=0.3)):
        same(derivative(ours, **options), derivative(by_math, **options))
    with forward_ad.dual_level():
        assert "tangent" in ot.explain(forward_ad.make_dual(q, tangents[0]), k, v).reason
        assert ot.explain(q, k, v).path == "ops_transformer"
    jacobian = torch.autograd.functional.jacobian
    want = jacobian(lambda x: by_math(x, k, v), q)
    for options in (dict(vectorize=True, strategy="forward-mode"), dict(vectorize=True), {}):
        same(jacobian(lambda x: ours(x, k, v), q, **options), want)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_batched_gradients(mask, qkv):
    tensors = [t.clone().requires_grad_() for t in qkv]
    mask = {None: None, "bool": torch.rand(5, 7) < 0.7, "float": torch.randn(5, 7, requires_grad=True)}[mask]
    inputs = tensors + [mask] * (mask is not None and mask.requires_grad)
    out = ours(*tensors, mask)
    grads = torch.randn(4, *out.shape)
    want = [torch.stack(parts) for parts in zip(*(torch.autograd.grad(out, inputs, g, retain_graph=True) for g in grads))]
    got = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    by_vmap = torch.func.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(grads)
    for a, b, c in zip(got, by_vmap, want):
        assert torch.equal(a, c) and torch.equal(b, c)


def test_the_operator_under_vmap(qkv):
    q, k, v = qkv
    run = lambda q, k: operator._operator(q, k, v, None, None, 0.0, 1, None, False)[0]  # noqa: E731
    got = torch.func.vmap(run, in_dims=(1, None))(torch.stack([q, q * 2, -q], 1), k)
    assert torch.equal(got, torch.stack([run(q, k), run(q * 2, k), run(-q, k)]))


@pytest.mark.parametrize("transform", ["jvp", "jacrev", "jacfwd", "hessian"])
def test_transforms(transform, qkv):
    q, k, v = (t[:1, :1].double() for t in qkv)

    def by_math(x):
        with sdpa_kernel(SDPBackend.MATH):
            return theirs(x, k, v).sum()

    def run(function):
        if transform == "jvp":
            return torch.func.jvp(function, (q,), (q,))[1]
        return getattr(torch.func, transform)(function)(q)

    try:
        got = run(lambda x: ours(x, k, v).sum())
    except NotImplementedError:
        return  # torch's own kernel has no such derivative, and says so
    same(got, run(by_math))


def test_negative_and_zero_views_in_every_place(qkv):
    mask = torch.randn(5, 7)
    for i in range(4):
        arguments = [*qkv, mask]
        plain = list(arguments)
        plain[i] = -plain[i]
        arguments[i] = arguments[i]._neg_view()
        assert torch.equal(ours(*arguments), ours(*plain)) and ot.explain(*arguments).plan
        assert i == 3 or torch.equal(ours(*arguments[:3]), ours(*plain[:3]))
        with torch.no_grad():
            arguments[i], plain[i] = torch._efficientzerotensor(tuple(plain[i].shape)), torch.zeros_like(plain[i])
            assert torch.equal(ours(*arguments), ours(*plain)) and ot.explain(*arguments).plan
            assert i == 3 or torch.equal(ours(*arguments[:3]), ours(*plain[:3]))


# ---- torch's own switches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_kernel_asked_for_by_name_is_torchs(backend, qkv, counted):
    with ot.sdpa(), sdpa_kernel(backend):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), theirs(*qkv))
        assert "sdpa_kernel" in ot.explain(*qkv).reason
    assert not counted.calls
    with pytest.raises(RuntimeError, match="No viable backend"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        ours(*qkv)


def scripted(tmp_path):
    path = tmp_path / "scripted_module.py"
    path.write_text("import torch\nimport torch.nn.functional as F\n\n\n"
                    "def f(a: torch.Tensor):\n    return F.scaled_dot_product_attention(a, a, a, is_causal=True)\n")
    spec = importlib.util.spec_from_file_location("scripted_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def test_script_trace_and_fx(tmp_path):
    f, q = scripted(tmp_path), torch.randn(1, 2, 5, 8)
    want = f(q)
    with ot.sdpa():
        graphs = [torch.jit.script(f), torch.jit.trace(f, q), torch.fx.symbolic_trace(f)]
        for graph in graphs:
            assert torch.equal(graph(q), want)
    for graph in graphs:
        assert torch.equal(graph(q), want)
    assert "aten::scaled_dot_product_attention" in str(graphs[1].graph) and "aten::" in str(graphs[0].graph)
    with pytest.raises(RuntimeError, match="do not fit together"):  # a tracer does not get sizes that disagree either
        torch.jit.trace(lambda a: ours(a, a, a[:, :, 1:]), q)


def test_profiler_ranges(qkv):
    tensors = [t.clone().requires_grad_() for t in qkv]
    with torch.profiler.profile() as profile:
        ours(*tensors).sum().backward()
        ours(*qkv)
    names = {event.key for event in profile.key_averages()}
    assert {"ops_transformer::sdpa", "ops_transformer::sdpa_backward"} <= names


def test_compile_with_a_causal_bias_and_a_kernel_by_name(qkv):
    torch._dynamo.reset()
    bias = causal_lower_right(5, 7)
    compiled = torch.compile(lambda q, k, v: ours(q, k, v, attn_mask=bias), backend="aot_eager")
    same(compiled(*qkv), theirs(*qkv, bias))


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_the_switch_gives_back_what_it_found(monkeypatch):
    def mine(*arguments, **options):
        return 42

    def late(*arguments, **options):
        return 43

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    with ot.sdpa():
        with ot.sdpa():
            assert F.scaled_dot_product_attention is ours
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is mine
    ot.disable_sdpa()  # once more than it was enabled
    assert F.scaled_dot_product_attention is mine
    with ot.sdpa():
        F.scaled_dot_product_attention = late
        with ot.sdpa():
            assert F.scaled_dot_product_attention is ours
        assert F.scaled_dot_product_attention is late
    assert F.scaled_dot_product_attention is late  # whoever put it there takes it away


def test_the_switch_of_threads_that_overlap():
    before = F.scaled_dot_product_attention
    first, second = ot.sdpa(), ot.sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ours
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is before and torch.backends.mha.get_fastpath_enabled()


def test_inference_of_torchs_own_layers_comes_through(counted):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    attention_layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x, padding = torch.randn(2, 17, 32), torch.zeros(2, 17, dtype=torch.bool)
    padding[1, 11:] = True
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            for run, times in ((lambda: encoder(x, src_key_padding_mask=padding)[~padding], 2),
                               (lambda: attention_layer(x, x, x, need_weights=False)[0], 1)):
                want = run()
                assert counted.calls == 0
                with ot.sdpa():
                    got = run()
                    assert counted.calls == times
                counted.calls = 0
                assert_near(got.numpy(), want.numpy(), factor=10)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_switch_leaves_a_fast_path_that_was_off_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ot.sdpa():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ot.sdpa():
            pass

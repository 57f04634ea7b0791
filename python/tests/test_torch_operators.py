"""Gradients of rowwise and matmul through torch: nothing is cut without a word, whoever looks on."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import between_elements, import_torch

from ops_transformer import Context, kv_cache, matmul, quant, rowwise
from ops_transformer.flash_attention import flash_attention, flash_attention_score

torch = import_torch()
from ops_transformer.torch import scaled_dot_product_attention as sdpa  # noqa: E402

F = torch.nn.functional
WIDTH = 8


def needing(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def half(y, which):
    return y.chunk(2, -1)[which]


def turned(x, cos, sin, pairs=False):
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    parts = a * cos - b * sin, a * sin + b * cos
    return torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)


COS, SIN = rowwise.rope_table(torch.arange(3), WIDTH // 2)
POSITIONS = torch.tensor([2, 0, 1])
# name: (ours, the same in torch's words, how many of x [3, 5, 8] and then of vectors [8] are taken)
CASES = {
    "rms_norm": (rowwise.rms_norm, lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), 1, 1),
    "add_rms_norm": (rowwise.add_rms_norm, lambda a, b, w: (F.rms_norm(a + b, (WIDTH,), w, 1e-5), a + b), 2, 1),
    "add_rms_norm, sum alone": (lambda a, b, w: rowwise.add_rms_norm(a, b, w)[1], lambda a, b, w: a + b + 0 * w.sum(), 2, 1),
    "layer_norm": (rowwise.layer_norm, lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), 1, 2),
    "layer_norm, x alone": (rowwise.layer_norm, lambda x: F.layer_norm(x, (WIDTH,)), 1, 0),
    "layer_norm, bias alone": (lambda x, b: rowwise.layer_norm(x, None, b), lambda x, b: F.layer_norm(x, (WIDTH,), None, b), 1, 1),
    "softmax": (lambda x: rowwise.softmax(x, 0.5), lambda x: torch.softmax(0.5 * x, -1), 1, 0),
    "rope": (lambda x: rowwise.rope(x, COS, SIN), lambda x: turned(x, COS, SIN), 1, 0),
    "rope back, pairs": (lambda x: rowwise.rope(x, COS, SIN, style="pairs", inverse=True), lambda x: turned(x, COS, -SIN, True), 1, 0),
    "rope_cached": (lambda x: rowwise.rope_cached(x, POSITIONS, COS, SIN), lambda x: turned(x, COS[POSITIONS], SIN[POSITIONS]), 1, 0),
    "rope_cached, axes": (lambda x: rowwise.rope_cached(x, [[2, 0, 1]] * 3, COS, SIN, sections=rowwise.RopeSections(2, 1, 1)),
                          lambda x: turned(x, COS[POSITIONS], SIN[POSITIONS]), 1, 0),
    "swiglu": (rowwise.swiglu, lambda a, b: F.silu(a) * b, 2, 0),
    "swiglu, one array": (rowwise.swiglu, lambda x: F.silu(half(x, 0)) * half(x, 1), 1, 0),
    "swiglu, swapped": (lambda x: rowwise.swiglu(x, swapped=True), lambda x: F.silu(half(x, 1)) * half(x, 0), 1, 0),
    "add": (rowwise.add, lambda a, b: a + b, 2, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch_in_double(name, dtype):
    ours, reference, rows, vectors = CASES[name]
    inputs = [needing(3, 5, WIDTH, dtype=dtype) for _ in range(rows)] + [needing(WIDTH, dtype=dtype) for _ in range(vectors)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    got, want = ours(*inputs), reference(*doubles)
    got, want = (result if isinstance(result, tuple) else (result,) for result in (got, want))
    grads = [torch.randn(w.shape, dtype=dtype) for w in want]
    used = [i for i, tensor in enumerate(inputs)]
    first = torch.autograd.grad(got, inputs, grads, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(got, inputs, grads, allow_unused=True)
    reference_grads = torch.autograd.grad(want, doubles, [g.double() for g in grads])
    bound = 1e-5 if dtype == torch.float32 else 0.15
    for a, b in [*zip(got, want), *((first[i], reference_grads[i]) for i in used if first[i] is not None)]:
        assert a.dtype == dtype and (a - b).abs().max() <= bound * max(1, b.abs().max())
    assert all(b.abs().max() == 0 for a, b in zip(first, reference_grads) if a is None)
    assert all(a is None or torch.equal(a, b) for a, b in zip(first, again))


def test_statistics_come_with_the_result():
    x, w = needing(3, WIDTH), needing(WIDTH)
    out, rstd = rowwise.rms_norm(x, w, return_rstd=True)
    assert torch.allclose(rstd, (x.square().mean(-1) + 1e-5).rsqrt()) and not rstd.requires_grad
    out.sum().backward()
    assert x.grad is not None
    _, mean, rstd = rowwise.layer_norm(x.detach(), return_statistics=True)
    assert torch.allclose(mean, x.mean(-1)) and torch.allclose(rstd, (x.var(-1, unbiased=False) + 1e-5).rsqrt())
    _, total, rstd = rowwise.add_rms_norm(x, x, w, return_rstd=True)
    assert torch.allclose(rstd, (total.square().mean(-1) + 1e-5).rsqrt())


ACTIVATIONS = {
    "none": lambda y: y, "silu": F.silu, "gelu_erf": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "swiglu": lambda y: F.silu(half(y, 0)) * half(y, 1), "swiglu_swapped": lambda y: half(y, 0) * F.silu(half(y, 1)),
}


def operands(activation, dtype):
    width = 4 if activation.startswith("swiglu") else 8
    return [needing(*shape, dtype=dtype) for shape in ((3, 5), (8, 5), (8,), (3, width))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matmul_in_double_by_differences(activation):
    def product(x, weight, bias, residual):
        return matmul.matmul(x, weight, bias=bias, residual=residual, activation=activation)

    assert torch.autograd.gradcheck(product, operands(activation, torch.float64))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matmul_and_its_gradients(activation, dtype, packed):
    inputs = operands(activation, dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    weight = matmul.pack(inputs[1].detach()) if packed else inputs[1]
    out = matmul.matmul(inputs[0], weight, bias=inputs[2], residual=inputs[3], activation=activation)
    want = ACTIVATIONS[activation](F.linear(*doubles[:3])) + doubles[3]
    grad = torch.randn(out.shape, dtype=dtype)
    taken = [0, 2, 3] if packed else [0, 1, 2, 3]
    got = torch.autograd.grad(out, [inputs[i] for i in taken], grad)
    expected = torch.autograd.grad(want, [doubles[i] for i in taken], grad.double())
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in [(out, want), *zip(got, expected)]:
        assert a.dtype == dtype and (a - b).abs().max() <= bound * max(1, b.abs().max())


def test_a_packed_weight_that_is_quantised_hands_gradients_to_x():
    blocks = torch.randint(0, 255, (8, 34), dtype=torch.uint8)
    blocks[:, 1] = 0x2C  # a scale that is finite
    packed = matmul.pack_blocks(blocks, "q8_0", 8, 32)
    x = needing(3, 32)
    matmul.matmul(x, packed).sum().backward()
    rows = matmul.lookup_rows(packed, range(8), like=x)
    assert torch.allclose(x.grad, rows.sum(0).expand(3, 32), rtol=1e-4, atol=1e-4)


def test_matmul_under_autocast_is_bfloat16_as_a_linear_layer_is():
    x, weight = needing(3, 5), needing(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out, of_torch = matmul.matmul(x, weight), F.linear(x, weight)
        assert out.dtype == of_torch.dtype == matmul.matmul(x.detach(), weight.detach()).dtype == torch.bfloat16
        assert rowwise.softmax(x).dtype == torch.float32
    out.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def network(x, w, b, weight):
    y = rowwise.layer_norm(rowwise.rms_norm(x, w), w, b)
    y = rowwise.rope_cached(rowwise.rope(y, COS, SIN), POSITIONS, COS, SIN)
    y = matmul.matmul(y.flatten(0, 1), weight, activation="swiglu", bias=b)
    return rowwise.softmax(rowwise.add(*rowwise.add_rms_norm(y, y, w[:4].contiguous()))).square().sum()


def network_inputs():
    return needing(3, 5, WIDTH), needing(WIDTH), needing(WIDTH), needing(WIDTH, WIDTH)


def test_a_compiled_network_has_no_graph_break_and_the_same_gradients():
    inputs = network_inputs()
    want = torch.autograd.grad(network(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(network, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))


def test_checkpoints_and_modes_without_gradients():
    inputs = network_inputs()
    want = torch.autograd.grad(network(*inputs), inputs)
    saved = torch.utils.checkpoint.checkpoint(network, *inputs, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(saved, inputs), want))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not network(*inputs).requires_grad and network(*inputs) == saved.detach()


def test_a_context_of_the_call_serves_its_backward():
    x, w = needing(3, WIDTH), needing(WIDTH)
    (one,) = torch.autograd.grad(rowwise.rms_norm(x, w, context=Context(num_threads=1)).sum(), x)
    (any_number,) = torch.autograd.grad(rowwise.rms_norm(x, w).sum(), x)
    assert torch.equal(one, any_number)


@pytest.mark.parametrize("name, arguments", [
    ("rms_norm", (torch.ones(2, 4), torch.ones(4), 1e-5, True)),
    ("add_rms_norm", (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-5, False)),
    ("layer_norm", (torch.ones(2, 4), torch.ones(4), None, 1e-5, True)),
    ("softmax", (torch.ones(2, 4), 1.0)),
    ("rope", (torch.ones(3, 1, WIDTH), COS, SIN, "halves", False)),
    ("rope_cached", (torch.ones(3, 1, WIDTH), POSITIONS, COS, SIN, "pairs", True, None)),
    ("swiglu", (torch.ones(2, 4), None, True)),
    ("add", (torch.ones(2, 4), torch.ones(2, 4))),
    ("matmul", (torch.ones(2, 4), torch.ones(6, 4), torch.ones(6), None, "swiglu")),
])
def test_operators_keep_torchs_rules(name, arguments):
    floats = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and a is not COS and a is not SIN
              else a for a in arguments]
    torch.library.opcheck(getattr(torch.ops.ops_transformer, name).default, tuple(floats))


def test_tensors_that_mean_more_than_their_memory():
    z = torch.complex(torch.ones(2, 4), torch.ones(2, 4)).conj().imag
    assert (rowwise.add(z, z) == -2).all()
    assert (rowwise.add(z, needing(2, 4)).detach().isfinite()).all()
    odd = type("Odd", (torch.Tensor,), {})
    assert type(rowwise.softmax(torch.ones(2, 4).as_subclass(odd))) is odd
    assert rowwise.softmax(torch.ones(2, 4, device="meta")).shape == (2, 4)
    for tensor, words in ((torch.eye(4).to_sparse(), "to_dense"), (torch.nested.nested_tensor([torch.ones(4)]), "nested")):
        with pytest.raises(TypeError, match=f"softmax: x is .*{words}"):
            rowwise.softmax(tensor)
    with pytest.raises(TypeError, match="rms_norm: weight is list"):
        rowwise.rms_norm(needing(2, 4), [1.0] * 4)
    # NumPy's arrays beside tensors are the same memory.
    assert rowwise.rms_norm(needing(2, 4), np.ones(4, np.float32)).requires_grad


def test_what_has_no_gradient_says_so():
    x, cos = needing(3, 1, WIDTH), COS.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="rope: cos requires gradients"):
        rowwise.rope(x, cos, SIN)
    with pytest.raises(RuntimeError, match="softmax: out is given and an input requires gradients"):
        rowwise.softmax(x, out=torch.empty(3, 1, WIDTH))
    with torch.no_grad():
        out = torch.empty(3, 1, WIDTH)
        assert rowwise.softmax(x, out=out) is out and torch.equal(out, rowwise.softmax(x))
    with pytest.raises(RuntimeError, match="matmul: .*out_scales has none"):
        matmul.matmul(x[:, 0], needing(4, WIDTH), out_scales=True)
    for call in (lambda: rowwise.softmax_backward(x, x), lambda: matmul.matmul_backward(x[:, 0], x[:, 0], x[:, 0]),
                 lambda: matmul.pack(x[:, 0]),
                 lambda: kv_cache.scatter_pa_kv_cache(x, x, [0, 1, 2], *(torch.zeros(1, 4, 1, WIDTH) for _ in "kv")),
                 lambda: kv_cache.gather_pa_kv_cache(x[None], x[None], [[0]], [1]), lambda: quant.quantize(x[:, 0]),
                 lambda: quant.dynamic_quant(x)):
        with pytest.raises(RuntimeError, match="requires gradients and this function has none"):
            call()
    (grad,) = torch.autograd.grad(rowwise.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="softmax_backward has no derivative"):
        grad.sum().backward()


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("look_on", [contextlib.nullcontext, torch.profiler.profile, Mode])
def test_out_is_what_the_function_writes_whoever_looks_on(look_on):
    x, weight = torch.randn(2, 3, WIDTH), torch.randn(WIDTH)
    minus = torch.complex(x, -x).conj().imag  # equal to x, with the negative bit
    with look_on():
        for given in (x, minus):
            out = torch.full((2, 3, WIDTH), torch.nan)
            assert rowwise.rms_norm(given, weight, out=out) is out
            assert torch.equal(out, rowwise.rms_norm(x, weight))
            for wrong in (torch.empty(2, 2, 3, WIDTH), torch.empty(2, 3, WIDTH, dtype=torch.bfloat16)):
                with pytest.raises(ValueError, match="rms_norm: out .*"):
                    rowwise.rms_norm(given, weight, out=wrong)
        if look_on is not Mode:
            array = np.empty((2, 3, WIDTH), np.float32)
            assert np.array_equal(rowwise.rms_norm(minus, weight, out=array), rowwise.rms_norm(x, weight))
            wide = torch.empty(2, 4)
            matmul.matmul(x[0, :2].bfloat16(), weight.bfloat16().expand(4, WIDTH), out=wide)
            assert torch.equal(wide, matmul.matmul(x[0, :2].bfloat16().float(), weight.bfloat16().float().expand(4, WIDTH)))


def test_a_compiled_call_may_be_the_first_of_a_process():
    code = """
import torch
from ops_transformer import matmul, rowwise
x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8)
out = torch.compile(lambda x: matmul.matmul(rowwise.rope_cached(x[:, None], [2, 0, 1], w[:, :4], w[:, :4])[:, 0], w), fullgraph=True,
                    backend="eager")(x)
assert out.requires_grad
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transforms_have_a_rule_or_an_error_never_zeros():
    x = torch.randn(3, 5, WIDTH)
    assert torch.allclose(torch.func.vmap(rowwise.softmax)(x), torch.softmax(x, -1), atol=1e-6)
    vectorised = torch.autograd.functional.jacobian(rowwise.softmax, x[0], vectorize=True)
    assert torch.allclose(vectorised, torch.autograd.functional.jacobian(lambda a: torch.softmax(a, -1), x[0]), atol=1e-6)
    with pytest.raises(RuntimeError, match="softmax: .*forward"):
        torch.func.jvp(rowwise.softmax, (x,), (x,))
    with pytest.raises(RuntimeError, match="softmax: inside torch.func.grad"):
        torch.func.grad(lambda a: rowwise.softmax(a).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="softmax: .*forward-mode tangent"):
            rowwise.softmax(torch.autograd.forward_ad.make_dual(x, x))


ROWS = torch.ones(2, 3, WIDTH)
NUMBERS = {
    "rms_norm, eps": lambda n: rowwise.rms_norm(ROWS, ROWS[0, 0], n), "layer_norm, eps": lambda n: rowwise.layer_norm(ROWS, eps=n),
    "softmax, scale": lambda n: rowwise.softmax(ROWS, n), "rope_table, theta": lambda n: rowwise.rope_table([0, 1], 4, n),
    "flash_attention_score, scale_value": lambda n: flash_attention_score(ROWS[None], ROWS[None], ROWS[None], scale_value=n).attention_out,
    **{f"flash_attention, {name}": lambda n, name=name: flash_attention(ROWS[None], ROWS[None], ROWS[None], **{name: n})
       for name in ("softmax_scale", "softcap", "bias_scale", "keep_prob")},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_given_as_tensors_are_refused(name):
    function, option = name.split(", ")
    words = rf"{function}: {option} is a torch tensor, must be a number \(float\({option}\)\): no gradient flows"
    call, number = NUMBERS[name], torch.tensor(0.5)
    call(0.5), call(np.float32(0.5))
    for tensor in (number, number.clone().requires_grad_(), torch.tensor([0.5]), number.to(torch.bfloat16)):
        with pytest.raises(TypeError, match=words):
            call(tensor)
    for run in (lambda: torch.func.grad(lambda n: call(n)[0].sum())(number), lambda: torch.vmap(call)(number[None]),
                lambda: torch.func.jvp(call, (number,), (number,))):
        with pytest.raises(TypeError, match=words):
            run()


def test_numbers_given_as_tensors_are_refused_by_compiled_calls():
    call = NUMBERS["flash_attention, softmax_scale"]
    for fullgraph in (False, True):
        with pytest.raises(Exception, match="flash_attention: softmax_scale is a torch tensor, must be a number"):
            torch.compile(call, backend="eager", fullgraph=fullgraph)(torch.tensor(0.5))


def test_the_drop_in_takes_scales_that_torch_takes():
    scale = torch.tensor(0.5, requires_grad=True)
    for mask in (None, torch.ones(3, 3, dtype=torch.bool)):
        with pytest.raises(TypeError, match="argument 'scale' must be float, not Tensor"):
            sdpa(ROWS[None], ROWS[None], ROWS[None], mask, scale=scale)
        number, tensor = (sdpa(ROWS[None], ROWS[None], ROWS[None], mask, scale=s) for s in (0.5, scale.detach()))
        torch.testing.assert_close(tensor, number)


def test_products_of_torch_and_numpy_arrays():
    x, w, b = needing(3, WIDTH), np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32), needing(6)
    out = matmul.matmul(x, w, bias=b)
    torch.testing.assert_close(out, F.linear(x, torch.from_numpy(w), b))
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.from_numpy(w.sum(0)).expand(3, WIDTH))
    mixed = matmul.matmul(x.detach().numpy(), w, bias=b, residual=np.ones((3, 6), np.float32))
    torch.testing.assert_close(mixed, out + 1)
    assert mixed.requires_grad


def test_a_packed_weight_in_a_compiled_call_says_what_to_do():
    packed = matmul.pack(np.ones((6, WIDTH), np.float32))
    x = torch.ones(3, WIDTH)
    with pytest.raises(Exception, match="matmul: a packed weight and out_scales cannot be traced by torch.compile") as caught:
        torch.compile(lambda x: matmul.matmul(x, packed), backend="eager", fullgraph=True)(x)
    assert "hasattr" not in str(caught.value)
    torch.testing.assert_close(torch.compile(lambda x: matmul.matmul(x, packed), backend="eager")(x), torch.full((3, 6), 8.0))


def test_pages_of_torch_that_no_memory_holds():
    for sizes in ((2**40, 2**20, 2**20, 1), (2**40, 32, 32, 64)):
        with pytest.raises(MemoryError, match=f"new_pages: .*{sizes[0]}"):
            kv_cache.new_pages(*sizes, like=torch.ones(1))


@pytest.mark.filterwarnings("ignore")  # torch warns of its own quantised tensors
def test_quantised_tensors_are_refused_by_what_they_are():
    x = torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8)
    for call in (lambda: rowwise.softmax(x), lambda: rowwise.swiglu(x, swapped=True), lambda: matmul.matmul(x, torch.ones(3, 4))):
        with pytest.raises(TypeError, match="is a quantised tensor"):
            call()


def test_tensors_without_values_beside_others_are_refused():
    x, empty, q = torch.ones(2, 4), torch.ones(2, 4, device="meta"), torch.ones(1, 1, 4, 8)
    for call in (lambda: rowwise.add(x, empty), lambda: rowwise.rms_norm(x, empty[0]), lambda: rowwise.rms_norm(x.numpy(), empty[0]), lambda: matmul.matmul(x, empty),
                 lambda: flash_attention(q, q.to("meta"), q), lambda: flash_attention(q.requires_grad_(), q, q.to("meta"))):
        with pytest.raises(TypeError, match="is on the device meta, which holds no values, but another tensor is not"):
            call()
    assert rowwise.add(empty, empty).device.type == "meta"


def test_tensors_between_elements():
    x = needing(2, WIDTH)
    bad = between_elements(x.detach())
    for tensor in (x.detach(), x):
        weight = between_elements(torch.ones(WIDTH))
        with pytest.raises(ValueError, match="^rms_norm: weight cannot be taken: the array lies at an address"):
            rowwise.rms_norm(tensor, weight)
    with pytest.raises(ValueError, match="^softmax: x has dtype complex64, which cannot be taken"):
        rowwise.softmax(x.detach().to(torch.complex64))
    got, want = (torch.autograd.grad(rowwise.softmax(x), x, weight)[0] for weight in (bad, bad.clone()))
    assert torch.equal(got, want)


def test_shapes_of_attention_beside_lengths_and_masks_of_the_host():
    q, lengths, mask = torch.ones(1, 1, 4, 8), torch.tensor([3]), torch.ones(4, 4, dtype=torch.bool)
    empty = q.to("meta")
    for options in (dict(kv_lengths=lengths), dict(mask=mask), dict(kv_lengths=lengths.numpy())):
        out = flash_attention(empty, empty, empty, **options)
        assert out.device.type == "meta" and out.shape == q.shape
    # The result lies where the query does.
    for call in (lambda: flash_attention(q, q, q, mask=mask.to("meta")), lambda: flash_attention(q.numpy(), empty, empty),
                 lambda: flash_attention(empty, q.numpy(), q.numpy()), lambda: flash_attention(empty, empty, q.numpy()),
                 lambda: flash_attention(q, q, q, kv_lengths=lengths.to("meta"))):
        with pytest.raises(TypeError, match="is on the device meta, which holds no values, but another tensor is not"):
            call()

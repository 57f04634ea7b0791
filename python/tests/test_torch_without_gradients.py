"""Functions of torch tensors whose results have no gradients (backwards for callers of their own, products with integers) where
torch's dispatcher looks on: compiled without a graph break, under modes and vmap, with the bits of a plain call."""

import numpy as np
import pytest
from conftest import import_torch
from test_flash_attn_doors import Recorded

torch = import_torch()

from ops_transformer import Context, matmul, moe, quant  # noqa: E402

COUNTS = torch.tensor([3, 0, 4, 2])
IDS = torch.tensor([[0, 1], [3, 2], [1, 3]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer(*names):
    shapes = dict(grad_out=(3, 6), x=(3, 6), gate_up=(4, 10, 6), down=(4, 6, 5), logits=(3, 4), gate_up_bias=(4, 10), down_bias=(4, 6),
                  shared_gate_up=(8, 6), shared_down=(6, 4), shared_gate=(6,), topk_weights=(3, 2))
    return [torch.randn(shapes[name]) for name in names]


def whole_layer(grad_out, x, gate_up, down, logits, gate_up_bias, down_bias, shared_gate_up, shared_down, shared_gate):
    return moe.moe_layer_backward(grad_out, x, gate_up, down, logits, 2, renormalise=True, gate_up_bias=gate_up_bias,
                                  down_bias=down_bias, shared_gate_up=shared_gate_up, shared_down=shared_down, shared_gate=shared_gate)


CASES = {
    "dynamic_quant": (quant.dynamic_quant, lambda: [torch.randn(2, 3, 8)]),
    "dynamic_quant, int4": (lambda x, s: quant.dynamic_quant(x, bits=4, smooth_scales=s), lambda: [torch.randn(5, 8), torch.rand(8)]),
    "moe_gating_backward": (lambda logits, w: moe.moe_gating_backward(logits, IDS, w, renormalise=True),
                            lambda: layer("logits", "topk_weights")),
    "moe_gating_backward, scores": (
        lambda logits, w, g: moe.moe_gating_backward(logits, [[0, 1], [3, 2], [-1, 3]], w, grad_scores=g, scores="sigmoid"),
        lambda: layer("logits", "topk_weights", "logits")),
    "moe_finalize_backward": (lambda g, x: moe.moe_finalize_backward(g, x, torch.tensor([[4, 1], [0, -1]])),
                              lambda: [torch.randn(2, 6), torch.randn(5, 6)]),
    "moe_finalize_backward, bias": (
        lambda g, x, w, b: moe.moe_finalize_backward(g, x, [[4, 1], [0, -1]], w, bias=b, topk_ids=[[1, 0], [2, -1]]),
        lambda: [torch.randn(2, 6), torch.randn(5, 6), torch.randn(2, 2), torch.randn(3, 6)]),
    "grouped_matmul_backward": (lambda g, x, w: matmul.grouped_matmul_backward(g, x, w, COUNTS),
                                lambda: [torch.randn(10, 5), torch.randn(10, 6), torch.randn(4, 5, 6)]),
    "grouped_matmul_backward, ends": (
        lambda g, x, w: matmul.grouped_matmul_backward(g, x, w, ends=COUNTS.cumsum(0)),
        lambda: [t.bfloat16() for t in (torch.randn(10, 5), torch.randn(10, 6), torch.randn(4, 5, 6))]),
    "moe_layer_backward": (whole_layer, lambda: layer("grad_out", "x", "gate_up", "down", "logits", "gate_up_bias", "down_bias",
                                                      "shared_gate_up", "shared_down", "shared_gate")),
    "moe_layer_backward, ids": (
        lambda g, x, gu, d, w: moe.moe_layer_backward(g, x, gu, d, topk_ids=IDS, topk_weights=w),
        lambda: layer("grad_out", "x", "gate_up", "down", "topk_weights")),
}


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def assert_equal(got, want):
    assert type(got) is type(want)
    for a, b in zip(flat(got), flat(want)):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_has_no_graph_break_and_the_same_bits(name, dynamic):
    function, make = CASES[name]
    inputs = make()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_equal(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("name", CASES)
def test_modes_see_one_operator(name):
    function, make = CASES[name]
    inputs = make()
    want = function(*inputs)
    with Recorded() as recorded:
        got = function(*inputs)
    assert_equal(got, want)
    assert name.partition(",")[0] in recorded.names


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_refused_and_not_cut_off(name):
    function, make = CASES[name]
    inputs = make()
    for i in range(len(inputs)):
        needing = [t.clone().requires_grad_() if j == i else t for j, t in enumerate(inputs)]
        with pytest.raises(RuntimeError, match=f"^{name.partition(',')[0]}: .* requires gradients and this function has none"):
            function(*needing)
        with torch.no_grad():
            assert_equal(function(*needing), function(*inputs))


def test_batches_contexts_and_arrays_of_numpy():
    x = torch.randn(3, 4, 8)
    q, scales = torch.func.vmap(quant.dynamic_quant)(x)
    assert_equal((q, scales), quant.dynamic_quant(x))
    minus = torch.complex(x, -x).conj().imag  # equal to x, with the negative bit
    assert_equal(quant.dynamic_quant(minus, context=Context(2)), (q, scales))
    grad, rows, weight = torch.randn(10, 5), torch.randn(10, 6), torch.randn(4, 5, 6)
    want = matmul.grouped_matmul_backward(grad, rows, weight, COUNTS)
    with Recorded():
        assert_equal(matmul.grouped_matmul_backward(grad, rows, weight.numpy(), COUNTS.numpy(), context=Context(3)), want)
        with pytest.raises(ValueError, match="^grouped_matmul_backward: one of counts and ends must be given"):
            matmul.grouped_matmul_backward(grad, rows, weight)
        with pytest.raises(ValueError, match="^dynamic_quant: .*int4 holds two values a byte, but a row of x has 5"):
            quant.dynamic_quant(torch.ones(2, 5), bits=4)


def test_packed_integers_in_a_compiled_call_say_what_to_do():
    q = np.ones((4, 6, 8), np.int8)
    stack = matmul.pack_int_stack(q, np.ones((4, 6, 1), np.float32))
    x, x_scales, counts = torch.ones(9, 8, dtype=torch.int8), torch.ones(9), COUNTS
    for name, call in {
            "grouped_matmul: a packed weight, dtype, and scales": lambda x: matmul.grouped_matmul(x.float(), stack, counts),
            "grouped_matmul_swiglu_quant: a packed weight": lambda x: matmul.grouped_matmul_swiglu_quant(x, x_scales, stack, counts),
            }.items():
        with pytest.raises(RuntimeError, match=f"{name} cannot be traced by torch.compile; keep the call out of it") as caught:
            torch.compile(call, backend="eager", fullgraph=True)(x)
        assert "raw_repr" not in str(caught.value)
        assert_equal(torch.compile(call, backend="eager")(x), call(x))
    with pytest.raises(RuntimeError, match="^grouped_matmul_swiglu_quant: x_scales requires gradients"):
        matmul.grouped_matmul_swiglu_quant(x, x_scales.clone().requires_grad_(), stack, counts)


@pytest.mark.parametrize("name, arguments", [
    ("dynamic_quant", (torch.randn(3, 8), 4, torch.ones(8))), ("dynamic_quant", (torch.randn(3, 8), 8, None))])
def test_operators_keep_torchs_rules(name, arguments):
    torch.library.opcheck(getattr(torch.ops.ops_transformer, name).default, arguments)

"""Gradients of mixtures of experts through torch: gating, permute, grouped products and finalize, compiled and not."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()
F = torch.nn.functional

from ops_transformer import Context, matmul, moe, quant  # noqa: E402
from test_torch_operators import ACTIVATIONS, half, needing  # noqa: E402, F401

COUNTS = [3, 0, 4, 1]


def loop_over_groups(x, weight, bias, counts, activation="none", residual=None):
    """torch's own products; rows behind the last group are zeros."""
    parts, end = [], 0
    for e, count in enumerate(counts):
        y = ACTIVATIONS[activation](F.linear(x[end : end + count], weight[e], None if bias is None else bias[e]))
        parts.append(y if residual is None else y + residual[end : end + count])
        end += count
    return torch.cat([*parts, parts[0].new_zeros(x.shape[0] - end, parts[0].shape[1])])


def operands(activation, dtype):
    width = 4 if activation.startswith("swiglu") else 8
    return [needing(*shape, dtype=dtype) for shape in ((10, 5), (4, 8, 5), (4, 8), (10, width))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_products_in_double_by_differences(activation):
    def product(x, weight, bias, residual):
        return matmul.grouped_matmul(x, weight, counts=COUNTS, bias=bias, residual=residual, activation=activation)

    assert torch.autograd.gradcheck(product, operands(activation, torch.float64))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_products_and_their_gradients(activation, dtype, packed):
    inputs = operands(activation, dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    weight = matmul.pack_stack(inputs[1].detach()) if packed else inputs[1]
    ends = torch.tensor(COUNTS).cumsum(0)
    out = matmul.grouped_matmul(inputs[0], weight, ends=ends, bias=inputs[2], residual=inputs[3], activation=activation)
    want = loop_over_groups(*doubles[:3], COUNTS, activation, doubles[3])
    grad = torch.randn(out.shape, dtype=dtype)
    grad[8:] = float("nan")  # of rows of nobody
    taken = [0, 2, 3] if packed else [0, 1, 2, 3]
    got = torch.autograd.grad(out, [inputs[i] for i in taken], grad)
    expected = torch.autograd.grad(want, [doubles[i] for i in taken], grad.double().nan_to_num())
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in [(out, want), *zip(got, expected)]:
        assert a.dtype == dtype and (a - b).abs().max() <= bound * max(1, b.abs().max())


def test_what_has_no_gradients_says_so():
    x, weight = needing(10, 6), needing(4, 8, 6)
    q, scales, _ = quant.quantize(weight.detach().reshape(32, 6))
    stack = matmul.pack_int_stack(q.reshape(4, 8, 6), scales.reshape(4, 8, 1))
    for call, words in (
            (lambda: matmul.grouped_matmul(x, weight, counts=COUNTS, out_scales=True), "grouped_matmul: .*out_scales"),
            (lambda: matmul.grouped_matmul(x, stack, counts=COUNTS), "grouped_matmul: .*an integer weight"),
            (lambda: matmul.grouped_matmul(x, weight, counts=COUNTS, dtype="bf16"), "grouped_matmul: dtype is given"),
            (lambda: matmul.grouped_matmul(x, weight, counts=COUNTS, out=torch.empty(10, 8)), "grouped_matmul: out is given"),
            (lambda: matmul.pack_stack(weight), "pack_stack: weights requires gradients"),
            (lambda: matmul.grouped_matmul_backward(x, x, weight, counts=COUNTS), "grouped_matmul_backward: .*requires gradients"),
            (lambda: moe.moe_gating(x, 2, bias=needing(6)), "moe_gating: bias requires gradients"),
            (lambda: moe.moe_finalize_backward(x, x, [[0]]), "moe_finalize_backward: .*requires gradients")):
        with pytest.raises(RuntimeError, match=words):
            call()
    with torch.no_grad():
        assert matmul.grouped_matmul(x, stack, counts=COUNTS).shape == (10, 8)
        assert matmul.grouped_matmul(x, weight, counts=COUNTS, out_scales=True)[0].dtype == torch.int8
    with pytest.raises(RuntimeError, match="a packed weight, dtype, and scales cannot be traced"):
        torch.compile(lambda x: matmul.grouped_matmul(x, stack, counts=[10, 0, 0, 0]), backend="eager", fullgraph=True)(x)


def test_under_autocast_grouped_products_are_bfloat16():
    x, weight = needing(10, 6), needing(4, 8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = matmul.grouped_matmul(x, weight, counts=COUNTS)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == weight.grad.dtype == torch.float32


# ---- gating, permute, finalize -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_gating_and_its_gradients(scores, renormalise):
    logits, bias = needing(9, 12), torch.randn(12)
    got = moe.moe_gating(logits, 3, scores=scores, renormalise=renormalise, bias=bias, routed_scaling_factor=1.5, return_scores=True)
    double = logits.detach().double().requires_grad_()
    s = double.softmax(-1) if scores == "softmax" else double.sigmoid()
    ids = (s + bias).topk(3, -1).indices
    assert torch.equal(got.topk_ids.long(), ids) and not got.topk_ids.requires_grad
    w = s.gather(-1, ids)
    w = 1.5 * (w / w.sum(-1, keepdim=True) if renormalise else w)
    grads = torch.randn(9, 3), torch.randn(9, 12)
    for which in ([0], [1], [0, 1]):
        results = [(got.topk_weights, got.scores)[i] for i in which]
        (a,) = torch.autograd.grad(results, logits, [grads[i] for i in which], retain_graph=True)
        (b,) = torch.autograd.grad([(w, s)[i] for i in which], double, [grads[i].double() for i in which], retain_graph=True)
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    ids, weights = moe.moe_gating(logits, 3, scores=scores)
    assert weights.requires_grad and ids.dtype == torch.int32


def test_permute_and_its_gradient():
    x = needing(5, 7)
    slots = torch.tensor([3, 9, -1, 0, 4])
    out = moe.moe_permute(x, slots, 2)
    grad = torch.randn(5, 7)
    (got,) = torch.autograd.grad(out, x, grad)
    want = torch.zeros(5, 7)
    for row, token in ((0, 1), (1, 4), (3, 0), (4, 2)):
        assert torch.equal(out[row], x[token])
        want[token] += grad[row]
    assert torch.equal(got, want) and not out[2].any()
    # One slot in several rows; float64, which is copied and whose gradient is torch's.
    twice = moe.moe_permute(x, [3, 3], 2)
    assert torch.equal(torch.autograd.grad(twice.sum(), x)[0][1], torch.full((7,), 2.0))
    double = needing(5, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: moe.moe_permute(x, slots, 2), [double])
    with pytest.raises(ValueError, match=r"moe_permute: slot_of_row\[0\] is 10, but there are 10 slots"):
        moe.moe_permute(x, [10], 2)


def test_finalize_and_its_gradients():
    rows, ids = torch.tensor([[2, 0], [-1, 3]]), torch.tensor([[0, 2], [1, -1]])
    inputs = [needing(4, 6), needing(2, 2), needing(2, 6), needing(2, 6), needing(3, 6)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def reference(expanded, weights, skip1, skip2, bias):
        at = lambda table, i: table[i.clamp(min=0)] * (i >= 0)[..., None]  # noqa: E731
        return skip1 + skip2 + (weights[..., None] * (at(expanded, rows) + at(bias, ids))).sum(1)

    out = moe.moe_finalize(inputs[0], rows, inputs[1], skip1=inputs[2], skip2=inputs[3], bias=inputs[4], topk_ids=ids)
    want = reference(*doubles)
    grad = torch.randn(2, 6)
    for a, b in [(out, want), *zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, doubles, grad.double()))]:
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    plain = moe.moe_finalize(inputs[0], rows.tolist())
    assert torch.equal(torch.autograd.grad(plain.sum(), inputs[0])[0], torch.tensor([1.0, 0, 1, 1])[:, None].expand(4, 6))


def layer(x, router, gate_up, down, top_k=2):
    """A mixture's layer out of the functions of the package."""
    ids, weights = moe.moe_gating(F.linear(x, router), top_k, renormalise=True)
    rows, slots, counts = moe.moe_routing(ids, router.shape[0])
    hidden = matmul.grouped_matmul(moe.moe_permute(x, slots, top_k), gate_up, counts=counts, activation="swiglu")
    return moe.moe_finalize(matmul.grouped_matmul(hidden, down, counts=counts), rows, weights)


def loop_over_experts(x, router, gate_up, down, top_k=2):
    values, ids = F.linear(x, router).topk(top_k, -1)
    weights, out = values.softmax(-1), torch.zeros_like(x)
    for e in range(router.shape[0]):
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[e]).chunk(2, -1)
        out = out.index_add(0, tokens, weights[tokens, choice, None] * F.linear(F.silu(gate) * up, down[e]))
    return out


def layer_inputs(dtype=torch.float32):
    return [needing(*shape, dtype=dtype) for shape in ((20, 8), (6, 8), (6, 12, 8), (6, 8, 6))]


def test_a_layer_has_the_gradients_of_a_loop_over_experts():
    inputs = layer_inputs()
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, want = layer(*inputs), loop_over_experts(*doubles)
    grad = torch.randn(out.shape)
    for a, b in [(out, want), *zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, doubles, grad.double()))]:
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_compiled_layer_has_no_graph_break_and_the_same_gradients():
    inputs = layer_inputs()
    grad = torch.randn(20, 8)
    want = layer(*inputs)
    expected = torch.autograd.grad(want, inputs, grad)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(got, want)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(torch.autograd.grad(got, inputs, grad), expected))
    # Another number of tokens, of which torch makes a symbol.
    more = needing(33, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(more, *inputs[1:]), layer(more, *inputs[1:]))


def test_checkpoints_and_contexts():
    inputs = layer_inputs()
    saved = torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)
    grad = torch.randn(20, 8)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(saved, inputs, grad),
                                                 torch.autograd.grad(layer(*inputs), inputs, grad)))
    x, weight = needing(10, 5), needing(4, 8, 5)
    one = matmul.grouped_matmul(x, weight, counts=COUNTS, context=Context(num_threads=1))
    assert torch.equal(torch.autograd.grad(one.sum(), x)[0],
                       torch.autograd.grad(matmul.grouped_matmul(x, weight, counts=COUNTS).sum(), x)[0])


LIST = torch.tensor([2, 1])


@pytest.mark.parametrize("name, arguments", [
    ("grouped_matmul", (torch.ones(4, 4), torch.ones(2, 6, 4), LIST, None, torch.ones(2, 6), torch.ones(4, 3), "swiglu")),
    ("grouped_matmul", (torch.ones(4, 4), torch.ones(2, 6, 4), None, LIST.cumsum(0), None, None, "none")),
    ("moe_gating", (torch.randn(3, 5), 2, "softmax", torch.ones(5), None, True, 1.0, 1e-20, 1, 1, "max", False, True)),
    ("moe_gating", (torch.randn(3, 5), 2, "sigmoid", None, None, False, 1.0, 1e-20, 1, 1, "max", False, False)),
    ("moe_routing", (torch.tensor([[0, 1], [2, 0]]), 3, None, None, 0, None, False)),
    ("moe_compute_expert_tokens", (torch.tensor([0, 1, 1]), 3)),
    ("moe_permute", (torch.ones(2, 4), torch.tensor([3, 0, -1]), 2)),
    ("moe_finalize", (torch.ones(4, 3), torch.tensor([[1, 0]]), torch.ones(1, 2), torch.ones(1, 3), None, torch.ones(2, 3),
                      torch.tensor([[0, 1]]))),
])
def test_operators_keep_torchs_rules(name, arguments):
    constants = {"moe_gating": (3,)}.get(name, ())
    given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and i not in constants else a
             for i, a in enumerate(arguments)]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name != "moe_gating":  # torch adds integers of a first result and floats of the second, which it cannot
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.ops_transformer, name).default, tuple(given), test_utils=checks)


def test_shapes_without_memory_and_numpy_beside_tensors():
    x = torch.ones(4, 6, device="meta")
    assert matmul.grouped_matmul(x, torch.ones(2, 8, 6, device="meta"), counts=torch.tensor([1, 1], device="meta"),
                                 activation="swiglu").shape == (4, 4)
    assert [tuple(t.shape) for t in moe.moe_gating(x, 2)] == [(4, 2), (4, 2)]
    mixed = matmul.grouped_matmul(needing(10, 6), np.ones((4, 8, 6), np.float32), counts=COUNTS, bias=np.ones((4, 8), np.float32))
    assert mixed.requires_grad and mixed.shape == (10, 8)
    view = needing(9, 12)
    assert torch.equal(moe.moe_gating(view.detach(), 3)[1], moe.moe_gating(view, 3)[1].detach())

"""The layer of experts in one call as an operator of torch: gradients against torch's own of a loop over experts in float64."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()
F = torch.nn.functional

from ops_transformer import Context, matmul, moe, quant  # noqa: E402
from test_torch_operators import needing  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, SHARED = 20, 8, 6, 5, 2, 4
SHAPES = {"x": (TOKENS, HIDDEN), "gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER), "logits": (TOKENS, EXPERTS),
          "gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, HIDDEN), "shared_gate_up": (2 * SHARED, HIDDEN),
          "shared_down": (HIDDEN, SHARED), "shared_gate": (HIDDEN,), "residual": (TOKENS, HIDDEN)}
APART = {"gate_up": (EXPERTS, INNER, HIDDEN), "up": (EXPERTS, INNER, HIDDEN), "shared_gate_up": (SHARED, HIDDEN),
         "shared_up": (SHARED, HIDDEN)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def loop(x, gate_up, down, logits=None, topk_ids=None, topk_weights=None, up=None, gate_up_bias=None, down_bias=None, shared_gate_up=None,
         shared_down=None, shared_up=None, shared_gate=None, residual=None, activation="swiglu", begin=0):
    """(out, weights), as people write it in torch."""
    if logits is not None:
        values, topk_ids = logits.topk(TOP_K, -1)
        topk_weights = values.softmax(-1)

    def act(y):
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up if activation == "swiglu" else F.silu(up) * gate

    out = torch.zeros_like(x) if residual is None else residual
    for e in range(gate_up.shape[0]):
        tokens, choice = (topk_ids == e + begin).nonzero(as_tuple=True)
        first = gate_up[e] if up is None else torch.cat((gate_up[e], up[e]))
        y = F.linear(x[tokens], first, None if gate_up_bias is None else gate_up_bias[e])
        y = F.linear(act(y), down[e], None if down_bias is None else down_bias[e])
        out = out.index_add(0, tokens, topk_weights[tokens, choice, None] * y)
    if shared_gate_up is not None:
        first = shared_gate_up if shared_up is None else torch.cat((shared_gate_up, shared_up))
        share = 1.0 if shared_gate is None else (x @ shared_gate).sigmoid()[:, None]
        out = out + share * F.linear(act(F.linear(x, first)), shared_down)
    return out, topk_weights


def ours(logits=None, **given):
    return moe.moe_layer(logits=logits, top_k=TOP_K, renormalise=logits is not None, **given)


def inputs(*names, dtype=torch.float32, shapes=SHAPES):
    return {name: needing(*shapes[name], dtype=dtype) for name in names}


def doubles(given):
    return {name: t.detach().double().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}


def assert_same(got, want, bound=1e-4):
    for name, a in got.items():
        b = want[name]
        assert a.shape == b.shape and (a - b).abs().max() <= bound * max(1, b.abs().max()), name


def gradients(out, given, grad):
    leaves = {name: t for name, t in given.items() if t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))))


PLAIN = ("x", "gate_up", "down", "logits")
BY_NAME = {"plain": PLAIN, "biases": (*PLAIN, "gate_up_bias", "down_bias"), "residual": (*PLAIN, "residual"),
           "shared": (*PLAIN, "shared_gate_up", "shared_down"), "all": tuple(SHAPES)}


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_swapped"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("case", BY_NAME)
def test_the_gradients_of_a_loop_over_experts(case, dtype, bound, activation):
    given = inputs(*BY_NAME[case], dtype=dtype)
    with torch.no_grad():  # distances between logits that 8 bits tell apart
        given["logits"].copy_(torch.stack([torch.randperm(EXPERTS) for _ in range(TOKENS)]) / 2)
    wide = doubles(given)
    out, want = ours(activation=activation, **given), loop(activation=activation, **wide)[0]
    assert out.dtype == dtype
    grad = torch.randn(out.shape).to(dtype)
    assert_same({"out": out, **gradients(out, given, grad)}, {"out": want, **gradients(want, wide, grad)}, bound)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_swapped"])
def test_gate_and_up_projections_apart(activation):
    given = inputs(*PLAIN, "up", "shared_gate_up", "shared_up", "shared_down", shapes={**SHAPES, **APART})
    wide, grad = doubles(given), torch.randn(TOKENS, HIDDEN)
    out, want = ours(activation=activation, **given), loop(activation=activation, **wide)[0]
    assert_same({"out": out, **gradients(out, given, grad)}, {"out": want, **gradients(want, wide, grad)})
    # One of the two alone.
    given["gate_up"].requires_grad_(False), given["shared_up"].requires_grad_(False)
    got = gradients(ours(activation=activation, **given), given, grad)
    assert "gate_up" not in got and "up" in got
    assert_same(got, gradients(want_again := loop(activation=activation, **wide)[0], wide, grad))
    assert want_again.shape == out.shape


def test_ids_and_weights_of_a_router_of_ones_own_and_a_range_of_experts():
    given = inputs("x", "gate_up", "down")
    ids = torch.randint(-1, EXPERTS + 3, (TOKENS, TOP_K))
    given.update(topk_ids=ids, topk_weights=needing(TOKENS, TOP_K))
    wide, grad = doubles(given), torch.randn(TOKENS, HIDDEN)
    out = ours(num_experts=EXPERTS + 3, expert_begin=2, expert_end=EXPERTS + 2, **given)
    want = loop(begin=2, **wide)[0]
    assert_same({"out": out, **gradients(out, given, grad)}, {"out": want, **gradients(want, wide, grad)})
    assert not gradients(ours(**{**given, "topk_ids": ids.clamp(max=0)}), given, grad)["gate_up"][1:].any()


def test_weights_that_gating_chose_have_gradients_too():
    given = inputs(*PLAIN)
    wide, grad, of_weights = doubles(given), torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, TOP_K)
    got = ours(return_routes=True, **given)
    out, weights = loop(**wide)
    assert not got.topk_ids.requires_grad and not got.expert_tokens.requires_grad and got.expert_tokens.sum() == TOKENS * TOP_K
    for which in ([0], [1], [0, 1]):
        (a,) = torch.autograd.grad([(got.out, got.topk_weights)[i] for i in which], given["logits"], [(grad, of_weights)[i] for i in which],
                                   retain_graph=True)
        (b,) = torch.autograd.grad([(out, weights)[i] for i in which], wide["logits"], [(grad, of_weights)[i].double() for i in which],
                                   retain_graph=True)
        assert_same({"logits": a}, {"logits": b})


def test_packed_weights_have_none_and_what_is_beside_them_has():
    given = inputs(*SHAPES)
    grad = torch.randn(TOKENS, HIDDEN)
    out = ours(**given)
    want = gradients(out, given, grad)
    for names in (("gate_up", "down"), ("down",), ("gate_up", "down", "shared_gate_up", "shared_down")):
        packed = {name: (matmul.pack if name.startswith("shared") else matmul.pack_stack)(given[name].detach()) for name in names}
        beside = {name: t for name, t in given.items() if name not in names}
        got = ours(**beside, **packed, context=Context(2))
        assert torch.equal(got, out)
        assert_same(gradients(got, beside, grad), want, 1e-5)
        with torch.no_grad():
            assert torch.equal(ours(**beside, **packed), out)


def test_what_has_no_gradients_says_so():
    given = inputs(*PLAIN)
    q, scales, _ = quant.quantize(given["down"].detach().reshape(-1, INNER))
    integers = {**given, "down": matmul.pack_int_stack(q.reshape(EXPERTS, HIDDEN, INNER), scales.reshape(EXPERTS, HIDDEN, 1))}
    silu = {**given, "gate_up": needing(EXPERTS, INNER, HIDDEN), "activation": "silu"}
    for call, words in (
            (lambda: ours(**integers), "moe_layer: an input requires gradients, but beside an integer weight there are none"),
            (lambda: ours(**silu), 'moe_layer: an input requires gradients, but activation is "silu", of which there are none'),
            (lambda: ours(gate_bias=needing(EXPERTS), **given), "moe_layer: gate_bias requires gradients"),
            (lambda: ours(out=torch.empty(TOKENS, HIDDEN), **given), "moe_layer: out is given"),
            (lambda: moe.moe_layer_backward(given["x"], **given, top_k=2), "moe_layer_backward: grad_out requires gradients")):
        with pytest.raises(RuntimeError, match=words):
            call()
    with torch.no_grad():
        assert ours(**integers).shape == ours(**silu).shape == (TOKENS, HIDDEN)
        out = torch.empty(TOKENS, HIDDEN)
        assert ours(out=out, **given) is out and torch.equal(out, ours(**given))
    stack = matmul.pack_stack(given["down"].detach())
    with pytest.raises(RuntimeError, match="moe_layer: a packed weight cannot be traced by torch.compile"):
        torch.compile(lambda x: ours(**{**given, "x": x, "down": stack}), backend="eager", fullgraph=True)(given["x"])
    with pytest.raises(ValueError, match="moe_layer: top_k is None"):
        moe.moe_layer(**given)
    with pytest.raises(RuntimeError, match="moe_layer: inside torch.func.grad, for which moe_layer has no rule"):
        torch.func.grad(lambda x: ours(**{**given, "x": x}).sum())(given["x"].detach())
    with pytest.raises(NotImplementedError, match="moe_layer_backward has no derivative"):
        (first,) = torch.autograd.grad(ours(**given).square().sum(), given["x"], create_graph=True)
        first.sum().backward()


def compiled_layer(x, gate_up, down, logits, residual):
    got = moe.moe_layer(x, gate_up, down, logits, TOP_K, renormalise=True, residual=residual, return_routes=True)
    return got.out, got.topk_weights, got.expert_tokens


def test_a_compiled_layer_has_no_graph_break_and_the_same_gradients():
    given = inputs(*PLAIN, "residual")
    grad = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, TOP_K)
    want = compiled_layer(**given)
    got = torch.compile(compiled_layer, fullgraph=True, backend="aot_eager")(**given)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    both = [torch.autograd.grad(results[:2], list(given.values()), grad) for results in (got, want)]
    assert all(torch.equal(a, b) for a, b in zip(*both))
    more = {**given, "x": needing(33, HIDDEN), "logits": needing(33, EXPERTS), "residual": needing(33, HIDDEN)}
    dynamic = torch.compile(compiled_layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(dynamic(**more)[0], compiled_layer(**more)[0])


def test_checkpoints_contexts_and_the_same_bits_for_1_2_3_threads():
    given = inputs(*SHAPES)
    grad = torch.randn(TOKENS, HIDDEN)
    out = ours(**given)
    want = gradients(out, given, grad)
    for threads in (1, 2, 3):
        got = ours(context=Context(threads), **given)
        assert torch.equal(got, out) and all(torch.equal(a, want[name]) for name, a in gradients(got, given, grad).items())
    saved = torch.utils.checkpoint.checkpoint(lambda x: ours(**{**given, "x": x}), given["x"], use_reentrant=False)
    assert torch.equal(torch.autograd.grad(saved, given["x"], grad)[0], want["x"])


def test_under_autocast_a_layer_is_bfloat16():
    given = inputs(*SHAPES)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(**given)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and all(t.grad.dtype == torch.float32 for t in given.values())


def test_subclasses_modes_transforms_and_numpy():
    class Seen(torch.Tensor):
        calls = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    given = {name: t.detach() for name, t in inputs(*PLAIN).items()}
    want = ours(**given)
    got = ours(**{**given, "x": given["x"].as_subclass(Seen)})
    assert moe.moe_layer in Seen.calls and type(got) is Seen and torch.equal(got.as_subclass(torch.Tensor), want)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        assert torch.equal(ours(**given), want)
    assert "ops_transformer.moe_layer.default" in Mode.names
    several = torch.randn(3, TOKENS, HIDDEN)
    mapped = torch.func.vmap(lambda x: ours(**{**given, "x": x}))(several)
    assert all(torch.equal(mapped[i], ours(**{**given, "x": several[i]})) for i in range(3))
    mixed = ours(**{**given, "x": given["x"].clone().requires_grad_(), "gate_up": given["gate_up"].numpy(),
                    "down_bias": np.zeros((EXPERTS, HIDDEN), np.float32)})
    assert mixed.requires_grad and torch.equal(mixed.detach(), want)
    meta = {name: t.to("meta") for name, t in given.items()}
    assert ours(**meta).shape == want.shape


def test_a_program_that_imports_moe_alone():
    program = """import torch
from ops_transformer import moe

x = torch.ones(2, 4, requires_grad=True)
moe.moe_layer(x, torch.ones(1, 6, 4), torch.ones(1, 4, 3), torch.ones(2, 1), 1).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def arguments(**given):
    """The operator's, in its order."""
    from ops_transformer._torch_moe_layer import FORMS

    form = FORMS["moe_layer"]
    return tuple(given.get(name, form.defaults.get(name)) for name in form.order)


@pytest.mark.parametrize("names, more", [
    (PLAIN, {"renormalise": True}), (tuple(SHAPES), {"return_routes": True, "scores": "sigmoid"}),
    (("x", "gate_up", "down"), {"topk_ids": torch.tensor([[0, 1]] * TOKENS), "topk_weights": torch.ones(TOKENS, 2, requires_grad=True)})])
def test_the_operator_keeps_torchs_rules(names, more):
    given = {**inputs(*names), "top_k": TOP_K, **more}
    torch.library.opcheck(torch.ops.ops_transformer.moe_layer.default, arguments(**given))

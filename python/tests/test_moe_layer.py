"""The layer of experts in one call against a loop over tokens and slots in float64: every kind of weight, every option."""

import math

import numpy as np
import pytest
from conftest import assert_near

from ops_transformer import Context, Tagged, matmul, moe, quant

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 9, 32, 32, 5, 2
_erf = np.vectorize(math.erf)


def silu(y):
    return y / (1 + np.exp(-y))


def halves(y):
    return np.split(y, 2)


ACTIVATIONS = {
    "none": lambda y: y, "silu": silu, "gelu_erf": lambda y: 0.5 * y * (1 + _erf(y / np.sqrt(2))),
    "gelu_tanh": lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
    "swiglu": lambda y: silu(halves(y)[0]) * halves(y)[1], "swiglu_swapped": lambda y: silu(halves(y)[1]) * halves(y)[0]}


def double(array):
    return None if array is None else np.asarray(array).astype(np.float64)


def model(x, gate_up, down, ids, weights, *, gate_up_bias=None, down_bias=None, activation="swiglu", shared=None, shared_gate=None,
          residual=None, begin=0):
    """out in float64, slot by slot. shared: (gate_up, down)."""
    x, gate_up, down, weights = double(x), double(gate_up), double(down), double(weights)

    def through(first, second, row, bias=0.0, last=0.0):
        return second @ ACTIVATIONS[activation](first @ row + bias) + last

    out = np.zeros_like(x) if residual is None else double(residual)
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            e = int(ids[t, k]) - begin
            if 0 <= e < len(gate_up):
                out[t] += weights[t, k] * through(gate_up[e], down[e], x[t], 0.0 if gate_up_bias is None else double(gate_up_bias[e]),
                                                  0.0 if down_bias is None else double(down_bias[e]))
        if shared is not None:
            share = 1.0 if shared_gate is None else 1 / (1 + np.exp(-(x[t] @ double(shared_gate))))
            out[t] += share * through(double(shared[0]), double(shared[1]), x[t])
    return out


def chosen(logits, top_k=TOP_K):
    """(ids, softmax of the chosen logits)"""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    e = np.exp(np.take_along_axis(double(logits), ids, 1))
    return ids, e / e.sum(axis=1, keepdims=True)


@pytest.fixture
def parts(rng):
    def random(*shape):
        return rng.standard_normal(shape, np.float32)

    return {"x": random(TOKENS, HIDDEN), "logits": random(TOKENS, EXPERTS), "gate_up": random(EXPERTS, 2 * INNER, HIDDEN) / 6,
            "down": random(EXPERTS, HIDDEN, INNER) / 6, "shared_gate_up": random(48, HIDDEN) / 6, "shared_down": random(HIDDEN, 24) / 6,
            "shared_gate": random(HIDDEN), "residual": random(TOKENS, HIDDEN), "gate_up_bias": random(EXPERTS, 2 * INNER),
            "down_bias": random(EXPERTS, HIDDEN)}


def of(parts, *names):
    return {name: parts[name] for name in names}


PLAIN = ("x", "gate_up", "down")


def test_logits_choose(parts):
    ids, weights = chosen(parts["logits"])
    want = model(*of(parts, *PLAIN).values(), ids, weights)
    got = moe.moe_layer(**of(parts, *PLAIN, "logits"), top_k=TOP_K, renormalise=True)
    assert got.dtype == np.float32
    assert_near(got, want, factor=4)
    routes = moe.moe_layer(**of(parts, *PLAIN, "logits"), top_k=TOP_K, renormalise=True, return_routes=True)
    assert (routes.out == got).all() and (routes.topk_ids == ids).all() and routes.topk_ids.dtype == np.int32
    assert_near(routes.topk_weights, weights, factor=4)
    assert routes.expert_tokens.tolist() == np.bincount(ids.ravel(), minlength=EXPERTS).tolist()
    out = np.full_like(got, np.nan)
    assert moe.moe_layer(**of(parts, *PLAIN, "logits"), top_k=TOP_K, renormalise=True, out=out) is out and (out == got).all()


def test_every_option_of_gating_is_the_one_of_moe_gating(parts, rng):
    logits = rng.standard_normal((TOKENS, 8), np.float32)
    gate_up, down = (rng.standard_normal((8, *parts[name].shape[1:]), np.float32) / 6 for name in ("gate_up", "down"))
    done = np.arange(TOKENS) % 4 == 1
    for options in ({"scores": "sigmoid"}, {"renormalise": True}, {"routed_scaling_factor": 2.5},
                    {"scores": "sigmoid", "renormalise": True, "eps": 0.5}, {"num_groups": 4, "kept_groups": 2},
                    {"num_groups": 4, "kept_groups": 2, "group_score": "top2_sum", "scores": "sigmoid"},
                    {"bias": rng.standard_normal(8, np.float32)}, {"finished": done}):
        ids, weights = moe.moe_gating(logits, 3, **options)
        own = {"gate_bias" if name == "bias" else name: value for name, value in options.items()}
        got = moe.moe_layer(parts["x"], gate_up, down, logits, 3, return_routes=True, **own)
        assert (got.topk_ids == ids).all() and (got.topk_weights == weights).all(), options
        assert_near(got.out, model(parts["x"], gate_up, down, ids, weights), factor=4)
    logits[2, 3] = np.nan
    with pytest.raises(ValueError, match=r"moe_layer_forward: logits\[2, 3\] is NaN, which nan_is_error refuses"):
        moe.moe_layer(parts["x"], gate_up, down, logits, 3, nan_is_error=True)


def test_ids_and_weights_of_a_router_of_ones_own(parts):
    ids = np.array([[4, 0], [-1, 2], [2, 2], [0, 1], [1, -1], [3, 4], [0, 0], [4, 3], [-1, -1]])
    weights = np.linspace(-1, 1, 18, dtype=np.float32).reshape(TOKENS, 2)
    want = model(*of(parts, *PLAIN).values(), ids, weights)
    for given in (ids, ids.astype(np.int32), ids.tolist()):
        got = moe.moe_layer(**of(parts, *PLAIN), topk_ids=given, topk_weights=weights, return_routes=True)
        assert_near(got.out, want, factor=4)
        assert got.topk_ids is None and got.topk_weights is None and got.expert_tokens.tolist() == [4, 2, 3, 2, 3]
    # A machine that has experts 1 and 2.
    part = moe.moe_layer(parts["x"], parts["gate_up"][1:3], parts["down"][1:3], topk_ids=ids, topk_weights=weights, num_experts=EXPERTS,
                         expert_begin=1, expert_end=3, return_routes=True)
    assert_near(part.out, model(parts["x"], parts["gate_up"][1:3], parts["down"][1:3], ids, weights, begin=1), factor=4)
    assert part.expert_tokens.tolist() == [2, 3]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_biases_shared_experts_and_a_residual(parts, activation):
    ids, weights = chosen(parts["logits"])
    wide = activation.startswith("swiglu")
    gate_up, bias = (parts[name] if wide else parts[name][:, :INNER] for name in ("gate_up", "gate_up_bias"))
    shared = (parts["shared_gate_up"] if wide else parts["shared_gate_up"][:24], parts["shared_down"])
    got = moe.moe_layer(parts["x"], gate_up, parts["down"], parts["logits"], TOP_K, renormalise=True, activation=activation,
                        gate_up_bias=bias, shared_gate_up=shared[0], shared_down=shared[1],
                        **of(parts, "down_bias", "shared_gate", "residual"))
    want = model(parts["x"], gate_up, parts["down"], ids, weights, activation=activation, gate_up_bias=bias, shared=shared,
                 **of(parts, "down_bias", "shared_gate", "residual"))
    assert_near(got, want, factor=4)
    if wide:  # gate and up projections apart
        apart = moe.moe_layer(parts["x"], gate_up[:, :INNER], parts["down"], parts["logits"], TOP_K, up=gate_up[:, INNER:],
                              renormalise=True, activation=activation, shared_gate_up=shared[0][:24], shared_up=shared[0][24:],
                              shared_down=shared[1])
        assert_near(apart, model(parts["x"], gate_up, parts["down"], ids, weights, activation=activation, shared=shared), factor=4)


def test_16_bits(parts):
    ids, weights = chosen(parts["logits"])
    for dtype, digits in (("f16", 11), ("bf16", 8)):
        def cut(array):
            if dtype == "f16":
                return array.astype(np.float16), array.astype(np.float16)
            bits = (array.view(np.uint32) >> 16).astype(np.uint16)
            return Tagged(bits, "bf16"), (bits.astype(np.uint32) << 16).view(np.float32)

        given, values = zip(*(cut(parts[name]) for name in PLAIN))
        want = model(*values, ids, weights)
        got = moe.moe_layer(*given, topk_ids=ids, topk_weights=weights.astype(np.float32))
        numbers = got if dtype == "f16" else (np.asarray(got.array).astype(np.uint32) << 16).view(np.float32)
        # Hidden rows and experts' rows are rounded to the dtype, and out.
        assert np.abs(numbers - want).max() <= 4 * 2.0**-digits * np.abs(want).max()
        packed = moe.moe_layer(given[0], *map(matmul.pack_stack, given[1:]), topk_ids=ids, topk_weights=weights.astype(np.float32))
        memory = [array.array if dtype == "bf16" else array for array in (got, packed)]
        assert (memory[0] == memory[1]).all()


@pytest.mark.parametrize("name, size", [("q8_0", 34), ("q4_0", 18), ("q4_1", 20), ("q5_0", 22), ("q5_1", 24)])
def test_blocks_of_files(parts, rng, name, size):
    ids, weights = chosen(parts["logits"])
    blocks = rng.integers(0, 40, (EXPERTS * 3 * INNER * HIDDEN // 32, size), dtype=np.uint8)
    first, second = blocks[: EXPERTS * 2 * INNER], blocks[EXPERTS * 2 * INNER :]
    gate_up = matmul.pack_blocks_stack(first, name, EXPERTS, 2 * INNER, HIDDEN)
    down = matmul.pack_blocks_stack(second, name, EXPERTS, HIDDEN, INNER)
    values = [quant.dequantize_blocks(part, name, part.shape[0], 32).reshape(EXPERTS, -1, 32) for part in (first, second)]
    for options in ({}, {"batch_invariant": True}):
        got = moe.moe_layer(parts["x"], gate_up, down, parts["logits"], TOP_K, renormalise=True, **options)
        assert_near(got, model(parts["x"], *values, ids, weights), factor=8)
    rounded = moe.moe_layer(parts["x"], gate_up, down, parts["logits"], TOP_K, renormalise=True, int8_activations=True)
    want = model(parts["x"], *values, ids, weights)
    assert 0 < np.abs(rounded - got).max() and np.abs(rounded - want).max() <= 0.05 * np.abs(want).max()
    # Projections apart, of this format and of floats.
    apart = values[0][:, INNER:]
    rows = first.reshape(EXPERTS, 2 * INNER, size)[:, :INNER].reshape(-1, size)
    of_gate = matmul.pack_blocks_stack(rows, name, EXPERTS, INNER, HIDDEN)
    got = moe.moe_layer(parts["x"], of_gate, down, parts["logits"], TOP_K, renormalise=True, up=apart)
    assert_near(got, want, factor=8)


@pytest.mark.parametrize("bits, groups, zero_points", [(8, 1, False), (8, 4, True), (4, 1, False), (4, 2, True)])
def test_integers(parts, bits, groups, zero_points):
    ids, weights = chosen(parts["logits"])
    stacks, values = [], []
    for name in ("gate_up", "down"):
        weight = parts[name]
        q = quant.quantize(weight.reshape(-1, weight.shape[2]), bits=bits, groups=groups, zero_points=zero_points)
        stacks.append(matmul.pack_int_stack(*(None if part is None else part.reshape(EXPERTS, weight.shape[1], -1) for part in q)))
        values.append(quant.dequantize(*q).reshape(weight.shape))
    want = model(parts["x"], *values, ids, weights)
    options = {"logits": parts["logits"], "top_k": TOP_K, "renormalise": True}
    assert_near(moe.moe_layer(parts["x"], *stacks, **options), want, factor=8)
    rounded = moe.moe_layer(parts["x"], *stacks, int8_activations=True, **options)
    assert np.abs(rounded - want).max() <= 0.05 * np.abs(want).max()
    # The steps that it stands for, to the bit.
    rows, slots, counts = moe.moe_routing(ids, EXPERTS)
    chosen_weights = moe.moe_gating(parts["logits"], TOP_K, renormalise=True)[1]
    x8, scales = quant.dynamic_quant(parts["x"])
    hidden, hidden_scales = matmul.grouped_matmul_swiglu_quant(x8[slots // TOP_K], scales[slots // TOP_K], stacks[0], counts)
    steps = moe.moe_finalize(matmul.grouped_matmul(hidden, stacks[1], counts, x_scales=hidden_scales), rows, chosen_weights)
    assert (rounded == steps).all()


def test_a_packed_shared_expert(parts):
    whole = of(parts, *PLAIN, "logits", "shared_gate_up", "shared_down", "shared_gate")
    got = moe.moe_layer(**whole, top_k=TOP_K)
    packed = {name: matmul.pack(parts[name]) for name in ("shared_gate_up", "shared_down")}
    assert (moe.moe_layer(**{**whole, **packed}, top_k=TOP_K) == got).all()


def test_the_same_bits_for_1_2_3_threads(parts, rng):
    x = rng.standard_normal((70, HIDDEN), np.float32)
    logits = rng.standard_normal((70, EXPERTS), np.float32)
    rest = of(parts, "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate", "gate_up_bias", "down_bias")
    outs = [moe.moe_layer(x, logits=logits, top_k=3, context=Context(n), **rest) for n in (1, 2, 3)]
    assert all((out == outs[0]).all() for out in outs)
    gradients = [moe.moe_layer_backward(outs[0], x, logits=logits, top_k=3, context=Context(n), **rest) for n in (1, 2, 3)]
    for name in moe.LayerGradients._fields:
        first = getattr(gradients[0], name)
        assert all(first is None or (getattr(g, name) == first).all() for g in gradients), name
    assert gradients[0].topk_weights is None and gradients[0].shared_gate.shape == (HIDDEN,)


def test_gradients_by_differences(parts):
    """Of the float64 model, one direction for each argument."""
    ids, weights = chosen(parts["logits"])
    names = ("x", "gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down", "shared_gate")
    given, rng = of(parts, *names), np.random.default_rng(1)
    grad = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    got = moe.moe_layer_backward(grad, topk_ids=ids, topk_weights=weights.astype(np.float32), **given)
    assert got.logits is None

    def loss(topk_weights=weights, **changed):
        a = {**given, **changed}
        out = model(a["x"], a["gate_up"], a["down"], ids, topk_weights, gate_up_bias=a["gate_up_bias"], down_bias=a["down_bias"],
                    shared=(a["shared_gate_up"], a["shared_down"]), shared_gate=a["shared_gate"])
        return (out * grad).sum()

    for name in (*names, "topk_weights"):
        at = double(weights if name == "topk_weights" else given[name])
        direction, step = rng.standard_normal(at.shape), 1e-5
        slope = (loss(**{name: at + step * direction}) - loss(**{name: at - step * direction})) / (2 * step)
        gradient = getattr(got, name)
        assert gradient.shape == at.shape
        assert abs((gradient * direction).sum() - slope) <= 1e-4 * np.sqrt((double(gradient) ** 2).sum() * at.size), name


def test_nothing_to_do(parts):
    none = moe.moe_layer(np.empty((0, HIDDEN), np.float32), parts["gate_up"], parts["down"], np.empty((0, EXPERTS), np.float32), 2,
                         return_routes=True)
    assert none.out.shape == (0, HIDDEN) and none.topk_ids.shape == (0, 2) and not none.expert_tokens.any()
    assert not moe.moe_layer(**of(parts, *PLAIN), topk_ids=np.full((TOKENS, 2), -1), topk_weights=np.ones((TOKENS, 2), np.float32)).any()
    same = parts["residual"].copy()  # in place of the residual
    moe.moe_layer(**of(parts, *PLAIN, "logits"), top_k=2, residual=same, out=same)
    assert (same == moe.moe_layer(**of(parts, *PLAIN, "logits", "residual"), top_k=2)).all()


ONES = {"topk_ids": np.zeros((TOKENS, 2), np.int64), "topk_weights": np.ones((TOKENS, 2), np.float32)}
REFUSED = [
    ({}, "moe_layer: logits are not given, and topk_ids and topk_weights are not both"),
    ({"topk_ids": ONES["topk_ids"]}, "moe_layer: logits are not given, and topk_ids and topk_weights are not both"),
    ({"logits": 0}, "moe_layer: top_k is None, but with logits it must say how many experts a token has"),
    ({"logits": 0, "top_k": -1}, "moe_layer: top_k is -1, must not be negative"),
    ({**ONES, "num_experts": -1}, "moe_layer: num_experts is -1, must not be negative"),
    ({**ONES, "expert_end": -1}, "moe_layer: expert_end is -1, must not be negative"),
    ({**ONES, "expert_begin": -1}, "moe_layer_forward: expert_begin is -1"),
    ({"logits": 0, "top_k": 6}, "moe_layer_forward: .*top_k.* is 6, but the choice is among 5 experts"),
    ({"logits": 0, "top_k": 2, **ONES}, "moe_layer_forward: logits are given, but so are topk_ids or topk_weights"),
    ({**ONES, "top_k": 3}, r"moe_layer_forward: top_k is 3, but topk_ids dim 1 \(top_k\) is 2"),
    ({**ONES, "gate_bias": np.ones(5, "f4")}, "moe_layer_forward: gate_bias and finished belong to logits"),
    ({**ONES, "topk_ids": np.full((TOKENS, 2), 7)}, r"moe_layer_forward: topk_ids\[0, 0\] is 7, but there are 5 experts"),
    ({**ONES, "topk_ids": np.zeros(3, np.int64)}, r"moe_layer: topk_ids must be \[tokens, top_k\], but its shape is \[3\]"),
    ({**ONES, "topk_ids": [[0.5, 1]]}, "moe_layer: topk_ids must be integers"),
    ({**ONES, "num_experts": 4}, r"moe_layer_forward: the range of experts is \[0, 4\), but gate_up holds 5 of them"),
    ({**ONES, "activation": "relu"}, 'moe_layer: activation is "relu", must be one of none, silu'),
    ({"logits": 0, "top_k": 1, "scores": "relu"}, 'moe_layer: scores is "relu", must be one of softmax, sigmoid'),
    ({**ONES, "gate_up": np.ones((6, 64), "f4")}, r"moe_layer: gate_up must be \[E, n, k\] \(or a packed stack\), but its shape is \[6, 64\]"),
    ({**ONES, "gate_up": np.ones((5, 63, 32), "f4")}, "moe_layer_forward: gate_up has 63 outputs, but swiglu needs two halves"),
    ({**ONES, "down": np.ones((5, 32, 31), "f4")}, "moe_layer_forward: .*down.* is 31, .*32"),
    ({**ONES, "shared_gate_up": np.ones((1, 6, 32), "f4"), "shared_down": np.ones((32, 3), "f4")}, r"moe_layer: shared_gate_up must be \[n, k\] \(or packed\), but its shape is"),
    ({**ONES, "shared_gate": np.ones(32, "f4")}, "moe_layer: shared_gate is given, but shared_gate_up and shared_down are not"),
    ({**ONES, "shared_up": np.ones((3, 32), "f4")}, "moe_layer: shared_up is given, but shared_gate_up and shared_down are not"),
    ({**ONES, "shared_gate_up": np.ones((6, 32), "f4"), "shared_down": np.ones((32, 4), "f4")}, "moe_layer_forward: shared_down dim 2 .* is 4, but shared_gate_up set"),
    ({**ONES, "x": np.ones((TOKENS, 32))}, "moe_layer_forward: x .*f64"),
    ({**ONES, "out": np.ones((TOKENS, 31), "f4")}, "moe_layer_forward: out dim 1 .* is 31"),
]


@pytest.mark.parametrize("arguments, message", REFUSED)
def test_refused(parts, arguments, message):
    if "logits" in arguments:
        arguments = {**arguments, "logits": parts["logits"]}
    with pytest.raises(ValueError if "0.5" not in str(arguments.get("topk_ids")) else TypeError, match=message):
        moe.moe_layer(**{**of(parts, *PLAIN), **arguments})


@pytest.mark.parametrize("name, other", [("shared_gate_up", "shared_down"), ("shared_down", "shared_gate_up")])
def test_half_of_a_shared_expert(parts, name, other):
    half = of(parts, *PLAIN, "logits", name)
    for function, call in (("moe_layer", lambda: moe.moe_layer(**half, top_k=2)),
                           ("moe_layer_backward", lambda: moe.moe_layer_backward(parts["x"], **half, top_k=2))):
        with pytest.raises(ValueError, match=f"^{function}: {name} is given, but {other} is not"):
            call()


def test_numbers_that_float32_does_not_hold(parts):
    for name in ("routed_scaling_factor", "eps"):
        with pytest.raises(ValueError, match=rf"^moe_layer: {name} is 1e\+300, but must be a number of float32"):
            moe.moe_layer(**of(parts, *PLAIN, "logits"), top_k=2, **{name: 1e300})


def test_gradients_that_the_core_refuses(parts):
    stack = matmul.pack_stack(parts["gate_up"])
    with pytest.raises(TypeError, match="moe_layer_backward: gate_up cannot be taken: an array is needed"):
        moe.moe_layer_backward(parts["x"], parts["x"], stack, parts["down"], parts["logits"], 2)
    with pytest.raises(ValueError, match="moe_layer_backward: grad_out dim 0 .* is 2"):
        moe.moe_layer_backward(parts["x"][:2], **of(parts, *PLAIN, "logits"), top_k=2)

"""Products of groups of rows against a loop over the groups: every kind of weight, every option, and what is refused."""

import numpy as np
import pytest
from conftest import assert_near

from ops_transformer import Context, Tagged, matmul, quant

COUNTS = [3, 0, 5, 1]


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def each_group(counts):
    ends = np.cumsum(counts)
    return [(e, slice(end - count, end)) for e, (count, end) in enumerate(zip(counts, ends))]


def by_loop(product, x, counts, width):
    """Each group's own product, zeros behind the last one."""
    out = np.zeros((x.shape[0], width))
    for e, rows in each_group(counts):
        if rows.stop > rows.start:
            out[rows] = product(e, x[rows])
    return out


def test_arrays_and_stacks_of_floats(rng):
    x, weight, bias = random(rng, 12, 20), random(rng, 4, 10, 20), random(rng, 4, 10)
    want = by_loop(lambda e, rows: matmul.matmul(rows, weight[e], bias=bias[e]), x, COUNTS, 10)
    for w in (weight, matmul.pack_stack(weight), np.ascontiguousarray(weight.transpose(0, 2, 1)).transpose(0, 2, 1)):
        for lists in ({"counts": COUNTS}, {"ends": np.cumsum(COUNTS).astype(np.int32)}):
            assert (matmul.grouped_matmul(x, w, bias=bias, **lists) == want).all()  # the bits of single products
    assert (want[9:] == 0).all()
    assert matmul.pack_stack(weight).count == 4 and matmul.pack(weight[0]).count == 1
    out = np.full((12, 10), np.nan, np.float32)
    assert matmul.grouped_matmul(x, weight, counts=COUNTS, bias=bias, out=out, context=Context(3)) is out and (out == want).all()
    half = matmul.grouped_matmul(x, weight, counts=COUNTS, bias=bias, dtype="f16")
    assert half.dtype == np.float16 and (half == want.astype(np.float16)).all()
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    got = matmul.grouped_matmul(Tagged(bits, "bf16"), weight, counts=COUNTS, dtype="f32")
    rows = (bits.astype(np.uint32) << 16).view(np.float32)
    assert_near(got, by_loop(lambda e, part: part.astype(np.float64) @ weight[e].T, rows, COUNTS, 10), factor=4)


@pytest.mark.parametrize("activation", ["silu", "gelu_erf", "gelu_tanh", "swiglu", "swiglu_swapped"])
def test_epilogues(rng, activation):
    width = 5 if activation.startswith("swiglu") else 10
    x, weight, bias, residual = random(rng, 10, 20), random(rng, 4, 10, 20), random(rng, 4, 10), random(rng, 10, width)
    got = matmul.grouped_matmul(x, weight, counts=COUNTS, bias=bias, activation=activation, residual=residual)
    for e, rows in each_group(COUNTS):
        assert (got[rows] == matmul.matmul(x[rows], weight[e], bias=bias[e], activation=activation, residual=residual[rows])).all()
    assert (got[9:] == 0).all()


@pytest.mark.parametrize("name, size, values", [("q8_0", 34, 32), ("q4_k", 144, 256)])
def test_stacks_of_blocks(rng, name, size, values):
    blocks = rng.integers(0, 60, (4, 10, size), dtype=np.uint8)
    x = random(rng, 9, values)
    stack = matmul.pack_blocks_stack(blocks, name, 4, 10, values)
    assert (stack.count, stack.n, stack.k, stack.format) == (4, 10, values, name)
    single = [matmul.pack_blocks(blocks[e], name, 10, values) for e in range(4)]
    for options in ({}, {"int8_activations": True}, {"batch_invariant": True}, {"activation": "swiglu"}):
        got = matmul.grouped_matmul(x, stack, counts=COUNTS, **options)
        assert (got == by_loop(lambda e, rows: matmul.matmul(rows, single[e], **options), x, COUNTS, got.shape[1])).all()
    rows = matmul.lookup_rows(stack, range(40))
    assert (rows == np.concatenate([matmul.lookup_rows(weight, range(10)) for weight in single])).all()
    with pytest.raises(ValueError, match="pack_blocks_stack: the blocks have .* bytes, which are not those of 7 matrices"):
        matmul.pack_blocks_stack(blocks, name, 7, 10, values)


@pytest.mark.parametrize("bits, groups, zero_points", [(8, 1, False), (8, 4, True), (4, 1, False), (4, 2, True)])
def test_stacks_of_integers(rng, bits, groups, zero_points):
    q, scales, zeros = quant.quantize(random(rng, 40, 32), bits=bits, groups=groups, zero_points=zero_points)
    stacked = [None if part is None else part.reshape(4, 10, -1) for part in (q, scales, zeros)]
    stack = matmul.pack_int_stack(*stacked)
    assert (stack.count, stack.n, stack.k, stack.groups, stack.bits) == (4, 10, 32, groups, bits)
    single = [matmul.pack_int(*(None if part is None else part[e] for part in stacked)) for e in range(4)]
    x = random(rng, 9, 32)
    assert (matmul.grouped_matmul(x, stack, counts=COUNTS) == by_loop(
        lambda e, rows: matmul.matmul_int(rows, single[e]), x, COUNTS, 10)).all()
    xq, x_scales = quant.dynamic_quant(x)
    got, got_scales = matmul.grouped_matmul(xq, stack, counts=COUNTS, x_scales=x_scales, activation="swiglu", out_scales=True)
    fused = matmul.grouped_matmul_swiglu_quant(xq, x_scales, stack, counts=COUNTS)
    assert (fused[0] == got).all() and (fused[1] == got_scales).all()
    smooth = np.abs(random(rng, 4, 5)) + 0.5
    smoothed = matmul.grouped_matmul_swiglu_quant(xq, x_scales, stack, ends=np.cumsum(COUNTS), smooth_scales=smooth)
    same = matmul.grouped_matmul(xq, stack, counts=COUNTS, x_scales=x_scales, activation="swiglu", out_scales=True,
                                 smooth_scales=smooth)
    assert (smoothed[0] == same[0]).all() and (smoothed[1] == same[1]).all()
    for e, rows in each_group(COUNTS):
        if rows.stop > rows.start:
            want = matmul.matmul_int(xq[rows], single[e], x_scales=x_scales[rows], activation="swiglu", out_scales=True)
            assert (got[rows] == want[0]).all() and (got_scales[rows] == want[1]).all()
            floats = matmul.matmul_int(xq[rows], single[e], x_scales=x_scales[rows], activation="swiglu") * smooth[e]
            assert (np.abs(smoothed[0][rows] * smoothed[1][rows, None] - floats) <= 0.51 * smoothed[1][rows, None] + 1e-7).all()


def test_an_int32_bias_joins_the_sums(rng):
    q, xq = rng.integers(-9, 9, (2, 6, 16), dtype=np.int8), rng.integers(-9, 9, (4, 16), dtype=np.int8)
    stack = matmul.pack_int_stack(q, np.full((2, 6, 1), 0.5, np.float32))
    bias, scales = rng.integers(-99, 99, (2, 6), dtype=np.int32), np.full(4, 0.25, np.float32)
    c = np.concatenate([(xq[2 * e : 2 * e + 2].astype(np.int64) @ q[e].T + bias[e]) * 0.125 for e in range(2)])
    want = c[:, :3] / (1 + np.exp(-c[:, :3])) * c[:, 3:]
    out, out_scales = matmul.grouped_matmul_swiglu_quant(xq, scales, stack, counts=[2, 2], bias=bias)
    assert (np.abs(out * out_scales[:, None] - want) <= 0.51 * out_scales[:, None] + 1e-6).all()


def test_gradients_are_those_of_a_loop(rng):
    """The case of public reports: experts without tokens have gradients of zeros."""
    counts = [3, 0, 5, 1, 0, 2]
    x, weight, g = random(rng, 13, 8), random(rng, 6, 4, 8), random(rng, 13, 4)
    for lists in ({"counts": counts}, {"ends": np.cumsum(counts)}):
        got = matmul.grouped_matmul_backward(g, x, weight, **lists)
        for e, rows in each_group(counts):
            want = matmul.matmul_backward(g[rows], x[rows], weight[e])
            assert (got.x[rows] == want[0]).all() and (got.weight[e] == want[1]).all() and (got.bias[e] == want[2]).all()
        assert (got.x[11:] == 0).all() and not got.weight[[1, 4]].any() and not got.bias[[1, 4]].any()
    nothing = matmul.grouped_matmul_backward(g, x, weight, counts=[0] * 6)
    assert not any(part.any() for part in nothing)


def test_no_groups_and_no_rows(rng):
    assert matmul.grouped_matmul(random(rng, 0, 4), random(rng, 2, 6, 4), counts=[0, 0]).shape == (0, 6)
    assert (matmul.grouped_matmul(random(rng, 3, 4), np.zeros((0, 6, 4), np.float32), counts=[]) == np.zeros((3, 6))).all()


X, W = np.ones((4, 6), np.float32), np.ones((2, 8, 6), np.float32)
REFUSED = [
    (lambda: matmul.grouped_matmul(X, W), "grouped_matmul: counts and ends are not given"),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, 1], ends=[1, 2]), "grouped_matmul: counts and ends are both given"),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, -1]), r"grouped_matmul: group_list\[1\] is -1, but must not be negative"),
    (lambda: matmul.grouped_matmul(X, W, ends=[2, 1]), r"grouped_matmul: group_list\[1\] is 1, but group_list\[0\] is 2"),
    (lambda: matmul.grouped_matmul(X, W, ends=[2, 5]), r"grouped_matmul: group_list\[1\] is 5, but x has 4 rows"),
    (lambda: matmul.grouped_matmul(X, W, counts=[4]), r"grouped_matmul: weight dim 0 \(groups\) is 2, but group_list set groups = 1"),
    (lambda: matmul.grouped_matmul(X, W[0], counts=[4]), r"grouped_matmul: weight must be \[E, n, k\] \(or a packed stack\)"),
    (lambda: matmul.grouped_matmul(X, W, counts=[[4, 0]]), r"grouped_matmul: counts must be \[E\]"),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, 1], x_scales=X[:, 0]), "grouped_matmul: x_scales belong to int8 or int4 weights"),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, 1], dtype="bf17"), 'grouped_matmul: dtype is "bf17", must be one of'),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, 1], dtype="f16", out_scales=True), 'grouped_matmul: dtype is "f16", but with'),
    (lambda: matmul.grouped_matmul(X, W, counts=[1, 1], dtype="f16", out=X[:, :4].copy()), 'dtype is "f16", but out is f32'),
    (lambda: matmul.grouped_matmul(X, np.ones((2, 7, 6), "f4"), counts=[1, 1], activation="swiglu"), "grouped_matmul: .*7"),
    (lambda: matmul.pack_int_stack(np.ones((2, 4, 8), np.int8), np.ones((3, 4, 1), np.float32)),
     "pack_int_stack: scales must have rank 3, one matrix for each of 2 weights"),
    (lambda: matmul.pack_int_stack(np.ones((4, 8), np.int8), np.ones((4, 1), np.float32)), "pack_int_stack: q must have rank 3"),
    (lambda: matmul.pack_stack(X), r"pack_stack: weights must be \[E, n, k\]"),
    (lambda: matmul.pack_blocks_stack(np.zeros(34, np.uint8), "q8_0", -1, 1, 32), "pack_blocks_stack: the blocks have 34 bytes"),
    (lambda: matmul.matmul(X, matmul.pack_stack(W)), "matmul: the weight is a stack of 2 matrices"),
]


def test_a_weight_that_is_no_stack_of_integers():
    x = X.astype(np.int8)
    for weight, words in ((W, r"ndarray \[2, 8, 6\] \(ndarray\), must be a PackedIntWeight, what matmul.pack_int_stack gives"),
                          (matmul.pack_stack(W), r".*must be a PackedIntWeight \(matmul.pack_int_stack\); with a PackedWeight call matmul.grouped_matmul")):
        with pytest.raises(TypeError, match=f"^grouped_matmul_swiglu_quant: weight is {words}"):
            matmul.grouped_matmul_swiglu_quant(x, X[:, 0], weight, [1, 1])
    with pytest.raises(TypeError, match=r"^matmul_int: weight is .*, must be a PackedIntWeight, what matmul.pack_int gives"):
        matmul.matmul_int(X, W[0])


@pytest.mark.parametrize("call, message", REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

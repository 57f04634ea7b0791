"""Options of the operators by rows, of products and of the paged cache, against NumPy."""

import numpy as np
import pytest
from conftest import assert_near, import_torch
from test_operators import paged, random

from ops_transformer import kv_cache, matmul, quant, rowwise


def test_gather_out_of_packed_pages(rng):
    lengths = [40, 3]
    for dtype in ("f32", "bf16"):
        keys, values, caches, table = paged(rng, lengths, 32, dtype=dtype, layout="panel32")
        key, value = kv_cache.gather_pa_kv_cache(*caches, table, lengths, layout="panel32", head_indices=[1, 0])
        # Tagged, or ml_dtypes' type where another test has imported that.
        back = lambda t: t if dtype == "f32" else (np.asarray(getattr(t, "array", t)).view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # noqa: E731
        bound = 0 if dtype == "f32" else 2**-8
        for got, parts in ((key, keys), (value, values)):
            want = np.concatenate(parts)[:, [1, 0]]
            assert (np.abs(back(got) - want) <= bound * np.abs(want)).all()


def test_statistics_of_norms_and_gates_in_one_array(rng):
    x, w = random(rng, 3, 8), random(rng, 8)
    double = x.astype(np.float64)
    rstd = 1 / np.sqrt((double**2).mean(-1) + 1e-5)
    assert_near(rowwise.rms_norm(x, w, return_rstd=True)[1], rstd)
    assert_near(rowwise.add_rms_norm(x, np.zeros_like(x), w, return_rstd=True)[2], rstd)
    _, mean, rstd = rowwise.layer_norm(x, return_statistics=True)
    assert_near(mean, double.mean(-1))
    assert_near(rstd, 1 / np.sqrt(double.var(-1) + 1e-5))
    gate, up = x[:, :4], x[:, 4:]
    assert (rowwise.swiglu(x) == rowwise.swiglu(gate, up)).all()
    assert (rowwise.swiglu(x, swapped=True) == rowwise.swiglu(up, gate)).all()
    g = random(rng, 3, 4)
    assert (rowwise.swiglu_backward(g, x) == np.concatenate(rowwise.swiglu_backward(g, gate, up), 1)).all()
    assert (rowwise.swiglu_backward(g, x, swapped=True) == np.concatenate(rowwise.swiglu_backward(g, up, gate)[::-1], 1)).all()
    with pytest.raises(ValueError, match="swiglu: swapped is True"):
        rowwise.swiglu(gate, up, swapped=True)
    grad_sum = random(rng, 3, 8)
    plain, added = (rowwise.rms_norm_backward(x, x, w, **more)[0] for more in ({}, {"grad_sum": grad_sum}))
    assert_near(added, plain.astype(np.float64) + grad_sum, factor=4)


def test_products_with_int8_results_and_packed_embeddings(rng):
    x, w = random(rng, 3, 32), random(rng, 16, 32)
    product = x.astype(np.float64) @ w.T
    q, scales = matmul.matmul(x, w, out_scales=True)
    assert q.dtype == np.int8 and (np.abs(q * scales[:, None] - product) <= 0.51 * scales[:, None]).all()
    same = matmul.matmul(x, matmul.pack(w), out_scales=True)
    assert (same[0] == q).all() and (same[1] == scales).all()
    assert (matmul.lookup_rows(matmul.pack(w), [3, 0, 3]) == w[[3, 0, 3]]).all()
    with pytest.raises(ValueError, match="lookup_rows: .*16"):
        matmul.lookup_rows(matmul.pack(w), [16])
    blocks = rng.integers(0, 255, (16, 34), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    both = matmul.pack_blocks([blocks, blocks[:3]], "q8_0", [16, 3], 32)
    value = quant.dequantize_blocks(np.concatenate([blocks, blocks[:3]]), "q8_0", 19, 32)
    assert_near(matmul.matmul(x, both), x.astype(np.float64) @ value.T, factor=4)
    many = matmul.matmul(x, both, batch_invariant=True)
    assert all((matmul.matmul(x[i : i + 1], both, batch_invariant=True) == many[i]).all() for i in range(3))
    matmul.read_ahead(both)
    eight, i32 = rng.integers(-9, 9, (16, 32), dtype=np.int8), rng.integers(-99, 99, 16, dtype=np.int32)
    xq = rng.integers(-9, 9, (3, 32), dtype=np.int8)
    sums = matmul.matmul_int(xq, matmul.pack_int(eight), dtype="i32", bias=i32)
    assert (sums == xq.astype(np.int32) @ eight.T.astype(np.int32) + i32).all()


def test_integer_weights_take_what_a_product_takes(rng):
    q, xq = rng.integers(-9, 9, (16, 32), dtype=np.int8), rng.integers(-9, 9, (3, 32), dtype=np.int8)
    weight, bias, residual = matmul.pack_int(q), random(rng, 16), random(rng, 3, 8)
    y = xq.astype(np.float64) @ q.T + bias
    gated = y[:, :8] / (1 + np.exp(-y[:, :8])) * y[:, 8:]
    out = matmul.matmul_int(xq, weight, bias=bias, activation="swiglu", residual=residual)
    assert out.shape == (3, 8)
    assert_near(out, gated + residual, factor=4)
    small, scales = matmul.matmul_int(xq, weight, bias=bias, activation="swiglu", out_scales=True)
    assert small.dtype == np.int8 and (np.abs(small * scales[:, None] - gated) <= 0.51 * scales[:, None]).all()
    with pytest.raises(ValueError, match="matmul_int: .*out is i32, the bare sums, but activation is silu"):
        matmul.matmul_int(xq, weight, dtype="i32", activation="silu")
    with pytest.raises(ValueError, match='matmul_int: dtype is "f32", but with out_scales the result is int8'):
        matmul.matmul_int(xq, weight, dtype="f32", out_scales=True)
    assert "weights_int_few_rows" in matmul.plan(xq, weight, bias=bias, activation="swiglu", residual=residual)


def test_plans_of_products_name_the_kernel_and_the_reason(rng):
    x, w = random(rng, 9, 32), random(rng, 16, 32)
    told = matmul.plan(x, w, activation="swiglu")
    assert told.startswith("many_rows f32, tasks of 9 x ") and told.endswith("; more than 8 rows: multiplying is the time")
    assert matmul.plan(x[:8], matmul.pack(w)).startswith("few_rows ")
    blocks = matmul.pack_blocks(np.zeros((16, 34), np.uint8), "q8_0", 16, 32)
    assert matmul.plan(x, blocks, int8_activations=True).startswith("activations_int8_many_rows int8_dot, ")
    assert matmul.plan(x[:1], blocks, batch_invariant=True).startswith("few_rows ")
    integers = matmul.pack_int(np.ones((16, 32), np.int8))
    assert matmul.plan(x, integers).startswith("weights_int_floats_many_rows f32, ")
    ones = np.ones((2, 32), np.int8)
    assert matmul.plan(ones, integers, x_scales=np.ones(2, np.float32)).startswith("weights_int_few_rows int8_dot, ")
    with pytest.raises(ValueError, match="plan: matmul: x dim 1 .*31"):
        matmul.plan(x[:, :31], w)
    with pytest.raises(TypeError, match="plan: x_scales are given, but weight is no PackedIntWeight"):
        matmul.plan(x, w, x_scales=x[:, 0])
    with pytest.raises(TypeError, match="plan: int8_activations and batch_invariant are not for a PackedIntWeight"):
        matmul.plan(x, integers, batch_invariant=True)


def test_a_sum_that_leaves_32_bits_with_its_bias_wraps(rng):
    x, q = (rng.integers(-128, 128, (rows, 64), dtype=np.int8) for rows in (20, 16))
    bias = np.repeat(np.array([2**31 - 1, -(2**31)], np.int32), 8)
    exact = x.astype(np.int64) @ q.T.astype(np.int64) + bias
    assert (np.abs(exact) > 2**31).any()
    sums = matmul.matmul_int(x, matmul.pack_int(q), dtype="i32", bias=bias)
    assert (sums == exact.astype(np.int32)).all()  # NumPy's conversion wraps
    torch = import_torch()
    theirs = torch._int_mm(torch.from_numpy(x), torch.from_numpy(q.T.copy())) + torch.from_numpy(bias)
    assert (sums == theirs.numpy()).all()


def test_options_that_would_say_nothing_are_refused(rng):
    x, q = random(rng, 4, 8), rng.integers(-9, 9, (2, 8), dtype=np.int8)
    scales = quant.quantize(x, groups=2)[1]
    with pytest.raises(ValueError, match=r"quantize: groups is 4, but scales are \[4, 2\]"):
        quant.quantize(x, scales=scales, groups=4)
    with pytest.raises(ValueError, match="quantize: zero_points is True, but scales are given without zeros"):
        quant.quantize(x, scales=scales, zero_points=True)
    assert quant.quantize(x, scales=scales, groups=1, zero_points=False)[0].shape == (4, 8)
    zeros = rng.integers(-5, 5, scales.shape, dtype=np.int8)
    want = quant.quantize(x, scales=scales, zeros=zeros)[0]
    assert (quant.quantize(x, scales=scales, zeros=zeros, groups=2, zero_points=True)[0] == want).all()
    packed, out = matmul.pack_int(q), np.empty((4, 2), np.float32)
    with pytest.raises(ValueError, match='matmul_int: dtype is "bf16", but out is f32'):
        matmul.matmul_int(x, packed, dtype="bf16", out=out)
    for more in ({}, {"out": out}):
        with pytest.raises(ValueError, match='matmul_int: dtype is "float32", must be one of i32, f32, bf16, f16'):
            matmul.matmul_int(x, packed, dtype="float32", **more)
    assert matmul.matmul_int(x, packed, dtype="f32", out=out) is out


def test_norms_of_rows_whose_squares_overflow(rng):
    x, w = np.full((1, 8), 1e20, np.float32), np.full(8, 2, np.float32)
    x[0, 0] *= -1
    assert (rowwise.rms_norm(x, w) == 0).all() and (rowwise.add_rms_norm(x, x, w)[0] == 0).all()
    assert (rowwise.layer_norm(x, w, w) == 2).all()
    assert all((gradient == 0).all() for gradient in rowwise.rms_norm_backward(np.ones_like(x), x, w))
    assert all((gradient == 0).all() for gradient in rowwise.layer_norm_backward(np.ones_like(x), x, w)[:2])
    torch = import_torch()
    assert (torch.nn.functional.rms_norm(torch.from_numpy(x), (8,)) == 0).all()
    assert torch.nn.functional.layer_norm(torch.from_numpy(x), (8,)).isnan().all()

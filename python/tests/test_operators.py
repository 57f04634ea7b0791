"""The other operators and the language model, against NumPy in float64."""

import os
import pathlib

import numpy as np
import pytest
from conftest import assert_near, attention_reference, required

from ops_transformer import Model, Tagged, kv_cache, matmul, quant, rowwise


def random(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def numeric_gradient(function, x, grad_out, step=1e-5):
    """Of sum(grad_out * function(x)) by central differences, x in float64."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        there = x[index]
        x[index] = there + step
        above = (grad_out * function(x)).sum()
        x[index] = there - step
        below = (grad_out * function(x)).sum()
        x[index] = there
        gradient[index] = (above - below) / (2 * step)
    return gradient


def rms_norm_reference(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def layer_norm_reference(x, weight, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


def softmax_reference(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def test_norms_and_softmax(rng):
    x, w, b = random(rng, 3, 5, 33), random(rng, 33), random(rng, 33)
    double = x.astype(np.float64)
    assert_near(rowwise.rms_norm(x, w), rms_norm_reference(double, w))
    assert_near(rowwise.layer_norm(x, w, b), layer_norm_reference(double, w, b))
    assert_near(rowwise.softmax(x, 0.5), softmax_reference(0.5 * double))
    out, total = rowwise.add_rms_norm(x, x, w)
    assert_near(total, 2 * double)
    assert_near(out, rms_norm_reference(2 * double, w))
    assert (rowwise.softmax(np.full((1, 4), -np.inf, np.float32)) == 0).all()
    assert_near(rowwise.rms_norm(x[:, ::2], w), rms_norm_reference(double[:, ::2], w))


def test_gradients_by_rows(rng):
    x, w, b, g = random(rng, 2, 9), random(rng, 9), random(rng, 9), random(rng, 2, 9)
    double, dw, db = (t.astype(np.float64) for t in (x, w, b))
    grad_x, grad_w = rowwise.rms_norm_backward(g, x, w)
    assert_near(grad_x, numeric_gradient(lambda t: rms_norm_reference(t, dw), double, g), factor=20)
    assert_near(grad_w, numeric_gradient(lambda t: rms_norm_reference(double, t), dw, g), factor=20)
    grad_x, grad_w, grad_b = rowwise.layer_norm_backward(g, x, w)
    assert_near(grad_x, numeric_gradient(lambda t: layer_norm_reference(t, dw, db), double, g), factor=20)
    assert_near(grad_w, numeric_gradient(lambda t: layer_norm_reference(double, t, db), dw, g), factor=20)
    assert_near(grad_b, g.sum(0), factor=4)
    grad_x = rowwise.softmax_backward(g, rowwise.softmax(x))
    assert_near(grad_x, numeric_gradient(softmax_reference, double, g), factor=20)
    up = random(rng, 2, 9)
    grad_gate, grad_up = rowwise.swiglu_backward(g, x, up)
    assert_near(grad_gate, numeric_gradient(lambda t: silu(t) * up, double, g), factor=20)
    assert_near(grad_up, g * silu(double), factor=4)


def test_rope_turns_and_turns_back(rng):
    x = random(rng, 6, 2, 16)
    cos, sin = rowwise.rope_table(range(6), 8)
    angles = np.arange(6)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    assert_near(cos, np.cos(angles))
    turned = rowwise.rope(x, cos, sin)
    a, b = x[..., :8].astype(np.float64), x[..., 8:].astype(np.float64)
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    assert_near(turned, np.concatenate([a * c - b * s, a * s + b * c], -1))
    assert_near(rowwise.rope(turned, cos, sin, inverse=True), x)
    with pytest.raises(ValueError, match="style"):
        rowwise.rope(x, cos, sin, style="thirds")


def test_rope_with_a_cache_of_angles(rng):
    x, positions = random(rng, 5, 2, 16), np.array([3, 0, 7, 3, 1], np.int32)
    cos_cache, sin_cache = rowwise.rope_table(range(8), 6)
    want = rowwise.rope(x, cos_cache[positions], sin_cache[positions], style="pairs")
    assert (rowwise.rope_cached(x, positions, cos_cache, sin_cache, style="pairs") == want).all()
    turned = x.copy()
    assert rowwise.rope_cached(turned, positions, cos_cache, sin_cache, out=turned) is turned
    assert_near(rowwise.rope_cached(turned, positions.tolist(), cos_cache, sin_cache, inverse=True), x)
    with pytest.raises(ValueError, match=r"rope_cached: position.* 8"):
        rowwise.rope_cached(x, [0, 1, 2, 3, 8], cos_cache, sin_cache)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_three_axes(rng, interleaved):
    x, positions = random(rng, 4, 2, 16), rng.integers(0, 50, (3, 4))
    sections = rowwise.RopeSections(4, 2, 2, interleaved)
    axis = [0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    angles = positions[axis].T * 10000.0 ** (-np.arange(8) / 8)
    cos, sin = rowwise.rope_table(positions, 8, sections=sections)
    assert_near(cos, np.cos(angles))
    assert_near(sin, np.sin(angles))
    cache = rowwise.rope_table(range(50), 8)
    assert (rowwise.rope_cached(x, positions, *cache, sections=sections) == rowwise.rope(x, cos, sin)).all()


def test_swiglu_and_add_in_place(rng):
    gate, up = random(rng, 4, 7), random(rng, 4, 7)
    want = silu(gate.astype(np.float64)) * up
    assert rowwise.swiglu(gate, up, out=gate) is gate
    assert_near(gate, want)
    assert_near(rowwise.add(gate, up), gate.astype(np.float64) + up)


def test_matmul_and_its_gradients(rng):
    x, w, b, r = random(rng, 5, 33), random(rng, 12, 33), random(rng, 12), random(rng, 5, 12)
    product = x.astype(np.float64) @ w.T
    assert_near(matmul.matmul(x, w), product, factor=4)
    packed = matmul.pack(w)
    assert (packed.n, packed.k, packed.format) == (12, 33, "f32")
    assert (matmul.matmul(x, packed) == matmul.matmul(x, w)).all()
    assert_near(matmul.matmul(x, packed, bias=b, activation="silu", residual=r), silu(product + b) + r, factor=4)
    half = silu(product[:, :6]) * product[:, 6:]
    assert_near(matmul.matmul(x, w, activation="swiglu"), half, factor=4)
    assert_near(matmul.matmul(x, w[:, ::-1][:, ::-1].T.copy().T), product, factor=4)
    grad_x, grad_w, grad_b = matmul.matmul_backward(r, x, w)
    assert_near(grad_x, r.astype(np.float64) @ w, factor=4)
    assert_near(grad_w, r.T.astype(np.float64) @ x, factor=4)
    assert_near(grad_b, r.sum(0, dtype=np.float64), factor=4)
    with pytest.raises(ValueError, match="matmul: .*33.*32|matmul: .*32.*33"):
        matmul.matmul(x[:, :32], w)
    with pytest.raises(ValueError, match="activation"):
        matmul.matmul(x, w, activation="relu")


def test_matmul_of_tagged_bf16_bits(rng):
    bits = lambda t: Tagged((t.view(np.uint32) >> 16).astype(np.uint16), "bf16")  # noqa: E731
    back = lambda t: (t.array.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
    x, w = bits(random(rng, 4, 16)), bits(random(rng, 8, 16))
    assert_near(back(matmul.matmul(x, w)), back(x).astype(np.float64) @ back(w).T, "bfloat16")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zero_points", [False, True])
def test_quantised_weights(rng, bits, zero_points):
    w, x = random(rng, 16, 64), random(rng, 3, 64)
    q, scales, zeros = quant.quantize(w, bits=bits, groups=4, zero_points=zero_points)
    value = quant.dequantize(q, scales, zeros)
    step = scales.repeat(16, axis=1)
    assert (np.abs(value - w) <= 0.5001 * step).all()
    packed = matmul.pack_int(q, scales, zeros)
    assert (packed.bits, packed.groups) == (bits, 4)
    assert_near(matmul.matmul_int(x, packed), x.astype(np.float64) @ value.T, factor=4)
    xq, x_scales = quant.dynamic_quant(x)
    want = (xq * x_scales[:, None].astype(np.float64)) @ value.T
    assert_near(matmul.matmul_int(xq, packed, x_scales=x_scales), want, factor=4)


def test_static_quantisation(rng):
    x = random(rng, 4, 12)
    scales, zeros = np.float32([[0.1, 0.2]] * 4), np.int8([[3, -2]] * 4)
    scales.flags.writeable = False
    step, zero = scales.repeat(6, axis=1), zeros.repeat(6, axis=1)
    q, same, same_zeros = quant.quantize(x, scales=scales, zeros=zeros)
    assert same is scales and same_zeros is zeros
    assert (q == np.clip(np.round(x / step) + zero, -128, 127)).all()
    q, _, none = quant.quantize(100 * x, scales=scales)
    assert none is None and (q == np.clip(np.round(100 * x / step), -128, 127)).all() and abs(q.astype(int)).max() > 126
    q, _, _ = quant.quantize(x, bits=4, scales=scales)
    assert_near(quant.dequantize(q, scales), np.clip(np.round(x / step), -8, 7) * step)
    with pytest.raises(ValueError, match="zeros are given without scales"):
        quant.quantize(x, zeros=zeros)
    with pytest.raises(ValueError, match="scales"):
        quant.quantize(x, scales=scales[:3])


def test_blocks_of_gguf(rng):
    scale, q = np.float16(0.25), rng.integers(-127, 128, (2, 32), dtype=np.int8)
    blocks = np.concatenate([np.full((2, 1), scale).view(np.uint8).reshape(2, 2), q.view(np.uint8)], axis=1)
    want = q * np.float64(scale)
    assert (quant.dequantize_blocks(blocks, "q8_0", 2, 32) == want).all()
    x = random(rng, 3, 32)
    assert_near(matmul.matmul(x, matmul.pack_blocks(blocks, "q8_0", 2, 32)), x.astype(np.float64) @ want.T, factor=4)
    with pytest.raises(ValueError, match="format"):
        quant.dequantize_blocks(blocks, "q9", 2, 32)
    assert (quant.lookup_rows(blocks, "q8_0", 2, 32, [1, 0, 1]) == want[[1, 0, 1]]).all()
    assert (quant.lookup_rows(blocks, "q8_0", 2, 32, np.int32([1])) == want[1:]).all()
    with pytest.raises(ValueError, match="2"):
        quant.lookup_rows(blocks, "q8_0", 2, 32, [0, 2])


def test_paged_cache_and_attention_over_it(rng):
    lengths, block = [7, 3], 4
    k, v = random(rng, 10, 2, 8), random(rng, 10, 2, 8)
    key_cache, value_cache = np.zeros((5, block, 2, 8), np.float32), np.zeros((5, block, 2, 8), np.float32)
    table = np.array([[4, 1], [2, 0]], np.int32)
    slots = [table[0][i // block] * block + i % block for i in range(7)] + [table[1][0] * block + i for i in range(3)]
    kv_cache.scatter_pa_kv_cache(k, v, [int(s) for s in slots], key_cache, value_cache)
    gathered = kv_cache.gather_pa_kv_cache(key_cache, value_cache, table, lengths)
    assert (gathered[0] == k).all() and (gathered[1] == v).all()
    q = random(rng, 2, 4, 1, 8)
    out = kv_cache.paged_attention(q, key_cache, value_cache, table, lengths)
    for b, (begin, end) in enumerate([(0, 7), (7, 10)]):
        part = [x[begin:end].transpose(1, 0, 2)[None] for x in (k, v)]
        assert_near(out[b : b + 1], attention_reference(q[b : b + 1], *part)[0])
    with pytest.raises(ValueError, match="read-only"):
        frozen = key_cache.copy()
        frozen.flags.writeable = False
        kv_cache.scatter_pa_kv_cache(k, v, list(range(10)), frozen, value_cache)


def paged(rng, lengths, block, dtype="f32", layout="norm", heads=2, dim=8, width=6):
    """(keys, values by sequence, the caches that hold them in blocks of a shuffled pool, block_table)"""
    pool = kv_cache.BlockPool(sum(-(-n // block) for n in lengths) + 2)
    pool.free(pool.allocate(2)[::-1])
    keys, values = ([random(rng, n, heads, size) for n in lengths] for size in (dim, width))
    caches = kv_cache.new_pages(pool.num_blocks, block, heads, dim, width, dtype=dtype, layout=layout)
    table = np.full((len(lengths), max(-(-n // block) for n in lengths)), -7, np.int32)
    slots = []
    for b, n in enumerate(lengths):
        blocks = pool.allocate(-(-n // block))
        table[b, : len(blocks)] = blocks
        slots += [blocks[p // block] * block + p % block for p in range(n)]
    kv_cache.scatter_pa_kv_cache(np.concatenate(keys), np.concatenate(values), slots, *caches, layout=layout)
    return keys, values, caches, table


def attention_of_sequence(q, k, v, **options):
    """The reference for one sequence, causal from the bottom right: [heads, query_len, ..], [kv_len, heads, ..]."""
    k, v = k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None]
    i, j = np.arange(q.shape[1])[:, None] + k.shape[2] - q.shape[1], np.arange(k.shape[2])[None]
    window = options.pop("window", 10**6)
    return attention_reference(q[None], k, v, mask=(j <= i) & (j >= i - window), **options)[0][0]


@pytest.mark.parametrize("layout", ["norm", "panel32"])
def test_prompts_and_decoded_tokens_in_one_call(rng, layout):
    lengths, ends = [70, 3, 40], [5, 5, 6]
    keys, values, caches, table = paged(rng, lengths, 32, layout=layout)
    q = random(rng, 6, 4, 8)
    out, lse = kv_cache.paged_attention(q, *caches, table, lengths, actual_seq_qlen=ends, layout=layout, window_left=20,
                                        return_lse=True)
    assert out.shape == (6, 4, 6) and lse.shape == (4, 6)
    for k, v, begin, end in zip(keys, values, [0] + ends, ends):
        want = attention_of_sequence(q[begin:end].transpose(1, 0, 2), k, v, window=20)
        assert_near(out[begin:end], want.transpose(1, 0, 2))
    with pytest.raises(ValueError, match="query has 3 dimensions, must have 4"):
        kv_cache.paged_attention(q, *caches, table, lengths)
    with pytest.raises(ValueError, match="page_layout"):
        kv_cache.paged_attention(q[None], *caches, table, lengths, layout="rows")


def test_rope_scatter_is_the_operators_one_after_the_other(rng):
    query, key, value = random(rng, 3, 4, 8), random(rng, 3, 2, 8), random(rng, 3, 2, 6)
    wq, wk = random(rng, 8), random(rng, 8)
    cos, sin = rowwise.rope_table([4, 9, 2], 4)
    caches, same = (kv_cache.new_pages(2, 4, 2, 8, 6) for _ in "ab")
    out = kv_cache.rope_scatter_pa_kv_cache(query, key, value, cos, sin, [5, -1, 0], *caches, query_weight=wq, key_weight=wk)
    assert (out == rowwise.rope(rowwise.rms_norm(query, wq), cos, sin)).all()
    turned = rowwise.rope(rowwise.rms_norm(key, wk), cos, sin)
    kv_cache.scatter_pa_kv_cache(turned, value, [5, -1, 0], *same)
    assert all((a == b).all() for a, b in zip(caches, same))
    assert kv_cache.rope_scatter_pa_kv_cache(query, key, value, cos, sin, [5, -1, 0], *caches, out=query) is query
    with pytest.raises(ValueError, match="rope_scatter_pa_kv_cache: .*8"):
        kv_cache.rope_scatter_pa_kv_cache(query, key, value, cos, sin, [5, -1, 8], *caches)


def test_pages_change_their_layout_and_dtype(rng):
    lengths = [70, 33]
    keys, values, caches, table = paged(rng, lengths, 32)
    panels = kv_cache.new_pages(caches[0].shape[0], 32, 2, 8, 6, layout="panel32")
    kv_cache.convert_pages(*caches, *panels)
    q = random(rng, 2, 4, 1, 8)
    out = kv_cache.paged_attention(q, *panels, table, lengths, layout="panel32")
    assert_near(out, kv_cache.paged_attention(q, *caches, table, lengths))
    halves = kv_cache.new_pages(caches[0].shape[0], 32, 2, 8, 6, dtype="f16")
    kv_cache.convert_pages(*panels, *halves, from_layout="panel32", to_layout="norm")
    assert halves[0].dtype == np.float16 and (halves[0] == caches[0].astype(np.float16)).all()
    bits = kv_cache.new_pages(caches[0].shape[0], 32, 2, 8, 6, dtype="bf16", layout="panel32", like=Tagged(None, "bf16"))
    kv_cache.convert_pages(*caches, *bits)
    out = kv_cache.paged_attention(q, *bits, table, lengths, layout="panel32")
    assert_near(out, kv_cache.paged_attention(q, *caches, table, lengths), "bfloat16")
    with pytest.raises(RuntimeError, match="32"):
        kv_cache.new_pages(4, 16, 2, 8, layout="panel32")
    with pytest.raises(ValueError, match="head_dim is -1"):
        kv_cache.new_pages(4, 16, 2, -1)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8_e4m3", "int8"])
def test_large_pages_are_huge(dtype):
    """What is smaller than a huge page comes from NumPy; the rest asks the system, whose refusal does no harm."""
    pages = [p.pages if isinstance(p, kv_cache.ScaledPages) else p
             for p in kv_cache.new_pages(1024, 32, 4, 32, dtype=dtype, like=Tagged(None, dtype))]
    arrays = [getattr(p, "array", p) for p in pages]
    assert all(a.__array_interface__["data"][0] % (2 << 20) == 0 and not a.any() and a.flags.writeable for a in arrays)
    small = kv_cache.new_pages(4, 32, 2, 32)[0]
    assert small.flags.owndata and not small.any()


@pytest.mark.parametrize("layout", ["norm", "panel32"])
@pytest.mark.parametrize("dtype, steps", [("int8", 254), ("int8_offset", 255), ("int4", 14), ("int4_offset", 15)])
def test_pages_of_integers(rng, layout, dtype, steps):
    key, value = random(rng, 40, 2, 64), random(rng, 40, 2, 48)
    caches = kv_cache.new_pages(3, 32, 2, 64, 48, dtype=dtype, layout=layout)
    assert all(isinstance(side, kv_cache.ScaledPages) and (side.offsets is None) == (steps % 2 == 0) for side in caches)
    kv_cache.scatter_pa_kv_cache(key, value, range(20, 60), *caches, layout=layout)
    got = kv_cache.gather_pa_kv_cache(*caches, [[0, 1]], [40], seq_offset=[20], layout=layout)
    for x, y in zip((key, value), got):
        groups = x.reshape(40, 2, -1, 32) if dtype.startswith("int4") and x.shape[2] % 32 == 0 else x[:, :, None]
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        span = np.maximum(high, 0) - np.minimum(low, 0) if steps % 2 else 2 * np.abs(groups).max(-1, keepdims=True)
        assert y.dtype == np.float32 and (abs(y.reshape(groups.shape) - groups) <= 1.01 * span / steps).all()
    other = kv_cache.new_pages(3, 32, 2, 64, 48, dtype=dtype)
    kv_cache.convert_pages(*caches, *other, from_layout=layout, to_layout="norm")
    again = kv_cache.gather_pa_kv_cache(*other, [[0, 1]], [40], seq_offset=[20])
    assert all((a == b).all() for a, b in zip(got, again))
    kv_cache.convert_pages(*(side.blocks(1) for side in other), *(side.blocks(2) for side in other), to_layout="norm")
    assert all((a[2] == a[1]).all() for side in other for a in side if a is not None)


@pytest.mark.parametrize("dtype", ["int8", "int8_offset", "int4", "int4_offset", "f8_e4m3", "f8_e5m2"])
@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("layout", ["norm", "panel32"])
def test_attention_reads_pages_of_bytes(rng, dtype, query_len, layout):
    key, value = random(rng, 70, 2, 64), random(rng, 70, 2, 48)
    size = 16 if layout == "norm" else 32
    caches = kv_cache.new_pages(5, size, 2, 64, 48, dtype=dtype, layout=layout, like=Tagged(None, dtype))
    kv_cache.scatter_pa_kv_cache(key, value, range(70), *caches, layout=layout)
    floats = kv_cache.new_pages(5, size, 2, 64, 48)
    kv_cache.convert_pages(*caches, *floats, from_layout=layout, to_layout="norm")
    q = random(rng, 1, 6, query_len, 64)
    table = [[0, 1, 2, 3, 4]]
    assert_near(kv_cache.paged_attention(q, *caches, table, [70], layout=layout),
                kv_cache.paged_attention(q, *floats, table, [70]))
    if dtype == "int8" and layout == "norm":
        caches[0].scales[1, 2, 1, 0] = -1
        with pytest.raises(ValueError, match="key_scales of block 1, row 2, head 1, group 0 is -1.0"):
            kv_cache.paged_attention(q, *caches, table, [70])


def test_pages_of_integers_refuse(rng):
    key = random(rng, 1, 2, 8)
    keys, values = kv_cache.new_pages(1, 4, 2, 8, dtype="int8")
    with pytest.raises(ValueError, match="scatter_pa_kv_cache: key_scales is absent, but key_cache is i8"):
        kv_cache.scatter_pa_kv_cache(key, key, [0], keys.pages, values.pages)
    keys.scales[0, 0, 1, 0] = -1
    with pytest.raises(ValueError, match="key_scales of block 0, row 0, head 1, group 0 is -1.000000, but must be >= 0"):
        kv_cache.scatter_pa_kv_cache(key, key, [0], keys, values, scales_given=True)
    with pytest.raises(ValueError, match="key_scales of block 0, row 0, head 1"):
        kv_cache.gather_pa_kv_cache(keys, values, [[0]], [1])
    assert not keys.pages.any() and not values.pages.any()
    with pytest.raises(ValueError, match='dtype is "i8", pages are f32, .*int4_offset'):
        kv_cache.new_pages(1, 4, 2, 8, dtype="i8")
    with pytest.raises(RuntimeError, match="head_dim is 7, but must be even"):
        kv_cache.new_pages(1, 4, 2, 7, dtype="int4")


@pytest.mark.parametrize("dtype, most", [("f8_e4m3", 448), ("f8_e5m2", 57344)])
def test_pages_of_eight_bits(rng, dtype, most):
    caches = kv_cache.new_pages(1, 32, 2, 8, dtype=dtype, like=Tagged(None, dtype))
    assert isinstance(caches[0], Tagged) and caches[0].array.dtype == np.uint8
    key = np.full((1, 2, 8), 1.5, np.float32)
    key[0, 0, :4] = 1e9, -1e9, np.nan, 0
    kv_cache.scatter_pa_kv_cache(key, key, [0], *caches)
    got, _ = kv_cache.gather_pa_kv_cache(*caches, [[0]], [1])
    assert got.dtype == np.float32 and np.isnan(got[0, 0, 2])
    assert (got[0, 0, :2] == [most, -most]).all() and (got[0, 1] == 1.5).all()


def test_gather_of_some_heads_and_positions(rng):
    lengths = [7, 3]
    keys, values, caches, table = paged(rng, lengths, 4)
    key, value = kv_cache.gather_pa_kv_cache(*caches, table, [0, 2, 5], cumulative_lengths=True, seq_offset=[4, 0],
                                             head_indices=[1, 0, 1])
    assert (key == np.concatenate([keys[0][4:6], keys[1]])[:, [1, 0, 1]]).all()
    assert (value == np.concatenate([values[0][4:6], values[1]])[:, [1, 0, 1]]).all()
    with pytest.raises(ValueError, match="gather_pa_kv_cache"):
        kv_cache.gather_pa_kv_cache(*caches, table, [7, 9])
    key, _ = kv_cache.gather_pa_kv_cache(*caches, table, [7, 9], zero_fill=True)
    assert (key[7:10] == keys[1]).all() and (key[11:] == 0).all()


def test_block_pool():
    pool = kv_cache.BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2] and (pool.num_blocks, pool.num_free) == (4, 1)
    pool.fork(blocks)
    assert [pool.references(b) for b in range(4)] == [2, 2, 2, 0]
    assert pool.prepare_write(2) == (3, 2)  # shared: a private one, and what to copy into it
    assert pool.prepare_write(3) == (3, None)
    with pytest.raises(MemoryError):
        pool.prepare_write(1)
    for count in (1, 5):
        with pytest.raises(MemoryError, match=f"{count} blocks asked for, but 0 of 4 are free"):
            pool.allocate(count)
    pool.free(blocks)
    with pytest.raises(ValueError, match="is free"):
        pool.free([2, 2])
    assert pool.references(2) == 0
    with pytest.raises(ValueError, match="BlockPool"):
        kv_cache.BlockPool(-1)


# ---- reported cases of paged caches ----------------------------------------------------------------------------------


def test_case_b18_b23_chunks_of_a_prompt(rng):
    keys, values, caches, table = paged(rng, [520], 16, heads=1, dim=64, width=64)
    q = random(rng, 1, 1, 520, 64)
    chunks = [kv_cache.paged_attention(q[:, :, at : at + 130], *caches, table, [at + 130]) for at in range(0, 520, 130)]
    assert_near(np.concatenate(chunks, axis=2)[0], attention_of_sequence(q[0], keys[0], values[0]), factor=4)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 39, 70, 127, 129])
def test_case_b22_b49_decoding_with_any_number_of_keys(rng, length):
    keys, values, caches, table = paged(rng, [length], 16, dim=64, width=64)
    # What no token wrote must never be read.
    used = np.zeros(caches[0].shape[:2], bool)
    for p in range(length):
        used[table[0, p // 16], p % 16] = True
    for cache in caches:
        cache[~used] = np.nan
    for rows in (1, 5):
        q = random(rng, 1, 12, rows, 64)  # 6 query heads for each of the keys'
        out = kv_cache.paged_attention(q, *caches, table, [length])
        assert_near(out[0], attention_of_sequence(q[0], keys[0], values[0]))


def test_case_b61_lengths_beyond_the_table(rng):
    _, _, caches, _ = paged(rng, [32, 5], 16)
    q = random(rng, 2, 2, 1, 8)
    with pytest.raises(ValueError, match="33.*32|32.*33"):
        kv_cache.paged_attention(q, *caches, [[0, 1], [2, 0]], [33, 5])
    with pytest.raises(ValueError, match="-1"):
        kv_cache.paged_attention(q, *caches, [[0, 1], [2, 0]], [-1, 5])
    with pytest.raises(ValueError, match="kv_lengths"):
        kv_cache.paged_attention(q, *caches, [[0, 1], [2, 0]], [3])


def test_case_b62_block_ids(rng):
    keys, _, caches, _ = paged(rng, [40], 16)
    q = random(rng, 1, 2, 1, 8)
    for table in ([[0, caches[0].shape[0]]], [[0, -1]]):
        with pytest.raises(ValueError, match="block"):
            kv_cache.paged_attention(q, *caches, table, [17])
    twice = [np.concatenate([cache[1], cache[1]])[:20] for cache in caches]
    assert_near(kv_cache.paged_attention(q, *caches, [[1, 1]], [20])[0], attention_of_sequence(q[0], *twice))


def test_case_b64_the_stale_end_of_a_table(rng):
    _, _, caches, _ = paged(rng, [48], 16)
    q = random(rng, 1, 2, 1, 8)
    for length in (0, 5, 16, 17):
        used = -(-length // 16)
        stale = [[2, 1][:used] + [2**30, -7, 2**30, 2**30][: 4 - used]]
        rows = [np.concatenate([cache[2], cache[1]])[:length] for cache in caches]
        out = kv_cache.paged_attention(q, *caches, stale, [length])
        assert_near(out[0], attention_of_sequence(q[0], *rows) if length else np.zeros((2, 1, 6)))


@pytest.mark.parametrize("block", [1, 8, 16, 48, 128, 256])
def test_case_b65_any_size_of_page(rng, block):
    lengths = [300, 512]
    keys, values, caches, table = paged(rng, lengths, block, dim=128, width=128)
    q = random(rng, 2, 12, 1, 128)
    out = kv_cache.paged_attention(q, *caches, table, lengths)
    for b in range(2):
        assert_near(out[b], attention_of_sequence(q[b], keys[b], values[b]))


@pytest.fixture(scope="module")
def model():
    path = os.environ.get("OPST_MODEL", "")
    if not pathlib.Path(path).is_file():
        assert not required("model"), "OPST_REQUIRE names the model, but OPST_MODEL is no file"
        pytest.skip("the model file is not there (OPST_MODEL)")
    return Model(path, max_context=512)


def test_model_answers(model):
    pieces = []
    answer = model.generate("What is the capital of France?", chat=True, max_tokens=24, on_text=pieces.append)
    assert "Paris" in answer.text and "".join(pieces) == answer.text
    assert answer == model.generate("What is the capital of France?", chat=True, max_tokens=24)


def test_model_logits_and_perplexity(model):
    text = "The cat sat on the mat."
    tokens = model.tokenize(text)
    assert model.detokenize(tokens) == text
    logits = model.logits(tokens).astype(np.float64)
    assert logits.shape == (len(tokens), model.vocab_size)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    nll = -log_p[np.arange(len(tokens) - 1), tokens[1:]].mean()
    assert model.perplexity(tokens) == pytest.approx(np.exp(nll), rel=1e-5)
    assert model.generate(tokens, max_tokens=1).tokens == [int(logits[-1].argmax())]


def test_model_errors(model, tmp_path):
    with pytest.raises(ValueError, match="token"):
        model.logits([model.vocab_size])
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        Model(tmp_path / "nothing.gguf")

    class Enough(Exception):
        pass

    def stop(_):
        raise Enough

    with pytest.raises(Enough):
        model.generate("Once upon a time", on_text=stop)
    assert model.generate("Once upon a time", max_tokens=2).finish_reason == "length"

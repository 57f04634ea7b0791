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


def test_blocks_of_gguf(rng):
    scale, q = np.float16(0.25), rng.integers(-127, 128, (2, 32), dtype=np.int8)
    blocks = np.concatenate([np.full((2, 1), scale).view(np.uint8).reshape(2, 2), q.view(np.uint8)], axis=1)
    want = q * np.float64(scale)
    assert (quant.dequantize_blocks(blocks, "q8_0", 2, 32) == want).all()
    x = random(rng, 3, 32)
    assert_near(matmul.matmul(x, matmul.pack_blocks(blocks, "q8_0", 2, 32)), x.astype(np.float64) @ want.T, factor=4)
    with pytest.raises(ValueError, match="format"):
        quant.dequantize_blocks(blocks, "q9", 2, 32)


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
    with pytest.raises((ValueError, RuntimeError), match="nothing.gguf"):
        Model(tmp_path / "nothing.gguf")

    class Enough(Exception):
        pass

    def stop(_):
        raise Enough

    with pytest.raises(Enough):
        model.generate("Once upon a time", on_text=stop)
    assert model.generate("Once upon a time", max_tokens=2).finish_reason == "length"

"""ops_transformer.npu, section 6.3 of npu_rules.txt: the gate of a block and numbers as int8, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import close_int8, f64, near, silu, words_of_int4  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402


def floats(rng, *shape, dtype=torch.float32):
    return torch.from_numpy((rng.standard_normal(shape) * 2).astype(np.float32)).to(dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


DTYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
GROUP = [0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0, 1, 2, -2])
def test_6_3_swiglu(rng, dtype, bound, dim):
    """silu(first half) * second half along dim."""
    x = floats(rng, 4, 6, 8, dtype=dtype)
    a, b = np.split(f64(x), 2, dim)
    out = npu.npu_swiglu(x, dim)
    assert out.dtype == dtype and out.is_contiguous()
    near(out, silu(a) * b, bound)
    with pytest.raises(ValueError, match="npu_swiglu: dimension 0 of self is 3, must be even"):
        npu.npu_swiglu(floats(rng, 3, 4), 0)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_6_3_swiglu_backward(rng, dim):
    x = floats(rng, 4, 6, 8)
    a, b = np.split(f64(x), 2, dim)
    grad = floats(rng, *a.shape)
    s = sigmoid(a)
    want = np.concatenate([f64(grad) * b * (s + a * s * (1 - s)), f64(grad) * silu(a)], dim)
    near(npu.npu_swiglu_backward(grad, x, dim), want, 4e-6)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", [None, 0, 1])
@pytest.mark.parametrize("smooth_dims", [0, 1, 2])
def test_6_3_swiglu_quant(rng, left, kind, smooth_dims):
    """The second half is activated unless activate_left; 1: scale = 127 / largest; 0: + offsets. Groups by totals (0) or counts (1)."""
    x = floats(rng, 6, 16)
    group = [0] * 6 if kind is None else GROUP
    count = 1 if kind is None else 3
    smooth = None if smooth_dims == 0 else torch.from_numpy((rng.random((count, 8)[:smooth_dims]) + 0.5).astype(np.float32))
    index = None if kind is None else torch.tensor([[2, 2, 6], [2, 0, 4]][kind], dtype=torch.int32)
    more = dict(activate_left=left, smooth_scales=smooth, group_index=index, **({} if kind is None else dict(group_list_type=kind)))
    a, b = np.split(f64(x), 2, -1)
    y = silu(a) * b if left else a * silu(b)
    if smooth is not None:
        y = y * f64(smooth)[group].reshape(6, -1)
    top = np.abs(y).max(-1)
    q, scale = npu.npu_swiglu_quant(x, quant_mode=1, **more)
    near(scale, 127 / top, 1e-5)
    close_int8(q, y * 127 / top[:, None])
    offsets = floats(rng, count, 8)
    q, _ = npu.npu_swiglu_quant(x, quant_mode=0, offsets=offsets, **more)
    close_int8(q, y + f64(offsets)[group])


def test_6_3_swiglu_quant_of_int4(rng):
    """Two forms of a 4-bit result: words of eight, scale 7 / largest."""
    x = floats(rng, 3, 16)
    a, b = np.split(f64(x), 2, -1)
    y = a * silu(b)
    words, scale = npu.npu_swiglu_quant(x, quant_mode=1, dst_type=torch.quint4x2)
    near(scale, 7 / np.abs(y).max(-1), 1e-5)
    assert (words.numpy() == words_of_int4(np.clip(np.rint(y * 7 / np.abs(y).max(-1, keepdims=True)), -8, 7))).all()
    with pytest.raises(NotImplementedError, match="npu_swiglu_quant: dst_type torch.float16"):
        npu.npu_swiglu_quant(x, dst_type=torch.float16)
    with pytest.raises(ValueError, match="npu_swiglu_quant: quant_mode is 2, must be 0 or 1"):
        npu.npu_swiglu_quant(x, quant_mode=2)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("bias_type", [None, torch.int32, torch.float32])
@pytest.mark.parametrize("grouped", [False, True])
def test_6_3_dequant_swiglu_quant(rng, left, bias_type, grouped):
    """(x + int32 bias) * weight_scale * activation_scale + float bias; 1: times quant_scale, scale = largest / 127; 0: divided by it."""
    x = torch.from_numpy(rng.integers(-2000, 2000, (6, 16)).astype(np.int32))
    group, count = (GROUP, 3) if grouped else ([0] * 6, 1)
    scale, token, smooth = (torch.from_numpy((rng.random(shape) / 50 + 1e-3).astype(np.float32)) for shape in ((count, 16), (6, 1), (count, 8)))
    token = token * 50
    bias = None if bias_type is None or grouped else torch.from_numpy(rng.integers(-90, 90, 16)).to(bias_type)
    values = (f64(x) + (f64(bias) if bias is not None and bias_type == torch.int32 else 0)) * f64(scale)[group] * f64(token)
    values = values + (f64(bias) if bias is not None and bias_type == torch.float32 else 0)
    a, b = np.split(values, 2, -1)
    y = silu(a) * b if left else a * silu(b)
    more = dict(weight_scale=scale, activation_scale=token, bias=bias, activate_left=left, quant_scale=smooth,
                group_index=torch.tensor([2, 0, 4]) if grouped else None)
    q, found = npu.npu_dequant_swiglu_quant(x, quant_mode=1, **more)
    smoothed = y * f64(smooth)[group]
    top = np.abs(smoothed).max(-1)
    near(found, top / 127, 1e-5)
    close_int8(q, smoothed * 127 / top[:, None])
    offset = None if grouped else floats(rng, 1, 8)
    q, found = npu.npu_dequant_swiglu_quant(x, quant_offset=offset, **more)
    close_int8(q, y / f64(smooth)[group] + (0 if offset is None else f64(offset)))
    assert (found == 0).all()
    if grouped:
        for wrong in (dict(bias=torch.zeros(16)), dict(quant_offset=torch.zeros(8))):
            with pytest.raises(ValueError, match="bias and quant_offset must be None beside group_index"):
                npu.npu_dequant_swiglu_quant(x, **{**more, **wrong})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_6_3_dequant_swiglu_quant_of_floats(rng, dtype):
    """No scales are needed; a quant_scale of [1] serves all columns."""
    x = floats(rng, 6, 16, dtype=dtype)
    a, b = np.split(f64(x), 2, -1)
    y = a * silu(b)
    q, found = npu.npu_dequant_swiglu_quant(x, quant_mode=1)
    near(found, np.abs(y).max(-1) / 127, 1e-5)
    close_int8(q, y * 127 / np.abs(y).max(-1, keepdims=True))
    close_int8(npu.npu_dequant_swiglu_quant(x, quant_scale=torch.tensor([0.05]))[0], y / np.float32(0.05))


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("left", [False, True])
def test_6_3_swiglu_modes(rng, mode, left):
    """1: even and odd columns; 2: halves, the activated one by activate_left. Both are clamped: g * sigmoid(alpha g) * (l + bias)."""
    x, limit, alpha, bias = floats(rng, 6, 16) * 5, 4.0, 1.3, 0.5
    halves = (f64(x)[:, ::2], f64(x)[:, 1::2]) if mode == 1 else np.split(f64(x), 2, -1)[::1 if left else -1]
    g, linear = np.minimum(halves[0], limit), np.clip(halves[1], -limit, limit)
    want = g * sigmoid(alpha * g) * (linear + bias)
    q, scale = npu.npu_dequant_swiglu_quant(x, quant_mode=1, swiglu_mode=mode, clamp_limit=limit, glu_alpha=alpha, glu_bias=bias, activate_left=left)
    near(scale, np.abs(want).max(-1) / 127, 1e-5)
    close_int8(q, want * 127 / np.abs(want).max(-1, keepdims=True))
    q, scale = npu.npu_dequant_swiglu_quant(x, quant_mode=1, swiglu_mode=mode, activate_left=left)  # 7, 1.702 and 1 are the defaults
    g, linear = np.minimum(halves[0], 7), np.clip(halves[1], -7, 7)
    near(scale, np.abs(g * sigmoid(1.702 * g) * (linear + 1)).max(-1) / 127, 1e-5)


def test_6_3_round_modes():
    """0 half to even, 1 half away from zero, 2 down, 3 up, 4 towards zero."""
    gate = np.float32(silu(np.float64(1.0)))
    for value, wanted in ((2.5, (2, 3, 2, 3, 2)), (3.5, (4, 4, 3, 4, 3)), (-2.5, (-2, -3, -3, -2, -2)), (0.25, (0, 0, 0, 1, 0))):
        for mode, want in enumerate(wanted):
            got, _ = npu.npu_dequant_swiglu_quant(torch.tensor([[1.0, value]]), quant_scale=torch.tensor([[gate]]), activate_left=True, round_mode=mode)
            assert got.item() == want, (value, mode)
    with pytest.raises(ValueError, match="round_mode is 5, must be 0 to 4"):
        npu.npu_dequant_swiglu_quant(torch.ones(1, 2), round_mode=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("smooth", ["none", "one", "groups"])
def test_6_3_dynamic_quant(rng, dtype, smooth):
    """scale = largest of |x * s| / 127, y = round(x * s / scale); groups by running totals, equal neighbours are empty."""
    x = floats(rng, 2, 3, 16, dtype=dtype)
    scales = None if smooth == "none" else torch.from_numpy((rng.random((16,) if smooth == "one" else (3, 16)) + 0.5).astype(np.float32)).to(dtype)
    values = f64(x).reshape(6, 16)
    more = dict(group_index=torch.tensor([2, 2, 6], dtype=torch.int32)) if smooth == "groups" else {}
    if scales is not None:
        values = values * (f64(scales) if smooth == "one" else f64(scales)[GROUP])
    q, scale = npu.npu_dynamic_quant(x, smooth_scales=scales, **more)
    top = np.abs(values).max(-1)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (2, 3)
    near(scale, (top / 127).reshape(2, 3), 1e-5)
    close_int8(q, (values * 127 / top[:, None]).reshape(2, 3, 16))


def test_6_3_dynamic_quant_of_int4(rng):
    """Words of eight along the last dimension; / 7. dst_type None, 1 and int8 are int8."""
    x = floats(rng, 3, 16)
    words, scale = npu.npu_dynamic_quant(x, dst_type=torch.quint4x2)
    top = np.abs(f64(x)).max(-1)
    near(scale, top / 7, 1e-5)
    assert words.dtype == torch.int32 and (words.numpy() == words_of_int4(np.clip(np.rint(f64(x) * 7 / top[:, None]), -8, 7))).all()
    q = npu.npu_dynamic_quant(x)[0]
    assert all((npu.npu_dynamic_quant(x, dst_type=code)[0] == q).all() for code in (1, torch.int8))
    for more, message in ((dict(dst_type=291), "dst_type is 291"), (dict(quant_mode="perchannel"), 'quant_mode "perchannel"')):
        with pytest.raises(NotImplementedError, match=f"npu_dynamic_quant: {message}"):
            npu.npu_dynamic_quant(x, **more)
    with pytest.raises(ValueError, match="npu_dynamic_quant: group_index ends at 2, but input has 3 rows"):
        npu.npu_dynamic_quant(x, smooth_scales=torch.ones(2, 16), group_index=torch.tensor([1, 2], dtype=torch.int32))

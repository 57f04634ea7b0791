"""ops_transformer.npu, section 7 of npu_rules.txt: norms and rotary embedding, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import f64, near, rms, rotated  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

DTYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]


def floats(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)


def dealt(x):
    """Even columns, then odd ones."""
    return np.concatenate([f64(x)[..., ::2], f64(x)[..., 1::2]], -1)


# ---- 7.1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("wide_gamma", [False, True])
def test_7_1_rms_norm(rng, dtype, bound, dims, wide_gamma):
    """y = x * rstd * gamma over gamma's dimensions; rstd f32 of the leading dimensions, then 1s; gamma of x's dtype or f32."""
    x, gamma = floats(rng, 3, 4, 8, dtype=dtype), floats(rng, *(3, 4, 8)[3 - dims:], dtype=torch.float32 if wide_gamma else dtype)
    y, rstd = npu.npu_rms_norm(x, gamma, 1e-3)
    want, given = rms(x, gamma, 1e-3, dims)
    assert y.dtype == dtype and rstd.dtype == torch.float32 and rstd.shape == ((3, 4, 1) if dims == 1 else (3, 1, 1))
    near(y, want, bound)
    near(rstd, given, 1e-5)
    near(npu.npu_rms_norm(x, gamma)[0], rms(x, gamma, 1e-6, dims)[0], bound)  # 1e-6 is the default
    with pytest.raises(ValueError, match=r"npu_rms_norm: gamma is \[5\], must be the last dimensions of x"):
        npu.npu_rms_norm(x, torch.ones(5))


@pytest.mark.parametrize("dims", [1, 2])
def test_7_1_rms_norm_backward(rng, dims):
    """dx = rstd (dy gamma - x rstd^2 mean(dy gamma x)), dgamma = sum of dy x rstd."""
    x, dy, gamma = floats(rng, 3, 4, 8), floats(rng, 3, 4, 8), floats(rng, *(3, 4, 8)[3 - dims:])
    over = tuple(range(-dims, 0))
    _, rstd = rms(x, gamma, 1e-3, dims)
    g = f64(dy) * f64(gamma)
    dx = rstd * (g - f64(x) * rstd**2 * (g * f64(x)).mean(over, keepdims=True))
    dgamma = (f64(dy) * f64(x) * rstd).sum(tuple(range(3 - dims)))
    found = npu.npu_rms_norm_backward(dy, x, gamma, npu.npu_rms_norm(x, gamma, 1e-3)[1])
    near(found[0], dx, 2e-5)
    near(found[1], dgamma, 2e-5)


@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_7_1_add_rms_norm(rng, dtype, bound):
    """The sum is rounded to the input's dtype, then normed: (y, rstd, x). v2 in place gives rstd, functional (rstd, y, x)."""
    a, b, gamma = floats(rng, 3, 8, dtype=dtype), floats(rng, 3, 8, dtype=dtype), floats(rng, 8, dtype=dtype)
    total = torch.from_numpy((f64(a) + f64(b)).astype(np.float32)).to(dtype)  # of 16 bits a float32 holds every sum of two
    y, rstd, x = npu.npu_add_rms_norm(a, b, gamma, 1e-3)
    want, given = rms(total, gamma, 1e-3)
    assert (x == total).all() and rstd.shape == (3, 1) and rstd.dtype == torch.float32
    near(y, want, bound)
    near(rstd, given, 1e-5)
    assert all((p == q).all() for p, q in zip(npu.npu_add_rms_norm_v2_functional(a, b, gamma, 1e-3), (rstd, y, x)))
    assert not (a == y).all()
    assert (npu.npu_add_rms_norm_v2(a, b, gamma, 1e-3) == rstd).all() and (a == y).all() and (b == x).all()


def test_7_1_inf_and_nan_pass(rng):
    x = floats(rng, 3, 8)
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    y, _, total = npu.npu_add_rms_norm(x, torch.zeros(3, 8), torch.ones(8))
    assert torch.isnan(total[0, 0]) and torch.isinf(total[1, 0]) and torch.isnan(y[0]).all() and not torch.isfinite(y[1, 0])
    near(y[2], rms(x[2], np.ones(8), 1e-6)[0])


# ---- 7.2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("shape", [(1, 5, 1, 8), (2, 5, 1, 8), (1, 1, 1, 8), (2, 5, 3, 8)])
def test_7_2_rotary_mul(rng, dtype, bound, mode, shape):
    """x * r1 + rot(x) * r2: halves (-second, first) or pairs (-odd, even); r1 and r2 broadcast."""
    x, cos, sin = floats(rng, 2, 5, 3, 8, dtype=dtype), floats(rng, *shape, dtype=dtype), floats(rng, *shape, dtype=dtype)
    out = npu.npu_rotary_mul(x, cos, sin, mode)
    assert out.dtype == dtype
    near(out, rotated(x, cos, sin, mode), bound)
    if mode == "half":
        assert (npu.npu_rotary_mul(x, cos, sin) == out).all()
    matrix = floats(rng, 8, 8, dtype=dtype)
    near(npu.npu_rotary_mul(x, cos, sin, mode, matrix), f64(x) * f64(cos) + f64(x) @ f64(matrix) * f64(sin), bound * 2)
    with pytest.raises(ValueError, match='npu_rotary_mul: rotary_mode is "quarter", must be one of half, interleave'):
        npu.npu_rotary_mul(x, cos, sin, "quarter")
    with pytest.raises(ValueError, match="npu_rotary_mul: the last dimension is 7, must be even"):
        npu.npu_rotary_mul(x[..., :7], cos[..., :7], sin[..., :7])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_7_2_rotary_mul_backward(rng, mode):
    """dx = grad r1 + rot^T(grad r2), dr1 and dr2 summed over what was broadcast."""
    x, cos, sin, grad = floats(rng, 2, 5, 3, 8), floats(rng, 1, 5, 1, 8), floats(rng, 1, 5, 1, 8), floats(rng, 2, 5, 3, 8)
    zero = np.zeros_like(f64(x))
    back = f64(grad) * f64(cos) - rotated(f64(grad) * f64(sin), zero, 1 + zero, mode)  # rot is a quarter turn: its transpose is -rot
    found = npu.npu_rotary_mul_backward(grad, x, cos, sin, mode)
    near(found[0], back, 4e-6)
    near(found[1], (f64(grad) * f64(x)).sum((0, 2), keepdims=True), 4e-6)
    near(found[2], (f64(grad) * rotated(x, zero, 1 + zero, mode)).sum((0, 2), keepdims=True), 4e-6)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_7_2_apply_rotary_pos_emb(rng, layout):
    """In place and given back."""
    lead = (2, 5) if layout == "BSND" else (7,)
    q, k, cos, sin = floats(rng, *lead, 3, 8), floats(rng, *lead, 1, 8), floats(rng, *lead, 1, 8), floats(rng, *lead, 1, 8)
    want = rotated(q, cos, sin), rotated(k, cos, sin)
    given = npu.npu_apply_rotary_pos_emb(q, k, cos, sin, layout, "half")
    assert given[0] is q and given[1] is k
    near(q, want[0])
    near(k, want[1])
    for more, message in ((("BNSD", "half"), 'layout is "BNSD", must be BSND or TND'), ((layout, "interleave"), 'rotary_mode is "interleave", must be one of half')):
        with pytest.raises(ValueError, match=f"npu_apply_rotary_pos_emb: {message}"):
            npu.npu_apply_rotary_pos_emb(q, k, cos, sin, *more)


@pytest.mark.parametrize("length", [5, 1])
def test_7_2_interleave_rope(rng, length):
    """Even columns, then odd ones, turned as halves; the result stays in this order."""
    x, cos, sin = floats(rng, 2, 3, 5, 64), floats(rng, 2, 1, length, 64), floats(rng, 2, 1, length, 64)
    near(npu.npu_interleave_rope(x, cos, sin), rotated(dealt(x), cos, sin))


@pytest.mark.parametrize("mode", ["half", "interleave", "interleaved"])
@pytest.mark.parametrize("cache_mode, section", [("default", None), ("default", [0, 0, 0]), ("default", [4, 2, 2]), ("interleave", [4, 2, 2])])
def test_7_2_mrope(rng, mode, cache_mode, section):
    """Columns of the half take positions row by row in sections, or 1, 4, .. of row 1 and 2, 5, .. of row 2; the rest of a head passes."""
    half, heads, size = 8, 2, 24
    cache, q, k = floats(rng, 20, 2 * half), floats(rng, 4, heads * size), floats(rng, 4, size)
    positions = rng.integers(0, 20, (3, 4))
    rows = [0] * half
    if section and any(section) and cache_mode == "default":
        rows = [0] * section[0] + [1] * section[1] + [2] * section[2]
    elif section and any(section):
        for row in (1, 2):
            for column in range(row, 3 * section[1], 3):
                rows[column] = row
    cos, sin = (np.stack([f64(cache)[positions[rows[i]], i + shift] for i in range(half)], 1) for shift in (0, half))
    style = "half" if mode == "half" else "interleave"
    spread = (lambda x: np.concatenate([x, x], -1)) if style == "half" else (lambda x: np.repeat(x, 2, -1))  # noqa: E731
    given = torch.from_numpy(positions if section and any(section) else positions[0])
    out = npu.npu_mrope(given, q, k, cache, size, mrope_section=section, rotary_mode=mode, cache_mode=cache_mode)
    for got, x in zip(out, (q, k)):
        x = f64(x).reshape(4, -1, size)
        want = np.concatenate([rotated(x[..., :2 * half], spread(cos)[:, None], spread(sin)[:, None], style), x[..., 2 * half:]], -1)
        near(got, want.reshape(got.shape))
    with pytest.raises(ValueError, match="npu_mrope: cache_mode only support default or interleave"):
        npu.npu_mrope(given, q, k, cache, size, cache_mode="x")
    with pytest.raises(ValueError, match=r"npu_mrope: mrope_section is \[4, 2, 1\], whose sum must be 8"):
        npu.npu_mrope(torch.from_numpy(positions), q, k, cache, size, mrope_section=[4, 2, 1])


# ---- 7.3 -------------------------------------------------------------------------------------------------------------

INDICES = {"Norm": [[0, 4, -1], [2, 1, 0]], "PA": [8, 3, -1, 0, 1, 2], "PA_BNSD": [8, 3, -1, 0, 1, 2], "PA_NZ": [8, 3, -1, 0, 1, 2],
           "PA_BLK_BNSD": [9, 0], "PA_BLK_NZ": [8, -1]}  # 9 is in the third page, whose rows begin at 8
ROWS = {"Norm": [0, 4, -1, 7, 6, 5], "PA_BLK_BNSD": [8, 9, 10, 0, 1, 2], "PA_BLK_NZ": [8, 9, 10, -1, -1, -1]}


@pytest.mark.parametrize("mode", INDICES)
@pytest.mark.parametrize("kind", ["float", "int8", "value"])
def test_7_3_latent_caches(rng, mode, kind):
    """The norm of the first 512 into ckv_cache, the last 64 dealt and turned into k_cache; int8 = clamp(round(v * scale)); index below 0
    is skipped. With v all of kv is normed, its first 64 are turned, and v goes to ckv_cache. Three forms of the function."""
    size, widths = 4, (64, 512) if kind != "value" else (192, 128)
    kv, gamma = floats(rng, 2, 1, 3, 576 if kind != "value" else 192), floats(rng, 512 if kind != "value" else 192)
    cos, sin, v = floats(rng, 2, 1, 3, 64), floats(rng, 2, 1, 3, 64), floats(rng, 2, 1, 3, 128)
    if kind == "value":
        normed = rms(kv, gamma, 1e-5)[0]
        wanted = np.concatenate([rotated(dealt(normed[..., :64]), cos, sin), normed[..., 64:]], -1), f64(v)
    else:
        wanted = rotated(dealt(kv[..., 512:]), cos, sin), rms(kv[..., :512], gamma, 1e-5)[0]
    dtype, shape = torch.int8 if kind == "int8" else torch.float32, (2, 1, 5) if mode == "Norm" else (3, size, 1)
    scales = [torch.from_numpy((rng.random(width) * 20).astype(np.float32)) for width in widths]
    more = dict(cache_mode=mode, is_output_kv=True, v=v if kind == "value" else None)
    if kind == "int8":
        more.update(k_rope_scale=scales[0], c_kv_scale=scales[1])
    make = lambda: [torch.full((*shape, width), 3, dtype=dtype) for width in widths]  # noqa: E731
    index, caches = torch.tensor(INDICES[mode]), make()
    got = npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, *caches, **more)
    assert got[0] is caches[0] and got[1] is caches[1]
    near(got[2], wanted[0], 4e-6)
    near(got[3], wanted[1], 4e-6)
    for cache, values, scale in zip(caches, wanted, scales):
        width = values.shape[-1]
        flat = np.full((10 if mode == "Norm" else 3 * size, width), 3.0)
        for token, row in enumerate(ROWS.get(mode, INDICES[mode])):
            if row >= 0:
                value = values.reshape(-1, width)[token]
                flat[row] = value if kind != "int8" else value * f64(scale)
        if mode.endswith("NZ"):
            chunk = 32 if kind == "int8" else 16
            flat = flat.reshape(3, size, width // chunk, chunk).transpose(0, 2, 1, 3)
        if kind == "int8":
            assert (np.abs(f64(cache).reshape(-1) - np.clip(flat.reshape(-1), -128, 127)) <= 0.51).all()
        else:
            near(cache.reshape(-1), flat.reshape(-1), 4e-6)
    again = make()
    second = npu.npu_kv_rmsnorm_rope_cache_v2(kv, gamma, cos, sin, index, *again, **more)
    assert all((a == b).all() for a, b in zip((*again, *second), (*caches, *got[2:])))
    untouched = make()
    functional = npu.npu_kv_rmsnorm_rope_cache_v2_functional(kv, gamma, cos, sin, index, *untouched, **more)
    assert all((cache == 3).all() for cache in untouched) and all((a == b).all() for a, b in zip(functional, (*second, *caches)))


def test_7_3_refusals(rng):
    kv, gamma, cos = floats(rng, 1, 1, 2, 576), floats(rng, 512), floats(rng, 1, 1, 2, 64)
    given = (kv, gamma, cos, cos, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4, 512))
    for name in ("k_rope_offset", "c_kv_offset"):
        with pytest.raises(NotImplementedError, match=f"{name} is given, but the device takes none"):
            npu.npu_kv_rmsnorm_rope_cache(*given, **{name: torch.ones(64)})
    with pytest.raises(ValueError, match="k_rope_scale and c_kv_scale go together"):
        npu.npu_kv_rmsnorm_rope_cache(*given, k_rope_scale=torch.ones(64))
    with pytest.raises(ValueError, match='cache_mode is "PA_X", must be one of Norm, PA'):
        npu.npu_kv_rmsnorm_rope_cache(*given, cache_mode="PA_X")
    with pytest.raises(ValueError, match="npu_kv_rmsnorm_rope_cache: a cache is int8, but its scales are not given"):
        npu.npu_kv_rmsnorm_rope_cache(*given[:6], given[6].to(torch.int8))
    # A row beyond its own sequence is not one of the next; nothing is written.
    two = [torch.cat([x, x]) for x in (kv, cos)]
    caches = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 4, 512)
    with pytest.raises(ValueError, match="npu_kv_rmsnorm_rope_cache: index names row 4, but a sequence of the cache has 4"):
        npu.npu_kv_rmsnorm_rope_cache(two[0], gamma, two[1], two[1], torch.tensor([[0, 4], [0, 1]]), *caches)
    pages = torch.zeros(2, 4, 1, 64), torch.zeros(1, 4, 1, 512)
    with pytest.raises(ValueError, match="npu_kv_rmsnorm_rope_cache: index names row 5, but the cache has 4"):
        npu.npu_kv_rmsnorm_rope_cache(*given[:4], torch.tensor([0, 5]), *pages, cache_mode="PA")
    assert all((cache == 0).all() for cache in (*caches, *pages))

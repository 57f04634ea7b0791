"""flash_attention_score, flash_attention_grad and flash_attention against the equation in float64."""

import numpy as np
import pytest
from conftest import assert_near, attention_gradients, attention_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ops_transformer.flash_attention import flash_attention, flash_attention_grad, flash_attention_score

LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]


def to_layout(x, layout):
    """[batch, N, length, D] in another layout, as an array of its own."""
    b, n, s, d = x.shape
    if layout == "BNSD":
        return x.copy()
    x = x.transpose(0, 2, 1, 3)
    if layout == "BSND":
        return x.copy()
    x = x.reshape(b, s, n * d)
    return x.copy() if layout == "BSH" else x.transpose(1, 0, 2).copy()


def from_layout(x, layout, n):
    if layout == "BNSD":
        return x
    if layout == "SBH":
        x = x.transpose(1, 0, 2)
    if layout in ("BSH", "SBH"):
        x = x.reshape(*x.shape[:2], n, -1)
    return x.transpose(0, 2, 1, 3)


def problem(rng, b=2, n=4, n2=2, sq=19, skv=33, d=24, dv=16, dtype=np.float32):
    shapes = (b, n, sq, d), (b, n2, skv, d), (b, n2, skv, dv), (b, n, sq, dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def band(sq, skv, pre, nxt):
    i, j = np.arange(sq)[:, None], np.arange(skv)[None]
    return (j >= i - pre) & (j <= i + nxt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_forward_and_backward(rng, layout):
    q, k, v, g = problem(rng)
    padding = np.zeros((2, 33), np.uint8)
    padding[1, 20:] = 1
    options = dict(attn_head_num=4, kv_head_num=2, input_layout=layout, pre_tokens=12, next_tokens=3,
                   padding_mask=padding)
    mask = band(19, 33, 12, 3) & (padding == 0)[:, None, None]
    inputs = [to_layout(x, layout) for x in (q, k, v)]
    out, largest, total = flash_attention_score(*inputs, **options)
    assert_near(from_layout(out, layout, 4), attention_reference(q, k, v, mask=mask)[0])
    assert largest.shape == total.shape == (2, 4, 19) and largest.dtype == np.float32
    gradients = flash_attention_grad(*inputs, to_layout(g, layout), largest, total, out, **options)
    for got, want, heads in zip(gradients, attention_gradients(q, k, v, g, mask=mask), (4, 2, 2)):
        assert_near(from_layout(got, layout, heads), want, factor=4)


def test_tnd(rng):
    q, k, v, g = (x[0].transpose(1, 0, 2).copy() for x in problem(rng, b=1, sq=20, skv=31))
    ends_q, ends_k = [7, 7, 20], [9, 12, 31]
    options = dict(input_layout="TND", actual_seq_qlen=ends_q, actual_seq_kvlen=ends_k, next_tokens=0)
    out, largest, total = flash_attention_score(q, k, v, **options)
    gradients = flash_attention_grad(q, k, v, g, largest, total, out, **options)
    assert largest.shape == (4, 20)
    for begin_q, end_q, begin_k, end_k in zip([0] + ends_q, ends_q, [0] + ends_k, ends_k):
        parts = [x.transpose(1, 0, 2)[None] for x in (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k], g[begin_q:end_q])]
        mask = band(end_q - begin_q, end_k - begin_k, 10**6, 0)
        want = attention_reference(*parts[:3], mask=mask)[0][0].transpose(1, 0, 2)
        assert_near(out[begin_q:end_q], want)
        for got, want, (begin, end) in zip(gradients, attention_gradients(*parts, mask=mask),
                                           ((begin_q, end_q), (begin_k, end_k), (begin_k, end_k))):
            assert_near(got[begin:end], want[0].transpose(1, 0, 2), factor=4)


def test_plain_call(rng):
    q, k, v, _ = problem(rng, sq=9, skv=14)
    assert_near(flash_attention(q, k, v), attention_reference(q, k, v)[0])
    assert_near(flash_attention(q, k, v, causal=True), attention_reference(q, k, v, mask=band(9, 14, 99, 0))[0])


def test_statistics_and_rows_that_see_nothing(rng):
    q, k, v, _ = problem(rng, n2=4)
    mask = rng.random((2, 1, 19, 33)) < 0.4
    mask[0, 0, 5] = False
    out, largest, total = flash_attention_score(q, k, v, input_layout="BNSD", mask=mask)
    scores = np.where(mask, np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k) / np.sqrt(24), -np.inf)
    assert (out[0, :, 5] == 0).all() and (largest[0, :, 5] == -np.inf).all() and (total[0, :, 5] == 0).all()
    seen = np.isfinite(largest)
    assert_near(largest[seen], scores.max(-1)[seen])
    assert_near(total[seen], np.exp(scores - scores.max(-1, keepdims=True, where=mask, initial=-1e9)).sum(-1)[seen], factor=4)


def test_bias_scale_and_sinks(rng):
    q, k, v, _ = problem(rng, n2=4)
    bias = rng.standard_normal((4, 19, 33), dtype=np.float32)
    out = flash_attention_score(q, k, v, input_layout="BNSD", bias=bias, scale_value=0.3).attention_out
    assert_near(out, attention_reference(q, k, v, bias=bias, scale=0.3)[0])
    sinks = np.full(4, 60, np.float32)
    out = flash_attention_score(q, k, v, input_layout="BNSD", sinks=sinks).attention_out
    assert np.abs(out).max() < 1e-6


def test_dropout_is_a_function_of_the_seed(rng):
    q, k, _, _ = problem(rng, n2=4, sq=64, skv=64)
    v = np.ones((2, 4, 64, 8), np.float32)

    def out(seed):
        return flash_attention_score(q * 0, k, v, input_layout="BNSD", keep_prob=0.5, seed=seed).attention_out

    assert (out(1) == out(1)).all() and (out(1) != out(2)).any()
    assert abs(out(1).mean() - 1) < 0.02


def test_drop_mask_of_ones_changes_no_bit(rng):
    q, k, v, _ = problem(rng, n2=4)
    bits = np.full((2 * 4 * 19 * 33 + 7) // 8, 255, np.uint8)
    plain = flash_attention_score(q, k, v, input_layout="BNSD").attention_out
    assert (flash_attention_score(q, k, v, bits, input_layout="BNSD").attention_out == plain).all()


@pytest.mark.parametrize("layout, shape, options, message", [
    ("BSND", (2, 4, 8, 16), dict(attn_head_num=4), "attn_head_num is 4, but query has 8 in input_layout BSND"),
    ("BNSD", (2, 4, 8, 16), dict(attn_head_num=8), "attn_head_num is 8, but query has 4 in input_layout BNSD"),
    ("BNSD", (2, 4, 8, 16), dict(attn_dim_per_head=8), "attn_dim_per_head is 8, but query has 16"),
    ("BSH", (2, 4, 8, 16), dict(attn_head_num=4), "BSH means 3 dimensions, but query has 4"),
    ("BSND", (2, 8, 64), {}, "BSND means 4 dimensions, but query has 3"),
    ("BSH", (2, 8, 64), {}, "BSH needs attn_head_num"),
    ("SBH", (2, 8, 64), dict(attn_head_num=5), "dimension 2 of query is 64, which is not attn_head_num = 5 heads"),
    ("TND", (2, 8, 64), {}, "TND needs actual_seq_qlen"),
    ("BSND", (2, 4, 8, 16), dict(actual_seq_qlen=[4]), "go with input_layout TND, not BSND"),
    ("BDNS", (2, 4, 8, 16), {}, 'input_layout is "BDNS"'),
    ("BSND", (2, 4, 8, 16), dict(padding_mask=np.zeros(4, bool)), "padding_mask has 1 dimensions"),
])
def test_layouts_that_contradict_the_shapes(layout, shape, options, message):
    q = np.zeros(shape, np.float32)
    with pytest.raises(ValueError) as error:
        flash_attention_score(q, q, q, input_layout=layout, **options)
    assert message in str(error.value)


SIZES = st.sampled_from([1, 2, 3, 8, 15, 16, 17, 33])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(b=st.integers(1, 2), n2=st.integers(1, 3), group=st.integers(1, 3), sq=SIZES, skv=SIZES, d=SIZES, dv=SIZES,
       layout=st.sampled_from(LAYOUTS), pre=st.integers(-2, 20), nxt=st.integers(-2, 20),
       mask_shape=st.sampled_from([None, "full", "keys", "head"]), step=st.integers(1, 2), seed=st.integers(0, 99))
def test_random_calls(b, n2, group, sq, skv, d, dv, layout, pre, nxt, mask_shape, step, seed):
    rng = np.random.default_rng(seed)
    q, k, v, g = problem(rng, b, n2 * group, n2, sq, skv, d, dv)
    visible = band(sq, skv, pre, nxt)[None, None]
    mask = None
    if mask_shape:
        shape = {"full": (b, n2 * group, sq, skv), "keys": (skv,), "head": (1, n2 * group, 1, skv)}[mask_shape]
        mask = rng.random(shape) < 0.6
        visible = visible & mask
    options = dict(attn_head_num=n2 * group, kv_head_num=n2, input_layout=layout, pre_tokens=pre, next_tokens=nxt,
                   mask=mask)
    # Every second element of a larger array, or the array itself.
    inputs = [np.repeat(to_layout(x, layout), step, axis=1)[:, ::step] for x in (q, k, v)]
    out, largest, total = flash_attention_score(*inputs, **options)
    assert_near(from_layout(out, layout, n2 * group), attention_reference(q, k, v, mask=visible)[0])
    gradients = flash_attention_grad(*inputs, to_layout(g, layout), largest, total, out, **options)
    for got, want, heads in zip(gradients, attention_gradients(q, k, v, g, mask=visible), (n2 * group, n2, n2)):
        assert_near(from_layout(got, layout, heads), want, factor=4)

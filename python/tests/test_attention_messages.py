"""What the attention functions refuse, in whose words; and the options that the core has, against the equation."""

import numpy as np
import pytest
from conftest import assert_near, attention_reference

from ops_transformer import Context, Tagged, default_context, kv_cache
from ops_transformer._core import AttentionCall, View
from ops_transformer.flash_attention import (MergedAttention, attention_weights, dropout_mask, flash_attention, flash_attention_grad,
                                             flash_attention_score, merge_attention, pack_drop_mask)
from ops_transformer.kv_cache import paged_attention

X = np.zeros((1, 2, 3, 4), np.float32)
T = np.zeros((5, 2, 4), np.float32)


def score(**options):
    return flash_attention_score(X, X, X, input_layout="BNSD", **options)


def tnd(ends_q, ends_k=(2, 5)):
    return flash_attention_score(T, T, T, input_layout="TND", actual_seq_qlen=ends_q, actual_seq_kvlen=ends_k)


def pages(**options):
    cache = np.zeros((2, 4, 2, 4), np.float32)
    return paged_attention(X, cache, cache, [[0, 1]], [5], **options)


BITS = pack_drop_mask(np.ones((1, 2, 3, 3), bool))

REFUSED = {
    "seed_negative": (lambda: score(seed=-1), "flash_attention_score: seed is -1, must be from 0 to 18446744073709551615"),
    "seed_too_large": (lambda: flash_attention(X, X, X, seed=2**64), "flash_attention: seed is 18446744073709551616, must be from 0"),
    "offset": (lambda: pages(offset=-1), "paged_attention: offset is -1, must be from 0"),
    "pre_tokens": (lambda: score(pre_tokens=2.5), "flash_attention_score: pre_tokens is 2.5 (float), must be an integer"),
    "window": (lambda: pages(window_right=2.5), "paged_attention: window_right is 2.5 (float), must be an integer"),
    "causal": (lambda: flash_attention(X, X, X, causal=1), "flash_attention: causal is 1 (int), must be True or False"),
    "keep_prob": (lambda: score(keep_prob="half"), "flash_attention_score: keep_prob is 'half' (str), must be a number"),
    "scale": (lambda: score(scale_value=float("inf")), "scale_value is inf, must be finite"),
    "unknown": (lambda: score(windows=3), "flash_attention_score: there is no option windows; the further options are alibi_form"),
    "word": (lambda: flash_attention(X, X, X, alignment="left"), 'alignment is "left", must be one of top_left, bottom_right'),
    "statistics": (lambda: flash_attention_grad(X, X, X, X, None, None, X, input_layout="BNSD"),
                   "the statistics that flash_attention_score gave are needed: softmax_max and softmax_sum, or softmax_lse"),
    "one_statistic": (lambda: flash_attention_grad(X, X, X, X, X[..., 0], None, X, input_layout="BNSD"), "the statistics that"),
    "out": (lambda: flash_attention_grad(X, X, X, X, X[..., 0], X[..., 0], input_layout="BNSD"), "attention_out is needed"),
    "wanted": (lambda: flash_attention_grad(X, X, X, X, X[..., 0], X[..., 0], X, input_layout="BNSD", wanted=("bias",)),
               'wanted has "bias", but bias is not given'),
    "uint16": (lambda: flash_attention(X.astype(np.uint16), X, X), 'q has dtype uint16, which says nothing about its elements: '
               'ops_transformer.Tagged(array, "bf16")'),
    "mask_uint8": (lambda: score(mask=np.ones((3, 3), np.uint8)),
                   'flash_attention_score: mask has dtype u8, must be bool; true shows a key: mask != 0, or Tagged(mask, "bool")'),
    "mask_float": (lambda: score(mask=np.zeros((3, 3), np.float32)),
                   "mask has dtype f32, must be bool; numbers that are added to the scores are a bias: bias=mask"),
    "mask_float_and_padding": (lambda: score(mask=np.zeros((3, 3), np.float32), padding_mask=np.zeros((1, 3), bool)),
                               "mask has dtype f32, must be bool; numbers that are added to the scores are a bias"),
    "padding_float": (lambda: score(padding_mask=np.zeros((1, 3))), "padding_mask has dtype f64, must be bool or integer"),
    "padding_masked": (lambda: score(padding_mask=np.ma.array([[1, 0, 0]], mask=[[0, 1, 0]])), "padding_mask is a masked array"),
    "ends_decimal": (lambda: tnd([2.0, 5.9]), "actual_seq_qlen must be integers"),
    "ends_beyond": (lambda: tnd([2, 8]), "flash_attention_score: actual_seq_qlen[1] is 8, but query has 5 tokens"),
    "ends_falling": (lambda: tnd([3, 2]), "actual_seq_qlen[1] is 2, less than actual_seq_qlen[0] = 3"),
    "ends_negative": (lambda: tnd([-1, 2]), "actual_seq_qlen[0] is -1, must not be negative"),
    "ends_of_keys": (lambda: tnd([2, 5], [2, 6]), "actual_seq_kvlen[1] is 6, but key has 5 tokens"),
    "ends_shape": (lambda: tnd([[2, 5]]), "actual_seq_qlen must be a sequence of ends, but its shape is [1, 2]"),
    "ends_count": (lambda: tnd([5]), "actual_seq_qlen has 1 sequences, but actual_seq_kvlen has 2"),
    "paged_ends": (lambda: paged_attention(T, X.reshape(1, 3, 2, 4), X.reshape(1, 3, 2, 4), [[0]], [3], actual_seq_qlen=[9]),
                   "paged_attention: actual_seq_qlen[0] is 9, but query has 5 tokens"),
    "lengths_decimal": (lambda: pages(prefix=[1.5]), "prefix must be integers"),
    "merge_dtype": (lambda: merge_attention(X, X[..., 0], dtype="bfloat16"), 'dtype is "bfloat16", must be one of f32, bf16'),
    "accumulate": (lambda: merge_attention(X, X[..., 0], accumulate=True), "accumulate adds to what out holds"),
    "seed_and_mask": (lambda: score(seed=3, keep_prob=0.5, drop_mask=BITS),
                      "flash_attention_score: seed is 3, but drop_mask says which weights are kept: give one of them"),
    "seed_and_mask_plain": (lambda: flash_attention(X, X, X, drop_mask=BITS, seed=3), "flash_attention: seed is 3, but drop_mask says"),
    "seed_and_mask_grad": (lambda: flash_attention_grad(X, X, X, X, X[..., 0], X[..., 0], X, input_layout="BNSD", drop_mask=BITS, seed=3),
                           "flash_attention_grad: seed is 3, but drop_mask says"),
    "seed_and_mask_paged": (lambda: pages(seed=3, drop_mask=BITS), "paged_attention: seed is 3, but drop_mask says"),
    "seed_and_mask_weights": (lambda: attention_weights(X, X, seed=3, drop_mask=BITS), "attention_weights: seed is 3, but drop_mask"),
    "offset_and_mask": (lambda: score(offset=2, drop_mask=BITS), "offset is 2, but drop_mask says"),
    "place_and_mask": (lambda: score(first_key=2, drop_mask=BITS), "first_key is 2, but drop_mask says"),
    "pack": (lambda: pack_drop_mask(np.ones((1, 1, 2, 2))), "pack_drop_mask: keep has dtype float64, must be bool"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_how(case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message in str(error.value)
    assert "incompatible function arguments" not in str(error.value)


def test_defaults_beside_a_mask_of_dropped_weights_are_no_contradiction():
    options = dict(seed=0, offset=0, first_query=0, first_key=0, first_head=0, total_heads=0)
    assert (score(keep_prob=0.5, drop_mask=BITS, **options)[0] == score(keep_prob=0.5, drop_mask=BITS)[0]).all()


LAYOUTS = {
    "heads": (dict(input_layout="BSND", attn_head_num=2), [(1, 2, 30, 8)] * 3,
              "attn_head_num is 2, but query has 30 in input_layout BSND; these shapes fit input_layout BNSD"),
    "lengths": (dict(input_layout="BSND"), [(1, 2, 30, 8), (1, 2, 40, 8), (1, 2, 40, 8)],
                "these shapes fit input_layout BNSD"),
    "batch_of_sbh": (dict(input_layout="BSH", attn_head_num=2), [(30, 3, 16), (40, 3, 16), (40, 3, 16)],
                     "these shapes fit input_layout SBH"),
    "kv_heads": (dict(input_layout="BSH", attn_head_num=4), [(2, 30, 32), (2, 40, 16), (2, 40, 16)],
                 "key has 16 elements a token, which are 2 heads of query's 8: say kv_head_num=2"),
    "kv_heads_uneven": (dict(input_layout="BSH", attn_head_num=4), [(2, 30, 40), (2, 40, 10), (2, 40, 10)],
                        "key has 10 elements a token, which are 1 heads of query's 10: say kv_head_num=1"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_contradicts_the_shapes_names_the_one_that_fits(case):
    options, shapes, message = LAYOUTS[case]
    with pytest.raises(ValueError) as error:
        flash_attention_score(*(np.zeros(shape, np.float32) for shape in shapes), **options)
    assert message in str(error.value)


def test_a_mask_beside_padding_mask_hides_what_either_hides(rng):
    q, k, v = (rng.standard_normal((2, 2, n, 8), dtype=np.float32) for n in (3, 6, 6))
    mask, padding = rng.random((3, 6)) < 0.7, np.zeros((2, 6), np.int64)
    padding[1, 4:] = 1
    mask[:, 0] = True
    want = attention_reference(q, k, v, mask=mask & (padding == 0)[:, None, None])[0]
    want_padding = attention_reference(q, k, v, mask=(padding == 0)[:, None, None])[0]
    for form in (padding, padding.tolist(), padding != 0, padding.astype(np.uint8)):
        assert_near(flash_attention_score(q, k, v, input_layout="BNSD", padding_mask=form)[0], want_padding)
    for given in (mask, Tagged(mask.view(np.uint8), "bool")):
        assert_near(flash_attention_score(q, k, v, input_layout="BNSD", mask=given, padding_mask=padding)[0], want)
    assert_near(flash_attention(q, k, v, mask=Tagged((2 * mask).astype(np.uint8), "bool")),
                attention_reference(q, k, v, mask=mask)[0])


def test_the_plan_of_offsets_that_are_no_integers_is_refused():
    rows, ends = View(T), np.array([0, 2, 5], np.float32)
    call = AttentionCall(rows, rows, rows)
    call.cu_seqlens_q = call.cu_seqlens_k = View(ends)
    with pytest.raises(ValueError, match="cu_seqlens_q is f32, but must be i32 or i64"):
        call.plan(default_context())
    call.cu_seqlens_q = call.cu_seqlens_k = View(ends.astype(np.int32))
    assert "block" in call.plan(Context(num_threads=1))


def test_one_query_against_cached_keys():
    """The default diagonal lies at the top left; alignment moves it."""
    q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 5, 1))
    v = 2.0 ** np.arange(5).reshape(1, 1, 5, 1)
    assert flash_attention(q, k, v, causal=True).item() == 1
    assert flash_attention(q, k, v, causal=True, alignment="bottom_right").item() * 5 == 31
    kw = dict(input_layout="BNSD", next_tokens=0)
    assert flash_attention_score(q, k, v, **kw)[0].item() == 1
    assert flash_attention_score(q, k, v, alignment="bottom_right", **kw)[0].item() * 5 == 31


def test_gradients_of_bias_and_sinks_and_through_the_lse(rng):
    q, k, v, g = (rng.standard_normal((1, 2, n, 4)) for n in (3, 5, 5, 3))
    bias, sinks = rng.standard_normal((2, 3, 5)), rng.standard_normal(2)
    grad_lse = rng.standard_normal((1, 2, 3))

    def loss(q, k, v, bias, sinks):
        out, lse = flash_attention(q, k, v, return_lse=True, bias=bias, sinks=sinks)
        return (out * g).sum() + (lse * grad_lse).sum()

    inputs = [q, k, v, bias, sinks]
    out, lse = flash_attention(q, k, v, return_lse=True, bias=bias, sinks=sinks)
    got = flash_attention_grad(q, k, v, g, attention_out=out, softmax_lse=lse, grad_lse=grad_lse, bias=bias, sinks=sinks,
                               input_layout="BNSD", wanted=("query", "key", "value", "bias", "sinks"))
    for array, gradient in zip(inputs, got):
        assert gradient.shape == array.shape
        for index in list(np.ndindex(array.shape))[::3]:
            there = array[index]
            values = []
            for step in (1e-6, -1e-6):
                array[index] = there + step
                values.append(loss(*inputs))
            array[index] = there
            assert gradient[index] == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6)


def test_a_ring_of_16_bit_parts_rounds_once(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    parts = rng.standard_normal((6, 3, 40)).astype(ml_dtypes.bfloat16)
    lse = rng.standard_normal((6, 3)).astype(np.float32)
    weights = np.exp(lse.astype(np.float64))
    want = (weights[..., None] / weights.sum(0)[:, None] * parts.astype(np.float64)).sum(0)
    whole = merge_attention(parts, lse, dtype="f32").attention_out
    ring = merge_attention(parts[:1], lse[:1], dtype="f32")
    held = ring.attention_out
    for i in range(1, 6):
        assert merge_attention(parts[i : i + 1], lse[i : i + 1], out=ring, accumulate=True).attention_out is held
    assert_near(whole, want)
    assert_near(held, want, factor=4)
    assert_near(ring.softmax_lse, np.log(weights.sum(0)))
    rounded = merge_attention(parts, lse)
    assert rounded.attention_out.dtype == ml_dtypes.bfloat16
    assert (rounded.attention_out == whole.astype(ml_dtypes.bfloat16)).all()


def test_merging_into_arrays_of_the_users(rng):
    out, largest = rng.standard_normal((2, 3, 4), dtype=np.float32), rng.standard_normal((2, 3), dtype=np.float32)
    total = np.abs(largest) + 1
    want = merge_attention(out, softmax_max=largest, softmax_sum=total)
    into = MergedAttention(np.empty((3, 4), np.float32), None, np.empty(3, np.float32), np.empty(3, np.float32))
    assert merge_attention(out, softmax_max=largest, softmax_sum=total, out=into).attention_out is into.attention_out
    for a, b in zip(into, want):
        assert (a is None and b is None) or (a == b).all()
    with pytest.raises(ValueError, match="accumulate adds to what outputs hold, but softmax_max and softmax_sum are not both"):
        merge_attention(out, softmax_max=largest, softmax_sum=total, out=(into[0], None, into[2], None), accumulate=True)


def test_a_page_layout_and_its_name():
    cache = kv_cache.new_pages(2, 32, 2, 4)
    with pytest.raises(ValueError, match="layout"):
        paged_attention(X, *cache, [[0, 1]], [5], layout="rows")


def test_weights_and_scores_of_each_stage(rng):
    q, k, v = (rng.standard_normal((2, n, m, 8), dtype=np.float32) for n, m in ((4, 5), (2, 600), (2, 600)))
    bias, sinks = rng.standard_normal((4, 1, 600)), rng.standard_normal(4)
    slopes, bits = np.arange(1, 5) / 64, pack_drop_mask(rng.random((2, 4, 5, 600)) < 0.5)
    options = dict(softmax_scale=0.4, softcap=3.0, bias=bias, alibi_slopes=slopes, sinks=sinks, keep_prob=0.5, drop_mask=bits,
                   window_right=500)
    scaled = 0.4 * np.einsum("bhid,bhjd->bhij", q.astype(np.float64), np.repeat(k, 2, 1))
    capped = 3 * np.tanh(scaled / 3)
    distance = np.arange(600) - np.arange(5)[:, None]
    scores = np.where(distance <= 500, capped - slopes[:, None, None] * np.abs(distance) + bias, -np.inf)
    for stage, want in (("scaled", scaled), ("capped", capped), ("scores", scores)):
        got = attention_weights(q, k, stage=stage, **options)
        assert got.shape == want.shape and np.allclose(got, want, rtol=0, atol=1e-9)
    weights = attention_weights(q, k, **options)
    total = np.exp(scores).sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    keep = np.unpackbits(bits, bitorder="little")[:weights.size].reshape(weights.shape)
    assert np.allclose(weights, np.exp(scores) / total * keep / 0.5, atol=1e-12)
    floats = {**options, "bias": bias.astype(np.float32), "sinks": sinks.astype(np.float32), "alibi_slopes": slopes.astype(np.float32)}
    assert_near(flash_attention(q, k, v, **floats), weights @ np.repeat(v, 2, 1).astype(np.float64), factor=4)
    bits16 = Tagged((k.view(np.uint32) >> 16).astype(np.uint16), "bf16")
    exact = (bits16.array.astype(np.uint32) << 16).view(np.float32)
    assert (attention_weights(q, bits16, True) == attention_weights(q, exact, True)).all()
    with pytest.raises(ValueError, match='stage is "raw", must be one of scaled, capped, scores, weights'):
        attention_weights(q, k, stage="raw")

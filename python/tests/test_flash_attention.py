"""flash_attention_score, flash_attention_grad and flash_attention against the equation in float64."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import assert_near, attention_gradients, attention_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ops_transformer.flash_attention import flash_attention, flash_attention_grad, flash_attention_score, merge_attention
from ops_transformer.kv_cache import paged_attention

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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_of_the_keys_are_merged_in_both_forms(rng, dtype):
    q, k, v, _ = problem(rng, dtype=dtype)
    cuts = [(0, 10), (10, 11), (11, 33)]
    parts = [flash_attention_score(q, k[:, :, a:b], v[:, :, a:b], input_layout="BNSD") for a, b in cuts]
    out, largest, total = (np.stack(x) for x in zip(*parts))
    want = flash_attention_score(q, k, v, input_layout="BNSD")
    merged = merge_attention(out, softmax_max=largest, softmax_sum=total)
    assert merged.softmax_lse is None
    name = np.dtype(dtype).name
    for got, reference in ((merged.attention_out, want.attention_out), (merged.softmax_max, want.softmax_max),
                           (merged.softmax_sum, want.softmax_sum)):
        assert got.dtype == dtype
        assert_near(got, reference, name)
    lse = largest + np.log(total)
    merged = merge_attention(out, lse)
    assert merged.softmax_max is None
    assert_near(merged.attention_out, want.attention_out, name)
    assert_near(merged.softmax_lse, want.softmax_max + np.log(want.softmax_sum), name)
    assert_near(flash_attention(q, k, v, return_lse=True)[1], merged.softmax_lse, name)
    if dtype is np.float32:
        assert merge_attention(out, lse, dtype="f16").attention_out.dtype == np.float16


def test_merge_refuses_what_is_neither_form(rng):
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    for options in ({}, dict(softmax_max=lse), dict(softmax_lse=lse, softmax_max=lse, softmax_sum=lse)):
        with pytest.raises(ValueError, match="takes softmax_lse, or softmax_max and softmax_sum"):
            merge_attention(out, **options)
    with pytest.raises(ValueError, match="merge_attention: .*softmax_lse"):
        merge_attention(out, lse[:, :2])


# ---- reported cases --------------------------------------------------------------------------------------------------


def test_case_b09_no_keys_at_all(rng):
    q = rng.standard_normal((1, 2, 3, 8), dtype=np.float32)
    out, lse = flash_attention(q, q[:, :, :0], q[:, :, :0], return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_case_b10_merge_of_empty_parts(rng):
    full, lse = rng.standard_normal((1, 4, 64), dtype=np.float32), np.float32([[1, 2, 3, 4]])
    empty, nothing = np.zeros_like(full), np.full((1, 4), -np.inf, np.float32)
    both = merge_attention(np.stack([empty, empty]), np.stack([nothing, nothing]))
    assert (both.attention_out == 0).all() and (both.softmax_lse == -np.inf).all()
    for absent in (nothing, -nothing):
        for order in (0, 1):
            outs, lses = [full, empty], [lse, absent]
            got = merge_attention(np.stack(outs[:: 1 - 2 * order]), np.stack(lses[:: 1 - 2 * order]))
            assert (got.attention_out == full).all() and (got.softmax_lse == lse).all()


def test_case_b11_the_lse_is_a_natural_logarithm():
    k = np.ones((1, 1, 5, 4), np.float32)
    assert flash_attention(k[:, :, :1] * 0, k, k, return_lse=True)[1].item() == pytest.approx(np.log(5), abs=1e-6)


def probe(query_len, kv_len):
    """Every visible key weighs the same, and result * count is the set of those as bits."""
    q, k = np.zeros((1, query_len, 1, 1), np.float64), np.zeros((1, kv_len, 1, 1), np.float64)
    return q, k, (2.0 ** np.arange(kv_len)).reshape(1, kv_len, 1, 1)


def test_case_b21_a_window_counts_both_ends():
    def row(**options):
        return flash_attention_score(*probe(10, 10), input_layout="BSND", **options).attention_out[0, :, 0, 0]

    assert row(pre_tokens=4, next_tokens=0)[9] * 5 == sum(2**j for j in range(5, 10))
    causal = row(next_tokens=0)
    assert (row(pre_tokens=9, next_tokens=0) == causal).all() and (row(pre_tokens=10, next_tokens=0) == causal).all()


def test_case_b28_sequences_of_one_query_and_none(rng):
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 64), (8, 3, 64), (8, 3, 64)))
    out = flash_attention_score(q, k, v, input_layout="TND", actual_seq_qlen=[1, 1, 2], actual_seq_kvlen=[3, 3, 8],
                                scale_value=1.0).attention_out
    for t, (a, b) in enumerate([(0, 3), (3, 8)]):
        part = [x.transpose(1, 0, 2)[None] for x in (q[t : t + 1], k[a:b], v[a:b])]
        assert_near(out[t], attention_reference(*part, scale=1.0)[0][0, :, 0])


def test_case_b29_more_queries_than_keys(rng):
    q, g = (3 * rng.standard_normal((256, 1, 32)).astype(np.float16) for _ in "qg")
    k, v = (3 * rng.standard_normal((3, 1, 32)).astype(np.float16) for _ in "kv")
    g[:] = 1
    options = dict(input_layout="TND", actual_seq_qlen=[76, 110, 256], actual_seq_kvlen=[1, 2, 3], next_tokens=0)
    out, largest, total = flash_attention_score(q, k, v, **options)
    grad_q, grad_k, grad_v = flash_attention_grad(q, k, v, g, largest, total, out, **options)
    assert (grad_q == 0).all() and (grad_k == 0).all()
    assert (grad_v == np.float16([76, 34, 146]).reshape(3, 1, 1)).all()


def test_case_b31_rows_behind_the_last_sequence(rng):
    q, g = (rng.standard_normal((7, 2, 8), dtype=np.float32) for _ in "qg")
    options = dict(input_layout="TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5])
    out, largest, total = flash_attention_score(q, q, q, **options)
    gradients = flash_attention_grad(q, q, q, g, largest, total, out, **options)
    assert all((x[5:] == 0).all() and np.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.parametrize("head_dim", [1, 3, 7, 40, 63, 80, 160])
@pytest.mark.parametrize("length", [63, 100])
def test_case_b54_odd_head_dims(rng, head_dim, length):
    q, k, v, g = problem(rng, 1, 2, 1, length, length, head_dim, head_dim)
    out, largest, total = flash_attention_score(q, k, v, input_layout="BNSD", kv_head_num=1)
    assert_near(out, attention_reference(q, k, v)[0])
    gradients = flash_attention_grad(q, k, v, g, largest, total, out, input_layout="BNSD", kv_head_num=1)
    for got, want in zip(gradients, attention_gradients(q, k, v, g)):
        assert_near(got, want, factor=4)


def test_case_b89_the_same_bits_every_time(rng):
    from ops_transformer import Context

    q, k, v, g = problem(rng, 2, 4, 2, 130, 130, 64, 64)
    options = dict(input_layout="BNSD", next_tokens=0)

    def step(context):
        out = flash_attention_score(q, k, v, context=context, **options)
        return (*out, *flash_attention_grad(q, k, v, g, *out[1:], out[0], context=context, **options))

    want = step(Context(num_threads=1))
    four = Context(num_threads=4)
    for _ in range(20):
        assert all((a == b).all() for a, b in zip(step(four), want))


# ---- layouts that contradict -----------------------------------------------------------------------------------------


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


INTERRUPTED = """
import signal
import numpy as np
from ops_transformer.flash_attention import flash_attention, flash_attention_score, flash_attention_grad

def rows(heads, dim):
    return np.broadcast_to(np.ones((1, 1, 1 << 17, dim), np.float32), (1, heads, 1 << 17, dim))

def interrupted(call):
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        call()
    except KeyboardInterrupt:
        return True

signal.signal(signal.SIGALRM, signal.default_int_handler)
assert interrupted(lambda: flash_attention(rows(64, 64), rows(64, 64), rows(64, 1)))   # minutes
q, v = rows(16, 64), rows(16, 1)
few = [np.ones((1, 2, 100, 8), np.float32)] * 3
out, largest, total = flash_attention_score(*few, input_layout="BNSD")          # the Context goes on
assert (out == 1).all()
statistics = [np.broadcast_to(x[:, :1, :1], q.shape[:3]) for x in (largest, total)]
assert interrupted(lambda: flash_attention_grad(q, q, v, v, *statistics, v, input_layout="BNSD", wanted=["query"]))
print("interrupted")
"""


def test_a_signal_ends_a_long_call():
    # In a process of its own, which is ended where the signal is not heard.
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120).stdout == "interrupted\n"


def test_plain_layout_bsnd(rng, torch):
    q, k, v = (rng.standard_normal((2, n, h, 16)).astype(np.float32) for n, h in ((5, 4), (7, 2), (7, 2)))
    wanted, wanted_lse = flash_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), True, return_lse=True)
    out, lse = flash_attention(q, k, v, True, layout="BSND", return_lse=True)
    assert out.flags.c_contiguous and np.array_equal(out, wanted.swapaxes(1, 2)) and np.array_equal(lse, wanted_lse)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    recorded = flash_attention(*tensors, True, layout="BSND")
    assert recorded.is_contiguous() and np.array_equal(recorded.detach().numpy(), out)
    grads = torch.autograd.grad(recorded.sum(), tensors)
    others = torch.autograd.grad(flash_attention(*(x.transpose(1, 2) for x in tensors), True).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(grads, others))
    with pytest.raises(ValueError, match=r'flash_attention: layout is "SBH", must be one of BNSD, BSND'):
        flash_attention(q, k, v, layout="SBH")
    with pytest.raises(ValueError, match=r"flash_attention: q must be \[batch, length, heads, head_dim\], but its shape is \[5, 4, 16\]"):
        flash_attention(q[0], k[0], v[0], layout="BSND")


def test_paged_query_layout_bsnd(rng, torch):
    q = rng.standard_normal((2, 3, 4, 16)).astype(np.float32)
    pages = [rng.standard_normal((5, 4, 2, 16)).astype(np.float32) for _ in range(2)]
    table, lengths = np.array([[0, 3], [4, 1]]), [7, 4]
    wanted = paged_attention(q.swapaxes(1, 2), *pages, table, lengths)
    out, lse = paged_attention(q, *pages, table, lengths, query_layout="BSND", return_lse=True)
    assert out.flags.c_contiguous and np.array_equal(out, wanted.swapaxes(1, 2)) and lse.shape == (2, 4, 3)
    given = np.empty_like(q)
    assert paged_attention(q, *pages, table, lengths, query_layout="BSND", out=given) is given and np.array_equal(given, out)
    recorded = paged_attention(torch.from_numpy(q).requires_grad_(), *pages, table, lengths, query_layout="BSND")
    assert recorded.is_contiguous() and np.array_equal(recorded.detach().numpy(), out)
    with pytest.raises(ValueError, match='paged_attention: query_layout is "TND", must be BNSD or BSND'):
        paged_attention(q, *pages, table, lengths, query_layout="TND")

"""Block masks from Python: attention against the equation in float64 under the dense mask, and what is refused."""

import numpy as np
import pytest
from block_masks import SMALL, drawn, lists_of
from conftest import assert_near, attention_gradients, attention_reference

from ops_transformer import Context, Tagged
from ops_transformer._attention import core_call, split_options
from ops_transformer._attention_reader import read
from ops_transformer.flash_attention import (BlockMask, attention_weights, flash_attention, flash_attention_grad,
                                             flash_attention_score)
from ops_transformer.kv_cache import paged_attention


def inputs(rng, dtype=np.float32, query_len=50, kv_len=70, batch=2, heads=4, kv_heads=2, dim=24, value_dim=16):
    shapes = (batch, heads, query_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, value_dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_q, block_kv", [(1, 1), (4, 3), (16, 16), (7, 40), (64, 64), (200, 5)])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_values_and_gradients_of_any_blocks(rng, block_q, block_kv, batch, heads):
    q, k, v = inputs(rng)
    mask, seen = drawn(rng, batch, heads, block_q=block_q, block_kv=block_kv, dtype=np.int32 if heads == 2 else np.int64)
    seen = np.repeat(seen, 4 // heads, axis=1)  # a mask of KV heads is that of their query heads
    want, _ = attention_reference(q, k, v, mask=seen)
    for context in (None, Context(3), Context(1, "generic")):
        assert_near(flash_attention(q, k, v, block_mask=mask, context=context), want)
    out, top, total = flash_attention_score(q, k, v, input_layout="BNSD", block_mask=mask)
    hidden = np.broadcast_to(~seen.any(-1), top.shape)
    assert (out[hidden] == 0).all() and (top[hidden] == -np.inf).all() and (total[hidden] == 0).all()
    g = rng.standard_normal(out.shape).astype(np.float32)
    gradients = flash_attention_grad(q, k, v, g, top, total, out, input_layout="BNSD", block_mask=mask)
    for got, exact in zip(gradients, attention_gradients(q, k, v, g, mask=seen)):
        assert_near(got, exact, factor=4)
    assert (gradients[0][hidden] == 0).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(rng, dtype):
    q, k, v = inputs(rng, np.float32 if dtype == "bfloat16" else dtype)
    mask, seen = drawn(rng, 1, 4)
    if dtype == "bfloat16":
        q, k, v = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v))
        out = flash_attention(*(Tagged(x, "bf16") for x in (q, k, v)), block_mask=mask)
        bits = np.asarray(getattr(out, "array", out)).view(np.uint16)
        q, k, v, out = ((x.astype(np.uint32) << 16).view(np.float32) for x in (q, k, v, bits))
    else:
        out = flash_attention(q, k, v, block_mask=mask)
        assert out.dtype == dtype
    assert_near(out, attention_reference(q, k, v, mask=seen)[0], dtype)


def test_beside_what_else_hides_keys(rng):
    q, k, v = inputs(rng)
    mask, seen = drawn(rng, 2, 4)
    i, j = np.arange(50)[:, None], np.arange(70)
    fine = rng.random((2, 1, 50, 70)) < 0.7
    for options, more in ((dict(causal=True), j <= i), (dict(causal=True, alignment="bottom_right"), j <= i + 20),
                          (dict(window_left=9, window_right=30), (j >= i - 9) & (j <= i + 30)), (dict(mask=fine), fine),
                          (dict(kv_lengths=[33, 0]), (j < np.array([33, 0])[:, None, None, None])),
                          (dict(causal=True, prefix=[5, 40]), (j <= i) | (j < np.array([5, 40])[:, None, None, None]))):
        assert_near(flash_attention(q, k, v, block_mask=mask, **options), attention_reference(q, k, v, mask=seen & more)[0])
    weights = attention_weights(q, k, block_mask=mask, causal=True)
    assert_near(weights, attention_reference(q, k, v, mask=seen & (j <= i))[1])
    assert (attention_weights(q, k, block_mask=mask, stage="scores") == -np.inf)[~seen].all()
    assert np.isfinite(attention_weights(q, k, block_mask=mask, stage="scaled")).all()


def test_lists_are_read_where_they_are_with_any_strides(rng):
    q, k, v = inputs(rng)
    mask, _ = drawn(rng, 1, 4)
    want = flash_attention(q, k, v, block_mask=mask)
    spread = lambda x: np.repeat(x, 2, axis=-1)[..., ::2]  # noqa: E731
    read_only = [x.copy() for x in mask[:2]]
    for x in read_only:
        x.flags.writeable = False
    for offsets, columns in ((spread(mask.row_offsets), spread(mask.columns)), read_only,
                             (np.broadcast_to(mask.row_offsets, (2, *mask.row_offsets.shape[1:])), mask.columns),
                             (mask.row_offsets.tolist(), mask.columns.tolist()), (mask.row_offsets.astype(np.int16), mask.columns)):
        assert (flash_attention(q, k, v, block_mask=BlockMask(offsets, columns, 16, 16)) == want).all()
    one, seen = drawn(rng)
    for heads in (2, 4):
        repeated = one._replace(row_offsets=np.broadcast_to(one.row_offsets, (2, heads, *one.row_offsets.shape[2:])))
        assert (flash_attention(q, k, v, block_mask=repeated) == flash_attention(q, k, v, block_mask=one)).all()
    queries = np.repeat(q.swapaxes(1, 2), 2, axis=3)[..., ::2].swapaxes(1, 2)
    assert_near(flash_attention(queries, k, v, block_mask=one), attention_reference(q, k, v, mask=seen)[0])


def test_a_mask_of_all_blocks_changes_nothing_but_rounding(rng):
    q, k, v = inputs(rng)
    everything = BlockMask.from_pattern(50, 70)
    assert_near(flash_attention(q, k, v, block_mask=everything), attention_reference(q, k, v)[0])
    assert (flash_attention(q, k, v, block_mask=None) == flash_attention(q, k, v)).all()


def test_the_plan_knows_the_blocks(rng):
    arrays = dict(zip(("query", "key", "value"), inputs(rng, query_len=512, kv_len=512)))

    def plan(**options):
        tensors, numbers = split_options("plan", options, ("block_mask",))
        return core_call(read({**arrays, **tensors})[1], numbers).plan(Context(1))

    assert plan(block_mask=BlockMask.from_pattern(512, 512, window_left=63)) != plan()
    with pytest.raises(ValueError, match="block_mask.columns"):
        plan(block_mask=BlockMask([[[0, 1] + [1] * 7]], [8], 64, 64))


def test_pages_and_sequences_end_to_end(rng):
    lengths, page = [40, 13], 8
    q, k, v = inputs(rng, batch=2, query_len=16, kv_len=40, dim=16)
    mask, seen = drawn(rng, 2, 1, query_len=16, kv_len=40, block_q=4, block_kv=6)
    table = rng.permutation(10).reshape(2, 5)
    caches = [np.full((10, page, 2, 16), np.nan, np.float32) for _ in "kv"]
    for b, length in enumerate(lengths):
        for j in range(length):
            for cache, x in zip(caches, (k, v)):
                cache[table[b, j // page], j % page] = x[b, :, j]
    seen = seen & (np.arange(40) < np.array(lengths)[:, None, None, None])
    got = paged_attention(q, *caches, table, lengths, causal=False, block_mask=mask)
    assert_near(got, attention_reference(q, k, v, mask=seen)[0])

    flat = lambda x, ends: np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(ends)])  # noqa: E731
    got = flash_attention(flat(q, (16, 7)), flat(k, lengths), flat(v, lengths), cu_seqlens_q=[0, 16, 23], cu_seqlens_k=[0, 40, 53],
                          block_mask=mask)
    assert_near(got, flat(attention_reference(q, k, v, mask=seen)[0], (16, 7)))


# ---- reported cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [129, 200, 255])
def test_case_b25_the_tail_of_the_keys(rng, length):
    q, k, v = inputs(rng, query_len=length, kv_len=length)
    mask = BlockMask.from_pattern(length, length, block_q=128, block_kv=128, causal=True)
    seen = np.tri(length, dtype=bool)
    assert_near(flash_attention(q, k, v, causal=True, block_mask=mask), attention_reference(q, k, v, mask=seen)[0])
    tail = lists_of(np.broadcast_to([False, True], (1, 1, 2, 2)), 128, 128)
    assert_near(flash_attention(q, k, v, block_mask=tail), attention_reference(q, k[:, :, 128:], v[:, :, 128:])[0])


def test_case_b45_offsets_beyond_32_bits(rng):
    length, rows = 97_220, slice(45_000 // 64 * 64, 45_000 // 64 * 64 + 64)
    q, k, v = (rng.standard_normal((1, 1, length, 16), dtype=np.float32) for _ in "qkv")
    mask = BlockMask.from_pattern(length, length, documents=np.append(np.arange(0, length, 64), length))
    got = flash_attention(q, k, v, block_mask=mask)
    assert_near(got[:, :, rows], attention_reference(q[:, :, rows], k[:, :, rows], v[:, :, rows])[0])
    last = slice(length // 64 * 64, length)
    assert_near(got[:, :, last], attention_reference(q[:, :, last], k[:, :, last], v[:, :, last])[0])


@pytest.mark.parametrize("block", [1, 4])
def test_case_b59_the_last_row_of_a_sparse_mask(rng, block):
    q, k, v = inputs(rng, query_len=16, kv_len=12, batch=1)
    fine = rng.random((1, 2, 16, 12)) < 0.1
    mask = BlockMask.from_mask(fine, block, block)
    options = {} if block == 1 else {"mask": np.repeat(fine, 2, axis=1)}
    seen = np.repeat(fine, 2, axis=1)
    assert_near(flash_attention(q, k, v, block_mask=mask, **options), attention_reference(q, k, v, mask=seen)[0])


@pytest.mark.parametrize("block", [1, 4, 16, 64, 128])
def test_case_b60_blocks_finer_than_the_tile(rng, block):
    for length in (64, 96):
        q, k, v = inputs(rng, query_len=length, kv_len=length)
        mask, seen = drawn(rng, query_len=length, kv_len=length, block_q=block, block_kv=block)
        assert_near(flash_attention(q, k, v, block_mask=mask), attention_reference(q, k, v, mask=seen)[0])
    with pytest.raises(TypeError, match="block_q"):
        BlockMask(mask.row_offsets, mask.columns)  # the sizes are never guessed


def test_a_predicate_is_exact_or_refused(rng):
    q, k, v = inputs(rng, query_len=70)
    causal = BlockMask.from_predicate(lambda i, j: i >= j, 70, 70, 16, 16)
    want = attention_reference(q, k, v, mask=np.tri(70, dtype=bool))[0]
    assert causal.partial.columns.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="^flash_attention: block_mask is of a predicate that shows 5 of 15 blocks only in part"):
        flash_attention(q, k, v, block_mask=causal)
    assert_near(flash_attention(q, k, v, block_mask=causal.block_mask, causal=True), want)
    assert_near(flash_attention(q, k, v, block_mask=causal.block_mask, mask=np.tri(70, dtype=bool)), want)
    whole = BlockMask.from_predicate(lambda i, j: i // 16 >= j // 16, 70, 70, 16, 16)
    seen = np.arange(70)[:, None] // 16 >= np.arange(70) // 16
    assert_near(flash_attention(q, k, v, block_mask=whole), attention_reference(q, k, v, mask=seen)[0])


# ---- what is refused -------------------------------------------------------------------------------------------------

X = np.zeros((1, 2, 6, 4), np.float32)
KEYS = np.zeros((1, 2, 10, 4), np.float32)
OFFSETS, COLUMNS = np.array([[[0, 2, 3, 5]]]), np.array([0, 2, 1, 0, 1])


def attend(row_offsets=OFFSETS, columns=COLUMNS, block_q=2, block_kv=3):
    return flash_attention(X, KEYS, KEYS, block_mask=BlockMask(row_offsets, columns, block_q, block_kv))


REFUSED = {
    "kind": (lambda: flash_attention(X, X, X, block_mask=[1, 2]), TypeError,
             "flash_attention: block_mask is [1, 2] (list), must be a BlockMask of row_offsets, columns, block_q, block_kv"),
    "dense": (lambda: flash_attention_score(X, X, X, input_layout="BNSD", block_mask=np.ones((2, 2), bool)), TypeError,
              "flash_attention_score: block_mask is ndarray [2, 2] (ndarray), must be a BlockMask"),
    "size": (lambda: attend(block_q=2.0), TypeError, "flash_attention: block_mask.block_q is 2.0 (float), must be an integer"),
    "zero": (lambda: attend(block_kv=0), ValueError, "block_mask.block_kv is 0, must be 1 to 2^56"),
    "no_offsets": (lambda: attend(row_offsets=None), TypeError,
                   "flash_attention: block_mask.row_offsets must be integers (int32 or int64), but is None"),
    "no_columns": (lambda: attend(columns=None), TypeError, "flash_attention: block_mask.columns must be integers"),
    "floats": (lambda: attend(columns=COLUMNS.astype(float)), TypeError,
               "flash_attention: block_mask.columns must be integers (int32 or int64), but is float64"),
    "rank": (lambda: attend(row_offsets=OFFSETS[0]), ValueError, "block_mask.row_offsets has rank 2, must be 3"),
    "rank_of_columns": (lambda: attend(columns=COLUMNS[None]), ValueError, "block_mask.columns has rank 2, must be 1"),
    "heads": (lambda: attend(row_offsets=OFFSETS.repeat(3, axis=1)), ValueError,
              "block_mask.row_offsets dim 1 is 3, but must be 1, "),
    "batch": (lambda: attend(row_offsets=OFFSETS.repeat(2, axis=0)), ValueError,
              "block_mask.row_offsets dim 0 is 2, but must be 1 or batch = 1"),
    "rows": (lambda: attend(block_q=3), ValueError, "block_mask.row_offsets dim 2 is 4, but must be 3: 2 blocks of 3 queries"),
    "falls": (lambda: attend([[[0, 3, 2, 5]]], [0, 1, 2, 3, 0]), ValueError,
              "block_mask.row_offsets[0][0][2] is 2, less than block_mask.row_offsets[0][0][1] = 3"),
    "beyond": (lambda: attend(row_offsets=[[[0, 2, 3, 6]]]), ValueError,
               "block_mask.row_offsets[0][0][3] is 6, must be 0 to 5, the columns"),
    "outside": (lambda: attend(columns=[0, 4, 1, 0, 1]), ValueError,
                "block_mask.columns[1] is 4, but kv_len = 10 has 4 blocks of 3 keys"),
    "negative": (lambda: attend(columns=[0, 2, -1, 0, 1]), ValueError, "block_mask.columns[2] is -1"),
    "twice": (lambda: attend(columns=[2, 2, 1, 0, 1]), ValueError,
              "block_mask.columns[1] is 2, not more than block_mask.columns[0] = 2 of the same row"),
    "pattern_window": (lambda: BlockMask.from_pattern(4, 4, window_left=-1), ValueError,
                       "BlockMask.from_pattern: window_left is -1, must be 0 to 2^56"),
    "pattern_global": (lambda: BlockMask.from_pattern(4, 4, global_tokens=-1), ValueError,
                       "BlockMask.from_pattern: global_tokens is -1, must be 0 to 2^56"),
    "pattern_block": (lambda: BlockMask.from_pattern(4, 4, block_q=0), ValueError,
                      "BlockMask.from_pattern: block_q is 0, must be 1"),
    "pattern_number": (lambda: BlockMask.from_pattern(4.5, 4), TypeError, "BlockMask.from_pattern: query_len is 4.5 (float)"),
    "pattern_alignment": (lambda: BlockMask.from_pattern(4, 4, alignment="left"), ValueError,
                          'BlockMask.from_pattern: alignment is "left", must be one of top_left, bottom_right'),
    "pattern_documents": (lambda: BlockMask.from_pattern(4, 4, documents=[0, 3, 2]), ValueError,
                          "BlockMask.from_pattern: documents[2] is 2, must be 3 to kv_len = 4"),
    "pattern_documents_kind": (lambda: BlockMask.from_pattern(4, 4, documents=[0.5]), TypeError,
                               "BlockMask.from_pattern: documents must be integers"),
    "mask_dtype": (lambda: BlockMask.from_mask(np.zeros((2, 2), np.float32), 1, 1), ValueError,
                   "BlockMask.from_mask: mask is f32, but must be bool"),
    "mask_rank": (lambda: BlockMask.from_mask(np.zeros(2, bool), 1, 1), ValueError,
                  "BlockMask.from_mask: mask has rank 1, must be 2 to 4"),
    "mask_none": (lambda: BlockMask.from_mask(None, 1, 1), TypeError, "BlockMask.from_mask: mask is None, but an array is needed"),
    "predicate": (lambda: BlockMask.from_predicate(3, 4, 4, 2, 2), TypeError,
                  "BlockMask.from_predicate: predicate is 3 (int), must be"),
    "predicate_dtype": (lambda: BlockMask.from_predicate(lambda q, k: q - k, 4, 4, 2, 2), ValueError,
                        "BlockMask.from_predicate: predicate gave int64 [4, 4], must be bool that broadcasts to [4, 4]"),
    "predicate_shape": (lambda: BlockMask.from_predicate(lambda q, k: (q > k)[:3], 4, 4, 2, 2), ValueError,
                        "BlockMask.from_predicate: predicate gave bool [3, 4], must be bool that broadcasts to [4, 4]"),
    "predicate_size": (lambda: BlockMask.from_predicate(lambda q, k: q > k, 4, -4, 2, 2), ValueError,
                       "BlockMask.from_predicate: kv_len is -4, must be at least 0"),
    "text_column": (lambda: SMALL.text(6), ValueError, "BlockMask.text: block_mask.columns[1] is 2, must be 0 to 1"),
    "text_offsets": (lambda: SMALL._replace(columns=[0]).text(), ValueError,
                     "block_mask.row_offsets[0][0][1] is 2, must be 0 to 1"),
    "text_falls": (lambda: SMALL._replace(row_offsets=[[[1, 0]]]).text(), ValueError,
                   "block_mask.row_offsets[0][0][1] is 0, less than the one before it, 1"),
    "text_head": (lambda: SMALL.text(head=2), ValueError, "BlockMask.text: head is 2, but block_mask.row_offsets has 2"),
    "text_most": (lambda: SMALL.text(most=0), ValueError, "BlockMask.text: most is 0, must be at least 1"),
    "png_side": (lambda: SMALL.png(side=0), ValueError, "BlockMask.png: side is 0, must be at least 1"),
    "expanded": (lambda: SMALL.expanded(7, 10), ValueError,
                 "BlockMask.expanded: block_mask.row_offsets dim 2 is 4, but must be 5: 4 blocks of 2 queries, of query_len = 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_how(case):
    call, kind, message = REFUSED[case]
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_nothing_is_written_on_refusal():
    cache, out = np.zeros((2, 5, 2, 4), np.float32), np.full(X.shape, 7, np.float32)
    with pytest.raises(ValueError, match="paged_attention: .*block_mask.columns"):
        paged_attention(X, cache, cache, [[0, 1]], [10], out=out, block_mask=BlockMask(OFFSETS, COLUMNS + 3, 2, 3))
    assert (out == 7).all()

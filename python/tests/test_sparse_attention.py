"""sparse_flash_attention against its equation in float64."""

import numpy as np
import pytest

from ops_transformer import Context, Tagged
from ops_transformer.flash_attention import SparseAttention, flash_attention, lightning_indexer, sparse_flash_attention
from ops_transformer.kv_cache import gather_pa_kv_cache, new_pages, paged_attention, scatter_pa_kv_cache


def expected(q, k, v, lists, block, causal, scale):
    """Of one sequence: q [heads, queries, dim], k and v [kv_heads, keys, dim], lists [queries, kv_heads, count]."""
    heads, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    out, lse = np.zeros((heads, queries, v.shape[2])), np.full((heads, queries), -np.inf)
    for h in range(heads):
        kv = h * k.shape[0] // heads
        for i in range(queries):
            chosen = [j for x in lists[i, kv] if x >= 0 for j in range(x * block, min((x + 1) * block, keys))]
            chosen = [j for j in chosen if not causal or j <= i + keys - queries]
            if chosen:
                s = scale * (k[kv, chosen].astype(np.float64) @ q[h, i].astype(np.float64))
                p = np.exp(s - s.max())
                out[h, i], lse[h, i] = p @ v[kv, chosen].astype(np.float64) / p.sum(), s.max() + np.log(p.sum())
    return out, lse


def draw_lists(rng, queries, kv_heads, count, blocks):
    lists = np.full((queries, kv_heads, count), -1, np.int32)
    for row in lists.reshape(-1, count):
        n = rng.integers(0, min(count, blocks) + 1)
        row[:n] = rng.permutation(blocks)[:n]
    return lists


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 16])
def test_against_the_equation(rng, causal, block):
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((2, 6, 5, 24), (2, 2, 70, 24), (2, 2, 70, 8)))
    lists = np.stack([draw_lists(rng, 5, 2, 7, -(-70 // block)) for _ in range(2)])
    got = sparse_flash_attention(q, k, v, lists, sparse_block_size=block, causal=causal, return_lse=True)
    assert isinstance(got, SparseAttention)
    for b in range(2):
        out, lse = expected(q[b], k[b], v[b], lists[b], block, causal, 24 ** -0.5)
        assert np.allclose(got.out[b], out, atol=1e-5) and np.allclose(got.softmax_lse[b], lse, atol=1e-5)
    again = sparse_flash_attention(q, k, v, lists, sparse_block_size=block, causal=causal, context=Context(3))
    assert (again == got.out).all()


def test_ropes_values_of_keys_pages_and_sequences_end_to_end(rng):
    """One latent KV head whose first 16 columns are the values."""
    q, cache = rng.standard_normal((7, 4, 24), np.float32), rng.standard_normal((60, 1, 24), np.float32)
    starts_q, starts_k = [0, 3, 7], [0, 20, 60]
    lists = np.concatenate([draw_lists(rng, n, 1, 9, m) for n, m in ((3, 20), (4, 40))])
    keys, rope = cache[..., :16], cache[..., 16:]
    want = np.concatenate([
        expected(q[a:b].swapaxes(0, 1), cache[c:d].swapaxes(0, 1), keys[c:d].swapaxes(0, 1), lists[a:b], 1, True, 24 ** -0.5)[0]
        .swapaxes(0, 1) for a, b, c, d in ((0, 3, 0, 20), (3, 7, 20, 60))])
    got = sparse_flash_attention(q, cache, keys, lists, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    assert np.allclose(got, want, atol=1e-5)
    queries, query_rope = np.ascontiguousarray(q[..., :16]), np.ascontiguousarray(q[..., 16:])
    for key_rope in (rope, np.ascontiguousarray(rope)):  # columns behind the keys, and a tensor of its own
        apart = sparse_flash_attention(queries, keys, keys, lists, query_rope=query_rope, key_rope=key_rope,
                                       cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        assert (apart == got).all()
    pages, table = np.full((12, 8, 1, 24), np.nan, np.float32), rng.permutation(12)[:10].reshape(2, 5)
    for b in range(2):
        for j in range(starts_k[b + 1] - starts_k[b]):
            pages[table[b, j // 8], j % 8] = cache[starts_k[b] + j]
    paged = sparse_flash_attention(q, pages, pages[..., :16], lists, block_table=table, kv_lengths=[20, 40], cu_seqlens_q=starts_q)
    assert (paged == got).all()


def test_with_the_indexer(rng):
    q, k = rng.standard_normal((1, 4, 6, 16), np.float32), rng.standard_normal((1, 1, 50, 16), np.float32)
    everything = lightning_indexer(q, k, np.ones((1, 4, 6), np.float32), 50)
    dense = flash_attention(q, k, k, causal=True, alignment="bottom_right")
    assert np.allclose(sparse_flash_attention(q, k, k, everything), dense, atol=1e-6)
    bits = [Tagged((x.view(np.uint32) >> 16).astype(np.uint16), "bf16") for x in (q, k)]
    assert sparse_flash_attention(bits[0], bits[1], bits[1], everything).array.shape == q.shape


def paged_problem(rng, layout, dtype, block):
    """(query, pages, lists, lengths, table, what the equation gives of the numbers that the cache holds)."""
    lengths, size = [70, 33], 32
    q, table = rng.standard_normal((2, 4, 3, 64), np.float32), rng.permutation(7)[:6].reshape(2, 3)
    pages = new_pages(7, size, 2, 64, dtype=dtype, layout=layout)
    for b, n in enumerate(lengths):
        keys, values = rng.standard_normal((2, n, 2, 64), np.float32)
        slots = [int(table[b, j // size]) * size + j % size for j in range(n)]
        scatter_pa_kv_cache(keys, values, slots, *pages, layout=layout)
    lists = np.stack([draw_lists(rng, 3, 2, 5, -(-n // block)) for n in lengths])
    k, v = gather_pa_kv_cache(*pages, table, lengths, layout=layout, dtype="f32")
    starts = np.cumsum([0, *lengths])
    want = [expected(q[b], *(x[starts[b]:starts[b + 1]].swapaxes(0, 1) for x in (k, v)), lists[b], block, True, 0.125) for b in (0, 1)]
    return q, pages, lists, lengths, table, want


@pytest.mark.parametrize("layout, dtype, block", [
    ("norm", "int8", 1), ("norm", "int8_offset", 4), ("norm", "int4", 1), ("norm", "int4_offset", 16), ("norm", "f8_e4m3", 1),
    ("norm", "bf16", 2), ("panel32", "int8", 32), ("panel32", "f8_e5m2", 32), ("panel32", "f32", 64)])
def test_pages_of_every_format(rng, layout, dtype, block):
    q, pages, lists, lengths, table, want = paged_problem(rng, layout, dtype, block)
    got = sparse_flash_attention(q, *pages, lists, sparse_block_size=block, block_table=table, kv_lengths=lengths, layout=layout,
                                 return_lse=True)
    for b, (out, lse) in enumerate(want):
        assert np.allclose(got.out[b], out, atol=2e-4) and np.allclose(got.softmax_lse[b], lse, atol=2e-4)
    again = paged_attention(q, *pages, table, lengths, sparse_indices=lists, sparse_block_size=block, layout=layout, context=Context(3))
    assert (again == got.out).all()
    varlen = sparse_flash_attention(q.swapaxes(1, 2).reshape(6, 4, 64), *pages, lists.reshape(6, 2, 5), sparse_block_size=block,
                                    block_table=table, kv_lengths=lengths, layout=layout, cu_seqlens_q=[0, 3, 6])
    assert np.allclose(varlen.reshape(2, 3, 4, 64).swapaxes(1, 2), got.out, atol=1e-6)


def test_pages_that_are_refused(rng):
    q, pages, lists, lengths, table, _ = paged_problem(rng, "panel32", "int8", 32)
    given = dict(block_table=table, kv_lengths=lengths, layout="panel32")
    for options, words in (
            (dict(given, sparse_block_size=16), "sparse_block_size is 16, must be a multiple of 32 for panel32 pages"),
            (dict(given, sparse_block_size=32, layout="pages"), 'layout is "pages", must be one of norm, panel32'),
            (dict(layout="panel32"), 'layout is "panel32", but block_table is not given'),
            (dict(kv_lengths=lengths), "key and value are ScaledPages, but block_table is not given")):
        with pytest.raises(ValueError, match=f"^sparse_flash_attention: (flash_attention_forward: )?{words}"):
            sparse_flash_attention(q, *pages, lists, **options)
    with pytest.raises(ValueError, match="^paged_attention: .*sparse_block_size is 3, must be 1 or a power of two"):
        paged_attention(q, *pages, table, lengths, layout="panel32", sparse_indices=lists, sparse_block_size=3)


def test_refusals(rng):
    q, k, lists = np.ones((1, 2, 1, 8), np.float32), np.ones((1, 1, 5, 8), np.float32), np.array([[[[0, 4]]]], np.int32)
    sparse_flash_attention(q, k, k, lists)
    for call, words in (
            (lambda: sparse_flash_attention(q, k, k, lists + 1), r"sparse_indices\[0\]\[0\]\[0\]\[1\] is 5, but sequence 0 has 5 blocks"),
            (lambda: sparse_flash_attention(q, k, k, lists * 0), r"sparse_indices\[0\]\[0\]\[0\]\[1\] is 0, as is sparse_indices\["),
            (lambda: sparse_flash_attention(q, k, k, lists.astype(np.int64)), "sparse_indices is i64, but must be i32"),
            (lambda: sparse_flash_attention(q, k, k, lists, sparse_block_size=3), "sparse_block_size is 3, must be 1 or a power of two"),
            (lambda: sparse_flash_attention(q, k, k, lists, query_rope=q), "query_rope and key_rope go together"),
            (lambda: sparse_flash_attention(q[0], k, k, lists), r"query must be \[batch, num_heads, query_len, head_dim\]")):
        with pytest.raises(ValueError, match="^sparse_flash_attention: .*" + words):
            call()

"""lightning_indexer against its equation in float64."""

import numpy as np
import pytest

from ops_transformer import Context, Tagged
from ops_transformer.flash_attention import SelectedKeys, lightning_indexer


def small(rng, *shape):
    """Small integers, with which every score is exact, and many are equal."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def selected(q, k, w, count, causal):
    """Of one sequence and one key head: q [heads, queries, dim], k [keys, dim], w [heads, queries]."""
    scores = np.einsum("hq,hqk->qk", w.astype(np.float64), np.maximum(np.einsum("hqd,kd->hqk", q.astype(np.float64), k), 0))
    indices, values = np.full((q.shape[1], count), -1), np.full((q.shape[1], count), -np.inf)
    for i, row in enumerate(scores):
        seen = row[: max(0, i + 1 + k.shape[0] - q.shape[1])] if causal else row
        best = np.argsort(-seen, kind="stable")[:count]
        indices[i, : len(best)], values[i, : len(best)] = best, seen[best]
    return indices, values


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_against_the_equation(rng, causal, kv_heads):
    q, k, w = small(rng, 2, 6, 9, 16), small(rng, 2, kv_heads, 130, 16), small(rng, 2, 6, 9)
    got = lightning_indexer(q, k, w, 40, causal=causal, return_values=True)
    assert isinstance(got, SelectedKeys) and got.indices.dtype == np.int32 and got.indices.shape == (2, 9, kv_heads, 40)
    for b in range(2):
        for h in range(kv_heads):
            heads = slice(h * 6 // kv_heads, (h + 1) * 6 // kv_heads)
            indices, values = selected(q[b, heads], k[b, h], w[b, heads], 40, causal)
            assert (got.indices[b, :, h] == indices).all() and (got.values[b, :, h] == values).all()
    assert (lightning_indexer(q, k, w, 40, causal=causal, block_q=2, block_kv=7, context=Context(3)) == got.indices).all()


def test_lengths_sequences_end_to_end_and_pages(rng):
    kv_lengths, query_lengths, block = [50, 7], [4, 2], 8
    q, k, w = small(rng, 2, 3, 4, 8), small(rng, 2, 1, 56, 8), small(rng, 2, 3, 4)
    want = np.full((2, 4, 1, 20), -1)
    for b in range(2):
        n, m = query_lengths[b], kv_lengths[b]
        want[b, :n, 0] = selected(q[b, :, :n], k[b, 0, :m], w[b, :, :n], 20, True)[0]
    assert (lightning_indexer(q, k, w, 20, kv_lengths=kv_lengths, query_lengths=query_lengths) == want).all()

    flat = lambda x: np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(query_lengths)])  # noqa: E731
    keys = np.concatenate([k[b, 0, :m, None] for b, m in enumerate(kv_lengths)])
    rows = np.concatenate([want[b, :n] for b, n in enumerate(query_lengths)])
    assert (lightning_indexer(flat(q), keys, flat(w), 20, cu_seqlens_q=[0, 4, 6], cu_seqlens_k=[0, 50, 57]) == rows).all()

    table = rng.permutation(14).reshape(2, 7)
    pages = np.full((14, block, 1, 8), np.nan, np.float32)
    for b, m in enumerate(kv_lengths):
        for j in range(m):
            pages[table[b, j // block], j % block] = k[b, :, j]
    got = lightning_indexer(flat(q), pages, flat(w), 20, block_table=table, kv_lengths=kv_lengths, cu_seqlens_q=[0, 4, 6])
    assert (got == rows).all()


def test_sixteen_bits_and_layouts_that_are_views(rng):
    q, k, w = small(rng, 1, 9, 64, 32), small(rng, 1, 200, 1, 32), small(rng, 1, 9, 64)  # BSND, as a device has them
    want = lightning_indexer(q.swapaxes(1, 2), k.swapaxes(1, 2), w.swapaxes(1, 2), 30)
    assert (want[0, :, 0] == selected(q[0].swapaxes(0, 1), k[0, :, 0], w[0].T, 30, True)[0]).all()
    half = [x.astype(np.float16).swapaxes(1, 2) for x in (q, k, w)]
    got = lightning_indexer(*half, 30, return_values=True, values_dtype="f16")
    assert (got.indices == want).all() and got.values.dtype == np.float16
    bits = [Tagged((x.view(np.uint32) >> 16).astype(np.uint16).swapaxes(1, 2), "bf16") for x in (q, k, w)]
    assert (lightning_indexer(*bits, 30) == want).all()


def test_ties_nan_and_nothing():
    key = np.array([2, np.nan, 5, 2, -1, np.inf], np.float32).reshape(1, 1, 6, 1)
    one = np.ones((1, 1, 1, 1), np.float32)
    got = lightning_indexer(one, key, one[..., 0], 8, return_values=True)
    assert got.indices.ravel().tolist() == [5, 2, 0, 3, 4, 1, -1, -1]
    assert np.isnan(got.values.ravel()[5]) and (got.values.ravel()[6:] == -np.inf).all()
    assert lightning_indexer(one, key[:, :, :0], one[..., 0], 3).ravel().tolist() == [-1, -1, -1]
    assert lightning_indexer(one, key, one[..., 0], 0).shape == (1, 1, 1, 0)


def test_what_is_refused():
    q, k, w = np.ones((1, 4, 3, 8), np.float32), np.ones((1, 1, 5, 8), np.float32), np.ones((1, 4, 3), np.float32)
    for call, message in (
            (lambda: lightning_indexer(q, k[..., :7], w), "lightning_indexer: key dim 3 .head_dim. is 7, but query set head_dim = 8"),
            (lambda: lightning_indexer(q, k, w[:, :2]), "lightning_indexer: weights dim 1 .num_heads. is 2, but query set num_heads = 4"),
            (lambda: lightning_indexer(q, k, w, -1), "lightning_indexer: count is -1, must not be negative"),
            (lambda: lightning_indexer(q[0], k, w), r"lightning_indexer: query must be \[batch, num_heads, query_len, head_dim\]"),
            (lambda: lightning_indexer(q, k, w, kv_lengths=[6]), r"lightning_indexer: kv_lengths\[0\] is 6, must be 0 to 5"),
            (lambda: lightning_indexer(q, k, w, query_lengths=[4]), r"lightning_indexer: query_lengths\[0\] is 4, must be 0 to 3"),
            (lambda: lightning_indexer(q, k, w, block_table=[[0]]), "lightning_indexer: "),
            (lambda: lightning_indexer(q, k, w, values_dtype="f64"), 'lightning_indexer: values_dtype is "f64"'),
            (lambda: lightning_indexer(q.astype(np.float64), k, w), "lightning_indexer: query is f64, but must be f32, bf16 or f16")):
        with pytest.raises(ValueError, match=message):
            call()


def test_torch_tensors_without_gradients(torch, rng):
    arrays = small(rng, 1, 4, 3, 8), small(rng, 1, 1, 50, 8), small(rng, 1, 4, 3)
    tensors = [torch.from_numpy(x) for x in arrays]
    got = lightning_indexer(*tensors, 10)
    assert isinstance(got, torch.Tensor) and got.dtype == torch.int32
    assert (got.numpy() == lightning_indexer(*arrays, 10)).all()
    with pytest.raises(RuntimeError, match="lightning_indexer: key requires gradients"):
        lightning_indexer(tensors[0], tensors[1].clone().requires_grad_(), tensors[2], 10)

"""Trees of draft tokens against the equation in float64: flash_attention and paged_attention with tree_mask."""

import numpy as np
import pytest

from ops_transformer import Context
from ops_transformer.flash_attention import flash_attention, tree_mask
from ops_transformer.kv_cache import paged_attention

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6], [0, 1, 4, 7]]


def expected(q, k, v):
    """Of one sequence whose queries are the tree: q [heads, 8, dim], k and v [heads, keys, dim]."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    context = k.shape[1] - len(PATHS)
    for i, path in enumerate(PATHS):
        seen = [*range(context), *(context + token for token in path)]
        s = np.einsum("hd,hkd->hk", q[:, i].astype(np.float64), k[:, seen].astype(np.float64)) * q.shape[-1] ** -0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, i] = np.einsum("hk,hkd->hd", p / p.sum(-1, keepdims=True), v[:, seen].astype(np.float64))
    return out


def test_words_are_those_of_the_paths():
    words = tree_mask(PARENTS)
    assert words.dtype == np.int64 and words.tolist() == [sum(1 << token for token in path) for path in PATHS]
    assert tree_mask([PARENTS, PARENTS]).shape == (2, 8)
    assert tree_mask(list(range(-1, 63)))[63] == -1  # a chain of 64: all of them
    assert tree_mask(np.zeros((3, 0), np.int32)).shape == (3, 0)


@pytest.mark.parametrize("keys", [8, 9, 300])
def test_dense_and_pages(rng, keys):
    q, k, v = (rng.standard_normal((2, 4, n, 16), np.float32) for n in (8, keys, keys))
    want = np.stack([expected(q[b], k[b], v[b]) for b in range(2)])
    words = tree_mask([PARENTS, PARENTS])
    got = flash_attention(q, k, v, True, alignment="bottom_right", tree_mask=words)
    assert np.allclose(got, want, atol=1e-5)
    assert (flash_attention(q, k, v, True, alignment="bottom_right", tree_mask=words, context=Context(3)) == got).all()
    pages = -(-keys // 16)
    caches = [np.zeros((2 * pages, 16, 4, 16), np.float32) for _ in range(2)]
    table = rng.permutation(2 * pages).reshape(2, pages)
    for cache, rows in zip(caches, (k, v)):
        for b in range(2):
            for j in range(keys):
                cache[table[b, j // 16], j % 16] = rows[b, :, j]
    assert (paged_attention(q, *caches, table, [keys, keys], tree_mask=words) == got).all()


def test_beside_sequences_without_a_tree(rng):
    q, k, v = (rng.standard_normal((108, 4, 16), np.float32) for _ in range(3))
    starts = [0, 100, 108]
    words = np.concatenate([np.full(100, -1), tree_mask(PARENTS)])
    got = flash_attention(q, k, v, True, alignment="bottom_right", cu_seqlens_q=starts, cu_seqlens_k=starts, tree_mask=words)
    alone = flash_attention(*(x[None, :100].swapaxes(1, 2) for x in (q, k, v)), True)
    assert (got[:100] == alone[0].swapaxes(0, 1)).all()
    tree = expected(*(x[100:].swapaxes(0, 1) for x in (q, k, v)))
    assert np.allclose(got[100:], tree.swapaxes(0, 1), atol=1e-5)


@pytest.mark.parametrize("call, text", [
    (lambda: tree_mask([0]), "tree_mask: parents says 0 of token 0, must be -1 to -1"),
    (lambda: tree_mask([-1, 1]), "tree_mask: parents says 1 of token 1, must be -1 to 0"),
    (lambda: tree_mask([-1] * 65), r"tree_mask: parents has shape \[65\], must be"),
    (lambda: flash_attention(*(np.ones((1, 1, 2, 4), np.float32),) * 3, tree_mask=[[1, 4]]),
     r"tree_mask\[0\]\[1\] is 4, but sequence 0 has query_len = 2 draft tokens"),
])
def test_refusals(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_torch_tensors_and_gradients(rng):
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(rng.standard_normal((1, 2, 8, 16), np.float32))
    words = torch.from_numpy(tree_mask([PARENTS]))
    want = expected(*(q[0].numpy(),) * 3)
    assert np.allclose(flash_attention(q, q, q, tree_mask=words)[0], want, atol=1e-5)
    out = flash_attention(q.clone().requires_grad_(), q, q, tree_mask=words)
    assert np.allclose(out[0].detach(), want, atol=1e-5)
    with pytest.raises(Exception, match="tree_mask has no gradient"):
        out.sum().backward()

"""Sequences whose block tables begin with the same blocks: paged_attention with shared_prefix."""

import numpy as np
import pytest

from ops_transformer import Context
from ops_transformer.kv_cache import paged_attention

BATCH, HEADS, KV_HEADS, DIM, BLOCK = 4, 4, 2, 16, 16


def call(rng, shared_blocks=40):
    """Arguments of a call whose sequences share 40 blocks, and the equation in float64."""
    lengths = [shared_blocks * BLOCK + n for n in (1, 17, 40, 5)]
    columns = shared_blocks + 3
    table = np.full((BATCH, columns), 10**6)
    table[:, :shared_blocks] = rng.permutation(shared_blocks)
    for b in range(BATCH):
        table[b, shared_blocks:] = shared_blocks + 3 * b + np.arange(3)
    q = rng.standard_normal((BATCH, HEADS, 1, DIM), np.float32)
    keys, values = (rng.standard_normal((shared_blocks + 3 * BATCH, BLOCK, KV_HEADS, DIM), np.float32) for _ in range(2))
    want = np.zeros(q.shape)
    for b, length in enumerate(lengths):
        k, v = (cache[table[b]].reshape(-1, KV_HEADS, DIM)[:length].astype(np.float64) for cache in (keys, values))
        for h in range(HEADS):
            s = k[:, h // 2] @ q[b, h, 0] * DIM**-0.5
            p = np.exp(s - s.max())
            want[b, h, 0] = p / p.sum() @ v[:, h // 2]
    return (q, keys, values, table, lengths), want


@pytest.mark.parametrize("shared", [-1, 0, 100, 640])
def test_found_told_and_off(rng, shared):
    arguments, want = call(rng)
    got = paged_attention(*arguments, shared_prefix=shared)
    assert np.allclose(got, want, atol=2e-6)
    assert (paged_attention(*arguments, shared_prefix=shared, context=Context(3)) == got).all()


def test_what_is_switched_off_has_the_bits_of_a_sequence_alone(rng):
    (q, keys, values, table, lengths), _ = call(rng)
    got = paged_attention(q, keys, values, table, lengths, shared_prefix=0)
    for b in range(BATCH):
        alone = paged_attention(q[b:b + 1], keys, values, table[b:b + 1], lengths[b:b + 1])
        assert (got[b] == alone[0]).all()


def test_a_table_that_says_otherwise_is_refused(rng):
    arguments, _ = call(rng)
    with pytest.raises(ValueError, match=r"block_table\[1\]\[40\] is 43, but block_table\[0\]\[40\] is 40 and shared_prefix = 641"):
        paged_attention(*arguments, shared_prefix=641)
    with pytest.raises(ValueError, match=r"shared_prefix is -2, must be"):
        paged_attention(*arguments, shared_prefix=-2)


def test_torch_gradients_are_those_of_the_call_that_shares_nothing(rng):
    torch = pytest.importorskip("torch")
    (q, keys, values, table, lengths), _ = call(rng)
    given = []
    for shared in (-1, 0):
        tensors = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, keys, values)]
        paged_attention(*tensors, torch.from_numpy(table), torch.tensor(lengths), shared_prefix=shared).square().sum().backward()
        given.append([t.grad.numpy() for t in tensors])
    for a, b in zip(*given):
        assert np.allclose(a, b, atol=1e-5)

"""ops_transformer.npu: gradients of attention over chosen keys, and tokens and pages with the bits of one layout, in plain torch."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import attention, near, seen_by  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402


def lists(rows, keys, count, causal_from=None):
    """int32 [rows, count]: some distinct indices below `keys`, then -1; and what they show, bool [rows, keys]."""
    indices, seen = torch.full((rows, count), -1, dtype=torch.int32), torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        some = torch.randperm(keys)[:min(count, keys) - i % 2]
        indices[i, :len(some)], seen[i, some] = some.to(torch.int32), True
    return indices, seen


@pytest.mark.parametrize("mode", [0, 3])
def test_sparse_attention(seeded, mode):
    batch, sq, skv, heads, width, rope = 2, 4, 9, 4, 16, 8
    q, k = torch.randn(batch, sq, heads, width, requires_grad=True), torch.randn(batch, skv, 1, width, requires_grad=True)
    qr, kr = torch.randn(batch, sq, heads, rope, requires_grad=True), torch.randn(batch, skv, 1, rope, requires_grad=True)
    found = [lists(sq, skv, 5) for _ in range(batch)]
    indices, seen = (torch.stack(x) for x in zip(*found))
    if mode == 3:
        seen = seen & seen_by(3, sq, skv)
    common = dict(query_rope=qr, key_rope=kr, sparse_mode=mode, attention_mode=2)
    out, largest, total = npu.npu_sparse_flash_attention(q, k, k, indices[:, :, None], 0.2, return_softmax_lse=True, **common)
    first = lambda x: x.transpose(1, 2)  # noqa: E731
    wide = torch.cat([q, qr], -1), torch.cat([k, kr], -1)
    want, lse = attention(first(wide[0]), first(wide[1]), first(k), seen[:, None], 0.2, lse=True)
    near(out, first(want))
    assert largest.shape == total.shape == (batch, 1, sq, heads)
    near((largest + total.log())[:, 0].transpose(1, 2)[lse > -1e30], lse[lse > -1e30], 4e-6)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(first(want), (q, k, qr, kr), grad.double())
    for got, r in zip(torch.autograd.grad(out, (q, k, qr, kr), grad), right):
        near(got, r, 4e-6)
    dq, dk, dv, dqr, dkr = npu.npu_sparse_flash_attention_grad(q, k, k, indices[:, :, None], grad, out, largest, total, 0.2, 1, qr, kr,
                                                               sparse_mode=mode, attention_mode=2)
    for got, r in zip((dq, dk + dv, dqr, dkr), right):
        near(got, r, 4e-6)
    # Tokens, pages, and sequences of several lengths.
    flat = npu.npu_sparse_flash_attention(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), indices.flatten(0, 1)[:, None], 0.2,
                                          query_rope=qr.flatten(0, 1), key_rope=kr.flatten(0, 1), sparse_mode=mode, attention_mode=2,
                                          layout_query="TND", layout_kv="TND", actual_seq_lengths_query=torch.tensor([4, 8], dtype=torch.int32),
                                          actual_seq_lengths_kv=torch.tensor([9, 18], dtype=torch.int32))[0]
    near(flat, out.flatten(0, 1))
    with torch.no_grad():
        pages, rope_pages = (torch.cat([x, x[:, :3]], 1).reshape(6, 4, 1, -1)[[2, 0, 1, 5, 3, 4]] for x in (k, kr))
        table = torch.tensor([[1, 2, 0], [4, 5, 3]], dtype=torch.int32)
        paged = npu.npu_sparse_flash_attention(q, pages, pages, indices[:, :, None], 0.2, block_table=table, layout_kv="PA_BSND",
                                               actual_seq_lengths_kv=torch.tensor([9, 9], dtype=torch.int32), query_rope=qr,
                                               key_rope=rope_pages, sparse_mode=mode, attention_mode=2)[0]
        near(paged, out)
        if mode == 0:
            short = npu.npu_sparse_flash_attention(q, k, k, indices[:, :, None], 0.2,
                                                   actual_seq_lengths_query=torch.tensor([4, 2], dtype=torch.int32), **common)[0]
            near(short[1, :2], out[1, :2])
            assert (short[1, 2:] == 0).all()
    with pytest.raises(ValueError, match="npu_sparse_flash_attention: attention_mode is 0, but only 2"):
        npu.npu_sparse_flash_attention(q, k, k, indices[:, :, None], 0.2)

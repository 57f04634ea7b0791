"""ops_transformer.npu: attention over chosen keys, the indexer, block masks and NSA, against plain torch in float64."""

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


@pytest.mark.parametrize("mode", [0, 3])
def test_indexer(seeded, mode):
    q, k, w = torch.randn(2, 4, 3, 16), torch.randn(2, 9, 1, 16), torch.randn(2, 4, 3)
    scores = torch.einsum("bsn,bsnj->bsj", w.double(), torch.relu(torch.einsum("bsnd,bjd->bsnj", q.double(), k[:, :, 0].double())))
    if mode == 3:
        scores = scores.masked_fill(~seen_by(3, 4, 9), -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)
    want = best.indices.masked_fill(best.values == -torch.inf, -1)
    indices, values = npu.npu_lightning_indexer(q, k, w, sparse_count=7, sparse_mode=mode, return_value=True)
    assert indices.dtype == torch.int32 and (indices[:, :, 0] == want[..., :7]).all()
    shown = indices[:, :, 0] >= 0
    near(values[:, :, 0][shown], best.values[..., :7][shown])
    flat, none = npu.npu_lightning_indexer(q.flatten(0, 1), k.flatten(0, 1), w.flatten(0, 1), sparse_count=7, sparse_mode=mode,
                                           layout_query="TND", layout_key="TND", actual_seq_lengths_query=torch.tensor([4, 8], dtype=torch.int32),
                                           actual_seq_lengths_key=torch.tensor([9, 18], dtype=torch.int32))
    assert (flat == indices.flatten(0, 1)).all() and none.numel() == 0
    pages = torch.cat([k, k[:, :3]], 1).reshape(6, 4, 1, 16)
    paged, _ = npu.npu_lightning_indexer(q, pages, w, sparse_count=7, sparse_mode=mode, layout_key="PA_BSND",
                                         block_table=torch.arange(6, dtype=torch.int32).view(2, 3),
                                         actual_seq_lengths_key=torch.tensor([9, 9], dtype=torch.int32))
    assert (paged == indices).all()
    with pytest.raises(NotImplementedError, match="npu_lightning_indexer_grad: the core's lightning_indexer has no gradient"):
        npu.npu_lightning_indexer_grad(q, k, q, indices, w)


def test_block_masks(seeded):
    q, k, v = (torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in ((4, 10), (2, 13), (2, 13)))
    mask = (torch.rand(2, 4, 3, 4) < 0.6).to(torch.int8)
    mask[..., 0] = 1
    seen = mask.bool().repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :10, :13]
    want, lse = attention(q, k, v, seen, 0.3, lse=True)
    out, got = npu.npu_block_sparse_attention(q, k, v, mask, [4, 4], q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=2,
                                              scale_value=0.3, softmax_lse_flag=1)
    near(out, want)
    near(got[..., 0], lse, 4e-6)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(want, (q, k, v), grad.double())
    found = npu.npu_block_sparse_attention_backward(grad, q, k, v, out, got, mask, [4, 4], None, None, "BNSD", "BNSD", 2, 0.3)
    for a, b in zip(found, right):
        near(a, b, 4e-6)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    flat, got = npu.npu_block_sparse_attention(*tokens, mask, [4, 4], num_key_value_heads=2, scale_value=0.3, actual_seq_lengths=[10, 10],
                                               actual_seq_lengths_kv=[13, 13])
    near(flat, want.transpose(1, 2).flatten(0, 1))
    assert got.shape == (20, 4, 1)
    # The default scale is 0: every seen key weighs the same.
    near(npu.npu_block_sparse_attention(q, k, v, mask, [4, 4], q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=2)[0],
         attention(q, k, v, seen, 0.0))
    with pytest.raises(ValueError, match="npu_block_sparse_attention: actual_seq_lengths must be specified"):
        npu.npu_block_sparse_attention(*tokens, mask, [4, 4], num_key_value_heads=2)


def windows(x, weight, block, stride, ends):
    rows, start = [], 0
    for end in ends:
        at = start
        while at + block <= end:
            rows.append(sum(weight[r].double()[:, None] * x[at + r].double() for r in range(block)))
            at += stride
        start = end
    return torch.stack(rows)


def test_nsa_compress(seeded):
    x, weight = torch.randn(8, 2, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    out = npu.npu_nsa_compress(x, weight, 4, 2, actual_seq_len=[5, 8])
    assert out.shape[0] == 1  # lengths 5 and 3: one window and none
    ends = [7, 8]
    want = windows(x, weight, 4, 2, ends)
    near(npu.npu_nsa_compress(x, weight, 4, 2, actual_seq_len=ends), want)
    grad = torch.randn(2, 2, 4)
    for a, b in zip(npu.npu_nsa_compress_grad(grad, x, weight, 4, 2, actual_seq_len=ends), torch.autograd.grad(want, (x, weight), grad.double())):
        near(a, b, 4e-6)
    pages, cache = x.detach().view(2, 4, 2, 4), torch.zeros(3, 2, 4)
    given = npu.npu_nsa_compress_infer(pages, weight.detach(), torch.tensor([1, 2]), 4, 2, 4, block_table=torch.tensor([[0, 1], [1, 0]]),
                                       actual_seq_len=[6, 5], cache=cache)
    assert given is cache and (cache[[0, 2]] == 0).all()
    near(cache[1], windows(x.detach()[2:6], weight, 4, 2, [4])[0])


def test_nsa_attention(seeded):
    q_lens, cmp_lens, blocks = [4, 3], [6, 5], [4, 3]
    q, k, v = torch.randn(7, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)
    forced = torch.zeros(4, 4, dtype=torch.bool)
    forced[:, 2] = True
    out, top, largest, total = npu.npu_nsa_compress_attention(q, k, v, 0.4, 4, 8, 4, 16, 3, topk_mask=forced, actual_seq_qlen=[4, 7],
                                                              actual_cmp_seq_kvlen=[6, 11], actual_sel_seq_kvlen=[4, 7])
    a = b = 0
    for n, m, count in zip(q_lens, cmp_lens, blocks):
        part = [x[s:s + size].transpose(0, 1)[None] for x, s, size in ((q, a, n), (k, b, m), (v, b, m))]
        near(out[a:a + n], attention(*part, None, 0.4)[0].transpose(0, 1))
        p = (0.4 * part[0].double() @ part[1].double().repeat_interleave(2, 1).transpose(-1, -2)).softmax(-1)[0]
        for t in range(n):
            for g in range(2):
                rank = []
                for i in range(count):
                    at = [4 * (i + 1) - x - y for x in range(4) for y in range(2)]
                    rank.append(float("inf") if i == 2 else sum(p[2 * g:2 * g + 2, t, j].sum().item() for j in at if 0 <= j < m))
                assert top[a + t, g].tolist() == sorted(range(count), key=lambda i: -rank[i])[:3]
        a, b = a + n, b + m
    assert top.shape == (7, 2, 3) and largest.shape == total.shape == (7, 4, 8)
    # Attention over chosen blocks of 4 keys.
    q, k, v = (torch.randn(n, heads, 8, requires_grad=True) for n, heads in ((10, 4), (10, 2), (10, 2)))
    chosen = torch.stack([torch.stack([torch.randperm(3)[:2] for _ in range(2)]) for _ in range(10)]).to(torch.int32)
    shown = torch.zeros(2, 10, 10, dtype=torch.bool)
    for t in range(10):
        for g in range(2):
            for i in chosen[t, g].tolist():
                shown[g, t, 4 * i:4 * i + 4] = True
    for masked in (False, True):
        seen = (shown & seen_by(2, 10, 10) if masked else shown).repeat_interleave(2, 0)
        mask = torch.ones(10, 10, dtype=torch.bool).triu(1) if masked else None
        out, largest, total = npu.npu_nsa_select_attention(q, k, v, chosen, 0.4, 4, 4, 2, atten_mask=mask, actual_seq_qlen=[10], actual_seq_kvlen=[10])
        want = attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), seen, 0.4)[0].transpose(0, 1)
        near(out, want)
        grad = torch.randn_like(out)
        found = npu.npu_nsa_select_attention_grad(grad, q, k, v, out, largest, total, chosen, 0.4, 4, 4, 2, atten_mask=mask,
                                                  actual_seq_qlen=[10], actual_seq_kvlen=[10])
        for a, b in zip(found, torch.autograd.grad(want, (q, k, v), grad.double())):
            near(a, b, 4e-6)
    pages = [torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, 2)).view(3, 4, 16) for x in (k, v)]
    step = npu.npu_nsa_select_attention_infer(q.detach()[None, :1], *pages, chosen[None, :1], 0.4, 4, 2, 4, 2, 4,
                                              block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32), actual_seq_kvlen=[10])
    near(step[0, 0], attention(*(x.detach().transpose(0, 1)[None] for x in (q[:1], k, v)), shown[:, :1].repeat_interleave(2, 0), 0.4)[0, :, 0])

"""ops_transformer.npu, section 4 of npu_rules.txt: attention over chosen keys, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import Attention, attention, best_first, by_sequence, f64, near, tokens, window  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

KV = [9, 5]  # keys of the sequences, of 9


def normal(rng, *shapes):
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def first(x):
    """[B, S, N, D] as [B, N, S, D]."""
    return np.asarray(x).transpose(0, 2, 1, 3)


def torches(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]


def lists(rng, lengths, rows, count, block):
    """int32 [B, S, 1, count] of distinct blocks, -1 behind them."""
    indices = np.full((len(lengths), rows, 1, count), -1, np.int32)
    for b, keys in enumerate(lengths):
        for i in range(rows):
            some = rng.permutation(-(-keys // block))[:count - 1 - i % 2]
            indices[b, i, 0, :len(some)] = some
    return indices


def chosen(indices, keys, block, lengths):
    """bool [B, S, keys]: what the lists show."""
    seen = np.zeros((*indices.shape[:2], keys), bool)
    for b, i in np.ndindex(*indices.shape[:2]):
        for index in indices[b, i, 0]:
            if index < 0:
                break
            seen[b, i, index * block:min((index + 1) * block, lengths[b])] = True
    return seen


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("form", ["BSND", "TND", "PA_BSND"])
def test_4_1_sparse_attention(rng, mode, block, form):
    q, k, qr, kr = normal(rng, (2, 4, 4, 16), (2, 9, 1, 16), (2, 4, 4, 8), (2, 9, 1, 8))
    indices, q_lengths = lists(rng, KV, 4, 5, block), [4, 3] if form == "BSND" else [4, 4]
    seen = chosen(indices, 9, block, KV)
    if mode == 3:  # j <= kvlen - qlen + i
        for b in range(2):
            seen[b, :q_lengths[b], :KV[b]] &= window(3, q_lengths[b], KV[b])
    sink = np.array([0.3, -1, 2, 0], np.float32)
    model = Attention(first(np.concatenate([q, qr], -1)), first(np.concatenate([k, kr], -1)), first(k), seen[:, None], 0.2, sink=sink)
    common = dict(sparse_mode=mode, attention_mode=2, sparse_block_size=block, return_softmax_lse=True, sinks=torch.from_numpy(sink))
    lengths = torch.tensor(KV, dtype=torch.int32)
    if form == "TND":
        cut = lambda x: np.concatenate([x[b, :m] for b, m in enumerate(KV)])  # noqa: E731
        given = torches(q.reshape(8, 4, 16), cut(k), cut(k), indices.reshape(8, 1, -1))
        common.update(query_rope=torch.from_numpy(qr.reshape(8, 4, 8)), key_rope=torch.from_numpy(cut(kr)), layout_query="TND", layout_kv="TND",
                      actual_seq_lengths_query=torch.tensor([4, 8], dtype=torch.int32), actual_seq_lengths_kv=torch.tensor([9, 14], dtype=torch.int32))
    elif form == "BSND":
        given = torches(q, k, k, indices)
        common.update(query_rope=torch.from_numpy(qr), key_rope=torch.from_numpy(kr), actual_seq_lengths_kv=lengths,
                      actual_seq_lengths_query=torch.tensor(q_lengths, dtype=torch.int32))
    else:
        order = [2, 0, 1, 5, 3, 4]
        pages, rope_pages = (np.concatenate([x, x[:, :3]], 1).reshape(6, 4, 1, -1)[order] for x in (k, kr))
        table = torch.tensor([[order.index(i) for i in row] for row in ((0, 1, 2), (3, 4, 5))], dtype=torch.int32)
        given = torches(q, pages, pages, indices)
        common.update(query_rope=torch.from_numpy(qr), key_rope=torch.from_numpy(rope_pages), layout_kv="PA_BSND", block_table=table,
                      actual_seq_lengths_kv=lengths)
    out, largest, total = npu.npu_sparse_flash_attention(*given, 0.2, **common)
    want, lse = model.out.transpose(0, 2, 1, 3), model.lse.transpose(0, 2, 1)
    for b in range(2):
        want[b, q_lengths[b]:] = 0
    near(out, want.reshape(out.shape))
    # One value each; the pair means what max and sum mean: exp(max) * sum.
    assert largest.shape == total.shape == ((1, 8, 4) if form == "TND" else (2, 1, 4, 4))
    got = (f64(largest) + np.log(np.maximum(f64(total), 1e-300))).reshape(2, 4, 4)
    for b in range(2):
        near(got[b, :q_lengths[b]], lse[b, :q_lengths[b]], 4e-6)


def test_4_1_refusals(rng):
    q, k = torch.zeros(1, 2, 4, 16), torch.zeros(1, 3, 1, 16)
    indices = torch.zeros(1, 2, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"npu_sparse_flash_attention: attention_mode is 0, but only 2 \(MLA absorbed\) is supported"):
        npu.npu_sparse_flash_attention(q, k, k, indices, 1.0)
    for more, message in ((dict(sparse_mode=2), "sparse_mode is 2, must be 0 or 3"), (dict(pre_tokens=5), "pre_tokens and next_tokens are 5"),
                          (dict(layout_query="TND"), "actual_seq_lengths_query is not given, but TND needs it"),
                          (dict(layout_kv="PA_BSND"), "PA_BSND needs block_table and actual_seq_lengths_kv"),
                          (dict(layout_kv="BNSD"), 'layout_kv is "BNSD", must be one of BSND, TND, PA_BSND')):
        with pytest.raises(ValueError, match=message):
            npu.npu_sparse_flash_attention(q, k, k, indices, 1.0, attention_mode=2, **more)
    with pytest.raises(ValueError, match=r"sparse_indices.* is 1, but .* = -1 ended the list"):
        npu.npu_sparse_flash_attention(q, k, k, torch.tensor([[[[0, -1, 1]]] * 2], dtype=torch.int32), 1.0, attention_mode=2)
    with pytest.raises(ValueError, match="strict: D of query is 16, but the device takes 512"):
        npu.npu_sparse_flash_attention(q.half(), k.half(), k.half(), indices, 1.0, attention_mode=2, strict=True)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_4_1_gradients(rng, layout):
    """dq, dk and dv apart, dq_rope, dk_rope."""
    q, k, qr, kr, dy = normal(rng, (1, 4, 4, 16), (1, 9, 1, 16), (1, 4, 4, 8), (1, 9, 1, 8), (1, 4, 4, 16))
    indices = lists(rng, [9], 4, 6, 1)
    seen = chosen(indices, 9, 1, [9]) & window(3, 4, 9)
    dq, dk, dv, *_ = Attention(first(np.concatenate([q, qr], -1)), first(np.concatenate([k, kr], -1)), first(k), seen[:, None], 0.2).grad(first(dy))
    shape = (lambda x: x[0]) if layout == "TND" else (lambda x: x)  # noqa: E731
    given = torches(*map(shape, (q, k, k, indices)))
    ropes, more = torches(shape(qr), shape(kr)), {}
    ends = [torch.tensor([n], dtype=torch.int32) for n in (4, 9)]
    if layout == "TND":
        more = dict(layout_query="TND", layout_kv="TND", actual_seq_lengths_query=ends[0], actual_seq_lengths_kv=ends[1])
    out = npu.npu_sparse_flash_attention(*given, 0.2, query_rope=ropes[0], key_rope=ropes[1], attention_mode=2, return_softmax_lse=True, **more)
    found = npu.npu_sparse_flash_attention_grad(*given, torch.from_numpy(shape(dy)), *out, 0.2, 1, *ropes, *(ends if layout == "TND" else ()),
                                                layout=layout, attention_mode=2)
    wants = [first(x) for x in (dq[..., :16], dk[..., :16], dv, dq[..., 16:], dk[..., 16:])]
    for got, want in zip(found, wants):
        near(got, shape(want), 4e-6)


# ---- 4.2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("form", ["BSND", "TND", "PA_BSND"])
@pytest.mark.parametrize("count", [4, 12])
def test_4_2_indexer(rng, mode, form, count):
    """score = sum over heads of weight * relu(q . k), best first, of equal ones the lower index, -1 behind; without a scale."""
    q, k, w = (np.round(x * 2) for x in normal(rng, (2, 4, 3, 16), (2, 9, 1, 16), (2, 4, 3)))  # whole numbers: ties
    k[:, 4] = k[:, 1]
    scores = np.einsum("bsn,bsnj->bsj", w, np.maximum(np.einsum("bsnd,bjd->bsnj", q, k[:, :, 0]), 0)).astype(np.float64)
    want, best = np.full((2, 4, 1, count), -1), np.zeros((2, 4, 1, count))
    for b, i in np.ndindex(2, 4):
        visible = [j for j in range(KV[b]) if mode == 0 or j <= KV[b] - 4 + i]
        order = [visible[r] for r in best_first([scores[b, i, j] for j in visible], count)]
        want[b, i, 0, :len(order)], best[b, i, 0, :len(order)] = order, scores[b, i, order]
    more = dict(sparse_count=count, sparse_mode=mode, return_value=True)
    lengths = torch.tensor(KV, dtype=torch.int32)
    if form == "TND":
        given = torches(q.reshape(8, 3, 16), np.concatenate([k[b, :m] for b, m in enumerate(KV)]), w.reshape(8, 3))
        more.update(layout_query="TND", layout_key="TND", actual_seq_lengths_query=torch.tensor([4, 8], dtype=torch.int32),
                    actual_seq_lengths_key=torch.tensor([9, 14], dtype=torch.int32))
    elif form == "BSND":
        given = torches(q, k, w)
        more["actual_seq_lengths_key"] = lengths
    else:
        given = torches(q, np.concatenate([k, k[:, :3]], 1).reshape(6, 4, 1, 16)[[3, 1, 2, 0, 4, 5]], w)
        more.update(layout_key="PA_BSND", block_table=torch.tensor([[3, 1, 2], [0, 4, 5]], dtype=torch.int32), actual_seq_lengths_key=lengths)
    indices, values = npu.npu_lightning_indexer(*given, **more)
    assert indices.dtype == torch.int32 and (f64(indices) == want.reshape(indices.shape)).all()
    shown = f64(indices) >= 0
    near(f64(values)[shown], best.reshape(values.shape)[shown])
    assert npu.npu_lightning_indexer(*given, **{**more, "return_value": False})[1].numel() == 0


def test_4_2_the_gradient_says_what_is_missing():
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="npu_lightning_indexer_grad: the core's lightning_indexer has no gradient"):
        npu.npu_lightning_indexer_grad(q, q, q, q, q)


# ---- 4.3 -------------------------------------------------------------------------------------------------------------


def blocks_seen(mask, X, Y, sq, skv):
    return np.repeat(np.repeat(mask.astype(bool), X, -2), Y, -1)[..., :sq, :skv]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_4_3_block_masks(rng, kv_heads):
    """1 computes a block; query head n takes key head n // (Nq / Nkv)."""
    q, k, v, dy = normal(rng, (2, 4, 10, 8), (2, kv_heads, 13, 8), (2, kv_heads, 13, 8), (2, 4, 10, 8))
    mask = (rng.random((2, 4, 3, 4)) < 0.6).astype(np.int8)
    mask[..., 0] = 1
    model = Attention(q, k, v, blocks_seen(mask, 4, 4, 10, 13), 0.3)
    common = dict(q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=kv_heads, scale_value=0.3)
    tensors, mask_ = torches(q, k, v), torch.from_numpy(mask)
    out, lse = npu.npu_block_sparse_attention(*tensors, mask_, [4, 4], softmax_lse_flag=1, **common)
    near(out, model.out)
    near(lse, model.lse[..., None], 4e-6)
    assert npu.npu_block_sparse_attention(*tensors, mask_, [4, 4], **common)[1].shape == lse.shape
    found = npu.npu_block_sparse_attention_backward(torch.from_numpy(dy), *tensors, out, lse, mask_, [4, 4], None, None, "BNSD", "BNSD", kv_heads, 0.3)
    for got, want in zip(found, model.grad(dy)):
        near(got, want, 4e-6)


def test_4_3_block_masks_of_tokens(rng):
    """A mask for each sequence, lengths one for each sequence, which are needed."""
    lengths, kv_lengths = [5, 8], [9, 6]
    q, k, v, dy = normal(rng, (13, 4, 8), (15, 2, 8), (15, 2, 8), (13, 4, 8))
    mask = (rng.random((2, 4, 2, 3)) < 0.6).astype(np.int8)
    mask[..., 0] = 1
    parts = by_sequence(q, k, v, lengths, kv_lengths, lambda i, n, m: blocks_seen(mask[i:i + 1], 4, 4, n, m), 0.3)
    out, lse = npu.npu_block_sparse_attention(*torches(q, k, v), torch.from_numpy(mask), [4, 4], num_key_value_heads=2, scale_value=0.3,
                                              actual_seq_lengths=lengths, actual_seq_lengths_kv=kv_lengths, softmax_lse_flag=1)
    near(out, tokens(parts))
    near(lse, tokens(parts, "lse")[..., None], 4e-6)
    found = npu.npu_block_sparse_attention_backward(torch.from_numpy(dy), *torches(q, k, v), out, lse, torch.from_numpy(mask), [4, 4], lengths,
                                                    kv_lengths, "TND", "TND", 2, 0.3)
    grads = [part.grad(d.transpose(1, 0, 2)[None]) for part, d in zip(parts, np.split(dy, [5]))]
    for i in range(3):
        near(found[i], np.concatenate([g[i][0].transpose(1, 0, 2) for g in grads]), 4e-6)
    with pytest.raises(ValueError, match="npu_block_sparse_attention: actual_seq_lengths must be specified"):
        npu.npu_block_sparse_attention(*torches(q, k, v), torch.from_numpy(mask), [4, 4], num_key_value_heads=2)


# ---- 4.4 -------------------------------------------------------------------------------------------------------------


def windows(x, weight, block, stride, lengths):
    rows, start = [], 0
    for length in lengths:
        at = 0
        while at + block <= length:
            rows.append(sum(f64(weight)[r][:, None] * f64(x)[start + at + r] for r in range(block)))
            at += stride
        start += length
    return np.stack(rows) if rows else np.zeros((0, *x.shape[1:]))


@pytest.mark.parametrize("lengths", [[5, 3], [7, 4, 0, 9], [0, 8]])
def test_4_4_compress(rng, lengths):
    """Windows of the sequence's own tokens; short sequences give none; a leading 0 is an empty first sequence."""
    x, weight = normal(rng, (sum(lengths), 2, 4), (4, 2))
    ends = list(np.cumsum(lengths))
    want = windows(x, weight, 4, 2, lengths)
    near(npu.npu_nsa_compress(*torches(x, weight), 4, 2, actual_seq_len=[int(e) for e in ends]), want)
    grad, = normal(rng, want.shape)
    dx, dw, start, row = np.zeros_like(f64(x)), np.zeros_like(f64(weight)), 0, 0
    for length in lengths:
        for at in range(0, length - 3, 2):
            for r in range(4):
                dx[start + at + r] += f64(weight)[r][:, None] * grad[row]
                dw[r] += (f64(x)[start + at + r] * grad[row]).sum(-1)
            row += 1
        start += length
    found = npu.npu_nsa_compress_grad(*torches(grad, x, weight), 4, 2, actual_seq_len=[int(e) for e in ends])
    near(found[0], dx, 4e-6)
    near(found[1], dw, 4e-6)


def test_4_4_compress_of_pages(rng):
    """The last window of a sequence, where its length ends one; over two pages; else the row stays."""
    pages, weight = normal(rng, (4, 4, 2, 8), (4, 2))
    table, lengths, slots, cache = np.array([[2, 0], [1, 3], [3, 1]]), [6, 5, 4], [1, 2, 4], torch.full((5, 2, 8), 7.0)
    given = npu.npu_nsa_compress_infer(*torches(pages, weight), torch.tensor(slots), 4, 2, 4, block_table=torch.from_numpy(table).int(),
                                       actual_seq_len=lengths, cache=cache)
    want = np.full((5, 2, 8), 7.0)
    for b, (length, slot) in enumerate(zip(lengths, slots)):
        if length >= 4 and (length - 4) % 2 == 0:
            rows = pages[table[b]].reshape(8, 2, 8)[length - 4:length]
            want[slot] = sum(f64(weight)[r][:, None] * rows[r] for r in range(4))
    assert given is cache and (want[2] == 7).all()
    near(cache, want)


@pytest.mark.parametrize("masked", [False, True])
def test_4_4_compress_attention(rng, masked):
    """Attention over windows, and the blocks whose windows weigh most, summed over a group's heads; forced ones first."""
    q_lens, cmp_lens, blocks, count = [14, 9], [19, 14], [5, 4], 5  # blocks of the same weight but for one window or two
    q, k, v = normal(rng, (23, 4, 8), (33, 2, 8), (33, 2, 6))
    q = q * 3
    forced, hidden = rng.random((14, 5)) < 0.2, rng.random((14, 19)) < 0.3
    hidden[:, 0] = False
    more = dict(atten_mask=torch.from_numpy(hidden)) if masked else {}
    out, top, largest, total = npu.npu_nsa_compress_attention(*torches(q, k, v), 0.4, 4, 8, 4, 16, count, topk_mask=torch.from_numpy(forced),
                                                              actual_seq_qlen=[14, 23], actual_cmp_seq_kvlen=[19, 33], actual_sel_seq_kvlen=[5, 9], **more)
    parts = by_sequence(q, k, v, q_lens, cmp_lens, (lambda i, n, m: ~hidden[:n, :m]) if masked else None, 0.4)
    near(out, tokens(parts))
    for got, name in ((largest, "max"), (total, "sum")):
        near(got, np.repeat(tokens(parts, name)[..., None], 8, -1), 4e-6)
    row = 0
    for part, n, m, number in zip(parts, q_lens, cmp_lens, blocks):
        for t in range(n):
            for g in range(2):
                p = part.p[0, 2 * g:2 * g + 2, t].sum(0)
                rank = []
                for i in range(number):
                    at = [4 * (i + 1) - a - b for a in range(4) for b in range(2)]  # 16 / 4 and 8 / 4
                    rank.append(np.inf if forced[t, i] else sum(p[j] for j in at if 0 <= j < m))
                want = best_first(rank, count)
                assert top[row + t, g].tolist() == want + [-1] * (count - len(want))
        row += n
    with pytest.raises(NotImplementedError, match="npu_nsa_compress_attention_infer: the paged form is not implemented"):
        npu.npu_nsa_compress_attention_infer(*torches(q, k, v), 0.4, 4, 2, 16, 3, 4, 8, 4)


def selected(rng, rows, groups, blocks, count):
    return np.stack([[rng.permutation(blocks)[:count] for _ in range(groups)] for _ in range(rows)]).astype(np.int32)


@pytest.mark.parametrize("masked", [False, True])
def test_4_4_select_attention(rng, masked):
    """Blocks of the sequence's own keys, the last one cut; a given mask means j <= i, without one nothing is causal."""
    lengths = [10, 6]
    q, k, v, dy = normal(rng, (16, 4, 8), (16, 2, 8), (16, 2, 8), (16, 4, 8))
    top = np.concatenate([selected(rng, 10, 2, 3, 2), selected(rng, 6, 2, 2, 2)])
    starts = [0, 10]

    def seen(i, n, m):
        shown = np.zeros((1, 4, n, m), bool)
        for t in range(n):
            for h in range(4):
                for index in top[starts[i] + t, h // 2]:
                    shown[0, h, t, 4 * index:4 * index + 4] = True
        return shown & window(2, n, m) if masked else shown

    parts = by_sequence(q, k, v, lengths, lengths, seen, 0.4)
    more = dict(atten_mask=torch.ones(10, 10, dtype=torch.bool).triu(1) if masked else None, actual_seq_qlen=[10, 16], actual_seq_kvlen=[10, 16])
    out, largest, total = npu.npu_nsa_select_attention(*torches(q, k, v, top), 0.4, 4, 4, 2, **more)
    near(out, tokens(parts))
    assert largest.shape == total.shape == (16, 4, 8)
    lse = tokens(parts, "lse")
    near((f64(largest) + np.log(np.maximum(f64(total), 1e-300)))[..., 0][np.isfinite(lse)], lse[np.isfinite(lse)], 4e-6)
    found = npu.npu_nsa_select_attention_grad(*torches(dy, q, k, v), out, largest, total, torch.from_numpy(top), 0.4, 4, 4, 2, **more)
    grads = [part.grad(d.transpose(1, 0, 2)[None]) for part, d in zip(parts, np.split(dy, [10]))]
    for i in range(3):
        near(found[i], np.concatenate([g[i][0].transpose(1, 0, 2) for g in grads]), 4e-6)


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_4_4_select_attention_of_pages(rng, layout):
    """Pages [blocks, rows, N * D], one length for each sequence, a list ends at -1."""
    pages, (q,), lengths = normal(rng, (6, 4, 2, 8), (6, 4, 2, 8)), normal(rng, (2, 1, 4, 8)), [10, 7]
    table, top = np.array([[2, 0, 5], [1, 3, 4]]), np.array([[[[2, 0, -1], [1, -1, -1]]], [[[0, 1, -1], [1, 0, -1]]]], np.int32)
    rows = [np.stack([page[ids].reshape(12, 2, 8) for ids in table]).transpose(0, 2, 1, 3) for page in pages]
    seen = np.zeros((2, 4, 1, 12), bool)
    for b, h in np.ndindex(2, 4):
        for index in top[b, 0, h // 2]:
            if index >= 0:
                seen[b, h, 0, 4 * index:min(4 * index + 4, lengths[b])] = True
    out = npu.npu_nsa_select_attention_infer(torch.from_numpy(q if layout == "BSND" else q.reshape(2, 1, 32)), *torches(*(p.reshape(6, 4, 16) for p in pages)),
                                             torch.from_numpy(top), 0.4, 4, 2, 4, 3, 4, layout=layout, block_table=torch.from_numpy(table).int(),
                                             actual_seq_kvlen=lengths)
    want = attention(q.transpose(0, 2, 1, 3), *rows, seen, 0.4).transpose(0, 2, 1, 3)
    near(out, want if layout == "BSND" else want.reshape(2, 1, 32))
    with pytest.raises(NotImplementedError, match="npu_nsa_select_attention_infer: layout TND"):
        npu.npu_nsa_select_attention_infer(torch.from_numpy(q), *torches(*pages), torch.from_numpy(top), 0.4, 4, 2, 4, 3, 4, layout="TND",
                                           block_table=torch.from_numpy(table).int(), actual_seq_kvlen=lengths)

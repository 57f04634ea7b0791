"""ops_transformer.npu: caches, merging, experts, products and quantisation, norms and rotary, against plain torch in float64."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import attention, near  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

# ---- caches and merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_writing_and_reading_caches(seeded, mode, dtype):
    blocks, size, heads, width = 3, 4, 2, 32
    key, value = ((torch.randn(5, heads, width) * 30).to(dtype) for _ in range(2))
    slots = torch.tensor([3, -1, 8, 0, 5], dtype=torch.int32)
    flat = [torch.zeros(blocks * size, heads, width, dtype=dtype) for _ in range(2)]
    for rows, tensor in zip(flat, (key, value)):
        rows[[3, 8, 0, 5]] = tensor[[0, 2, 3, 4]]
    chunk = 16 if dtype == torch.float16 else 32
    form = (lambda x: x.view(blocks, size, heads * width // chunk, chunk).transpose(1, 2)) if mode == "PA_NZ" else \
        (lambda x: x.view(blocks, size, heads, width))
    caches = [torch.zeros_like(form(x)).contiguous() for x in flat]
    functional = npu.npu_scatter_pa_kv_cache_functional(key, value, *caches, slots, cache_mode=mode)
    assert (caches[0] == 0).all()
    assert npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode=mode) is None
    for cache, copy, rows in zip(caches, functional, flat):
        assert (cache == form(rows)).all() and (copy == cache).all()
    table = torch.tensor([[2, 0], [1, 7]], dtype=torch.int32)
    rows = [8, 9, 10, 11, 0, 1, 4, 5, 6, 7]
    for lengths, cumulative in (([6, 5], False), ([0, 6, 11], True)):
        out = [torch.full((11, heads, width), 7, dtype=dtype) for _ in range(2)]
        npu.npu_gather_pa_kv_cache(*caches, table, torch.tensor(lengths, dtype=torch.int32), *out, is_seq_lens_cumsum=cumulative)
        for got, all_rows in zip(out, flat):
            assert (got[:10] == all_rows[rows]).all() and (got[10] == 0).all()  # block 7 is in no cache
    out = npu.npu_gather_pa_kv_cache_functional(*caches, table, torch.tensor([2, 1], dtype=torch.int32), *out,
                                                seq_offset=torch.tensor([5, 0]))
    assert (out[0][:3] == flat[0][[0, 1, 4]]).all()  # whole blocks of the offset alone
    if mode != "PA_NZ":
        one = torch.zeros_like(caches[0])
        assert npu.npu_scatter_pa_cache(key, slots, key_cache=one) is one and (one == caches[0]).all()
    else:
        with pytest.raises(ValueError, match=r"npu_scatter_pa_cache: key_cache is .*, must be \[blocks, block_size, 2, 32\]"):
            npu.npu_scatter_pa_cache(key, slots, key_cache=caches[0])
    with pytest.raises(ValueError, match="npu_scatter_pa_kv_cache: .*slot_mapping.* 12 slots"):
        npu.npu_scatter_pa_kv_cache(key, value, *caches, slots + 7, cache_mode=mode)
    older = [torch.zeros_like(cache) for cache in caches]
    npu._npu_reshape_and_cache(key, value, *older, slots)
    assert all((a == b).all() for a, b in zip(older, caches))


def test_decoding_over_pages(seeded):
    q, pages = torch.randn(2, 4, 8), [torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 6)]
    table, out = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.zeros(2, 4, 6)
    npu._npu_paged_attention(q, *pages, 2, 4, 0.4, table, torch.tensor([7, 5], dtype=torch.int32), out)
    for b, m in enumerate((7, 5)):
        rows = [page[table[b].long()].flatten(0, 1)[:m].transpose(0, 1)[None] for page in pages]
        near(out[b], attention(q[b:b + 1, :, None], *rows, None, 0.4)[0, :, 0])


def test_merging(seeded):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    whole, lse = attention(q, k, v, lse=True)
    parts = [npu.npu_fusion_attention(q, k[:, :, a:b], v[:, :, a:b], 4, "BNSD") for a, b in ((0, 4), (4, 9))]
    as_sbh = lambda x: x.permute(2, 0, 1, 3).flatten(2)  # noqa: E731
    arguments = [x for part in parts for x in (as_sbh(part[0]), part[1], part[2])]
    out, largest, total = npu.npu_ring_attention_update(*arguments)
    near(out, as_sbh(whole))
    near(largest[..., 0] + total[..., 5].log(), lse, 4e-6)
    lses = [(part[1] + part[2].log())[..., 0].flatten() for part in parts]
    out, merged = npu.npu_attention_update(lses, [part[0].flatten(0, 2) for part in parts], 1)
    near(out, whole.flatten(0, 2))
    near(merged, lse.flatten(), 4e-6)


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_worked_values_of_routing():
    x, ids = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    rows, places, totals, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=2, active_num=4)
    assert (rows == x[[0, 1, 0, 1]]).all() and places.tolist() == [2, 0, 1, 3] and totals.tolist() == [2, 4]
    _, places, counts, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=2, row_idx_type=1, expert_tokens_num_type=1)
    assert places.tolist() == [1, 2, 0, 3] and counts.tolist() == [2, 2]
    rows, sorted_indices = npu.npu_moe_token_permute(x, ids)
    assert (rows == x[[0, 1, 0, 1]]).all() and sorted_indices.tolist() == [2, 0, 1, 3]
    rows, places, experts = npu.npu_moe_init_routing(x, torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), ids, 2)
    assert (rows == x[[0, 1, 0, 1]]).all() and places.tolist() == [2, 1, 0, 3] and experts.tolist() == [0, 0, 1, 1]
    assert npu.npu_moe_compute_expert_tokens(torch.tensor([0, 0, 2], dtype=torch.int32), 4).tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gating(seeded, dtype):
    x = torch.randn(6, 8).to(dtype)
    bound = 2e-6 if dtype == torch.float32 else 8e-3
    scores = x.double().softmax(-1)
    want, experts = scores.sort(dim=-1, descending=True, stable=True)
    finished = torch.tensor([False, True, False, False, False, False])
    y, ids, rows = npu.npu_moe_gating_top_k_softmax(x, finished, 3)
    near(y, want[:, :3], bound)
    assert y.dtype == dtype and ids.dtype == rows.dtype == torch.int32
    assert (ids[0] == experts[0, :3]).all() and (ids[1] == 8).all()
    assert rows.tolist() == [[k * 6 + t for k in range(3)] for t in range(6)]
    y, ids, full = npu.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=0, output_softmax=True)
    near(full, scores)
    y, _, full = npu.npu_moe_gating_top_k_softmax_v2(x.view(2, 3, 8), k=3, renorm=1)
    near(y, x.double().sort(dim=-1, descending=True).values[:, :3].softmax(-1).view(2, 3, 3), bound)
    assert full.numel() == 0
    bias = torch.randn(8)
    sigmoid = x.double().sigmoid()
    y, ids, out = npu.npu_moe_gating_top_k(x, 3, bias=bias, norm_type=1, k_group=2, group_count=2, routed_scaling_factor=2.5, out_flag=True)
    chosen = (sigmoid + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :3]
    picked = sigmoid.gather(1, chosen)
    assert (ids == chosen).all()
    near(y, 2.5 * picked / (picked.sum(-1, keepdim=True) + 1e-20), bound)
    near(out, sigmoid)
    y, ids, _ = npu.npu_moe_gating_top_k(x, 2, bias=bias, group_count=4, k_group=1, group_select_mode=1)
    groups = (scores + bias.double()).view(6, 4, 2).sum(-1).argmax(-1)
    assert (ids // 2 == groups[:, None]).all()
    for norm_type in (0, 1):  # the gradient, by autograd of the rule
        logits = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        n = logits.softmax(-1) if norm_type == 0 else logits.sigmoid()
        picked = n.gather(1, chosen)
        y = 2.5 * (picked if norm_type == 0 else picked / (picked.sum(-1, keepdim=True) + 1e-20))
        grad = torch.randn(6, 3)
        right, = torch.autograd.grad(y, logits, grad.double())
        got = npu.npu_moe_gating_top_k_backward(n.float().detach(), grad, chosen.int(), norm_type=norm_type, routed_scaling_factor=2.5)
        near(got, right, 5e-6)
    with pytest.raises(ValueError, match="npu_moe_gating_top_k: k is 9, must be 1 to the 8 experts of x"):
        npu.npu_moe_gating_top_k(x, 9)


def test_routing_with_capacity_ranges_and_int8(seeded):
    x, ids = torch.randn(5, 8), torch.tensor([[1, 0], [1, 2], [1, 0], [3, 1], [2, 0]], dtype=torch.int32)
    flat = ids.flatten()
    order = flat.sort(stable=True).indices
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=4, expert_capacity=2, drop_pad_mode=1, expert_tokens_num_type=1)
    assert rows.shape == (4, 2, 8) and counts.tolist() == [3, 4, 2, 1]
    for e in range(4):
        own = (flat == e).nonzero().flatten()
        for i in range(2):
            assert (rows[e, i] == (x[own[i] // 2] if i < len(own) else 0)).all()
        assert [places[s].item() for s in own] == [e * 2 + i if i < 2 else -1 for i in range(len(own))]
    rows, places, totals, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=4, active_expert_range=[1, 3])
    inside = order[(flat[order] >= 1) & (flat[order] < 3)]
    assert totals.tolist() == [4, 6] and (rows[:6] == x[inside // 2]).all() and places[flat == 0].eq(-1).all()
    pairs = npu.npu_moe_init_routing_v2(x, ids, expert_num=5, expert_tokens_num_type=2)[2]
    assert pairs.tolist() == [[0, 3], [1, 4], [2, 2], [3, 1], [0, 0]]
    smooth = torch.rand(4, 8) + 0.5
    q, _, _, scale = npu.npu_moe_init_routing_v2(x, ids, expert_num=4, quant_mode=1, scale=smooth)
    values = x[order // 2].double() * smooth[flat[order].long()].double()
    near(scale, values.abs().amax(-1) / 127)
    assert (q.double() - values / (values.abs().amax(-1, keepdim=True) / 127)).abs().max() <= 0.5001
    q = npu.npu_moe_init_routing_v2(x, ids, expert_num=4, quant_mode=0, scale=torch.tensor([20.0]), offset=torch.tensor([1.0]))[0]
    assert (q == (x[order // 2].half() * 20 + 1).round().clamp(-128, 127).to(torch.int8)).all()
    assert npu.npu_moe_init_routing_v2(x, ids, expert_num=4, scale=torch.arange(5.0))[3].tolist() == (order // 2).tolist()
    q, places, counts, before, scale = npu.npu_moe_init_routing_quant(x, ids, expert_num=4, expert_tokens_num_mode=2)
    assert q.dtype == torch.int8 and counts.tolist() == [3, 4, 2, 1] and before.numel() == 0 and scale.shape == (10,)


def test_finalize_and_re_routing(seeded):
    n, k, width = 4, 2, 6
    rows, skip1, skip2, bias = torch.randn(n * k, width), torch.randn(n, width), torch.randn(n, width), torch.randn(3, width)
    scales, experts = torch.rand(n, k), torch.randint(0, 3, (n, k), dtype=torch.int32)
    places = torch.randperm(n * k).to(torch.int32)
    for mode in (0, 2):
        want = skip1.double() + skip2.double()
        for i in range(n):
            for c in range(k):
                row = rows[places[c * n + i if mode == 0 else i * k + c]].double()
                want[i] += scales[i, c].double() * (row + bias[experts[i, c]].double())
        near(npu.npu_moe_finalize_routing(rows, skip1, skip2, bias, scales, places, experts, drop_pad_mode=mode), want)
    padded, holes = rows.view(2, 4, width), places.clone()
    holes[3] = -1
    got = npu.npu_moe_finalize_routing(padded, None, None, None, scales, holes, None, drop_pad_mode=3)
    near(got[1], scales[1, 0].double() * rows[holes[2]].double())
    with pytest.raises(ValueError, match="npu_moe_finalize_routing: skip2 is given, but skip1 is not"):
        npu.npu_moe_finalize_routing(rows, None, skip2, None, scales, places, None)
    counts = torch.tensor([[2, 1], [0, 3]])
    tokens, per_token = torch.randn(6, 4), torch.rand(6)
    out, moved, index, totals = npu.npu_moe_re_routing(tokens, counts, per_token_scales=per_token)
    order = [0, 1, 2, 3, 4, 5]
    assert index.tolist() == order and totals.tolist() == [2, 4] and (out == tokens[order]).all() and (moved == per_token[order]).all()
    assert npu.npu_moe_re_routing(tokens, counts.flip(0))[2].tolist() == [3, 4, 0, 1, 2, 5]


def test_permuting_and_its_gradients(seeded):
    tokens, ids = torch.randn(5, 4, requires_grad=True), torch.randint(0, 3, (5, 2))
    probs = torch.rand(5, 2, requires_grad=True)
    order = ids.flatten().argsort(stable=True)
    for count in (None, 7):
        rows, where = npu.npu_moe_token_permute(tokens, ids, count)
        kept = order[:count] if count else order
        assert (rows == tokens[kept // 2]).all() and (where[order] == torch.arange(10)).all()
        out = npu.npu_moe_token_unpermute(rows, where, probs)
        want = torch.zeros(5, 4, dtype=torch.float64)
        weights = probs.double().flatten()[kept, None]
        want = want.index_add(0, kept // 2, tokens.double()[kept // 2] * weights)
        near(out, want)
        grad = torch.randn(5, 4)
        right = torch.autograd.grad(want, (tokens, probs), grad.double())
        for got, r in zip(torch.autograd.grad(out, (tokens, probs), grad), right):
            near(got, r, 4e-6)
    rows, where = npu.npu_moe_token_permute(tokens.detach(), ids)
    grad_rows, grad_probs = npu.npu_moe_token_unpermute_grad(rows, grad, where, probs.detach())
    near(grad_rows, (grad[order // 2] * probs.flatten()[order, None]).double())
    near(grad_probs, (rows[where.long()] * grad.repeat_interleave(2, 0)).sum(-1).view(5, 2).double())
    near(npu.npu_moe_token_permute_grad(tokens, grad_rows, ids, where), (grad.double() * probs.double().sum(-1, keepdim=True)).detach(), 4e-6)
    same = npu.npu_moe_token_permute_grad_v2(grad_rows, where, 5, torch.float32, 2)
    assert (same == npu.npu_moe_token_permute_grad(tokens, grad_rows, ids, where)).all()


def test_permuting_by_a_map(seeded):
    tokens = torch.randn(5, 4, requires_grad=True)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(5)])
    table = torch.zeros(5, 3, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.rand(5, 3, requires_grad=True)
    rows, picked, where = npu.npu_moe_token_permute_with_routing_map(tokens, table, probs=probs)
    pairs = [(e, t) for e in range(3) for t in range(5) if table[t, e]]
    assert (rows == tokens[[t for _, t in pairs]]).all() and (picked == torch.stack([probs[t, e] for e, t in pairs])).all()
    assert where.tolist() == [pairs.index((e, t)) for t in range(5) for e in range(3) if table[t, e]]
    out = npu.npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4], probs=probs, routing_map=table)
    want = tokens.double() * (probs.double() * table).sum(-1, keepdim=True)
    near(out, want)
    grad = torch.randn(5, 4)
    right = torch.autograd.grad(want, (tokens, probs), grad.double())
    for got, r in zip(torch.autograd.grad(out, (tokens, probs), grad), right):
        near(got, r, 4e-6)
    grads = npu.npu_moe_token_unpermute_with_routing_map_grad(grad, where, where, table, rows.detach(), probs.detach(), False, [5, 4])
    near(grads[1], right[1], 4e-6)
    back = npu.npu_moe_token_permute_with_routing_map_grad(grads[0], None, where, table, 3, 5, False)
    near(back[0], right[0], 4e-6)
    rows, _, ids = npu.npu_moe_token_permute_with_routing_map(tokens, table, num_out_tokens=6, drop_and_pad=True)
    for e in range(3):
        ranked = [t for t in range(5) if table[t, e]] + [t for t in range(5) if not table[t, e]]
        assert ids[2 * e:2 * e + 2].tolist() == ranked[:2]
    out = npu.npu_moe_token_unpermute_with_routing_map(rows, ids, [5, 4], probs=probs, drop_and_pad=True)
    want = torch.zeros(5, 4, dtype=torch.float64)
    for i, t in enumerate(ids.tolist()):
        want[t] += (tokens[t].double() * probs[t, i // 2].double()).detach()
    near(out, want)

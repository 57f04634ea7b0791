"""ops_transformer.npu: gradients, refusals and compilation of attention, and lengths beside modes, against plain torch in float64."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import attention, near, seen_by, to_layout  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

UPPER = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)


def tensors(batch=2, heads=4, kv_heads=2, sq=5, skv=7, dim=8, value_dim=8, grad=False):
    shapes = ((batch, heads, sq, dim), (batch, kv_heads, skv, dim), (batch, kv_heads, skv, value_dim))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def test_pse_sinks_and_their_gradients(seeded):
    q, k, v = tensors(grad=True)
    pse, sink = torch.randn(1, 4, 1, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    grad = torch.randn(2, 4, 5, 8)
    for pse_type, factor in ((1, 0.3), (0, 1.0)):
        out, largest, total, *_ = npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD", pse=pse, sink=sink, scale=0.3, pse_type=pse_type)
        reference = attention(q, k, v, None, 0.3, bias=pse * factor, sinks=sink)
        near(out, reference)
        wanted = torch.autograd.grad(reference, (q, k, v, pse, sink), grad.double())
        for got, right in zip(torch.autograd.grad(out, (q, k, v, pse, sink), grad), wanted):
            near(got, right, 1e-5)
        found = npu.npu_fusion_attention_grad_v2(q, k, v, grad, 4, "BNSD", pse=pse, sink=sink, scale_value=0.3, pse_type=pse_type,
                                                 softmax_max=largest, softmax_sum=total, attention_in=out)
        for got, right in zip((*found[:4], found[6]), wanted):
            near(got, right, 1e-5)
    # v1 scales its pse; slopes by distance are added after scaling.
    near(npu.npu_fusion_attention(q, k, v, 4, "BNSD", pse, scale=0.3)[0], attention(q, k, v, None, 0.3, bias=pse * 0.3))
    slopes = torch.rand(4)
    distance = (torch.arange(7)[None] + 1 - torch.arange(5)[:, None] - 3).abs()
    for pse_type, shape in ((2, distance), (3, distance.double().sqrt())):
        out = npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD", pse=slopes, pse_type=pse_type, q_start_idx=[3], kv_start_idx=[1])[0]
        near(out, attention(q, k, v, None, 1.0, bias=-slopes.view(4, 1, 1) * shape))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_rows_that_see_no_key(seeded, layout):
    q, k, v = tensors(grad=True)
    hidden = torch.triu(torch.ones(5, 7, dtype=torch.bool), 1)
    hidden[2] = True
    given = [to_layout(x, layout) for x in (q, k, v)]
    out, largest, total, *_ = npu.npu_fusion_attention(*given, 4, layout, atten_mask=hidden, scale=0.3)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    reference = torch.where(torch.arange(5)[:, None] == 2, mean, attention(q, k, v, ~hidden, 0.3))
    near(out, to_layout(reference, layout))
    assert (largest[:, :, 2] == torch.finfo(torch.float32).min).all() and (total[:, :, 2] == 7).all()
    grad = torch.randn(2, 4, 5, 8)
    wanted = torch.autograd.grad(reference, (q, k, v), grad.double())
    found = npu.npu_fusion_attention_grad(*given, to_layout(grad, layout), 4, layout, atten_mask=hidden, scale_value=0.3,
                                          softmax_max=largest, softmax_sum=total, attention_in=out)
    by_autograd = torch.autograd.grad(out, given, to_layout(grad, layout), retain_graph=True)
    for got, same, right in zip(found, by_autograd, wanted):
        near(got, to_layout(right, layout), 4e-6)
        near(same, to_layout(right, layout), 4e-6)
    out, largest, total, *_ = npu.npu_fusion_attention(*given, 4, layout, atten_mask=hidden, scale=0.3, inner_precise=2)
    near(out, to_layout(attention(q, k, v, ~hidden, 0.3), layout))
    assert (total[:, :, 2] == torch.finfo(torch.float32).max).all()
    # More queries than keys under mode 3: the first rows see nothing, and are zeros of themselves.
    out = npu.npu_fusion_attention(*(to_layout(x, "BNSD") for x in tensors(sq=7, skv=5)), 4, "BNSD", atten_mask=UPPER, sparse_mode=3)[0]
    assert (out[:, :, :2] == 0).all() and (out[:, :, 2] != 0).any()


@pytest.mark.parametrize("mode", [0, 2, 3, 4, 7, 8])
def test_sequences_without_padding(seeded, mode):
    q_lengths, kv_lengths = [3, 0, 4, 2], [3, 0, 5, 6]
    q, k, v = (torch.randn(n, heads, 8, requires_grad=True) for n, heads in ((9, 4), (14, 2), (14, 2)))
    ends = [3, 3, 7, 9], [3, 3, 8, 14]
    mask = torch.zeros(4, 6, dtype=torch.bool) if mode == 0 else UPPER
    pre, following = (1000, 0) if mode >= 7 else (2, 1)
    options = dict(atten_mask=mask, sparse_mode=mode, pre_tockens=pre, next_tockens=following)
    out, largest, total, *_, numels = npu.npu_fusion_attention(q, k, v, 4, "TND", actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1],
                                                               softmax_layout="TND", scale=0.4, **options)
    parts, a, b = [], 0, 0
    for i, (n, m) in enumerate(zip(q_lengths, kv_lengths)):
        own = {7: 4 if i == 3 else 3, 8: 4 if i == 0 else 2}.get(mode, mode)
        part = [x[start:start + size].transpose(0, 1)[None] for x, start, size in ((q, a, n), (k, b, m), (v, b, m))]
        parts.append(attention(*part, seen_by(own, n, m, pre, following), 0.4)[0].transpose(0, 1))
        a, b = a + n, b + m
    reference = torch.cat(parts)
    near(out, reference)
    assert largest.shape == total.shape == (9, 4, 8) and numels == 4 * (9 + 20 + 12)
    grad = torch.randn(9, 4, 8)
    wanted = torch.autograd.grad(reference, (q, k, v), grad.double())
    for got, right in zip(torch.autograd.grad(out, (q, k, v), grad), wanted):
        near(got, right, 4e-6)
    found = npu.npu_fusion_attention_grad(q, k, v, grad, 4, "TND", scale_value=0.4, softmax_max=largest, softmax_sum=total, attention_in=out,
                                          actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **options)
    for got, right in zip(found, wanted):
        near(got, right, 4e-6)
    if mode == 3:  # zeros at the end switch sequences off
        off = npu.npu_fusion_attention(q, k, v, 4, "TND", actual_seq_qlen=[3, 3, 7, 0], actual_seq_kvlen=[3, 3, 8, 0], scale=0.4, **options)
        near(off[0][:7], reference[:7])
        assert (off[0][7:] == 0).all()
        third = npu.npu_fusion_attention_v3(q, k, v, 4, "TND", scale=0.4, actual_seq_qlen=torch.tensor(ends[0]),
                                            actual_seq_kvlen=torch.tensor(ends[1]), **options)
        assert (third[0] == out).all() and third[4].dtype == torch.int64


def test_ropes_apart(seeded):
    q, k, v = tensors(dim=16, value_dim=8)
    qr, kr = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 7, 4)
    want = attention(torch.cat([q, qr], -1), torch.cat([k, kr], -1), v, None, 0.2)
    for layout in ("BNSD", "BSH", "SBH"):
        given = [to_layout(x, layout).requires_grad_() for x in (q, k, v, qr, kr)]
        out, largest, total, *_ = npu.npu_fusion_attention_v2(*given[:3], 4, layout, query_rope=given[3], key_rope=given[4], scale=0.2)
        near(out, to_layout(want, layout))
        grad = torch.randn_like(out)
        found = npu.npu_fusion_attention_grad_v2(*given[:3], grad, 4, layout, query_rope=given[3], key_rope=given[4], scale_value=0.2,
                                                 softmax_max=largest, softmax_sum=total, attention_in=out)
        for got, right in zip((*found[:3], *found[4:6]), torch.autograd.grad(out, given, grad)):
            near(got, right, 4e-6)


REFUSED = [
    (dict(input_layout="BNDS"), 'npu_fusion_attention: input_layout is "BNDS", must be one of BSH, SBH'),
    (dict(padding_mask=torch.zeros(1)), "npu_fusion_attention: padding_mask is given, but must be None"),
    (dict(keep_prob=0.0), "npu_fusion_attention: keep_prob is 0.0, must be above 0"),
    (dict(sparse_mode=9), "npu_fusion_attention: sparse_mode is 9, must be 0 to 8"),
    (dict(sparse_mode=7, atten_mask=UPPER), "npu_fusion_attention: sparse_mode is 7, which goes with input_layout TND"),
    (dict(sparse_mode=5, atten_mask=UPPER), "npu_fusion_attention: sparse_mode is 5, but prefix is not given"),
    (dict(atten_mask=torch.zeros(5, 7)), "npu_fusion_attention: atten_mask has dtype torch.float32, must be bool, uint8"),
    (dict(head_num=3), "npu_fusion_attention: .*head_num is 3, but query has 4"),
    (dict(softmax_layout="TND"), 'npu_fusion_attention: softmax_layout is "TND"'),
    (dict(input_layout="TND"), "npu_fusion_attention: input_layout TND needs actual_seq_qlen"),
]


@pytest.mark.parametrize("more, message", REFUSED)
def test_refused(more, message):
    q, k, v = tensors()
    with pytest.raises((ValueError, RuntimeError), match=message):
        npu.npu_fusion_attention(**{**dict(query=q, key=k, value=v, head_num=4, input_layout="BNSD"), **more})
    with pytest.raises(TypeError, match="npu_fusion_attention: query is a list, must be a torch tensor"):
        npu.npu_fusion_attention([1.0], k, v, 4, "BNSD")


# ---- inference -------------------------------------------------------------------------------------------------------


def test_lengths_of_inference(seeded):
    q, k, v = tensors()
    for mode in (0, 2, 3):
        out, lse = npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD", actual_seq_lengths=[3, 5], actual_seq_lengths_kv=[7, 2],
            atten_mask=None if mode == 0 else UPPER, sparse_mode=mode, softmax_lse_flag=True)
        for b, (n, m) in enumerate(((3, 7), (5, 2))):
            seen = None if mode == 0 else seen_by(mode, n, m)
            near(out[b, :, :n], attention(q[b:b + 1, :, :n], k[b:b + 1, :, :m], v[b:b + 1, :, :m], seen)[0])
        assert (out[0, :, 3:] == 0).all()
    assert (lse[1, :, :3] == torch.inf).all() and torch.isfinite(lse[1, :, 3:]).all()
    one = npu.npu_prompt_flash_attention(q, k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD", actual_seq_lengths_kv=[4])
    near(one, attention(q, k[:, :, :4], v[:, :, :4]))
    step = npu.npu_incre_flash_attention(q[:, :, :1], k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.5,
                                         actual_seq_lengths=[7, 3])
    near(step[1], attention(q[1:, :, :1], k[1:, :, :3], v[1:, :, :3], None, 0.5)[0])
    # Tokens: sequences do not see each other, though mode is 0 and there is no mask.
    rows = [torch.randn(16, heads, 8) for heads in (4, 2, 2)]
    for given in ("TND", "NTD", "TND_NTD", "NTD_TND"):
        turn = (lambda x: x.transpose(0, 1)) if given.startswith("N") else (lambda x: x)
        out, lse = npu.npu_fused_infer_attention_score_v2(*map(turn, rows), num_query_heads=4, num_key_value_heads=2, input_layout=given,
                                                          actual_seq_qlen=[7, 16], actual_seq_kvlen=[7, 16], return_softmax_lse=True)
        want = torch.cat([attention(*(x[a:b].transpose(0, 1)[None] for x in rows))[0].transpose(0, 1) for a, b in ((0, 7), (7, 16))])
        near(out, want.transpose(0, 1) if given in ("NTD", "TND_NTD") else want)
        assert lse.shape == (16, 4, 1)


def test_compiled(seeded):
    q, k, v = tensors(grad=True)
    call = lambda q, k, v: npu.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=UPPER, sparse_mode=2, scale=0.3)[:3]  # noqa: E731
    out, largest, total = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    near(out, call(q, k, v)[0])
    out.sum().backward()
    assert q.grad is not None and largest.shape == (2, 4, 5, 8)
    fia = lambda q, k, v: npu.npu_fused_infer_attention_score(q, k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD")[0]  # noqa: E731
    near(torch.compile(fia, fullgraph=True, backend="aot_eager")(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("lengths, said", [([4, 2], "4 for sequence 0"), ([2, -1], "-1 for sequence 1")])
def test_lengths_of_queries_are_checked(lengths, said):
    q = torch.zeros(2, 3, 4, 8)
    with pytest.raises(ValueError, match=f"npu_prompt_flash_attention: the lengths of queries have {said}, must be 0 to the 3 of query"):
        npu.npu_prompt_flash_attention(q, q, q, num_heads=4, input_layout="BSND", actual_seq_lengths=lengths)


def test_a_layout_is_checked_without_keys_too():
    q = torch.zeros(2, 0, 4, 8)
    with pytest.raises(ValueError, match='npu_fused_infer_attention_score: input_layout is "BXND", must be one of BSH'):
        npu.npu_fused_infer_attention_score(q, q, q, num_heads=4, input_layout="BXND")

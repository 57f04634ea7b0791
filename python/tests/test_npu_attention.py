"""ops_transformer.npu: attention for training and for inference, against float64 references in plain torch."""

import inspect
import pathlib

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import attention, near, seen_by, to_layout  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

UPPER = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
SIGNATURES = pathlib.Path(__file__).with_name("npu_signatures.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_signatures(line):
    name, _, arguments = line.partition("(")
    names = {}
    exec(f"def wanted({arguments}: pass", names)
    fields = lambda function: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]  # noqa: E731
    name, _, overload = name.partition(".")
    found, wanted = fields(getattr(npu, name)), fields(names["wanted"])
    if overload == "List":  # an overload by the kind of group_list: one Python function takes both
        found = [field for field in found if field in wanted]
    assert found == wanted


def tensors(batch=2, heads=4, kv_heads=2, sq=5, skv=7, dim=8, value_dim=8, grad=False):
    shapes = ((batch, heads, sq, dim), (batch, kv_heads, skv, dim), (batch, kv_heads, skv, value_dim))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def visible_numbers(sq, skv, **options):
    """Which keys each row sees: values 2^j and equal scores make the answer an integer."""
    q, k = torch.zeros(1, 1, sq, 4), torch.zeros(1, 1, skv, 4)
    v = (2.0 ** torch.arange(skv)).view(1, 1, skv, 1).expand(-1, -1, -1, 4).contiguous()
    out, _, total, *_ = npu.npu_fusion_attention(q, k, v, 1, "BNSD", **options)
    return [round(x) for x in (out[0, 0, :, 0] * total[0, 0, :, 0]).tolist()]


def bits(*rows):
    return [sum(2**key for key in row) for row in rows]


def test_worked_values_of_the_sparse_modes(seeded):
    assert visible_numbers(2, 4, sparse_mode=2, atten_mask=UPPER) == bits({0}, {0, 1})
    assert visible_numbers(2, 4, sparse_mode=3, atten_mask=UPPER) == bits({0, 1, 2}, {0, 1, 2, 3})
    assert visible_numbers(2, 4, sparse_mode=4, atten_mask=UPPER, pre_tockens=1, next_tockens=0) == bits({1, 2}, {2, 3})
    nothing = torch.zeros(2, 4, dtype=torch.uint8)
    assert visible_numbers(2, 4, sparse_mode=0, atten_mask=nothing, pre_tockens=1, next_tockens=0) == bits({0}, {0, 1})
    for mode, mask in ((5, torch.zeros(1, 1, 4, 4, dtype=torch.bool)), (6, torch.zeros(3072, 2048, dtype=torch.bool))):
        assert visible_numbers(4, 4, sparse_mode=mode, prefix=[2], atten_mask=mask) == bits({0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3})
    # One means hidden; without a mask neither the mode nor the tokens count.
    assert visible_numbers(1, 3, atten_mask=torch.tensor([[1, 0, 1]], dtype=torch.uint8)) == bits({1})
    assert visible_numbers(2, 3, sparse_mode=2, pre_tockens=0, next_tockens=0) == bits({0, 1, 2}, {0, 1, 2})


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5])
def test_modes_with_gradients(seeded, layout, mode):
    q, k, v = tensors(grad=True)
    options, want = dict(sparse_mode=mode, scale=0.3), None
    if mode in (0, 1):
        hidden = torch.rand(2, 1, 5, 7) < 0.4
        hidden[..., 0] = False
        options["atten_mask"] = hidden
        want = ~hidden if mode == 1 else ~hidden & seen_by(0, 5, 7, 9, 2)
        options.update(pre_tockens=9, next_tockens=2)
    elif mode == 5:
        options.update(atten_mask=torch.zeros(2, 1, 5, 7, dtype=torch.bool), prefix=[3, 6])
        want = torch.stack([seen_by(5, 5, 7, prefix=p) for p in (3, 6)])[:, None]
    else:
        options.update(atten_mask=UPPER, pre_tockens=3, next_tockens=1)
        want = seen_by(mode, 5, 7, 3, 1)
    out, largest, total, reserved, seed, offset, numels = npu.npu_fusion_attention(
        *(to_layout(x, layout) for x in (q, k, v)), 4, layout, **options)
    reference, lse = attention(q, k, v, want, 0.3, lse=True)
    near(out, to_layout(reference, layout))
    assert largest.shape == total.shape == (2, 4, 5, 8) and largest.dtype == torch.float32
    near(largest[..., 7] + total[..., 3].log(), lse.float(), 4e-6)
    assert (reserved.numel(), seed, offset, numels) == (0, 0, 0, 2 * 4 * 5 * 7)
    grad = torch.randn_like(reference)
    wanted = torch.autograd.grad(reference, (q, k, v), grad)
    out.backward(to_layout(grad.float(), layout))
    for got, right in zip((q, k, v), wanted):
        near(got.grad, right, 4e-6)
    explicit = {"scale_value" if name == "scale" else name: value for name, value in options.items()}
    found = npu.npu_fusion_attention_grad(*(to_layout(x, layout) for x in (q, k, v, grad.float())), 4, layout, **explicit,
                                          softmax_max=largest, softmax_sum=total, attention_in=out)
    for got, right in zip(found, wanted):
        near(got, to_layout(right, layout), 4e-6)
    assert found[3].numel() == found[4].numel() == 0


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


def test_compressed_alibi():
    q, k, v = (torch.randn(1, 2, 1100, 4) for _ in range(3))
    slopes, i, j = torch.tensor([0.02, 0.05]), torch.arange(1100)[:, None], torch.arange(1100)[None]
    whole = -slopes.view(1, 2, 1, 1) * (i - j).abs()
    out = npu.npu_fusion_attention(q, k, v, 2, "BNSD", whole[:, :, -1024:].contiguous(), atten_mask=UPPER, sparse_mode=2, scale=0.5)[0]
    near(out, attention(q, k, v, j <= i, 0.5, bias=0.5 * whole), 1e-5)


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


def test_dropout(seeded):
    q, k, v = tensors()
    keep = torch.rand(2, 4, 5, 7) < 0.7
    packed = torch.from_numpy(__import__("numpy").packbits(keep.flatten().numpy(), bitorder="little"))
    out = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.7, dropout_mask=packed, scale=0.3)[0]
    scores = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)
    near(out, (scores.softmax(-1) * keep / 0.7) @ v.double().repeat_interleave(2, 1))
    first = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.7)
    again = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.7, seed=first[4], offset=first[5])
    assert first[4] != 0 and again[4] == first[4] and (again[0] == first[0]).all()
    other = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.7)
    assert other[4] != first[4] and (other[0] != first[0]).any()


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


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD"])
def test_layouts_of_inference(seeded, layout):
    q, k, v = tensors()
    given, _, back = layout.partition("_")
    hidden = torch.rand(2, 1, 5, 7) < 0.3
    hidden[..., 0] = False
    want, lse = attention(q, k, v, ~hidden, 0.3, lse=True)
    out, found = npu.npu_fused_infer_attention_score(*(to_layout(x, given) for x in (q, k, v)), num_heads=4, num_key_value_heads=2,
                                                     scale=0.3, input_layout=layout, atten_mask=hidden.to(torch.uint8), softmax_lse_flag=True)
    near(out, want.transpose(0, 1) if back == "NBSD" else to_layout(want, back or given))
    assert out.is_contiguous() and found.shape == (2, 4, 5, 1)
    near(found[..., 0], lse, 4e-6)
    none = npu.npu_fused_infer_attention_score_v2(q, k, v, num_query_heads=4, num_key_value_heads=2, input_layout="BNSD")[1]
    assert none.tolist() == [0]


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


def test_pages_of_inference(seeded):
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    pages = [torch.randn(4, 4, 2, 8) for _ in range(2)]  # [blocks, rows, N, D]
    rows = [torch.stack([page[list(ids)].flatten(0, 1) for ids in table.tolist()]).transpose(1, 2) for page in pages]
    forms = {"BSH": lambda p: p.flatten(2), "BNSD": lambda p: p.transpose(1, 2), "NZ": lambda p: p.unflatten(3, (1, 8)).permute(0, 2, 3, 1, 4)}
    q = torch.randn(2, 4, 3, 8)
    for form, shape in forms.items():
        layout = "BNSD" if form == "NZ" else form
        out, lse = npu.npu_fused_infer_attention_score(
            to_layout(q, layout), *(shape(page) for page in pages), num_heads=4, num_key_value_heads=2, input_layout=layout, scale=0.4,
            actual_seq_lengths_kv=[7, 5], block_table=table, block_size=4, atten_mask=UPPER, sparse_mode=3, softmax_lse_flag=True)
        for b, m in enumerate((7, 5)):
            want = attention(q[b:b + 1], *(x[b:b + 1, :, :m] for x in rows), seen_by(3, 3, m), 0.4)
            near(out[b:b + 1], to_layout(want, layout))
    # Queries of several lengths, and tokens.
    out = npu.npu_fused_infer_attention_score_v2(q.transpose(1, 2)[[0, 0, 1, 1], [0, 1, 0, 1]], *(p.transpose(1, 2) for p in pages),
                                                 num_query_heads=4, num_key_value_heads=2, input_layout="TND", actual_seq_qlen=[2, 4],
                                                 actual_seq_kvlen=[7, 5], block_table=table)[0]
    near(out[2:], attention(q[1:, :, :2], *(x[1:, :, :5] for x in rows))[0].transpose(0, 1))
    with pytest.raises(ValueError, match="npu_incre_flash_attention: block_size is 8, but a page of key has 4 rows"):
        npu.npu_incre_flash_attention(q[:, :, :1], *(p.transpose(1, 2) for p in pages), num_heads=4, num_key_value_heads=2,
                                      input_layout="BNSD", actual_seq_lengths=[7, 5], block_table=table, block_size=8)
    # Pages of int8 with a scale for each token and head.
    q8 = [torch.randint(-127, 128, (4, 4, 2, 8), dtype=torch.int8) for _ in range(2)]
    scales = [torch.rand(4, 2, 4) / 50 for _ in range(2)]
    wide = [(page.float() * scale.transpose(1, 2)[..., None]) for page, scale in zip(q8, scales)]
    out = npu.npu_fused_infer_attention_score(q[:, :, :1], *(p.transpose(1, 2) for p in q8), num_heads=4, num_key_value_heads=2,
                                              input_layout="BNSD", actual_seq_lengths_kv=[7, 5], block_table=table,
                                              key_antiquant_scale=scales[0], value_antiquant_scale=scales[1], key_antiquant_mode=5,
                                              value_antiquant_mode=5)[0]
    rows = [torch.stack([page[list(ids)].flatten(0, 1) for ids in table.tolist()]).transpose(1, 2) for page in wide]
    near(out[1:], attention(q[1:, :, :1], *(x[1:, :, :5] for x in rows)))


def test_ropes_prefixes_lists_padding_and_scales(seeded):
    q, k, v = tensors()
    common = dict(num_heads=4, num_key_value_heads=2, input_layout="BNSD")
    fia = npu.npu_fused_infer_attention_score
    qr, kr = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 7, 4)
    near(fia(q, k, v, query_rope=qr, key_rope=kr, **common)[0], attention(torch.cat([q, qr], -1), torch.cat([k, kr], -1), v))
    first = [torch.randn(1, 2, 4, 8) for _ in range(2)]
    whole = [torch.cat([x[:, :, :3].expand(2, -1, -1, -1), y], 2) for x, y in zip(first, (k, v))]
    near(fia(q, k, v, key_shared_prefix=first[0], value_shared_prefix=first[1], actual_shared_prefix_len=[3], **common)[0], attention(q, *whole))
    lists = [[x[:1, :, :4], x[1:]] for x in (k, v)]
    out = fia(q, *lists, **common)[0]
    near(out[0], attention(q[:1], k[:1, :, :4], v[:1, :, :4])[0])
    near(out[1], attention(q[1:], k[1:], v[1:])[0])
    out = fia(q[:, :, :1], k, v, kv_padding_size=torch.tensor([1]), actual_seq_lengths_kv=[4, 6], **common)[0]
    near(out[0], attention(q[:1, :, :1], k[:1, :, 2:6], v[:1, :, 2:6])[0])
    near(out[1], attention(q[1:, :, :1], k[1:, :, :6], v[1:, :, :6])[0])
    q8 = [torch.randint(-127, 128, (2, 2, 7, 8), dtype=torch.int8) for _ in range(2)]
    scale, offset = torch.rand(2, 2, 1, 8) / 50, torch.randn(2, 2, 1, 8)
    wide = [(x.double() + offset[i]) * scale[i] for i, x in enumerate(q8)]
    near(fia(q, *q8, antiquant_scale=scale, antiquant_offset=offset, **common)[0], attention(q, *wide), 4e-6)
    pse = torch.randn(1, 4, 8, 16)
    near(fia(q, k, v, pse_shift=pse, scale=0.3, **common)[0], attention(q, k, v, None, 0.3, bias=pse[:, :, :5, :7]))
    sink = torch.randn(4)
    near(npu.npu_fused_infer_attention_score_v2(q, k, v, num_query_heads=4, num_key_value_heads=2, input_layout="BNSD", learnable_sink=sink)[0],
         attention(q, k, v, sinks=sink))
    q_int8 = fia(q, k, v, quant_scale2=torch.tensor([20.0]), quant_offset2=torch.tensor([3.0]), **common)[0]
    want = (attention(q, k, v) * 20 + 3).round().clamp(-128, 127)
    assert q_int8.dtype == torch.int8 and ((q_int8 - want).abs() <= 1).all()
    assert fia(q[:, :, :0], k, v, **common)[0].shape == (2, 4, 0, 8)
    assert (fia(q, k[:, :, :0], v[:, :, :0], **common)[0] == 0).all()
    with pytest.raises(NotImplementedError, match="npu_fused_infer_attention_score: dequant_scale1 is given, but attention of integer products"):
        fia(q, k, v, dequant_scale1=torch.ones(1), **common)


def test_default_scale_is_one(seeded):
    q, k, v = tensors()
    want = attention(q, k, v)
    near(npu.npu_fusion_attention(q, k, v, 4, "BNSD")[0], want)
    near(npu.npu_prompt_flash_attention(q, k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD"), want)


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

"""ops_transformer.npu: products, quantisation, the gate of a block, norms and rotary, against plain torch in float64."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import near  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402


def silu(x):
    return x * torch.sigmoid(x)


def integers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def close_int8(got, want):
    """Within one step, and equal but for values beside a half."""
    assert got.dtype == torch.int8 and got.shape == want.shape
    assert ((got.double() - want.clamp(-128, 127)).abs() <= 0.502).all()


def test_worked_values():
    row = torch.tensor([[1.0, -4.0]])
    q, scale = npu.npu_dynamic_quant(row)
    assert q.tolist() == [[32, -127]] and scale.tolist() == [pytest.approx(4 / 127)]
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)  # a0 a1 b0 b1
    a, b = x[:, :2], x[:, 2:]
    near(npu.npu_swiglu(x.float()), silu(a) * b)
    q, scale = npu.npu_swiglu_quant(x.float())  # static: the second half is activated
    assert (q == (a * silu(b)).round()).all()
    q, scale = npu.npu_swiglu_quant(x.float(), activate_left=True, quant_mode=1)
    y = silu(a) * b
    assert scale.tolist() == [pytest.approx(127 / y.abs().max().item())] and (q == (y * 127 / y.max()).round()).all()
    # y = [1, -4]: 127 / max
    gate = torch.tensor([[1.0, -4.0, 50.0, 50.0]])
    gate[:, 2:] = torch.tensor([1.27846454, 1.27846454])  # silu of it is 1
    q, scale = npu.npu_swiglu_quant(gate, quant_mode=1)
    assert q.tolist() == [[32, -127]] and scale.item() == pytest.approx(31.75, rel=1e-5)
    q, _ = npu.npu_dequant_swiglu_quant(x.float(), swiglu_mode=1, glu_bias=0.0, glu_alpha=1.0)
    assert q.tolist() == [[round(silu(x[0, 0]).item() * 2), round(silu(x[0, 2]).item() * 4)]]


def test_swiglu_and_its_gradient(seeded):
    for dim in (-1, 0, 1):
        x = torch.randn(4, 6, 8, requires_grad=True)
        a, b = x.double().chunk(2, dim)
        want = silu(a) * b
        out = npu.npu_swiglu(x, dim)
        near(out, want)
        grad = torch.randn_like(out)
        right, = torch.autograd.grad(want, x, grad.double())
        near(torch.autograd.grad(out, x, grad)[0], right, 4e-6)
        near(npu.npu_swiglu_backward(grad, x, dim), right, 4e-6)
    with pytest.raises(ValueError, match="npu_swiglu: dimension 0 of self is 3, must be even"):
        npu.npu_swiglu(torch.randn(3, 4), 0)


def test_quantisation(seeded):
    x, smooth = torch.randn(6, 16).half(), torch.rand(3, 8) + 0.5
    a, b = x.double().chunk(2, -1)
    group = torch.tensor([0, 0, 1, 1, 1, 2])
    y = a * silu(b) * smooth.double()[group]
    for index, kind in ((torch.tensor([2, 5, 6], dtype=torch.int32), 0), (torch.tensor([2, 3, 1], dtype=torch.int32), 1)):
        q, scale = npu.npu_swiglu_quant(x, smooth_scales=smooth, group_index=index, quant_mode=1, group_list_type=kind)
        near(scale, 127 / y.abs().amax(-1), 1e-5)
        close_int8(q, y * 127 / y.abs().amax(-1, keepdim=True))
    sums = torch.randint(-2000, 2000, (6, 16), dtype=torch.int32)
    weight_scale, token_scale = torch.rand(3, 16) / 100, torch.rand(6, 1)
    values = sums.double() * weight_scale.double()[group] * token_scale.double()
    a, b = values.chunk(2, -1)
    counts = torch.tensor([2, 3, 1])
    q, scale = npu.npu_dequant_swiglu_quant(sums, weight_scale=weight_scale, activation_scale=token_scale, quant_scale=smooth, quant_mode=1,
                                            group_index=counts)
    y = a * silu(b) * smooth.double()[group]
    near(scale, y.abs().amax(-1) / 127, 1e-5)
    close_int8(q, y * 127 / y.abs().amax(-1, keepdim=True))
    q, scale = npu.npu_dequant_swiglu_quant(x, quant_scale=torch.full((1, 8), 0.02), quant_offset=torch.ones(8), activate_left=True)
    a, b = x.double().chunk(2, -1)
    close_int8(q, silu(a) * b / 0.02 + 1)  # divided
    assert (scale == 0).all()
    q, _ = npu.npu_dequant_swiglu_quant(torch.tensor([[2.5, 1e9]]), swiglu_mode=2, activate_left=True, glu_alpha=0.0, glu_bias=0.0)
    assert q.item() == round(2.5 * 0.5 * 7)  # clamped at 7
    for mode, want in ((0, 2), (1, 3), (2, 2), (3, 3), (4, 2)):
        got, _ = npu.npu_dequant_swiglu_quant(torch.tensor([[1.0, 2.5]]), quant_scale=torch.tensor([[silu(torch.tensor(1.0)).item()]]),
                                              activate_left=True, round_mode=mode)
        assert got.item() == want
    q, scale = npu.npu_dynamic_quant(x, smooth_scales=torch.cat([smooth, smooth], 1), group_index=torch.tensor([2, 5, 6], dtype=torch.int32))
    y = x.double() * torch.cat([smooth, smooth], 1).double()[group]
    near(scale, y.abs().amax(-1) / 127)
    close_int8(q, y / scale.double()[:, None])


def test_quantised_products(seeded):
    x, w, scale = integers(2, 3, 32), integers(32, 8), torch.rand(8) / 100
    bias, token = torch.randint(-500, 500, (8,), dtype=torch.int32), torch.rand(3)
    sums = x.double() @ w.double()
    near(npu.npu_quant_matmul(x, w, scale, bias=bias, output_dtype=torch.float16, pertoken_scale=token),
         (sums + bias) * scale.double() * token.double()[:, None], 1e-3)
    assert (npu.npu_quant_matmul(x, w, scale, bias=bias, output_dtype=torch.int32) == (sums + bias)).all()
    close_int8(npu.npu_quant_matmul(x, w, scale / 4, offset=torch.full((8,), 3.0)), sums * (scale / 4).double() + 3)
    batched = integers(2, 32, 8)
    near(npu.npu_quant_matmul(x, batched, scale, output_dtype=torch.bfloat16), (x.double() @ batched.double()) * scale.double(), 8e-3)
    packed = npu.npu_trans_quant_param(scale)
    assert packed.dtype == torch.int64 and (packed >> 46 & 1 == 1).all()
    cleared = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    near(npu.npu_quant_matmul(x, w, packed, output_dtype=torch.float16), sums * cleared.double(), 1e-3)
    four = torch.randint(-8, 8, (32, 8))
    words = torch.tensor([[sum((int(v) & 15) << 4 * i for i, v in enumerate(row))] for row in four]).to(torch.int64)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    near(npu.npu_quant_matmul(x, words, scale, output_dtype=torch.float16), (x.double() @ four.double()) * scale.double(), 1e-3)


def test_feed_forward(seeded):
    x, w1, w2 = torch.randn(6, 8), torch.randn(3, 8, 16), torch.randn(3, 16, 8)
    b1, b2 = torch.randn(3, 16), torch.randn(3, 8)
    acts = {"relu": torch.relu, "silu": silu, "gelu": torch.nn.functional.gelu, "fastgelu": lambda v: v * torch.sigmoid(1.702 * v)}
    group = [0, 0, 2, 2, 2, 2]
    for name, act in acts.items():
        want = torch.stack([act(x[i].double() @ w1[g].double() + b1[g]) @ w2[g].double() + b2[g] for i, g in enumerate(group)])
        near(npu.npu_ffn(x, w1, w2, name, expert_tokens=[2, 0, 4], bias1=b1, bias2=b2), want, 1e-5)
        near(npu.npu_ffn(x, w1, w2, name, expert_tokens_index=[2, 2, 6], bias1=b1, bias2=b2), want, 1e-5)
    x8, q1, q2 = integers(4, 8), integers(8, 16), integers(16, 8)
    out = npu.npu_ffn(x8, q1, q2, "relu", scale=torch.tensor([20.0]), offset=torch.tensor([1.0]), deq_scale1=torch.full((16,), 1e-4),
                      deq_scale2=torch.full((8,), 1e-3))
    hidden = (torch.relu((x8.double() @ q1.double()) * 1e-4) * 20 + 1).round().clamp(-128, 127)
    near(out, (hidden @ q2.double()) * 1e-3, 4e-3)
    with pytest.raises(NotImplementedError, match='npu_ffn: activation "swiglu": which half'):
        npu.npu_ffn(x, w1[0], w2[0], "swiglu")


def test_ffn_of_quantised_experts(seeded):
    """Scales and offsets of each expert, one group empty; every expert alone is the reference. 2-D x and 3-D x."""
    counts, x8 = [3, 0, 2], torch.randint(-9, 9, (5, 8), dtype=torch.int8)
    w1, w2 = torch.randint(-9, 9, (3, 8, 16), dtype=torch.int8), torch.randint(-9, 9, (3, 16, 4), dtype=torch.int8)
    b1, b2 = torch.randint(-50, 50, (3, 16), dtype=torch.int32), torch.randint(-50, 50, (3, 4), dtype=torch.int32)
    scale, offset = torch.tensor([0.05, 0.1, 0.2]), torch.tensor([1.0, -2.0, 3.0])
    deq1, deq2 = torch.rand(3, 16), torch.rand(3, 4)
    expert = [0, 0, 0, 2, 2]
    out = npu.npu_ffn(x8, w1, w2, "relu", expert_tokens=counts, bias1=b1, bias2=b2, scale=scale, offset=offset, deq_scale1=deq1, deq_scale2=deq2)
    rows = []
    for row, e in zip(x8.double(), expert):
        hidden = torch.relu((row @ w1[e].double() + b1[e]) * deq1[e])
        hidden = (hidden * scale[e] + offset[e]).round().clamp(-128, 127)
        rows.append((hidden @ w2[e].double() + b2[e]) * deq2[e])
    assert out.dtype == torch.float16
    near(out, torch.stack(rows), 2e-3)
    x, s1, s2 = torch.randn(5, 8), torch.rand(3, 16), torch.rand(3, 2, 4)
    o1, o2 = torch.randn(3, 16), torch.randn(3, 2, 4)
    first = (w1.double() + o1[:, None]) * s1[:, None]
    second = ((w2.double().unflatten(1, (2, 8)) + o2[:, :, None]) * s2[:, :, None]).flatten(1, 2)
    want = torch.stack([torch.relu(row @ first[e]) @ second[e] for row, e in zip(x.double(), expert)])
    given = dict(antiquant_scale1=s1, antiquant_scale2=s2, antiquant_offset1=o1, antiquant_offset2=o2)
    near(npu.npu_ffn(x, w1, w2, "relu", expert_tokens=counts, **given), want, 1e-4)
    one = npu.npu_ffn(x.view(1, 5, 8), w1[2], w2[2], "relu", **{name: value[2] for name, value in given.items()})
    assert one.shape == (1, 5, 4)
    near(one[0], torch.relu(x.double() @ first[2]) @ second[2], 1e-4)



def test_groups(seeded):
    x, w, b = torch.randn(7, 8, requires_grad=True), torch.randn(3, 8, 4), torch.randn(3, 4)
    group = [0, 0, 2, 2, 2]
    want = torch.stack([x[i].double() @ w[g].double() + b[g] for i, g in enumerate(group)])
    for groups, kind in ((torch.tensor([2, 2, 5]), 0), (torch.tensor([2, 0, 3]), 1), (torch.tensor([[0, 2], [2, 3], [0, 0]]), 2)):
        out, = npu.npu_grouped_matmul([x], [w], bias=[b], group_list=groups, group_list_type=kind, group_type=0, split_item=3)
        near(out[:5], want)
        assert out.shape == (7, 4) and (out[5:] == 0).all()
    grad = torch.randn(7, 4)
    right, = torch.autograd.grad(want, x, grad[:5].double())
    near(torch.autograd.grad(out, x, grad)[0], right, 4e-6)
    parts = npu.npu_grouped_matmul([x], list(w), group_list=[2, 2, 5], bias=list(b))
    assert [len(part) for part in parts] == [2, 0, 3]
    near(parts[2], want[2:])
    both = npu.npu_grouped_matmul([x[:2], x[2:]], [w[0], w[1]], group_type=-1)
    near(both[1], x[2:].double() @ w[1].double())
    columns, = npu.npu_grouped_matmul([x], [w[0]], group_list=torch.tensor([3, 3, 8]), group_type=2, split_item=3)
    near(columns, torch.stack([x[:, a:c].double() @ w[0][a:c].double() for a, c in ((0, 3), (3, 3), (3, 8))]))
    x8, w8, scale, token = integers(5, 8), integers(3, 8, 4), torch.rand(3, 4) / 100, torch.rand(5)
    sums = torch.stack([(x8[i].double() @ w8[g].double()) * scale[g].double() for i, g in enumerate(group)])
    for kind, per_token, act in ((torch.bfloat16, None, 0), (torch.float32, token, 5)):
        out, = npu.npu_grouped_matmul([x8], [w8], scale=[scale.to(kind)], per_token_scale=None if per_token is None else [token],
                                      group_list=torch.tensor([2, 0, 3]), group_list_type=1, group_type=0, split_item=2, act_type=act)
        exact = sums if per_token is None else silu(sums * token.double()[:, None])
        assert out.dtype == (torch.bfloat16 if per_token is None else torch.float16)
        near(out, exact, 1.6e-2 if per_token is None else 2e-3)
    anti = torch.rand(3, 4) / 100
    out, = npu.npu_grouped_matmul([x], [w8], antiquant_scale=[anti], antiquant_offset=[torch.ones(3, 4)], group_list=torch.tensor([2, 2, 5]),
                                  group_type=0, split_item=3)
    near(out[:5], torch.stack([x[i].double() @ ((w8[g].double() + 1) * anti[g].double()) for i, g in enumerate(group)]), 4e-6)
    with pytest.raises(ValueError, match="npu_grouped_matmul: Requires manual passing group_type"):
        npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 2, 5]))
    with pytest.raises(ValueError, match="npu_grouped_matmul: The group type must be"):
        npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 2, 5]), group_type=1)
    with pytest.raises(TypeError, match="npu_grouped_matmul: x is a Tensor, must be a list"):
        npu.npu_grouped_matmul(x, [w])


@pytest.mark.parametrize("form", ["one tensor", "list"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_joins_before_rounding(seeded, form, dtype):
    """The sum is rounded once: half a step of the result's dtype."""
    x, w, b = torch.randn(5, 16).to(dtype), torch.randn(3, 16, 64).to(dtype), torch.randn(3, 64)
    ends, strided = torch.tensor([2, 2, 5]), w.transpose(1, 2).contiguous().transpose(1, 2)
    want = torch.stack([x[i].double() @ w[g].double() + b[g].double() for i, g in enumerate((0, 0, 2, 2, 2))])
    step = torch.finfo(dtype).eps * 2 ** want.abs().log2().floor()
    for weights in ([strided], [w]) if form == "one tensor" else (list(w),):
        out, = npu.npu_grouped_matmul([x], weights, bias=[b] if form == "one tensor" else list(b), group_list=ends, group_type=0, split_item=3)
        assert out.dtype == dtype and ((out.double() - want).abs() <= 0.51 * step + 1e-6).all()


def test_groups_of_integers_in_one_product(seeded):
    """One weight tensor and a list of weights have the same bits: each output, rows behind the groups, int4, floats beside."""
    x, w, scale, token = integers(7, 16), integers(3, 16, 8), torch.rand(3, 8) / 1000, torch.rand(7)
    sums = torch.stack([x[i].double() @ w[g].double() for i, g in enumerate((0, 0, 2, 2, 2))])
    out, = npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=2)
    assert out.dtype == torch.int32 and (out[:5].double() == sums).all() and (out[5:] == 0).all() and len(out) == 7
    bias = torch.randint(-99, 99, (3, 8), dtype=torch.int32)
    for more in ({}, {"bias": bias}, {"bias": bias.float()}):
        one, many = (npu.npu_grouped_matmul([x], list(w) if each else [w], scale=list(scale) if each else [scale], per_token_scale=[token],
                                            group_list=torch.tensor([2, 0, 3]), group_list_type=1, group_type=0, act_type=5,
                                            **{name: list(b) if each else [b] for name, b in more.items()}) for each in (False, True))
        assert [len(part) for part in one] == [2, 0, 3] and all((a == b).all() for a, b in zip(one, many))
    small = w.clamp(-8, 7)
    packed = (small.long() & 15).view(3, 16, 1, 8).mul(16 ** torch.arange(8)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    out, = npu.npu_grouped_matmul([x], [packed], group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=2)
    assert (out[:5].double() == torch.stack([x[i].double() @ small[g].double() for i, g in enumerate((0, 0, 2, 2, 2))])).all()


REFUSED_GROUPS = [
    (dict(group_list=torch.tensor([[2, 3], [0, 2]]), group_list_type=2), r"group_list has the pair \(0, 2\) behind group 2, must have ascending"),
    (dict(group_list=torch.tensor([[-1, 3], [0, 2]]), group_list_type=2), r"group_list has the pair \(-1, 3\)"),
    (dict(group_list=torch.tensor([[0, 2], [3, 3]]), group_list_type=2), r"group_list has the pair \(3, 3\) behind group 0, .* below 3"),
    (dict(group_list=torch.tensor([2, 3]), group_list_type=2), r"group_list is \[2\], must be a tensor \[groups, 2\] of pairs"),
    (dict(group_list_type=3), "group_list_type is 3, must be 0, 1 or 2"),
    (dict(split_item=4), "split_item is 4, must be 0 to 3"),
    (dict(group_type=-1), "group_list is given, but group_type is -1"),
    (dict(scale=[torch.ones(3, 4)]), "scale is given, but x is torch.float32"),
    (dict(per_token_scale=[torch.ones(5)], act_type=1), "per_token_scale is given, but x is torch.float32"),
]


@pytest.mark.parametrize("more, message", REFUSED_GROUPS)
def test_groups_that_are_refused(more, message):
    given = dict(group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3)
    given.update(more)
    with pytest.raises(ValueError, match=f"npu_grouped_matmul: {message}"):
        npu.npu_grouped_matmul([torch.ones(5, 8)], [torch.ones(3, 8, 4)], **given)


def test_groups_with_an_epilogue(seeded):
    x, w, scale, token = integers(6, 16), integers(3, 16, 8), torch.rand(3, 8) / 1000, torch.rand(6)
    group = [0, 0, 2, 2, 2, 2]
    c = torch.stack([(x[i].double() @ w[g].double()) * scale[g].double() * token[i].double() for i, g in enumerate(group)])
    s = silu(c[:, :4]) * c[:, 4:]
    q, out_scale, offset = npu.npu_grouped_matmul_swiglu_quant(x, w, torch.tensor([2, 2, 6]), scale, token)
    near(out_scale, s.abs().amax(-1) / 127, 1e-5)
    assert ((q.double() - s / out_scale.double()[:, None]).abs() <= 0.51).all() and offset.shape == ()
    cut = npu.npu_grouped_matmul_swiglu_quant(x, w, torch.tensor([2, 2, 5]), scale, token)  # one row behind the groups
    assert (cut[0][:5] == q[:5]).all() and (cut[0][5:] == 0).all() and (cut[1][5:] == 0).all()
    same = npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [scale], token, torch.tensor([2, 0, 4]), group_list_type=1)
    assert (same[0] == q).all() and (same[1] == out_scale).all()
    logit, rows, shared = torch.rand(6), torch.tensor([0, 1, 1, 2, 3, 0]), torch.randn(2, 8).bfloat16()
    want = torch.zeros(4, 8, dtype=torch.float64)
    want[1:3] += 0.5 * shared.double()
    for i, row in enumerate(rows):
        want[row] += c[i] * logit[i].double()
    near(npu.npu_grouped_matmul_finalize_routing(x, w, torch.tensor([2, 0, 4]), scale=scale, pertoken_scale=token, shared_input=shared,
                                                 logit=logit, row_index=rows, shared_input_weight=0.5, shared_input_offset=1, output_bs=4), want, 1e-5)


# ---- norms and rotary ------------------------------------------------------------------------------------------------


def rms(x, gamma, epsilon, dims=1):
    x = x.double()
    rstd = (x.square().mean(tuple(range(-dims, 0)), keepdim=True) + epsilon).rsqrt()
    return x * rstd * gamma.double(), rstd


def test_norms(seeded):
    for gamma in (torch.randn(8), torch.randn(4, 8)):
        x, g = torch.randn(3, 4, 8, requires_grad=True), gamma.requires_grad_()
        want, rstd = rms(x, g, 1e-3, g.dim())
        out, got = npu.npu_rms_norm(x, g, 1e-3)
        near(out, want)
        near(got, rstd)
        grad = torch.randn(3, 4, 8)
        right = torch.autograd.grad(want, (x, g), grad.double())
        for a, b in zip(torch.autograd.grad(out, (x, g), grad), right):
            near(a, b, 1e-5)
        for a, b in zip(npu.npu_rms_norm_backward(grad, x, g, got), right):
            near(a, b, 2e-5)
    a, b, gamma = (torch.randn(shape).bfloat16() for shape in ((3, 8), (3, 8), (8,)))
    total = a + b
    out, rstd, x = npu.npu_add_rms_norm(a, b, gamma)
    assert (x == total).all() and rstd.shape == (3, 1)
    near(out, rms(total, gamma, 1e-6)[0], 1.6e-2)
    assert all((p == q).all() for p, q in zip(npu.npu_add_rms_norm_v2_functional(a, b, gamma), (rstd, out, x)))
    assert (npu.npu_add_rms_norm_v2(a, b, gamma) == rstd).all() and (a == out).all() and (b == total).all()


def rotated(x, cos, sin, mode):
    x, cos, sin = x.double(), cos.double(), sin.double()
    turned = torch.empty_like(x)
    half = x.shape[-1] // 2
    if mode == "half":
        turned[..., :half], turned[..., half:] = -x[..., half:], x[..., :half]
    else:
        turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return x * cos + turned * sin


def test_rotary(seeded):
    x, cos, sin = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 3, 8), (1, 5, 1, 8), (1, 5, 1, 8)))
    for mode in ("half", "interleave"):
        want = rotated(x, cos, sin, mode)
        out = npu.npu_rotary_mul(x, cos, sin, mode)
        near(out, want)
        grad = torch.randn_like(out)
        right = torch.autograd.grad(want, (x, cos, sin), grad.double())
        for a, b in zip(npu.npu_rotary_mul_backward(grad, x, cos, sin, mode), right):
            near(a, b, 4e-6)
    matrix = torch.randn(8, 8)
    near(npu.npu_rotary_mul(x, cos, sin, rotate=matrix), (x.double() * cos + (x.double() @ matrix.double()) * sin), 4e-6)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    want = [rotated(t, cos.detach(), sin.detach(), "half") for t in (q, k)]
    given = npu.npu_apply_rotary_pos_emb(q, k, cos.detach(), sin.detach())
    assert given[0] is q and given[1] is k
    for got, right in zip(given, want):
        near(got, right)
    x = torch.randn(2, 3, 5, 64)
    c, s = torch.randn(2, 1, 5, 64), torch.randn(2, 1, 5, 64)
    near(npu.npu_interleave_rope(x, c, s), rotated(torch.cat([x[..., ::2], x[..., 1::2]], -1), c, s, "half"))


def test_mrope(seeded):
    cache = torch.randn(20, 8)
    q, k = torch.randn(4, 2 * 12), torch.randn(4, 12)
    positions = torch.randint(0, 20, (3, 4))
    for mode in ("half", "interleave"):
        for cache_mode, section in (("default", None), ("default", [2, 1, 1]), ("interleave", [2, 1, 1])):
            rows = torch.zeros(4, dtype=torch.long)
            if section and cache_mode == "default":
                rows = torch.tensor([0, 0, 1, 2])
            elif section:
                rows = torch.tensor([0, 1, 2, 0])
            at = positions[rows]  # [half, T]
            cos, sin = (torch.stack([cache[at[i], i + offset] for i in range(4)], 1) for offset in (0, 4))
            wide = (lambda t: torch.cat([t, t], -1)) if mode == "half" else (lambda t: t.repeat_interleave(2, -1))
            got = npu.npu_mrope(positions, q, k, cache, 12, mrope_section=section, rotary_mode=mode, cache_mode=cache_mode)
            for out, x in zip(got, (q, k)):
                x = x.view(4, -1, 12)
                want = torch.cat([rotated(x[..., :8], wide(cos)[:, None], wide(sin)[:, None], mode), x[..., 8:].double()], -1)
                near(out, want.view(out.shape))
    with pytest.raises(ValueError, match="npu_mrope: cache_mode only support default or interleave"):
        npu.npu_mrope(positions, q, k, cache, 12, cache_mode="x")


@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
@pytest.mark.parametrize("quantised", [False, True])
def test_latent_caches(seeded, mode, quantised):
    batch, length, size = 2, 3, 4
    kv, gamma = torch.randn(batch, 1, length, 576), torch.randn(512)
    cos, sin = torch.randn(batch, 1, length, 64), torch.randn(batch, 1, length, 64)
    y = rms(kv[..., :512], gamma, 1e-5)[0]
    rope = kv[..., 512:]
    k = rotated(torch.cat([rope[..., ::2], rope[..., 1::2]], -1), cos, sin, "half")
    dtype = torch.int8 if quantised else torch.float32
    scales = dict(k_rope_scale=torch.rand(64) * 20, c_kv_scale=torch.rand(512) * 20) if quantised else {}
    shape = (batch, 1, 5) if mode == "Norm" else (3, size, 1)
    caches = [torch.zeros(*shape, width, dtype=dtype) for width in (64, 512)]
    index = {"Norm": [[0, 4, -1], [2, 1, 0]], "PA": [8, 3, -1, 0, 1, 2], "PA_NZ": [8, 3, -1, 0, 1, 2]}.get(mode, [8, 0])
    rows = {"Norm": [0, 4, -1, 7, 6, 5], "PA_BLK_BNSD": [8, 9, 10, 0, 1, 2], "PA_BLK_NZ": [8, 9, 10, 0, 1, 2]}.get(mode, [8, 3, -1, 0, 1, 2])
    got = npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, torch.tensor(index), *caches, cache_mode=mode, is_output_kv=True, **scales)
    assert got[0] is caches[0] and got[1] is caches[1]
    near(got[2], k)
    near(got[3], y)
    for cache, values, name in zip(caches, (k, y), ("k_rope_scale", "c_kv_scale")):
        width = cache.shape[-1]
        if mode.endswith("NZ"):
            chunk = 32 if quantised else 16
            flat = cache.view(3, width // chunk, size, chunk).transpose(1, 2).reshape(-1, width)
        else:
            flat = cache.view(-1, width)
        for token, row in enumerate(rows):
            if row >= 0:
                value = values.reshape(-1, width)[token]
                if quantised:
                    assert ((flat[row].double() - (value * scales[name].double()).clamp(-128, 127)).abs() <= 0.51).all()
                else:
                    near(flat[row], value)
        untouched = [row for row in range(len(flat)) if row not in rows]
        assert (flat[untouched] == 0).all()

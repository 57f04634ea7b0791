"""ops_transformer.npu: rounding, bits, refusals and gradients of products and norms, against plain torch in float64."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import near  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402


def silu(x):
    return x * torch.sigmoid(x)


def integers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_has_a_gradient(seeded, dim):
    x = torch.randn(4, 6, 8, requires_grad=True)
    a, b = x.double().chunk(2, dim)
    grad = torch.randn_like(a)
    right, = torch.autograd.grad(silu(a) * b, x, grad)
    near(torch.autograd.grad(npu.npu_swiglu(x, dim), x, grad.float())[0], right, 4e-6)


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


def test_rows_behind_the_groups(seeded):
    """Zeros, and without gradients; groups by totals, counts and pairs."""
    x, w, b = torch.randn(7, 8, requires_grad=True), torch.randn(3, 8, 4), torch.randn(3, 4)
    want = torch.stack([x[i].double() @ w[g].double() + b[g] for i, g in enumerate((0, 0, 2, 2, 2))])
    grad = torch.randn(7, 4)
    right, = torch.autograd.grad(want, x, grad[:5].double())
    for groups, kind in ((torch.tensor([2, 2, 5]), 0), (torch.tensor([2, 0, 3]), 1), (torch.tensor([[0, 2], [2, 3], [0, 0]]), 2)):
        out, = npu.npu_grouped_matmul([x], [w], bias=[b], group_list=groups, group_list_type=kind, group_type=0, split_item=3)
        near(out[:5], want)
        assert out.shape == (7, 4) and (out[5:] == 0).all()
        near(torch.autograd.grad(out, x, grad)[0], right, 4e-6)
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

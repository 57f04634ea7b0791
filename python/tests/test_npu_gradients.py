"""ops_transformer.npu: gradients in float64, and of every argument that has one."""

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import near  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

IDS = torch.tensor([[1, 0], [0, 2], [2, 1]])
MAP = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)


def grouped(x, w, *bias):
    return npu.npu_grouped_matmul([x], [w], bias=list(bias), group_list=torch.tensor([2, 2, 4]), group_type=0, split_item=3)[0]


def by_columns(x, w):
    return npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([1, 1, 4]), group_type=2, split_item=3)[0]


def rotated(mode):
    return lambda x, cos, sin: npu.npu_rotary_mul(x, cos, sin, mode)


def attention_of(layout, mask):
    """A row of the mask hides every key: it is the mean of the values."""
    return lambda q, k, v: npu.npu_fusion_attention(q, k, v, 4, layout, atten_mask=mask, scale=0.5)[0]


MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]], dtype=torch.bool)
PADDED = npu.npu_moe_token_permute_with_routing_map(torch.zeros(3, 4), MAP, num_out_tokens=6, drop_and_pad=True)[2]
CALLS = {
    "grouped": (grouped, (5, 4), (3, 4, 2)),
    "grouped, bias": (grouped, (5, 4), (3, 4, 2), (3, 2)),
    "grouped, columns": (by_columns, (3, 4), (4, 2)),
    "ffn": (lambda x, w, v, b, c: npu.npu_ffn(x, w, v, "silu", expert_tokens=[2, 0, 1], bias1=b, bias2=c), (3, 4), (3, 4, 5), (3, 5, 2), (3, 5), (3, 2)),
    "rotary, half": (rotated("half"), (1, 2, 2, 4), (1, 2, 1, 4), (1, 2, 1, 4)),
    "rotary, pairs": (rotated("interleave"), (1, 2, 2, 4), (1, 2, 1, 4), (1, 2, 1, 4)),
    "interleave": (npu.npu_interleave_rope, (1, 2, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4)),
    "permute": (lambda x: npu.npu_moe_token_permute(x, IDS)[0], (3, 4)),
    "permute, cut": (lambda x: npu.npu_moe_token_permute(x, IDS, 4)[0], (3, 4)),
    "permute by a map": (lambda x, p: npu.npu_moe_token_permute_with_routing_map(x, MAP, probs=p)[:2], (3, 4), (3, 3)),
    "unpermute by a map, padded": (lambda x, p: npu.npu_moe_token_unpermute_with_routing_map(x, PADDED, [3, 4], probs=p, drop_and_pad=True),
                                   (6, 4), (3, 3)),
    "compress": (lambda x, w: npu.npu_nsa_compress(x, w, 4, 2, actual_seq_len=[7, 9]), (9, 2, 3), (4, 2)),
    "attention, BNSD": (attention_of("BNSD", MASK), (1, 4, 3, 2), (1, 2, 5, 2), (1, 2, 5, 3)),
    "attention, SBH": (attention_of("SBH", MASK), (3, 1, 8), (5, 1, 4), (5, 1, 4)),
}


@pytest.mark.parametrize("what", CALLS)
def test_gradients_are_right_in_float64(seeded, what):
    call, *shapes = CALLS[what]
    assert torch.autograd.gradcheck(call, [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes])


def test_routing_has_gradients_or_says_that_it_has_none(seeded):
    ids = IDS.to(torch.int32)
    rows = torch.arange(6, dtype=torch.int32).view(2, 3).T.contiguous()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    calls = [lambda x: npu.npu_moe_init_routing(x, rows, ids, 3)[0], lambda x: npu.npu_moe_init_routing(x, rows, ids, 2)[0],
             lambda x: npu.npu_moe_init_routing_v2(x, ids, active_num=6, expert_num=3)[0],
             lambda x: npu.npu_moe_init_routing_v2(x, ids, active_num=4, expert_num=3, active_expert_range=[0, 2])[0],
             lambda x: npu.npu_moe_init_routing_v2(x, ids, expert_num=3, expert_capacity=1, drop_pad_mode=1, expert_tokens_num_type=1)[0]]
    for call in calls:
        assert torch.autograd.gradcheck(call, (x,))
    compiled = torch.compile(calls[2], backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x).square().sum(), x)[0], torch.autograd.grad(calls[2](x).square().sum(), x)[0])
    x = x.detach().float().requires_grad_()
    for name, call in {"npu_moe_init_routing_v2": lambda x: npu.npu_moe_init_routing_v2(x, ids, active_num=6, expert_num=3, quant_mode=1),
                       "npu_moe_init_routing_quant": lambda x: npu.npu_moe_init_routing_quant(x, ids, active_num=6, expert_num=3),
                       "npu_dynamic_quant": npu.npu_dynamic_quant}.items():
        with pytest.raises(RuntimeError, match=f"{name}: (npu_moe_init_routing_v2: )?(x|input) requires gradients, but numbers of eight"):
            call(x)
        with torch.no_grad():
            call(x)
        call(x.detach())


def test_finalize_has_the_gradients_of_all(seeded):
    rows, skip, bias, scales = (torch.randn(shape, requires_grad=True) for shape in ((6, 4), (3, 4), (3, 4), (3, 2)))
    places = torch.tensor([2, 0, 4, 1, 5, 3], dtype=torch.int32)  # column after column
    out = npu.npu_moe_finalize_routing(rows, skip, None, bias, scales, places, IDS)
    by_token = places.long().view(2, 3).t()
    want = skip + (scales.unsqueeze(-1) * (rows[by_token] + bias[IDS])).sum(1)
    grad = torch.randn(3, 4)
    right = torch.autograd.grad(want, (rows, skip, bias, scales), grad)
    compiled = torch.compile(lambda *x: npu.npu_moe_finalize_routing(x[0], x[1], None, *x[2:], places, IDS), fullgraph=True, backend="aot_eager")
    for result in (out, compiled(rows, skip, bias, scales)):
        for got, wanted in zip(torch.autograd.grad(result, (rows, skip, bias, scales), grad), right):
            assert torch.allclose(got, wanted, atol=1e-5)


GATES = {
    "softmax": (lambda x: npu.npu_moe_gating_top_k_softmax(x, None, 2)[:2], lambda x, ids: x.softmax(-1).gather(-1, ids)),
    "softmax of the chosen": (lambda x: npu.npu_moe_gating_top_k_softmax_v2(x, k=2, renorm=1)[:2], lambda x, ids: x.gather(-1, ids).softmax(-1)),
    "sigmoid": (lambda x: npu.npu_moe_gating_top_k(x, 2, norm_type=1, routed_scaling_factor=2.0, bias=x[0].detach())[:2],
                lambda x, ids: 2 * x.sigmoid().gather(-1, ids) / x.sigmoid().gather(-1, ids).sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_router_is_trained(seeded, gate, compiled):
    call, equation = GATES[gate]
    x, grad = torch.randn(5, 6, requires_grad=True), torch.randn(5, 2)
    y, ids = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(x)
    want = equation(x, ids.long())
    assert torch.allclose(y, want, atol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(result, x, grad)[0] for result in (y, want)), atol=1e-6)


@pytest.mark.parametrize("ids", [torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)])
def test_no_tokens_are_permuted(ids):
    rows, places = npu.npu_moe_token_permute(torch.zeros(0, 4), ids)
    assert rows.shape == (0, 4) and places.shape == (0,)


def test_groups_without_rows_keep_the_graph():
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, 2, requires_grad=True)
    out, = npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([0, 0]), group_type=0, split_item=3)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (x, w)))


def test_a_second_derivative_is_refused(seeded):
    rows, probs = torch.randn(6, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    out = npu.npu_moe_token_unpermute(rows, torch.tensor([2, 0, 4, 1, 5, 3]), probs)
    first, = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        first.sum().backward()


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

"""Gradients of ops_transformer.mc2 beside autograd of torch in float64, which has the tensors of all ranks at once."""

import threading

import numpy as np
import pytest
from conftest import import_torch
from test_mc2 import cut, errors_and_results, on_threads, shares

from ops_transformer import matmul, mc2

torch = import_torch()
pytestmark = pytest.mark.usefixtures("seeded")
WORLDS = (1, 2, 3)
INPUTS = [3, 1, 2]  # columns of x that each rank has


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def near(found, wanted, tolerance=1e-4):
    assert found.shape == wanted.shape
    largest = wanted.abs().max().item() if wanted.numel() else 0
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance * (1 + largest), rtol=tolerance)


def gradients(world_size, call, places, arguments, out_places, factor, **options):
    """Of every rank (out, gradients of its arguments), where the loss is sum(factor * out).

    places: for each argument, of each rank, its part of the whole one; out_places: likewise of out and factor."""
    def work(ranks, context):
        r = ranks.rank
        mine = [leaf(argument[place[r]]) for argument, place in zip(arguments, places)]
        out = call(ranks, *mine, context=context, **options)
        (out * factor[out_places[r]]).sum().backward()
        return out.detach(), [argument.grad for argument in mine]
    return on_threads(world_size, work)


def check(found, equation, arguments, factor, places, out_places, copies=()):
    """copies: the arguments of which every rank has the whole, whose gradients are summed over ranks."""
    double = [leaf(argument.double()) for argument in arguments]
    out = equation(*double)
    (out * factor.double()).sum().backward()
    for r, (mine, _) in enumerate(found):
        near(mine, out[out_places[r]].detach())
    for i, argument in enumerate(double):
        if i in copies:
            near(sum(of_rank[i] for _, of_rank in found), argument.grad)
        else:
            for r, (_, of_rank) in enumerate(found):
                near(of_rank[i], argument.grad[places[i][r]])


def of_rows(parts):
    return [(part, slice(None)) for part in cut(parts)]


def of_columns(parts):
    return [(slice(None), part) for part in cut(parts)]


def with_bias(function):
    return lambda ranks, x, weights, bias, **more: function(ranks, x, weights, bias=bias, **more)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("tile_rows", (0, 2))
def test_products_with_all_to_all(world_size, tile_rows):
    rows, n, inputs = [5, 0, 4][:world_size], 7, INPUTS[:world_size]
    k, own, whole = sum(inputs), of_rows(rows), [...] * world_size
    arguments = torch.randn(sum(rows), k), torch.randn(n, k), torch.randn(n)
    factor, more = torch.randn(sum(rows), n), {"rows": rows, "tile_rows": tile_rows}
    for call, x_places, out_places in ((mc2.matmul_all_to_all, own, of_columns(shares(n, world_size))),
                                       (mc2.all_to_all_matmul, of_columns(inputs), own)):
        if call is mc2.all_to_all_matmul:
            more["inputs"] = inputs
        places = (x_places, whole, whole)
        found = gradients(world_size, with_bias(call), places, arguments, out_places, factor, **more)
        check(found, torch.nn.functional.linear, arguments, factor, places, out_places, copies=(1, 2))


@pytest.mark.parametrize("world_size", WORLDS)
def test_lists_of_weights_have_a_gradient_each(world_size):
    rows, widths = [5, 0, 4][:world_size], [2, 4, 1][:world_size]
    x, w, factor = torch.randn(sum(rows), 6), torch.randn(sum(widths), 6), torch.randn(sum(rows), sum(widths))

    def work(ranks, context):
        parts = [leaf(part) for part in w.split(widths)]
        out = mc2.matmul_all_to_all(ranks, x[cut(rows)[ranks.rank]], parts, rows=rows, context=context)
        (out * factor[of_columns(widths)[ranks.rank]]).sum().backward()
        return torch.cat([part.grad for part in parts])
    near(sum(on_threads(world_size, work)), factor.T.double() @ x.double())


@pytest.mark.parametrize("world_size", WORLDS)
def test_gathers(world_size):
    rows, n, k = [5, 0, 4][:world_size], 7, 6
    each, own, columns = [(r,) for r in range(world_size)], of_rows(rows), of_columns([n] * world_size)
    arguments = torch.randn(sum(rows), k), torch.randn(world_size, n, k), torch.randn(world_size, n)
    factor, places = torch.randn(sum(rows), world_size * n), (own, each, each)
    found = gradients(world_size, with_bias(mc2.all_gather_matmul), places, arguments, columns, factor, rows=rows)
    check(found, lambda x, w, bias: torch.nn.functional.linear(x, w.flatten(0, 1), bias.flatten()), arguments, factor, places, columns)


@pytest.mark.parametrize("world_size", WORLDS)
def test_scatters_of_sums(world_size):
    rows, n, inputs = [5, 0, 4][:world_size], 7, INPUTS[:world_size]
    k, pieces, own, whole = sum(inputs), of_columns(inputs), of_rows(rows), [...] * world_size
    arguments = torch.randn(sum(rows), k), torch.randn(n, k), torch.randn(n), torch.randn(sum(rows), n)
    factor, places = torch.randn(sum(rows), n), (pieces, pieces, whole, own)

    def call(ranks, x, w, bias, residual, **more):
        return mc2.matmul_reduce_scatter(ranks, x, w, bias=bias, residual=residual, **more)
    found = gradients(world_size, call, places, arguments, own, factor, rows=rows)
    check(found, lambda x, w, bias, residual: torch.nn.functional.linear(x, w, bias) + residual, arguments, factor, places, own, copies=(2,))


@pytest.mark.parametrize("world_size", WORLDS)
def test_sizes_that_are_left_out_and_bfloat16(world_size):
    x, w = torch.randn(world_size, 4, 8), torch.randn(6 // world_size * world_size, 8)
    n = w.shape[0]

    def work(ranks, context):
        mine, weight = leaf(x[ranks.rank].bfloat16()), leaf(w.bfloat16())
        hidden = mc2.matmul_all_to_all(ranks, mine, weight, context=context)
        out = mc2.all_to_all_matmul(ranks, hidden, torch.eye(n, dtype=torch.bfloat16), dtype="f32", context=context)
        out.square().sum().backward()
        return out.detach(), mine.grad, weight.grad
    found = on_threads(world_size, work)
    double, weight = x.reshape(-1, 8).double(), w.double()
    product = double @ weight.T
    for r, (out, grad_x, _) in enumerate(found):
        assert out.dtype == torch.float32 and grad_x.dtype == torch.bfloat16
        near(out, product[4 * r:4 * r + 4], 0.03)
        near(grad_x, (2 * product @ weight)[4 * r:4 * r + 4], 0.03)
    near(sum(grad for _, _, grad in found), 2 * product.T @ double, 0.03)


@pytest.mark.parametrize("name", ("matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter"))
@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_gradients_have_the_dtypes_of_what_they_belong_to(name, dtype):
    x, w, bias = torch.randn(4, 8).bfloat16(), torch.randn(6, 8 * (2 if name == "all_to_all_matmul" else 1)).bfloat16(), torch.randn(6)

    def work(ranks, context):
        mine = [leaf(t) for t in (x, w, bias)]
        out = getattr(mc2, name)(ranks, mine[0], mine[1], bias=mine[2], dtype=dtype, context=context)
        (out.float() * 2).sum().backward()
        return out.detach(), [t.grad for t in mine]
    for r, (out, (grad_x, grad_w, grad_bias)) in enumerate(on_threads(2, work)):
        assert out.dtype == {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert (grad_x.dtype, grad_w.dtype, grad_bias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        columns_of_x = w[:, 8 * r:8 * r + 8] if name == "all_to_all_matmul" else w
        results = 2 if name == "all_gather_matmul" else 1  # ranks that have a row of x in their out
        near(grad_x, 2 * results * columns_of_x.double().sum(0).expand(4, 8), 0.02)
        assert grad_bias.abs().sum() > 0 and grad_w.abs().sum() > 0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("given", (False, True))
def test_heads_for_rows_and_back(world_size, given):
    rows, heads = ([3, 0, 4][:world_size], [1, 3, 2][:world_size]) if given else ([4] * world_size, [2] * world_size)
    more = {"rows": rows, "heads": heads} if given else {}
    own, mine = of_rows(rows), of_columns(heads)
    x, factor = torch.randn(sum(rows), sum(heads), 5), torch.randn(sum(rows), sum(heads), 5)
    for call, there, back in ((mc2.sequence_to_heads, own, mine), (mc2.heads_to_sequence, mine, own)):
        found = gradients(world_size, call, (there,), (x,), back, factor, **more)
        for r, (out, (grad,)) in enumerate(found):
            assert torch.equal(out, x[back[r]]) and torch.equal(grad, factor[there[r]])


@pytest.mark.parametrize("world_size, order, causal", [(1, "contiguous", True), (2, "zigzag", True), (3, "contiguous", False)])
def test_ring_attention(world_size, order, causal):
    n = 4 * world_size
    q, k, v, factor = (torch.randn(2, heads, n, 8) for heads in (4, 2, 2, 4))
    chunks = np.split(np.arange(n), 2 * world_size)
    own = [np.concatenate((chunks[r], chunks[-1 - r]) if order == "zigzag" else chunks[2 * r:2 * r + 2]) for r in range(world_size)]
    places = [(slice(None), slice(None), part) for part in own]

    def equation(q, k, v):
        scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
        if causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)
    found = gradients(world_size, mc2.ring_attention_forward, (places,) * 3, (q, k, v), places, factor, softmax_scale=0.3, causal=causal,
                      order=order)
    check(found, equation, (q, k, v), factor, (places,) * 3, places)


def test_what_requires_no_gradient_has_none():
    x, w = torch.randn(2, 3, 8), torch.randn(4, 8)

    def work(ranks, context):
        r, weight, mine = ranks.rank, leaf(w), leaf(x[ranks.rank])
        mc2.all_gather_matmul(ranks, x[r], weight, context=context).sum().backward()
        mc2.all_gather_matmul(ranks, mine, w, context=context).sum().backward()
        query = leaf(x[r].view(1, 2, 3, 4))
        key = query.detach()
        mc2.ring_attention_forward(ranks, query, key, key, context=context).sum().backward()
        with torch.no_grad():
            out, lse = mc2.ring_attention_forward(ranks, query, key, key, return_lse=True, context=context)
        assert not out.requires_grad and not lse.requires_grad
        return weight.grad, mine.grad
    for weight, mine in on_threads(2, work):
        near(weight, x.reshape(6, 8).sum(0).expand(4, 8))
        near(mine, 2 * w.sum(0).expand(3, 8))


def test_what_has_no_gradient_is_refused():
    ranks, x, w = mc2.create_threads(1)[0], torch.randn(3, 8), torch.randn(4, 8)
    heads = torch.randn(1, 2, 3, 4)
    for call, kind, text in (
            (lambda: mc2.matmul_all_reduce(ranks, leaf(x), w), RuntimeError, "^matmul_all_reduce: x requires gradients and this function"),
            (lambda: mc2.moe_dispatch(ranks, leaf(x), [[0]] * 3, 1, capacity=3), RuntimeError, "^moe_dispatch: x requires gradients and"),
            (lambda: mc2.all_gather_matmul(ranks, leaf(x), w, out=torch.empty(3, 4)), RuntimeError, "^all_gather_matmul: out is given and"),
            (lambda: mc2.all_gather_matmul(ranks, leaf(x), w, exchanged=torch.empty(3, 8)), RuntimeError,
             "^all_gather_matmul: exchanged is given and an input requires gradients"),
            (lambda: mc2.all_gather_matmul(ranks, leaf(x), matmul.pack(w)), TypeError,
             "^all_gather_matmul: weights is PackedWeight, but another argument is a torch tensor that requires gradients"),
            (lambda: mc2.all_gather_matmul(ranks, x.to(torch.int8), leaf(w)), TypeError, "^all_gather_matmul: x is torch.int8"),
            (lambda: mc2.all_gather_matmul(ranks, leaf(x), w.bfloat16()), ValueError, "^all_gather_matmul: weights is torch.bfloat16"),
            (lambda: mc2.matmul_all_to_all(ranks, leaf(x), w, x_scales=torch.ones(3)), ValueError, "^matmul_all_to_all: x_scales is given"),
            (lambda: mc2.matmul_all_to_all(ranks, leaf(x), w, rows=[1, 2]), ValueError, "^matmul_all_to_all: rows and inputs have 2"),
            (lambda: mc2.matmul_all_to_all(ranks, leaf(x), [w.numpy()]), TypeError, r"^matmul_all_to_all: weights\[0\] is ndarray"),
            (lambda: mc2.ring_attention_forward(ranks, leaf(heads), heads, heads, return_lse=True), RuntimeError,
             "^ring_attention_forward: return_lse is True and an input requires gradients"),
            (lambda: mc2.ring_attention_forward(ranks, heads, heads.numpy(), leaf(heads)), TypeError, "^ring_attention_forward: key is"),
            (lambda: mc2.ring_attention_backward(ranks, leaf(heads), heads, heads, heads, heads, heads[..., 0]), RuntimeError,
             "^ring_attention_backward: grad_out requires gradients and this function has none")):
        with pytest.raises(kind, match=text):
            call()
    assert ranks.status is None


def test_second_derivatives():
    ranks = mc2.create_threads(1)[0]
    heads, x, w = torch.randn(1, 2, 3, 4), torch.randn(3, 8), torch.randn(4, 8)
    for name, call in (("ring_attention_forward", lambda t: mc2.ring_attention_forward(ranks, t, heads, heads)),
                       ("matmul_all_to_all", lambda t: mc2.matmul_all_to_all(ranks, t, w)),
                       ("matmul_reduce_scatter", lambda t: mc2.matmul_reduce_scatter(ranks, t, w))):
        given = leaf(heads if name.startswith("ring") else x)
        grad, = torch.autograd.grad(call(given).square().sum(), given, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{name}: second derivatives are not implemented"):
            grad.sum().backward()
    given = leaf(torch.randn(3, 2, 4))
    grad, = torch.autograd.grad(mc2.sequence_to_heads(ranks, given).pow(3).sum(), given, create_graph=True)
    grad.sum().backward()
    near(given.grad, 6 * given.detach())


def test_errors_of_the_forward_and_the_backward_reach_all_ranks():
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    errors, _ = errors_and_results(2, lambda ranks, context: mc2.all_gather_matmul(ranks, leaf(x[:, :8 - ranks.rank]), w, context=context))
    assert isinstance(errors[1], ValueError) and isinstance(errors[0], RuntimeError) and "rank 1" in str(errors[0])

    for product, rows in ((mc2.all_to_all_matmul, [9, -5]), (mc2.all_gather_matmul, [-9, 4])):
        weight = w.tile(2) if product is mc2.all_to_all_matmul else w
        negative, _ = errors_and_results(2, lambda ranks, context: product(ranks, leaf(x), leaf(weight), rows=rows, context=context))
        assert all(isinstance(error, ValueError) and str(min(rows)) in str(error) for error in negative), negative

    def work(ranks, context):
        mine = leaf(x)
        out = mc2.all_gather_matmul(ranks, mine, w, context=context).sum()
        if ranks.rank == 0:
            out.backward()
    errors, _ = errors_and_results(2, work, timeout_seconds=0.5)
    assert isinstance(errors[0], RuntimeError) and "rank 1" in str(errors[0]) and errors[1] is None


def test_a_rank_that_waits_leaves_the_interpreter_to_others():
    """Rank 0 waits in a call while rank 1, before its own, runs Python: that ends only where the interpreter's lock is free."""
    ranks, x, found = mc2.create_threads(2, timeout_seconds=60.0), np.ones((2, 4), np.float32), []
    waits = threading.Thread(target=lambda: found.append(mc2.matmul_all_reduce(ranks[0], x, x)))
    waits.start()
    for _ in range(200_000):
        pass
    assert not found and waits.is_alive()
    out = mc2.matmul_all_reduce(ranks[1], x, x)
    waits.join(60)
    assert not waits.is_alive() and (out == 8).all() and (found[0] == 8).all()

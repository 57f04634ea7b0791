"""ops_transformer.mc2 beside NumPy in float64 that has the tensors of all ranks at once."""

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from conftest import assert_near, import_torch

from ops_transformer import Context, matmul, mc2, moe
from ops_transformer.flash_attention import flash_attention

WORLDS = (1, 2, 3)


def errors_and_results(world_size, work, **options):
    """Of each rank what work(communicator, context) raises, and what it gives."""
    ranks = mc2.create_threads(world_size, **{"timeout_seconds": 20.0, **options})
    errors, found = [None] * world_size, [None] * world_size

    def body(rank):
        try:
            found[rank] = work(ranks[rank], Context(num_threads=1 + rank % 2))
        except Exception as error:
            errors[rank] = error
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, found


def on_threads(world_size, work, **options):
    errors, found = errors_and_results(world_size, work, **options)
    assert not any(errors), errors
    return found


def shares(n, parts):
    return [n // parts + (i < n % parts) for i in range(parts)]


def cut(sizes):
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def random(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("tile_rows", (0, 3))
def test_products_between_ranks(rng, world_size, tile_rows):
    rows = [5, 0, 9][:world_size]
    owner, k, n = cut(rows), 24, 21
    x, w, bias = random(rng, sum(rows), k), random(rng, n, k), random(rng, n)
    residual, double = random(rng, sum(rows), n), x.astype(np.float64)
    whole = double @ w.T
    columns, inputs = cut(shares(n, world_size)), cut(shares(k, world_size))

    def work(ranks, context):
        r, more = ranks.rank, {"tile_rows": tile_rows, "context": context}
        mine, piece = owner[r], inputs[r]
        gathered, exchanged = np.empty_like(x), np.empty((rows[r], k), np.float32)
        weights = [mc2.pack_columns(w, world_size), w, [w[c] for c in columns]][tile_rows % 3 if r == 0 else 1]
        return (mc2.matmul_all_to_all(ranks, x[mine], weights, bias=bias, rows=rows, **more),
                mc2.all_to_all_matmul(ranks, np.ascontiguousarray(x[:, piece]), w, bias=bias, rows=rows,
                                      inputs=shares(k, world_size), exchanged=exchanged, **more), exchanged,
                mc2.all_gather_matmul(ranks, x[mine], matmul.pack(w), bias=bias, rows=rows, exchanged=gathered, **more), gathered,
                mc2.matmul_reduce_scatter(ranks, x[:, piece], w[:, piece], bias=bias, residual=residual[mine], rows=rows, **more),
                mc2.matmul_all_reduce(ranks, x[:, piece], w[:, piece], bias=bias, residual=residual, **more))
    found = on_threads(world_size, work)
    for r, (columns_of_all, rows_of_all, exchanged, gathered, all_of_x, scattered, reduced) in enumerate(found):
        assert_near(columns_of_all, (whole + bias)[:, columns[r]], factor=4)
        assert_near(rows_of_all, (whole + bias)[owner[r]], factor=4)
        assert (exchanged == x[owner[r]]).all() and (all_of_x == x).all()
        assert_near(gathered, whole + bias, factor=4)
        assert_near(scattered, (whole + bias + residual)[owner[r]], factor=4)
        assert_near(reduced, whole + bias + residual, factor=4)
        assert (reduced == found[0][-1]).all()


def test_sizes_that_are_left_out(rng):
    x, w = random(rng, 3, 7, 16), random(rng, 10, 16)
    found = on_threads(3, lambda ranks, context: (
        mc2.matmul_all_to_all(ranks, x[ranks.rank], w, context=context), mc2.all_gather_matmul(ranks, x[ranks.rank], w, context=context),
        mc2.matmul_reduce_scatter(ranks, x[0], w, context=context), mc2.all_to_all_matmul(ranks, x[0], np.tile(w, 3), context=context)))
    every, once = x.reshape(21, 16).astype(np.float64) @ w.T, 3 * x[0].astype(np.float64) @ w.T
    for r in range(3):
        assert_near(found[r][0], every[:, cut([4, 3, 3])[r]], factor=4)
        assert_near(found[r][1], every, factor=4)
        assert_near(found[r][2], once[cut([3, 2, 2])[r]], factor=4)
        assert_near(found[r][3], once[cut([3, 2, 2])[r]], factor=4)


def test_quantised_weights_and_results_of_other_types(rng):
    x, w = random(rng, 2, 6, 64), random(rng, 9, 64)
    scale = np.abs(w).max(1, keepdims=True) / 127
    q = np.rint(w / scale).astype(np.int8)
    x8 = rng.integers(-100, 100, (2, 6, 64), dtype=np.int8)
    x_scales = np.float32([[0.5] * 6, [0.25] * 6])
    blocks = rng.integers(0, 255, (9, 2, 34), dtype=np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    value = 0.5 * blocks[:, :, 2:].view(np.int8).reshape(9, 64).astype(np.float64)

    def work(ranks, context):
        r, more = ranks.rank, {"context": context}
        return (mc2.matmul_all_to_all(ranks, x8[r], mc2.pack_columns_int(q, scale, parts=2), x_scales=x_scales[r], **more),
                mc2.all_gather_matmul(ranks, x8[r], matmul.pack_int(q), dtype="i32", **more),
                mc2.matmul_all_to_all(ranks, x[r], mc2.pack_columns_blocks(blocks, "q8_0", 9, 64, 2), dtype="f32", **more),
                mc2.all_gather_matmul(ranks, x[r], matmul.pack_blocks(blocks, "q8_0", 9, 64), int8_activations=True, **more))
    found, exact = on_threads(2, work), x8.reshape(12, 64).astype(np.float64)
    rows = x.reshape(12, 64).astype(np.float64)
    for r in range(2):
        assert_near(found[r][0], (exact @ (q * scale).T * x_scales.reshape(12, 1))[:, cut([5, 4])[r]], factor=4)
        assert (found[r][1] == exact @ q.T).all() and found[r][1].dtype == np.int32
        assert_near(found[r][2], (rows @ value.T)[:, cut([5, 4])[r]], factor=4)
        assert np.abs(found[r][3] - rows @ value.T).max() < 0.02 * np.abs(rows @ value.T).max()


@pytest.mark.parametrize("world_size", WORLDS)
def test_experts_on_several_ranks(rng, world_size):
    experts, hidden, top_k, tokens = [2, 1, 3][:world_size], 8, 2, [4, 0, 7][:world_size]
    total, owner, own = sum(experts), cut(tokens), cut(experts)
    x, weights = random(rng, sum(tokens), hidden), random(rng, sum(tokens), top_k)
    ids = rng.integers(-1, total, (sum(tokens), top_k))
    residual, stack = random(rng, sum(tokens), hidden), random(rng, total, 5, hidden)

    def work(ranks, context):
        r, more = ranks.rank, {"experts": experts, "context": context}
        arrived = mc2.moe_dispatch(ranks, x[owner[r]], ids[owner[r]], total, capacity=40, **more)
        doubled = (2 * arrived.rows).astype(np.float32)
        back = mc2.moe_combine(ranks, doubled, ids[owner[r]], total, topk_weights=weights[owner[r]], residual=residual[owner[r]], **more)
        slots = np.concatenate([np.flatnonzero(ids[owner[r]].ravel() == e) for e in range(total)]).astype(int)
        counts = [(ids[owner[r]] == e).sum() for e in range(total)]
        sent = x[owner[r]][slots // top_k]
        rows = np.zeros((len(arrived.rows), hidden), np.float32)
        product = mc2.all_to_allv_grouped_matmul(ranks, sent, counts, stack[own[r]], exchanged=rows, capacity=len(rows), **more)
        home = mc2.grouped_matmul_all_to_allv(ranks, product, counts, np.ascontiguousarray(stack[own[r]].transpose(0, 2, 1)), **more)
        return arrived, back, rows, product, home, sent, slots
    for r, (arrived, back, rows, product, home, sent, slots) in enumerate(on_threads(world_size, work)):
        want = [x[t] for e in own[r] for s in range(world_size) for t in owner[s] for j in range(top_k) if ids[t, j] == e]
        counts = [[(ids[owner[s]] == e).sum() for s in range(world_size)] for e in own[r]]
        assert (arrived.rows == np.reshape(want, (-1, hidden))).all() and (rows == arrived.rows).all()
        assert (arrived.rank_tokens == np.reshape(counts, (-1, world_size))).all()
        assert (arrived.expert_tokens == np.sum(counts, 1)).all()
        mine = np.where(ids[owner[r]] >= 0, weights[owner[r]], 0).sum(1, keepdims=True).astype(np.float64)
        assert_near(back, residual[owner[r]] + 2 * mine * x[owner[r]], factor=4)
        expert = np.repeat(own[r], arrived.expert_tokens)
        assert_near(product, np.einsum("rk,rnk->rn", rows.astype(np.float64), stack[expert]), factor=4)
        double = stack[ids[owner[r]].ravel()[slots]].astype(np.float64)
        assert_near(home, np.einsum("rk,rnk,rnm->rm", sent.astype(np.float64), double, double), factor=8)


def test_the_layer_of_experts_has_the_bits_of_one_process(rng):
    tokens, hidden, inner, total = 9, 16, 12, 5
    x, logits = random(rng, 2 * tokens, hidden), random(rng, 2 * tokens, total)
    gate_up, down = random(rng, total, 2 * inner, hidden), random(rng, total, hidden, inner)
    more = {"renormalise": True, "routed_scaling_factor": 1.5, "shared_gate_up": random(rng, 2 * inner, hidden),
            "shared_down": random(rng, hidden, inner)}
    want = moe.moe_layer(x, gate_up, down, logits, 2, batch_invariant=True, return_routes=True, **more)

    def work(ranks, context):
        own, mine = (slice(0, 3), slice(3, 5))[ranks.rank], slice(tokens * ranks.rank, tokens * (ranks.rank + 1))
        return mc2.moe_layer_forward(ranks, x[mine], gate_up[own], down[own], logits[mine], 2, return_expert_tokens=True, context=context, **more)
    out, expert_tokens = (np.concatenate(parts) for parts in zip(*on_threads(2, work)))
    assert (out == want.out).all() and (expert_tokens == want.expert_tokens).all()


@pytest.mark.parametrize("experts", (False, True))
def test_attention_and_networks_on_ranks_of_their_own(rng, experts):
    tokens, hidden = [5, 3], 6
    x, w, back = random(rng, 8, hidden), random(rng, 4, hidden), random(rng, hidden, 4)
    ids, weights = rng.integers(0, 3, (8, 2)), random(rng, 8, 2)

    def work(ranks, context):
        r, more = ranks.rank, {"attention_ranks": 2, "context": context}
        mine = cut(tokens)[r] if r < 2 else np.arange(0)
        if experts:
            more["num_experts"] = 3
            arrived = mc2.attention_to_ffn(ranks, x[mine], ids[mine], capacity=16 if r == 2 else 0, **more)
            return mc2.ffn_to_attention(ranks, (3 * arrived.rows).astype(np.float32), ids[mine], topk_weights=weights[mine], **more)
        arrived = mc2.attention_to_ffn(ranks, x[mine], weight=w, capacity=8 if r == 2 else 0, **more)
        return mc2.ffn_to_attention(ranks, arrived.rows, weight=back, residual=x[mine] if r < 2 else None, tokens=len(mine), **more)
    found = np.concatenate(on_threads(3, work)[:2])
    double = x.astype(np.float64)
    assert_near(found, 3 * weights.sum(1, keepdims=True) * double if experts else double + double @ w.T @ back.T, factor=8)


@pytest.mark.parametrize("world_size", WORLDS)
def test_heads_for_rows_and_back(rng, world_size):
    rows, heads = [3, 0, 4][:world_size], [1, 2, 2][:world_size]
    x, owner, mine = random(rng, sum(rows), sum(heads), 4), cut(rows), cut(heads)

    def work(ranks, context):
        there = mc2.sequence_to_heads(ranks, x[owner[ranks.rank]], rows=rows, heads=heads, context=context)
        return there, mc2.heads_to_sequence(ranks, there, rows=rows, heads=heads, context=context)
    for r, (there, again) in enumerate(on_threads(world_size, work)):
        assert (there == x[:, mine[r]]).all() and (again == x[owner[r]]).all()


@pytest.mark.parametrize("order", ("contiguous", "zigzag"))
def test_ring_attention(rng, order):
    n, world_size = 24, 3
    q, grad = random(rng, 1, 4, n, 8), random(rng, 1, 4, n, 8)
    k, v = random(rng, 1, 2, n, 8), random(rng, 1, 2, n, 8)
    chunks = np.split(np.arange(n), 2 * world_size)
    places = [np.concatenate((chunks[r], chunks[-1 - r])) if order == "zigzag" else np.concatenate(chunks[2 * r:2 * r + 2])
              for r in range(world_size)]
    scale, groups = 8**-0.5, np.repeat(np.arange(2), 2)
    double = [t.astype(np.float64) for t in (q, k[:, groups], v[:, groups], grad)]
    scores = np.where(np.tri(n, dtype=bool), double[0] @ double[1].swapaxes(2, 3) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    lse = np.log(p.sum(-1)) + scores.max(-1)
    p /= p.sum(-1, keepdims=True)
    ds = p * (double[3] @ double[2].swapaxes(2, 3) - (double[3] * (p @ double[2])).sum(-1, keepdims=True)) * scale
    fold = lambda t: t.reshape(1, 2, 2, n, 8).sum(2)  # noqa: E731
    wanted = (p @ double[2], ds @ double[1], fold(ds.swapaxes(2, 3) @ double[0]), fold(p.swapaxes(2, 3) @ double[3]))

    def work(ranks, context):
        own, more = places[ranks.rank], {"causal": True, "order": order, "context": context}
        parts = [np.ascontiguousarray(t[:, :, own]) for t in (q, k, v)]
        out, statistics = mc2.ring_attention_forward(ranks, *parts, return_lse=True, **more)
        return out, statistics, *mc2.ring_attention_backward(ranks, np.ascontiguousarray(grad[:, :, own]), *parts, out, statistics, **more)
    for own, (out, statistics, *gradients) in zip(places, on_threads(world_size, work)):
        assert_near(out, wanted[0][:, :, own], factor=8)
        assert_near(statistics, lse[:, :, own], factor=8)
        for found, want in zip(gradients, wanted[1:]):
            assert_near(found, want[:, :, own], factor=32)
    assert_near(flash_attention(q, k, v, causal=True), wanted[0], factor=8)  # the model above has the package's conventions


def test_torch_tensors_and_those_that_require_gradients():
    torch = import_torch()
    x, w = torch.randn(2, 5, 8), torch.randn(6, 8)
    found = on_threads(2, lambda ranks, context: mc2.all_gather_matmul(ranks, x[ranks.rank].bfloat16(), w.bfloat16(), context=context))
    for out in found:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), x.reshape(10, 8) @ w.T, atol=0.1, rtol=0.05)
    ranks = mc2.create_threads(1)[0]
    with pytest.raises(RuntimeError, match="matmul_all_reduce: x requires gradients"):
        mc2.matmul_all_reduce(ranks, x[0].requires_grad_(), w)
    with torch.no_grad():
        mc2.matmul_all_reduce(ranks, x[0], w)


def test_what_goes_wrong_is_said_on_all_ranks(rng):
    x, w = random(rng, 4, 8), random(rng, 6, 8)
    mismatch, _ = errors_and_results(2, lambda ranks, context: mc2.matmul_all_reduce(ranks, x[:, :8], w[:6 - ranks.rank], context=context))
    assert all(isinstance(error, RuntimeError) for error in mismatch)
    assert all("6" in str(error) and "5" in str(error) for error in mismatch), mismatch
    refused, _ = errors_and_results(2, lambda ranks, context: mc2.matmul_all_reduce(ranks, x[:, :8 - ranks.rank], w, context=context))
    assert isinstance(refused[1], ValueError) and "7" in str(refused[1]) and "8" in str(refused[1])
    assert isinstance(refused[0], RuntimeError) and "rank 1" in str(refused[0])

    for product in (mc2.matmul_reduce_scatter, mc2.all_to_all_matmul):
        negative, _ = errors_and_results(2, lambda ranks, context: product(ranks, x, np.tile(w, 2) if product is mc2.all_to_all_matmul
                                                                           else w, rows=[9, -5], context=context))
        assert all(isinstance(error, ValueError) and "-5" in str(error) for error in negative), negative

    def once(ranks, context):
        if ranks.rank == 0:
            with pytest.raises(RuntimeError, match="matmul_all_reduce: .*rank 1"):
                mc2.matmul_all_reduce(ranks, x, w, context=context)
            assert "rank 1" in ranks.status
            with pytest.raises(RuntimeError, match="rank 1"):
                mc2.matmul_all_reduce(ranks, x, w, context=context)
        return True
    assert on_threads(2, once, timeout_seconds=0.5) == [True, True]


def test_communicators(rng):
    with mc2.create_threads(1, staging_bytes=1 << 20, direct_stores=False)[0] as ranks:
        assert (ranks.rank, ranks.world_size, ranks.closed, ranks.status) == (0, 1, False, None)
        assert ranks.options["staging_bytes"] == 1 << 20 and ranks.options["direct_stores"] is False
        mc2.matmul_all_reduce(ranks, random(rng, 2, 4), random(rng, 3, 4))
        assert ranks.stats()["calls"] == 1 and repr(ranks) == "Communicator(rank 0 of 1)"
    assert ranks.closed and repr(ranks) == "Communicator(closed)"
    with pytest.raises(ValueError, match="matmul_all_reduce: the communicator is closed"):
        mc2.matmul_all_reduce(ranks, random(rng, 2, 4), random(rng, 3, 4))
    for wrong, text in ((lambda: mc2.create_threads(0), "0"), (lambda: mc2.create_threads(2**40), "world_size"),
                        (lambda: mc2.join("no ticket", 0), "ticket"), (lambda: mc2.create_threads(2, timeout_seconds=-1.0), "timeout")):
        with pytest.raises((ValueError, RuntimeError), match=text):
            wrong()
    with pytest.raises(TypeError, match="all_gather_matmul: communicator is 3 .*must be a Communicator"):
        mc2.all_gather_matmul(3, random(rng, 2, 4), random(rng, 3, 4))
    with pytest.raises(ValueError, match="moe_dispatch: out and capacity are not given"):
        mc2.moe_dispatch(mc2.create_threads(1)[0], random(rng, 2, 4), [[0], [1]], 2)


def test_ranks_that_are_processes():
    program = textwrap.dedent("""
        import sys
        import numpy as np
        from ops_transformer import mc2
        ticket, rank = sys.argv[1], int(sys.argv[2])
        ranks = mc2.join(ticket, rank, timeout_seconds=60.0)
        x = np.random.default_rng(7).standard_normal((2, 5, 8)).astype(np.float32)
        w = np.random.default_rng(8).standard_normal((6, 8)).astype(np.float32)
        out = mc2.allocate_shared(ranks, (10, 3))
        mc2.matmul_all_to_all(ranks, x[rank], w, out=out)
        want = x.reshape(10, 8).astype(np.float64) @ w[3 * rank:3 * rank + 3].T
        assert np.abs(out - want).max() < 1e-5, np.abs(out - want).max()
        assert ranks.stats()["direct_tiles"] > 0
        print("fine")
    """)
    memory = mc2.create_memory(2, shared_bytes=1 << 20)
    children = [subprocess.Popen([sys.executable, "-c", program, memory.ticket, str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(2)]
    assert [child.communicate(timeout=120)[0].strip() for child in children] == ["fine", "fine"]


def test_ranks_of_a_torch_group(tmp_path):
    import_torch()
    program = textwrap.dedent("""
        import sys
        import torch
        from ops_transformer import mc2
        torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
        ranks = mc2.from_group(timeout_seconds=60.0)
        out = mc2.matmul_all_reduce(ranks, torch.full((2, 4), 1.0 + ranks.rank), torch.ones(3, 4))
        assert (out == 12).all(), out
        torch.distributed.destroy_process_group()
        print("fine")
    """)
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "meet"), str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(2)]
    assert [child.communicate(timeout=120)[0].strip().splitlines()[-1:] for child in children] == [["fine"], ["fine"]]


def test_ranks_of_mpi4py():
    """By an object with mpi4py's methods, of threads: what mpi4py itself does is its own."""
    barrier, told, texts = threading.Barrier(2), {}, [None, None]

    class Comm:
        def __init__(self, rank):
            self.rank = rank

        def Get_rank(self):  # noqa: N802
            return self.rank

        def Get_size(self):  # noqa: N802
            return 2

        def bcast(self, value, root):
            if self.rank == root:
                told["value"] = value
            barrier.wait(20)
            value = told["value"]
            barrier.wait(20)
            return value

        def allgather(self, value):
            texts[self.rank] = value
            barrier.wait(20)
            found = list(texts)
            barrier.wait(20)
            return found
    found = [None, None]

    def body(rank):
        ranks = mc2.from_mpi4py(Comm(rank), timeout_seconds=20.0)
        found[rank] = mc2.matmul_all_reduce(ranks, np.ones((2, 4), np.float32), np.ones((3, 4), np.float32), context=Context(1))
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found[0] == 8).all() and (found[1] == 8).all()

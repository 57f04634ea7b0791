"""ops_transformer.npu, section 5 of npu_rules.txt: mixture of experts, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import best_first, close_int8, f64, near, stable_order, to_int8  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logits(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 2).to(dtype)


def torch_ids(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


# ---- 5.1 -------------------------------------------------------------------------------------------------------------


def test_5_1_compute_expert_tokens(rng):
    """out[e] = ids that are at most e."""
    ids = np.sort(rng.integers(0, 6, 20))
    out = npu.npu_moe_compute_expert_tokens(torch_ids(ids), 7)
    assert out.dtype == torch.int32 and out.tolist() == [int((ids <= e).sum()) for e in range(7)]
    assert npu.npu_moe_compute_expert_tokens(torch_ids([]), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_5_1_gating_top_k_softmax(rng, dtype, shape):
    """The k largest of the softmax, of equal ones the lower index; row_idx[t, k] = k * rows + t; a finished row has id E and its y."""
    x, k = logits(rng, *shape, dtype=dtype), 3
    x.view(6, 8)[2, 5] = x.view(6, 8)[2, 1] = x.max() + 1  # a tie
    done = np.array([False, True, False, False, True, False])
    y, ids, rows = npu.npu_moe_gating_top_k_softmax(x, torch.from_numpy(done).view(shape[:-1]), k)
    p = softmax(f64(x).reshape(6, 8))
    order = np.array([best_first(row, k) for row in p])
    near(y, np.take_along_axis(p, order, 1).reshape(*shape[:-1], k), BOUND[dtype])
    assert y.dtype == dtype and ids.dtype == rows.dtype == torch.int32
    assert (f64(ids).reshape(6, k) == np.where(done[:, None], 8, order)).all()
    assert rows.reshape(6, k).tolist() == [[column * 6 + t for column in range(k)] for t in range(6)]
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=f"npu_moe_gating_top_k_softmax: k is {wrong}, must be 1 to the 8 experts of x"):
            npu.npu_moe_gating_top_k_softmax(x, None, wrong)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("renorm", [0, 1])
def test_5_1_gating_top_k_softmax_v2(rng, dtype, renorm):
    """0: softmax, then the k largest, and all of it as float32 if asked; 1: the k largest logits, softmax over them."""
    x = logits(rng, 6, 8, dtype=dtype)
    values = f64(x)
    order = np.array([best_first(row, 3) for row in values])
    want = np.take_along_axis(softmax(values), order, 1) if renorm == 0 else softmax(np.take_along_axis(values, order, 1))
    done = torch.tensor([False] * 5 + [True])
    for asked in (False, True):
        y, ids, everything = npu.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=renorm, finished=done, output_softmax=asked)
        near(y, want, BOUND[dtype])
        assert (f64(ids) == np.where(done[:, None].numpy(), 8, order)).all()
        if renorm == 0 and asked:
            assert everything.dtype == torch.float32
            near(everything, softmax(values))
        else:
            assert everything.numel() == 0


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("groups, kept, mode", [(1, 1, 0), (4, 2, 0), (4, 2, 1), (2, 1, 1)])
def test_5_1_gating_top_k(rng, norm_type, groups, kept, mode):
    """Chosen by score + bias among the groups with the best largest, or two largest; weighed by the score without bias."""
    x, bias, k, factor, eps = logits(rng, 7, 16), rng.standard_normal(16).astype(np.float32), 3, 2.5, 1e-3
    n = softmax(f64(x)) if norm_type == 0 else sigmoid(f64(x))
    y, ids, out = npu.npu_moe_gating_top_k(x, k, bias=torch.from_numpy(bias), k_group=kept, group_count=groups, group_select_mode=mode,
                                           norm_type=norm_type, out_flag=True, routed_scaling_factor=factor, eps=eps)
    for t in range(7):
        choice = (n[t] + bias).reshape(groups, -1)
        score = choice.max(1) if mode == 0 else np.sort(choice, 1)[:, -2:].sum(1)
        left = np.full_like(choice, -np.inf)
        for g in best_first(score, kept):
            left[g] = choice[g]
        order = best_first(left.reshape(-1), k)
        picked = n[t][order]
        assert ids[t].tolist() == order
        near(y[t], factor * (picked if norm_type == 0 else picked / (picked.sum() + eps)))
    near(out, n)
    for more, message in ((dict(renorm=1), "renorm is 1, must be 0"), (dict(norm_type=2), "norm_type is 2, must be 0 or 1"),
                          (dict(group_select_mode=2), "group_select_mode is 2")):
        with pytest.raises(ValueError, match=f"npu_moe_gating_top_k: {message}"):
            npu.npu_moe_gating_top_k(x, k, **more)
    with pytest.raises(NotImplementedError, match="npu_moe_gating_top_k: input_ids and tid2eid"):
        npu.npu_moe_gating_top_k(x, k, input_ids=torch.zeros(7), tid2eid=torch.zeros(9, 3))


@pytest.mark.parametrize("norm_type", [0, 1])
def test_5_1_gating_top_k_backward(rng, norm_type):
    """The chain rule through the choice, the quotient and the scores."""
    x, ids, dy, factor, eps = f64(logits(rng, 5, 8)), np.array([rng.permutation(8)[:3] for _ in range(5)]), rng.standard_normal((5, 3)), 2.5, 1e-2
    n = softmax(x) if norm_type == 0 else sigmoid(x)
    picked = np.take_along_axis(n, ids, 1)
    total = picked.sum(1, keepdims=True) + eps
    dpicked = factor * (dy if norm_type == 0 else dy / total - (dy * picked).sum(1, keepdims=True) / total**2)
    dn = np.zeros_like(n)
    np.put_along_axis(dn, ids, dpicked, 1)
    want = n * (dn - (dn * n).sum(1, keepdims=True)) if norm_type == 0 else dn * n * (1 - n)
    got = npu.npu_moe_gating_top_k_backward(torch.from_numpy(n.astype(np.float32)), torch.from_numpy(dy.astype(np.float32)), torch_ids(ids),
                                            norm_type=norm_type, routed_scaling_factor=factor, eps=eps)
    near(got, want, 5e-6)


# ---- 5.2 -------------------------------------------------------------------------------------------------------------

IDS = np.array([[1, 0], [1, 2], [1, 0], [3, 1], [2, 0]])


@pytest.mark.parametrize("active", [5, 3, 99, 0])
def test_5_2_init_routing(rng, active):
    """A stable sort of the flat ids carries row_idx; expanded_row_idx is by column-major index."""
    x, row_idx = logits(rng, 5, 4), np.arange(10).reshape(2, 5).T
    rows, places, experts = npu.npu_moe_init_routing(x, torch_ids(row_idx), torch_ids(IDS), active)
    order = stable_order(IDS)
    carried = [int(row_idx.reshape(-1)[slot]) for slot in order]
    where = [0] * 10
    for i, row in enumerate(carried):
        where[row] = i
    kept = min(5, active) * 2
    assert (f64(rows) == f64(x)[[row % 5 for row in carried[:kept]]]).all() and rows.shape == (kept, 4)
    assert places.tolist() == where and experts.tolist() == [IDS.reshape(-1)[slot] for slot in order]
    assert places.dtype == experts.dtype == torch.int32


@pytest.mark.parametrize("active_num", [-1, 0, 7, 99])
@pytest.mark.parametrize("limits", [[], [1, 3], [0, 4]])
@pytest.mark.parametrize("row_idx_type", [0, 1])
def test_5_2_init_routing_v2(rng, active_num, limits, row_idx_type):
    """Ids outside the range go last; gather [t * K + k] -> row, -1 where there is none; scatter row -> t * K + k; totals, counts, pairs."""
    x, flat = logits(rng, 5, 4), IDS.reshape(-1)
    start, end = limits or (0, 4)
    order = [slot for slot in stable_order(IDS) if start <= flat[slot] < end]
    rows = 10 if active_num <= 0 else min(active_num, 10)
    counts = [int((flat == e).sum()) for e in range(start, end)]
    pairs = [[e, c] for e, c in zip(range(start, end), counts) if c]
    for kind, want in ((0, list(np.cumsum(counts))), (1, counts), (2, pairs + [[0, 0]] * (4 - len(pairs)))):
        expanded, places, numbers, _ = npu.npu_moe_init_routing_v2(x, torch_ids(IDS), active_num=active_num, expert_num=4, active_expert_range=limits,
                                                                   row_idx_type=row_idx_type, expert_tokens_num_type=kind, expert_tokens_num_flag=True)
        assert numbers.dtype == torch.int64 and numbers.tolist() == want
    valid = min(len(order), rows)
    assert expanded.shape == (rows, 4) and (f64(expanded)[:valid] == f64(x)[[slot // 2 for slot in order[:valid]]]).all()
    if row_idx_type == 1:
        assert places[:valid].tolist() == order[:valid]
    else:
        where = [-1] * 10
        for row, slot in enumerate(order[:valid]):
            where[slot] = row
        assert places.tolist() == where
    assert places.dtype == torch.int32 and places.shape == (10,)


def test_5_2_init_routing_v2_with_capacity(rng):
    """[experts, capacity, H]: surplus is dropped in order, what is missing is zero, counts are those before dropping."""
    x, flat = logits(rng, 5, 4), IDS.reshape(-1)
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(x, torch_ids(IDS), expert_num=5, expert_capacity=2, drop_pad_mode=1, expert_tokens_num_type=1)
    want, where = np.zeros((5, 2, 4)), [-1] * 10
    for e in range(5):
        for place, slot in enumerate(np.flatnonzero(flat == e)[:2]):
            want[e, place], where[slot] = f64(x)[slot // 2], e * 2 + place
    assert (f64(rows) == want).all() and places.tolist() == where and counts.tolist() == [3, 4, 2, 1, 0]
    for more in (dict(active_expert_range=[0, 3]), dict(expert_tokens_num_type=0), dict(row_idx_type=1)):
        with pytest.raises(ValueError, match="npu_moe_init_routing_v2: drop_pad_mode is 1, which needs the full active_expert_range"):
            npu.npu_moe_init_routing_v2(x, torch_ids(IDS), **{**dict(expert_num=5, expert_capacity=2, drop_pad_mode=1, expert_tokens_num_type=1), **more})


@pytest.mark.parametrize("limits", [[], [1, 3]])
def test_5_2_init_routing_v2_with_int8(rng, limits):
    """-1: the scale of each row goes with it. 0: clamp(rint(x * scale + offset)) in f16. 1: q = round(x * s / scale), scale = max / 127."""
    x, flat = logits(rng, 5, 4), IDS.reshape(-1)
    start, end = limits or (0, 4)
    order = [slot for slot in stable_order(IDS) if start <= flat[slot] < end]
    common = dict(expert_num=4, active_expert_range=limits)
    token_scale = rng.random(5).astype(np.float32)
    for source in (x, (x * 20).to(torch.int8)):
        rows, _, _, scale = npu.npu_moe_init_routing_v2(source, torch_ids(IDS), scale=torch.from_numpy(token_scale), **common)
        assert rows.dtype == source.dtype and (f64(scale)[:len(order)] == token_scale[[slot // 2 for slot in order]]).all()
    q = npu.npu_moe_init_routing_v2(x, torch_ids(IDS), quant_mode=0, scale=torch.tensor([20.0]), offset=torch.tensor([1.0]), **common)[0]
    half = x.numpy().astype(np.float16)[[slot // 2 for slot in order]] * np.float16(20) + np.float16(1)
    assert q.dtype == torch.int8 and (f64(q)[:len(order)] == to_int8(half.astype(np.float64))).all()
    for smooth in (None, rng.random((end - start, 4)).astype(np.float32) + 0.5, rng.random((1, 4)).astype(np.float32) + 0.5):
        q, _, _, scale = npu.npu_moe_init_routing_v2(x, torch_ids(IDS), quant_mode=1, scale=None if smooth is None else torch.from_numpy(smooth), **common)
        values = np.stack([f64(x)[slot // 2] * (1 if smooth is None else f64(smooth)[flat[slot] - start if len(smooth) > 1 else 0]) for slot in order])
        top = np.abs(values).max(-1)
        near(scale[:len(order)], top / 127)
        close_int8(q[:len(order)], values * 127 / top[:, None])
    for mode in (2, 3, 6, 11, 16):
        with pytest.raises(NotImplementedError, match=f"npu_moe_init_routing_v2: quant_mode {mode}"):
            npu.npu_moe_init_routing_v2(x, torch_ids(IDS), quant_mode=mode, **common)


def test_5_2_init_routing_quant(rng):
    """int8 rows, places, counts (mode 2) as int32, those before dropping if asked, a scale for each row."""
    x, flat = logits(rng, 5, 4), IDS.reshape(-1)
    order, counts = stable_order(IDS), [3, 4, 2, 1]
    q, places, totals, before, scale = npu.npu_moe_init_routing_quant(x, torch_ids(IDS), expert_num=4, expert_tokens_num_mode=2,
                                                                      expert_tokens_before_capacity_flag=True)
    values = f64(x)[[slot // 2 for slot in order]]
    near(scale, np.abs(values).max(-1) / 127)
    close_int8(q, values * 127 / np.abs(values).max(-1, keepdims=True))
    assert totals.dtype == before.dtype == torch.int32 and totals.tolist() == before.tolist() == counts
    assert [order[row] for row in places.tolist()] == list(range(10))
    assert npu.npu_moe_init_routing_quant(x, torch_ids(IDS), expert_num=4)[3].numel() == 0


def test_5_2_no_tokens():
    x, ids = torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int32)
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=3, expert_tokens_num_type=1)
    assert rows.shape == (0, 4) and places.numel() == 0 and counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("given", ["all", "skip1", "scales", "rows"])
def test_5_2_finalize_routing(rng, mode, given):
    """p at k * n + i of modes 0 and 1, at i * K + k of 2 and 3; -1 in the padded forms is a zero row, to which bias is still added."""
    n, K, width, experts, capacity = 4, 2 if given in ("all", "scales") else 1, 6, 3, 3
    rows = logits(rng, experts, capacity, width) if mode in (1, 3) else logits(rng, n * K, width)
    flat = f64(rows).reshape(-1, width)
    places = rng.permutation(len(flat))[:n * K]
    if mode in (1, 3):
        places[1] = -1
    skip1, skip2, bias = (logits(rng, *shape) for shape in ((n, width), (n, width), (experts, width)))
    scales, of = logits(rng, n, K), rng.integers(0, experts, (n, K))
    arguments = [skip1 if given in ("all", "skip1") else None, skip2 if given == "all" else None, bias if given == "all" else None,
                 scales if given in ("all", "scales") else None]
    want = np.zeros((n, width))
    for i in range(n):
        for skip in arguments[:2]:
            want[i] += 0 if skip is None else f64(skip)[i]
        for k in range(K):
            place = places[k * n + i if mode in (0, 1) else i * K + k]
            row = (flat[place] if place >= 0 else 0) + (0 if arguments[2] is None else f64(bias)[of[i, k]])
            want[i] += row * (1 if arguments[3] is None else f64(scales)[i, k])
    near(npu.npu_moe_finalize_routing(rows, *arguments, torch_ids(places), torch_ids(of), drop_pad_mode=mode), want, 4e-6)
    if mode == 0:
        near(npu.npu_moe_finalize_routing(rows, *arguments, torch_ids(places), torch_ids(of)), want, 4e-6)  # 0 is the default
        with pytest.raises(ValueError, match="npu_moe_finalize_routing: skip2 is given, but skip1 is not"):
            npu.npu_moe_finalize_routing(rows, None, skip2, None, scales, torch_ids(places), None)


# ---- 5.3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("count", [None, 0, 7, 99, -3])
def test_5_3_token_permute(rng, flat, count):
    """Row i is tokens[argsort[i] // K]; sorted_indices is the inverse. num_out_tokens: rows, None or 0 all, below 0 that many fewer."""
    ids = rng.integers(0, 3, 5 if flat else (5, 2))
    tokens, K = logits(rng, 5, 4), 1 if flat else 2
    order = stable_order(ids)
    kept = len(order) if not count else min(count, len(order)) if count > 0 else len(order) + count
    rows, where = npu.npu_moe_token_permute(tokens, torch.from_numpy(ids), count)
    assert (f64(rows) == f64(tokens)[[slot // K for slot in order[:kept]]]).all()
    assert where.dtype == torch.int32 and [order[row] for row in where.tolist()] == list(range(len(order)))


@pytest.mark.parametrize("dtype", BOUND)
def test_5_3_token_unpermute(rng, dtype):
    """out[t] = sum of probs[t, k] * its row; without probs K is 1; probs may be float32 beside 16-bit tokens."""
    rows, where, probs = logits(rng, 6, 4, dtype=dtype), rng.permutation(6), rng.random((3, 2)).astype(np.float32)
    want = np.stack([sum(f64(rows)[where[2 * t + k]] * f64(probs)[t, k] for k in range(2)) for t in range(3)])
    out = npu.npu_moe_token_unpermute(rows, torch_ids(where), torch.from_numpy(probs))
    assert out.dtype == dtype
    near(out, want, BOUND[dtype])
    near(npu.npu_moe_token_unpermute(rows, torch_ids(where)), f64(rows)[where], BOUND[dtype])
    same, kept = npu._npu_moe_token_unpermute(rows, torch_ids(where), torch.from_numpy(probs))
    assert (same == out).all() and (kept == rows).all()
    for call in (lambda: npu.npu_moe_token_unpermute(rows, torch_ids(where), padded_mode=True),
                 lambda: npu.npu_moe_token_permute(rows, torch_ids(where), padded_mode=True)):
        with pytest.raises(NotImplementedError, match="padded_mode: its meaning is not stated for the device"):
            call()


def test_5_3_gradients(rng):
    """permute: the sum of a token's rows; unpermute: (grad * prob, row . grad). Both forms of each."""
    grad_rows, where, probs = logits(rng, 6, 4), rng.permutation(6), rng.random((3, 2)).astype(np.float32)
    rows, grad, ids = logits(rng, 6, 4), logits(rng, 3, 4), torch.zeros(3, 2, dtype=torch.int32)
    want = np.stack([f64(grad_rows)[where[2 * t:2 * t + 2]].sum(0) for t in range(3)])
    near(npu.npu_moe_token_permute_grad(grad, grad_rows, ids, torch_ids(where)), want)
    near(npu.npu_moe_token_permute_grad_v2(grad_rows, torch_ids(where), 3, torch.float32, 2), want)
    drows, dprobs = np.zeros((6, 4)), np.zeros((3, 2))
    for t, k in np.ndindex(3, 2):
        drows[where[2 * t + k]], dprobs[t, k] = f64(grad)[t] * probs[t, k], f64(rows)[where[2 * t + k]] @ f64(grad)[t]
    given = torch_ids(where), torch.from_numpy(probs)
    for found in (npu.npu_moe_token_unpermute_grad(rows, grad, *given),
                  npu.npu_moe_token_unpermute_grad_v2(grad, given[0], 6, torch.float32, given[1], permuted_tokens=rows)):
        near(found[0], drows)
        near(found[1], dprobs, 4e-6)
    alone = np.zeros((6, 4))
    alone[where] = f64(grad_rows)
    near(npu.npu_moe_token_unpermute_grad_v2(grad_rows, given[0], 6, torch.float32)[0], alone)
    with pytest.raises(ValueError, match="npu_moe_token_unpermute_grad_v2: probs is given, but permuted_tokens"):
        npu.npu_moe_token_unpermute_grad_v2(grad, given[0], 6, torch.float32, given[1])


@pytest.mark.parametrize("kind", [torch.bool, torch.int8])
def test_5_3_routing_maps(rng, kind):
    """Rows expert after expert, tokens ascending; sorted_indices: the entries token after token -> row. And back, with the map's probs."""
    table = np.zeros((5, 3), bool)
    for t in range(5):
        table[t, rng.permutation(3)[:2]] = True
    tokens, probs, map_ = logits(rng, 5, 4), rng.random((5, 3)).astype(np.float32), torch.from_numpy(table).to(kind)
    pairs = [(e, t) for e in range(3) for t in range(5) if table[t, e]]
    rows, picked, where = npu.npu_moe_token_permute_with_routing_map(tokens, map_, probs=torch.from_numpy(probs))
    assert (f64(rows) == f64(tokens)[[t for _, t in pairs]]).all() and picked.tolist() == [probs[t, e] for e, t in pairs]
    assert where.tolist() == [pairs.index((e, t)) for t in range(5) for e in range(3) if table[t, e]]
    assert npu.npu_moe_token_permute_with_routing_map(tokens, map_)[1] is None
    given = dict(probs=torch.from_numpy(probs), routing_map=map_)
    out = npu.npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4], **given)
    near(out, f64(tokens) * (probs * table).sum(1, keepdims=True), 4e-6)
    same, *dummies = npu._npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4], **given)
    assert (same == out).all() and [list(x.shape) for x in dummies] == [[1]] * 3
    near(npu.npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4]), 2 * f64(tokens))
    grad = logits(rng, 5, 4)
    drows, dprobs = npu.npu_moe_token_unpermute_with_routing_map_grad(grad, where, where, map_, rows, given["probs"], False, [5, 4])
    near(drows, np.stack([f64(grad)[t] * probs[t, e] for e, t in pairs]))
    near(dprobs, np.where(table, (f64(tokens) * f64(grad)).sum(1)[:, None], 0), 4e-6)
    dtokens, again = npu.npu_moe_token_permute_with_routing_map_grad(drows, picked, where, map_, 3, 5, False)
    near(dtokens, f64(grad) * (probs * table).sum(1, keepdims=True), 4e-6)
    near(again, probs * table)


def test_5_3_routing_maps_with_capacity(rng):
    """drop_and_pad: of each expert the first num_out_tokens / E tokens of a stable descending sort of its column; back by adding."""
    table, tokens, probs = rng.random((5, 3)) < 0.5, logits(rng, 5, 4), rng.random((5, 3)).astype(np.float32)
    ids = [([t for t in range(5) if table[t, e]] + [t for t in range(5) if not table[t, e]])[:2] for e in range(3)]
    flat = [t for row in ids for t in row]
    given = dict(probs=torch.from_numpy(probs), drop_and_pad=True)
    rows, picked, where = npu.npu_moe_token_permute_with_routing_map(tokens, torch.from_numpy(table), num_out_tokens=7, **given)
    assert where.tolist() == flat and (f64(rows) == f64(tokens)[flat]).all() and picked.tolist() == [probs[t, i // 2] for i, t in enumerate(flat)]
    want = np.zeros((5, 4))
    for i, t in enumerate(flat):
        want[t] += f64(tokens)[t] * probs[t, i // 2]
    out, index, token_ids, permuted = npu._npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4], **given)
    near(out, want)
    near(permuted, picked)
    near(npu.npu_moe_token_unpermute_with_routing_map(rows, where, [5, 4], **given), want)
    grad = logits(rng, 5, 4)
    drows, dprobs = npu.npu_moe_token_unpermute_with_routing_map_grad(grad, index, token_ids, None, rows, given["probs"], True, [5, 4])
    wanted = np.zeros((5, 3))
    for i, t in enumerate(flat):
        near(drows[i], f64(grad)[t] * probs[t, i // 2])
        wanted[t, i // 2] = (f64(tokens)[t] * f64(grad)[t]).sum()
    near(dprobs, wanted, 4e-6)


@pytest.mark.parametrize("counts", [[[2, 1], [0, 3]], [[0, 3], [2, 1]], [[1, 2, 0], [3, 0, 1]]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_5_3_re_routing(rng, counts, dtype):
    """Rows that lie rank after rank, expert inside, become expert after expert, rank inside."""
    counts = np.array(counts)
    starts = np.concatenate([[0], counts.reshape(-1).cumsum()])
    order = [row for e in range(counts.shape[1]) for r in range(len(counts))
             for row in range(starts[r * counts.shape[1] + e], starts[r * counts.shape[1] + e + 1])]
    tokens, scales = (logits(rng, len(order), 4) * 9).to(dtype), torch.from_numpy(rng.random(len(order)).astype(np.float32))
    for kind in (torch.int32, torch.int64):
        out, moved, index, totals = npu.npu_moe_re_routing(tokens, torch.from_numpy(counts).to(kind), per_token_scales=scales)
        assert index.dtype == torch.int32 and index.tolist() == order and totals.tolist() == counts.sum(0).tolist()
        assert (out == tokens[order]).all() and (moved == scales[order]).all()
    with pytest.raises(ValueError, match="npu_moe_re_routing: expert_token_num_type is 0 and idx_type 0, must be 1 and 0"):
        npu.npu_moe_re_routing(tokens, torch.from_numpy(counts), expert_token_num_type=0)

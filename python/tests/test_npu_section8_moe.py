"""ops_transformer.npu, section 8.4 of npu_rules.txt: rows to the ranks of their experts and back, all ranks simulated in NumPy. Ranks are threads."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import ops_transformer.npu as npu  # noqa: E402
from npu_model import near  # noqa: E402
from npu_ranks import draws, on_ranks, tensors, worlds  # noqa: E402

K, H = 2, 6
spreads = pytest.mark.parametrize("world, shared, shared_ranks", [(1, 1, 0), (2, 1, 0), (2, 1, 1), (3, 1, 0), (3, 1, 1), (3, 2, 2), (3, 1, 2)])


class Ranks:
    """What the ranks have: tokens x, ids of routed experts (two for each rank without a shared one), and who receives which slot."""

    def __init__(self, world, shared=1, shared_ranks=0, special=0, seed=0, tokens=5):
        self.world, self.shared_ranks = world, shared_ranks
        self.shared = shared if shared_ranks else 0
        self.routed = 2 * (world - shared_ranks)
        rng = np.random.default_rng(seed + 10 * world + shared_ranks)
        self.x = draws(seed, world, tokens, H)
        self.ids = [np.array([rng.permutation(self.routed + special)[:K] for _ in range(tokens)], np.int32) for _ in range(world)]
        self.weights = [rng.random((tokens, K)).astype(np.float32) for _ in range(world)]
        self.active = [np.ones((tokens, K), bool) for _ in range(world)]
        self.common = dict(group_ep="ep", ep_world_size=world, moe_expert_num=self.routed, shared_expert_num=shared,
                           shared_expert_rank_num=shared_ranks)

    def expert_of(self, rank):
        """The experts of a rank: ("shared", j) or ("routed", e)."""
        if rank < self.shared_ranks:
            return [("shared", rank // (self.shared_ranks // self.shared))]
        return [("routed", 2 * (rank - self.shared_ranks) + i) for i in range(2)]

    def arrivals(self, rank):
        """[local expert][source rank]: (token, slot) of the rows that come to a rank; slots K and on are those of shared experts."""
        found = []
        for kind, expert in self.expert_of(rank):
            found.append([])
            for source in range(self.world):
                rows = []
                for t in range(len(self.x[source])):
                    if kind == "routed":
                        rows += [(t, k) for k in range(K) if self.active[source][t, k] and self.ids[source][t, k] == expert]
                    else:
                        copies = self.shared_ranks // self.shared
                        mine = rank % copies == source % copies
                        rows += [(t, K + expert)] if mine and self.active[source][t].any() else []
                found[-1].append(rows)
        return found

    def gathered(self, rank, row):
        """row(source, token, slot, (kind, expert)) of all that come to a rank, in order."""
        return np.array([row(source, t, k, self.expert_of(rank)[e]) for e, sources in enumerate(self.arrivals(rank))
                         for source, rows in enumerate(sources) for t, k in rows])

    def counts(self, rank):
        return np.array([[len(rows) for rows in sources] for sources in self.arrivals(rank)])

    def dispatch(self, rank, name="npu_moe_distribute_dispatch", **more):
        x, ids = tensors((self.x[rank], self.ids[rank]))
        return getattr(npu, name)(more.pop("x", x), ids, ep_rank_id=rank, **self.common, **more)

    def factor(self, expert):
        """What an expert does to a row in these tests: a product with a number."""
        return expert[1] + (2.0 if expert[0] == "routed" else -3.0)

    def after(self, rank, rows):
        """The rows of a dispatch after the rank's experts."""
        factors = np.repeat([self.factor(expert) for expert in self.expert_of(rank)], self.counts(rank).sum(1))
        out = rows.clone()
        out[:len(factors)] *= torch.from_numpy(factors.astype(np.float32))[:, None]
        return out

    def combined(self, rank):
        """What comes back to a rank's tokens."""
        x, out = self.x[rank].astype(np.float64), np.zeros(self.x[rank].shape)
        for t in range(len(x)):
            for k in range(K):
                if self.active[rank][t, k] and self.ids[rank][t, k] < self.routed:
                    out[t] += self.weights[rank][t, k] * self.factor(("routed", self.ids[rank][t, k])) * x[t]
            if self.active[rank][t].any():
                out[t] += sum(self.factor(("shared", j)) for j in range(self.shared)) * x[t]
        return out


def valid(got, want):
    """Rows as wanted, then zeros."""
    near(got[:len(want)], want.reshape(-1, *got.shape[1:]), 0)
    assert not got[len(want):].any()


# ---- dispatch --------------------------------------------------------------------------------------------------------


@spreads
def test_8_4_dispatch(world, shared, shared_ranks):
    ranks = Ranks(world, shared, shared_ranks)
    for totals in (False, True):
        results = on_ranks(world, lambda r: ranks.dispatch(r, expert_token_nums_type=0 if totals else 1))
        for rank, (rows, scales, places, experts, receive, tp, weights) in enumerate(results):
            counts = ranks.counts(rank)
            valid(rows, ranks.gathered(rank, lambda s, t, k, e: ranks.x[s][t]))
            copies = shared_ranks // shared
            sources = -(-world // copies) if rank < shared_ranks else world * 2
            assert rows.shape == (5 * sources, H) and scales is None and tp.numel() == weights.numel() == 0
            near(experts, np.cumsum(counts.sum(1)) if totals else counts.sum(1), 0)
            near(receive, np.cumsum(counts.ravel()), 0)
            flat = ranks.ids[rank].ravel()
            near(places, np.array([np.sum(flat[:i] == e) for i, e in enumerate(flat)]), 0)
            assert (experts.dtype, receive.dtype, places.dtype) == (torch.int64, torch.int32, torch.int32)


@worlds
def test_8_4_dispatch_hides(world):
    """x_active_mask of tokens, in v2 of slots; ranks with other numbers of tokens, which global_bs says."""
    ranks = Ranks(world)
    for r in range(world):
        ranks.x[r], ranks.ids[r] = ranks.x[r][r:], ranks.ids[r][r:]
        ranks.active[r] = np.repeat(np.arange(5 - r) < 3, K).reshape(-1, K)
    results = on_ranks(world, lambda r: ranks.dispatch(r, x_active_mask=torch.from_numpy(ranks.active[r][:, 0].copy()), global_bs=5 * world))
    for rank, (rows, _, places, *_) in enumerate(results):
        valid(rows, ranks.gathered(rank, lambda s, t, k, e: ranks.x[s][t]))
        assert len(rows) == 10 * world and (places.numpy() == -1).tolist() == (~ranks.active[rank]).ravel().tolist()
    ranks.active = [np.random.default_rng(r).random((5 - r, K)) < 0.5 for r in range(world)]
    results = on_ranks(world, lambda r: ranks.dispatch(r, "npu_moe_distribute_dispatch_v2", x_active_mask=torch.from_numpy(ranks.active[r]),
                                                       global_bs=5 * world))
    for rank, (rows, _, assist, *_) in enumerate(results):
        valid(rows, ranks.gathered(rank, lambda s, t, k, e: ranks.x[s][t]))
        assert assist.shape == (128 * len(rows),) and assist.dtype == torch.int32


@spreads
def test_8_4_quantised_rows(world, shared, shared_ranks):
    """int8 rows of x * scales[expert], largest / 127 beside them, and expert_scales."""
    ranks = Ranks(world, shared, shared_ranks)
    (smooth,) = draws(7, 1, ranks.shared + ranks.routed, H)
    for scales in (None, smooth):
        def scaled(s, t, k, e):
            row = ranks.x[s][t]
            return row if scales is None else row * scales[e[1] + (ranks.shared if e[0] == "routed" else 0)]
        given = None if scales is None else torch.from_numpy(scales)
        results = on_ranks(world, lambda r: ranks.dispatch(r, quant_mode=2, scales=given, expert_scales=torch.from_numpy(ranks.weights[r])))
        for rank, (rows, dynamic, *_, weights) in enumerate(results):
            want = ranks.gathered(rank, scaled).astype(np.float64).reshape(-1, H)
            largest = np.abs(want).max(1, initial=0)
            n = len(want)
            assert rows.dtype == torch.int8 and dynamic.dtype == torch.float32 and len(dynamic) == len(rows)
            near(dynamic[:n], largest / 127, 1e-6)
            assert np.abs(rows[:n].double().numpy() - want * (127 / largest[:, None])).max(initial=0) < 0.501
            near(weights[:n], ranks.gathered(rank, lambda s, t, k, e: ranks.weights[s][t, k] if k < K else 1.0), 0)
            assert not rows[n:].any() and not dynamic[n:].any()


@worlds
def test_8_4_packed_rows(world):
    """int32 rows pass as they are, with the scale of their token."""
    ranks = Ranks(world)
    x = [np.random.default_rng(r).integers(-2**31, 2**31, (5, H)).astype(np.int32) for r in range(world)]
    scale = draws(3, world, 5)
    results = on_ranks(world, lambda r: ranks.dispatch(r, "npu_moe_distribute_dispatch_v2", x=torch.from_numpy(x[r]),
                                                       scales=torch.from_numpy(scale[r])))
    for rank, (rows, dynamic, *_) in enumerate(results):
        assert rows.dtype == torch.int32
        valid(rows, ranks.gathered(rank, lambda s, t, k, e: x[s][t]))
        valid(dynamic, ranks.gathered(rank, lambda s, t, k, e: scale[s][t]))


# ---- combine ---------------------------------------------------------------------------------------------------------


@spreads
def test_8_4_combine(world, shared, shared_ranks):
    """Weighted sums; shared experts and shared_expert_x count once each, without weights; hidden tokens."""
    ranks = Ranks(world, shared, shared_ranks)
    ranks.active = [np.repeat(np.arange(5) < 5 - r, K).reshape(-1, K) for r in range(world)]
    beside = draws(5, world, 5, H)

    def there_and_back(r):
        mask = torch.from_numpy(ranks.active[r][:, 0].copy())
        rows, _, places, _, receive, tp, scales = ranks.dispatch(r, x_active_mask=mask)
        ids, weights, more = tensors((ranks.ids[r], ranks.weights[r], beside[r]))
        return npu.npu_moe_distribute_combine(ranks.after(r, rows), ids, places, receive, weights, ep_rank_id=r, **ranks.common, x_active_mask=mask,
                                              shared_expert_x=more, tp_send_counts=tp, expand_scales=scales)

    for rank, out in enumerate(on_ranks(world, there_and_back)):
        near(out, ranks.combined(rank) + beside[rank], 1e-5)


@worlds
def test_8_4_special_experts(world):
    """Ids behind the routed ones: a zero expert, two copies, two constants; weights count for them too; bfloat16 rows."""
    ranks = Ranks(world, special=5)
    ranks.active = [np.random.default_rng(r).random((5, K)) < 0.8 for r in range(world)]
    kinds = dict(zero_expert_num=1, copy_expert_num=2, const_expert_num=2)
    one, two, v = draws(6, 3, 2, H)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        def there_and_back(r):
            x, ids, weights, mask = tensors((ranks.x[r], ranks.ids[r], ranks.weights[r], ranks.active[r]))
            rows, _, assist, _, receive, *_ = ranks.dispatch(r, "npu_moe_distribute_dispatch_v2", x=x.to(dtype), x_active_mask=mask, **kinds)
            alpha_1, alpha_2, vector = (t.to(dtype) for t in tensors((one, two, v)))
            return npu.npu_moe_distribute_combine_v2(ranks.after(r, rows), ids, assist, receive, weights, ep_rank_id=r, **ranks.common, **kinds,
                                                     x_active_mask=mask, ori_x=x.to(dtype), const_expert_alpha_1=alpha_1,
                                                     const_expert_alpha_2=alpha_2, const_expert_v=vector)

        for rank, out in enumerate(on_ranks(world, there_and_back)):
            want = ranks.combined(rank)
            for t in range(5):
                for k in range(K):
                    special = ranks.ids[rank][t, k] - ranks.routed
                    if not ranks.active[rank][t, k] or special < 1:
                        continue
                    row = ranks.x[rank][t]
                    want[t] += ranks.weights[rank][t, k] * (row if special < 3 else one[special - 3] * row + two[special - 3] * v[special - 3])
            assert out.dtype == dtype
            near(out, want, bound)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_8_4_refusals():
    ranks = Ranks(1)
    x, ids, weights = tensors((ranks.x[0], ranks.ids[0], ranks.weights[0]))
    places, counts = torch.zeros(10, dtype=torch.int32), torch.tensor([5, 10], dtype=torch.int32)
    give = lambda **more: ranks.dispatch(0, **more)  # noqa: E731
    give2 = lambda **more: ranks.dispatch(0, "npu_moe_distribute_dispatch_v2", **more)  # noqa: E731
    back = lambda **more: npu.npu_moe_distribute_combine(  # noqa: E731
        more.pop("rows", x.repeat(2, 1)), ids, places, more.pop("counts", counts), weights, ep_rank_id=0, **ranks.common, **more)
    cases = (
        (NotImplementedError, "tp_world_size is 2", lambda: give(tp_world_size=2)),
        (NotImplementedError, "expert_shard_type is 1", lambda: give(expert_shard_type=1)),
        (NotImplementedError, "quant_mode is 3", lambda: give(quant_mode=3)),
        (NotImplementedError, "elastic_info is given", lambda: give2(elastic_info=x)),
        (NotImplementedError, "performance_info is given", lambda: give2(performance_info=x)),
        (NotImplementedError, "y_dtype is given", lambda: give2(y_dtype=291)),
        (NotImplementedError, "comm_quant_mode is 2", lambda: back(comm_quant_mode=2)),
        (NotImplementedError, "out_dtype is 1", lambda: back(out_dtype=1)),
        (NotImplementedError, "weight_scale is given", lambda: back(weight_scale=x)),
        (ValueError, "ep_rank_id is 1, but this rank of group_ep is 0",
         lambda: npu.npu_moe_distribute_dispatch(x, ids, ep_rank_id=1, **ranks.common)),
        (ValueError, "expert_token_nums_type is 2", lambda: give(expert_token_nums_type=2)),
        (ValueError, "scales is given, but quant_mode is 0", lambda: give(scales=x)),
        (ValueError, r"scales is \[5, 6\], must be \[2, 6\]", lambda: give(scales=x, quant_mode=2)),
        (ValueError, "x is int32", lambda: give(x=x.int())),
        (ValueError, "expert_ids has 5 rows, must have 4", lambda: give(x=x[:4])),
        (ValueError, "expert_ids are from 1 to 2, must be below 2 experts", lambda: npu.npu_moe_distribute_dispatch(x, ids + 1, ep_rank_id=0, **ranks.common)),
        (ValueError, "global_bs is 4", lambda: give(global_bs=4)),
        (ValueError, r"x_active_mask is \[4\], must be \[5\]", lambda: give(x_active_mask=torch.ones(4, dtype=torch.bool))),
        (ValueError, "moe_expert_num is 0", lambda: npu.npu_moe_distribute_dispatch(x, ids, "ep", 1, 0, 0)),
        (ValueError, "shared_expert_rank_num is 1", lambda: npu.npu_moe_distribute_dispatch(x, ids, "ep", 1, 0, 2, shared_expert_rank_num=1)),
        (ValueError, "ep_send_counts has 1 counts, must have 2", lambda: back(counts=counts[:1])),
        (ValueError, "ep_send_counts end at 10, but expand_x has 5 rows", lambda: back(rows=x)),
        (ValueError, "shared_expert_x is torch.float64", lambda: back(shared_expert_x=x.double())),
        (RuntimeError, "x requires gradients", lambda: give(x=x.clone().requires_grad_())),
        (RuntimeError, "expand_x requires gradients", lambda: back(rows=x.repeat(2, 1).requires_grad_())))
    for error, message, call in cases:
        with pytest.raises(error, match=f"npu_moe_distribute_.*: {message}"):
            on_ranks(1, lambda rank, call=call: call())


def test_8_4_strict_limits():
    x, ids = torch.zeros(4, 7168, dtype=torch.float16), torch.zeros(4, 8, dtype=torch.int32)
    v1 = lambda **more: npu.npu_moe_distribute_dispatch(  # noqa: E731
        more.pop("x", x), more.pop("ids", ids), "ep", more.pop("ranks", 8), 0, more.pop("routed", 16), strict=True, **more)
    v2 = lambda **more: npu.npu_moe_distribute_dispatch_v2(  # noqa: E731
        more.pop("x", x), more.pop("ids", ids), "ep", more.pop("ranks", 8), 0, more.pop("routed", 16), strict=True, **more)
    calls = {
        "the dtype of x is torch.float32": lambda: v1(x=x.float()),
        "tp_world_size is 2": lambda: v1(tp_world_size=2),
        "shared_expert_num is 5": lambda: v2(shared_expert_num=5),
        "shared_expert_rank_num is 3": lambda: v2(shared_expert_num=2, shared_expert_rank_num=3),
        "moe_expert_num is 520": lambda: v1(routed=520),
        "moe_expert_num is 17": lambda: v2(routed=17),
        "K of expert_ids is 9": lambda: v1(ids=ids.new_zeros(4, 9)),
        "K of expert_ids is 17": lambda: v2(ids=ids.new_zeros(4, 17)),
        "H of x is 7167": lambda: v1(x=x[:, 1:]),
        "H of x is 8": lambda: v2(x=x[:, :8]),
        "BS of expert_ids is 513": lambda: v2(ids=ids.new_zeros(513, 8)),
        "ep_world_size is 4": lambda: v1(ranks=4),
        "ep_world_size is 1": lambda: v2(ranks=1),
        "ep_world_size is 8": lambda: v1(shared_expert_rank_num=3),
        "the dtype of expand_x is torch.float32": lambda: npu.npu_moe_distribute_combine_v2(x.float(), ids, ids, ids, x, "ep", 8, 0, 16, strict=True),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"strict: {message}"):
            call()

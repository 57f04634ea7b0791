"""ops_transformer.npu, section 8 of npu_rules.txt: products fused with communication, each rule against all ranks simulated in NumPy.

Ranks are threads. What needs the core's products between ranks is skipped where a build has no ops_transformer.mc2.
"""

import inspect
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import ops_transformer.npu as npu  # noqa: E402
from npu_model import near  # noqa: E402
from npu_ranks import draws, on_ranks, tensors, worlds  # noqa: E402


class Named:
    """As much of a communicator as names need."""

    def __init__(self, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size


# ---- names of groups -------------------------------------------------------------------------------------------------


def test_8_groups():
    """A name holds in its thread before the process's; an unknown one says how to register; the size is compared."""
    from ops_transformer.npu._groups import group_of

    mine, whole, seen = Named(1, 2), Named(0, 3), []
    npu.register_group("rows", whole, whole_process=True)
    npu.register_group("rows", mine)
    assert group_of("hcom", "rows", 2) is mine and group_of("hcom", whole) is whole
    thread = threading.Thread(target=lambda: seen.append(group_of("hcom", "rows", 3)))
    thread.start()
    thread.join()
    assert seen == [whole]
    with pytest.raises(ValueError, match="world_size is 5, but hcom is a group of 2 ranks"):
        group_of("hcom", "rows", 5)
    npu.unregister_group("rows")
    assert group_of("hcom", "rows") is whole
    npu.unregister_group("rows")
    for call in (lambda: group_of("hcom", "rows"), lambda: npu.unregister_group("rows")):
        with pytest.raises(ValueError, match='there is no group "rows": call ops_transformer.npu.register_group'):
            call()
    for name, communicator, message in ((7, mine, "name is 7"), ("", mine, "name is ''"), ("rows", object(), "communicator is a object")):
        with pytest.raises(TypeError, match=message):
            npu.register_group(name, communicator)
    with pytest.raises(TypeError, match="group_ep is a float, must be the name of a group"):
        group_of("group_ep", 1.5)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_8_groups_of_torch(monkeypatch):
    """The name of a group of torch.distributed, and the group itself, give one communicator, made once."""
    from ops_transformer.npu import _groups

    made = []

    def from_group(group):
        made.append(group)
        return Named(0, 1)

    monkeypatch.setattr(_groups.mc2, "from_group", from_group)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        found = _groups.group_of("hcom", group.group_name, 1)
        assert _groups.group_of("hcom", group) is found and made == [group]
        with pytest.raises(ValueError, match='there is no group "rows"'):
            _groups.group_of("hcom", "rows")
    finally:
        torch.distributed.destroy_process_group()
        _groups._of_torch.clear()


@pytest.mark.parametrize("name", ("npu_attention_to_ffn", "npu_ffn_to_attention"))
def test_8_3_results_in_memory_of_other_ranks_are_refused(name):
    function = getattr(npu, name)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(NotImplementedError, match=f"{name}: the device writes into memory of other ranks"):
        function(*[torch.zeros(1)] * len(needed))


def test_8_strict_limits():
    x, w = torch.zeros(6, 256, dtype=torch.float16), torch.zeros(256, 6, dtype=torch.float16)
    calls = {
        "world_size is 3": lambda: npu.npu_all_gather_base_mm(x, w, "ep", 3, strict=True),
        "k of self is 8": lambda: npu.npu_mm_reduce_scatter_base(x[:, :8], w[:8], "ep", 2, strict=True),
        "m of self is 6": lambda: npu.npu_mm_reduce_scatter_base(x, w, "ep", 4, strict=True),
        "H2 of x2 is 6": lambda: npu.npu_matmul_all_to_all(x, w, "ep", 4, strict=True),
        "BS of x1 is 6": lambda: npu.npu_all_to_all_matmul(x, w, "ep", 4, strict=True),
        "x1 is .*no empty tensors": lambda: npu.npu_mm_all_reduce_base(x[:0], w, "ep", strict=True),
        "the dtype of gmm_x is torch.float32": lambda: npu.npu_alltoallv_gmm(x.float(), w[None], "ep", 8, [0], [0], strict=True),
        "ep_world_size is 2": lambda: npu.npu_gmm_alltoallv(x, w[None], "ep", 2, [0], [0], strict=True),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"strict: {message}"):
            call()


# ---- 8.1 -------------------------------------------------------------------------------------------------------------


@worlds
def test_8_1_all_reduce(world):
    x, w, b, r = draws(1, world, 7, 5), draws(2, world, 5, 6), draws(3, world, 6), draws(4, world, 7, 6)
    want = sum(x[i] @ w[i] + b[i] + r[i] for i in range(world))
    tx, tw, tb, tr = map(tensors, (x, w, b, r))
    for out in on_ranks(world, lambda i: npu.npu_mm_all_reduce_base(tx[i], tw[i], "ep", bias=tb[i], x3=tr[i])):
        near(out, want, 1e-5)
    small = torch.arange(-15, 15, dtype=torch.int8).reshape(5, 6)
    want = sum(x[i] @ ((small.numpy() + 2.0) * 0.5) for i in range(world))
    half, two = torch.tensor([0.5]), torch.tensor([2.0])
    for out in on_ranks(world, lambda i: npu.npu_mm_all_reduce_base(tx[i][None], small, "ep", antiquant_scale=half, antiquant_offset=two)):
        near(out, want[None], 1e-5)


@worlds
def test_8_1_gather_and_scatter(world):
    x, w = draws(1, world, 7, 5), draws(2, world, 5, 6)
    tx, tw = map(tensors, (x, w))
    for out, gathered in on_ranks(world, lambda i: npu.npu_all_gather_base_mm(tx[i], tw[0], "ep", world)):
        near(gathered, np.concatenate(x), 0)
        near(out, np.concatenate(x) @ w[0], 1e-5)
    assert all(pair[1].numel() == 0 for pair in on_ranks(world, lambda i: npu.npu_all_gather_base_mm(tx[i], tw[0], "ep", world, gather_output=False)))
    parts = np.array_split(sum(x[i] @ w[i] for i in range(world)), world)
    for out, part in zip(on_ranks(world, lambda i: npu.npu_mm_reduce_scatter_base(tx[i], tw[i], "ep", world)), parts):
        near(out, part, 1e-5)


@worlds
def test_8_1_all_to_all(world):
    x, (w, v), (b,) = draws(1, world, 7, 5), (draws(2, 1, 5, 6)[0], draws(3, 1, 5 * world, 4)[0]), draws(4, 1, 6)
    tx, (tw, tv, tb) = tensors(x), tensors((w, v, b))
    for i, out in enumerate(on_ranks(world, lambda i: npu.npu_matmul_all_to_all(tx[i], tw, "ep", world, tb))):
        near(out, np.concatenate([np.array_split(one @ w + b, world, 1)[i] for one in x]), 1e-5)
    for i, (out, exchanged) in enumerate(on_ranks(world, lambda i: npu.npu_all_to_all_matmul(tx[i], tv, "ep", world))):
        joined = np.concatenate([np.array_split(one, world)[i] for one in x], 1)
        near(exchanged, joined, 0)
        near(out, joined @ v, 1e-5)


@worlds
def test_8_1_int8_gather_and_scatter(world):
    """x1_scale of this rank's rows, x2_scale of columns; the dtypes of the product."""
    rng = np.random.default_rng(world)
    x, w = rng.integers(-128, 128, (world, 7, 5)).astype(np.int8), rng.integers(-128, 128, (world, 5, 6)).astype(np.int8)
    of_rows, of_columns = [1e-2 * (1 + abs(t)) for t in draws(2, world, 7, 1)], [1e-2 * (1 + abs(t)) for t in draws(3, world, 1, 6)]
    real = [x[i] * of_rows[i].astype(np.float64) for i in range(world)]
    weights = [w[i] * of_columns[i].astype(np.float64) for i in range(world)]
    tx, tw, rows, columns = map(tensors, (x, w, of_rows, of_columns))
    for more, dtype, bound in (({}, torch.bfloat16, 5e-3), ({"output_dtype": torch.float16}, torch.float16, 1e-3)):
        more.update(comm_mode="aiv")
        for out, gathered in on_ranks(world, lambda i: npu.npu_all_gather_base_mm(tx[i], tw[0], "ep", world, x1_scale=rows[i],
                                                                                  x2_scale=columns[0], **more)):
            assert out.dtype == dtype and gathered.dtype == torch.int8
            near(gathered, np.concatenate(x), 0)
            near(out, np.concatenate(real) @ weights[0], bound)
        parts = np.array_split(sum(real[i] @ weights[i] for i in range(world)), world)
        for out, part in zip(on_ranks(world, lambda i: npu.npu_mm_reduce_scatter_base(tx[i], tw[i], "ep", world, x1_scale=rows[i],
                                                                                      x2_scale=columns[i], **more)), parts):
            assert out.dtype == dtype
            near(out, part, bound)
    words = npu.npu_trans_quant_param(torch.full((1, 6), 0.5))
    for out, _ in on_ranks(world, lambda i: npu.npu_all_gather_base_mm(tx[i], tw[0], "ep", world, x2_scale=words)):
        assert out.dtype == torch.float16
        near(out, np.concatenate(x).astype(np.float64) @ w[0] * 0.5, 1e-3)


@worlds
def test_8_1_int8_all_reduce(world):
    """int32 bias before the scales, x3 behind them, both of every rank."""
    rng = np.random.default_rng(world)
    x, w = rng.integers(-128, 128, (world, 2, 3, 5)).astype(np.int8), rng.integers(-128, 128, (world, 5, 6)).astype(np.int8)
    bias = rng.integers(-9999, 9999, (world, 6)).astype(np.int32)
    rows, columns = [1e-2 * (1 + abs(t)) for t in draws(2, world, 6)], [1e-2 * (1 + abs(t)) for t in draws(3, world, 6)]
    tx, tw, tb, tr, tc = map(tensors, (x, w, bias, rows, columns))
    beside = [torch.randn(2, 3, 6, dtype=torch.float16, generator=torch.Generator().manual_seed(i)) for i in range(world)]
    sums = [x[i].astype(np.float64) @ w[i] for i in range(world)]
    for out in on_ranks(world, lambda i: npu.npu_mm_all_reduce_base(tx[i], tw[i], "ep", bias=tb[i], x3=beside[i], dequant_scale=tc[i],
                                                                    pertoken_scale=tr[i])):
        assert out.dtype == torch.float16
        near(out, sum((sums[i] + bias[i]) * columns[i] * rows[i].reshape(2, 3, 1) + beside[i].double().numpy() for i in range(world)), 1e-3)
    half = torch.tensor([0.5], dtype=torch.bfloat16)
    for out in on_ranks(world, lambda i: npu.npu_mm_all_reduce_base(tx[i], tw[i], "ep", dequant_scale=half)):
        assert out.dtype == torch.bfloat16
        near(out, sum(sums) * 0.5, 5e-3)


def test_8_1_refusals():
    x = torch.zeros(2, 2)
    for error, message, call in (
            (ValueError, "reduce_op is 'max'", lambda: npu.npu_mm_all_reduce_base(x, x, "ep", reduce_op="max")),
            (ValueError, "gather_index is 1", lambda: npu.npu_all_gather_base_mm(x, x, "ep", 1, gather_index=1)),
            (ValueError, "world_size is 2, but hcom is a group of 1", lambda: npu.npu_all_gather_base_mm(x, x, "ep", 2)),
            (NotImplementedError, "comm_quant_scale_1 is given", lambda: npu.npu_mm_all_reduce_base(x, x, "ep", comm_quant_scale_1=x)),
            (NotImplementedError, "gmm_x is int8: this function has no scales",
             lambda: npu.npu_gmm_alltoallv(x.to(torch.int8), x[None], "ep", 1, [2], [2])),
            (NotImplementedError, "output_dtype is torch.float16", lambda: npu.npu_all_gather_base_mm(x, x, "ep", 1, output_dtype=torch.float16)),
            (ValueError, "x1 is torch.float32, must be int8", lambda: npu.npu_mm_all_reduce_base(x, x, "ep", dequant_scale=x)),
            (ValueError, "pertoken_scale is given, but dequant_scale is None", lambda: npu.npu_mm_all_reduce_base(x, x, "ep", pertoken_scale=x)),
            (ValueError, "x2_scale has 4 elements, but x2 2 columns",
             lambda: npu.npu_mm_reduce_scatter_base(x.to(torch.int8), x.to(torch.int8), "ep", 1, x2_scale=x)),
            (ValueError, "x1_scale has 4 elements, but there are 2 rows",
             lambda: npu.npu_mm_reduce_scatter_base(x.to(torch.int8), x.to(torch.int8), "ep", 1, x1_scale=x, x2_scale=x[0])),
            (ValueError, "bias is torch.float32 of 2",
             lambda: npu.npu_mm_all_reduce_base(x.to(torch.int8), x.to(torch.int8), "ep", bias=x[0], dequant_scale=x[0])),
            (RuntimeError, "x1 requires gradients", lambda: npu.npu_mm_all_reduce_base(x.clone().requires_grad_(), x, "ep"))):
        with pytest.raises(error, match=message):
            on_ranks(1, lambda rank, call=call: call())


# ---- 8.2 -------------------------------------------------------------------------------------------------------------


@worlds
def test_8_2_rows_to_experts_and_back(world):
    experts, sent = 2, np.random.default_rng(world).integers(0, 4, (world, world, 2))
    x, w = [draws(i, 1, sent[i].sum(), 5)[0] for i in range(world)], draws(9, world, experts, 5, 3)
    tx, tw = map(tensors, (x, w))
    send, receive = (lambda i: [int(n) for n in sent[i].ravel()]), (lambda i: [int(n) for n in sent[:, i].ravel()])
    rows = lambda source, owner, e: np.split(x[source], np.cumsum(sent[source].ravel())[:-1])[owner * experts + e]  # noqa: E731
    there = on_ranks(world, lambda i: npu.npu_alltoallv_gmm(tx[i], tw[i], "ep", world, send(i), receive(i), permute_out_flag=True,
                                                           mm_x=tx[i], mm_weight=tw[i][0]))
    for i, (out, beside, permuted) in enumerate(there):
        order = [(s, e) for e in range(experts) for s in range(world)]
        near(permuted, np.concatenate([rows(s, i, e) for s, e in order]), 0)
        near(out, np.concatenate([rows(s, i, e) @ w[i][e] for s, e in order]), 1e-5)
        near(beside, x[i] @ w[i][0], 1e-5)
    back = on_ranks(world, lambda i: npu.npu_gmm_alltoallv(there[i][2], tw[i].transpose(1, 2), "ep", world, receive(i), send(i),
                                                          trans_gmm_weight=True))
    for i, (out, beside) in enumerate(back):
        assert beside is None
        near(out, np.concatenate([rows(i, d, e) @ w[d][e] for d in range(world) for e in range(experts)]), 1e-5)
    with pytest.raises(ValueError, match="send_counts has 1 counts, must have 2"):
        on_ranks(1, lambda i: npu.npu_alltoallv_gmm(tx[0], tw[0], "ep", 1, [1], [1, 1]))

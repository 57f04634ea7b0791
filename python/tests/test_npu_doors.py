"""ops_transformer.npu: install(), strict calls, compare, torch.compile, and what is said of what is not implemented."""

import importlib.util
import subprocess
import sys
import types

import pytest
from conftest import import_torch

torch = import_torch()

from npu_reference import attention, near, seen_by  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

UPPER = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)

SCRIPT = '''
import torch, torch_npu
torch.npu.set_device("npu:0")
assert torch.npu.is_available() and torch.npu.device_count() == 1
B, S, N, D = 2, 6, 4, 16
layer = torch.nn.Linear(N * D, N * D).npu()
x = torch.randn(B, S, N * D, device="npu").to("npu:0")
h, rstd = torch_npu.npu_rms_norm(x, torch.ones(N * D, device="npu"))
q = layer(h).view(B, S, N, D)
cos = torch.randn(1, S, 1, D).npu()
q = torch_npu.npu_rotary_mul(q, cos, cos)
mask = torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device="npu"), 1)
out, smax, ssum, _, seed, offset, numels = torch_npu.npu_fusion_attention(q, q, q, N, "BSND", atten_mask=mask, sparse_mode=2, scale=D**-0.5)
out.sum().backward()
assert layer.weight.grad is not None and numels == B * N * S * S
with torch.no_grad():
    flat = out.reshape(B * S, N * D)
    y, rstd, total = torch_npu.npu_add_rms_norm(flat, flat, torch.ones(N * D))
    w, ids, row_idx = torch_npu.npu_moe_gating_top_k_softmax(torch.randn(B * S, 4), None, 2)
    rows, places, experts = torch_npu.npu_moe_init_routing(y, row_idx, ids, B * S)
    ends = torch_npu.npu_moe_compute_expert_tokens(experts, 4).to(torch.int64)
    up, = torch_npu.npu_grouped_matmul([rows], [torch.randn(4, N * D, 32)], group_list=ends, group_type=0, split_item=3)
    down, = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(up)], [torch.randn(4, 16, N * D)], group_list=ends, group_type=0, split_item=3)
    moe = torch_npu.npu_moe_finalize_routing(down, y, None, None, w, places, ids)
    q8, scale = torch_npu.npu_dynamic_quant(moe)
    z = torch_npu.npu_quant_matmul(q8, torch.randint(-9, 9, (N * D, 8), dtype=torch.int8), torch.ones(8), pertoken_scale=scale, output_dtype=torch.float16)
    permuted, sorted_indices = torch.ops.npu.npu_moe_token_permute(moe, ids)
    back = torch.ops.npu.npu_moe_token_unpermute(permuted, sorted_indices, w)
    k_cache, v_cache = torch.zeros(3, 4, N, D, device="npu"), torch.zeros(3, 4, N, D, device="npu")
    keys = q[0].contiguous()
    torch_npu._npu_reshape_and_cache(keys, keys, k_cache, v_cache, torch.arange(6, dtype=torch.int32))
    table, lens, step = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), torch.empty(1, N, D)
    torch_npu._npu_paged_attention(keys[-1:].contiguous(), k_cache, v_cache, N, N, D**-0.5, table, lens, step)
    torch_npu.npu_prompt_flash_attention(q, q, q, num_heads=N, input_layout="BSND", scale_value=D**-0.5)
    fia, lse = torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=N, input_layout="BSND", scale=D**-0.5)
    torch_npu.npu_incre_flash_attention(q[:, :1], q, q, num_heads=N, input_layout="BSND")
    torch_npu.npu_ffn(y, torch.randn(N * D, 8), torch.randn(8, N * D), "gelu")
print(float((step - out[0, -1]).abs().max()))
'''


def test_a_script_runs_with_no_line_changed():
    runner = f"import ops_transformer.npu as n, torch\ntorch.manual_seed(0)\nn.install()\nexec({SCRIPT!r})"
    said = subprocess.check_output([sys.executable, "-c", runner], text=True)
    assert float(said.split()[-1]) < 1e-5


def test_a_block_is_undone():
    functions = {name: getattr(torch, name) for name in ("zeros", "tensor", "randn")}
    to, had = torch.Tensor.to, hasattr(torch, "npu")
    with npu.install() as installation:
        assert npu.install() is installation
        import torch_npu

        assert torch_npu.npu_swiglu is npu.npu_swiglu and torch.zeros(2, device="npu").npu().device.type == "cpu"
        near(torch.ops.npu.npu_swiglu(torch.ones(1, 2)), npu.npu_swiglu(torch.ones(1, 2)))
    assert "torch_npu" not in sys.modules and hasattr(torch, "npu") == had and torch.Tensor.to is to and not hasattr(torch.Tensor, "npu")
    assert all(getattr(torch, name) is function for name, function in functions.items())
    with pytest.raises(AttributeError):
        torch.ops.npu.npu_swiglu
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    try:
        with pytest.raises(RuntimeError, match="install: torch_npu can be imported here, so its name is not taken"):
            npu.install()
    finally:
        del sys.modules["torch_npu"]


def test_blocks_in_blocks(seeded):
    with npu.install():
        with npu.install():
            pass
        import torch_npu

        assert torch.zeros(1, device="npu").npu() == 0 and torch_npu.npu_swiglu is npu.npu_swiglu and torch.ops.npu.npu_swiglu
        assert importlib.util.find_spec("torch_npu") is not None
    assert "torch_npu" not in sys.modules
    held = npu.install()
    with npu.install():
        pass
    assert "torch_npu" in sys.modules
    held.undo()
    assert "torch_npu" not in sys.modules and not hasattr(torch.Tensor, "npu")
    with npu.install() as one:
        one.undo()
        other = npu.install()
    assert "torch_npu" in sys.modules  # the end of a block takes back its own alone
    other.undo()


def test_every_function_has_an_operator():
    with npu.install():
        for name in npu.__all__:
            if "npu_" in name:
                assert getattr(torch.ops.npu, name).default is not None


def test_compiled(seeded):
    """Functions that read bytes are one operator; others are made of operators."""
    compiled = lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")  # noqa: E731
    x = torch.randn(6, 8)
    calls = [
        lambda x: npu.npu_moe_gating_top_k_softmax(x, None, 2)[:2],
        lambda x: npu.npu_moe_gating_top_k_softmax_v2(x, k=2, renorm=1)[:2],
        lambda x: npu.npu_moe_gating_top_k(x, 2, norm_type=1)[:2],
        lambda x: npu.npu_moe_init_routing_v2(x, (x[:, :2] > 0).to(torch.int32), expert_num=2, quant_mode=1),
        lambda x: npu.npu_rms_norm(x, x[0]),
        lambda x: (npu.npu_swiglu(x), npu.npu_rotary_mul(x, x, x)),
    ]
    for call in calls:
        for got, want in zip(compiled(call)(x), call(x)):
            assert got.dtype == want.dtype
            near(got, want)

    def write(key, cache, slots):
        npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm")
        return cache + 1

    caches = [torch.zeros(2, 4, 2, 4) for _ in range(2)]
    for run, cache in zip((write, compiled(write)), caches):
        assert (run(torch.ones(1, 2, 4), cache, torch.tensor([5])).sum()) == 2 * 4 * 2 * 4 + 8
    assert (caches[0] == caches[1]).all() and caches[0].sum() == 8


OPEN = torch.zeros(4, 4, dtype=torch.bool)
TOTALS = dict(query=torch.zeros(7, 2, 8), key=torch.zeros(8, 2, 8), value=torch.zeros(8, 2, 8), input_layout="TND", atten_mask=UPPER,
              actual_seq_qlen=[3, 3, 7], actual_seq_kvlen=[3, 3, 8])
REFUSED = [
    ("npu_fusion_attention", dict(query=torch.zeros(1, 2, 4, 8).double()), "the dtype of query is torch.float64, but the device takes"),
    ("npu_fusion_attention", {name: torch.zeros(1, 2, 4, 770) for name in ("query", "key", "value")}, "D of query is 770, but the device takes 1 to 768"),
    ("npu_fusion_attention", dict(value=torch.zeros(1, 2, 4, 16)), "D of value is 16, but the device takes at most that of key, 8"),
    ("npu_fusion_attention", dict(atten_mask=torch.zeros(1, 2, 4, 5, dtype=torch.bool)), r"the shape of atten_mask is \(1, 2, 4, 5\), but"),
    ("npu_fusion_attention", dict(atten_mask=torch.zeros(4, 4, dtype=torch.bool), sparse_mode=2), r"the shape of atten_mask is \[4, 4\], but the device takes a mask of 2048"),
    ("npu_fusion_attention", dict(atten_mask=~UPPER, sparse_mode=3), "atten_mask is not 1 on its strict upper triangle"),
    ("npu_fusion_attention", dict(atten_mask=OPEN, pre_tockens=1, next_tockens=-2), r"pre_tockens \+ next_tockens is -1, but the device takes sums from 0 on"),
    ("npu_fusion_attention", dict(atten_mask=OPEN, pre_tockens=9, next_tockens=-4), "next_tockens is -4, but the device takes more than -4"),
    ("npu_fusion_attention", dict(atten_mask=OPEN, pre_tockens=-4, next_tockens=9), "pre_tockens is -4, but the device takes more than -4"),
    ("npu_fusion_attention", dict(atten_mask=UPPER, sparse_mode=4, pre_tockens=-3, next_tockens=2), r"pre_tockens \+ next_tockens is -1, but"),
    ("npu_fusion_attention", dict(TOTALS, sparse_mode=7, pre_tockens=4, next_tockens=0), "pre_tockens is 4, but the device takes 5 or more in sparse_mode 7"),
    ("npu_fusion_attention", dict(TOTALS, sparse_mode=7, pre_tockens=5, next_tockens=1), "next_tockens is 1, but the device takes 0 or less in sparse_mode 7"),
    ("npu_fusion_attention", dict(TOTALS, sparse_mode=8, pre_tockens=2, next_tockens=0), "pre_tockens is 2, but the device takes 3 or more in sparse_mode 8"),
    ("npu_fused_infer_attention_score", dict(num_heads=2, input_layout="BNSD"), "the dtype of query is torch.float32, but the device takes"),
    ("npu_fused_infer_attention_score", dict(num_heads=2, input_layout="BNSD", query=torch.zeros(1, 4, 2, 8).half().transpose(1, 2),
                                             key=torch.zeros(1, 2, 4, 8).half(), value=torch.zeros(1, 2, 4, 8).half()), "query is of strides"),
]


@pytest.mark.parametrize("name, more, message", REFUSED)
def test_strict(name, more, message):
    given = dict(query=torch.zeros(1, 2, 4, 8), key=torch.zeros(1, 2, 4, 8), value=torch.zeros(1, 2, 4, 8))
    if name == "npu_fusion_attention":
        given.update(head_num=2, input_layout="BNSD")
    given.update(more)
    function = getattr(npu, name)
    with pytest.raises(ValueError, match=f"{name}: strict: {message}"):
        function(**given, strict=True)
    with npu.strict(), pytest.raises(ValueError, match=message):
        function(**given)


def test_outside_strict_more_is_taken(seeded):
    q, wide = torch.randn(1, 2, 4, 8, dtype=torch.float64), torch.randn(1, 2, 4, 16, dtype=torch.float64)
    near(npu.npu_fusion_attention(q, q, wide, 2, "BNSD", atten_mask=torch.zeros(4, 4, dtype=torch.int8))[0], attention(q, q, wide), 1e-12)
    with npu.strict():
        near(npu.npu_fusion_attention(q, q, wide, 2, "BNSD", strict=False)[0], attention(q, q, wide), 1e-12)


def test_strict_takes_what_the_device_takes(seeded):
    q = torch.randn(1, 2, 4, 64).half()
    with npu.strict():
        npu.npu_fusion_attention(q, q, q, 2, "BNSD", atten_mask=UPPER, sparse_mode=3, scale=0.1)
        npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BNSD", scale=0.1, atten_mask=UPPER, sparse_mode=2)
        for pre, following in ((3, -3), (-3, 3), (0, 0)):
            npu.npu_fusion_attention(q, q, q, 2, "BNSD", atten_mask=OPEN, scale=0.1, pre_tockens=pre, next_tockens=following)
        npu.npu_moe_gating_top_k(torch.randn(3, 16), 2, group_count=4, k_group=2)
        with pytest.raises(ValueError, match="npu_moe_gating_top_k: strict: the experts of a group is 2, but the device takes more than 2"):
            npu.npu_moe_gating_top_k(torch.randn(3, 8), 2, group_count=4, k_group=2)
        with pytest.raises(ValueError, match="npu_grouped_matmul: strict: the dtype of group_list is torch.int32"):
            npu.npu_grouped_matmul([q[0, 0]], [torch.randn(1, 64, 2).half()], group_list=torch.tensor([4], dtype=torch.int32), group_type=0)
    program = ("import torch, ops_transformer.npu as n\ntry: n.npu_dynamic_quant(torch.zeros(2, 4))\nexcept ValueError as e: print(e)")
    said = subprocess.check_output([sys.executable, "-c", program], text=True, env={**__import__("os").environ, "OPST_NPU_STRICT": "1"})
    assert said.startswith("npu_dynamic_quant: strict: the dtype of input is torch.float32, but the device takes")


def test_compare_names_the_convention(seeded):
    q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 4, 4, 16), torch.randn(1, 4, 4, 16)
    hidden = torch.rand(4, 4) < 0.5
    hidden[torch.arange(4), torch.arange(4)], hidden[torch.arange(4), (torch.arange(4) + 1) % 4] = False, True
    usual, case = 0.25, npu.Case
    device = attention(q, k, v, ~hidden, usual)
    right = npu.compare(case("npu_fusion_attention", q, k, v, 4, "BNSD", atten_mask=hidden, scale=usual), (device,))
    assert right.agrees and right.conventions == [] and right.max_error < 1e-5
    told = {
        "mask polarity": case("npu_fusion_attention", q, k, v, 4, "BNSD", atten_mask=~hidden, scale=usual),
        "scale": case("npu_fusion_attention", q, k, v, 4, "BNSD", atten_mask=hidden),
    }
    for what, wrong in told.items():
        found = npu.compare(wrong, device)
        assert not found.agrees and found.conventions[0].startswith(what) and what in str(found)
    longer = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    device = attention(q, *longer, seen_by(3, 4, 6), usual)
    found = npu.compare(case("npu_fusion_attention", q, *longer, 4, "BNSD", atten_mask=UPPER, sparse_mode=2, scale=usual), device)
    assert found.conventions[0].startswith("alignment")
    device = attention(*(x.transpose(1, 2) for x in (q, k, v)), None, usual).transpose(1, 2)
    found = npu.compare(case("npu_fusion_attention", q, k, v, 4, "BNSD", scale=usual), device)
    assert found.conventions[0].startswith("layout: the tensors read as BSND")
    pse = torch.randn(1, 4, 4, 4)
    device = attention(q, k, v, None, usual, bias=pse)
    for name in ("npu_fusion_attention", "npu_fusion_attention_v2"):
        found = npu.compare(case(name, q, k, v, 4, "BNSD", pse=pse, scale=usual), device)
        assert found.conventions[0].startswith("pse order")
    with pytest.raises(ValueError, match=r"compare: the device's result is \[1\], but npu_fusion_attention gives"):
        npu.compare(case("npu_fusion_attention", q, k, v, 4, "BNSD"), torch.zeros(1))


def test_compare_looks_at_each_result(seeded):
    q = torch.randn(1, 2, 4, 8)
    case = npu.Case("npu_fusion_attention", q, q, q, 2, "BNSD", scale=0.3)
    device = case.results()
    assert npu.compare(case, device).agrees and npu.compare(case, tuple(device)).differing == []
    device[2] = device[2].clone()
    device[2][0, 1, 3, 5] *= 2
    found = npu.compare(case, device)
    assert not found.agrees and found.result == 2 and found.differing == [2] and found.worst == [0, 1, 3, 5]
    assert str(found).startswith("result 2: largest error") and "beyond the tolerance in result 2" in str(found)
    assert npu.compare(case, device[0]).agrees and npu.compare(case, (device[0], device[1], None)).agrees
    other = npu.Case("npu_fusion_attention", q, q, q, 2, "BNSD", scale=8 ** -0.5).results()
    assert npu.compare(case, other).differing == [0, 1, 2] and npu.compare(case, other).conventions[0].startswith("scale: 1 / sqrt(D)")
    assert npu.compare(case, [None, *other[1:]]).result in (1, 2)
    with pytest.raises(ValueError, match=r"compare: the device's result 1 is \[1\], but npu_fusion_attention gives \[1, 2, 4, 8\]"):
        npu.compare(case, (device[0], torch.zeros(1)))
    with pytest.raises(ValueError, match="compare: the device gave 8 results, but npu_fusion_attention gives 7"):
        npu.compare(case, [*device, None])
    with pytest.raises(ValueError, match="compare: device_output has no tensor that is a result"):
        npu.compare(case, (None, None))


def test_compare_says_no(seeded):
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    case = npu.Case("npu_fusion_attention", q, k, v * 1e-3, 2, "BNSD", scale=0.25)
    device = attention(q, k, v * 1e-3, None, 0.25).half()
    assert npu.compare(case, device, 1e-2).agrees and not npu.compare(case, torch.zeros_like(device), 1e-2).agrees
    holes = device.float()
    holes[0, 0, 0, 0], holes[0, 0, 0, 1] = torch.inf, torch.nan
    found = npu.compare(case, holes, 1e-2)
    assert not found.agrees and found.max_error == torch.inf and found.worst == [0, 0, 0, 0]
    values = v.clone()
    values[..., 0] = torch.inf
    same = npu.Case("npu_fusion_attention", q, k, values, 2, "BNSD", scale=0.25)
    assert npu.compare(same, same.run()).agrees and npu.compare(same, same.run()).max_error == 0
    # Indices are equal or not; int8 may be a step off.
    indices = npu.Case("npu_lightning_indexer", torch.randn(1, 3, 2, 16), torch.randn(1, 9, 1, 16), torch.rand(1, 3, 2), sparse_count=4, sparse_mode=0)
    assert npu.compare(indices, indices.run()).agrees and not npu.compare(indices, indices.run() + 1).agrees
    quantised = npu.Case("npu_dynamic_quant", torch.randn(3, 8))
    off = quantised.run()
    off[0, 0] -= off[0, 0].sign()
    assert npu.compare(quantised, off).agrees and not npu.compare(quantised, off // 2).agrees
    # All groups of a list are looked at.
    x, w = torch.randn(5, 8), torch.randn(2, 8, 4)
    groups = npu.Case("npu_grouped_matmul", [x], [w], group_list=torch.tensor([2, 5]), group_type=0)
    parts = npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 5]), group_type=0)
    assert npu.compare(groups, parts).agrees
    assert npu.compare(groups, [parts[0], -parts[1]]).worst[0] >= 2 and not npu.compare(groups, [parts[0], -parts[1]]).agrees


def test_a_case_leaves_its_tensors_alone(seeded):
    q, k, cos, sin = (torch.randn(1, 3, heads, 8) for heads in (2, 2, 1, 1))
    before, case = q.clone(), npu.Case("npu_apply_rotary_pos_emb", q, k, cos, sin)
    device = case.run()
    assert (q == before).all() and npu.compare(case, device).agrees
    with pytest.raises(ValueError, match="compare: npu_scatter_pa_kv_cache gives no result"):
        key, cache = torch.ones(1, 2, 4), torch.zeros(2, 4, 2, 4)
        npu.compare(npu.Case("npu_scatter_pa_kv_cache", key, key, cache, cache, torch.tensor([5]), cache_mode="Norm"), cache)
    assert (cache == 0).all()


def test_what_is_not_implemented_says_so():
    x = torch.zeros(4, 4)
    calls = {
        "npu_ffn_to_attention: the device writes into memory of other ranks": lambda: npu.npu_ffn_to_attention(x, x, x, x, x, x, "group", 1, [1], [1]),
        "npu_moe_token_permute: padded_mode": lambda: npu.npu_moe_token_permute(x, torch.zeros(4, 1, dtype=torch.int64), padded_mode=True),
        "npu_moe_gating_top_k: input_ids": lambda: npu.npu_moe_gating_top_k(x, 2, input_ids=x, tid2eid=x),
        "npu_scatter_pa_kv_cache: compress_lens": lambda: npu.npu_scatter_pa_kv_cache(x, x, x, x, x, compress_lens=x),
        "npu_dynamic_quant: dst_type_max": lambda: npu.npu_dynamic_quant(x, dst_type_max=15.0),
    }
    for message, call in calls.items():
        with pytest.raises(NotImplementedError, match=message):
            call()


def test_bad_input_is_named():
    q, i = torch.zeros(1, 2, 4, 8), torch.zeros(4, 1, dtype=torch.int64)
    calls = [
        (TypeError, "npu_swiglu: self is None, must be a torch tensor", lambda: npu.npu_swiglu(None)),
        (TypeError, "npu_rms_norm: gamma is a list, must be a torch tensor", lambda: npu.npu_rms_norm(q, [1.0])),
        (TypeError, "npu_fusion_attention: head_num is 2.5", lambda: npu.npu_fusion_attention(q, q, q, 2.5, "BNSD")),
        (TypeError, "npu_fusion_attention: value is None", lambda: npu.npu_fusion_attention(q, q, None, 2, "BNSD")),
        (ValueError, "npu_fusion_attention: seed is", lambda: npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5, seed=2**70)),
        (ValueError, "npu_moe_token_permute: an expert's id is -1", lambda: npu.npu_moe_token_permute(q[0, 0], i - 1)),
        (ValueError, "npu_ring_attention_update: input_layout SBH means", lambda: npu.npu_ring_attention_update(*[q] * 6)),
        (ValueError, "npu_fused_infer_attention_score: block_table is given, but the lengths", lambda: npu.npu_fused_infer_attention_score(
            q, q, q, num_heads=2, input_layout="BNSD", block_table=i.int())),
        (ValueError, r"npu_quant_matmul: x1 is torch.float32, must be int8", lambda: npu.npu_quant_matmul(q, q, q)),
        (ValueError, r"npu_grouped_matmul: group_list counts 9 rows, but x has 4", lambda: npu.npu_grouped_matmul(
            [q[0, 0]], [torch.zeros(2, 8, 3)], group_list=torch.tensor([9, 9]), group_type=0)),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()

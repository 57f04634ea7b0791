"""ops_transformer.npu, section 0 of npu_rules.txt: conventions, the table of traps, the worked values; and reported cases."""

import inspect
import pathlib

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import attention, by_sequence, f64, near, prefix_mask, silu, tokens, upper, window, words_of_int4  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

UPPER = torch.from_numpy(upper())
SIGNATURES = pathlib.Path(__file__).with_name("npu_signatures.txt").read_text(encoding="utf-8").splitlines()


def normal(rng, *shapes):
    return [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


def ints(*values, kind=torch.int32):
    return torch.tensor(values, dtype=kind)


# ---- 0.1 conventions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_0_1_signatures(line):
    """Names, order, defaults and keyword-only marks."""
    name, _, arguments = line.partition("(")
    names = {}
    exec(f"def wanted({arguments}: pass", names)
    fields = lambda function: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]  # noqa: E731
    name, _, overload = name.partition(".")
    found, wanted = fields(getattr(npu, name)), fields(names["wanted"])
    if overload == "List":  # an overload by the kind of group_list: one Python function takes both
        found = [field for field in found if field in wanted]
    assert found == wanted


def test_0_1_int4_words(rng):
    """Eight signed numbers a word, along the last dimension, the lowest half byte first."""
    assert words_of_int4([1, 2, 3, 4, 5, 6, 7, -8]).tolist() == [int.from_bytes(bytes([0x21, 0x43, 0x65, 0x87]), "little", signed=True)]
    values = np.array([[1, -8, 7, 0, -1, 2, 3, -4]], np.float64)
    q, scale = npu.npu_dynamic_quant(torch.from_numpy(np.where(values == -8, -7, values).astype(np.float32)), dst_type=torch.quint4x2)
    assert scale.item() == 1 and (q.numpy() == words_of_int4(np.where(values == -8, -7, values))).all()
    eye = torch.eye(8, dtype=torch.int8)
    weight = torch.from_numpy(words_of_int4(np.repeat(values, 8, 0)))
    assert npu.npu_quant_matmul(eye, weight, torch.ones(1), output_dtype=torch.int32).tolist() == [values[0].tolist()] * 8


@pytest.mark.parametrize("code", [291, 292, 24, 296, 297])
def test_0_1_dtype_codes(code):
    """1 is int8, None the function's own; torch dtypes are taken; codes of fp8 and fp4 are refused by the function's name."""
    x, w = torch.ones(2, 8), torch.ones(8, 8, dtype=torch.int8)
    for one in (1, torch.int8, None):
        assert npu.npu_dynamic_quant(x, dst_type=one)[0].dtype == torch.int8
        assert npu.npu_quant_matmul(w, w, torch.ones(1), output_dtype=one).dtype == torch.int8
        assert npu.npu_dequant_swiglu_quant(x, dst_type=one)[0].dtype == torch.int8
    calls = {
        "npu_dynamic_quant: dst_type": lambda: npu.npu_dynamic_quant(x, dst_type=code),
        "npu_dequant_swiglu_quant: dst_type": lambda: npu.npu_dequant_swiglu_quant(x, dst_type=code),
        "npu_quant_matmul: output_dtype": lambda: npu.npu_quant_matmul(w, w, torch.ones(1), output_dtype=code),
        "npu_grouped_matmul: output_dtype": lambda: npu.npu_grouped_matmul([x], [torch.ones(8, 2)], group_type=-1, output_dtype=code),
        "npu_grouped_matmul: weight_dtype": lambda: npu.npu_grouped_matmul([x], [torch.ones(8, 2)], group_type=-1, weight_dtype=code),
    }
    for message, call in calls.items():
        with pytest.raises(NotImplementedError, match=message):
            call()


def test_0_1_weights_in_form_nz():
    """Weights are plain; five dimensions are refused."""
    x, w = torch.ones(2, 32, dtype=torch.int8), torch.ones(1, 1, 2, 16, 32, dtype=torch.int8)
    calls = {
        "npu_grouped_matmul: weight": lambda: npu.npu_grouped_matmul([x], [w], group_list=ints(2, kind=torch.int64), group_type=0),
        "npu_grouped_matmul_swiglu_quant: weight": lambda: npu.npu_grouped_matmul_swiglu_quant(x, w, ints(2, kind=torch.int64), torch.ones(1, 32), torch.ones(2)),
        "npu_grouped_matmul_swiglu_quant_v2: weight": lambda: npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [torch.ones(1, 32)], torch.ones(2),
                                                                                                     ints(2, kind=torch.int64)),
        "npu_grouped_matmul_finalize_routing: w": lambda: npu.npu_grouped_matmul_finalize_routing(
            x, w, ints(2, kind=torch.int64), scale=torch.ones(1, 32), row_index=ints(0, 1), output_bs=2),
    }
    calls["npu_ffn: weight1"] = lambda: npu.npu_ffn(x, w, w, "relu")
    for message, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"{message} in 5-D form NZ"):
            call()


# ---- 0.2 traps -------------------------------------------------------------------------------------------------------

QUERY, KEYS = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
VALUES = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1).expand(-1, -1, -1, 4).contiguous()
INFER = dict(num_heads=1, input_layout="BNSD")


def test_0_2_masks_where_1_hides():
    hidden = torch.tensor([[True, False, True]])  # only key 1, whose values are 2
    outs = [function(QUERY, KEYS, VALUES, 1, "BNSD", atten_mask=hidden)[0] for function in
            (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3)]
    outs += [npu.npu_fused_infer_attention_score(QUERY, KEYS, VALUES, atten_mask=hidden, **INFER)[0],
             npu.npu_fused_infer_attention_score_v2(QUERY, KEYS, VALUES, atten_mask=hidden, num_query_heads=1, input_layout="BNSD")[0],
             npu.npu_prompt_flash_attention(QUERY, KEYS, VALUES, atten_mask=hidden, **INFER),
             npu.npu_incre_flash_attention(QUERY, KEYS, VALUES, atten_mask=hidden, **INFER)]
    rows = [x[0].transpose(0, 1).contiguous() for x in (QUERY, KEYS, VALUES)]
    outs.append(npu.npu_nsa_compress_attention(*rows, 1.0, 1, 4, 4, 4, 1, atten_mask=hidden, actual_seq_qlen=[1], actual_cmp_seq_kvlen=[3],
                                               actual_sel_seq_kvlen=[3])[0])
    assert all((out == 2).all() for out in outs)


def test_0_2_masks_where_1_shows():
    shown = torch.tensor([[[[0, 1, 0]]]], dtype=torch.int8)
    assert (npu.npu_block_sparse_attention(QUERY, KEYS, VALUES, shown, [1, 1], q_input_layout="BNSD", kv_input_layout="BNSD")[0] == 2).all()
    bits = torch.tensor([0b010], dtype=torch.uint8)
    assert npu.npu_fusion_attention(QUERY, KEYS, VALUES, 1, "BNSD", keep_prob=0.5, dropout_mask=bits)[0][0, 0, 0, 0].item() == pytest.approx(2 / 3 / 0.5)
    rows, _, _ = npu.npu_moe_token_permute_with_routing_map(torch.tensor([[1.0], [2.0]]), torch.tensor([[False, True], [True, False]]))
    assert rows.tolist() == [[2.0], [1.0]]
    rows = [x[0].transpose(0, 1).contiguous() for x in (QUERY, KEYS, VALUES)]
    forced = torch.tensor([[0, 0, 1]], dtype=torch.bool)
    top = npu.npu_nsa_compress_attention(*rows, 1.0, 1, 4, 4, 4, 1, topk_mask=forced, actual_seq_qlen=[1], actual_cmp_seq_kvlen=[3],
                                         actual_sel_seq_kvlen=[3])[1]
    assert top.tolist() == [[[2]]]
    assert npu.npu_moe_gating_top_k_softmax(torch.eye(2), torch.tensor([True, False]), 1)[1].tolist() == [[2], [1]]  # done: the number of experts


def test_0_2_totals_without_0(rng):
    q, k, v = normal(rng, (5, 2, 16), (7, 2, 16), (7, 2, 16))
    want = tokens(by_sequence(q, k, v, [2, 3], [4, 3], None, 0.3))
    near(npu.npu_fusion_attention(q, k, v, 2, "TND", scale=0.3, actual_seq_qlen=[2, 5], actual_seq_kvlen=[4, 7])[0], want)
    near(npu.npu_fused_infer_attention_score(q, k, v, num_heads=2, input_layout="TND", scale=0.3, actual_seq_lengths=[2, 5],
                                             actual_seq_lengths_kv=[4, 7])[0], want)
    one = dict(actual_seq_lengths_query=ints(2, 5), actual_seq_lengths_kv=ints(4, 7), layout_query="TND", layout_kv="TND")
    lists = torch.tensor([[0, 1, 2, -1]] * 5, dtype=torch.int32)[:, None]
    sparse = npu.npu_sparse_flash_attention(q, k[:, :1], k[:, :1], lists, 0.3, sparse_mode=0, attention_mode=2, **one)[0]
    shown = np.arange(7) < 3
    near(sparse, tokens(by_sequence(q, k[:, :1], k[:, :1], [2, 3], [4, 3], lambda i, n, m: shown[:m], 0.3)))
    ids = npu.npu_lightning_indexer(q, k[:, :1], torch.ones(5, 2), sparse_count=4, sparse_mode=0, actual_seq_lengths_query=ints(2, 5),
                                    actual_seq_lengths_key=ints(4, 7), layout_query="TND", layout_key="TND")[0]
    assert [sorted(row) for row in ids[:, 0].tolist()] == [[0, 1, 2, 3]] * 2 + [[-1, 0, 1, 2]] * 3
    assert len(npu.npu_nsa_compress(k, torch.ones(3, 2), 3, 3, actual_seq_len=[4, 7])) == 2
    out, = npu.npu_grouped_matmul([torch.ones(3, 1)], [torch.tensor([[[1.0]], [[2.0]]])], group_list=ints(1, 3, kind=torch.int64), group_type=0, split_item=3)
    assert out.flatten().tolist() == [1, 2, 2]
    q8 = npu.npu_dynamic_quant(torch.ones(3, 2), smooth_scales=torch.tensor([[1.0, 1.0], [1.0, 0.0]]), group_index=ints(1, 3))[0]
    assert q8.tolist() == [[127, 127], [127, 0], [127, 0]]


def test_0_2_totals_with_0():
    cache, out = torch.arange(8.0).view(2, 4, 1, 1), [torch.zeros(5, 1, 1) for _ in range(2)]
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    npu.npu_gather_pa_kv_cache(cache, cache, table, ints(0, 2, 5), *out, is_seq_lens_cumsum=True)
    assert out[0].flatten().tolist() == [4, 5, 0, 1, 2]


def test_0_2_lengths_per_batch(rng):
    q, k, v = normal(rng, (2, 2, 1, 8), (2, 2, 4, 8), (2, 2, 4, 8))
    want = attention(q, k, v, np.arange(4) < np.array([3, 2])[:, None, None, None])
    near(npu.npu_fused_infer_attention_score(q, k, v, num_heads=2, input_layout="BNSD", actual_seq_lengths_kv=[3, 2])[0], want)
    near(npu.npu_prompt_flash_attention(q, k, v, num_heads=2, input_layout="BNSD", actual_seq_lengths_kv=[3, 2]), want)
    near(npu.npu_incre_flash_attention(q, k, v, num_heads=2, input_layout="BNSD", actual_seq_lengths=[3, 2]), want)
    pages, table, out = [x.transpose(1, 2).contiguous() for x in (k, v)], ints([0], [1]), torch.zeros(2, 2, 8)
    near(npu.npu_fused_infer_attention_score(q[:, :, 0], *(x.transpose(1, 2).contiguous() for x in pages), num_heads=2, input_layout="TND",
                                             actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[3, 2], block_table=table)[0], want[:, :, 0])
    npu._npu_paged_attention(q[:, :, 0], *pages, 2, 2, 1.0, table, ints(3, 2), out)
    near(out, want[:, :, 0])
    flat = [torch.cat([x[0, :, :n].transpose(0, 1), x[1, :, :m].transpose(0, 1)]) for x, n, m in ((q, 1, 1), (k, 3, 2), (v, 3, 2))]
    near(npu.npu_block_sparse_attention(*flat, torch.ones(2, 2, 1, 1, dtype=torch.int8), [4, 4], num_key_value_heads=2, scale_value=1.0,
                                        actual_seq_lengths=[1, 1], actual_seq_lengths_kv=[3, 2])[0], want[:, :, 0])


X2, IDS2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ints([1, 0], [0, 1])


def test_0_2_slots_row_major():
    """t * K + k."""
    assert npu.npu_moe_init_routing_v2(X2, IDS2, expert_num=2)[1].tolist() == [2, 0, 1, 3]
    assert npu.npu_moe_token_permute(X2, IDS2)[1].tolist() == [2, 0, 1, 3]
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert npu.npu_moe_token_unpermute(rows, ints(2, 0, 1, 3), torch.ones(2, 2)).flatten().tolist() == [5, 10]
    assert npu.npu_moe_finalize_routing(rows, None, None, None, torch.ones(2, 2), ints(2, 0, 1, 3), None, drop_pad_mode=2).flatten().tolist() == [5, 10]


def test_0_2_slots_column_major():
    """k * rows + t."""
    assert npu.npu_moe_gating_top_k_softmax(torch.rand(2, 3), None, 2)[2].tolist() == [[0, 2], [1, 3]]
    assert npu.npu_moe_init_routing(X2, ints([0, 2], [1, 3]), IDS2, 2)[1].tolist() == [2, 1, 0, 3]
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert npu.npu_moe_finalize_routing(rows, None, None, None, torch.ones(2, 2), ints(2, 0, 1, 3), None).flatten().tolist() == [6, 9]


def test_0_2_group_list_defaults():
    """Totals: grouped matmul, swiglu_quant v1 and v2, npu_swiglu_quant, dynamic_quant. Counts: finalize_routing, dequant_swiglu_quant, npu_ffn."""
    x, w, two = torch.ones(3, 4, dtype=torch.int8), torch.ones(2, 4, 4, dtype=torch.int8), ints(1, 3, kind=torch.int64)
    w[1] = 2
    scale = torch.ones(2, 4)
    assert npu.npu_grouped_matmul([x], [w], group_list=two, group_type=0, split_item=3)[0][:, 0].tolist() == [4, 8, 8]
    first = npu.npu_grouped_matmul_swiglu_quant(x, w, two, scale, torch.ones(3))[1]
    assert (first == npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [scale], torch.ones(3), two)[1]).all()
    near(first, [4 * silu(4.0) / 127, 8 * silu(8.0) / 127, 8 * silu(8.0) / 127])
    smooth, gate = torch.tensor([1.0, 2.0]), torch.ones(3, 2)
    near(npu.npu_swiglu_quant(gate, smooth_scales=smooth, group_index=ints(1, 3), quant_mode=1)[1], 127 / silu(1.0) / np.array([1, 2, 2]), 1e-5)
    near(npu.npu_dequant_swiglu_quant(gate, quant_scale=smooth[:, None], group_index=ints(1, 2, kind=torch.int64), quant_mode=1)[1],
         silu(1.0) / 127 * np.array([1, 2, 2]))
    out = npu.npu_grouped_matmul_finalize_routing(x, w, ints(1, 2, kind=torch.int64), scale=scale, row_index=ints(0, 1, 2), output_bs=3)
    assert out[:, 0].tolist() == [4, 8, 8]
    assert npu.npu_ffn(torch.ones(3, 1), torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1, 1), "relu", expert_tokens=[1, 2]).flatten().tolist() == [1, 2, 2]


def test_0_2_returned_scale():
    """Largest / 127, but 127 / largest of npu_swiglu_quant."""
    row = torch.tensor([[1.0, -4.0]])
    assert npu.npu_dynamic_quant(row)[1].item() == pytest.approx(4 / 127)
    assert npu.npu_moe_init_routing_v2(row, ints([0]), expert_num=1, quant_mode=1)[3].item() == pytest.approx(4 / 127)
    y = silu(1.0)
    assert npu.npu_dequant_swiglu_quant(torch.tensor([[2.0, 1.0]]), quant_mode=1)[1].item() == pytest.approx(2 * y / 127)
    assert npu.npu_swiglu_quant(torch.tensor([[2.0, 1.0]]), quant_mode=1)[1].item() == pytest.approx(127 / (2 * y))
    x, w = torch.tensor([[1]], dtype=torch.int8), torch.tensor([[[1, 2]]], dtype=torch.int8)
    assert npu.npu_grouped_matmul_swiglu_quant(x, w, ints(1, kind=torch.int64), torch.ones(1, 2), torch.ones(1))[1].item() == pytest.approx(2 * y / 127)


def test_0_2_static_scale():
    """Multiplied, then the offset: all but npu_dequant_swiglu_quant, which divides."""
    two, one = torch.tensor([2.0]), torch.tensor([1.0])
    assert npu.npu_moe_init_routing_v2(torch.tensor([[6.0]]), ints([0]), expert_num=1, quant_mode=0, scale=two, offset=one)[0].item() == 13
    gate = torch.tensor([[12 / silu(1.0), 1.0]])  # the product is 12
    assert npu.npu_swiglu_quant(gate, smooth_scales=two, offsets=one[None])[0].item() == 25
    assert npu.npu_dequant_swiglu_quant(gate, quant_scale=two, quant_offset=one)[0].item() == 7
    out = npu.npu_ffn(*[torch.ones(1, 1, dtype=torch.int8)] * 3, "relu", scale=two, offset=one, deq_scale1=one * 6, deq_scale2=one)
    assert out.item() == 13


def test_0_2_activated_half():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    first, second, columns = ([silu(1.0) * 3, silu(2.0) * 4], [silu(3.0) * 1, silu(4.0) * 2], [silu(1.0) * 2, silu(3.0) * 4])
    near(npu.npu_swiglu(x), [first])
    assert npu.npu_swiglu_quant(x)[0].tolist() == np.rint([second]).tolist() == npu.npu_dequant_swiglu_quant(x)[0].tolist()
    left = npu.npu_swiglu_quant(x, activate_left=True)[0]
    assert left.tolist() == np.rint([first]).tolist() == npu.npu_dequant_swiglu_quant(x, activate_left=True)[0].tolist()
    assert npu.npu_dequant_swiglu_quant(x, swiglu_mode=1, glu_alpha=1.0, glu_bias=0.0)[0].tolist() == np.rint([columns]).tolist()
    one, w = torch.ones(1, 1, dtype=torch.int8), torch.tensor([[[1, 2]]], dtype=torch.int8)
    assert npu.npu_grouped_matmul_swiglu_quant(one, w, ints(1, kind=torch.int64), torch.ones(1, 2), torch.ones(1))[1].item() == pytest.approx(silu(1.0) * 2 / 127)


def test_0_2_rounding():
    """Half to even, then the ends of the range."""
    values, want = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [127, 0, 2, 2, 0, -2]
    assert npu.npu_dynamic_quant(torch.tensor([values]))[0].tolist() == [want]
    x = torch.tensor(values)[:, None]
    assert npu.npu_moe_init_routing_v2(x, torch.zeros(6, 1, dtype=torch.int32), expert_num=1, quant_mode=0, scale=torch.ones(1),
                                       offset=torch.zeros(1))[0].flatten().tolist() == want
    far = torch.tensor([[300.0], [-300.0]])
    assert npu.npu_moe_init_routing_v2(far, torch.zeros(2, 1, dtype=torch.int32), expert_num=1, quant_mode=0, scale=torch.ones(1),
                                       offset=torch.zeros(1))[0].flatten().tolist() == [127, -128]
    halves = torch.tensor([[1], [3], [5], [-1], [-3]], dtype=torch.int8)
    assert npu.npu_quant_matmul(halves, torch.ones(1, 1, dtype=torch.int8), torch.tensor([0.5])).flatten().tolist() == [0, 2, 2, 0, -2]
    out = npu.npu_fused_infer_attention_score(torch.zeros(1, 1, 1, 6), torch.zeros(1, 1, 1, 6), torch.tensor(values).view(1, 1, 1, 6),
                                              quant_scale2=torch.ones(1), **INFER)[0]
    assert out.flatten().tolist() == want


def test_0_2_scale_defaults(rng):
    """1, and not 1 / sqrt(D); 0 of npu_block_sparse_attention."""
    q, k, v = normal(rng, (1, 2, 1, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    want = attention(q, k, v)
    for function in (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3):
        near(function(q, k, v, 2, "BNSD")[0], want)
    common = dict(num_heads=2, input_layout="BNSD")
    near(npu.npu_fused_infer_attention_score(q, k, v, **common)[0], want)
    near(npu.npu_fused_infer_attention_score_v2(q, k, v, num_query_heads=2, input_layout="BNSD")[0], want)
    near(npu.npu_prompt_flash_attention(q, k, v, **common), want)
    near(npu.npu_incre_flash_attention(q, k, v, **common), want)
    blocks = npu.npu_block_sparse_attention(q, k, v, torch.ones(1, 2, 1, 1, dtype=torch.int8), [4, 4], q_input_layout="BNSD", kv_input_layout="BNSD",
                                            num_key_value_heads=2)[0]
    near(blocks, f64(v).mean(2, keepdims=True))


# ---- 0.3 worked values -----------------------------------------------------------------------------------------------


def visible(sq, skv, **options):
    """Which keys each row sees: with equal scores and values 2^j, the result times the count is a set of bits."""
    q, k = torch.zeros(1, 1, sq, 4), torch.zeros(1, 1, skv, 4)
    v = (2.0 ** torch.arange(skv)).view(1, 1, skv, 1).expand(-1, -1, -1, 4).contiguous()
    out, _, total, *_ = npu.npu_fusion_attention(q, k, v, 1, "BNSD", **options)
    found = [round(x) for x in (out[0, 0, :, 0] * total[0, 0, :, 0]).tolist()]
    return [{key for key in range(skv) if bits >> key & 1} for bits in found]


def test_0_3_sparse_modes():
    assert visible(2, 4, sparse_mode=2, atten_mask=UPPER) == [{0}, {0, 1}]
    assert visible(2, 4, sparse_mode=3, atten_mask=UPPER) == [{0, 1, 2}, {0, 1, 2, 3}]
    assert visible(2, 4, sparse_mode=4, atten_mask=UPPER, pre_tockens=1, next_tockens=0) == [{1, 2}, {2, 3}]
    nothing = torch.zeros(2, 4, dtype=torch.uint8)
    assert visible(2, 4, sparse_mode=0, atten_mask=nothing, pre_tockens=1, next_tockens=0) == [{0}, {0, 1}]
    for mode, mask in ((5, torch.zeros(1, 1, 4, 4, dtype=torch.bool)), (6, torch.from_numpy(prefix_mask()))):
        assert visible(4, 4, sparse_mode=mode, prefix=[2], atten_mask=mask) == [{0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_0_3_routing():
    for kind, want in ((0, [2, 4]), (1, [2, 2])):
        rows, places, numbers, _ = npu.npu_moe_init_routing_v2(X2, IDS2, expert_num=2, expert_tokens_num_type=kind)
        assert (rows == X2[[0, 1, 0, 1]]).all() and places.tolist() == [2, 0, 1, 3] and numbers.tolist() == want
    assert npu.npu_moe_init_routing_v2(X2, IDS2, expert_num=2, row_idx_type=1)[1].tolist() == [1, 2, 0, 3]
    rows, where = npu.npu_moe_token_permute(X2, IDS2)
    assert (rows == X2[[0, 1, 0, 1]]).all() and where.tolist() == [2, 0, 1, 3]
    rows, places, experts = npu.npu_moe_init_routing(X2, ints([0, 2], [1, 3]), IDS2, 2)
    assert (rows == X2[[0, 1, 0, 1]]).all() and places.tolist() == [2, 1, 0, 3] and experts.tolist() == [0, 0, 1, 1]


def test_0_3_quantisation():
    q, scale = npu.npu_dynamic_quant(torch.tensor([[1.0, -4.0]]))
    assert q.tolist() == [[32, -127]] and scale.item() == pytest.approx(4 / 127)
    one = 1.278464542761074  # its silu is 1
    q, scale = npu.npu_swiglu_quant(torch.tensor([[1.0, -4.0, one, one]]), quant_mode=1)
    assert q.tolist() == [[32, -127]] and scale.item() == pytest.approx(31.75, rel=1e-5)


def test_0_3_gates():
    a0, a1, b0, b1 = x = (0.5, -1.0, 2.0, 3.0)
    row = torch.tensor([x])
    near(npu.npu_swiglu(row), [[silu(a0) * b0, silu(a1) * b1]])
    for left, want in ((True, [silu(a0) * b0, silu(a1) * b1]), (False, [a0 * silu(b0), a1 * silu(b1)])):
        q, scale = npu.npu_swiglu_quant(row, activate_left=left, quant_mode=1)
        near(q / scale[:, None], [want], 1.0 / 127)
        near(scale, [127 / np.abs(want).max()], 1e-5)
    scale = npu.npu_dequant_swiglu_quant(row, swiglu_mode=1, glu_alpha=1.0, glu_bias=0.0, quant_mode=1)[1]
    near(scale, [max(abs(silu(a0) * a1), abs(silu(b0) * b1)) / 127], 1e-5)


def test_0_3_windows_and_lengths(rng):
    x, weight = normal(rng, (8, 1, 4), (4, 1))
    assert len(npu.npu_nsa_compress(x, weight, 4, 2, actual_seq_len=[5, 8])) == 1  # lengths 5 and 3: one row and none
    q, = normal(rng, (5, 1, 4))  # lengths 2, 0, 3: totals 2, 2, 5, and with their beginning 0, 2, 2, 5
    near(npu.npu_fusion_attention(q, q, q, 1, "TND", actual_seq_qlen=[2, 2, 5], actual_seq_kvlen=[2, 2, 5])[0],
         tokens(by_sequence(q, q, q, [2, 0, 3], [2, 0, 3])))
    cache, out = torch.arange(12.0).view(3, 4, 1, 1), [torch.zeros(5, 1, 1) for _ in range(2)]
    npu.npu_gather_pa_kv_cache(cache, cache, ints([0], [1], [2]), ints(0, 2, 2, 5), *out, is_seq_lens_cumsum=True)
    assert out[0].flatten().tolist() == [0, 1, 8, 9, 10]


# ---- reported cases of these functions -------------------------------------------------------------------------------


def test_cases_mask_polarity(rng):
    """True keeps in torch's attention and hides here: the same mask is not the same."""
    q, k, v = normal(rng, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    ours = npu.npu_fusion_attention(q, k, v, 2, "BNSD", atten_mask=~keep, scale=8**-0.5)[0]
    near(ours, f64(sdpa))
    near(ours, attention(q, k, v, keep.numpy(), 8**-0.5))
    assert not torch.allclose(npu.npu_fusion_attention(q, k, v, 2, "BNSD", atten_mask=keep, scale=8**-0.5)[0], sdpa, atol=1e-2)
    assert visible(4, 4, sparse_mode=1, atten_mask=~keep) == [set(range(i + 1)) for i in range(4)]


def test_cases_corner_of_the_diagonal():
    """Mode 3 is aligned at the last key, mode 2 at the first; rows that see nothing are zeros."""
    v = 2.0 ** torch.arange(5)

    def rows(sq, skv, mode):
        q, k = torch.zeros(1, 1, sq, 1), torch.zeros(1, 1, skv, 1)
        return npu.npu_fusion_attention(q, k, v[:skv].view(1, 1, skv, 1), 1, "BNSD", atten_mask=UPPER, sparse_mode=mode)[0].flatten().tolist()

    near(rows(2, 5, 3), [15 / 4, 31 / 5])
    near(rows(5, 2, 3), [0, 0, 0, 1, 1.5])
    near(rows(2, 5, 2), [1, 1.5])
    near(rows(5, 2, 2), [1, 1.5, 1.5, 1.5, 1.5])
    assert visible(3, 20, sparse_mode=3, atten_mask=UPPER) == [set(range(18 + i)) for i in range(3)]
    q, k = torch.zeros(1, 1, 3, 128), torch.zeros(1, 1, 128, 128)
    one_hot = torch.eye(128).view(1, 1, 128, 128)  # 128 keys: which ones are seen, exactly
    out = npu.npu_fusion_attention(q, k, one_hot, 1, "BNSD", atten_mask=UPPER, sparse_mode=3)[0][0, 0]
    near(out, window(3, 3, 128) / window(3, 3, 128).sum(1, keepdims=True))


def test_cases_sides_of_a_window():
    """pre_tokens 4 and next_tokens 0 of mode 4: row 9 sees keys 5 to 9; S - 1, S and no bound are causal."""
    band = dict(sparse_mode=4, atten_mask=UPPER, next_tockens=0)
    assert visible(10, 10, pre_tockens=4, **band)[9] == {5, 6, 7, 8, 9}
    causal = visible(10, 10, sparse_mode=3, atten_mask=UPPER)
    assert visible(10, 10, pre_tockens=9, **band) == visible(10, 10, pre_tockens=10, **band) == visible(10, 10, **band) == causal


@pytest.mark.parametrize("dim, value_dim", [(128, 128), (192, 128), (576, 512), (256, 256)])
def test_cases_widths_of_tokens(rng, dim, value_dim):
    q, k, v = normal(rng, (8, 4, dim), (8, 4, dim), (8, 4, value_dim))
    want = tokens(by_sequence(q, k, v, [5, 3], [5, 3], lambda i, n, m: window(3, n, m), dim**-0.5))
    near(npu.npu_fused_infer_attention_score(q, k, v, num_heads=4, input_layout="TND", scale=dim**-0.5, actual_seq_lengths=[5, 8],
                                             actual_seq_lengths_kv=[5, 8], atten_mask=UPPER, sparse_mode=3)[0], want)
    near(npu.npu_fusion_attention(q, k, v, 4, "TND", scale=dim**-0.5, actual_seq_qlen=[5, 8], actual_seq_kvlen=[5, 8], atten_mask=UPPER,
                                  sparse_mode=3)[0], want)


def test_cases_lengths_and_tables():
    """A length beyond the table, a list shorter than the batch, a negative length: refused, naming what does not fit."""
    pages, table = torch.zeros(4, 16, 8), torch.zeros(2, 2, dtype=torch.int32)
    call = lambda lengths, batch=2: npu.npu_fused_infer_attention_score(  # noqa: E731
        torch.zeros(batch, 1, 8), pages, pages, num_heads=1, input_layout="BSH", block_table=table[:1].expand(batch, -1).contiguous(), block_size=16,
        actual_seq_lengths_kv=lengths)
    for lengths, batch, message in (([33, 5], 2, "33.*32"), ([5, 33], 2, "33.*32"), ([3] * 9, 16, "has 9 lengths, but the batch has 16"), ([-1, 5], 2, "-1")):
        with pytest.raises(ValueError, match=f"npu_fused_infer_attention_score: .*{message}"):
            call(lengths, batch)
    assert (call([32, 0])[0] == 0).all()


def test_cases_tokens_without_a_mask(rng):
    """TND of mode 0 without a mask is attention of each sequence, and not the mean of the values."""
    q, k, v = (x.half() for x in normal(rng, (16, 2, 72), (16, 2, 72), (16, 2, 72)))
    out = npu.npu_fused_infer_attention_score(q, k, v, num_heads=2, input_layout="TND", scale=72**-0.5, actual_seq_lengths=[7, 16],
                                              actual_seq_lengths_kv=[7, 16], sparse_mode=0)[0]
    want = tokens(by_sequence(q, k, v, [7, 9], [7, 9], None, 72**-0.5))
    assert np.abs(f64(out) - want).max() <= 3e-3

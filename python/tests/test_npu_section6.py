"""ops_transformer.npu, section 6 of npu_rules.txt: products of groups and with small integers, each rule against its model in NumPy."""

import math

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import close_int8, f64, near, silu, to_int8, words_of_int4  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

ACTS = {
    1: lambda x: np.maximum(x, 0), 2: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    4: lambda x: x / (1 + np.exp(-1.702 * x)), 5: silu,
}
GROUP = [0, 0, 2, 2, 2]  # of each row: groups of 2, 0 and 3
FORMS = {0: [2, 2, 5], 1: [2, 0, 3], 2: [[0, 2], [2, 3]]}  # totals, counts, pairs


def floats(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)


def small(rng, *shape, high=127):
    return torch.from_numpy(rng.integers(-high, high + 1, shape).astype(np.int8))


def fractions(rng, *shape):
    return torch.from_numpy((rng.random(shape) / 100 + 1e-3).astype(np.float32))


def by_row(x, w, bias=None):
    """x[i] times the weight of its group, + its bias."""
    return np.stack([f64(x)[i] @ f64(w)[g] + (0 if bias is None else f64(bias)[g]) for i, g in enumerate(GROUP)])


# ---- 6.1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("stacked", [True, False])
def test_6_1_groups_of_rows(rng, kind, dtype, bound, stacked):
    """Totals, counts or pairs; weights as one tensor or a list; one result or as many as weights; a bf16 product has an f32 bias."""
    x, w = floats(rng, 5, 8, dtype=dtype), floats(rng, 3, 8, 4, dtype=dtype)
    bias = floats(rng, 3, 4, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    want, ends = by_row(x, w, bias), torch.tensor(FORMS[kind])
    given = ([w], [bias]) if stacked else (list(w), list(bias))
    for split_item in (2, 3, 0, 1):
        out = npu.npu_grouped_matmul([x], given[0], bias=given[1], group_list=ends, group_list_type=kind, group_type=0, split_item=split_item)
        assert [len(part) for part in out] == ([5] if split_item > 1 else [2, 0, 3]) and out[0].dtype == dtype
        near(torch.cat(out), want, bound)
    if kind == 0:  # a Python list is running totals, and needs no group_type
        near(torch.cat(npu.npu_grouped_matmul([x], given[0], bias=given[1], group_list=[2, 2, 5])), want, bound)


def test_6_1_lists_without_groups(rng):
    """group_type -1: every x with its weight, of 2 to 6 dimensions."""
    xs = floats(rng, 2, 8), floats(rng, 2, 3, 8), floats(rng, 1, 2, 1, 2, 1, 8)
    ws, bs = [floats(rng, 8, n) for n in (4, 5, 6)], [floats(rng, n) for n in (4, 5, 6)]
    for got, x, w, b in zip(npu.npu_grouped_matmul(list(xs), ws, bias=bs, group_type=-1), xs, ws, bs):
        near(got, f64(x) @ f64(w) + f64(b))


def test_6_1_groups_of_columns(rng):
    """group_type 2: [G, M, N]; x may be a transposed view; no columns give zeros."""
    x, w = floats(rng, 8, 5).t(), floats(rng, 8, 4)
    for kind, numbers in ((0, [3, 3, 8]), (1, [3, 0, 5])):
        out, = npu.npu_grouped_matmul([x], [w], group_list=torch.tensor(numbers), group_list_type=kind, group_type=2, split_item=3)
        near(out, np.stack([f64(x)[:, a:b] @ f64(w)[a:b] for a, b in ((0, 3), (3, 3), (3, 8))]))
        assert (out[1] == 0).all()


@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bias_type", [None, torch.int32, torch.float32])
def test_6_1_int8(rng, scale_type, per_token, bias_type):
    """((x w + int32 bias) * scale * per token) + float bias; a scale of int64 makes int8, bf16 bf16, f32 f16."""
    x, w, scale, token = small(rng, 5, 32), small(rng, 3, 32, 4), fractions(rng, 3, 4), fractions(rng, 5) * 100
    bias = None if bias_type is None else small(rng, 3, 4).to(bias_type)
    given_scale, values = scale, f64(scale)
    if scale_type == torch.int64:
        given_scale = npu.npu_trans_quant_param(scale)
        values = f64((scale.view(torch.int32) & ~0x1FFF).view(torch.float32))
    elif scale_type == torch.bfloat16:
        given_scale = scale.bfloat16()
        values = f64(given_scale)
    want = np.stack([(f64(x)[i] @ f64(w)[g] + (f64(bias)[g] if bias_type == torch.int32 else 0)) * values[g] * (f64(token)[i] if per_token else 1)
                     + (f64(bias)[g] if bias_type == torch.float32 else 0) for i, g in enumerate(GROUP)])
    out, = npu.npu_grouped_matmul([x], [w], bias=None if bias is None else [bias], scale=[given_scale], per_token_scale=[token] if per_token else None,
                                  group_list=torch.tensor(FORMS[1]), group_list_type=1, group_type=0, split_item=3)
    if scale_type == torch.int64:
        close_int8(out, want)
    else:
        assert out.dtype == {torch.bfloat16: torch.bfloat16, torch.float32: torch.float16}[scale_type]
        near(out, want, 8e-3 if scale_type == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("act", ACTS)
def test_6_1_activations(rng, act):
    """1 relu, 2 gelu of tanh, 4 fast gelu, 5 silu; only with per_token_scale."""
    x, w, scale, token = small(rng, 5, 32), small(rng, 3, 32, 4), fractions(rng, 3, 4) / 10, fractions(rng, 5) * 5
    want = ACTS[act](np.stack([f64(x)[i] @ f64(w)[g] * f64(scale)[g] * f64(token)[i] for i, g in enumerate(GROUP)]))
    common = dict(scale=[scale], group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3)
    near(npu.npu_grouped_matmul([x], [w], per_token_scale=[token], act_type=act, **common)[0], want, 1e-3)
    assert 0.5 < np.abs(want).max() < 8  # where the two forms of gelu differ by more than the next line's bound
    near(npu.npu_grouped_matmul([x], [w], per_token_scale=[token], act_type=act, output_dtype=torch.float32, **common)[0], want, 2e-6)
    for wrong in (act, 3):
        with pytest.raises(ValueError, match=f"npu_grouped_matmul: act_type is {wrong}, must be 0, or with per_token_scale 1, 2, 4 or 5"):
            npu.npu_grouped_matmul([x], [w], act_type=wrong, **(common if wrong == act else {**common, "per_token_scale": [token]}))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_offset", [False, True])
def test_6_1_weight_only(rng, kind, groups, with_offset):
    """x ((w + antiquant_offset) * antiquant_scale) + b, per channel or per group of K."""
    x, w, bias = floats(rng, 5, 8), small(rng, 3, 8, 8, high=7 if kind == "int4" else 127), floats(rng, 3, 8)
    shape = (3, 8) if groups == 1 else (3, groups, 8)
    scale, offset = fractions(rng, *shape), floats(rng, *shape)
    spread = lambda t: np.repeat(f64(t).reshape(3, groups, 8), 8 // groups, 1)  # noqa: E731
    want = by_row(x, (f64(w) + (spread(offset) if with_offset else 0)) * spread(scale), bias)
    weight = torch.from_numpy(words_of_int4(f64(w))) if kind == "int4" else w
    out, = npu.npu_grouped_matmul([x], [weight], bias=[bias], antiquant_scale=[scale], antiquant_offset=[offset] if with_offset else None,
                                  group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3)
    near(out, want, 4e-6)


def test_6_1_int4_by_int4(rng):
    """x (w * scale) * per token, both as int32 words."""
    x, w, scale, token = small(rng, 5, 16, high=7), small(rng, 3, 16, 8, high=7), fractions(rng, 3, 8), fractions(rng, 5) * 100
    want = np.stack([f64(x)[i] @ (f64(w)[g] * f64(scale)[g]) * f64(token)[i] for i, g in enumerate(GROUP)])
    out, = npu.npu_grouped_matmul([torch.from_numpy(words_of_int4(f64(x)))], [torch.from_numpy(words_of_int4(f64(w)))], scale=[scale],
                                  per_token_scale=[token], group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3)
    near(out, want, 1e-3)


def test_6_1_output_dtype(rng):
    x, w = floats(rng, 5, 8).half(), floats(rng, 3, 8, 4).half()
    for code, dtype in ((None, torch.float16), (torch.float32, torch.float32), (15, torch.bfloat16)):
        out, = npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3, output_dtype=code)
        assert out.dtype == dtype


REFUSED = [
    (dict(group_type=None), ValueError, "Requires manual passing group_type"), (dict(group_type=1), ValueError, "The group type must be"),
    (dict(group_type=-1), ValueError, "group_list is given, but group_type is -1"), (dict(group_list_type=3), ValueError, "group_list_type is 3"),
    (dict(split_item=4), ValueError, "split_item is 4"), (dict(offset=[torch.ones(4)]), ValueError, "offset is given, but must be None"),
    (dict(activation_input=[torch.ones(4)]), ValueError, "activation_input is given, but must be None"),
    (dict(group_list=torch.tensor([2, 2, 9])), ValueError, "group_list counts 9 rows, but x has 5"),
    (dict(group_list=torch.tensor([2, 1, 5])), ValueError, "must be running totals, so not decreasing"),
    (dict(group_list=torch.tensor([2, 5])), ValueError, "group_list has 2 groups, but weight has 3"),
    (dict(x_dtype=291), NotImplementedError, "x_dtype is given, but dtypes of eight bits"),
    (dict(output_dtype=292), NotImplementedError, "output_dtype is 292: dtypes of eight bits"),
]


@pytest.mark.parametrize("more, error, message", REFUSED)
def test_6_1_refusals(more, error, message):
    given = {**dict(group_list=torch.tensor([2, 2, 5]), group_type=0, split_item=3), **more}
    with pytest.raises(error, match=f"npu_grouped_matmul: .*{message}"):
        npu.npu_grouped_matmul([torch.ones(5, 8)], [torch.ones(3, 8, 4)], **given)


# ---- 6.2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_6_2_swiglu_quant(rng, scale_type):
    """C = (x w) * weight_scale * x_scale; S = silu(first half) * second half; scale = largest / 127. v1 takes totals, v2 counts too."""
    x, w, scale, token = small(rng, 5, 32), small(rng, 3, 32, 8), fractions(rng, 3, 8).to(scale_type), fractions(rng, 5)
    c = np.stack([f64(x)[i] @ f64(w)[g] * f64(scale)[g] * f64(token)[i] for i, g in enumerate(GROUP)])
    s = silu(c[:, :4]) * c[:, 4:]
    top = np.abs(s).max(1)
    ends = torch.tensor([2, 2, 5])
    q, scales, offset = npu.npu_grouped_matmul_swiglu_quant(x, w, ends, scale, token)
    near(scales, top / 127, 1e-5)
    close_int8(q, s * 127 / top[:, None])
    assert offset.shape == () and offset.dtype == scales.dtype == torch.float32
    for kind, numbers in ((0, [2, 2, 5]), (1, [2, 0, 3])):
        for code in (0, 1):
            second = npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [scale], token, torch.tensor(numbers), group_list_type=kind, quant_dtype=code)
            assert (second[0] == q).all() and (second[1] == scales).all()
    for more in (dict(dequant_mode=1), dict(dequant_mode=2), dict(quant_mode=1)):
        with pytest.raises(NotImplementedError, match="npu_grouped_matmul_swiglu_quant_v2: dequant_mode"):
            npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [scale], token, ends, **more)
    with pytest.raises(NotImplementedError, match="smooth_scale is given, but it belongs to int4 weights"):
        npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [scale], token, ends, smooth_scale=scale)


@pytest.mark.parametrize("kind", [0, 1, None, "default"])
@pytest.mark.parametrize("shared", [False, True])
def test_6_2_finalize_routing(rng, kind, shared):
    """Rows times scale, per token scale and logit are added up at row_index, beside shared_input; counts unless 0 is given."""
    x, w, scale, token, logit = small(rng, 7, 16), small(rng, 3, 16, 8), fractions(rng, 3, 8), fractions(rng, 7) * 100, fractions(rng, 7) * 100
    rows, beside = rng.integers(0, 4, 7), floats(rng, 2, 8, dtype=torch.bfloat16)
    want = np.zeros((4, 8))
    if shared:
        want[1:3] += 0.5 * f64(beside)
    for i, g in enumerate(GROUP):  # two rows are behind the groups
        want[rows[i]] += f64(x)[i] @ f64(w)[g] * f64(scale)[g] * f64(token)[i] * f64(logit)[i]
    more = {} if kind == "default" else dict(group_list_type=kind)
    if shared:
        more.update(shared_input=beside, shared_input_weight=0.5, shared_input_offset=1)
    for index_type in (torch.int32, torch.int64):
        out = npu.npu_grouped_matmul_finalize_routing(x, w, torch.tensor(FORMS[0 if kind == 0 else 1]), scale=scale, pertoken_scale=token,
                                                      logit=logit, row_index=torch.from_numpy(rows).to(index_type), output_bs=4, **more)
        assert out.dtype == torch.float32
        near(out, want, 1e-5)
    with pytest.raises(ValueError, match="npu_grouped_matmul_finalize_routing: dtype is torch.float16, must be float32"):
        npu.npu_grouped_matmul_finalize_routing(x, w, torch.tensor([2, 0, 3]), scale=scale, row_index=torch.from_numpy(rows), dtype=torch.float16)


# ---- 6.4 -------------------------------------------------------------------------------------------------------------


def scale_word(scale, offset=None):
    """The documents' 64 bits: a float32 without its low 13 bits, bit 46, nine bits of offset from bit 37."""
    word = (int(np.float32(scale).view(np.uint32)) & ~0x1FFF) | 1 << 46
    return word if offset is None else word | (offset & 0x1FF) << 37


def test_6_4_trans_quant_param(rng):
    scales, offsets = rng.random(6).astype(np.float32), [0, 1, -1, 255, -256, 100]
    assert npu.npu_trans_quant_param(torch.from_numpy(scales)).tolist() == [scale_word(s) for s in scales]
    given = npu.npu_trans_quant_param(torch.from_numpy(scales), torch.tensor(offsets, dtype=torch.float32))
    assert given.dtype == torch.int64 and given.tolist() == [scale_word(s, o) for s, o in zip(scales, offsets)]


OUT = {None: torch.int8, torch.int8: torch.int8, torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, torch.int32: torch.int32}


@pytest.mark.parametrize("wanted", OUT)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("shapes", [((3, 32), (32, 8)), ((2, 3, 32), (32, 8)), ((2, 3, 32), (2, 32, 8)), ((2, 1, 3, 32), (1, 4, 32, 8))])
def test_6_4_quant_matmul(rng, wanted, per_token, shapes):
    """(x1 x2 + int32 bias) * scale * per token; None is int8, with an offset; int32 is the sum; batches broadcast."""
    x, w, scale, token, bias = small(rng, *shapes[0]), small(rng, *shapes[1]), fractions(rng, 8) / 10, fractions(rng, 3) * 100, small(rng, 8).int()
    offset = floats(rng, 8) * 5
    sums = f64(x) @ f64(w) + f64(bias)
    want = sums * f64(scale) * (f64(token)[:, None] if per_token else 1)
    more = dict(pertoken_scale=token) if per_token else {}
    if OUT[wanted] == torch.int8:
        more["offset"] = offset
    out = npu.npu_quant_matmul(x, w, scale, bias=bias, output_dtype=wanted, **more)
    assert out.dtype == OUT[wanted]
    if OUT[wanted] == torch.int8:
        close_int8(out, want + f64(offset))
    elif OUT[wanted] == torch.int32:
        assert (f64(out) == sums).all()
    else:
        near(out, want, 8e-3 if wanted == torch.bfloat16 else 1e-3)


def test_6_4_quant_matmul_scales(rng):
    """Per tensor, per channel, bf16, and the 64-bit form with its own offset; a float bias is added last; int4 words."""
    x, w, bias = small(rng, 3, 32), small(rng, 32, 8), floats(rng, 8)
    sums = f64(x) @ f64(w)
    one, many = fractions(rng, 1), fractions(rng, 8)
    for scale in (one, many, many.bfloat16()):
        near(npu.npu_quant_matmul(x, w, scale, bias=bias, output_dtype=torch.bfloat16), sums * f64(scale) + f64(bias), 8e-3)
    words = torch.tensor([scale_word(s) for s in many.tolist()])
    cleared = f64((many.view(torch.int32) & ~0x1FFF).view(torch.float32))
    near(npu.npu_quant_matmul(x, w, words, output_dtype=torch.float16), sums * cleared, 1e-3)
    close_int8(npu.npu_quant_matmul(x, w, torch.tensor([scale_word(s / 10, o) for s, o in zip(many.tolist(), range(-4, 4))])),
               sums * f64(((many / 10).view(torch.int32) & ~0x1FFF).view(torch.float32)) + np.arange(-4, 4))
    four = small(rng, 32, 8, high=7)
    near(npu.npu_quant_matmul(x, torch.from_numpy(words_of_int4(f64(four))), many, output_dtype=torch.float16), f64(x) @ f64(four) * f64(many), 1e-3)
    batched = small(rng, 2, 1, 8).int()
    pair, weights = small(rng, 2, 3, 32), small(rng, 2, 32, 8)
    near(npu.npu_quant_matmul(pair, weights, many, bias=batched, output_dtype=torch.float16), (f64(pair) @ f64(weights) + f64(batched)) * f64(many), 1e-3)
    for more, error, message in ((dict(group_sizes=[1, 1, 32]), NotImplementedError, "group_sizes is given"), (dict(y_scale=one), NotImplementedError, "y_scale"),
                                 (dict(offset=many, output_dtype=torch.float16), ValueError, "offset is given, but goes with int8 output"),
                                 (dict(output_dtype=291), NotImplementedError, "output_dtype is 291")):
        with pytest.raises(error, match=message):
            npu.npu_quant_matmul(x, w, many, **more)


FFN = {"relu": ACTS[1], "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))), "fastgelu": ACTS[4], "silu": silu}


@pytest.mark.parametrize("activation", FFN)
def test_6_4_ffn(rng, activation):
    """act(x w1 + b1) w2 + b2; experts by counts or running totals, whose sum is that of the rows."""
    act, x = FFN[activation], floats(rng, 5, 8)
    w1, w2, b1, b2 = floats(rng, 3, 8, 16), floats(rng, 3, 16, 4), floats(rng, 3, 16), floats(rng, 3, 4)
    want = np.stack([act(f64(x)[i] @ f64(w1)[g] + f64(b1)[g]) @ f64(w2)[g] + f64(b2)[g] for i, g in enumerate(GROUP)])
    for more in (dict(expert_tokens=[2, 0, 3]), dict(expert_tokens_index=[2, 2, 5])):
        near(npu.npu_ffn(x, w1, w2, activation, bias1=b1, bias2=b2, **more), want, 1e-5)
    near(npu.npu_ffn(x.view(1, 5, 8), w1[0], w2[0], activation, bias1=b1[0], bias2=b2[0]),
         (act(f64(x) @ f64(w1)[0] + f64(b1)[0]) @ f64(w2)[0] + f64(b2)[0])[None], 1e-5)
    for more, message in ((dict(expert_tokens=[5, 0, 0], expert_tokens_index=[5, 5, 5]), "expert_tokens and expert_tokens_index are both given"),
                          (dict(expert_tokens=[2, 0, 2]), "x has 5 rows"), (dict(expert_tokens=[2, 3]), "there are 2 groups of tokens")):
        with pytest.raises(ValueError, match=message):
            npu.npu_ffn(x, w1, w2, activation, **more)
    for gated in ("geglu", "swiglu", "reglu"):
        with pytest.raises(NotImplementedError, match=f'npu_ffn: activation "{gated}": which half'):
            npu.npu_ffn(x, w1[0], w2[0], gated)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("wanted", [None, torch.float16, torch.bfloat16])
def test_6_4_ffn_of_int8(rng, per_channel, wanted):
    """a = act((x w1 + b1) * deq1), q = clamp(round(a * scale + offset)), y = (q w2 + b2) * deq2; f16 unless bf16 is asked for."""
    x, w1, w2 = small(rng, 5, 8, high=9), small(rng, 3, 8, 16, high=9), small(rng, 3, 16, 4, high=9)
    b1, b2, deq1, deq2 = small(rng, 3, 16, high=50).int(), small(rng, 3, 4, high=50).int(), fractions(rng, 3, 16) * 100, fractions(rng, 3, 4) * 100
    scale, offset = fractions(rng, 3, 16) * 10 if per_channel else fractions(rng, 3) * 10, floats(rng, 3)
    rows = []
    for i, g in enumerate(GROUP):
        a = np.maximum((f64(x)[i] @ f64(w1)[g] + f64(b1)[g]) * f64(deq1)[g], 0)
        rows.append((to_int8(a * f64(scale)[g] + f64(offset)[g]) @ f64(w2)[g] + f64(b2)[g]) * f64(deq2)[g])
    out = npu.npu_ffn(x, w1, w2, "relu", expert_tokens=[2, 0, 3], bias1=b1, bias2=b2, scale=scale, offset=offset, deq_scale1=deq1, deq_scale2=deq2,
                      output_dtype=wanted)
    assert out.dtype == (wanted or torch.float16)
    near(out, np.stack(rows), 1.6e-2 if wanted == torch.bfloat16 else 4e-3)


def test_6_4_ffn_of_small_weights(rng):
    """Weight-only: (w + antiquant_offset) * antiquant_scale."""
    x, w1, w2 = floats(rng, 5, 8), small(rng, 3, 8, 16), small(rng, 3, 16, 4)
    s1, s2, o1, o2 = fractions(rng, 3, 16), fractions(rng, 3, 4), floats(rng, 3, 16), floats(rng, 3, 4)
    first, second = ((f64(w) + f64(o)[:, None]) * f64(s)[:, None] for w, o, s in ((w1, o1, s1), (w2, o2, s2)))
    want = np.stack([silu(f64(x)[i] @ first[g]) @ second[g] for i, g in enumerate(GROUP)])
    near(npu.npu_ffn(x, w1, w2, "silu", expert_tokens=[2, 0, 3], antiquant_scale1=s1, antiquant_scale2=s2, antiquant_offset1=o1, antiquant_offset2=o2),
         want, 1e-5)

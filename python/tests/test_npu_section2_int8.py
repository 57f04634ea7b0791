"""ops_transformer.npu, section 2 of npu_rules.txt: attention for inference over small integers, and what is refused."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import attention, close_int8, near, to_layout, upper, words_of_int4  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

SIZES = dict(num_heads=4, num_key_value_heads=2, scale=0.3)


def normal(rng, *shapes):
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def given(x, layout="BNSD"):
    return torch.from_numpy(to_layout(np.asarray(x), layout))


def scaled(x, scale, offset=None):
    return (x + (0 if offset is None else offset)) * np.asarray(scale, np.float64)


def small(rng, *shape, high=127):
    return rng.integers(-high, high + 1, shape).astype(np.int8)


JOINED = {"tensor": (2,), "channel": (2, 2, 1, 8), "channel, no 1": (2, 2, 8), "channel, H": (2, 16), "token": (2, 2, 7)}


@pytest.mark.parametrize("form", JOINED)
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_2_2_joined_scales(rng, form, with_offset, layout):
    """(key, value) along the first dimension: per tensor, per channel, per token with mode 1. Without offset symmetric."""
    (q,), k, v, shape = normal(rng, (2, 4, 5, 8)), small(rng, 2, 2, 7, 8), small(rng, 2, 2, 7, 8), JOINED[form]
    scale, offset = (rng.random(shape) / 40).astype(np.float32), normal(rng, shape)[0] if with_offset else None
    spread = lambda x: x.reshape(2, 2, 1, 7, 1) if form == "token" else x.reshape(2, 1, 1, 1, 1) if form == "tensor" else x.reshape(2, 1, 2, 1, 8)  # noqa: E731
    wide = [scaled(x, spread(scale)[i], None if offset is None else spread(offset)[i]) for i, x in enumerate((k, v))]
    out = npu.npu_fused_infer_attention_score(*(given(x, layout) for x in (q, k, v)), input_layout=layout, antiquant_scale=torch.from_numpy(scale),
                                              antiquant_offset=None if offset is None else torch.from_numpy(offset),
                                              antiquant_mode=1 if form == "token" else 0, **SIZES)[0]
    near(out, to_layout(attention(q, *wide, None, 0.3), layout), 4e-6)
    if layout == "BNSD" and form != "token":
        step = npu.npu_incre_flash_attention(given(q[:, :, :1]), given(k), given(v), num_heads=4, num_key_value_heads=2, scale_value=0.3,
                                             input_layout="BNSD", antiquant_scale=torch.from_numpy(scale),
                                             antiquant_offset=None if offset is None else torch.from_numpy(offset))
        near(step, attention(q[:, :, :1], *wide, None, 0.3), 4e-6)


SPLIT = {0: (2, 1, 8), 1: (2, 7), 2: (2,), 3: (2, 2, 7)}
SPREAD = {0: (1, 2, 1, 8), 1: (2, 1, 7, 1), 2: (1, 2, 1, 1), 3: (2, 2, 7, 1)}


@pytest.mark.parametrize("modes", [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1)])
def test_2_2_split_scales(rng, modes):
    """Of key and value apart: per channel, token, head, token and head; keys per channel with values per token. They win over joined ones."""
    (q,), k, v = normal(rng, (2, 4, 1, 8)), small(rng, 2, 2, 7, 8), small(rng, 2, 2, 7, 8)
    scales, offsets = [(rng.random(SPLIT[mode]) / 40).astype(np.float32) for mode in modes], normal(rng, *[SPLIT[mode] for mode in modes])
    wide = [scaled(x, s.reshape(SPREAD[m]), o.reshape(SPREAD[m])) for x, s, o, m in zip((k, v), scales, offsets, modes)]
    names = dict(zip(("key_antiquant_scale", "value_antiquant_scale", "key_antiquant_offset", "value_antiquant_offset"),
                     map(torch.from_numpy, (*scales, *offsets))))
    out = npu.npu_fused_infer_attention_score(given(q), given(k), given(v), input_layout="BNSD", key_antiquant_mode=modes[0],
                                              value_antiquant_mode=modes[1], antiquant_scale=torch.full((2,), 9.0), **names, **SIZES)[0]
    near(out, attention(q, *wide, None, 0.3), 4e-6)
    second = {name.replace("key_antiquant_", "dequant_") .replace("value_antiquant_", "dequant_") + ("_key" if "key" in name else "_value"): value
              for name, value in names.items()}
    again = npu.npu_fused_infer_attention_score_v2(given(q), given(k), given(v), input_layout="BNSD", num_query_heads=4, num_key_value_heads=2,
                                                   softmax_scale=0.3, key_quant_mode=modes[0], value_quant_mode=modes[1], **second)[0]
    assert (again == out).all()


PAGED = {0: (2, 1, 8), 2: (2,), 4: (4, 4), 5: (4, 2, 4)}
PAGED_SPREAD = {0: (1, 1, 2, 8), 2: (1, 1, 2, 1), 4: (4, 4, 1, 1), 5: (4, 2, 4, 1)}


@pytest.mark.parametrize("mode", PAGED)
@pytest.mark.parametrize("with_offset", [False, True])
def test_2_2_scales_of_pages(rng, mode, with_offset):
    """Per channel, per head, and 4 per token, 5 per token and head of the pages."""
    (q,), pages = normal(rng, (2, 4, 1, 8)), [small(rng, 4, 4, 2, 8) for _ in range(2)]
    scales, offsets = ([x for x in group] for group in ([(rng.random(PAGED[mode]) / 40).astype(np.float32) for _ in range(2)],
                                                         normal(rng, PAGED[mode], PAGED[mode])))
    spread = lambda x: x.reshape(PAGED_SPREAD[mode]).transpose(0, 2, 1, 3) if mode == 5 else x.reshape(PAGED_SPREAD[mode])  # noqa: E731
    wide = [scaled(page, spread(s), spread(o) if with_offset else None) for page, s, o in zip(pages, scales, offsets)]
    table, lengths = np.array([[2, 0], [1, 3]]), [7, 5]
    rows = [np.stack([page[ids].reshape(-1, 2, 8) for ids in table]).transpose(0, 2, 1, 3) for page in wide]
    more = dict(zip(("key_antiquant_offset", "value_antiquant_offset"), map(torch.from_numpy, offsets))) if with_offset else {}
    out = npu.npu_fused_infer_attention_score(given(q), *(torch.from_numpy(page.transpose(0, 2, 1, 3).copy()) for page in pages), input_layout="BNSD",
                                              block_table=torch.from_numpy(table).int(), actual_seq_lengths_kv=lengths, key_antiquant_mode=mode,
                                              value_antiquant_mode=mode, key_antiquant_scale=torch.from_numpy(scales[0]),
                                              value_antiquant_scale=torch.from_numpy(scales[1]), **more, **SIZES)[0]
    near(out, attention(q, *rows, np.arange(8) < np.array(lengths)[:, None, None, None], 0.3), 4e-6)


def test_2_2_pages_of_int8_in_form_nz(rng):
    """[blocks, N, D / 32, rows, 32]."""
    (q,), pages = normal(rng, (2, 4, 1, 64)), [small(rng, 4, 4, 2, 64) for _ in range(2)]
    table = np.array([[2, 0], [1, 3]])
    rows = [np.stack([page[ids].reshape(-1, 2, 64) for ids in table]).transpose(0, 2, 1, 3) * 0.02 for page in pages]
    cache = [torch.from_numpy(page.reshape(4, 4, 2, 2, 32).transpose(0, 2, 3, 1, 4).copy()) for page in pages]
    out = npu.npu_fused_infer_attention_score(given(q), *cache, input_layout="BNSD", block_table=torch.from_numpy(table).int(),
                                              actual_seq_lengths_kv=[7, 5], antiquant_scale=torch.full((2,), 0.02), **SIZES)[0]
    near(out, attention(q, *rows, np.arange(8) < np.array([7, 5])[:, None, None, None], 0.3), 4e-6)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_2_2_int4_keys(rng, layout):
    """int32 words of eight along the last dimension, the lowest half byte first."""
    (q,), k, v = normal(rng, (2, 4, 5, 8)), small(rng, 2, 2, 7, 8, high=7), small(rng, 2, 2, 7, 8, high=7)
    words = [words_of_int4(x) for x in (k, v)]
    out = npu.npu_fused_infer_attention_score(given(q, layout), *(given(x, layout) for x in words), input_layout=layout,
                                              antiquant_scale=torch.full((2,), 0.2), **SIZES)[0]
    near(out, to_layout(attention(q, k * 0.2, v * 0.2, None, 0.3), layout), 4e-6)


def test_2_2_integers_need_scales(rng):
    with pytest.raises(ValueError, match="key has dtype torch.int8, but no scales of it are given"):
        npu.npu_fused_infer_attention_score(torch.zeros(1, 4, 2, 8), *[torch.zeros(1, 2, 3, 8, dtype=torch.int8)] * 2, input_layout="BNSD", **SIZES)


@pytest.mark.parametrize("shape", [(1,), (32,), (4, 8)])
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BNSD_BSND"])
def test_2_2_int8_results(rng, shape, with_offset, layout):
    """Per tensor, or per channel as (H,) or (N, D): multiplied, offset added, half to even."""
    arrays = normal(rng, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    scale, offset = (rng.random(shape) * 40 + 20).astype(np.float32), normal(rng, shape)[0] * 9
    read, _, written = layout.partition("_")
    more = dict(quant_offset2=torch.from_numpy(offset)) if with_offset else {}
    common = dict(num_heads=4, num_key_value_heads=2, input_layout=layout)
    tensors = [given(x, read) for x in arrays]
    out = npu.npu_fused_infer_attention_score(*tensors, scale=0.3, quant_scale2=torch.from_numpy(scale), **common, **more)[0]
    spread = lambda x: x.reshape(1, 4, 1, 8) if x.size > 1 else x.reshape(())  # noqa: E731
    want = attention(*arrays, None, 0.3) * spread(scale) + (spread(offset) if with_offset else 0)
    assert out.dtype == torch.int8
    close_int8(out, to_layout(want, written or read))
    prompt = npu.npu_prompt_flash_attention(*tensors, scale_value=0.3, quant_scale2=torch.from_numpy(scale), **common, **more)
    assert (prompt == out).all()
    second = npu.npu_fused_infer_attention_score_v2(*tensors, num_query_heads=4, num_key_value_heads=2, input_layout=layout, softmax_scale=0.3,
                                                    quant_scale_out=torch.from_numpy(scale),
                                                    quant_offset_out=torch.from_numpy(offset) if with_offset else None)[0]
    assert (second == out).all()


ROWS_THAT_SEE_NOTHING = [
    dict(sparse_mode=0, pre_tokens=-4, atten_mask=torch.zeros(5, 7, dtype=torch.bool)),
    dict(sparse_mode=0, next_tokens=-1, atten_mask=torch.zeros(5, 7, dtype=torch.bool)),
    dict(sparse_mode=4, pre_tokens=-1, atten_mask=torch.from_numpy(upper())),
    dict(sparse_mode=4, next_tokens=-3, atten_mask=torch.from_numpy(upper())),
]


@pytest.mark.parametrize("more", ROWS_THAT_SEE_NOTHING, ids=lambda more: f"{more['sparse_mode']}")
def test_2_2_int8_results_of_rows_without_a_key(more):
    """The device refuses an offset where some row sees nothing, and sides below 0 in mode 4."""
    q, k = torch.zeros(1, 2, 5, 32).half(), torch.zeros(1, 2, 7, 32).half()
    common = dict(num_heads=2, input_layout="BNSD", quant_scale2=torch.ones(1), strict=True)
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score: strict: "):
        npu.npu_fused_infer_attention_score(q, k, k, quant_offset2=torch.zeros(1), **common, **more)
    npu.npu_fused_infer_attention_score(q, k, k, quant_offset2=torch.zeros(1), **{**common, "strict": False}, **more)
    longer = torch.zeros(1, 2, 9, 32).half()
    with pytest.raises(ValueError, match="strict: quant_offset2 is given where a row sees no key, but the device takes none there"):
        npu.npu_fused_infer_attention_score(longer, k, k, quant_offset2=torch.zeros(1), sparse_mode=3, atten_mask=torch.from_numpy(upper()), **common)


RESERVED = {
    "dequant_scale1": "attention of integer products", "quant_scale1": "attention of integer products", "dequant_scale2": "attention of integer",
    "key_rope_antiquant_scale": "it is reserved",
}
RESERVED_2 = {
    "dequant_scale_query": "attention of integer products", "dequant_scale_key_rope": "it is reserved", "quant_scale_p": "it is reserved",
    "query_dtype": "dtypes of eight bits", "key_dtype": "dtypes of eight bits", "value_dtype": "dtypes of eight bits",
    "query_rope_dtype": "dtypes", "key_rope_dtype": "dtypes", "key_shared_prefix_dtype": "dtypes", "value_shared_prefix_dtype": "dtypes",
    "dequant_scale_query_dtype": "dtypes", "dequant_scale_key_dtype": "dtypes", "dequant_scale_value_dtype": "dtypes",
    "dequant_scale_key_rope_dtype": "dtypes",
}


@pytest.mark.parametrize("name", [*RESERVED, *RESERVED_2])
def test_2_2_reserved(name):
    q = torch.zeros(1, 2, 3, 8)
    value = 291 if name.endswith("dtype") else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"{name} is given, but {RESERVED.get(name) or RESERVED_2[name]}"):
        if name in RESERVED:
            npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BNSD", **{name: value})
        else:
            npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout="BNSD", **{name: value})


def test_2_2_out_dtype():
    q = torch.randn(1, 2, 3, 8)
    for code, dtype in ((None, torch.float32), (5, torch.float16), (torch.bfloat16, torch.bfloat16)):
        assert npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout="BNSD", out_dtype=code)[0].dtype == dtype
    with pytest.raises(NotImplementedError, match="out_dtype is 291: dtypes of eight bits"):
        npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout="BNSD", out_dtype=291)


STRICT = [
    (dict(num_heads=2, num_key_value_heads=3), "the heads of query is 2, but the device takes multiples of 3"),
    (dict(key_antiquant_mode=3, value_antiquant_mode=3, kv=torch.int8), "key_antiquant_mode is 3, but the device takes 0 or 1 for more than one query"),
    (dict(key_antiquant_mode=1, value_antiquant_mode=0, kv=torch.int8), "value_antiquant_mode is 0, but the device takes that of key, 1"),
    (dict(block_table=torch.zeros(1, 1, dtype=torch.int64), block_size=16, actual_seq_lengths_kv=[3]), "the dtype of block_table is torch.int64"),
    (dict(block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=24, actual_seq_lengths_kv=[3]), "block_size is 24, but the device takes multiples"),
    (dict(pre_tokens=2**40), "pre_tokens is 1099511627776, but the device takes integers of 32 bits"),
    (dict(D=528), "D is 528, but the device takes 1 to 512"),
]


@pytest.mark.parametrize("more, message", STRICT)
def test_2_2_strict(more, message):
    more = dict(more)
    dim, kv = more.pop("D", 32), more.pop("kv", torch.float16)
    q, k = torch.zeros(1, 2, 3, dim).half(), torch.zeros(1, 2, 3, dim, dtype=kv)
    given_ = dict(dict(num_heads=2, input_layout="BNSD", strict=True), **more)
    if kv == torch.int8:
        given_.update(key_antiquant_scale=torch.ones(1), value_antiquant_scale=torch.ones(1))
    with pytest.raises(ValueError, match=f"npu_fused_infer_attention_score: strict: {message}"):
        npu.npu_fused_infer_attention_score(q, k, k, **given_)

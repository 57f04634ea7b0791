"""ops_transformer.npu, section 1 of npu_rules.txt: attention for training, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import Attention, attention, by_sequence, f64, near, prefix_mask, to_layout, tokens, upper, window  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

LAYOUTS = ["BSH", "SBH", "BSND", "BNSD"]
UPPER = torch.from_numpy(upper())


def normal(rng, *shapes):
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def problem(rng, batch=2, heads=4, kv_heads=2, sq=5, skv=7, dim=8, value_dim=8):
    return normal(rng, (batch, heads, sq, dim), (batch, kv_heads, skv, dim), (batch, kv_heads, skv, value_dim))


def given(arrays, layout="BNSD"):
    return [torch.from_numpy(to_layout(x, layout)) for x in arrays]


def agrees(results, model, layout="BNSD", bound=2e-6):
    """out, softmax_max and softmax_sum; the last two eight times."""
    near(results[0], to_layout(model.out, layout), bound)
    for got, want in ((results[1], model.max), (results[2], model.sum)):
        assert got.dtype == torch.float32
        near(got, np.repeat(want[..., None], 8, -1), 4e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads, kv_heads, value_dim", [(4, 4, 8), (4, 2, 8), (4, 1, 8), (6, 2, 8), (4, 2, 5)])
def test_1_1_layouts_and_heads(rng, layout, heads, kv_heads, value_dim):
    arrays = problem(rng, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    out = npu.npu_fusion_attention(*given(arrays, layout), heads, layout, scale=0.4)
    agrees(out, Attention(*arrays, None, 0.4), layout)
    again = npu.npu_fusion_attention_v2(*given(arrays, layout), heads, layout, scale=0.4)
    third = npu.npu_fusion_attention_v3(*given(arrays, layout), heads, layout, scale=0.4)
    assert all((x == y).all() and (x == z).all() for x, y, z in zip(out[:3], again[:3], third[:3]))


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_1_1_dtypes(rng, dtype, bound):
    q, k, v = (x.to(dtype) for x in given(problem(rng)))
    out, largest, total, reserved, *_ = npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.4)
    assert (out.dtype, largest.dtype, total.dtype) == (dtype, torch.float32, torch.float32) and reserved.numel() == 0
    near(out, attention(q, k, v, None, 0.4), bound)


def test_1_1_outputs(rng):
    q, k, v = given(problem(rng, value_dim=6), "BSND")
    out, largest, total, reserved, seed, offset, numels = npu.npu_fusion_attention(q, k, v, 4, "BSND")
    assert out.shape == (2, 5, 4, 6) and largest.shape == total.shape == (2, 4, 5, 8) and reserved.numel() == 0
    assert [type(x) for x in (seed, offset, numels)] == [int] * 3 and numels == 2 * 4 * 5 * 7
    q, k, v = torch.randn(9, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    for layout in ("", "TND"):
        _, largest, total, *_, numels = npu.npu_fusion_attention(q, k, v, 4, "TND", actual_seq_qlen=[3, 9], actual_seq_kvlen=[6, 14],
                                                                 softmax_layout=layout)
        assert largest.shape == total.shape == (9, 4, 8) and numels == 4 * (3 * 6 + 6 * 8)


def test_1_1_softmax_layout():
    q = torch.zeros(1, 2, 3, 4)
    for layout, value in (("BNSD", "TND"), ("BNSD", "NTD")):
        with pytest.raises(ValueError, match=f'npu_fusion_attention: softmax_layout is "{value}", must be'):
            npu.npu_fusion_attention(q, q, q, 2, layout, softmax_layout=value)


def test_1_1_padding_mask_must_be_none():
    q = torch.zeros(1, 2, 3, 4)
    for function in (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3):
        with pytest.raises(ValueError, match="padding_mask is given, but must be None"):
            function(q, q, q, 2, "BNSD", padding_mask=q)


# ---- pse -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 4, 1, 7), (1, 4, 5, 7), (1, 4, 1, 7)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1_1_pse_shapes(rng, shape, layout):
    arrays, (pse,) = problem(rng), normal(rng, shape)
    out = npu.npu_fusion_attention(*given(arrays, layout), 4, layout, torch.from_numpy(pse), scale=0.3)
    agrees(out, Attention(*arrays, None, 0.3, pse=pse), layout)


@pytest.mark.parametrize("pse_type", [0, 1, 2, 3])
def test_1_1_pse_types(rng, pse_type):
    """1 (and v1, v3) is scaled with the scores, 0 added after scaling; 2 and 3 are slopes times the distance or its root."""
    arrays = problem(rng)
    pse, slopes = rng.standard_normal((2, 4, 5, 7)).astype(np.float32), rng.random(4).astype(np.float32)
    query_start, key_start = 3, 1
    more = dict(pse=torch.from_numpy(pse if pse_type < 2 else slopes), pse_type=pse_type)
    if pse_type < 2:
        model = Attention(*arrays, None, 0.3, **{"pse" if pse_type == 1 else "bias": pse})
    else:
        more.update(q_start_idx=[query_start], kv_start_idx=[key_start])
        bias = np.empty((1, 4, 5, 7))
        for h in range(4):
            for i in range(5):
                for j in range(7):
                    distance = abs((i + query_start) - (j + key_start))
                    bias[0, h, i, j] = -slopes[h] * (distance if pse_type == 2 else np.sqrt(distance))
        model = Attention(*arrays, None, 0.3, bias=bias)
    agrees(npu.npu_fusion_attention_v2(*given(arrays), 4, "BNSD", scale=0.3, **more), model)
    if pse_type == 1:
        for function in (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3):
            agrees(function(*given(arrays), 4, "BNSD", pse=torch.from_numpy(pse), scale=0.3), model)
    with pytest.raises(ValueError, match="npu_fusion_attention_v2: pse_type is 4, must be 0, 1, 2 or 3"):
        npu.npu_fusion_attention_v2(*given(arrays), 4, "BNSD", pse=more["pse"], pse_type=4)


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_1_1_pse_compressed(rng, mode):
    """The last 1024 rows of ALiBi stand for all of them, in modes 0, 2 and 3."""
    size = 1040
    arrays = normal(rng, *[(1, 2, size, 4)] * 3)
    i, j = np.arange(size)[:, None], np.arange(size)[None]
    whole = -np.array([0.02, 0.05]).reshape(1, 2, 1, 1) * np.abs(i - j)
    mask = torch.from_numpy(np.triu(np.ones((size, size), bool), 1)) if mode == 0 else UPPER
    out = npu.npu_fusion_attention(*given(arrays), 2, "BNSD", torch.from_numpy(whole[:, :, -1024:].astype(np.float32)), atten_mask=mask,
                                   sparse_mode=mode, scale=0.5)
    agrees(out, Attention(*arrays, j <= i, 0.5, pse=whole), bound=1e-5)


def test_1_1_pse_compressed_of_tokens(rng):
    """TND with as many queries as keys in each sequence."""
    lengths, ends = [1040, 1030], [1040, 2070]
    q, k, v = normal(rng, *[(2070, 2, 4)] * 3)
    i, j = np.arange(1040)[:, None], np.arange(1040)[None]
    whole = -np.array([0.02, 0.05]).reshape(1, 2, 1, 1) * np.abs(i - j)
    out = npu.npu_fusion_attention(*map(torch.from_numpy, (q, k, v)), 2, "TND", torch.from_numpy(whole[:, :, -1024:].astype(np.float32)),
                                   atten_mask=UPPER, sparse_mode=3, scale=0.5, actual_seq_qlen=ends, actual_seq_kvlen=ends)
    for n, start, got in zip(lengths, (0, 1040), (out[0][:1040], out[0][1040:])):
        part = [x[start:start + n].transpose(1, 0, 2)[None] for x in (q, k, v)]
        near(got, attention(*part, window(3, n, n), 0.5, pse=whole[:, :, :n, :n])[0].transpose(1, 0, 2), 1e-5)


# ---- masks and modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (5, 7)])
def test_1_1_mask_shapes(rng, shape, dtype):
    arrays, hidden = problem(rng), rng.random(shape) < 0.4
    hidden[..., 2] = False
    out = npu.npu_fusion_attention(*given(arrays), 4, "BNSD", atten_mask=torch.from_numpy(hidden).to(dtype), scale=0.3)
    agrees(out, Attention(*arrays, ~hidden, 0.3))


def test_1_1_no_mask_no_mode(rng):
    arrays = problem(rng)
    want = Attention(*arrays, None, 0.3)
    for mode in (0, 1, 2, 3, 4):
        agrees(npu.npu_fusion_attention(*given(arrays), 4, "BNSD", scale=0.3, sparse_mode=mode, pre_tockens=0, next_tockens=0), want)


@pytest.mark.parametrize("sq, skv", [(5, 7), (6, 6), (7, 5), (1, 4)])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5, 6])
def test_1_1_sparse_modes(rng, mode, sq, skv):
    arrays = problem(rng, sq=sq, skv=skv)
    options, seen = dict(sparse_mode=mode), window(mode, sq, skv, 3, 2)
    if mode in (0, 1):
        hidden = rng.random((sq, skv)) < 0.3
        hidden[np.arange(sq), np.minimum(np.arange(sq), skv - 1)] = False
        options.update(atten_mask=torch.from_numpy(hidden), pre_tockens=3, next_tockens=2)
        seen = seen & ~hidden
    elif mode in (5, 6):
        prefix = [skv - max(skv - sq, 0) // 2, max(skv - sq, 0)]
        seen = np.stack([window(mode, sq, skv, prefix=p) for p in prefix])[:, None]
        mask = ~seen if mode == 5 else prefix_mask()
        options.update(prefix=prefix, atten_mask=torch.from_numpy(mask))
    else:
        options.update(atten_mask=UPPER, pre_tockens=3, next_tockens=2)
    model = Attention(*arrays, seen, 0.3)
    out = npu.npu_fusion_attention(*given(arrays), 4, "BNSD", scale=0.3, **options)
    full = np.isfinite(model.max)
    near(out[0], model.out)
    near(out[1][..., 0][torch.from_numpy(full)], model.max[full], 4e-6)
    near(out[2][..., 0][torch.from_numpy(full)], model.sum[full], 4e-6)


@pytest.mark.parametrize("mode", [0, 2, 3, 4, 7, 8])
def test_1_1_sparse_modes_of_tokens(rng, mode):
    """7: the last sequence is a band and the others mode 3; 8: the first is a band and the others mode 2."""
    q_lengths, kv_lengths, q_ends, kv_ends = [3, 4, 2], [4, 5, 6], [3, 7, 9], [4, 9, 15]
    q, k, v = normal(rng, (9, 4, 8), (15, 2, 8), (15, 2, 8))
    pre, following = {7: (6, -1), 8: (5, 1)}.get(mode, (2, 1))
    mask = torch.zeros(4, 6, dtype=torch.bool) if mode == 0 else UPPER

    def seen(i, n, m):
        own = {7: 4 if i == 2 else 3, 8: 4 if i == 0 else 2}.get(mode, mode)
        return window(own, n, m, pre, following)

    parts = by_sequence(q, k, v, q_lengths, kv_lengths, seen, 0.4)
    out = npu.npu_fusion_attention(*map(torch.from_numpy, (q, k, v)), 4, "TND", atten_mask=mask, scale=0.4, sparse_mode=mode, pre_tockens=pre,
                                   next_tockens=following, actual_seq_qlen=q_ends, actual_seq_kvlen=kv_ends, softmax_layout="TND")
    near(out[0], tokens(parts))
    for got, name in ((out[1], "max"), (out[2], "sum")):
        near(got, np.repeat(tokens(parts, name)[..., None], 8, -1), 4e-6)


@pytest.mark.parametrize("mode", [7, 8])
def test_1_1_one_sequence_of_modes_7_and_8(rng, mode):
    q, k, v = normal(rng, (4, 2, 8), (6, 2, 8), (6, 2, 8))
    out = npu.npu_fusion_attention(*map(torch.from_numpy, (q, k, v)), 2, "TND", atten_mask=UPPER, sparse_mode=mode, pre_tockens=6,
                                   next_tockens=-1, actual_seq_qlen=[4], actual_seq_kvlen=[6])
    near(out[0], tokens(by_sequence(q, k, v, [4], [6], lambda i, n, m: window(4, n, m, 6, -1))))
    with pytest.raises(ValueError, match=f"npu_fusion_attention: pse is given, but sparse_mode {mode} takes none"):
        npu.npu_fusion_attention(*map(torch.from_numpy, (q, k, v)), 2, "TND", torch.zeros(1, 2, 4, 6), atten_mask=UPPER, sparse_mode=mode,
                                 actual_seq_qlen=[4], actual_seq_kvlen=[6])
    with pytest.raises(ValueError, match=f"sparse_mode is {mode}, which goes with input_layout TND, not BSND"):
        npu.npu_fusion_attention(*given(problem(rng), "BSND"), 4, "BSND", atten_mask=UPPER, sparse_mode=mode)


@pytest.mark.parametrize("pre, following", [(3, -2), (-2, 4), (2**31 - 1, -1)])
def test_1_1_negative_windows(rng, pre, following):
    arrays = problem(rng)
    seen = window(0, 5, 7, pre, following)
    out = npu.npu_fusion_attention(*given(arrays), 4, "BNSD", atten_mask=torch.zeros(5, 7, dtype=torch.bool), scale=0.3, pre_tockens=pre,
                                   next_tockens=following, inner_precise=2)
    near(out[0], attention(*arrays, seen, 0.3))
    # Rows that see nothing are zeros.
    assert (out[0][:, :, torch.from_numpy((~seen).all(1))] == 0).all()


def test_1_1_prefix(rng):
    arrays, mask = problem(rng), torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for more, message in ((dict(), "sparse_mode is 5, but prefix is not given"), (dict(prefix=[3]), "prefix"), (dict(prefix=[3, 8]), "prefix")):
        with pytest.raises(ValueError, match=message):
            npu.npu_fusion_attention(*given(arrays), 4, "BNSD", atten_mask=mask, sparse_mode=5, **more)
    q, k, v = map(torch.from_numpy, normal(rng, (4, 2, 8), (6, 2, 8), (6, 2, 8)))
    with pytest.raises(ValueError, match="npu_fusion_attention: strict: input_layout is TND, but the device takes others in sparse_mode 5"):
        npu.npu_fusion_attention(q, k, v, 2, "TND", atten_mask=mask, sparse_mode=5, prefix=[3], actual_seq_qlen=[4], actual_seq_kvlen=[6], strict=True)
    for prefix, sq, skv, bounds in (([1], 5, 7, "2 to 7"), ([8], 5, 7, "2 to 7"), ([6], 7, 5, "0 to 5")):
        with pytest.raises(ValueError, match=f"strict: the prefix of sequence 0 is {prefix[0]}, but the device takes {bounds}"):
            npu.npu_fusion_attention(*[torch.zeros(1, 2, n, 8) for n in (sq, skv, skv)], 2, "BNSD", prefix=prefix, sparse_mode=6,
                                     atten_mask=torch.from_numpy(prefix_mask()), strict=True)
    out = npu.npu_fusion_attention(q, k, v, 2, "TND", atten_mask=torch.from_numpy(prefix_mask()), sparse_mode=6, prefix=[4], actual_seq_qlen=[4],
                                   actual_seq_kvlen=[6])
    near(out[0], tokens(by_sequence(q, k, v, [4], [6], lambda i, n, m: window(6, n, m, prefix=4))))


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_1_1_lengths(rng):
    """Running totals without a leading 0; equal neighbours are empty sequences, zeros at the end switch sequences off."""
    q, k, v = map(torch.from_numpy, normal(rng, (8, 2, 8), (8, 2, 8), (8, 2, 8)))
    call = lambda q_ends, kv_ends: npu.npu_fusion_attention(q, k, v, 2, "TND", actual_seq_qlen=q_ends, actual_seq_kvlen=kv_ends)  # noqa: E731
    near(call([2, 4, 4, 6, 8], [2, 4, 4, 6, 8])[0], tokens(by_sequence(q, k, v, [2, 2, 0, 2, 2], [2, 2, 0, 2, 2])))
    near(call([2, 5, 0, 0], [3, 6, 0, 0])[0][:5], tokens(by_sequence(q, k, v, [2, 3], [3, 3])))
    assert (call([2, 5, 0, 0], [3, 6, 0, 0])[0][5:] == 0).all()
    third = npu.npu_fusion_attention_v3(q, k, v, 2, "TND", actual_seq_qlen=torch.tensor([2, 8]), actual_seq_kvlen=torch.tensor([5, 8]))
    near(third[0], tokens(by_sequence(q, k, v, [2, 6], [5, 3])))
    for more in (dict(), dict(actual_seq_qlen=[8]), dict(actual_seq_kvlen=[8])):
        with pytest.raises(ValueError, match="input_layout TND needs actual_seq_qlen and actual_seq_kvlen, running totals without a leading 0"):
            npu.npu_fusion_attention(q, k, v, 2, "TND", **more)


# ---- rows without a key, sinks, dropout ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_1_1_rows_without_a_key(rng, layout):
    """The mean of the values under a mask; zeros with inner_precise 2, and where the mode makes such rows."""
    arrays, hidden = problem(rng), np.zeros((5, 7), bool)
    hidden[2] = True
    model, mean = Attention(*arrays, ~hidden, 0.3), np.repeat(f64(arrays[2]).mean(2), 2, 1)
    corrected = npu.npu_fusion_attention(*given(arrays, layout), 4, layout, atten_mask=torch.from_numpy(hidden), scale=0.3, inner_precise=2)
    near(corrected[0], to_layout(model.out, layout))
    out = npu.npu_fusion_attention(*given(arrays, layout), 4, layout, atten_mask=torch.from_numpy(hidden), scale=0.3)
    model.out[:, :, 2] = mean
    near(out[0], to_layout(model.out, layout))
    longer = problem(rng, sq=7, skv=5)
    out = npu.npu_fusion_attention(*given(longer, layout), 4, layout, atten_mask=UPPER, sparse_mode=3, scale=0.3)
    near(out[0], to_layout(attention(*longer, window(3, 7, 5), 0.3), layout))


def test_1_1_sink(rng):
    arrays, sink = problem(rng), np.array([0.5, -3, 9, 0], np.float32)
    model = Attention(*arrays, window(3, 5, 7), 0.3, sink=sink)
    for function in (npu.npu_fusion_attention, npu.npu_fusion_attention_v2, npu.npu_fusion_attention_v3):
        agrees(function(*given(arrays), 4, "BNSD", atten_mask=UPPER, sparse_mode=3, scale=0.3, sink=torch.from_numpy(sink)), model)


def test_1_1_dropout_mask(rng):
    """Bits, the lowest of a byte first, over [B, N, Sq, Skv]; of TND over the blocks [N, sq, skv]; 1 keeps."""
    arrays, keep = problem(rng), rng.random((2, 4, 5, 7)) < 0.7
    bits = lambda x: torch.from_numpy(np.packbits(x.reshape(-1), bitorder="little"))  # noqa: E731
    out = npu.npu_fusion_attention(*given(arrays), 4, "BNSD", keep_prob=0.7, dropout_mask=bits(keep), scale=0.3)
    agrees(out, Attention(*arrays, None, 0.3, keep=keep, keep_prob=0.7))  # max and sum are those before dropout
    q, k, v = normal(rng, (5, 2, 8), (7, 2, 8), (7, 2, 8))
    blocks = [rng.random((2, n, m)) < 0.6 for n, m in ((2, 4), (3, 3))]
    parts = [by_sequence(q[a:], k[b:], v[b:], [n], [m], None, 0.3, keep=kept[None], keep_prob=0.6)[0]
             for a, b, n, m, kept in ((0, 0, 2, 4, blocks[0]), (2, 4, 3, 3, blocks[1]))]
    out = npu.npu_fusion_attention(*map(torch.from_numpy, (q, k, v)), 2, "TND", keep_prob=0.6, scale=0.3, actual_seq_qlen=[2, 5],
                                   actual_seq_kvlen=[4, 7], dropout_mask=bits(np.concatenate([x.reshape(-1) for x in blocks])))
    near(out[0], tokens(parts))


def test_1_1_seeds(rng):
    """0 draws a seed; others come back as they are, and repeat."""
    q, k, v = given(problem(rng))
    torch.manual_seed(5)
    first = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.5)
    torch.manual_seed(5)
    assert npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.5)[4] == first[4] != 0
    again = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.5, seed=first[4], offset=first[5])
    assert (again[0] == first[0]).all() and again[4:6] == first[4:6]
    other = npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=0.5, seed=11, offset=8)
    assert other[4:6] == (11, 8) and not (other[0] == first[0]).all()
    third = npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", keep_prob=0.5)
    assert third[4].dtype == third[5].dtype == torch.int64 and len(third) == 6
    for wrong in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match=f"keep_prob is {wrong}, must be above 0 and at most 1"):
            npu.npu_fusion_attention(q, k, v, 4, "BNSD", keep_prob=wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_1_1_ropes_of_v2(rng, layout):
    arrays, ropes = problem(rng), normal(rng, (2, 4, 5, 4), (2, 2, 7, 4))
    whole = [np.concatenate(pair, -1) for pair in zip(arrays[:2], ropes)]
    qr, kr = given(ropes, layout)
    out = npu.npu_fusion_attention_v2(*given(arrays, layout), 4, layout, query_rope=qr, key_rope=kr, scale=0.3)
    agrees(out, Attention(*whole, arrays[2], None, 0.3), layout)


# ---- 1.2 gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 5])
def test_1_2_gradients(rng, layout, mode):
    """dS = P (dP - rowsum(dP P)), dq = scale dS K, dk = scale dS^T Q, dv = P^T dy, heads of a group summed: by autograd and by _grad."""
    arrays, (dy,), hidden = problem(rng), normal(rng, (2, 4, 5, 8)), rng.random((5, 7)) < 0.3
    hidden[:, 0] = False
    seen, options = window(mode, 5, 7, 4, 2, 3), dict(sparse_mode=mode, pre_tockens=4, next_tockens=2, atten_mask=UPPER)
    if mode in (0, 1):
        seen, options["atten_mask"] = seen & ~hidden, torch.from_numpy(hidden)
    elif mode == 5:
        options.update(prefix=[3, 3], atten_mask=torch.from_numpy(~seen)[None, None])
    want = Attention(*arrays, seen, 0.3).grad(dy)[:3]
    inputs, grad = [x.requires_grad_() for x in given(arrays, layout)], given([dy], layout)[0]
    out, largest, total, reserved, *_ = npu.npu_fusion_attention(*inputs, 4, layout, scale=0.3, **options)
    by_autograd = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    found = npu.npu_fusion_attention_grad(*inputs, grad, 4, layout, scale_value=0.3, softmax_max=largest, softmax_sum=total,
                                          softmax_in=reserved, attention_in=out, **options)
    assert len(found) == 5 and found[3].numel() == found[4].numel() == 0
    for a, b, right in zip(by_autograd, found, want):
        near(a, to_layout(right, layout), 4e-6)
        near(b, to_layout(right, layout), 4e-6)


def test_1_2_gradients_of_pse_and_sink(rng):
    arrays, (pse, dy) = problem(rng), normal(rng, (2, 4, 5, 7), (2, 4, 5, 8))
    sink = np.array([0.5, -3, 2, 0], np.float32)
    dq, dk, dv, dpse, dsink = Attention(*arrays, None, 0.3, pse=pse, sink=sink).grad(dy)
    inputs = [*given(arrays), torch.from_numpy(pse), torch.from_numpy(sink)]
    out, largest, total, *_ = npu.npu_fusion_attention(*inputs[:3], 4, "BNSD", inputs[3], sink=inputs[4], scale=0.3)
    common = dict(pse=inputs[3], sink=inputs[4], scale_value=0.3, softmax_max=largest, softmax_sum=total, attention_in=out)
    first = npu.npu_fusion_attention_grad(*inputs[:3], torch.from_numpy(dy), 4, "BNSD", **common)
    third = npu.npu_fusion_attention_grad_v3(*inputs[:3], torch.from_numpy(dy), 4, "BNSD", **common)
    second = npu.npu_fusion_attention_grad_v2(*inputs[:3], torch.from_numpy(dy), 4, "BNSD", **common)
    assert len(first) == len(third) == 5 and len(second) == 7 and second[4].numel() == second[5].numel() == 0
    for results in (first, third, (*second[:4], second[6])):
        for got, want in zip(results, (dq, dk, dv, dpse, dsink)):
            near(got, want, 1e-5)


@pytest.mark.parametrize("mode", [3, 7, 8])
def test_1_2_gradients_of_tokens(rng, mode):
    q_lengths, kv_lengths, q_ends, kv_ends = [3, 4, 2], [4, 5, 6], [3, 7, 9], [4, 9, 15]
    q, k, v, dy = normal(rng, (9, 4, 8), (15, 2, 8), (15, 2, 8), (9, 4, 8))
    own = lambda i: {7: 4 if i == 2 else 3, 8: 4 if i == 0 else 2}.get(mode, mode)  # noqa: E731
    parts = by_sequence(q, k, v, q_lengths, kv_lengths, lambda i, n, m: window(own(i), n, m, 9, 0), 0.4)
    starts = [0, 3, 7]
    want = [np.concatenate([x[i][0].transpose(1, 0, 2) for x in
                            [part.grad(dy[a:a + n].transpose(1, 0, 2)[None]) for part, a, n in zip(parts, starts, q_lengths)]]) for i in range(3)]
    given_ = [torch.from_numpy(x) for x in (q, k, v)]
    options = dict(atten_mask=UPPER, sparse_mode=mode, pre_tockens=9, next_tockens=0, actual_seq_qlen=q_ends, actual_seq_kvlen=kv_ends)
    out, largest, total, *_ = npu.npu_fusion_attention(*given_, 4, "TND", scale=0.4, **options)
    found = npu.npu_fusion_attention_grad(*given_, torch.from_numpy(dy), 4, "TND", scale_value=0.4, softmax_max=largest, softmax_sum=total,
                                          attention_in=out, **options)
    for got, right in zip(found, want):
        near(got, right, 4e-6)


def test_1_2_dropout_of_a_seed(rng):
    """The backward drops what the forward dropped: seed and offset come from it."""
    q, k, v = given(problem(rng, heads=2))
    dy = torch.ones(2, 2, 5, 8)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, largest, total, _, seed, offset, numels = npu.npu_fusion_attention(*inputs, 2, "BNSD", keep_prob=0.6, scale=0.3)
    want = torch.autograd.grad(out, inputs, dy, retain_graph=True)
    found = npu.npu_fusion_attention_grad(q, k, v, dy, 2, "BNSD", scale_value=0.3, keep_prob=0.6, seed=seed, offset=offset, numels=numels,
                                          softmax_max=largest, softmax_sum=total, attention_in=out)
    tensors = npu.npu_fusion_attention_grad_v3(q, k, v, dy, 2, "BNSD", scale_value=0.3, keep_prob=0.6, seed=torch.tensor([seed]),
                                               offset=torch.tensor([offset]), softmax_max=largest, softmax_sum=total, attention_in=out)
    ones = npu.npu_fusion_attention_grad(q, k, v, dy, 2, "BNSD", scale_value=0.3, keep_prob=0.6, seed=seed + 1, offset=offset,
                                         softmax_max=largest, softmax_sum=total, attention_in=out)
    for a, b, c in zip(found, tensors, want):
        near(a, c.detach(), 4e-6)
        assert (a == b).all()
    assert not torch.allclose(ones[0], found[0])


def test_1_1_strict_tokens():
    """The mask of TND is one of the longest queries and keys, and pse goes with no empty sequence."""
    q = torch.zeros(5, 2, 8)
    given_ = dict(query=q, key=q, value=q, head_num=2, input_layout="TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5], strict=True)
    npu.npu_fusion_attention(**given_, atten_mask=torch.zeros(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"strict: the shape of atten_mask is \[5, 5\], but the device takes \[3, 3\] in TND"):
        npu.npu_fusion_attention(**given_, atten_mask=torch.zeros(5, 5, dtype=torch.bool))
    given_.update(actual_seq_qlen=[2, 2, 5], actual_seq_kvlen=[2, 2, 5])
    with pytest.raises(ValueError, match="strict: pse is given beside a sequence of no tokens, but the device takes none there"):
        npu.npu_fusion_attention(**given_, pse=torch.zeros(1, 2, 3, 3))

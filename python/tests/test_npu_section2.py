"""ops_transformer.npu, section 2 of npu_rules.txt: attention for inference, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import Attention, attention, by_sequence, f64, near, to_layout, tokens, upper, window  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402

UPPER = torch.from_numpy(upper())


def normal(rng, *shapes):
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def problem(rng, batch=2, heads=4, kv_heads=2, sq=5, skv=7, dim=8, value_dim=None):
    return normal(rng, (batch, heads, sq, dim), (batch, kv_heads, skv, dim), (batch, kv_heads, skv, value_dim or dim))


def given(arrays, layout="BNSD"):
    return [torch.from_numpy(to_layout(x, layout)) for x in arrays]


def fia(arrays, layout="BNSD", heads=4, kv_heads=2, **more):
    return npu.npu_fused_infer_attention_score(*given(arrays, layout), num_heads=heads, num_key_value_heads=kv_heads, input_layout=layout, **more)


# ---- 2.1 names -------------------------------------------------------------------------------------------------------


def test_2_1_names(rng):
    """The second version's names, and those of PFA and IFA, mean what the first one's do."""
    arrays, hidden, (pse,) = problem(rng), torch.from_numpy(rng.random((2, 1, 5, 7)) < 0.3), normal(rng, (2, 4, 5, 7))
    hidden[..., 0] = False
    lengths, q_lengths = [6, 7], [5, 3]
    one, lse = fia(arrays, scale=0.3, atten_mask=hidden, pse_shift=torch.from_numpy(pse), actual_seq_lengths=q_lengths,
                   actual_seq_lengths_kv=lengths, softmax_lse_flag=True)
    two = npu.npu_fused_infer_attention_score_v2(*given(arrays), num_query_heads=4, num_key_value_heads=2, input_layout="BNSD", softmax_scale=0.3,
                                                 atten_mask=hidden, pse_shift=torch.from_numpy(pse), actual_seq_qlen=q_lengths,
                                                 actual_seq_kvlen=lengths, return_softmax_lse=True)
    prompt = npu.npu_prompt_flash_attention(*given(arrays), num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.3,
                                            atten_mask=hidden, pse_shift=torch.from_numpy(pse), actual_seq_lengths=q_lengths,
                                            actual_seq_lengths_kv=lengths, next_tokens=2147483647)
    assert (one == two[0]).all() and (one == prompt).all() and (lse == two[1]).all()
    for b in range(2):
        seen = ~hidden[b].numpy() & (np.arange(7) < lengths[b])
        near(one[b, :, :q_lengths[b]], attention(*(x[b:b + 1] for x in arrays), seen, 0.3, bias=pse[b:b + 1])[0, :, :q_lengths[b]])
    assert (one[1, :, 3:] == 0).all()
    arrays = problem(rng, sq=1)
    step = npu.npu_incre_flash_attention(*given(arrays), num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.3,
                                         actual_seq_lengths=lengths)
    assert (step == fia(arrays, scale=0.3, actual_seq_lengths_kv=lengths)[0]).all()
    near(step, attention(*arrays, np.arange(7) < np.array(lengths)[:, None, None, None], 0.3))
    for function in (npu.npu_prompt_flash_attention, npu.npu_incre_flash_attention):
        with pytest.raises(ValueError, match="padding_mask is given, but must be None"):
            function(*given(arrays), padding_mask=hidden, num_heads=4, num_key_value_heads=2, input_layout="BNSD")


# ---- 2.2 layouts -----------------------------------------------------------------------------------------------------

PAIRS = ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD"]


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("heads, kv_heads, value_dim", [(4, 2, 8), (4, 0, 8), (4, 1, 8)])
def test_2_2_layouts(rng, layout, heads, kv_heads, value_dim):
    """What stands left of _ is read, what stands right is written; N B S D means that order. 0 key heads are as many as the query's."""
    arrays = problem(rng, heads=heads, kv_heads=kv_heads or heads, value_dim=value_dim)
    read, _, written = layout.partition("_")
    out, lse = npu.npu_fused_infer_attention_score(*given(arrays, read), num_heads=heads, num_key_value_heads=kv_heads, input_layout=layout,
                                                   scale=0.3, softmax_lse_flag=True)
    model = Attention(*arrays, None, 0.3)
    near(out, to_layout(model.out, written or read))
    near(lse, model.lse[..., None], 4e-6)
    assert out.is_contiguous()


@pytest.mark.parametrize("layout", ["TND", "NTD", "TND_NTD", "NTD_TND"])
def test_2_2_layouts_of_tokens(rng, layout):
    rows = normal(rng, (9, 4, 8), (14, 2, 8), (14, 2, 8))
    turn = (lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)))  # noqa: E731
    out, lse = npu.npu_fused_infer_attention_score(*(torch.from_numpy(turn(x) if layout[0] == "N" else x) for x in rows), num_heads=4,
                                                   num_key_value_heads=2, input_layout=layout, scale=0.3, actual_seq_lengths=[3, 3, 9],
                                                   actual_seq_lengths_kv=[4, 4, 14], softmax_lse_flag=True)
    parts = by_sequence(*rows, [3, 0, 6], [4, 0, 10], None, 0.3)
    near(out, tokens(parts) if layout in ("TND", "NTD_TND") else turn(tokens(parts)))
    near(lse, tokens(parts, "lse")[..., None], 4e-6)
    for more in (dict(actual_seq_lengths=[9]), dict(actual_seq_lengths_kv=[14])):
        with pytest.raises(ValueError, match=f"input_layout {layout} needs the lengths of queries and keys, running totals"):
            npu.npu_fused_infer_attention_score(*map(torch.from_numpy, rows), num_heads=4 if layout[0] == "T" else 9, input_layout=layout, **more)


def test_2_2_layouts_of_incre(rng):
    for layout in ("BSH", "BSND", "BNSD"):
        arrays = problem(rng, sq=1)
        near(npu.npu_incre_flash_attention(*given(arrays, layout), num_heads=4, num_key_value_heads=2, input_layout=layout),
             to_layout(attention(*arrays), layout))
    with pytest.raises(ValueError, match='npu_incre_flash_attention: input_layout is "TND", must be one of BSH, BSND, BNSD'):
        npu.npu_incre_flash_attention(*given(arrays), num_heads=4, input_layout="TND")
    with pytest.raises(ValueError, match="npu_incre_flash_attention: query has 5 queries of a sequence, must have 1"):
        npu.npu_incre_flash_attention(*given(problem(rng)), num_heads=4, num_key_value_heads=2, input_layout="BNSD")


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_2_2_dtypes(rng, dtype, bound):
    q, k, v = (x.to(dtype) for x in given(problem(rng)))
    out, lse = npu.npu_fused_infer_attention_score(q, k, v, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale=0.3, softmax_lse_flag=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    near(out, attention(q, k, v, None, 0.3), bound)


# ---- masks and modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (5, 7), (2, 5, 7), (1, 1, 16, 32), (2, 1, 8, 32)])
def test_2_2_mask_shapes(rng, shape, dtype):
    """1 hides. Dimensions beyond those of the call are padding."""
    arrays, hidden = problem(rng), rng.random(shape) < 0.4
    hidden[..., 2] = False
    seen = ~hidden[..., :5, :7]
    seen = seen[:, None] if seen.ndim == 3 else seen
    for mode in (0, 1):
        near(fia(arrays, atten_mask=torch.from_numpy(hidden).to(dtype), scale=0.3, sparse_mode=mode)[0], attention(*arrays, seen, 0.3))


@pytest.mark.parametrize("shape", [(2, 7), (2, 1, 7), (2, 1, 1, 7), (1, 1, 1, 7), (2, 16)])
def test_2_2_one_query(rng, shape):
    """A mask of (B, Skv) too; sparse_mode, pre and next tokens count for nothing."""
    arrays, hidden = problem(rng, sq=1), rng.random(shape) < 0.4
    hidden[..., 2] = False
    seen = ~hidden[..., :7].reshape(shape[0], 1, 1, 7)
    for mode in (0, 1, 2, 3, 4):
        out = fia(arrays, atten_mask=torch.from_numpy(hidden), scale=0.3, sparse_mode=mode, pre_tokens=0, next_tokens=0, actual_seq_lengths=[9, 9])
        near(out[0], attention(*arrays, seen, 0.3))
    near(npu.npu_incre_flash_attention(*given(arrays), num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.3,
                                       atten_mask=torch.from_numpy(hidden)), attention(*arrays, seen, 0.3))
    with pytest.raises(ValueError, match=r"atten_mask is \[2048, 2048\], the compressed one of sparse_mode 3, which does not count for one query"):
        fia(arrays, atten_mask=UPPER, sparse_mode=3)


@pytest.mark.parametrize("sq, skv", [(5, 7), (6, 6), (7, 5)])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_2_2_sparse_modes(rng, mode, sq, skv):
    arrays, pre, following = problem(rng, sq=sq, skv=skv), 3, 1
    hidden, seen = rng.random((sq, skv)) < 0.3, window(mode, sq, skv, 3, 1)
    if mode in (0, 1):
        seen = seen & ~hidden
    masks = [torch.from_numpy(hidden)] if mode in (0, 1) else [UPPER, UPPER[None], UPPER[None, None]]
    model = Attention(*arrays, seen, 0.3)
    for mask in masks:
        out, lse = fia(arrays, atten_mask=mask, scale=0.3, sparse_mode=mode, pre_tokens=pre, next_tokens=following, inner_precise=2,
                       softmax_lse_flag=True)
        near(out, model.out)  # rows that see nothing are zeros
        assert (lse[..., 0][torch.from_numpy(model.sum == 0)] == torch.inf).all()
        near(lse[..., 0][torch.from_numpy(model.sum > 0)], model.lse[model.sum > 0], 4e-6)
    near(fia(arrays, scale=0.3, sparse_mode=0, pre_tokens=0, next_tokens=0)[0], attention(*arrays, None, 0.3))  # no mask: no window
    near(npu.npu_prompt_flash_attention(*given(arrays), num_heads=4, num_key_value_heads=2, input_layout="BNSD"), attention(*arrays))


@pytest.mark.parametrize("mode", [3, 4])
def test_2_2_sparse_modes_of_tokens(rng, mode):
    rows = normal(rng, (9, 4, 8), (14, 2, 8), (14, 2, 8))
    out = npu.npu_fused_infer_attention_score(*map(torch.from_numpy, rows), num_heads=4, num_key_value_heads=2, input_layout="TND", scale=0.3,
                                              actual_seq_lengths=[1, 9], actual_seq_lengths_kv=[4, 14], atten_mask=UPPER, sparse_mode=mode,
                                              pre_tokens=2, next_tokens=1)[0]
    near(out, tokens(by_sequence(*rows, [1, 8], [4, 10], lambda i, n, m: window(mode, n, m, 2, 1), 0.3)))


@pytest.mark.parametrize("mode", [5, 6, 7, 8])
def test_2_2_modes_of_training_are_refused(rng, mode):
    with pytest.raises(ValueError, match=f"sparse_mode is {mode}, must be 0 to 4"):
        fia(problem(rng), sparse_mode=mode, atten_mask=UPPER)


def test_2_2_tree_mask_says_where_it_is(rng):
    arrays = problem(rng)
    with pytest.raises(NotImplementedError, match="npu_fused_infer_attention_score_v2: sparse_mode 9, the mask of a tree"):
        npu.npu_fused_infer_attention_score_v2(*given(arrays), num_query_heads=4, num_key_value_heads=2, input_layout="BNSD", sparse_mode=9,
                                               atten_mask=torch.zeros(2, 5, 5, dtype=torch.bool))


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_2_2_lengths(rng):
    """One for each sequence; a list of 1 serves all, of a longer one the first count. Of one query those of queries do not count."""
    arrays = problem(rng, batch=3)
    for lengths, of in (([4, 7, 5], [4, 7, 5]), ([6], [6] * 3), ([4, 7, 5, 1, 1], [4, 7, 5])):
        seen = np.arange(7) < np.array(of)[:, None, None, None]
        near(fia(arrays, scale=0.3, actual_seq_lengths_kv=lengths)[0], attention(*arrays, seen, 0.3))
    out = fia(arrays, scale=0.3, actual_seq_lengths=[2])[0]
    near(out[:, :, :2], attention(*arrays, None, 0.3)[:, :, :2])
    assert (out[:, :, 2:] == 0).all()
    with pytest.raises(ValueError, match="actual_seq_kvlen has 2 lengths, but the batch has 3"):
        fia(arrays, actual_seq_lengths_kv=[4, 5])
    arrays = problem(rng, sq=1)
    near(fia(arrays, scale=0.3, actual_seq_lengths=[0, 5])[0], attention(*arrays, None, 0.3))


def test_2_2_empty(rng):
    q, k, v = problem(rng)
    assert fia((q[:, :, :0], k, v))[0].shape == (2, 4, 0, 8)
    for layout in ("BNSD", "BSH", "BSND"):
        out, lse = fia((q, k[:, :, :0], v[:, :, :0]), layout, softmax_lse_flag=True)
        assert out.shape == to_layout(q, layout).shape and (out == 0).all() and lse.shape == (2, 4, 5, 1)


def test_2_2_lse(rng):
    """max + log(sum), natural; without the flag one 0. Parts over different keys are joined by exp(lse - largest lse)."""
    q, k, v = problem(rng)
    parts = [fia((q, k[:, :, a:b], v[:, :, a:b]), scale=0.3, softmax_lse_flag=True) for a, b in ((0, 3), (3, 7))]
    model = Attention(q, k, v, None, 0.3)
    outs, lses = (np.stack([f64(part[i]) for part in parts]) for i in (0, 1))
    weights = np.exp(lses - lses.max(0))
    near((outs * weights).sum(0) / weights.sum(0), model.out)
    _, lse = fia((q, k, v))
    assert lse.shape == (1,) and lse == 0


# ---- pages -----------------------------------------------------------------------------------------------------------

TABLE = np.array([[2, 0, 7], [1, 3, 0]])  # block 7 is beyond the cache, and behind both lengths


def paged(rng, dim=16, blocks=4, size=4, kv_heads=2):
    """Pages [blocks, size, N, D] and the rows [B, N, S, D] that the table names."""
    pages = normal(rng, *[(blocks, size, kv_heads, dim)] * 2)
    rows = [np.stack([page[ids[:2]].reshape(-1, kv_heads, dim) for ids in TABLE]).transpose(0, 2, 1, 3) for page in pages]
    return pages, rows


FORMS = {
    "BSH": lambda p: p.reshape(*p.shape[:2], -1),
    "BSND": lambda p: p.reshape(*p.shape[:2], -1),
    "BNSD": lambda p: p.transpose(0, 2, 1, 3),
    "NZ": lambda p: p.reshape(*p.shape[:3], -1, 16).transpose(0, 2, 3, 1, 4),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sq", [1, 3])
def test_2_2_pages(rng, form, sq):
    """(blocks, rows, H), (blocks, N, rows, D) and NZ; masks and pse are as wide as the table; lengths of keys are needed."""
    layout, lengths = "BNSD" if form == "NZ" else form, [7, 5]
    pages, rows = paged(rng)
    q, pse = normal(rng, (2, 4, sq, 16), (2, 4, sq, 12))
    hidden = rng.random((2, 1, sq, 12)) < 0.3
    hidden[..., 0] = False
    common = dict(num_heads=4, num_key_value_heads=2, input_layout=layout, scale=0.3, block_table=torch.from_numpy(TABLE).int(), block_size=4)
    cache = [torch.from_numpy(np.ascontiguousarray(FORMS[form](page))) for page in pages]
    out, lse = npu.npu_fused_infer_attention_score(given([q], layout)[0], *cache, actual_seq_lengths_kv=lengths, atten_mask=torch.from_numpy(hidden),
                                                   pse_shift=torch.from_numpy(pse), softmax_lse_flag=True, **common)
    seen = ~hidden[..., :8] & (np.arange(8) < np.array(lengths)[:, None, None, None])
    model = Attention(q, *rows, seen, 0.3, bias=pse[..., :8])
    near(out, to_layout(model.out, layout))
    near(lse, model.lse[..., None], 4e-6)
    if sq == 1:
        step = npu.npu_incre_flash_attention(given([q], layout)[0], *cache, num_heads=4, num_key_value_heads=2, input_layout=layout, scale_value=0.3,
                                             block_table=common["block_table"], block_size=4, actual_seq_lengths=lengths)
        near(step, to_layout(attention(q, *rows, np.arange(8) < np.array(lengths)[:, None, None, None], 0.3), layout))
    with pytest.raises(ValueError, match="block_table is given, but the lengths of keys are not"):
        npu.npu_fused_infer_attention_score(given([q], layout)[0], *cache, **common)


def test_2_2_pages_of_tokens(rng):
    """Queries in running totals, keys one length for each sequence."""
    pages, rows = paged(rng)
    q, = normal(rng, (5, 4, 16))
    out = npu.npu_fused_infer_attention_score(torch.from_numpy(q), *(torch.from_numpy(FORMS["BNSD"](page).copy()) for page in pages), num_heads=4,
                                              num_key_value_heads=2, input_layout="TND", scale=0.3, block_table=torch.from_numpy(TABLE).int(),
                                              actual_seq_lengths=[2, 5], actual_seq_lengths_kv=[7, 5], atten_mask=UPPER, sparse_mode=3)[0]
    for b, (a, e, m) in enumerate(((0, 2, 7), (2, 5, 5))):
        part = [q[a:e].transpose(1, 0, 2)[None], *(x[b:b + 1, :, :m] for x in rows)]
        near(out[a:e], attention(*part, window(3, e - a, m), 0.3)[0].transpose(1, 0, 2))


def test_2_2_block_ids_are_checked(rng):
    pages, _ = paged(rng)
    q, = normal(rng, (2, 4, 1, 16))
    for wrong in (4, -1):
        table = torch.tensor([[2, 0], [1, wrong]], dtype=torch.int32)
        with pytest.raises(ValueError, match="block_table"):
            npu.npu_fused_infer_attention_score(torch.from_numpy(q), *(torch.from_numpy(FORMS["BNSD"](page).copy()) for page in pages), num_heads=4,
                                                num_key_value_heads=2, input_layout="BNSD", block_table=table, actual_seq_lengths_kv=[7, 5])


# ---- what else keys may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_2_2_lists(rng, layout):
    """B tensors of batch 1 with lengths of their own."""
    q, k, v = problem(rng)
    lists = [[torch.from_numpy(to_layout(x[b:b + 1, :, :m], layout)) for b, m in enumerate((4, 7))] for x in (k, v)]
    out = npu.npu_fused_infer_attention_score(given([q], layout)[0], *lists, num_heads=4, num_key_value_heads=2, input_layout=layout, scale=0.3)[0]
    near(out, to_layout(attention(q, k, v, np.arange(7) < np.array([4, 7])[:, None, None, None], 0.3), layout))


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (1, 4, 8, 16)])
def test_2_2_pse_shift(rng, shape):
    """Added after scaling; larger dimensions are padding."""
    arrays, (pse,) = problem(rng), normal(rng, shape)
    want = attention(*arrays, None, 0.3, bias=pse[..., :5, :7])
    near(fia(arrays, scale=0.3, pse_shift=torch.from_numpy(pse))[0], want)
    near(npu.npu_prompt_flash_attention(*given(arrays), num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.3,
                                        pse_shift=torch.from_numpy(pse)), want)


@pytest.mark.parametrize("pad", [0, 2, -3])
def test_2_2_left_padding(rng, pad):
    """The rows used begin at S - padding - length, and results stand where their queries do; a negative padding is 0."""
    q, k, v = problem(rng)
    q_lengths, kv_lengths, behind = [2, 3], [4, 5], max(pad, 0)
    size = torch.tensor([pad])
    out = fia((q, k, v), scale=0.3, query_padding_size=size, kv_padding_size=size, actual_seq_lengths=q_lengths, actual_seq_lengths_kv=kv_lengths)[0]
    want = np.zeros_like(q)
    for b in range(2):
        a, c = 5 - behind - q_lengths[b], 7 - behind - kv_lengths[b]
        keys = slice(c, c + kv_lengths[b])
        want[b, :, a:a + q_lengths[b]] = attention(q[b:b + 1, :, a:a + q_lengths[b]], k[b:b + 1, :, keys], v[b:b + 1, :, keys], None, 0.3)[0]
    near(out, want)
    with pytest.raises(ValueError, match="kv_padding_size needs lengths of keys"):
        fia((q, k, v), kv_padding_size=size)
    with pytest.raises(ValueError, match="query_padding_size needs lengths of queries"):
        fia((q, k, v), query_padding_size=size)


def test_2_2_left_padding_of_one_query(rng):
    """A sequence that would begin before its tensor gives zeros."""
    q, k, v = problem(rng, sq=1)
    out = npu.npu_incre_flash_attention(*given((q, k, v)), num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.3,
                                        kv_padding_size=torch.tensor([3]), actual_seq_lengths=[5, 2])
    assert (out[0] == 0).all()
    near(out[1:], attention(q[1:], k[1:, :, 2:4], v[1:, :, 2:4], None, 0.3))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("count", [None, [3]])
def test_2_2_shared_prefix(rng, layout, count):
    """Keys and values of batch 1 before those of every sequence; pse is wide enough for both."""
    q, k, v = problem(rng)
    first, pse = normal(rng, (1, 2, 4, 8), (1, 2, 4, 8)), normal(rng, (1, 4, 5, 11))[0]
    used = 4 if count is None else 3
    whole = [np.concatenate([np.repeat(x[:, :, :used], 2, 0), y], 2) for x, y in zip(first, (k, v))]
    prefix = given(first, layout)
    out = fia((q, k, v), layout, scale=0.3, key_shared_prefix=prefix[0], value_shared_prefix=prefix[1], actual_shared_prefix_len=count,
              pse_shift=torch.from_numpy(pse), actual_seq_lengths_kv=[5, 7])[0]
    seen = np.arange(used + 7) < used + np.array([5, 7])[:, None, None, None]
    near(out, to_layout(attention(q, *whole, seen, 0.3, bias=pse[..., :used + 7]), layout))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "TND", "TND_NTD", "BSND_NBSD"])
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_2_2_latent(rng, layout, mode):
    """The scores of query and key with ropes beside them; values are the keys' first 512. One query too: the mode counts."""
    for sq in (1, 3):
        q, k, qr, kr = normal(rng, (2, 8, sq, 512), (2, 1, 7, 512), (2, 8, sq, 64), (2, 1, 7, 64))
        read, _, written = layout.partition("_")
        more = dict(atten_mask=UPPER if mode else None, sparse_mode=mode, pre_tokens=2, next_tokens=0)
        shape = (lambda x: torch.from_numpy(np.concatenate([y.transpose(1, 0, 2) for y in x]))) if read == "TND" else (lambda x: given([x], read)[0])
        if read == "TND":
            more.update(actual_seq_lengths=[sq, 2 * sq], actual_seq_lengths_kv=[7, 14])
        out = npu.npu_fused_infer_attention_score(*map(shape, (q, k, k)), query_rope=shape(qr), key_rope=shape(kr), num_heads=8,
                                                  num_key_value_heads=1, input_layout=layout, scale=0.03, **more)[0]
        want = attention(np.concatenate([q, qr], -1), np.concatenate([k, kr], -1), k, window(mode, sq, 7, 2, 0) if mode else None, 0.03)
        if read == "TND":
            want = np.concatenate([x.transpose(1, 0, 2) for x in want])
            want = want.transpose(1, 0, 2) if written else want
        else:
            want = to_layout(want, written or read)
        near(out, want, 4e-6)
    with pytest.raises(ValueError, match="query_rope and key_rope go together, but one of them is not given"):
        npu.npu_fused_infer_attention_score(*given((q, k, k)), query_rope=torch.from_numpy(qr), num_heads=8, num_key_value_heads=1, input_layout="BNSD")


def test_2_2_latent_pages(rng):
    pages, ropes, (q, qr) = normal(rng, (4, 16, 512))[0], normal(rng, (4, 16, 64))[0], normal(rng, (2, 8, 1, 512), (2, 8, 1, 64))
    table = np.array([[2, 0], [1, 3]])
    k, kr = (np.stack([x[ids].reshape(-1, x.shape[-1]) for ids in table])[:, None] for x in (pages, ropes))
    cache = torch.from_numpy(pages)
    out = npu.npu_fused_infer_attention_score(*given([q], "BSH"), cache, cache, query_rope=given([qr], "BSH")[0], key_rope=torch.from_numpy(ropes),
                                              num_heads=8, num_key_value_heads=1, input_layout="BSH", scale=0.03, block_table=torch.from_numpy(table).int(),
                                              block_size=16, actual_seq_lengths_kv=[20, 9])[0]
    seen = np.arange(32) < np.array([20, 9])[:, None, None, None]
    near(out, to_layout(attention(np.concatenate([q, qr], -1), np.concatenate([k, kr], -1), k, seen, 0.03), "BSH"), 4e-6)


@pytest.mark.parametrize("dim, value_dim", [(128, 128), (192, 128), (192, 192), (576, 512), (256, 256)])
def test_2_2_widths_of_tokens(rng, dim, value_dim):
    """All of them, where the device takes the first three (cases: MLA 192 / 128)."""
    rows = normal(rng, (8, 4, dim), (8, 4, dim), (8, 4, value_dim))
    out = npu.npu_fused_infer_attention_score(*map(torch.from_numpy, rows), num_heads=4, input_layout="TND", scale=dim**-0.5,
                                              actual_seq_lengths=[5, 8], actual_seq_lengths_kv=[5, 8])[0]
    near(out, tokens(by_sequence(*rows, [5, 3], [5, 3], None, dim**-0.5)))


def test_2_2_sink(rng):
    rows, sink = normal(rng, (9, 4, 8), (14, 2, 8), (14, 2, 8)), torch.tensor([0.5, -3, 2, 0]).bfloat16()
    out, lse = npu.npu_fused_infer_attention_score_v2(*map(torch.from_numpy, rows), num_query_heads=4, num_key_value_heads=2, input_layout="TND",
                                                      softmax_scale=0.3, actual_seq_qlen=[3, 9], actual_seq_kvlen=[4, 14], learnable_sink=sink,
                                                      return_softmax_lse=True)
    parts = by_sequence(*rows, [3, 6], [4, 10], None, 0.3, sink=f64(sink))
    near(out, tokens(parts))
    near(lse, tokens(parts, "lse")[..., None], 4e-6)

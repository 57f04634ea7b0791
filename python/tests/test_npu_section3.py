"""ops_transformer.npu, section 3 of npu_rules.txt: caches and merging, each rule against its model in NumPy."""

import numpy as np
import pytest
from conftest import import_torch

torch = import_torch()

from npu_model import Attention, attention, f64, near, to_layout  # noqa: E402

import ops_transformer.npu as npu  # noqa: E402


def cache_of(rows, blocks, size, form, chunk):
    """The cache of flat rows [slots, heads, D] in a form."""
    slots, heads, width = rows.shape
    if form == "PA_NZ":
        return np.ascontiguousarray(rows.reshape(blocks, size, heads * width // chunk, chunk).transpose(0, 2, 1, 3))
    return rows.reshape(blocks, size, heads, width)


KINDS = {"float16": 16, "bfloat16": 16, "int8": 32}


def filled(rng, kind, *shape):
    return torch.from_numpy(rng.integers(-100, 100, shape).astype(np.float32)).to(getattr(torch, kind))


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["PA_NZ", "Norm", None])
@pytest.mark.parametrize("kind", KINDS)
def test_3_1_scatter(rng, kind, form, slot_type):
    """slot = block * block_size + row, below 0 is skipped; PA_NZ cuts a token's heads * D numbers in chunks. value may have another D."""
    blocks, size, heads, slots = 3, 4, 2, [3, -1, 8, 0, 5]
    tensors = filled(rng, kind, 5, heads, 32), filled(rng, kind, 5, heads, 64)
    wanted, caches = [], []
    for tensor in tensors:
        flat = np.full((blocks * size, heads, tensor.shape[2]), 7.0)
        caches.append(torch.from_numpy(cache_of(flat, blocks, size, form, KINDS[kind])).to(tensor.dtype))
        for token, slot in enumerate(slots):
            if slot >= 0:
                flat[slot] = f64(tensor[token])
        wanted.append(cache_of(flat, blocks, size, form, KINDS[kind]))
    before, where = [cache.clone() for cache in caches], torch.tensor(slots, dtype=slot_type)
    given = {} if form == "PA_NZ" else {"cache_mode": form}  # the default is PA_NZ
    copies = npu.npu_scatter_pa_kv_cache_functional(*tensors, *caches, where, **given)
    assert all((cache == old).all() for cache, old in zip(caches, before))
    assert npu.npu_scatter_pa_kv_cache(*tensors, *caches, where, **given) is None
    for cache, copy, want in zip(caches, copies, wanted):
        assert (f64(cache) == want).all() and (copy == cache).all()
    older = [cache.clone() for cache in before]
    npu._npu_reshape_and_cache(*tensors, *older, where)  # sees the form by the shapes
    assert all((a == b).all() for a, b in zip(older, caches))
    npu._npu_reshape_and_cache_siso(tensors[0], before[0], where)
    assert (before[0] == caches[0]).all()


def test_3_1_scatter_refusals(rng):
    key, cache, slots = torch.zeros(2, 2, 16), torch.zeros(3, 4, 2, 16), torch.tensor([0, 1])
    for wrong in ([0, 12], [-1, 99]):
        with pytest.raises(ValueError, match="npu_scatter_pa_kv_cache: .*12 slots"):
            npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), torch.tensor(wrong), cache_mode="Norm")
    # All is checked before anything is written.
    small, nz, short = torch.zeros(2, 4, 2, 16), torch.zeros(3, 2, 4, 16).half(), torch.zeros(2, 2, 4, 16).half()
    for write, pair in ((npu._npu_reshape_and_cache, (cache, small)), (npu._npu_reshape_and_cache, (nz, short)),
                        (lambda *given: npu.npu_scatter_pa_kv_cache(*given, cache_mode="Norm"), (cache, small)),
                        (npu.npu_scatter_pa_kv_cache, (nz, short))):
        tokens = (key + 1).to(pair[0].dtype)
        with pytest.raises(ValueError):
            write(tokens, tokens, *pair, torch.tensor([0, 9]))
        assert all((x == 0).all() for x in pair)
    for name in ("compress_lens", "compress_seq_offsets", "seq_lens"):
        with pytest.raises(NotImplementedError, match=f"{name} is given, but which rows that form keeps is not stated"):
            npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm", **{name: slots})
    with pytest.raises(NotImplementedError, match="key has 4 dimensions"):
        npu.npu_scatter_pa_kv_cache(key[None], key[None], cache, cache.clone(), slots, cache_mode="Norm")
    with pytest.raises(ValueError, match="key is torch.float32, but value is torch.float16"):
        npu.npu_scatter_pa_kv_cache(key, key.half(), cache, cache.clone(), slots, cache_mode="Norm")
    with pytest.raises(ValueError, match='cache_mode is "NZ", must be PA_NZ or Norm'):
        npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="NZ")


def test_3_1_scatter_of_one_cache(rng):
    """npu_scatter_pa_cache is always of form Norm; it gives the cache back."""
    key, cache = filled(rng, "float16", 2, 2, 16), torch.zeros(3, 4, 2, 16, dtype=torch.float16)
    assert npu.npu_scatter_pa_cache(key, torch.tensor([5, -1]), key_cache=cache) is cache
    want = np.zeros((12, 2, 16))
    want[5] = f64(key[0])
    assert (f64(cache) == want.reshape(3, 4, 2, 16)).all()
    with pytest.raises(ValueError, match=r"key_cache is .*, must be \[blocks, block_size, 2, 16\]"):
        npu.npu_scatter_pa_cache(key, torch.tensor([5, 6]), key_cache=torch.zeros(3, 2, 4, 16, dtype=torch.float16))


@pytest.mark.parametrize("form", ["PA_NZ", "Norm"])
@pytest.mark.parametrize("kind", [*KINDS, "float32"])
def test_3_1_gather(rng, kind, form):
    """Batch after batch; lengths, or totals that begin with 0; blocks that do not exist give zeros; it stops when the output is full."""
    blocks, size, heads = 3, 4, 2
    chunk = KINDS.get(kind, 8)
    flats = [f64(filled(rng, kind, blocks * size, heads, width)) for width in (32, 64)]
    caches = [torch.from_numpy(cache_of(flat, blocks, size, form, chunk)).to(getattr(torch, kind)) for flat in flats]
    table, lengths = [[2, 0], [1, 7], [-1, 2]], [6, 5, 2]

    def rows(flat, offsets):
        found = []
        for b, length in enumerate(lengths):
            for t in range(length):
                column = t // size + offsets[b] // size
                block = table[b][column] if column < 2 else -1
                found.append(flat[block * size + t % size] if 0 <= block < blocks else np.zeros_like(flat[0]))
        return np.stack(found)

    for offsets, capacity in (([0, 0, 0], 13), ([5, 0, 3], 13), ([0, 0, 0], 9), ([0, 0, 0], 15)):
        outs = [torch.full((capacity, heads, flat.shape[2]), 7).to(getattr(torch, kind)) for flat in flats]
        more = {} if offsets == [0, 0, 0] else {"seq_offset": torch.tensor(offsets, dtype=torch.int32)}
        given = torch.tensor(table, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), *outs
        functional = npu.npu_gather_pa_kv_cache_functional(*caches, *given, **more)
        assert all((out == 7).all() for out in outs)
        assert npu.npu_gather_pa_kv_cache(*caches, *given, **more) is None
        for out, copy, flat in zip(outs, functional, flats):
            want = rows(flat, offsets)[:capacity]
            assert (f64(out[:len(want)]) == want).all() and (out[len(want):] == 7).all() and (copy == out).all()
        again = [torch.full_like(out, 7) for out in outs]
        npu.npu_gather_pa_kv_cache(*caches, given[0], torch.tensor([0, 6, 11, 13], dtype=torch.int32), *again, is_seq_lens_cumsum=True, **more)
        assert all((a == b).all() for a, b in zip(again, outs))
    for wrong, cumulative in (([6, 11, 13, 13], True), ([0, 6, 5, 13], True), ([6, -1, 2], False)):
        with pytest.raises(ValueError, match="seq_lens"):
            npu.npu_gather_pa_kv_cache(*caches, given[0], torch.tensor(wrong, dtype=torch.int32), *outs, is_seq_lens_cumsum=cumulative)


@pytest.mark.parametrize("heads, kv_heads, dim, value_dim", [(4, 2, 8, 8), (6, 1, 12, 4), (4, 4, 288, 96)])
def test_3_2_paged_attention(rng, heads, kv_heads, dim, value_dim):
    """One token of each sequence, context_lens keys each, no mask; out is written in place, of a D of its own."""
    pages = [rng.standard_normal((4, 4, kv_heads, width)).astype(np.float32) for width in (dim, value_dim)]
    q, table, lengths = rng.standard_normal((2, heads, dim)).astype(np.float32), np.array([[2, 0], [1, 3]]), [7, 5]
    out = torch.full((2, heads, value_dim), 9.0)
    assert npu._npu_paged_attention(torch.from_numpy(q), *map(torch.from_numpy, pages), kv_heads, heads, 0.2, torch.from_numpy(table).int(),
                                    torch.tensor(lengths, dtype=torch.int32), out) is None
    rows = [np.stack([page[ids].reshape(8, kv_heads, -1) for ids in table]).transpose(0, 2, 1, 3) for page in pages]
    near(out, attention(q[:, :, None], *rows, np.arange(8) < np.array(lengths)[:, None, None, None], 0.2)[:, :, 0])
    with pytest.raises(ValueError, match=f"_npu_paged_attention: query has {heads} heads, but num_heads is {heads + 1}"):
        npu._npu_paged_attention(torch.from_numpy(q), *map(torch.from_numpy, pages), kv_heads, heads + 1, 0.2, torch.from_numpy(table).int(),
                                 torch.tensor(lengths, dtype=torch.int32), out)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
def test_3_3_attention_update(rng, dtype, bound):
    """lse = m + log(sum exp(lse_i - m)), out = sum out_i exp(lse_i - lse); update_type 1 gives lse."""
    lses = rng.standard_normal((3, 6)).astype(np.float32) * 5
    outs = torch.from_numpy(rng.standard_normal((3, 6, 8)).astype(np.float32)).to(dtype)
    top = lses.max(0)
    lse = top + np.log(np.exp(f64(lses) - top).sum(0))
    want = (f64(outs) * np.exp(lses - lse)[..., None]).sum(0)
    for kind in (0, 1):
        out, given = npu.npu_attention_update([torch.from_numpy(x) for x in lses], list(outs), kind)
        assert out.dtype == dtype
        near(out, want, bound)
        if kind:
            near(given, lse)
    with pytest.raises(ValueError, match="update_type is 2, must be 0 or 1"):
        npu.npu_attention_update([torch.from_numpy(x) for x in lses], list(outs), 2)


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_3_3_ring_attention_update(rng, layout):
    """m = max, sum = ps e^(pm - m) + cs e^(cm - m), out weighted alike: the parts' results are those of all keys."""
    q, k, v = (rng.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (5, 9, 9))
    parts = [Attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 4), (4, 9))]
    top = np.maximum(parts[0].max, parts[1].max)
    sums = [part.sum * np.exp(part.max - top) for part in parts]
    want = sum(part.out * s[..., None] for part, s in zip(parts, sums)) / sum(sums)[..., None]
    if layout == "SBH":
        shape, rows = (lambda x: to_layout(x, "SBH")), (lambda x: np.repeat(x[..., None], 8, -1))
        more = {}
    else:
        shape, rows = (lambda x: np.concatenate(list(x.transpose(0, 2, 1, 3)))), (lambda x: np.repeat(np.concatenate(list(x.transpose(0, 2, 1)))[..., None], 8, -1))
        more = dict(input_layout="TND", input_softmax_layout="TND", actual_seq_qlen=torch.tensor([5, 10]))
    given = [torch.from_numpy(x.astype(np.float32)) for part in parts for x in (shape(part.out), rows(part.max), rows(part.sum))]
    out, largest, total = npu.npu_ring_attention_update(*given, **more)
    near(out, shape(want))
    near(largest, rows(top))
    near(total, rows(sum(sums)), 4e-6)
    near(out, shape(attention(q, k, v)))
    halves = [x.half() if i % 3 == 0 else x for i, x in enumerate(given)]
    assert npu.npu_ring_attention_update(*halves, **more)[0].dtype == torch.float16
    with pytest.raises(ValueError, match='input_layout is "BSH", must be SBH or TND'):
        npu.npu_ring_attention_update(*given, input_layout="BSH")

"""sparse_flash_attention of torch tensors: values and gradients against the equation, compilers and transforms; caches of
eight bits through torch's operator."""

import numpy as np
import pytest
from conftest import import_torch
from test_sparse_attention import draw_lists
from test_torch_door import Dispatched

torch = import_torch()

from ops_transformer.flash_attention import sparse_flash_attention  # noqa: E402
from ops_transformer.kv_cache import new_pages, paged_attention  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def lists_of(batch, queries, kv_heads, count, blocks):
    rng = np.random.default_rng(5)
    return torch.from_numpy(np.stack([draw_lists(rng, queries, kv_heads, count, blocks) for _ in range(batch)]))


def seen_by(lists, block, keys, group, causal):
    """The lists as a mask [batch, heads, queries, keys]."""
    batch, queries, kv_heads, _ = lists.shape
    seen = torch.zeros(batch, kv_heads, queries, -(-keys // block) * block, dtype=torch.bool)
    for b, i, h in np.ndindex(batch, queries, kv_heads):
        for x in lists[b, i, h].tolist():
            if x >= 0:
                seen[b, h, i, x * block:(x + 1) * block] = True
    seen = seen[..., :keys].repeat_interleave(group, 1)
    return seen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else seen


def reference(q, k, v, seen, sinks):
    """(out, lse) with a sink for each head."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -np.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("block, causal", [(1, True), (4, True), (4, False)])
def test_gradients(block, causal):
    q, k, v, q_rope, k_rope, sinks = inputs = leaves((2, 4, 5, 6), (2, 2, 14, 6), (2, 2, 14, 3), (2, 4, 5, 4), (2, 2, 14, 4), (4,))
    lists = lists_of(2, 5, 2, 6, -(-14 // block))
    got = sparse_flash_attention(q, k, v, lists, sparse_block_size=block, causal=causal, query_rope=q_rope, key_rope=k_rope,
                                 sinks=sinks, return_lse=True)
    want = reference(torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1), v, seen_by(lists, block, 14, 2, causal), sinks)
    weights = [torch.randn_like(x) for x in want]
    for x, y in zip(got, want):
        assert torch.allclose(x, y, atol=1e-12)
    grads = [torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, xs)), inputs) for xs in (got, want)]
    for x, y in zip(*grads):
        assert torch.allclose(x, y, atol=1e-12)


def test_values_that_are_columns_of_the_keys():
    """A latent cache: its gradient is that of the keys and of the values."""
    q, cache = leaves((3, 2, 8), (11, 1, 8))
    lists = lists_of(1, 3, 1, 5, 11)[0]
    options = dict(cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 11])
    out = sparse_flash_attention(q, cache, cache[..., :5], lists, **options)
    apart = sparse_flash_attention(q, cache, cache[..., :5].clone(), lists, **options)
    weights = torch.randn_like(out)
    for x, y in zip(torch.autograd.grad((weights * out).sum(), (q, cache)), torch.autograd.grad((weights * apart).sum(), (q, cache))):
        assert torch.equal(x, y)


def test_transforms_and_compilers():
    q, k = leaves((1, 2, 3, 4), (1, 1, 9, 4))
    lists = lists_of(1, 3, 1, 4, 9)

    def total(x, y):
        return sparse_flash_attention(x, y, y, lists).square().sum()

    want = torch.autograd.grad(total(q, k), (q, k))
    for x, y in zip(torch.func.grad(total, (0, 1))(q.detach(), k.detach()), want):
        assert torch.allclose(x, y)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(q, k), (q, k)), want):
        assert torch.allclose(x, y)


def test_lists_have_no_gradients_and_bad_ones_are_refused():
    q, k = leaves((1, 2, 1, 4), (1, 1, 5, 4))
    lists = torch.tensor([[[[0, 4]]]], dtype=torch.int32)
    sparse_flash_attention(q, k, k, lists)
    with pytest.raises(ValueError, match=r"^sparse_flash_attention: .*\[1\] is 5, but sequence 0 has 5 blocks"):
        sparse_flash_attention(q, k, k, lists + 1)
    with pytest.raises(RuntimeError, match="sparse_indices.* requires gradients"):
        sparse_flash_attention(q, k, k, lists.double().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_float8_goes_through_the_operator(dtype):
    """A mode asks for torch's operator; float8 has no DLPack of its own everywhere."""
    keys, values = (torch.randn(3, 8, 1, 16).to(dtype) for _ in range(2))
    query = torch.randn(1, 2, 3, 16)
    table, lengths = torch.tensor([[2, 0]]), torch.tensor([13])
    want = paged_attention(query, keys, values, table, lengths)
    with Dispatched():
        assert torch.equal(paged_attention(query, keys, values, table, lengths), want)
    with torch.no_grad():
        assert torch.equal(paged_attention(query.clone().requires_grad_(), keys, values, table, lengths), want)
    name = str(dtype).replace("torch.", "")
    with pytest.raises(RuntimeError, match=f"^paged_attention: key_cache requires gradients, but key_cache is {name}, and"):
        paged_attention(query, keys.clone().requires_grad_(), values, table, lengths)


@pytest.mark.parametrize("layout, dtype, kind", [("norm", "int8", "ScaledPages of int8"), ("norm", "int4_offset", "ScaledPages of uint8"),
                                                 ("norm", "f8_e4m3", "float8_e4m3fn"), ("panel32", "int8", "ScaledPages of int8"),
                                                 ("panel32", "f32", "pages of layout panel32")])
def test_gradients_beside_pages_that_have_none_are_refused_in_the_call(layout, dtype, kind):
    pages = new_pages(2, 32, 1, 32, dtype=dtype, layout=layout, like=torch.ones(1))
    table, lengths, lists = torch.tensor([[1, 0]]), torch.tensor([40]), torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    query, sinks = torch.randn(1, 2, 1, 32), torch.randn(2)

    def paged(**more):
        return paged_attention(**{**dict(query=query, key_cache=pages[0], value_cache=pages[1], block_table=table, kv_lengths=lengths,
                                         layout=layout), **more})

    def sparse(**more):
        return sparse_flash_attention(**{**dict(query=query, key=pages[0], value=pages[1], sparse_indices=lists, block_table=table,
                                                kv_lengths=lengths, layout=layout, sparse_block_size=32), **more})

    for call, cache in ((paged, "key_cache"), (sparse, "key")):
        for name, tensor in (("query", query), ("sinks", sinks)):
            needing = {name: tensor.clone().requires_grad_()}
            with pytest.raises(RuntimeError, match=rf"^\w+: {name} requires gradients, but {cache} is {kind}, and .*: pass {name}.detach\(\)"):
                call(**needing)
            with torch.no_grad():
                assert torch.equal(call(**needing), call(**{name: tensor}))
        with Dispatched():
            seen = call()
        assert torch.equal(seen, call())


def test_a_bias_beside_lists_has_no_gradient():
    keys, values, query = torch.randn(2, 8, 1, 16), torch.randn(2, 8, 1, 16), torch.randn(1, 2, 1, 16, requires_grad=True)
    given = dict(sparse_indices=torch.tensor([[[[3, 0, 9]]]], dtype=torch.int32))
    bias = torch.randn(1, 2, 1, 12)
    paged_attention(query, keys, values, [[1, 0]], [12], bias=bias, **given).sum().backward()
    assert query.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="^paged_attention: bias requires gradients, but beside sparse_indices bias has none"):
        paged_attention(query, keys, values, [[1, 0]], [12], bias=bias.requires_grad_(), **given)

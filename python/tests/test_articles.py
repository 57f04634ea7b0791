"""ops_transformer.articles: the names of the articles' samples, their numbers, modules that load and train."""

import types

import pytest
from conftest import import_torch

torch = import_torch()

from ops_transformer.articles import (FlashAttentionLLM, FlashCrossAttention, find_optimal_block_size,  # noqa: E402
                                      gather_paged_kv_cache, select_tile_size)
from ops_transformer.flash_attention import flash_attention_score  # noqa: E402

KIB = 1024


@pytest.mark.parametrize("sram, block", [(16 * 128 * 256, 256), (16 * 128 * 256 - 1, 128), (16 * 128 * 64, 64), (16 * 128 * 32, 32), (1, 32)])
def test_block_size(sram, block):
    assert find_optimal_block_size(seq_len=4096, head_dim=128, sram_size=sram) == block


def test_tiles_of_the_table():
    """The bytes that the articles give for head_dim 128: each fits exactly, and one byte less takes the next smaller tile."""
    table = [(327680, (256, 256)), (196608, (256, 128)), (131072, (128, 128)), (81920, (128, 64)), (57344, (64, 64)), (36864, (64, 32)), (0, (32, 32))]
    for (needed, tile), (_, smaller) in zip(table, table[1:]):
        assert select_tile_size(4096, 128, needed, 1) == tile and select_tile_size(4096, 128, needed - 1, 1) == smaller
        assert select_tile_size(4096, 128, 8 * needed, 8) == tile and select_tile_size(4096, 128, 8 * needed - 1, 8) == smaller
    # 128 x 128 needs 128 KiB; an article's text says that 96 KiB do.
    assert select_tile_size(4096, 128, 96 * KIB, 1) == (128, 64)


def test_gather():
    keys, values = torch.randn(6, 4, 3, 8), torch.randn(6, 4, 3, 8)
    table = torch.tensor([5, 0, 2], dtype=torch.int32)
    key, value = gather_paged_kv_cache(keys, values, table, 10, torch.tensor([2, 0]))
    for got, pages in ((key, keys), (value, values)):
        assert torch.equal(got, pages[table.long()].flatten(0, 1)[:10][:, [2, 0]])
    assert torch.equal(gather_paged_kv_cache(keys, values, [5, 0, 2], 12, None)[0], keys[[5, 0, 2]].flatten(0, 1))
    with pytest.raises(ValueError, match=r"gather_paged_kv_cache: block_tables has shape \[2, 3\], must be \[blocks\]"):
        gather_paged_kv_cache(keys, values, torch.zeros(2, 3, dtype=torch.int32), 4, None)
    with pytest.raises(ValueError, match="gather_paged_kv_cache: sequence 0 reads positions 0 to 12, but block_table has 3 blocks of 4 rows"):
        gather_paged_kv_cache(keys, values, table, 13, None)


def plain(q, k, v, causal):
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2)


@pytest.mark.parametrize("config", [{"hidden_size": 32, "num_heads": 4}, types.SimpleNamespace(hidden_size=32, num_attention_heads=4)])
def test_language_model_module(seeded, config):
    module = FlashAttentionLLM(config).double()
    assert set(module.state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
    other = FlashAttentionLLM(config).double()
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = module.qkv(x).view(2, 7, 3, 4, 8).unbind(2)
    want = module.out(plain(q, k, v, True))
    wanted = torch.autograd.grad(want.square().sum(), [x, *module.parameters()])
    for use_flash in (True, False):
        got = other(x, use_flash=use_flash)
        assert torch.allclose(got, want, atol=1e-12)
        for a, b in zip(torch.autograd.grad(got.square().sum(), [x, *other.parameters()]), wanted):
            assert torch.allclose(a, b, atol=1e-10)


def test_cross_attention_module(seeded):
    module = FlashCrossAttention(query_dim=24, context_dim=10, num_heads=3).double()
    assert {name: list(p.shape) for name, p in module.named_parameters() if name.endswith("weight")} == {
        "to_q.weight": [24, 24], "to_kv.weight": [48, 10], "to_out.weight": [24, 24]}
    x, context = torch.randn(2, 5, 24, dtype=torch.float64), torch.randn(2, 9, 10, dtype=torch.float64)
    k, v = module.to_kv(context).view(2, -1, 2, 3, 8).unbind(2)
    want = module.to_out(plain(module.to_q(x).view(2, 5, 3, 8), k, v, False))
    got = module(x, context)
    assert torch.allclose(got, want, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), list(module.parameters())) for out in (got, want))):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("call, message", [
    (lambda: find_optimal_block_size(1, 0, 1), "find_optimal_block_size: head_dim is 0, must be at least 1"),
    (lambda: select_tile_size(1, 1, 1, -1), "select_tile_size: num_heads is -1, must be at least 1"),
    (lambda: FlashAttentionLLM({"hidden_size": 10, "num_heads": 3}), "FlashAttentionLLM: hidden_size is 10, which is not num_heads = 3"),
    (lambda: FlashAttentionLLM({"hidden_size": 10}), "FlashAttentionLLM: config has no num_heads or num_attention_heads"),
    (lambda: FlashCrossAttention(10, 4, 3), "FlashCrossAttention: query_dim is 10, which is not num_heads = 3"),
])
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_layout_that_contradicts_the_shapes_names_the_one_that_fits():
    """An article passes [batch, heads, length, head_dim] as BSND."""
    q = torch.randn(2, 4, 100, 16)
    with pytest.raises(ValueError, match="flash_attention_score: attn_head_num is 4, but query has 100 in input_layout BSND; "
                                         "these shapes fit input_layout BNSD"):
        flash_attention_score(q, q, q, attn_head_num=4, input_layout="BSND")

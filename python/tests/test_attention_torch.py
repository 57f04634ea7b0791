"""Gradients of flash_attention, flash_attention_score, paged_attention and merge_attention as torch sees them."""

import math

import numpy as np
import pytest
from block_masks import drawn
from conftest import between_elements

from ops_transformer import kv_cache
from ops_transformer.flash_attention import (dropout_mask, flash_attention, flash_attention_grad, flash_attention_score,
                                             merge_attention, pack_drop_mask)
from ops_transformer.kv_cache import paged_attention


@pytest.fixture(autouse=True)
def _seeded(request):
    if "torch" in request.fixturenames:
        request.getfixturevalue("torch").manual_seed(0)


def leaves(torch, *shapes, dtype=None):
    return [torch.randn(shape, dtype=dtype or torch.float64, requires_grad=True) for shape in shapes]


def reference(torch, q, k, v, *, alignment="top_left", causal=False, left=None, right=None, mask=None, bias=None, slopes=None,
              form="linear", starts=(0, 0), softcap=0.0, sinks=None, scale=None, prefix=None, lengths=None, keep=None,
              keep_prob=1.0, bias_scale=1.0):
    """The equation of attention in torch's operators, [batch, heads, length, D]. (out, lse)"""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    queries, keys = q.shape[2], k.shape[2]
    batch = q.shape[0]
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    off = keys - queries if alignment == "bottom_right" else 0
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - off
    if slopes is not None:
        far = (distance + starts[1] - starts[0]).abs().to(scores.dtype)
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * (far if form == "linear" else far.sqrt())
    if bias is not None:
        scores = scores + bias_scale * bias
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if prefix is not None:
        seen |= (torch.arange(keys)[None] < torch.as_tensor(prefix)[:, None])[:, None, None]
    if lengths is not None:
        seen &= (torch.arange(keys)[None] < torch.as_tensor(lengths)[:, None])[:, None, None]
    if mask is not None:
        seen = seen & mask
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(batch, -1, queries, 1)], -1)
    lse = scores.logsumexp(-1)
    weights = torch.where(scores == -math.inf, 0, (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp())
    weights = weights[..., :keys]
    if keep is not None:
        weights = weights * torch.as_tensor(keep) / keep_prob
    return weights @ v, lse


def check(torch, ours, theirs, inputs, atol=1e-10):
    """Values and gradients of two functions of the inputs, weighted alike."""
    results, wanted = ours(*inputs), theirs(*inputs)
    weights = [torch.randn_like(w) for w in wanted]
    for got, want in zip(results, wanted):
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=atol)
    grads = torch.autograd.grad(sum((r * w).sum() for r, w in zip(results, weights)), inputs)
    expected = torch.autograd.grad(sum((r * w).sum() for r, w in zip(wanted, weights)), inputs)
    for got, want in zip(grads, expected):
        assert torch.allclose(got, want, atol=atol), (got - want).abs().max()


# Options of flash_attention, and the same for the reference.
FAMILIES = {
    "plain": ({}, {}),
    "causal_top_left": (dict(causal=True), dict(causal=True)),
    "causal_bottom_right": (dict(causal=True, alignment="bottom_right"), dict(causal=True, alignment="bottom_right")),
    "window": (dict(window_left=3, window_right=1), dict(left=3, right=1)),
    "window_bottom_right": (dict(window_left=2, window_right=0, alignment="bottom_right"),
                            dict(left=2, right=0, alignment="bottom_right")),
    "negative_band": (dict(window_left=-1, window_right=4), dict(left=-1, right=4)),
    "softcap": (dict(softcap=1.5), dict(softcap=1.5)),
    "scale": (dict(softmax_scale=0.7), dict(scale=0.7)),
    "prefix": (dict(causal=True, prefix=[2, 5]), dict(causal=True, prefix=[2, 5])),
    "lengths": (dict(kv_lengths=[7, 4]), dict(lengths=[7, 4])),
    "tiles": (dict(block_q=4, block_kv=32, path="flash", causal=True), dict(causal=True)),
    "standard": (dict(path="standard", causal=True), dict(causal=True)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_each_option(torch, family):
    ours, theirs = FAMILIES[family]
    inputs = leaves(torch, (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    check(torch, lambda *x: flash_attention(*x, return_lse=True, **ours), lambda *x: reference(torch, *x, **theirs), inputs)
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, return_lse=True, **ours), inputs)


@pytest.mark.parametrize("form", ["linear", "square_root"])
def test_alibi(torch, form):
    inputs = leaves(torch, (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    for slopes in (torch.rand(4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)):
        for alignment in ("top_left", "bottom_right"):
            check(torch, lambda *x: flash_attention(*x, return_lse=True, alibi_slopes=slopes, alibi_form=form,
                                                    alibi_query_start=3, alibi_key_start=1, alignment=alignment),
                  lambda *x: reference(torch, *x, slopes=slopes, form=form, starts=(3, 1), alignment=alignment), inputs)
    slopes.requires_grad_()
    with pytest.raises(RuntimeError, match=r"flash_attention: alibi_slopes requires gradients.*alibi_slopes.detach\(\)"):
        flash_attention(*inputs, alibi_slopes=slopes)
    with torch.no_grad():
        flash_attention(*inputs, alibi_slopes=slopes)


@pytest.mark.parametrize("shape", [(5, 7), (4, 1, 7), (2, 1, 5, 7)])
def test_bias_mask_and_sinks_have_gradients(torch, shape):
    inputs = leaves(torch, (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3), shape, (4,))
    mask = torch.rand(2, 1, 5, 7) < 0.7

    def ours(q, k, v, bias, sinks):
        return flash_attention(q, k, v, return_lse=True, bias=bias, sinks=sinks, mask=mask, bias_scale=0.5)

    check(torch, ours, lambda q, k, v, b, s: reference(torch, q, k, v, bias=b, sinks=s, mask=mask, bias_scale=0.5), inputs)
    assert torch.autograd.gradcheck(ours, inputs)


@pytest.mark.parametrize("seed", [5, 2**64 - 1])
def test_dropout_by_seed_and_by_bits(torch, seed):
    inputs = leaves(torch, (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    keep = dropout_mask(2, 4, 5, 7, 0.6, seed=seed, offset=3)
    theirs = lambda *x: reference(torch, *x, keep=keep, keep_prob=0.6)  # noqa: E731
    check(torch, lambda *x: flash_attention(*x, return_lse=True, keep_prob=0.6, seed=seed, offset=3), theirs, inputs)
    bits = pack_drop_mask(keep)
    for drop_mask in (bits, torch.from_numpy(bits)):
        check(torch, lambda *x: flash_attention(*x, return_lse=True, keep_prob=0.6, drop_mask=drop_mask), theirs, inputs)


def test_a_part_of_a_larger_problem_drops_what_the_whole_drops():
    whole = dropout_mask(2, 6, 9, 21, 0.5, seed=7)
    part = dropout_mask(2, 2, 4, 10, 0.5, seed=7, first_query=3, first_key=6, first_head=1, total_heads=6)
    assert (part == whole[:, 1:3, 3:7, 6:16]).all() and 0.4 < whole.mean() < 0.6
    x = np.zeros((2, 2, 4, 1))
    out = flash_attention(x, np.zeros((2, 2, 10, 1)), np.broadcast_to(2.0 ** np.arange(10)[:, None], (2, 2, 10, 1)),
                          keep_prob=0.5, seed=7, first_query=3, first_key=6, first_head=1, total_heads=6)
    assert np.allclose(out[..., 0] * 10 * 0.5, (part * 2.0 ** np.arange(10)).sum(-1), rtol=1e-14)


@pytest.mark.parametrize("seed", range(16))
def test_options_at_once(torch, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    chance = lambda: rng.random() < 0.5  # noqa: E731
    kv_heads, group, queries, keys = rng.integers(1, 3), rng.integers(1, 3), rng.integers(1, 7), rng.integers(1, 9)
    heads = int(kv_heads * group)
    inputs = leaves(torch, (2, heads, queries, 4), (2, kv_heads, keys, 4), (2, kv_heads, keys, 3))
    ours, theirs = {}, {}

    def option(name, value, other=None):
        ours[name] = theirs[other or name] = value

    option("alignment", ["top_left", "bottom_right"][rng.integers(2)])
    option("causal", bool(chance()))
    for name, other in (("window_left", "left"), ("window_right", "right")):
        if chance():
            option(name, int(rng.integers(-1, 5)), other)
    for name, value, other in (
            ("softcap", 1.5, None), ("softmax_scale", 0.8, "scale"), ("prefix", rng.integers(0, keys + 1, 2).tolist(), None),
            ("mask", torch.rand(2, 1, queries, keys) < 0.7, None), ("alibi_slopes", torch.rand(heads, dtype=torch.float64), "slopes"),
            ("keep_prob", 0.6, None)):
        if chance():
            option(name, value, other)
    if "prefix" not in ours and chance():
        option("kv_lengths", rng.integers(0, keys + 1, 2).tolist(), "lengths")
        if ours["alignment"] == "bottom_right":
            option("alignment", "top_left")  # lengths move the corner, of which the reference knows nothing
    if "keep_prob" in ours:
        ours.update(seed=seed, offset=2)
        theirs["keep"] = dropout_mask(2, heads, queries, keys, 0.6, seed=seed, offset=2)
    if chance():
        ours["block_mask"], seen = drawn(rng, 2, int(rng.choice([1, heads])), queries, keys, 2, 3)
        theirs["mask"] = torch.from_numpy(seen) & theirs.get("mask", torch.tensor(True))
    names = [name for name, shape in (("bias", (heads, queries, keys)), ("sinks", (heads,))) if chance()]
    inputs += leaves(torch, *({"bias": (heads, queries, keys), "sinks": (heads,)}[name] for name in names))

    def values(function, options):
        def call(q, k, v, *more):
            out, lse = function(q, k, v, **options, **dict(zip(names, more)))
            seen = lse.detach() > -math.inf
            return out, torch.where(seen, lse, 0)

        return call

    check(torch, values(lambda *x, **o: flash_attention(*x, return_lse=True, **o), ours),
          values(lambda *x, **o: reference(torch, *x, **o), theirs), inputs)


def score_reference(torch, q, k, v, layout, **options):
    """flash_attention_score's (out, lse) by the reference."""
    if layout == "SBH":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if layout in ("BSH", "SBH"):
        q, k, v = q.unflatten(2, (4, -1)), k.unflatten(2, (2, -1)), v.unflatten(2, (2, -1))
    if layout != "BNSD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = reference(torch, q, k, v, **options)
    if layout != "BNSD":
        out = out.transpose(1, 2)
    if layout in ("BSH", "SBH"):
        out = out.flatten(2)
    return (out.transpose(0, 1) if layout == "SBH" else out), lse


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_score_in_every_layout(torch, layout):
    shapes = {"BNSD": ((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3)), "BSND": ((2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 3)),
              "BSH": ((2, 5, 24), (2, 7, 12), (2, 7, 6)), "SBH": ((5, 2, 24), (7, 2, 12), (7, 2, 6))}[layout]
    inputs = leaves(torch, *shapes)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    options = dict(attn_head_num=4, kv_head_num=2, input_layout=layout, pre_tokens=3, next_tokens=1, padding_mask=padding)

    def ours(*x):
        out, largest, total = flash_attention_score(*x, **options)
        assert not largest.requires_grad
        return out, largest + total.log()

    theirs = lambda *x: score_reference(torch, *x, layout, left=3, right=1, mask=~padding[:, None, None])  # noqa: E731
    check(torch, ours, theirs, inputs)
    out, largest, total = flash_attention_score(*inputs, **options)
    assert out.is_contiguous()
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, inputs, grad_out)
    with torch.no_grad():
        got = flash_attention_grad(*inputs, grad_out, largest, total, out, **options)
        again = flash_attention_grad(*inputs, grad_out, attention_out=out, softmax_lse=largest + total.log(), wanted=("value",),
                                     **options)
    assert all(torch.allclose(g, w) for g, w in zip((*got, *again), (*want, want[2])))


def test_score_of_sequences_one_after_the_other(torch):
    inputs = leaves(torch, (9, 4, 6), (12, 2, 6), (12, 2, 3))
    ends_q, ends_k = [4, 4, 9], [3, 5, 12]
    for alignment in ("top_left", "bottom_right"):

        def ours(*x):
            return flash_attention_score(*x, input_layout="TND", actual_seq_qlen=ends_q, actual_seq_kvlen=ends_k, next_tokens=0,
                                         pre_tokens=4, alignment=alignment, alibi_slopes=np.arange(1, 5) / 8)[:1]

        def theirs(q, k, v):
            parts = []
            for a, b, c, d in zip([0] + ends_q, ends_q, [0] + ends_k, ends_k):
                part = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
                parts.append(reference(torch, *part, left=4, right=0, alignment=alignment,
                                       slopes=torch.arange(1, 5).double() / 8)[0][0].transpose(0, 1))
            return (torch.cat(parts),)

        check(torch, ours, theirs, inputs)
    cu_q, cu_k = ([0] + ends for ends in (ends_q, ends_k))
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                                                               return_lse=True), inputs)


# ---- pages -----------------------------------------------------------------------------------------------------------


def gathered(torch, cache, table, length):
    """[1, heads, length, D] of one sequence."""
    return torch.cat([cache[block] for block in table])[:length].transpose(0, 1)[None]


@pytest.mark.parametrize("options", [
    {}, dict(causal=False), dict(window_left=4), dict(window_left=4, window_right=1, causal=False), dict(softcap=2.0),
    dict(alignment="top_left"), dict(prefix=[3, 2])], ids=str)
def test_paged_attention_and_its_gradients(torch, options):
    query, keys, values, sinks = leaves(torch, (2, 4, 3, 6), (5, 4, 2, 6), (5, 4, 2, 3), (4,))
    table, lengths = [[2, 0, 3], [2, 4, 0]], [9, 6]  # block 2 is shared

    def ours(query, keys, values, sinks):
        return tuple(paged_attention(query, keys, values, table, lengths, sinks=sinks, return_lse=True, **options)[:2])

    def theirs(query, keys, values, sinks):
        parts = []
        for b in range(2):
            own = {"alignment": "bottom_right", "causal": True, **options}
            for name, other in (("window_left", "left"), ("window_right", "right")):
                if name in own:
                    own[other] = own.pop(name)
            if "prefix" in own:
                own["prefix"] = [options["prefix"][b]]
            parts.append(reference(torch, query[b : b + 1], gathered(torch, keys, table[b], lengths[b]),
                                   gathered(torch, values, table[b], lengths[b]), sinks=sinks, **own))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    check(torch, ours, theirs, [query, keys, values, sinks])
    assert torch.autograd.gradcheck(ours, [query, keys, values, sinks])


def test_paged_mask_bias_alibi_dropout_statistics_and_out(torch):
    query, keys, values, bias = leaves(torch, (1, 4, 3, 6), (5, 4, 2, 6), (5, 4, 2, 3), (4, 3, 9))
    mask, slopes = torch.rand(3, 9) < 0.8, torch.rand(4, dtype=torch.float64)
    options = dict(mask=mask, alibi_slopes=slopes, keep_prob=0.7, seed=4, bias_scale=2.0)
    keep = dropout_mask(1, 4, 3, 9, 0.7, seed=4)
    dense = lambda k: gathered(torch, k, [2, 0, 3], 9)  # noqa: E731
    theirs = lambda q, k, v, b: reference(torch, q, dense(k), dense(v), mask=mask, bias=b, slopes=slopes, keep=keep,  # noqa: E731
                                          keep_prob=0.7, bias_scale=2.0, causal=True, alignment="bottom_right")
    ours = lambda q, k, v, b: tuple(paged_attention(q, k, v, [[2, 0, 3]], [9], return_lse=True, bias=b, **options)[:2])  # noqa: E731
    check(torch, ours, theirs, [query, keys, values, bias])
    with torch.no_grad():
        plain = paged_attention(query, keys, values, [[2, 0, 3]], [9], bias=bias, return_statistics=True, **options)
        assert torch.allclose(plain.softmax_max + plain.softmax_sum.log(), plain.softmax_lse)
        assert plain.softmax_lse.dtype == torch.float64
        out = torch.empty_like(plain.out)
        version = out._version
        assert paged_attention(query, keys, values, [[2, 0, 3]], [9], bias=bias, out=out, **options) is out
        assert torch.equal(out, plain.out) and out._version > version
    with pytest.raises(RuntimeError, match="paged_attention: out is given, but an argument needs more"):
        paged_attention(query, keys, values, [[2, 0, 3]], [9], out=torch.empty_like(out))


def test_paged_lse_of_float64(rng):
    keys, values = (rng.standard_normal((2, 4, 1, 8)) for _ in "kv")
    query = rng.standard_normal((1, 1, 2, 8))
    got = paged_attention(query, keys, values, [[1, 0]], [7], return_lse=True)
    scores = query[0, 0] @ np.concatenate([keys[1, :, 0], keys[0, :3, 0]]).T / np.sqrt(8)
    scores[0, 6] = -np.inf
    assert got.softmax_lse.dtype == np.float64
    assert np.allclose(got.softmax_lse[0, 0], np.log(np.exp(scores).sum(-1)), rtol=0, atol=1e-13)


def test_prompts_and_decoded_tokens_in_one_call_have_gradients(torch):
    query, keys, values = leaves(torch, (4, 2, 6), (5, 4, 2, 6), (5, 4, 2, 3))

    def ours(query, keys, values):
        return paged_attention(query, keys, values, [[2, 0, 3], [2, 4, 0]], [9, 6], actual_seq_qlen=[3, 4])

    assert torch.autograd.gradcheck(ours, [query, keys, values])


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lse", "max_sum"])
def test_merged_parts_train_as_the_whole(torch, form):
    inputs = leaves(torch, (2, 4, 5, 6), (2, 2, 9, 6), (2, 2, 9, 3))
    cuts = [(0, 4), (4, 5), (5, 9)]

    def ours(q, k, v):
        if form == "lse":
            parts = [flash_attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in cuts]
            merged = merge_attention(*(torch.stack(x) for x in zip(*parts)))
            return merged.attention_out, merged.softmax_lse
        parts = [flash_attention_score(q, k[:, :, a:b], v[:, :, a:b], input_layout="BNSD") for a, b in cuts]
        out, largest, total = (torch.stack(x) for x in zip(*parts))
        merged = merge_attention(out, softmax_max=largest, softmax_sum=total)
        return merged.attention_out, merged.softmax_max + merged.softmax_sum.log()

    check(torch, ours, lambda *x: reference(torch, *x), inputs)
    assert torch.autograd.gradcheck(ours, inputs)


def test_merge_of_torch_parts_is_the_same_with_and_without_gradients(torch):
    out = torch.randn(3, 5, 4).bfloat16()
    lse = torch.randn(3, 5)
    out[1, 2], lse[1, 2] = math.nan, -math.inf
    out[0, 3], lse[0, 3] = math.nan, math.inf
    lse[:, 4] = -math.inf
    plain = merge_attention(out, lse, dtype="f32")
    with_gradients = merge_attention(out.requires_grad_(), lse.requires_grad_(), dtype="f32")
    for a, b in zip(plain[:2], with_gradients[:2]):
        assert torch.allclose(a, b, atol=1e-6)
    grads = torch.autograd.grad(with_gradients.attention_out.sum() + with_gradients.softmax_lse[:4].sum(), [out, lse])
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("shape, kind, options", [
    ((2, 3, 4), "float32", {"dtype": "f64"}), ((2, 3, 4), "float64", {"dtype": "f32"}), ((0, 3, 4), "float32", {}),
    ((4,), "float32", {}), ((2, 1, 1, 1, 3, 4), "float32", {}), ((4097, 1, 2), "float32", {})])
def test_merge_refuses_with_gradients_what_it_refuses_without(torch, shape, kind, options):
    parts, lse = (torch.ones(size, dtype=getattr(torch, kind)) for size in (shape, shape[:-1]))
    for out in (parts, parts.clone().requires_grad_()):
        with pytest.raises(ValueError, match="^merge_attention: "):
            merge_attention(out, lse, **options)


def test_tensors_between_elements_are_refused_by_name(torch):
    for gradients in (False, True):
        q = torch.randn(1, 2, 4, 8).requires_grad_(gradients)
        bad, address = between_elements(q.detach()), "cannot be taken: the array lies at an address"
        for call, name in ((lambda: flash_attention(bad, q, q), "q"), (lambda: flash_attention(q, bad, q), "k"),
                           (lambda: flash_attention(q, q, bad.numpy()), "v"),
                           (lambda: flash_attention(q, q, q, bias=between_elements(torch.ones(4, 4))), "bias"),
                           (lambda: flash_attention(q, q, q, kv_lengths=between_elements(torch.tensor([3]))), "kv_lengths")):
            with pytest.raises(ValueError, match=f"^flash_attention: {name} {address}"):
                call()
    (got,), (want,) = (torch.autograd.grad(flash_attention(q, q, q), q, weight) for weight in (bad, bad.clone()))
    assert torch.equal(got, want)

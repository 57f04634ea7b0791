"""ops_transformer.flash_attn: flash_attn_with_kvcache and block tables, against a model in float64."""

import random

import pytest
from conftest import import_torch

torch = import_torch()

from flash_attn_model import Rule, attention, close, rotated, slopes_of  # noqa: E402
from ops_transformer.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Case:
    """One call, drawn from a seed: its arguments, and what each sequence holds."""

    def __init__(self, seed):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kv_heads = draw.choice((1, 2, 3))
        self.heads = self.kv_heads * draw.choice((1, 2, 4))
        self.dim = draw.choice((16, 32, 64, 80, 128))
        self.batch = draw.choice((1, 2, 3))
        self.queries = draw.choice((1, 1, 2, 5, 17))
        self.added = draw.choice((None, 1, self.queries, 9))
        self.dtype = draw.choice(DTYPES if self.added is None else DTYPES[:3])
        self.paged = draw.random() < 0.4
        slopes = draw.choice((None, None, torch.rand(self.heads), torch.rand(self.batch, self.heads)))
        window = (-1, -1) if draw.random() < 0.5 else (draw.choice((-1, 0, 5, 20)), draw.choice((-1, 0, 3)))
        self.rule = Rule(draw.random() < 0.5, window, draw.choice((None, 0.2)), draw.choice((0.0, 15.0)), slopes)
        page, pages = draw.choice(((16, 3), (32, 2), (5, 9)))
        self.capacity = page * pages
        if self.paged:
            shape = (self.batch * pages + 3, page)
            order = torch.randperm(shape[0])[:self.batch * pages].view(self.batch, pages)
            self.where = {"block_table": order.to(torch.int32)}
            # Place p of sequence b is row p % page of its page p / page.
            self.rows = [[(int(order[b, p // page]), p % page) for p in range(self.capacity)] for b in range(self.batch)]
        else:
            shape = (self.batch + 2, self.capacity)
            chosen = list(range(self.batch))
            self.where = {}
            if draw.random() < 0.5:
                chosen = random.Random(seed + 1).sample(range(shape[0]), self.batch)
                self.where = {"cache_batch_idx": torch.tensor(chosen, dtype=torch.int32)}
            self.rows = [[(chosen[b], p) for p in range(self.capacity)] for b in range(self.batch)]
        new = lambda *sizes: torch.randn(*sizes, self.dim).to(self.dtype)
        self.q = new(self.batch, self.queries, self.heads)
        self.caches = [new(*shape, self.kv_heads) for _ in range(2)]
        self.new = [] if self.added is None else [new(self.batch, self.added, self.kv_heads) for _ in range(2)]
        most = self.capacity - (self.added or 0)
        kind = draw.choice(("int", "tensor", "none") if self.added is None else ("int", "tensor"))
        self.lengths = [most if kind == "none" else draw.randrange(most + 1) for _ in range(self.batch)]
        self.seqlens = None if kind == "none" else torch.tensor(self.lengths, dtype=torch.int32)
        if kind == "int":
            self.lengths = [self.lengths[0]] * self.batch
            self.seqlens = self.lengths[0]
        self.leftpad = None
        if draw.random() < 0.3:
            self.leftpad = torch.tensor([draw.randrange(length + 1) for length in self.lengths], dtype=torch.int32)
        self.interleaved = draw.random() < 0.5
        self.rotary = None
        if self.added is not None and draw.random() < 0.6:
            half = draw.choice((self.dim // 2, self.dim // 4))
            angles = torch.rand(self.capacity + self.queries, half) * 6
            self.rotary = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.lse = draw.random() < 0.5
        self.splits = draw.choice((0, 1, 4))

    def call(self):
        k, v = self.new or (None, None)
        cos, sin = self.rotary or (None, None)
        options = self.rule.options()
        del options["dropout_p"]
        return flash_attn_with_kvcache(self.q, *self.caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=self.seqlens,
                                       cache_leftpad=self.leftpad, rotary_interleaved=self.interleaved, num_splits=self.splits,
                                       return_softmax_lse=self.lse, **self.where, **options)

    def expected_caches(self, before):
        found = [cache.clone() for cache in before]
        for b in range(self.batch if self.added is not None else 0):
            positions = torch.arange(self.added) + self.lengths[b]
            for cache, new, turns in zip(found, self.new, (self.rotary is not None, False)):
                rows = rotated(new[b], *self.rotary, positions, self.interleaved).to(self.dtype) if turns else new[b]
                for place, row in zip(positions.tolist(), rows):
                    cache[self.rows[b][place]] = row
        return found

    def expected(self, caches, dtype):
        parts = []
        for b in range(self.batch):
            total = self.lengths[b] + (self.added or 0)
            k, v = (torch.stack([cache[self.rows[b][p]] for p in range(total)]) if total else cache[0, :0] for cache in caches)
            q = self.q[b]
            if self.rotary is not None:
                moves = self.rule.causal or self.rule.window_size != (-1, -1)
                q = rotated(q, *self.rotary, self.lengths[b] + torch.arange(self.queries) * moves, self.interleaved).to(self.dtype)
            first = 0 if self.leftpad is None else int(self.leftpad[b])
            parts.append(attention(self.rule, q.to(dtype), k.to(dtype), v.to(dtype), None, slopes_of(self.rule, b), first)[:2])
        return [torch.stack(each) for each in zip(*parts)]


@pytest.mark.parametrize("seed", range(200))
def test_grid(seed):
    case = Case(seed)
    before = [cache.clone() for cache in case.caches]
    result = case.call()
    out, lse = result if case.lse else (result, None)
    assert out.is_contiguous() and out.dtype == case.dtype
    for got, wanted, old in zip(case.caches, case.expected_caches(before), before):
        # A rotated key may be rounded the other way, and only the rows that the call names have changed.
        assert torch.equal(got == old, wanted == old) or case.rotary is not None
        limit = 2 * torch.finfo(case.dtype).eps * max(float(wanted.abs().max()), 1)
        assert (got.double() - wanted.double()).abs().max() <= (limit if case.rotary is not None else 0)
    (model, model_lse), (reference, reference_lse) = (case.expected(case.caches, dtype) for dtype in (torch.float64, case.dtype))
    close("out", out, model, reference, term=float(case.q.abs().max()) if case.rotary else 0)
    if case.lse:
        close("softmax_lse", lse, model_lse, reference_lse, term=float(case.q.abs().max()) if case.rotary else 0)


def test_the_grid_reaches_every_parameter():
    cases = [Case(seed) for seed in range(200)]
    for what in (lambda c: c.added is None, lambda c: c.paged, lambda c: "cache_batch_idx" in c.where, lambda c: c.rotary is None,
                 lambda c: c.interleaved, lambda c: c.leftpad is None, lambda c: type(c.seqlens), lambda c: c.rule.causal,
                 lambda c: c.rule.window_size == (-1, -1), lambda c: c.lse, lambda c: c.rule.softcap, lambda c: c.dtype,
                 lambda c: c.splits, lambda c: None if c.rule.alibi_slopes is None else c.rule.alibi_slopes.dim()):
        counts = {}
        for case in cases:
            counts[what(case)] = counts.get(what(case), 0) + 1
        assert len(counts) > 1 and min(counts.values()) >= 10, counts
    assert any(c.rotary and c.added != c.queries for c in cases) and any(c.rotary and c.rotary[0].shape[1] < c.dim // 2 for c in cases)


def test_padding_before_leftpad_is_never_read():
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 10, 2, 16), torch.randn(2, 10, 2, 16)
    leftpad = torch.tensor([2, 5], dtype=torch.int32)
    wanted = flash_attn_with_kvcache(q, k, v, cache_leftpad=leftpad, cache_seqlens=9, causal=True)
    for cache in (k, v):
        for b, first in enumerate(leftpad):
            cache[b, :first] = float("nan")
            cache[b, 9:] = float("nan")
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_leftpad=leftpad, cache_seqlens=9, causal=True), wanted)


def test_new_tokens_may_lie_anyhow():
    """k and v out of one projection, and of a batch whose sequences are not behind one another: nothing is copied but their rows."""
    q = torch.randn(2, 3, 2, 8)
    packed = torch.randn(2, 5, 3, 2, 8)
    for k, v in ((packed[:, :3, 1], packed[:, :3, 2]), (packed[:, ::2, 0], packed[:, ::2, 1]), (packed[:1, :3, 0].expand(2, -1, -1, -1),) * 2):
        caches = [[torch.zeros(2, 8, 2, 8) for _ in range(2)] for _ in range(2)]
        got = flash_attn_with_kvcache(q, *caches[0], k, v, cache_seqlens=1, causal=True)
        wanted = flash_attn_with_kvcache(q, *caches[1], k.contiguous(), v.contiguous(), cache_seqlens=1, causal=True)
        assert torch.equal(got, wanted) and all(torch.equal(a, b) for a, b in zip(*caches))
        assert torch.equal(caches[0][0][:, 1:4], k) and not caches[0][0][:, 4:].any()


def test_decoding_by_steps_is_attention_of_the_whole():
    q, k, v = (torch.randn(2, 12, heads, 16) for heads in (4, 2, 2))
    caches = [torch.zeros(2, 12, 2, 16) for _ in range(2)]
    steps = [flash_attn_with_kvcache(q[:, i:i + 3], *caches, k[:, i:i + 3], v[:, i:i + 3], cache_seqlens=i, causal=True) for i in range(0, 12, 3)]
    assert torch.allclose(torch.cat(steps, 1), flash_attn_func(q, k, v, causal=True), atol=1e-5)
    assert torch.equal(caches[0], k) and torch.equal(caches[1], v)


def test_gradients_without_new_tokens():
    q, k, v = (torch.randn(2, n, h, 16, dtype=torch.float64, requires_grad=True) for n, h in ((3, 4), (7, 2), (7, 2)))
    grads = [torch.autograd.grad(f(q, k, v, causal=True).square().sum(), (q, k, v)) for f in (flash_attn_with_kvcache, flash_attn_func)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads))
    assert flash_attn_with_kvcache(q, k, v).is_contiguous()


def test_varlen_over_pages():
    sizes = [(3, 9), (1, 20), (5, 5)]
    q = torch.randn(9, 4, 16, dtype=torch.float64)
    keys = [torch.randn(n, 2, 16, dtype=torch.float64) for _, n in sizes]
    values = [torch.randn(n, 2, 16, dtype=torch.float64) for _, n in sizes]
    starts = [torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32) for lengths in zip(*sizes)]
    pages = [torch.full((12, 8, 2, 16), float("nan"), dtype=torch.float64) for _ in range(2)]
    table = torch.randperm(12)[:9].view(3, 3).to(torch.int32)
    for b, (_, n) in enumerate(sizes):
        for p in range(n):
            pages[0][table[b, p // 8], p % 8], pages[1][table[b, p // 8], p % 8] = keys[b][p], values[b][p]
    slopes = torch.rand(3, 4)
    for options in ({}, {"causal": True}, {"window_size": (4, 1), "softcap": 3.0}, {"alibi_slopes": slopes, "softmax_scale": 0.5}):
        wanted = flash_attn_varlen_func(q, torch.cat(keys), torch.cat(values), *starts, 5, 20, return_attn_probs=True, **options)
        got = flash_attn_varlen_func(q, *pages, *starts, 5, 20, return_attn_probs=True, block_table=table, **options)
        assert got[0].is_contiguous()
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got[:2], wanted[:2]))

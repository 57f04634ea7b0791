"""ops_transformer.flash_attn: its parameter grid at random against a model in float64, forward and backward."""

import random

import pytest
from conftest import import_torch

torch = import_torch()

from flash_attn_model import Rule, attention, close, largest_term, slopes_of  # noqa: E402
from ops_transformer.flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,  # noqa: E402
                                        flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
                                        flash_attn_varlen_qkvpacked_func)

FORMS = ("", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (1, 2, 3, 7, 16, 31, 33, 64, 65, 97)


class Case:
    """One combination, drawn from a seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.form = FORMS[seed % len(FORMS)]
        self.packed = "qkv" in self.form
        self.varlen = "varlen" in self.form
        self.dtype = draw.choice(DTYPES)
        self.kv_heads = draw.choice((1, 2, 3))
        self.heads = self.kv_heads * (1 if self.packed else draw.choice((1, 1, 2, 4)))
        self.dim = draw.choice((8, 16, 32, 40, 64, 80, 128, 136, 256))
        self.batch = draw.choice((1, 2, 3))
        sizes = [(draw.choice(LENGTHS), draw.choice(LENGTHS)) for _ in range(self.batch)]
        if not self.varlen:
            sizes = [sizes[0]] * self.batch
        elif draw.random() < 0.3:
            sizes[draw.randrange(self.batch)] = draw.choice(((0, 0), (0, 5), (5, 0)))
        self.sizes = [(q, q if self.packed else k) for q, k in sizes]
        window = (-1, -1) if draw.random() < 0.4 else (draw.choice((-1, 0, 1, 5, 30)), draw.choice((-1, 0, 2, 40)))
        slopes = draw.choice((None, None, torch.rand(self.heads), torch.rand(self.batch, self.heads)))
        self.rule = Rule(draw.random() < 0.5, window, draw.choice((None, None, 0.3, 0.05)), draw.choice((0.0, 0.0, 5.0, 30.0)), slopes,
                         draw.choice((0.0, 0.0, 0.17, 0.5)))
        self.deterministic = draw.random() < 0.5
        self.probabilities = draw.random() < 0.5 or self.rule.dropout_p > 0
        self.strided = draw.random() < 0.3
        self.draw = draw

    def tensors(self):
        """What the function takes: leaves of autograd, and q, k, v of each sequence as views of them."""
        lengths = [sum(size[i] for size in self.sizes) for i in (0, 1)]
        def leaf(rows, *packed_and_heads):
            front = (rows,) if self.varlen else (self.batch, rows // self.batch)
            shape = (*front, *packed_and_heads, self.dim)
            if self.strided:  # every second element, of a larger tensor
                return torch.randn(*shape[:-1], 2 * self.dim).to(self.dtype)[..., ::2].requires_grad_()
            return torch.randn(shape).to(self.dtype).requires_grad_()
        if self.packed:
            leaves = [leaf(lengths[0], 3, self.heads)]
        elif "kvpacked" in self.form:
            leaves = [leaf(lengths[0], self.heads), leaf(lengths[1], 2, self.kv_heads)]
        else:
            leaves = [leaf(lengths[0], self.heads), leaf(lengths[1], self.kv_heads), leaf(lengths[1], self.kv_heads)]
        return leaves

    def split(self, leaves):
        """(q, k, v) of each sequence, [length, heads, D]."""
        if self.packed:
            q, k, v = leaves[0].unbind(-3)
        elif "kvpacked" in self.form:
            q, (k, v) = leaves[0], leaves[1].unbind(-3)
        else:
            q, k, v = leaves
        if not self.varlen:
            return list(zip(q, k, v))
        parts = [x.split([size[i] for size in self.sizes]) for x, i in ((q, 0), (k, 1), (v, 1))]
        return list(zip(*parts))

    def rows(self, out):
        return out.split([size[0] for size in self.sizes]) if self.varlen else out

    def starts(self, side):
        return torch.tensor([0, *torch.tensor([size[side] for size in self.sizes]).cumsum(0)], dtype=torch.int32)

    def call(self, leaves):
        options = dict(self.rule.options(), deterministic=self.deterministic, return_attn_probs=self.probabilities)
        lengths = [max(size[i] for size in self.sizes) + self.draw.choice((0, 3)) for i in (0, 1)]
        if self.form == "":
            return flash_attn_func(*leaves, **options)
        if self.form == "kvpacked":
            return flash_attn_kvpacked_func(*leaves, **options)
        if self.form == "qkvpacked":
            return flash_attn_qkvpacked_func(*leaves, **options)
        if self.form == "varlen_qkvpacked":
            return flash_attn_varlen_qkvpacked_func(*leaves, self.starts(0), lengths[0], **options)
        function = flash_attn_varlen_func if self.form == "varlen" else flash_attn_varlen_kvpacked_func
        return function(*leaves, self.starts(0), self.starts(1), *lengths, **options)


@pytest.mark.parametrize("seed", range(500))
def test_grid(seed):
    case = Case(seed)
    leaves = case.tensors()
    result = case.call(leaves)
    out, lse, dropped = result if case.probabilities else (result, None, None)
    assert out.dtype == case.dtype and out.is_contiguous()
    grad_out = torch.randn(out.shape).to(case.dtype)
    grads = torch.autograd.grad((out * grad_out).sum(), leaves)
    if case.probabilities:
        assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
        assert dropped.dim() == (4 if case.rule.dropout_p > 0 else 1)

    found = []
    for dtype, published in ((torch.float64, False), (case.dtype, True)):
        copies = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        parts = []
        for b, (q, k, v) in enumerate(case.split(copies)):
            keep = None
            if case.rule.dropout_p > 0:
                keep = ~dropped[b, :, :q.shape[0], :k.shape[0]].signbit()
            parts.append(attention(case.rule, q, k, v, keep, slopes_of(case.rule, b), published=published))
        expected = torch.cat([part[0] for part in parts]) if case.varlen else torch.stack([part[0] for part in parts])
        expected_lse = torch.cat([part[1] for part in parts], 1) if case.varlen else torch.stack([part[1] for part in parts])
        expected_grads = torch.autograd.grad((expected * grad_out.to(dtype)).sum(), copies, materialize_grads=True, allow_unused=True)
        found.append((expected, expected_lse, expected_grads, parts))
    (model, model_lse, model_grads, parts), (reference, reference_lse, reference_grads, _) = found
    close("out", out, model, reference)
    term = max(largest_term(case.rule, q, k, v, g) for (q, k, v), g in zip(case.split(leaves), case.rows(grad_out)))
    for i, (grad, wanted, other) in enumerate(zip(grads, model_grads, reference_grads)):
        close(f"gradient {i}", grad, wanted, other, term)
    if case.probabilities:
        close("softmax_lse", lse, model_lse, reference_lse)
    if case.rule.dropout_p > 0:
        for b, (part, (queries, keys)) in enumerate(zip(parts, case.sizes)):
            weights = dropped[b].double().abs()
            assert torch.allclose(weights[:, :queries, :keys], part[2], atol=20 * torch.finfo(case.dtype).eps, rtol=0)
            assert not weights[:, queries:].any() and not weights[:, :, keys:].any()


def test_the_grid_reaches_every_parameter():
    cases = [Case(seed) for seed in range(500)]
    for what in (lambda c: c.form, lambda c: c.dtype, lambda c: c.rule.causal, lambda c: c.rule.softcap, lambda c: c.rule.dropout_p,
                 lambda c: c.dim, lambda c: c.heads // c.kv_heads, lambda c: c.rule.window_size[0], lambda c: c.rule.window_size[1],
                 lambda c: None if c.rule.alibi_slopes is None else c.rule.alibi_slopes.dim(), lambda c: c.probabilities,
                 lambda c: c.strided, lambda c: c.rule.softmax_scale):
        counts = {}
        for case in cases:
            counts[what(case)] = counts.get(what(case), 0) + 1
        assert len(counts) > 1 and min(counts.values()) >= 20, counts
    assert any(q > k for c in cases for q, k in c.sizes) and any(0 < q < k for c in cases for q, k in c.sizes)
    assert any(0 in size for c in cases for size in c.sizes)

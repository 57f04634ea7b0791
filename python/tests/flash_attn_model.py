"""The rule of flash_attn's interface in plain steps of torch, in any dtype: the model in float64, and what a same-dtype reference errs."""

import math
from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """One call's options, as flash_attn names them."""

    causal: bool = False
    window_size: tuple = (-1, -1)
    softmax_scale: float = None
    softcap: float = 0.0
    alibi_slopes: object = None
    dropout_p: float = 0.0

    def options(self):
        return self._asdict()


def visible(rule, query_len, kv_len):
    """bool [query_len, kv_len]: query i stands at key i + kv_len - query_len."""
    place = torch.arange(query_len)[:, None] + kv_len - query_len
    key = torch.arange(kv_len)[None]
    seen = torch.ones(query_len, kv_len, dtype=torch.bool)
    left, right = rule.window_size
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    if rule.causal:
        seen &= key <= place
    return seen


class WeightedSum(torch.autograd.Function):
    """weights [h, i, j] times v [j, h, D] with the gradient as published (Dao et al., 2022, algorithm 4): of the scores directly, with
    delta = sum(grad_out * out), so that rounding of `out` counts. Scores and weights are one input each; the latter has none."""

    @staticmethod
    def forward(ctx, scores, weights, factors, v):
        out = torch.einsum("hij,jhd->ihd", weights * factors, v)
        ctx.save_for_backward(weights, factors, v, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        weights, factors, v, out = ctx.saved_tensors
        grad_weights = torch.einsum("ihd,jhd->hij", grad_out, v) * factors
        delta = (grad_out * out).sum(-1).T[..., None]
        return weights * (grad_weights - delta), None, None, torch.einsum("hij,ihd->jhd", weights * factors, grad_out)


def attention(rule, q, k, v, keep=None, slopes=None, first_key=0, published=False):
    """(out [length, heads, D], lse [heads, length], weights before dropout [heads, length, kv_len]) of one sequence, every step
    rounded to q's dtype. keep: which weights are not dropped. Keys before first_key are hidden. published: gradients by
    WeightedSum in place of those of each step."""
    query_len, heads, dim = q.shape
    kv_len = k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (1 / math.sqrt(dim) if rule.softmax_scale is None else rule.softmax_scale)
    if rule.softcap > 0:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if slopes is not None:
        distance = (torch.arange(query_len)[:, None] + kv_len - query_len - torch.arange(kv_len)[None]).abs()
        scores = (scores - slopes.double()[:, None, None] * distance).to(q.dtype)
    seen = visible(rule, query_len, kv_len) & (torch.arange(kv_len) >= first_key)
    scores = scores.masked_fill(~seen, -math.inf)
    some = seen.any(1)
    lse = torch.full((heads, query_len), math.inf, dtype=q.dtype)
    weights = torch.zeros_like(scores)
    if some.any():
        weights = torch.zeros_like(scores).index_put((torch.arange(heads)[:, None], some.nonzero().flatten()[None]),
                                                     torch.softmax(scores[:, some], -1))
        lse = lse.index_put((torch.arange(heads)[:, None], some.nonzero().flatten()[None]), torch.logsumexp(scores[:, some], -1))
    factors = torch.ones_like(weights) if keep is None else keep.to(q.dtype) / (1 - rule.dropout_p)
    if published:
        return WeightedSum.apply(scores, weights.detach(), factors, v), lse, weights
    return torch.einsum("hij,jhd->ihd", weights * factors, v), lse, weights


def slopes_of(rule, b):
    if rule.alibi_slopes is None or rule.alibi_slopes.dim() == 1:
        return rule.alibi_slopes
    return rule.alibi_slopes[b]


def rotated(x, cos, sin, positions, interleaved):
    """x [length, heads, D] turned at its positions, in float64."""
    x, half = x.double(), cos.shape[1]
    c, s = (table.double()[positions][:, None] for table in (cos, sin))
    out = x.clone()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def largest_term(rule, q, k, v, grad_out):
    """Of the sums that gradients are: accumulators in float32 round such terms, whatever is left of their sum."""
    if not q.numel() or not k.numel():
        return 0.0
    q, k, v, grad_out = (x.detach().double() for x in (q, k, v, grad_out))
    scale = 1 / math.sqrt(q.shape[-1]) if rule.softmax_scale is None else rule.softmax_scale
    weights = torch.einsum("ihd,jhd->hij", grad_out, v.repeat_interleave(q.shape[1] // v.shape[1], 1)).abs().max() / (1 - rule.dropout_p)
    return float(weights * scale * max(q.abs().max(), k.abs().max()))


def close(what, got, model, reference, term=0.0):
    """The error is at most twice that of the same-dtype reference, some units of the last place, and those of accumulators that
    hold numbers of the size `term`."""
    got, model, reference = got.detach(), model.detach(), reference.detach()
    assert got.shape == model.shape, what
    finite = torch.isfinite(model)
    assert torch.equal(got.double()[~finite], model[~finite]), what
    if not finite.any():
        return
    error = (got.double() - model)[finite].abs().max()
    units = 32 if got.dtype == torch.float64 else 4  # the model is of float64 itself, so its reference errs little
    allowed = (2 * (reference.double() - model)[finite].abs().max()
               + units * torch.finfo(got.dtype).eps * model[finite].abs().max().clamp(min=1e-3)
               + 4 * torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps * term)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"

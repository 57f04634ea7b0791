"""What a call should give: in float64, and how far from it a result may lie.

The rule is that of the C++ tests (src/testing/compare.h, src/attention/judge.h): twice the error of the three steps done
naively, each result rounded to the dtype; 4 eps of the largest element (0.75 for an output of 16 bits, which is rounded once);
and what float32 loses in the scores. It holds over the whole result, and for an output again within each row. Peers may lie 4
times as far, as their exp and tanh are their own; what misreads an option lies 1,000 times as far in float32.
"""

from typing import NamedTuple

import torch

from . import calls, cases

PEER_SLACK = 4
_EPS_F32 = torch.finfo(torch.float32).eps
_SAMPLED_ROWS = 256  # of the naive form: its scores of a long call would not fit
_STRIP = 2048  # rows of the exact form at a time: of 16,384 keys 256 MiB of scores for each head


class Verdict(NamedTuple):
    error: float  # largest difference over the largest element, of the worst result
    right: bool


class Expected:
    """Of one call. `kept`: the weights that dropout leaves, bool [1, heads, query_len, kv_len] of the heads that are compared."""

    def __init__(self, case, inputs, kept=None):
        self.case, small = cut(case, inputs)
        wide = small._replace(**{name: t.double() for name, t in small._asdict().items()
                                 if t is not None and t.is_floating_point()})
        self.rounding = (0.75 if not case.gradients and case.dtype != "f32" else 4) * torch.finfo(small.query.dtype).eps
        sampled = torch.arange(0, case.query_len, -(-case.query_len // _SAMPLED_ROWS))
        largest_score = (wide.query[:, :, sampled] @ wide.key.transpose(-2, -1)).abs().max() * case.head_dim**-0.5
        if case.gradients:
            self.want = _gradients(self.case, wide, kept)
            self.naive = list(zip(_gradients(self.case, small, kept), self.want))
            self.extra = [2 * _EPS_F32 * (4 + largest_score) * size for size in _without_cancelling(self.case, wide)]
        else:
            self.want = (_plain(self.case, wide) if not case.options and kept is None else _in_strips(self.case, wide, kept),)
            self.naive = [(steps(self.case, small, sampled, kept), self.want[0][:, :, sampled])]
            self.extra = [4 * _EPS_F32 * (1 + largest_score) * wide.value.abs().mean()]

    def judge(self, outputs, slack=1):
        """The Verdict on outputs of all batches and heads; within `slack` times the bound they are right."""
        errors, right = [], True
        for got, want, (naive, exact), extra in zip(outputs, self.want, self.naive, self.extra):
            off = (got[: want.shape[0], : want.shape[1]].double() - want).abs()
            naive_off, largest = (naive.double() - exact).abs(), want.abs().max()
            errors.append(float(off.max() / largest))
            right &= bool(off.max() <= slack * (2 * naive_off.max() + self.rounding * largest + extra))  # NaN is not
            if not self.case.gradients:
                of_row = exact.abs().amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
                naive_ratio = (naive_off.amax(-1) / of_row).max()
                bound = (2 * naive_ratio + self.rounding) * want.abs().amax(-1) + extra
                right &= bool((off.amax(-1) <= slack * bound).all())
        return Verdict(max(errors) if all(e == e for e in errors) else float("nan"), right)


def cut(case, inputs):
    """(case, inputs) of what is compared: the first batch (of varlen all) and the query heads of the first KV head, at most
    two; gradients of key and value belong to all query heads of theirs."""
    heads = case.heads // case.kv_heads if case.gradients else min(case.heads // case.kv_heads, 2)
    batch = case.batch if "varlen" in case.words else 1
    tensors = [t[:batch, :n] for t, n in zip(inputs, (heads, 1, 1, heads))]
    of_heads = [None if t is None else t[:heads] for t in (inputs.slopes, inputs.sinks)]
    return case._replace(batch=batch, heads=heads, kv_heads=1), calls.Inputs(*tensors, inputs.mask, *of_heads)


def _weights(case, inputs, sampled):
    query, key = inputs[:2]
    scores = query[:, :, sampled] @ key.transpose(-2, -1) * case.head_dim**-0.5
    if "softcap" in case.words:
        scores = cases.SOFTCAP * torch.tanh(scores / cases.SOFTCAP)
    bias = calls.added(case, inputs)
    if bias is not None:
        scores = (scores + bias[:, sampled].to(torch.promote_types(scores.dtype, torch.float32))).to(scores.dtype)
    scores = scores.masked_fill(~calls.visible(case, inputs.mask)[:, :, sampled], -torch.inf)
    if "sinks" in case.words:
        sinks = inputs.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.softmax(scores, -1)[..., : case.kv_len]


def steps(case, inputs, sampled=slice(None), kept=None):
    """softmax(scores) value in three steps, each rounded to the inputs' dtype, for the rows `sampled` of the queries."""
    weights = _weights(case, inputs, sampled)
    if kept is not None:
        weights = weights * kept[:, :, sampled] / (1 - cases.DROPOUT)
    out = weights @ inputs.value
    return out.masked_fill(~calls.rows(case)[:, :, sampled], 0) if "varlen" in case.words else out


def _in_strips(case, inputs, kept):
    """The same of all rows, some at a time: the scores of a long call would not fit."""
    return torch.cat([steps(case, inputs, some, kept) for some in torch.arange(case.query_len).split(_STRIP)], 2)


def _plain(case, inputs):
    """torch's own result, in a memory that grows with the length alone."""
    return torch._C._nn.scaled_dot_product_attention(*inputs[:3], **calls.options_of_torch(case, inputs))


def _gradients(case, inputs, kept):
    leaves = [t.detach().clone().requires_grad_() for t in inputs[:3]]
    return torch.autograd.grad(steps(case, inputs._replace(query=leaves[0], key=leaves[1], value=leaves[2]), kept=kept), leaves,
                               inputs.grad)


def _without_cancelling(case, inputs):
    """How large the elements of grad_query, grad_key and grad_value were if all that they are sums of had one sign."""
    query, key, value, grad = (t.abs() for t in inputs[:4])
    weights = _weights(case, inputs, slice(None))
    of_weights = grad @ value.transpose(-2, -1)
    of_scores = weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True)) * case.head_dim**-0.5
    of_key, of_value = of_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad
    return (of_scores @ key).max(), of_key.sum(1).max(), of_value.sum(1).max()

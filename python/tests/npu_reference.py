"""Attention by the device's rules in plain torch, float64: what the tests of ops_transformer.npu compare with."""

import torch


def to_layout(x, layout):
    """[B, N, S, D] in a layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    return x.transpose(1, 2).flatten(2).transpose(0, 1)  # SBH


def attention(q, k, v, seen=None, scale=1.0, bias=None, sinks=None, lse=False):
    """[B, N, S, D]; seen: bool, true = visible. Rows that see no key give 0."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * (q @ k.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    every = scores if sinks is None else torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    total = every.logsumexp(-1, keepdim=True)
    weights = torch.where(total == -torch.inf, 0, (scores - total.masked_fill(total == -torch.inf, 0)).exp())
    out = weights @ v
    return (out, total.squeeze(-1)) if lse else out


def seen_by(mode, sq, skv, pre=0, following=0, prefix=0):
    """bool [sq, skv]: the keys that a sparse mode shows, by the rule's own words."""
    i, j = torch.arange(sq)[:, None], torch.arange(skv)[None]
    if mode == 0:
        return (i - pre <= j) & (j <= i + following)
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= i + skv - sq
    if mode == 4:
        return (i + skv - sq - pre <= j) & (j <= i + skv - sq + following)
    return (j <= i + skv - sq) | (j < prefix)


def near(got, want, bound=2e-6):
    error = (got.double() - want.double()).abs().max().item() if got.numel() else 0
    assert got.shape == want.shape, (got.shape, want.shape)
    assert error <= bound * max(1.0, want.abs().max().item() if want.numel() else 0), error

"""The rules of torch_npu's functions in NumPy, float64: what tests named after a section of npu_rules.txt compare with.

Written from the rules' own words, with loops where a rule speaks of one row or one key. Tensors are [B, N, S, D] unless a name
says otherwise; `seen` is bool, true where a query may look.
"""

import numpy as np


def f64(x):
    """A NumPy array of float64, of a tensor of torch or of anything NumPy takes."""
    return x.detach().double().numpy() if hasattr(x, "detach") else np.asarray(x, np.float64)


def near(got, want, bound=2e-6):
    """Same shape, and no element further off than `bound` of the largest."""
    got, want = f64(got), f64(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all() or not np.isfinite(want).all()
    error = np.abs(got - want).max(initial=0)
    assert error <= bound * max(1.0, np.abs(want).max(initial=0)), error


# ---- layouts ---------------------------------------------------------------------------------------------------------


def to_layout(x, layout):
    """[B, N, S, D] of NumPy in a layout, contiguous."""
    if layout == "BNSD":
        return np.ascontiguousarray(x)
    if layout == "NBSD":
        return np.ascontiguousarray(x.transpose(1, 0, 2, 3))
    x = x.transpose(0, 2, 1, 3)
    if layout == "BSND":
        return np.ascontiguousarray(x)
    x = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
    return np.ascontiguousarray(x if layout == "BSH" else x.transpose(1, 0, 2))


# ---- which keys a query sees -----------------------------------------------------------------------------------------


def window(mode, sq, skv, pre=2**31 - 1, following=2**31 - 1, prefix=0):
    """bool [sq, skv] of sparse modes 0 to 6, without the mask of modes 0 and 1."""
    seen = np.zeros((sq, skv), bool)
    for i in range(sq):
        for j in range(skv):
            corner = i + skv - sq  # the key below which query i stands when the last query stands at the last key
            if mode == 0:
                seen[i, j] = i - pre <= j <= i + following
            elif mode == 1:
                seen[i, j] = True
            elif mode == 2:
                seen[i, j] = j <= i
            elif mode == 3:
                seen[i, j] = j <= corner
            elif mode == 4:
                seen[i, j] = corner - pre <= j <= corner + following
            else:
                seen[i, j] = j <= corner or j < prefix
    return seen


def upper(size=2048):
    """The compressed mask of modes 2, 3, 4, 7 and 8: 1 on the strict upper triangle."""
    return np.triu(np.ones((size, size), bool), 1)


def prefix_mask():
    """The fixed mask of mode 6."""
    below = np.zeros((1024, 2048), bool)
    below[:, 1024:] = True
    return np.concatenate([upper(), below])


# ---- attention -------------------------------------------------------------------------------------------------------


class Attention:
    """P = softmax(scale * (Q K^T + pse) + bias), hidden keys left out, a sink beside them; out = dropout(P) V.

    Query head h takes key head h // (Nq / Nkv). `out`, `max`, `sum` and `lse` [B, N, S]; rows that see nothing give zeros,
    and lse -inf.
    """

    def __init__(self, q, k, v, seen=None, scale=1.0, pse=None, bias=None, sink=None, keep=None, keep_prob=1.0):
        self.q, self.k, self.v, self.scale, self.sink = f64(q), f64(k), f64(v), scale, sink
        self.group = self.q.shape[1] // self.k.shape[1]
        self.keep = 1.0 if keep is None else f64(keep) / keep_prob
        k, v = (np.repeat(x, self.group, 1) for x in (self.k, self.v))
        scores = np.einsum("bnid,bnjd->bnij", self.q, k)
        scores = scale * (scores if pse is None else scores + f64(pse)) + (0 if bias is None else f64(bias))
        if seen is not None:
            scores = np.where(seen, scores, -np.inf)
        self.max = scores.max(-1, initial=-np.inf)
        if sink is not None:
            self.max = np.maximum(self.max, f64(sink)[None, :, None])
        top = np.where(np.isfinite(self.max), self.max, 0)[..., None]
        weights = np.exp(scores - top)
        self.sum = weights.sum(-1)
        if sink is not None:
            self.sum = self.sum + np.exp(f64(sink)[None, :, None] - top[..., 0])
        self.p = np.divide(weights, self.sum[..., None], out=np.zeros_like(weights), where=self.sum[..., None] > 0)
        self.out = (self.p * self.keep) @ v
        with np.errstate(divide="ignore"):
            self.lse = self.max + np.log(self.sum)

    def grad(self, dy):
        """(dq, dk, dv, dpse, dsink) of dout, with the documents' equations; dpse [B, N, Sq, Skv] of pse inside the scale."""
        dy, out = f64(dy), self.out
        k, v = (np.repeat(x, self.group, 1) for x in (self.k, self.v))
        dp = np.einsum("bnie,bnje->bnij", dy, v) * self.keep
        ds = self.p * (dp - (dy * out).sum(-1, keepdims=True))
        per_group = lambda x: x.reshape(x.shape[0], -1, self.group, *x.shape[2:]).sum(2)  # noqa: E731
        dq = self.scale * np.einsum("bnij,bnjd->bnid", ds, k)
        dk = per_group(self.scale * np.einsum("bnij,bnid->bnjd", ds, self.q))
        dv = per_group(np.einsum("bnij,bnie->bnje", self.p * self.keep, dy))
        sink = None
        if self.sink is not None:
            weight = np.exp(f64(self.sink)[None, :, None] - self.max) / self.sum
            sink = -(weight * (dy * out).sum(-1)).sum((0, 2))
        return dq, dk, dv, self.scale * ds, sink


def attention(q, k, v, seen=None, scale=1.0, **more):
    return Attention(q, k, v, seen, scale, **more).out


def by_sequence(q, k, v, q_lengths, kv_lengths, seen=None, scale=1.0, **more):
    """The same of tokens [T, N, D]: a list of Attention, one for each sequence that has a query; seen(i, sq, skv) of sequence i."""
    parts, a, b = [], 0, 0
    for i, (n, m) in enumerate(zip(q_lengths, kv_lengths)):
        if n:
            part = [f64(x)[s:s + size].transpose(1, 0, 2)[None] for x, s, size in ((q, a, n), (k, b, m), (v, b, m))]
            parts.append(Attention(*part, None if seen is None else seen(i, n, m), scale, **more))
        a, b = a + n, b + m
    return parts


def tokens(parts, what="out"):
    """[T, N, D] of outs, [T, N] of statistics."""
    return np.concatenate([np.moveaxis(getattr(part, what)[0], 0, 1) for part in parts])


# ---- rows ------------------------------------------------------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def to_int8(x, low=-128, high=127):
    """Half to even, then the ends of the range."""
    return np.clip(np.rint(x), low, high)


def close_int8(got, want):
    """int8 that differ from the unrounded `want` by no more than a rounding beside a half."""
    got, want = f64(got), np.clip(want, -128, 127)
    assert got.shape == want.shape and (np.abs(got - want) <= 0.502).all()


def stable_order(ids):
    """The stable sort of flat ids."""
    flat = list(np.asarray(ids).reshape(-1))
    return sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))


def best_first(scores, count):
    """Indices of the largest, of equal ones the lower index first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def words_of_int4(values):
    """int32 words [.., n] of values [.., 8 n] of -8..7: eight in a word, the lowest half byte first."""
    values = np.asarray(values)
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.int64)
    for place in range(8):
        words |= (values[..., place::8].astype(np.int64) & 15) << (4 * place)
    return np.where(words >= 2**31, words - 2**32, words).astype(np.int32)


def rotated(x, cos, sin, mode="half"):
    """x * cos + rot(x) * sin."""
    x, turned, half = f64(x), np.empty_like(f64(x)), x.shape[-1] // 2
    if mode == "half":
        turned[..., :half], turned[..., half:] = -x[..., half:], x[..., :half]
    else:
        turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return x * f64(cos) + turned * f64(sin)


def rms(x, gamma, epsilon, dims=1):
    """(y, rstd), over the last `dims` dimensions."""
    x = f64(x)
    rstd = 1 / np.sqrt((x * x).mean(tuple(range(-dims, 0)), keepdims=True) + epsilon)
    return x * rstd * f64(gamma), rstd

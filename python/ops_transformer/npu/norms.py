"""Norms and rotary positions: npu_rms_norm, npu_add_rms_norm, npu_rotary_mul, npu_apply_rotary_pos_emb, npu_interleave_rope, npu_mrope
and npu_kv_rmsnorm_rope_cache.

Norms and the rotation of npu_mrope are the core's. cos and sin of the others have one value for each element, by any rule, and
broadcast: x * cos + rot(x) * sin in torch's own operators, with their gradients.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..rowwise import add_rms_norm, rms_norm, rms_norm_backward, rope_cached
from ._arguments import quantised, wide
from ._edge import device_function, missing, refuse_given

# ---- norms -----------------------------------------------------------------------------------------------------------


def _flat(x: Tensor, gamma: Tensor) -> Tuple[Tensor, Tuple[int, ...]]:
    """x [.., gamma's elements], and the shape of rstd: the leading dimensions, then 1s."""
    count = gamma.dim()
    if count < 1 or x.shape[-count:] != gamma.shape:
        raise ValueError(f"gamma is {list(gamma.shape)}, must be the last dimensions of x, {list(x.shape)}")
    lead = tuple(x.shape[:-count])
    return (x if count == 1 else x.flatten(-count)), (*lead, *(1,) * count)


@device_function
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> Tuple[Tensor, Tensor]:
    """(x * rstd * gamma, rstd float32), over the trailing dimensions that gamma has."""
    x, shape = _flat(self, gamma)
    out, rstd = rms_norm(x, gamma.reshape(-1), epsilon, return_rstd=True)
    return out.view(self.shape), rstd.view(shape)


@device_function
def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> Tuple[Tensor, Tensor]:
    """(dx, dgamma), of the rstd that the forward gave."""
    x, _ = _flat(self.detach(), gamma)
    # The core computes rstd anew: epsilon is what makes it the given one, by the row that says so best.
    numbers, given = x.double().square().mean(-1).flatten(), rstd.detach().double().flatten()
    epsilon = float((given.pow(-2) - numbers).clamp(min=0).median()) if given.numel() else 0.0
    dx, dgamma = rms_norm_backward(dy.detach().reshape(x.shape), x, gamma.detach().reshape(-1), epsilon)
    return dx.view(self.shape), dgamma.view(gamma.shape)


@device_function
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> Tuple[Tensor, Tensor, Tensor]:
    """(rms_norm(x), rstd, x = x1 + x2)."""
    flat, shape = _flat(x1, gamma)
    out, total, rstd = add_rms_norm(flat, x2.reshape(flat.shape), gamma.reshape(-1), epsilon, return_rstd=True)
    return out.view(x1.shape), rstd.view(shape), total.view(x1.shape)


@device_function(fake=lambda x1, x2, gamma, epsilon=1e-06: x1.new_empty((*x1.shape[:-gamma.dim()], *(1,) * gamma.dim()), dtype=torch.float32),
                 mutates=("x1", "x2"))
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> Tensor:
    """rstd; x1 becomes the norm and x2 the sum, in place."""
    out, rstd, total = npu_add_rms_norm(x1.detach(), x2.detach(), gamma.detach(), epsilon)
    with torch.no_grad():
        x1.copy_(out), x2.copy_(total)
    return rstd


@device_function
def npu_add_rms_norm_v2_functional(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> Tuple[Tensor, Tensor, Tensor]:
    """(rstd, rms_norm(x), x = x1 + x2)."""
    out, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, out, total


# ---- rotary ----------------------------------------------------------------------------------------------------------


def _turned(x: Tensor, mode: str, rotate: Optional[Tensor] = None) -> Tensor:
    """The part that sin multiplies."""
    if rotate is not None:
        return x @ rotate
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def _check_rotary(x: Tensor, mode: str, allowed: Sequence[str] = ("half", "interleave")) -> None:
    if mode not in allowed:
        raise ValueError(f'rotary_mode is "{mode}", must be one of {", ".join(allowed)}')
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension is {x.shape[-1]}, must be even")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str, rotate: Optional[Tensor] = None) -> Tensor:
    numbers = wide(x)
    turned = _turned(numbers, mode, None if rotate is None else rotate.to(numbers.dtype))
    return (numbers * wide(cos) + turned * wide(sin)).to(x.dtype)


@device_function
def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Optional[Tensor] = None) -> Tensor:
    """x * r1 + rot(x) * r2; with rotate, a matrix [D, D], rot(x) = x @ rotate."""
    _check_rotary(self, rotary_mode)
    return _rotated(self, r1, r2, rotary_mode, rotate)


@device_function
def npu_rotary_mul_backward(grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor,
                            rotary_mode: str = "half") -> Tuple[Tensor, Tensor, Tensor]:
    """(dx, dr1, dr2)."""
    _check_rotary(self, rotary_mode)
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (self, r1, r2)]
        out = _rotated(*inputs, rotary_mode)
    return torch.autograd.grad(out, inputs, grad.detach())


@device_function
def npu_apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND",
                             rotary_mode: str = "half") -> Tuple[Tensor, Tensor]:
    """Query and key, turned in place, and given back. cos and sin [B, S, 1, D], or [T, 1, D] of TND. Tensors that require gradients
    are left as they are, and the results have the gradients."""
    if layout not in ("BSND", "TND"):
        raise ValueError(f'layout is "{layout}", must be BSND or TND')
    _check_rotary(query, rotary_mode, ("half",))
    results = [_rotated(tensor, cos, sin, rotary_mode) for tensor in (query, key)]
    given = []
    for tensor, result in zip((query, key), results):
        given.append(result if result.requires_grad else tensor.copy_(result))
    return given[0], given[1]


@device_function
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Even columns, then odd ones, turned as halves; the result stays in this order."""
    _check_rotary(x, "half")
    return _rotated(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin, "half")


@device_function
def npu_mrope(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, *,
              mrope_section: Optional[Sequence[int]] = None, rotary_mode: Optional[str] = "half",
              cache_mode: Optional[str] = "default") -> Tuple[Tensor, Tensor]:
    """(query, key) [T, N * D], turned by positions [T] or, with mrope_section, by the three rows of positions in turn."""
    if cache_mode not in ("default", "interleave"):
        raise ValueError("cache_mode only support default or interleave")
    styles = {"half": "halves", "interleave": "pairs", "interleaved": "pairs"}
    if rotary_mode not in styles:
        raise ValueError(f'rotary_mode is "{rotary_mode}", must be half or interleave')
    half = cos_sin_cache.shape[1] // 2
    sections = [number for number in (mrope_section or ())]
    cos, sin = (part.contiguous() for part in cos_sin_cache.chunk(2, -1))
    if any(sections):
        if positions.dim() != 2 or positions.shape[0] < len(sections) or (cache_mode == "default" and sum(sections) != half):
            raise ValueError(f"mrope_section is {sections}, whose sum must be {half}, and positions {list(positions.shape)}, must be [3, T]")
        if len(sections) != 3:
            missing("npu_mrope", f"mrope_section of {len(sections)} numbers: 3 are implemented")
        rows = positions[:3].to(torch.int64)
        given = (sections[0], sections[1], sections[2], False) if cache_mode == "default" else (half - 2 * sections[1], sections[1], sections[1], True)
    else:
        rows, given = (positions if positions.dim() == 1 else positions[0]).to(torch.int64), None
    turned: List[Tensor] = []
    for tensor in (query, key):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        turned.append(rope_cached(heads, rows, cos.to(torch.float32), sin.to(torch.float32), style=styles[rotary_mode], sections=given)
                      .view(tensor.shape))
    return turned[0], turned[1]


# ---- the latent cache ------------------------------------------------------------------------------------------------

_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


def _slots(index: Tensor, cache: Tensor, mode: str, batch: int, length: int) -> Tensor:
    """int64 [batch * length]: the row of the flat cache of every token, negative where it is skipped."""
    size = cache.shape[2] if mode == "Norm" else cache.shape[1]
    if mode == "Norm":
        index, most = index.reshape(batch, length), size
        rows = torch.where(index < 0, -1, index + torch.arange(batch)[:, None] * size).reshape(-1)
    else:
        rows, most = index.reshape(-1), cache.shape[0] * size
        if mode.startswith("PA_BLK"):
            starts = index.reshape(batch, -(-length // size))[:, torch.arange(length) // size]
            rows = torch.where(starts < 0, -1, starts // size * size + torch.arange(length) % size).reshape(-1)
    if index.numel() and int(index.max()) >= most:
        raise ValueError(f"index names row {int(index.max())}, but {'a sequence of the cache' if mode == 'Norm' else 'the cache'} has {most}")
    return rows.long()


def _write_rows(cache: Tensor, rows: Tensor, slots: Tensor, mode: str) -> None:
    """rows [tokens, D] into a cache, whose pages of NZ forms hold chunks of columns one after the other."""
    taken = slots >= 0
    where, rows = slots[taken], rows[taken].to(cache.dtype)
    width = rows.shape[1]
    if mode.endswith("NZ"):
        size, chunk = cache.shape[1], 32 if cache.dtype == torch.int8 else 16
        pages = cache.view(cache.shape[0], width // chunk, size, chunk)
        pages[where // size, :, where % size] = rows.view(-1, width // chunk, chunk)
    else:
        cache.view(-1, width)[where] = rows


def _latent(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor,
            k_rope_scale: Optional[Tensor], c_kv_scale: Optional[Tensor], offsets: Tuple[Optional[Tensor], Optional[Tensor]],
            v: Optional[Tensor], epsilon: float, cache_mode: str) -> Tuple[Tensor, Tensor]:
    """Writes both caches; (k_embed, y) unquantised."""
    name = "npu_kv_rmsnorm_rope_cache"
    refuse_given(name, "the device takes none", k_rope_offset=offsets[0], c_kv_offset=offsets[1])
    if cache_mode not in _MODES:
        raise ValueError(f'cache_mode is "{cache_mode}", must be one of {", ".join(_MODES)}')
    if (k_rope_scale is None) != (c_kv_scale is None):
        raise ValueError("k_rope_scale and c_kv_scale go together, but one of them is not given")
    if k_rope_scale is None and torch.int8 in (k_cache.dtype, ckv_cache.dtype):
        raise ValueError("a cache is int8, but its scales are not given")
    batch, _, length, width = kv.shape
    rope_width, normed = cos.shape[-1], gamma.numel()
    kv = kv.detach()
    if v is None:
        if normed + rope_width != width:
            raise ValueError(f"kv has {width} columns, must have those of gamma, {normed}, and of cos, {rope_width}")
        y = rms_norm(kv[..., :normed], gamma.detach(), epsilon)
        k = npu_interleave_rope(kv[..., normed:], cos, sin)
        first, second = k, y
    else:
        both = rms_norm(kv, gamma.detach(), epsilon)
        k = torch.cat([npu_interleave_rope(both[..., :rope_width], cos, sin), both[..., rope_width:]], -1)
        first, second, y = k, v.detach(), v.detach()
    places = [_slots(index, cache, cache_mode, batch, length) for cache in (k_cache, ckv_cache)]
    with torch.no_grad():
        for cache, rows, scale, slots in zip((k_cache, ckv_cache), (first, second), (k_rope_scale, c_kv_scale), places):
            rows = rows.reshape(batch * length, rows.shape[-1])
            _write_rows(cache, rows if scale is None else quantised(rows.float() * scale.float()), slots, cache_mode)
    return k, y


def _outputs(k: Tensor, y: Tensor, wanted: bool) -> Tuple[Tensor, Tensor]:
    return (k, y) if wanted else (k.new_empty(0), y.new_empty(0))


@device_function
def npu_kv_rmsnorm_rope_cache(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
                              k_rope_scale: Optional[Tensor] = None, c_kv_scale: Optional[Tensor] = None,
                              k_rope_offset: Optional[Tensor] = None, c_kv_offset: Optional[Tensor] = None, v: Optional[Tensor] = None,
                              epsilon: float = 1e-5, cache_mode: str = "Norm",
                              is_output_kv: bool = False) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k_cache, ckv_cache, k_embed, y): the norm of the first columns and the turned last ones, written into the caches in place."""
    k, y = _latent(kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, (k_rope_offset, c_kv_offset), v, epsilon, cache_mode)
    return (k_cache, ckv_cache, *_outputs(k, y, is_output_kv))


@device_function
def npu_kv_rmsnorm_rope_cache_v2(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
                                 k_rope_scale: Optional[Tensor] = None, c_kv_scale: Optional[Tensor] = None,
                                 k_rope_offset: Optional[Tensor] = None, c_kv_offset: Optional[Tensor] = None, v: Optional[Tensor] = None,
                                 epsilon: float = 1e-5, cache_mode: str = "Norm", is_output_kv: bool = False,
                                 k_cache_dtype: Optional[int] = None, ckv_cache_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor]:
    """(k_embed, y); the caches are written in place."""
    refuse_given("npu_kv_rmsnorm_rope_cache_v2", "caches have the dtypes of their tensors", k_cache_dtype=k_cache_dtype, ckv_cache_dtype=ckv_cache_dtype)
    k, y = _latent(kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, (k_rope_offset, c_kv_offset), v, epsilon, cache_mode)
    return _outputs(k, y, is_output_kv)


@device_function
def npu_kv_rmsnorm_rope_cache_v2_functional(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor,
                                            ckv_cache: Tensor, *, k_rope_scale: Optional[Tensor] = None,
                                            c_kv_scale: Optional[Tensor] = None, k_rope_offset: Optional[Tensor] = None,
                                            c_kv_offset: Optional[Tensor] = None, v: Optional[Tensor] = None, epsilon: float = 1e-5,
                                            cache_mode: str = "Norm", is_output_kv: bool = False, k_cache_dtype: Optional[int] = None,
                                            ckv_cache_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k_embed, y, k_cache, ckv_cache), the caches as copies."""
    refuse_given("npu_kv_rmsnorm_rope_cache_v2_functional", "caches have the dtypes of their tensors", k_cache_dtype=k_cache_dtype,
                 ckv_cache_dtype=ckv_cache_dtype)
    k_cache, ckv_cache = k_cache.clone(), ckv_cache.clone()
    k, y = _latent(kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, (k_rope_offset, c_kv_offset), v, epsilon, cache_mode)
    return (*_outputs(k, y, is_output_kv), k_cache, ckv_cache)

"""The functions of quant as operators of torch, without gradients: rounding has none."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ._arrays import integers_shape
from ._calls import function_of
from ._torch_forms import Form, define
from ._torch_operator import context

_public = function_of("quant", "dynamic_quant")
_plain = _public.__wrapped__  # without its checks


def _dynamic_quant_fake(x: Tensor, bits: int, smooth_scales: Optional[Tensor]) -> Tuple[Any, ...]:
    q = x.new_empty(integers_shape(x, x.shape, bits), dtype=torch.int8 if bits == 8 else torch.uint8)
    return q, x.new_empty(x.shape[:-1], dtype=torch.float32)


_dynamic_quant_operator = define(
    "dynamic_quant(Tensor x, int bits, Tensor? smooth_scales) -> (Tensor, Tensor)",
    lambda x, bits, smooth_scales: _plain(x, bits=bits, smooth_scales=smooth_scales, context=context()), _dynamic_quant_fake)

FORMS = {"dynamic_quant": Form(_public, _dynamic_quant_operator, ("x", "bits", "smooth_scales"), differentiable=False,
                               finish=lambda bound, results: tuple(results))}

"""One call of attention as data: its inputs, how it is run, and what it should give."""

import contextlib
from typing import Any, Callable, NamedTuple

import torch

from . import cases

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Inputs(NamedTuple):
    query: torch.Tensor  # [batch, heads, query_len, head_dim]
    key: torch.Tensor  # [batch, kv_heads, kv_len, head_dim]
    value: torch.Tensor  # [batch, kv_heads, kv_len, value_head_dim]
    grad: torch.Tensor  # [batch, heads, query_len, value_head_dim]
    mask: Any  # bool or dtype [query_len, kv_len], or None


class Call(NamedTuple):
    run: Callable[[], Any]  # what is timed
    outputs: Callable[[Any], tuple] = lambda value: value  # run's value as tensors: out, or the gradients
    chosen: Callable[[], Any] = contextlib.nullcontext  # entered around run, not timed
    kept: Any = None  # memory that run reads and nothing else holds


def make_inputs(case, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    kv = case.batch, case.kv_heads, case.kv_len
    mask = None
    if "bool_mask" in case.words:
        mask = torch.rand(case.query_len, case.kv_len, generator=generator) < cases.VISIBLE
    if "float_mask" in case.words:
        mask = normal(case.query_len, case.kv_len)
    query = case.batch, case.heads, case.query_len
    return Inputs(normal(*query, case.head_dim), normal(*kv, case.head_dim), normal(*kv, case.value_head_dim),
                  normal(*query, case.value_head_dim), mask)


def _options(case, inputs):
    """The arguments of scaled_dot_product_attention beside query, key and value."""
    options = {}
    if "causal" in case.words:
        options["is_causal"] = True
    if inputs.mask is not None:
        options["attn_mask"] = inputs.mask
    if "dropout" in case.words:
        options["dropout_p"] = cases.DROPOUT
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    return options


def through_torch(function, case, inputs, chosen=contextlib.nullcontext):
    """The call as a user of torch makes it. The forward that a backward needs is not timed."""
    options = _options(case, inputs)
    if case.gradients:
        leaves = [t.clone().requires_grad_() for t in inputs[:3]]
        if "training" in case.words:
            return Call(lambda: torch.autograd.grad(function(*leaves, **options), leaves, inputs.grad), chosen=chosen)
        with chosen():
            out = function(*leaves, **options)
        return Call(lambda: torch.autograd.grad(out, leaves, inputs.grad, retain_graph=True), chosen=chosen)

    def forward():
        with torch.inference_mode():
            return function(inputs.query, inputs.key, inputs.value, **options)

    return Call(forward, lambda out: (out,), chosen)


def exact(case, inputs):
    """What comes out in float64, of the first batch and the query heads of the first KV head, at most two: out or the
    gradients; those of key and value belong to all query heads of theirs."""
    group = case.heads // case.kv_heads
    heads = group if case.gradients else min(group, 2)
    query, key, value, grad = (t[:1, :n].double() for t, n in zip(inputs, (heads, 1, 1, heads)))
    mask = inputs.mask.double() if "float_mask" in case.words else inputs.mask
    cut = case._replace(batch=1, heads=heads, kv_heads=1)
    call = through_torch(torch._C._nn.scaled_dot_product_attention, cut, Inputs(query, key, value, grad, mask))
    return call.outputs(call.run())


def error(outputs, want):
    """Largest difference over the largest element."""
    return max(float((got[:1, : w.shape[1]].double() - w).abs().max() / w.abs().max()) for got, w in zip(outputs, want))

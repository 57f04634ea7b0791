"""One call of attention as data: its inputs, how it is run, and the forms that libraries take it in."""

import contextlib
from typing import Any, Callable, NamedTuple

import torch

from . import cases

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SEED = 20  # of torch's generator before a call with dropout whose outputs are compared


class NoSuchCall(Exception):
    """Why a library has no call for a case."""


class Inputs(NamedTuple):
    query: torch.Tensor  # [batch, heads, query_len, head_dim]
    key: torch.Tensor  # [batch, kv_heads, kv_len, head_dim]
    value: torch.Tensor  # [batch, kv_heads, kv_len, value_head_dim]
    grad: torch.Tensor  # [batch, heads, query_len, value_head_dim]; 0 where no sequence has a row
    mask: Any  # bool or dtype [query_len, kv_len], or None
    slopes: Any = None  # float32 [heads], of alibi
    sinks: Any = None  # float32 [heads]


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

    def heads_of(*shape):
        """[batch, heads, length, size], in the order of the case."""
        t = normal(*shape)
        return t.transpose(1, 2).contiguous().transpose(1, 2) if "strided" in case.words else t

    kv = case.batch, case.kv_heads, case.kv_len
    mask = None
    if "bool_mask" in case.words:
        mask = torch.rand(case.query_len, case.kv_len, generator=generator) < cases.VISIBLE
    if "float_mask" in case.words:
        mask = normal(case.query_len, case.kv_len)
    query = case.batch, case.heads, case.query_len
    slopes = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1) / case.heads) if "alibi" in case.words else None
    sinks = torch.randn(case.heads, generator=generator) if "sinks" in case.words else None
    tensors = heads_of(*query, case.head_dim), heads_of(*kv, case.head_dim), heads_of(*kv, case.value_head_dim)
    grad = heads_of(*query, case.value_head_dim)
    return Inputs(*tensors, grad.masked_fill_(~rows(case), 0) if "varlen" in case.words else grad, mask, slopes, sinks)


def options_of_torch(case, inputs):
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


def through_torch(function, case, tensors, grad, chosen=contextlib.nullcontext):
    """The call function(query, key, value) as a user of torch makes it. The forward that a backward needs is not timed."""
    if case.gradients:
        leaves = [t.clone().requires_grad_() for t in tensors]  # of the same strides
        if "training" in case.words:
            return Call(lambda: torch.autograd.grad(function(*leaves), leaves, grad), chosen=chosen)
        with chosen():
            torch.manual_seed(SEED)
            out = function(*leaves)
        return Call(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), chosen=chosen)

    def forward():
        with torch.inference_mode():
            return function(*tensors)

    return Call(forward, lambda out: (out,), chosen)


# ---- which keys a query sees, and what is added to its scores ------------------------------------------------------------


def distance(case):
    """Key minus query, [query_len, kv_len]: 0 on the diagonal."""
    offset = case.kv_len - case.query_len if "paged" in case.words else 0
    return torch.arange(case.kv_len) - torch.arange(case.query_len)[:, None] - offset


def block_table(case):
    """bool [query blocks, key blocks]: which a `sparse` case sees, at least one of each row. Drawn here, by none of the
    libraries."""
    blocks = -(-case.query_len // case.block), -(-case.kv_len // case.block)
    worth = torch.rand(blocks, generator=torch.Generator().manual_seed(2))
    seen = torch.full(blocks[:1], blocks[1])
    if "causal" in case.words:
        worth = worth.tril()  # what lies above the diagonal comes last
        seen = torch.arange(1, blocks[0] + 1)
    rank = worth.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return rank < (case.share * seen).round().clamp_min(1)[:, None]


def visible(case, mask=None):
    """bool [1 or batch, 1, query_len, kv_len]."""
    seen = torch.ones(1, 1, case.query_len, case.kv_len, dtype=torch.bool)
    if "causal" in case.words:
        seen &= distance(case) <= 0
    if "window" in case.words:
        seen &= (distance(case) if "causal" in case.words else distance(case).abs().neg()) > -cases.WINDOW
    if mask is not None and mask.dtype == torch.bool:
        seen &= mask
    if "sparse" in case.words:
        of_rows = block_table(case).repeat_interleave(case.block, 0)[: case.query_len]
        seen &= of_rows.repeat_interleave(case.block, 1)[:, : case.kv_len]
    if "varlen" in case.words:
        seen = seen & (torch.arange(case.kv_len) < torch.tensor(case.lengths)[:, None])[:, None, None]
    return seen


def added(case, inputs):
    """float32 [heads or 1, query_len, kv_len], or None."""
    if "alibi" in case.words:
        return -inputs.slopes[:, None, None] * distance(case).abs()
    return inputs.mask.float()[None] if "float_mask" in case.words else None


def rows(case):
    """bool [batch, 1, query_len, 1]: the rows that belong to a sequence."""
    return (torch.arange(case.query_len) < torch.tensor(case.lengths)[:, None])[:, None, :, None]


# ---- forms ---------------------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """A call with options, for a library that has none of them but a mask."""

    inputs: tuple  # query, key, value
    mask: Any  # [1 or batch, 1 or heads, query_len, keys], bool or float32 (added); None: nothing but perhaps causal
    causal: bool


def masked(case, inputs):
    """Windows, blocks, ALiBi and lengths become the mask; a sink becomes one more key of zeros, whose score the mask makes the sink,
    with a value of zeros."""
    tensors = inputs[:3]
    bias, seen = added(case, inputs), visible(case, inputs.mask)
    if "sinks" in case.words:
        tensors = (tensors[0], *(torch.nn.functional.pad(t, (0, 0, 1, 0)) for t in tensors[1:]))
        seen = torch.nn.functional.pad(seen, (1, 0), value=True)
        bias = torch.zeros(case.heads, case.query_len, case.kv_len) if bias is None else bias
        bias = torch.cat([inputs.sinks[:, None, None].expand(-1, case.query_len, 1), bias.expand(case.heads, -1, -1)], -1)
    if bias is not None:
        return Masked(tensors, torch.where(seen, bias, -torch.inf), False)
    if not {"window", "bool_mask", "sparse"} & set(case.words) and "causal" in case.words and case.query_len == case.kv_len:
        return Masked(tensors, None, True)  # keys behind the end of a sequence are hidden by the diagonal
    return Masked(tensors, None if seen.all() else seen, False)


def pack(case, t):
    """[batch, heads, length, size] -> the rows of the sequences one after the other, [tokens, heads, size]."""
    return t.transpose(1, 2)[rows(case)[:, 0, :, 0]]


def unpack(case, t):
    """What pack takes, of what it gives; zeros where no sequence has a row."""
    padded = t.new_zeros(case.batch, case.query_len, *t.shape[1:])
    padded[rows(case)[:, 0, :, 0]] = t
    return padded.transpose(1, 2)


def starts(case):
    """int32 [batch + 1]: where each sequence starts in what pack gives."""
    return torch.tensor((0, *case.lengths)).cumsum(0).to(torch.int32)


def page_table(case, page):
    """int32 [batch, pages of a sequence]: pages in no order."""
    pages = -(-case.kv_len // page)
    shuffled = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(1))
    return shuffled.to(torch.int32).view(case.batch, pages)


def slots(case, table, page):
    """int64 [batch * kv_len]: the row of the cache in which each key lies."""
    keys = torch.arange(case.kv_len)
    return (table.long()[:, keys // page] * page + keys % page).flatten()

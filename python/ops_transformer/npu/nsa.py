"""Native sparse attention, npu_nsa_*: compositions of the core's operators.

    compress            a weighted sum over windows of tokens (torch's; a window's weights are few)
    compress attention  attention over the compressed keys, and the blocks of tokens that weigh most in it. The choice needs the weights
                        themselves: softmax(scale * query key^T) of a sequence is made in memory, [heads, queries, windows]
    select attention    attention over the chosen blocks, each key head with its own list
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..flash_attention import flash_attention_score, sparse_flash_attention
from ._arguments import eightfold, integers, lengths_of, starts_tensor, visible, wide
from ._edge import device_function, missing

_INFER = "the paged form is not implemented; the one for tokens is"


def _windows(input: Tensor, weight: Tensor, block: int, stride: int, ends: Any) -> Tensor:
    if weight.shape != (block, input.shape[1]):
        raise ValueError(f"weight is {list(weight.shape)}, must be [compress_block_size = {block}, heads = {input.shape[1]}]")
    ends = [input.shape[0]] if ends is None else integers("actual_seq_len", ends)
    parts, start = [], 0
    for end in ends:
        rows = input[start:end]
        if end - start >= block:
            parts.append((wide(rows.unfold(0, block, stride)) * wide(weight.t())[None, :, None]).sum(-1))  # [windows, N, D]
        start = end
    return torch.cat(parts).to(input.dtype) if parts else input[:0]


@device_function
def npu_nsa_compress(input: Tensor, weight: Tensor, compress_block_size: int, compress_stride: int, *,
                     actual_seq_len: Optional[Sequence[int]] = None) -> Tensor:
    """[windows, N, D]: weighted sums of compress_block_size tokens, from every compress_stride-th token on; running totals."""
    return _windows(input, weight, compress_block_size, compress_stride, actual_seq_len)


@device_function
def npu_nsa_compress_grad(grad: Tensor, input: Tensor, weight: Tensor, compress_block_size: int, compress_stride: int, *,
                          actual_seq_len: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """(dinput, dweight)"""
    inputs = [tensor.detach().requires_grad_() for tensor in (input, weight)]
    with torch.enable_grad():
        out = _windows(*inputs, compress_block_size, compress_stride, actual_seq_len)
    if out.numel() == 0:
        return torch.zeros_like(input), torch.zeros_like(weight)
    return torch.autograd.grad(out, inputs, grad.detach())  # type: ignore[return-value]


@device_function
def npu_nsa_compress_infer(input: Tensor, weight: Tensor, slot_mapping: Tensor, compress_block_size: int, compress_stride: int,
                           page_block_size: int, *, block_table: Optional[Tensor] = None,
                           actual_seq_len: Optional[Sequence[int]] = None, cache: Tensor) -> Tensor:
    """cache, in whose rows slot_mapping the last window of every sequence that has just become whole is written, in place."""
    if block_table is None or actual_seq_len is None:
        raise ValueError("block_table and actual_seq_len are needed")
    with torch.no_grad():
        for b, length in enumerate(integers("actual_seq_len", actual_seq_len)):
            if length < compress_block_size or (length - compress_block_size) % compress_stride:
                continue
            at = torch.arange(length - compress_block_size, length)
            rows = input[block_table[b][at // page_block_size].long(), at % page_block_size]
            cache[int(slot_mapping[b])] = (rows.float() * weight.float()[..., None]).sum(0).to(cache.dtype)
    return cache


def _importance(weights: Tensor, blocks: int, block: int, stride: int, select: int) -> Tensor:
    """[.., blocks] of weights [.., windows]: the sum over a < select / stride and b < block / stride of
    weights[select / stride * (i + 1) - a - b]."""
    m, n = select // stride, block // stride
    total = weights.new_zeros((*weights.shape[:-1], blocks))
    for a in range(m):
        for b in range(n):
            at = m * (torch.arange(blocks) + 1) - a - b
            good = (at >= 0) & (at < weights.shape[-1])
            total[..., good] += weights[..., at[good]]
    return total


@device_function
def npu_nsa_compress_attention(query: Tensor, key: Tensor, value: Tensor, scale_value: float, head_num: int, compress_block_size: int,
                               compress_stride: int, select_block_size: int, select_block_count: int, *,
                               topk_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
                               actual_seq_qlen: Optional[Sequence[int]] = None, actual_cmp_seq_kvlen: Optional[Sequence[int]] = None,
                               actual_sel_seq_kvlen: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, topk_indices, softmax_max, softmax_sum). topk_mask: 1 is a forced choice. A sequence with fewer blocks than
    select_block_count has -1 behind them."""
    if actual_seq_qlen is None or actual_cmp_seq_kvlen is None or actual_sel_seq_kvlen is None:
        raise ValueError("actual_seq_qlen, actual_cmp_seq_kvlen and actual_sel_seq_kvlen are needed, running totals without a leading 0")
    if query.shape[1] != head_num:
        raise ValueError(f"head_num is {head_num}, but query has {query.shape[1]} heads")
    mask = None if atten_mask is None else visible("atten_mask", atten_mask)
    q_ends, kv_ends = integers("actual_seq_qlen", actual_seq_qlen), integers("actual_cmp_seq_kvlen", actual_cmp_seq_kvlen)
    given = flash_attention_score(query, key, value, input_layout="TND", attn_head_num=head_num, kv_head_num=key.shape[1],
                                  scale_value=float(scale_value), mask=mask, actual_seq_qlen=q_ends, actual_seq_kvlen=kv_ends)
    chosen: List[Tensor] = []
    blocks_of = lengths_of(integers("actual_sel_seq_kvlen", actual_sel_seq_kvlen))
    with torch.no_grad():
        for q_end, q_len, kv_end, kv_len, blocks in zip(q_ends, lengths_of(q_ends), kv_ends, lengths_of(kv_ends), blocks_of):
            q, k = query[q_end - q_len:q_end].float(), key[kv_end - kv_len:kv_end].float()
            kv_heads = k.shape[1]
            scores = torch.einsum("tghd,jgd->gthj", q.unflatten(1, (kv_heads, -1)), k) * scale_value  # [groups, T, heads, windows]
            if mask is not None:
                scores = scores.masked_fill(~mask[:q_len, None, :kv_len], -torch.inf)
            weights = torch.nan_to_num(scores.softmax(-1)).sum(2)
            ranks = _importance(weights, blocks, compress_block_size, compress_stride, select_block_size)
            if topk_mask is not None:
                ranks = ranks.masked_fill(topk_mask[:q_len, :blocks].bool(), torch.inf)
            best = ranks.sort(dim=-1, descending=True, stable=True).indices[..., :select_block_count]
            chosen.append(torch.nn.functional.pad(best, (0, select_block_count - best.shape[-1]), value=-1).transpose(0, 1))
    statistics = [eightfold(rows.detach().t()) for rows in (given.softmax_max, given.softmax_sum)]
    return (given.attention_out, torch.cat(chosen).to(torch.int32), *statistics)


@device_function
def npu_nsa_compress_attention_infer(query: Tensor, key: Tensor, value: Tensor, scale_value: float, head_num: int, key_value_head_num: int,
                                     select_block_size: int, select_block_count: int, page_block_size: int, compress_block_size: int,
                                     compress_stride: int, *, layout: str = "TND", atten_mask: Optional[Tensor] = None,
                                     block_table: Optional[Tensor] = None, topk_mask: Optional[Tensor] = None,
                                     actual_seq_qlen: Optional[Sequence[int]] = None, actual_cmp_seq_kvlen: Optional[Sequence[int]] = None,
                                     actual_sel_seq_kvlen: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor]:
    """Not implemented: see npu_nsa_compress_attention."""
    missing("npu_nsa_compress_attention_infer", _INFER)


def _select(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float, heads: int, block: int, masked: bool, q_ends: Any,
            kv_ends: Any) -> Tuple[Tensor, Tensor]:
    """(out, lse [N, T]). With a mask a query sees keys up to its own index: where the two sides of a sequence are of one length."""
    if q_ends is None or kv_ends is None:
        raise ValueError("actual_seq_qlen and actual_seq_kvlen are needed, running totals without a leading 0")
    if query.shape[1] != heads:
        raise ValueError(f"head_num is {heads}, but query has {query.shape[1]} heads")
    q_list, kv_list = integers("actual_seq_qlen", q_ends), integers("actual_seq_kvlen", kv_ends)
    if masked and q_list != kv_list:
        missing("npu_nsa_select_attention", "atten_mask where a sequence has not as many queries as keys: the core's lists are causal "
                "from the last key")
    return sparse_flash_attention(query, key, value, indices, sparse_block_size=block, softmax_scale=float(scale), causal=masked,
                                  cu_seqlens_q=starts_tensor(q_list), cu_seqlens_k=starts_tensor(kv_list), return_lse=True)


@device_function
def npu_nsa_select_attention(query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, scale_value: float, head_num: int,
                             select_block_size: int, select_block_count: int, *, atten_mask: Optional[Tensor] = None,
                             actual_seq_qlen: Optional[Sequence[int]] = None,
                             actual_seq_kvlen: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_max, softmax_sum) over the chosen blocks. The maximum given is the logarithm of the row's sum, beside a sum of 1. A
    given atten_mask means j <= i."""
    out, lse = _select(query, key, value, topk_indices, scale_value, head_num, select_block_size, atten_mask is not None, actual_seq_qlen,
                       actual_seq_kvlen)
    rows = lse.detach().t()
    return out, eightfold(rows), eightfold((rows != -torch.inf).float())


@device_function
def npu_nsa_select_attention_grad(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attention_out: Tensor, softmax_max: Tensor,
                                  softmax_sum: Tensor, topk_indices: Tensor, scale_value: float, head_num: int, select_block_size: int,
                                  select_block_count: int, *, atten_mask: Optional[Tensor] = None,
                                  actual_seq_qlen: Optional[Sequence[int]] = None,
                                  actual_seq_kvlen: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). The forward is computed once more."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        out, _ = _select(*inputs, topk_indices, scale_value, head_num, select_block_size, atten_mask is not None, actual_seq_qlen,
                         actual_seq_kvlen)
    return torch.autograd.grad(out, inputs, grad.detach())  # type: ignore[return-value]


@device_function
def npu_nsa_select_attention_infer(query: Tensor, key: Tensor, value: Tensor, topk_indices: Tensor, scale_value: float, head_num: int,
                                   key_value_head_num: int, select_block_size: int, select_block_count: int, page_block_size: int, *,
                                   layout: str = "BSND", atten_mask: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
                                   actual_seq_qlen: Optional[Sequence[int]] = None,
                                   actual_seq_kvlen: Optional[Sequence[int]] = None) -> Tensor:
    """Attention of queries over the chosen blocks of pages [blocks, rows, N * D]; lengths are one for each sequence."""
    if block_table is None or actual_seq_kvlen is None:
        raise ValueError("block_table and actual_seq_kvlen are needed")
    if layout not in ("BSND", "BSH", "TND"):
        raise ValueError(f'layout is "{layout}", must be BSND, BSH or TND')
    if layout == "TND":
        missing("npu_nsa_select_attention_infer", "layout TND: BSND and BSH are implemented")
    batch = query.shape[0]
    q = query.view(batch, query.shape[1], head_num, -1).transpose(1, 2)
    pages = [cache.view(cache.shape[0], page_block_size, key_value_head_num, -1) for cache in (key, value)]
    out = sparse_flash_attention(q, *pages, topk_indices.view(batch, query.shape[1], key_value_head_num, -1), sparse_block_size=select_block_size,
                                 softmax_scale=float(scale_value), causal=False, block_table=block_table,
                                 kv_lengths=integers("actual_seq_kvlen", actual_seq_kvlen)).transpose(1, 2)
    return out.contiguous() if layout == "BSND" else out.flatten(2)

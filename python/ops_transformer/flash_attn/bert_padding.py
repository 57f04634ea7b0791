"""Padded batches as sequences one after the other, and back: the helpers of flash_attn.bert_padding, with gradients."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import Tensor

from .._calls import public
from ._checks import is_tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def _rows(name: str, tensor: Tensor, rank: int, form: str) -> Tensor:
    if is_tensor(name, tensor).dim() < rank:
        raise ValueError(f"{name} has {tensor.dim()} dimensions {list(tensor.shape)}, must have {rank} or more: {form}")
    return tensor


def _indices(indices: Any, rows: int, of: str) -> Tensor:
    is_tensor("indices", indices)
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices is {indices.dtype} {list(indices.shape)}, must be int32 or int64 [count]")
    if indices.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= rows:
            raise ValueError(f"indices has {low if low < 0 else high}, but {of} {rows} rows")
    return indices


@public
def index_first_axis(input: Any, indices: Any) -> Tensor:
    """Rows `indices` of input [rows, ..]."""
    rows = _rows("input", input, 1, "[rows, ..]")
    return rows.index_select(0, _indices(indices, rows.shape[0], "input has"))


@public
def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ..] with values [count, ..] in the rows `indices` and zeros in the others."""
    rows = _rows("values", values, 1, "[count, ..]")
    where = _indices(indices, first_axis_dim, "the result has")
    if where.shape[0] != rows.shape[0]:
        raise ValueError(f"indices has {where.shape[0]} rows, but values has {rows.shape[0]}")
    return rows.new_zeros(first_axis_dim, *rows.shape[1:]).index_copy(0, where.long(), rows)


def _mask(name: str, mask: Any, batch: int, length: int) -> Tensor:
    is_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{name} has dtype {mask.dtype}, must be bool or an integer (1: a token)")
    if list(mask.shape) != [batch, length]:
        raise ValueError(f"{name} has shape {list(mask.shape)}, but hidden_states says [batch, seqlen] = {[batch, length]}")
    return mask


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


@public
def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(rows, indices, cu_seqlens, max_seqlen, seqused) of hidden_states [batch, seqlen, ..].

    attention_mask [batch, seqlen]: 1 for a token. unused_mask likewise: 1 for rows that are kept, but hold no token. rows
    [total, ..] are those of either mask; indices int64 [total] tells where they were in [batch * seqlen], cu_seqlens int32
    [batch + 1] where each sequence begins, seqused int32 [batch] how many tokens of attention_mask it has.
    """
    states = _rows("hidden_states", hidden_states, 2, "[batch, seqlen, ..]")
    tokens = _mask("attention_mask", attention_mask, *states.shape[:2]).to(torch.int32)
    kept = tokens if unused_mask is None else tokens + _mask("unused_mask", unused_mask, *states.shape[:2]).to(torch.int32)
    if kept.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in kept.aminmax())
        if low < 0 or high > 1:
            raise ValueError(f"attention_mask{'' if unused_mask is None else ' + unused_mask'} has {low if low < 0 else high}, must be 0 or 1")
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (states.flatten(0, 1).index_select(0, indices), indices, _offsets(lengths), _longest(lengths),
            tokens.sum(-1, dtype=torch.int32))


@public
def unpad_input_for_concatenated_sequences(hidden_states: Any, attention_mask_in_length: Any) -> Tuple[Tensor, Tensor, Tensor, int]:
    """(rows, indices, cu_seqlens, max_seqlen) of hidden_states [batch, seqlen, ..] whose rows each hold several sequences.

    attention_mask_in_length [batch, seqlen]: a row's lengths first, then zeros; [2, 3, 0, 0, 0, 0] are 2 tokens, then 3, then one of
    padding.
    """
    states = _rows("hidden_states", hidden_states, 2, "[batch, seqlen, ..]")
    lengths = _mask("attention_mask_in_length", attention_mask_in_length, *states.shape[:2])
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"attention_mask_in_length has {int(lengths.min())}, must not be negative")
    held = lengths.sum(-1)
    if bool((held > states.shape[1]).any()):
        row = int((held > states.shape[1]).nonzero()[0])
        raise ValueError(f"attention_mask_in_length[{row}] sums to {int(held[row])}, but hidden_states has seqlen {states.shape[1]}")
    indices = (torch.arange(states.shape[1]) < held[:, None]).flatten().nonzero().flatten()
    lengths = lengths.flatten()
    lengths = lengths[lengths > 0].to(torch.int32)
    return states.flatten(0, 1).index_select(0, indices), indices, _offsets(lengths), _longest(lengths)


@public(facade=True)
def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Tensor:
    """[batch, seqlen, ..] with hidden_states [total, ..] in the rows `indices` of [batch * seqlen], and zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))

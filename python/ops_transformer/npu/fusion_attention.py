"""Attention for training: npu_fusion_attention, its v2 and v3, and their gradients, over flash_attention_score.

    P = softmax(hide(scale * (Q K^T + pse)));  out = dropout(P) V

Results of tensors that require gradients have them. What the device's pages leave open is decided so:

    rows that see no key   under a mask of modes 0 and 1: the mean of the values, with max = the lowest float and sum = the
                           number of keys; with inner_precise=2, and where the mode alone makes such rows: zeros, and sum =
                           the largest float
    softmax_layout         "TND" and "" both give [tokens, N, 8] of TND
    dropout                which weights a seed drops is a rule of ours (flash_attention.dropout_mask), not the chip's
    pse_type 2, 3          ALiBi of slopes in pse, -slope * distance or its square root, added after scaling
    absent gradients       tensors of 0 elements, as is the reserved fourth result
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._layouts import from_heads_first
from ..flash_attention import flash_attention_grad, flash_attention_score
from ._arguments import by_heads, eightfold, head_dim_of, integers, kv_heads_of, lengths_of, rule_of, side, totals, wide
from ._edge import device_function, is_tensor, missing

_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_LOWEST, _HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


class _Call(NamedTuple):
    """One problem in the words of flash_attention_score."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    heads: int
    kv_heads: int
    options: Dict[str, Any]
    pse: Optional[Tensor]  # as it was given
    ends: Tuple[Optional[List[int]], Optional[List[int]]]  # of TND
    empty: str  # rows without a key: "" there are none, "mean", "zero"
    ropes: int  # columns of query and key that came from ropes


def _pse_options(pse: Optional[Tensor], pse_type: int, scale: float, query_len: int, kv_len: int, q_start: Any,
                 kv_start: Any) -> Dict[str, Any]:
    if pse_type not in (0, 1, 2, 3):
        raise ValueError(f"pse_type is {pse_type}, must be 0, 1, 2 or 3")
    if pse is None:
        return {}
    if pse_type in (2, 3):
        starts = [0 if start is None else integers(name, start) for name, start in (("q_start_idx", q_start), ("kv_start_idx", kv_start))]
        first = [start if isinstance(start, int) else (start[0] if start else 0) for start in starts]
        return dict(alibi_slopes=pse.float(), alibi_form="linear" if pse_type == 2 else "square_root",
                    alibi_query_start=first[0], alibi_key_start=first[1])
    if pse.dim() == 4 and pse.shape[2] == 1024 and query_len > 1024:
        pse = _unrolled(pse, query_len, kv_len)
    return dict(bias=pse, bias_scale=scale if pse_type == 1 else 1.0)


def _unrolled(pse: Tensor, query_len: int, kv_len: int) -> Tensor:
    """All rows of an ALiBi bias of which the last 1024 are given: it depends on key - query alone, so an earlier row is a
    later one moved along. Keys that no causal query sees keep any value."""
    rows = torch.arange(query_len)
    steps = ((query_len - 1024 - rows + 1023) // 1024).clamp(min=0) * 1024
    columns = (torch.arange(kv_len) + steps[:, None]).clamp(max=kv_len - 1)
    given = (rows + steps - (query_len - 1024))[:, None].expand(-1, kv_len)
    return pse[:, :, given, columns]


def _empty_rows(mode: int, mask: Optional[Tensor], inner_precise: int, sizes: Sequence[Tuple[int, int]]) -> str:
    """Whether rows may see no key, and what they are then."""
    if any(keys == 0 < queries for queries, keys in sizes):
        return "zero"
    if mask is None or mode == 2:
        return ""
    if mode in (0, 1):
        return "zero" if inner_precise == 2 else "mean"
    return "zero" if mode == 4 or any(queries > keys for queries, keys in sizes) else ""


def _call(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, pse: Optional[Tensor], padding_mask: Optional[Tensor],
          mask: Optional[Tensor], scale: float, keep_prob: float, pre: int, following: int, inner_precise: int, prefix: Any,
          q_ends: Any, kv_ends: Any, mode: int, sink: Optional[Tensor], drop_mask: Optional[Tensor], seed: int, offset: int, *,
          pse_type: int = 1, starts: Tuple[Any, Any] = (None, None), ropes: Tuple[Optional[Tensor], Optional[Tensor]] = (None, None)) -> _Call:
    """Checks, and translates, what every function here has in common."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        is_tensor(name, tensor)
    if padding_mask is not None:
        raise ValueError("padding_mask is given, but must be None: atten_mask hides keys")
    if layout not in _LAYOUTS:
        raise ValueError(f'input_layout is "{layout}", must be one of {", ".join(_LAYOUTS)}')
    if not 0 < keep_prob <= 1:
        raise ValueError(f"keep_prob is {keep_prob}, must be above 0 and at most 1")
    if not 0 <= mode <= 8:
        raise ValueError(f"sparse_mode is {mode}, must be 0 to 8")
    if (ropes[0] is None) != (ropes[1] is None):
        raise ValueError("query_rope and key_rope go together, but one of them is not given")
    kv_heads = kv_heads_of(key, layout, head_dim_of(query, layout, heads))
    added = 0
    if ropes[0] is not None:
        query, key, added = *_with_ropes(query, key, ropes, layout, heads, kv_heads), ropes[0].shape[-1]
        added = added // heads if "H" in layout else added
    ends: Tuple[Optional[List[int]], Optional[List[int]]] = (None, None)
    if layout == "TND":
        if q_ends is None or kv_ends is None:
            raise ValueError("input_layout TND needs actual_seq_qlen and actual_seq_kvlen, running totals without a leading 0")
        ends = totals("actual_seq_qlen", q_ends), totals("actual_seq_kvlen", kv_ends)
        sizes = list(zip(lengths_of(ends[0]), lengths_of(ends[1])))
        query_len, kv_len = max((q for q, _ in sizes), default=0), max((k for _, k in sizes), default=0)
    else:
        axis = layout.index("S")
        query_len, kv_len = query.shape[axis], key.shape[axis]
        sizes = [(query_len, kv_len)]
    options: Dict[str, Any] = _pse_options(pse, pse_type, scale, query_len, kv_len, *starts)
    if mode < 7:
        options.update(_names_of_score(rule_of(mode, mask, pre, following, prefix).options()))
    elif layout != "TND":
        raise ValueError(f"sparse_mode is {mode}, which goes with input_layout TND, not {layout}")
    elif pse is not None:
        raise ValueError(f"pse is given, but sparse_mode {mode} takes none")
    if sink is not None:
        options["sinks"] = sink if sink.dtype == torch.float64 else sink.float()
    if keep_prob < 1:
        options["keep_prob"] = keep_prob
        if drop_mask is not None:
            options["drop_mask"] = drop_mask
        else:
            options.update(seed=seed & (2**64 - 1), offset=offset & (2**64 - 1))
    options["scale_value"] = float(scale)
    return _Call(query, key, value, layout, heads, kv_heads, options, pse, ends, _empty_rows(mode, mask, inner_precise, sizes), added)


def _names_of_score(options: Dict[str, Any]) -> Dict[str, Any]:
    """pre_tokens and next_tokens, the names of flash_attention_score."""
    for here, there in (("window_left", "pre_tokens"), ("window_right", "next_tokens")):
        if here in options:
            options[there] = options.pop(here)
    return options


def _with_ropes(query: Tensor, key: Tensor, ropes: Tuple[Tensor, Tensor], layout: str, heads: int, kv_heads: int) -> List[Tensor]:
    """Query and key with the columns of the ropes behind them, which scores sum over as well."""
    if "H" not in layout:
        return [torch.cat(pair, -1) for pair in zip((query, key), ropes)]
    joined = []
    for tensor, rope, count in ((query, ropes[0], heads), (key, ropes[1], kv_heads)):
        parts = [part.unflatten(-1, (count, part.shape[-1] // count)) for part in (tensor, rope)]
        joined.append(torch.cat(parts, -1).flatten(-2))
    return joined


def _parts(call: _Call, mode: int, pre: int, following: int) -> List[_Call]:
    """Calls whose results follow each other: one, or of modes 7 and 8 one for the sequence with the band and one for the others."""
    if mode < 7:
        return [call]
    sizes = list(zip(lengths_of(call.ends[0]), lengths_of(call.ends[1])))
    filled = [i for i, (queries, keys) in enumerate(sizes) if queries > 0 and keys > 0] or [0]
    band = filled[-1] if mode == 7 else filled[0]
    cut = [band] if mode == 7 else [band + 1]
    parts = []
    for first, last in ((0, cut[0]), (cut[0], len(sizes))):
        if first == last:
            continue
        is_band = (first == band) if mode == 7 else (last == band + 1)
        if is_band:
            rule = dict(alignment="bottom_right", pre_tokens=side(pre), next_tokens=side(following))
        else:
            rule = dict(alignment="bottom_right" if mode == 7 else "top_left", next_tokens=0)
        bounds = [([0, *ends][first], ends[last - 1]) for ends in call.ends]
        ends = tuple([end - start for end in ends[first:last]] for ends, (start, _) in zip(call.ends, bounds))
        tensors = [tensor.narrow(0, start, end - start) for tensor, (start, end) in
                   zip((call.query, call.key, call.value), (bounds[0], bounds[1], bounds[1]))]
        parts.append(call._replace(query=tensors[0], key=tensors[1], value=tensors[2], ends=ends, options={**call.options, **rule},
                                   empty="zero"))
    return parts


def _of_score(call: _Call) -> Dict[str, Any]:
    given = dict(input_layout=call.layout, attn_head_num=call.heads, kv_head_num=call.kv_heads, **call.options)
    if call.layout == "TND":
        given.update(actual_seq_qlen=call.ends[0], actual_seq_kvlen=call.ends[1])
    return given


def _attend(call: _Call) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, max, sum) with the device's values for rows that see no key; max and sum [B, N, S], or [N, T]."""
    out, largest, total = flash_attention_score(call.query, call.key, call.value, **_of_score(call))
    if total.requires_grad:
        largest, total = largest.detach(), total.detach()
    if call.empty == "":
        return out, largest, total
    none = total == 0
    if not torch.compiler.is_compiling() and not bool(none.any()):
        return out, largest, total
    count = _HIGHEST
    if call.empty == "mean" and call.layout != "TND":
        values = by_heads("value", call.value, call.layout, call.kv_heads)
        count = float(values.shape[2])
        mean = wide(values).mean(2, keepdim=True).repeat_interleave(call.heads // call.kv_heads, 1).to(out.dtype)
        rows = by_heads("out", out, call.layout, call.heads)
        out = from_heads_first(torch.where(none.unsqueeze(-1), mean, rows), call.layout).contiguous()
    return out, largest.masked_fill(none, _LOWEST), total.masked_fill(none, count)


def _statistics(rows: Tensor, layout: str) -> Tensor:
    """[B, N, S, 8], or [T, N, 8] of TND."""
    return eightfold(rows.transpose(0, 1) if layout == "TND" else rows)


def _numels(call: _Call) -> int:
    if call.layout == "TND":
        return call.heads * sum(q * k for q, k in zip(lengths_of(call.ends[0]), lengths_of(call.ends[1])))
    batch, axis = call.layout.index("B"), call.layout.index("S")
    return call.query.shape[batch] * call.heads * call.query.shape[axis] * call.key.shape[axis]


def _forward(call: _Call, mode: int, masked: bool, pre: int, following: int, softmax_layout: str) -> Tuple[Tensor, ...]:
    """out, softmax_max, softmax_sum and the reserved result."""
    if softmax_layout not in ("", "TND") or (softmax_layout and call.layout != "TND"):
        raise ValueError(f'softmax_layout is "{softmax_layout}", must be "", or "TND" with input_layout TND')
    if mode >= 7 and masked:
        if "keep_prob" in call.options:
            missing("npu_fusion_attention", f"keep_prob below 1 with sparse_mode {mode}: the sequences are two calls, whose dropped "
                    "weights would not be those of one")
        parts = [_attend(part) for part in _parts(call, mode, pre, following)]
        out = torch.cat([part[0] for part in parts])
        largest, total = (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
        behind = call.query.shape[0] - out.shape[0]
        if behind:
            pad = torch.nn.functional.pad
            out, largest, total = pad(out, (0, 0, 0, 0, 0, behind)), pad(largest, (0, behind), value=_LOWEST), pad(total, (0, behind), value=_HIGHEST)
    else:
        out, largest, total = _attend(call)
    return out, _statistics(largest, call.layout), _statistics(total, call.layout), out.new_empty(0)


def _seed(seed: int, keep_prob: float, drop_mask: Optional[Tensor]) -> int:
    """Of 0 one that torch's generator draws."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, must be an integer of 64 bits")
    if keep_prob < 1 and seed == 0 and drop_mask is None:
        return int(torch.randint(1, 2**62, ()))
    return seed


# ---- forward ---------------------------------------------------------------------------------------------------------


@device_function
def npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Optional[Tensor] = None,
                         padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None, scale: float = 1.,
                         keep_prob: float = 1., pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
                         prefix: Optional[Sequence[int]] = None, actual_seq_qlen: Optional[Sequence[int]] = None,
                         actual_seq_kvlen: Optional[Sequence[int]] = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
                         sync: bool = False, softmax_layout: str = "", sink: Optional[Tensor] = None,
                         dropout_mask: Optional[Tensor] = None, seed: int = 0, offset: int = 0) -> Tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """(out, softmax_max, softmax_sum, an empty tensor, seed, offset, numels). scale is 1 unless it is given."""
    seed = _seed(seed, keep_prob, dropout_mask)
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens, next_tockens,
                 inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, dropout_mask, seed, offset)
    given = _forward(call, sparse_mode, atten_mask is not None, pre_tockens, next_tockens, softmax_layout)
    return (*given, seed, offset, _numels(call))


@device_function
def npu_fusion_attention_v2(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Optional[Tensor] = None,
                            padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
                            query_rope: Optional[Tensor] = None, key_rope: Optional[Tensor] = None, scale: float = 1.,
                            keep_prob: float = 1., pre_tokens: int = 2147483647, next_tokens: int = 2147483647, inner_precise: int = 0,
                            prefix: Optional[Sequence[int]] = None, actual_seq_qlen: Optional[Sequence[int]] = None,
                            actual_seq_kvlen: Optional[Sequence[int]] = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
                            sync: bool = False, pse_type: int = 1, q_start_idx: Optional[Sequence[int]] = None,
                            kv_start_idx: Optional[Sequence[int]] = None, softmax_layout: str = "", sink: Optional[Tensor] = None,
                            dropout_mask: Optional[Tensor] = None, seed: int = 0,
                            offset: int = 0) -> Tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """npu_fusion_attention with ropes apart, pse_type 0 to 3 and where a cut sequence starts."""
    seed = _seed(seed, keep_prob, dropout_mask)
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tokens, next_tokens,
                 inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, dropout_mask, seed, offset,
                 pse_type=pse_type, starts=(q_start_idx, kv_start_idx), ropes=(query_rope, key_rope))
    given = _forward(call, sparse_mode, atten_mask is not None, pre_tokens, next_tokens, softmax_layout)
    return (*given, seed, offset, _numels(call))


@device_function
def npu_fusion_attention_v3(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Optional[Tensor] = None,
                            padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None, scale: float = 1.,
                            keep_prob: float = 1., pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
                            prefix: Optional[Sequence[int]] = None, actual_seq_qlen: Optional[Tensor] = None,
                            actual_seq_kvlen: Optional[Tensor] = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
                            sync: bool = False, softmax_layout: str = "",
                            sink: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_fusion_attention with lengths, seed and offset (int64 [1]) as tensors."""
    seed = _seed(0, keep_prob, None)
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens, next_tockens,
                 inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, None, seed, 0)
    given = _forward(call, sparse_mode, atten_mask is not None, pre_tockens, next_tockens, softmax_layout)
    return (*given, torch.tensor([seed], dtype=torch.int64), torch.tensor([0], dtype=torch.int64))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _rows(statistics: Optional[Tensor], name: str, layout: str) -> Tensor:
    """[B, N, S], or [N, T], of what the forward gave."""
    if statistics is None or statistics.dim() != (3 if layout == "TND" else 4):
        raise ValueError(f"{name} is {'None' if statistics is None else list(statistics.shape)}, must be what the forward gave: "
                         + ("[T, N, 8]" if layout == "TND" else "[B, N, S, 8]"))
    rows = statistics[..., 0]
    return rows.transpose(0, 1) if layout == "TND" else rows


def _gradients_of(call: _Call, dy: Tensor, largest: Tensor, total: Tensor, out: Tensor) -> Dict[str, Tensor]:
    wanted = ["query", "key", "value"] + [name for name in ("bias", "sinks") if name in call.options]
    found = flash_attention_grad(call.query, call.key, call.value, dy, largest, total, out, wanted=wanted, **_of_score(call))
    gradients = dict(zip(wanted, found))
    none = largest <= _LOWEST
    if call.empty == "mean" and call.layout != "TND" and bool(none.any()):
        # A row that sees no key is the mean of all values.
        values = by_heads("dv", gradients["value"], call.layout, call.kv_heads)
        rows = wide(by_heads("dy", dy, call.layout, call.heads)).masked_fill(~none.unsqueeze(-1), 0).sum(2, keepdim=True)
        rows = rows.unflatten(1, (call.kv_heads, -1)).sum(2) / values.shape[2]
        gradients["value"] = from_heads_first((wide(values) + rows).to(values.dtype), call.layout).contiguous()
    return gradients


def _grad(call: _Call, mode: int, masked: bool, pre: int, following: int, dy: Tensor, softmax_max: Optional[Tensor],
          softmax_sum: Optional[Tensor], attention_in: Optional[Tensor]) -> Dict[str, Tensor]:
    if attention_in is None:
        raise ValueError("attention_in is not given, the first result of the forward")
    largest, total = _rows(softmax_max, "softmax_max", call.layout), _rows(softmax_sum, "softmax_sum", call.layout)
    with torch.no_grad():
        if mode < 7 or not masked:
            return _gradients_of(call, dy, largest, total, attention_in)
        found, row = [], 0
        for part in _parts(call, mode, pre, following):
            rows = slice(row, row + part.query.shape[0])
            found.append(_gradients_of(part, dy[rows], largest[:, rows], total[:, rows], attention_in[rows]))
            row = rows.stop
        joined = {}
        for name in found[0]:
            parts = [gradients[name] for gradients in found]
            joined[name] = sum(parts) if name == "sinks" else torch.cat(parts)
            if name != "sinks":
                behind = {"query": call.query, "key": call.key, "value": call.value}[name].shape[0] - joined[name].shape[0]
                joined[name] = torch.nn.functional.pad(joined[name], (0, 0, 0, 0, 0, behind))
        return joined


def _results(call: _Call, found: Dict[str, Tensor]) -> Tuple[Tensor, ...]:
    """(dq, dk, dv, dpse, dsink)"""
    none = call.query.new_empty(0)
    pse = found["bias"].to(call.pse.dtype) if "bias" in found else none
    return found["query"], found["key"], found["value"], pse, found.get("sinks", none)


@device_function
def npu_fusion_attention_grad(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
                              pse: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
                              softmax_max: Optional[Tensor] = None, softmax_sum: Optional[Tensor] = None,
                              softmax_in: Optional[Tensor] = None, attention_in: Optional[Tensor] = None, scale_value: float = 1.,
                              keep_prob: float = 1., pre_tockens: int = 2147483647, next_tockens: int = 2147483647,
                              inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0,
                              prefix: Optional[Sequence[int]] = None, actual_seq_qlen: Optional[Sequence[int]] = None,
                              actual_seq_kvlen: Optional[Sequence[int]] = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
                              sync: bool = False, softmax_layout: str = "",
                              sink: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dpse, dsink) of what npu_fusion_attention gave."""
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob, pre_tockens,
                 next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, None, seed, offset)
    return _results(call, _grad(call, sparse_mode, atten_mask is not None, pre_tockens, next_tockens, dy, softmax_max, softmax_sum,
                                attention_in))


@device_function
def npu_fusion_attention_grad_v2(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
                                 pse: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None,
                                 atten_mask: Optional[Tensor] = None, softmax_max: Optional[Tensor] = None,
                                 softmax_sum: Optional[Tensor] = None, softmax_in: Optional[Tensor] = None,
                                 attention_in: Optional[Tensor] = None, query_rope: Optional[Tensor] = None,
                                 key_rope: Optional[Tensor] = None, scale_value: float = 1., keep_prob: float = 1.,
                                 pre_tokens: int = 2147483647, next_tokens: int = 2147483647, inner_precise: int = 0, seed: int = 0,
                                 offset: int = 0, numels: int = 0, prefix: Optional[Sequence[int]] = None,
                                 actual_seq_qlen: Optional[Sequence[int]] = None, actual_seq_kvlen: Optional[Sequence[int]] = None,
                                 sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1,
                                 q_start_idx: Optional[Sequence[int]] = None, kv_start_idx: Optional[Sequence[int]] = None,
                                 softmax_layout: str = "",
                                 sink: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dpse, dq_rope, dk_rope, dsink) of what npu_fusion_attention_v2 gave."""
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob, pre_tokens, next_tokens,
                 inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, None, seed, offset, pse_type=pse_type,
                 starts=(q_start_idx, kv_start_idx), ropes=(query_rope, key_rope))
    dq, dk, dv, dpse, dsink = _results(call, _grad(call, sparse_mode, atten_mask is not None, pre_tokens, next_tokens, dy,
                                                   softmax_max, softmax_sum, attention_in))
    if call.ropes == 0:
        return dq, dk, dv, dpse, query.new_empty(0), query.new_empty(0), dsink
    (dq, dq_rope), (dk, dk_rope) = (_without_ropes(gradient, call, count)
                                    for gradient, count in ((dq, call.heads), (dk, call.kv_heads)))
    return dq, dk, dv, dpse, dq_rope, dk_rope, dsink


def _without_ropes(gradient: Tensor, call: _Call, heads: int) -> Tuple[Tensor, Tensor]:
    """The gradient of a tensor and that of its rope."""
    if "H" in call.layout:
        gradient = gradient.unflatten(-1, (heads, gradient.shape[-1] // heads))
    pair = [part.contiguous() for part in gradient.split([gradient.shape[-1] - call.ropes, call.ropes], -1)]
    if "H" in call.layout:
        pair = [part.flatten(-2) for part in pair]
    return pair[0], pair[1]


@device_function
def npu_fusion_attention_grad_v3(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
                                 pse: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None,
                                 atten_mask: Optional[Tensor] = None, softmax_max: Optional[Tensor] = None,
                                 softmax_sum: Optional[Tensor] = None, softmax_in: Optional[Tensor] = None,
                                 attention_in: Optional[Tensor] = None, scale_value: float = 1., keep_prob: float = 1.,
                                 pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
                                 seed: Optional[Tensor] = None, offset: Optional[Tensor] = None,
                                 prefix: Optional[Sequence[int]] = None, actual_seq_qlen: Optional[Tensor] = None,
                                 actual_seq_kvlen: Optional[Tensor] = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
                                 sync: bool = False, softmax_layout: str = "",
                                 sink: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dpse, dsink) of what npu_fusion_attention_v3 gave."""
    numbers = [0 if number is None else int(number) for number in (seed, offset)]
    call = _call(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob, pre_tockens,
                 next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, sink, None, *numbers)
    return _results(call, _grad(call, sparse_mode, atten_mask is not None, pre_tockens, next_tockens, dy, softmax_max, softmax_sum,
                                attention_in))

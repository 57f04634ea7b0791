"""Attention for inference by the device's names: npu_fused_infer_attention_score (v1, v2), npu_prompt_flash_attention,
npu_incre_flash_attention. What a call means is in `_inference`; here are the names, and what is refused.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from torch import Tensor

from ._arguments import dtype_of
from ._edge import device_function, is_tensor, refuse_given
from ._inference import joined_scales, no_keys, of_no_keys, problem, result

_INT8_PRODUCTS = "attention of integer products (full quantisation) is not implemented"
_DTYPES = "dtypes of eight bits other than int8, and of four, are not implemented"


def _first(tensors: Any) -> Tensor:
    return tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors


@device_function
def npu_fused_infer_attention_score(
        query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
        actual_seq_lengths: Optional[Sequence[int]] = None, actual_seq_lengths_kv: Optional[Sequence[int]] = None,
        dequant_scale1: Optional[Tensor] = None, quant_scale1: Optional[Tensor] = None, dequant_scale2: Optional[Tensor] = None,
        quant_scale2: Optional[Tensor] = None, quant_offset2: Optional[Tensor] = None, antiquant_scale: Optional[Tensor] = None,
        antiquant_offset: Optional[Tensor] = None, key_antiquant_scale: Optional[Tensor] = None,
        key_antiquant_offset: Optional[Tensor] = None, value_antiquant_scale: Optional[Tensor] = None,
        value_antiquant_offset: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
        query_padding_size: Optional[Tensor] = None, kv_padding_size: Optional[Tensor] = None,
        key_shared_prefix: Optional[Tensor] = None, value_shared_prefix: Optional[Tensor] = None,
        actual_shared_prefix_len: Optional[Sequence[int]] = None, query_rope: Optional[Tensor] = None, key_rope: Optional[Tensor] = None,
        key_rope_antiquant_scale: Optional[Tensor] = None, num_heads: int = 1, scale: float = 1.0, pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647, input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0,
        inner_precise: int = 0, block_size: int = 0, antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
        softmax_lse_flag: bool = False) -> Tuple[Tensor, Tensor]:
    """(out, lse). Lengths are one for each sequence, of TND running totals without a leading 0 (of pages one for each). key and value
    may be lists of tensors of batch 1. lse: [1] of 0 without softmax_lse_flag. scale is 1 unless it is given."""
    is_tensor("query", query)
    refuse_given("npu_fused_infer_attention_score", _INT8_PRODUCTS, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1,
                 dequant_scale2=dequant_scale2)
    refuse_given("npu_fused_infer_attention_score", "it is reserved", key_rope_antiquant_scale=key_rope_antiquant_scale)
    if no_keys(query, key):
        return of_no_keys(query, _first(value), input_layout, num_heads, num_key_value_heads, softmax_lse_flag)
    scales = joined_scales((antiquant_scale, antiquant_offset), antiquant_mode,
                           ((key_antiquant_scale, key_antiquant_offset, key_antiquant_mode),
                            (value_antiquant_scale, value_antiquant_offset, value_antiquant_mode)))
    call = problem("npu_fused_infer_attention_score", query, key, value, layout=input_layout, heads=num_heads,
                   kv_heads=num_key_value_heads, scale=scale, pse=pse_shift, mask=atten_mask, mode=sparse_mode, pre=pre_tokens,
                   following=next_tokens, q_lengths=actual_seq_lengths, kv_lengths=actual_seq_lengths_kv, block_table=block_table,
                   block_size=block_size, scales=scales, padding=(query_padding_size, kv_padding_size),
                   shared=(key_shared_prefix, value_shared_prefix, actual_shared_prefix_len), ropes=(query_rope, key_rope))
    return result(call, softmax_lse_flag, (quant_scale2, quant_offset2))


@device_function
def npu_fused_infer_attention_score_v2(
        query: Tensor, key: Tensor, value: Tensor, *, query_rope: Optional[Tensor] = None, key_rope: Optional[Tensor] = None,
        pse_shift: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None, actual_seq_qlen: Optional[Sequence[int]] = None,
        actual_seq_kvlen: Optional[Sequence[int]] = None, block_table: Optional[Tensor] = None,
        dequant_scale_query: Optional[Tensor] = None, dequant_scale_key: Optional[Tensor] = None,
        dequant_offset_key: Optional[Tensor] = None, dequant_scale_value: Optional[Tensor] = None,
        dequant_offset_value: Optional[Tensor] = None, dequant_scale_key_rope: Optional[Tensor] = None,
        quant_scale_out: Optional[Tensor] = None, quant_offset_out: Optional[Tensor] = None, quant_scale_p: Optional[Tensor] = None,
        learnable_sink: Optional[Tensor] = None, num_query_heads: int = 1, num_key_value_heads: int = 0, softmax_scale: float = 1.0,
        pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0,
        query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0, inner_precise: int = 0,
        return_softmax_lse: bool = False, query_dtype: Optional[int] = None, key_dtype: Optional[int] = None,
        value_dtype: Optional[int] = None, query_rope_dtype: Optional[int] = None, key_rope_dtype: Optional[int] = None,
        key_shared_prefix_dtype: Optional[int] = None, value_shared_prefix_dtype: Optional[int] = None,
        dequant_scale_query_dtype: Optional[int] = None, dequant_scale_key_dtype: Optional[int] = None,
        dequant_scale_value_dtype: Optional[int] = None, dequant_scale_key_rope_dtype: Optional[int] = None,
        out_dtype: Optional[int] = None) -> Tuple[Tensor, Tensor]:
    """(out, lse): npu_fused_infer_attention_score by the names of its second version, with a sink for each query head."""
    is_tensor("query", query)
    name = "npu_fused_infer_attention_score_v2"
    refuse_given(name, _INT8_PRODUCTS, dequant_scale_query=dequant_scale_query)
    refuse_given(name, "it is reserved", dequant_scale_key_rope=dequant_scale_key_rope, quant_scale_p=quant_scale_p)
    refuse_given(name, _DTYPES, query_dtype=query_dtype, key_dtype=key_dtype, value_dtype=value_dtype, query_rope_dtype=query_rope_dtype,
                 key_rope_dtype=key_rope_dtype, key_shared_prefix_dtype=key_shared_prefix_dtype,
                 value_shared_prefix_dtype=value_shared_prefix_dtype, dequant_scale_query_dtype=dequant_scale_query_dtype,
                 dequant_scale_key_dtype=dequant_scale_key_dtype, dequant_scale_value_dtype=dequant_scale_value_dtype,
                 dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype)
    if no_keys(query, key):
        return of_no_keys(query, _first(value), input_layout, num_query_heads, num_key_value_heads, return_softmax_lse)
    scales = joined_scales((None, None), 0, ((dequant_scale_key, dequant_offset_key, key_quant_mode),
                                             (dequant_scale_value, dequant_offset_value, value_quant_mode)))
    call = problem(name, query, key, value, layout=input_layout, heads=num_query_heads, kv_heads=num_key_value_heads, scale=softmax_scale,
                   pse=pse_shift, mask=atten_mask, mode=sparse_mode, pre=pre_tokens, following=next_tokens, q_lengths=actual_seq_qlen,
                   kv_lengths=actual_seq_kvlen, block_table=block_table, block_size=block_size, scales=scales,
                   ropes=(query_rope, key_rope), sink=learnable_sink)
    out, lse = result(call, return_softmax_lse, (quant_scale_out, quant_offset_out))
    return out.to(dtype_of("out_dtype", out_dtype, out.dtype)), lse


@device_function
def npu_prompt_flash_attention(
        query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
        pse_shift: Optional[Tensor] = None, actual_seq_lengths: Optional[Sequence[int]] = None, deq_scale1: Optional[Tensor] = None,
        quant_scale1: Optional[Tensor] = None, deq_scale2: Optional[Tensor] = None, quant_scale2: Optional[Tensor] = None,
        quant_offset2: Optional[Tensor] = None, num_heads: int = 1, scale_value: float = 1.0, pre_tokens: int = 2147483647,
        next_tokens: int = 0, input_layout: str = "BSH", num_key_value_heads: int = 0,
        actual_seq_lengths_kv: Optional[Sequence[int]] = None, sparse_mode: int = 0) -> Tensor:
    """Attention of prompts. next_tokens = 0, its default, makes nothing causal as long as there is no mask."""
    is_tensor("query", query)
    if padding_mask is not None:
        raise ValueError("padding_mask is given, but must be None: atten_mask hides keys")
    refuse_given("npu_prompt_flash_attention", _INT8_PRODUCTS, deq_scale1=deq_scale1, quant_scale1=quant_scale1, deq_scale2=deq_scale2)
    if no_keys(query, key):
        return of_no_keys(query, value, input_layout, num_heads, num_key_value_heads, False)[0]
    call = problem("npu_prompt_flash_attention", query, key, value, layout=input_layout, heads=num_heads, kv_heads=num_key_value_heads,
                   scale=scale_value, pse=pse_shift, mask=atten_mask, mode=sparse_mode, pre=pre_tokens, following=next_tokens,
                   q_lengths=actual_seq_lengths, kv_lengths=actual_seq_lengths_kv, block_table=None)
    return result(call, False, (quant_scale2, quant_offset2))[0]


@device_function
def npu_incre_flash_attention(
        query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Optional[Tensor] = None, atten_mask: Optional[Tensor] = None,
        pse_shift: Optional[Tensor] = None, actual_seq_lengths: Optional[Sequence[int]] = None, antiquant_scale: Optional[Tensor] = None,
        antiquant_offset: Optional[Tensor] = None, block_table: Optional[Tensor] = None, dequant_scale1: Optional[Tensor] = None,
        quant_scale1: Optional[Tensor] = None, dequant_scale2: Optional[Tensor] = None, quant_scale2: Optional[Tensor] = None,
        quant_offset2: Optional[Tensor] = None, kv_padding_size: Optional[Tensor] = None, num_heads: int = 1, scale_value: float = 1.0,
        input_layout: str = "BSH", num_key_value_heads: int = 0, block_size: int = 0, inner_precise: int = 1) -> Tensor:
    """Attention of one query of each sequence; actual_seq_lengths are those of the keys."""
    is_tensor("query", query)
    if padding_mask is not None:
        raise ValueError("padding_mask is given, but must be None: atten_mask hides keys")
    refuse_given("npu_incre_flash_attention", _INT8_PRODUCTS, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1,
                 dequant_scale2=dequant_scale2)
    layouts = {"BSH": 1, "BSND": 1, "BNSD": 2}
    if input_layout not in layouts:
        raise ValueError(f'input_layout is "{input_layout}", must be one of {", ".join(layouts)}')
    if query.dim() > layouts[input_layout] and query.shape[layouts[input_layout]] != 1:
        raise ValueError(f"query has {query.shape[layouts[input_layout]]} queries of a sequence, must have 1")
    if no_keys(query, key):
        return of_no_keys(query, _first(value), input_layout, num_heads, num_key_value_heads, False)[0]
    scales = joined_scales((antiquant_scale, antiquant_offset), 0, ())
    call = problem("npu_incre_flash_attention", query, key, value, layout=input_layout, heads=num_heads, kv_heads=num_key_value_heads,
                   scale=scale_value, pse=pse_shift, mask=atten_mask, mode=0, pre=2147483647, following=2147483647, q_lengths=None,
                   kv_lengths=actual_seq_lengths, block_table=block_table, block_size=block_size, scales=scales,
                   padding=(None, kv_padding_size))
    return result(call, False, (quant_scale2, quant_offset2))[0]

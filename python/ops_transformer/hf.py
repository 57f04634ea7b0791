"""Attention of the package transformers through ops_transformer, for models that it builds itself.

    import ops_transformer.hf

    ops_transformer.hf.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="ops_transformer")

Forward, backward and generate. Beside what torch's scaled_dot_product_attention does, the score cap of Gemma 2, the sinks of
gpt-oss, sliding windows and position biases (T5) are options of one call. No mask is made where a rule says the same: causal,
sliding window and full attention are rules, a padding mask stays [batch, 1, 1, kv_len]. What no rule says (packed sequences,
chunks, a static cache, a mask of the caller's own) is a bool mask [batch, 1, query_len, kv_len] as transformers makes it for
sdpa.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from .flash_attention import flash_attention

__all__ = ["attention_forward", "attention_mask", "register"]

_MAX_SEED = 2**63 - 1


def register(name: str = "ops_transformer") -> None:
    """Makes `name` an attn_implementation of transformers. Calling it twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# ---- masks -----------------------------------------------------------------------------------------------------------


def _is_sliding_causal(mask_function: Callable) -> bool:
    """Whether mask_function is what transformers' sliding_window_causal_mask_function makes: the intersection of a window and
    the causal rule, and of nothing else."""
    from transformers import masking_utils

    parts = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2:
        return False
    window, causal = parts[0]
    return (causal is masking_utils.causal_mask_function
            and getattr(window, "__qualname__", "").startswith(masking_utils.sliding_window_overlay.__name__ + "."))


def _layers_name_their_window(config: Any) -> bool:
    """Whether the model's layers pass sliding_window to the attention function, which those that support flash_attention_2
    have to. The others say it by the mask alone."""
    modeling = sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))
    return any(getattr(thing, "_supports_flash_attn", False) for thing in vars(modeling or object).values()
               if isinstance(thing, type))


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                   mask_function: Optional[Callable] = None, attention_mask: Optional[Tensor] = None,
                   config: Any = None, **options: Any) -> Optional[Tensor]:
    """The mask of attention_forward: None where a rule says all, bool [batch, 1, 1, kv_len] where a rule and padding do, else bool
    [batch, 1, q_length, kv_len]. True: visible. Called by transformers with its own arguments."""
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    # The last query stands at the last key: then the rules of attention_forward need no offsets. A static cache has more keys.
    aligned = (isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset + q_length == kv_offset + kv_length
               and not options.get("use_vmap", False))
    rule = mask_function is masking_utils.bidirectional_mask_function or (
        aligned and (mask_function is masking_utils.causal_mask_function
                     or (_is_sliding_causal(mask_function) and _layers_name_their_window(config))))
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if rule and (padding is None or _is_all(padding)):
        return None
    if rule and q_length > 1:
        return padding[:, None, None, kv_offset : kv_offset + kv_length]
    # A single query's mask is [batch, 1, 1, kv_len] too; it says everything, and attention_forward adds no rule to it.
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)


def _is_all(padding: Tensor) -> bool:
    # A compiled graph must not depend on what the mask holds.
    return not torch.compiler.is_compiling() and bool(padding.all())


# ---- attention -------------------------------------------------------------------------------------------------------


def _weights_are_wanted(module: torch.nn.Module, keywords: Dict[str, Any]) -> bool:
    """Whether the model's caller wants attention weights, by whichever way the wish comes here: passed on as a keyword; in the
    configuration, which models read themselves; or, where a model keeps the keyword to itself (GPT-2), by what transformers
    collects at this moment."""
    if "output_attentions" in keywords:
        return bool(keywords["output_attentions"])
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():  # a graph must not depend on what is collected now
        return False
    return any(name.endswith("attentions") for name in collector.get() or ())


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                      dropout: float = 0.0, scaling: Optional[float] = None, sliding_window: Optional[int] = None,
                      softcap: Optional[float] = None, is_causal: Optional[bool] = None, s_aux: Optional[Tensor] = None,
                      position_bias: Optional[Tensor] = None, **kwargs: Any) -> Tuple[Tensor, None]:
    """softcap(scaling query key^T) + position_bias, its softmax with the sinks s_aux, times value: [batch, query_len, heads, dim].

    query [batch, heads, query_len, dim]; key and value [batch, kv_heads, kv_len, ..]. attention_mask as this module's function of
    that name makes it, or a mask of the caller's own: bool (true: visible) or added to the scores. The rules of the layer (is_causal,
    or module.is_causal; sliding_window) hold where there is no mask, and beside one of [batch, 1, 1, kv_len].
    """
    if _weights_are_wanted(module, kwargs):
        warnings.warn("ops_transformer: attention weights are not kept, so output_attentions=True gives None for them; "
                      'attn_implementation="eager" has them', stacklevel=2)
    options: dict = {}
    if scaling is not None:
        options["softmax_scale"] = scaling
    if softcap:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sinks"] = s_aux.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    if dropout > 0:
        options.update(keep_prob=1 - dropout, seed=int(torch.randint(_MAX_SEED, (), device="cpu")))

    query_len = query.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None or (attention_mask.shape[2] == 1 and query_len > 1):
        # One query at the end sees every key before it.
        options["causal"], options["alignment"] = causal and query_len > 1, "bottom_right"
        if causal and sliding_window is not None:
            options["window_left"] = sliding_window - 1
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype == torch.bool:
            options["mask"] = attention_mask
        else:
            options["bias"] = attention_mask
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]]
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    if "bias" in options and options["bias"].dtype not in (torch.float32, query.dtype):
        options["bias"] = options["bias"].to(torch.float32)
    out = flash_attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None

"""One list of the library's options, and that each is reachable from Python or named as not.

The structs are read from include/opst: a new field that is not in the list fails here.
"""

import importlib
import inspect
import operator
import pathlib
import re

import pytest

from ops_transformer import _attention, _paged_attention, flash_attention

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "include" / "opst"
SCORE, GRAD, PLAIN = ("flash_attention.flash_attention_score", "flash_attention.flash_attention_grad",
                      "flash_attention.flash_attention")
PAGED, MERGE = "kv_cache.paged_attention", "flash_attention.merge_attention"
INDEXER, SPARSE = "flash_attention.lightning_indexer", "flash_attention.sparse_flash_attention"
PATTERN = "flash_attention.BlockMask.from_pattern"
MORE = {SCORE: flash_attention._SCORE_OPTIONS, GRAD: flash_attention._SCORE_OPTIONS, PLAIN: flash_attention._PLAIN_OPTIONS,
        PAGED: _paged_attention._OPTIONS}


def by_name(*functions):
    return lambda field: [(function, field) for function in functions]


def named(name, *functions):
    return lambda field: [(function, name) for function in functions]


EVERYWHERE = by_name(SCORE, GRAD, PLAIN, PAGED)
RESULT = "a result: the function gives all of them back"
GRAPH = "graphs of operators are not in Python"
LAYER = "moe.moe_layer"
PRODUCTS = [f"mc2.{name}" for name in ("matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter",
                                       "matmul_all_reduce")]
SUMS, HEADS = PRODUCTS[3:], ("mc2.sequence_to_heads", "mc2.heads_to_sequence")
RING = ("mc2.ring_attention_forward", "mc2.ring_attention_backward")
DISPATCH, COMBINE, SHARED_LAYER = "mc2.moe_dispatch", "mc2.moe_combine", "mc2.moe_layer_forward"
GROUPED = ("mc2.all_to_allv_grouped_matmul", "mc2.grouped_matmul_all_to_allv")
TO_FFN, TO_ATTENTION = "mc2.attention_to_ffn", "mc2.ffn_to_attention"


def each(names, where):
    return {name: where for name in names.split()}

# struct -> field -> where it is, or why it is nowhere.
LIST = {
    "AttentionInputs": {
        "query": by_name(SCORE, GRAD, PAGED), "key": by_name(SCORE, GRAD), "value": by_name(SCORE, GRAD),
        "block_table": by_name(PAGED), "kv_lengths": EVERYWHERE,
        "key_scales": named("key_cache", PAGED), "value_scales": named("value_cache", PAGED),
        "key_offsets": named("key_cache", PAGED), "value_offsets": named("value_cache", PAGED),
        "cu_seqlens_q": by_name(PLAIN), "cu_seqlens_k": by_name(PLAIN), "prefix": EVERYWHERE, "mask": EVERYWHERE,
        "bias": EVERYWHERE, "alibi_slopes": EVERYWHERE, "sinks": EVERYWHERE, "drop_mask": EVERYWHERE,
        "block_mask": EVERYWHERE, "tree_mask": by_name(PLAIN, PAGED),
        "sparse_indices": by_name(PAGED, SPARSE), **each("query_rope key_rope", by_name(PLAIN, PAGED, SPARSE))},
    "BlockMask": each("row_offsets columns block_q block_kv", by_name("flash_attention.BlockMask")),
    "BlockPattern": {**each("query_len kv_len block_q block_kv heads alignment causal window_left window_right dilation stride "
                            "random seed documents", by_name(PATTERN)), "global": named("global_tokens", PATTERN)},
    "AttentionOutputs": {
        "out": by_name(PAGED, MERGE), "softmax_lse": named("return_lse", PLAIN, PAGED),
        "softmax_max": named("return_statistics", PAGED), "softmax_sum": named("return_statistics", PAGED)},
    "DropoutOptions": {name: EVERYWHERE for name in ("keep_prob", "seed", "offset", "first_query", "first_key", "first_head",
                                                     "total_heads")},
    "AttentionOptions": {
        "softmax_scale": lambda field: [(SCORE, "scale_value"), (GRAD, "scale_value"), (PLAIN, field), (PAGED, "scale_value")],
        "causal": by_name(PLAIN, PAGED), "alignment": EVERYWHERE, "path": EVERYWHERE, "block_q": EVERYWHERE,
        "block_kv": EVERYWHERE,
        "window_left": lambda field: [(SCORE, "pre_tokens"), (GRAD, "pre_tokens"), (PLAIN, field), (PAGED, field)],
        "window_right": lambda field: [(SCORE, "next_tokens"), (GRAD, "next_tokens"), (PLAIN, field), (PAGED, field)],
        "softcap": EVERYWHERE, "bias_scale": EVERYWHERE, "alibi_form": EVERYWHERE, "alibi_query_start": EVERYWHERE,
        "alibi_key_start": EVERYWHERE, "page_layout": named("layout", PAGED, SPARSE), "shared_prefix": by_name(PAGED),
        "dropout": lambda field: [(PLAIN, "keep_prob")]},
    "AttentionParts": {"out": named("attention_out", MERGE), "softmax_lse": by_name(MERGE), "softmax_max": by_name(MERGE),
                       "softmax_sum": by_name(MERGE)},
    "AttentionSaved": {"out": named("attention_out", GRAD), "softmax_lse": by_name(GRAD), "softmax_max": by_name(GRAD),
                       "softmax_sum": by_name(GRAD), "grad_out": by_name(GRAD), "grad_lse": by_name(GRAD)},
    "AttentionGradients": {**{name: named("wanted", GRAD) for name in ("grad_query", "grad_key", "grad_value", "grad_bias",
                                                                       "grad_sinks")},
                           "grad_query_rope": named("query_rope", SPARSE), "grad_key_rope": named("key_rope", SPARSE)},
    "LightningIndexerInputs": each("query key weights block_table kv_lengths query_lengths cu_seqlens_q cu_seqlens_k",
                                   by_name(INDEXER)),
    "LightningIndexerOutputs": {"indices": RESULT, "values": named("return_values", INDEXER)},
    "LightningIndexerOptions": each("causal block_q block_kv", by_name(INDEXER)),
    "MatmulOptions": {**each("bias activation residual batch_invariant out_scales", by_name("matmul.matmul")),
                      "activations": named("int8_activations", "matmul.matmul")},
    "IntMatmulOptions": each("x_scales bias activation residual out_scales", by_name("matmul.matmul_int")),
    "MatmulGradients": each("x weight bias", RESULT),
    "QuantizeOptions": {"zeros": by_name("quant.quantize"), "scales_given": named("scales", "quant.quantize")},
    "DynamicQuantOptions": {"smooth_scales": by_name("quant.dynamic_quant")},
    "RmsNormOptions": {"eps": by_name("rowwise.rms_norm", "rowwise.add_rms_norm"),
                       "rstd": named("return_rstd", "rowwise.rms_norm", "rowwise.add_rms_norm")},
    "RmsNormBackwardOptions": each("eps grad_sum", by_name("rowwise.rms_norm_backward")),
    "LayerNormOptions": {**each("eps weight bias", by_name("rowwise.layer_norm")),
                         **each("mean rstd", named("return_statistics", "rowwise.layer_norm"))},
    "NormGradients": each("x weight bias", RESULT),
    "SoftmaxOptions": {"scale": by_name("rowwise.softmax", "rowwise.softmax_backward")},
    "RopeTableOptions": each("theta sections", by_name("rowwise.rope_table")),
    "RopeOptions": each("style inverse", by_name("rowwise.rope")),
    "RopeCachedOptions": each("style inverse sections", by_name("rowwise.rope_cached")),
    "SwigluOptions": {"swapped": by_name("rowwise.swiglu", "rowwise.swiglu_backward")},
    "ScatterOptions": {**each("layout scales_given", by_name("kv_cache.scatter_pa_kv_cache")),
                       "scales": named("key_cache", "kv_cache.scatter_pa_kv_cache")},
    "RopeScatterInputs": each("query key value cos sin slot_mapping query_weight key_weight",
                              by_name("kv_cache.rope_scatter_pa_kv_cache")),
    "RopeScatterOptions": {**each("layout style eps scales_given", by_name("kv_cache.rope_scatter_pa_kv_cache")),
                           "scales": named("key_cache", "kv_cache.rope_scatter_pa_kv_cache")},
    "ConvertPagesOptions": {"from": named("from_layout", "kv_cache.convert_pages"),
                            "to": named("to_layout", "kv_cache.convert_pages"),
                            "from_scales": named("from_key", "kv_cache.convert_pages"),
                            "to_scales": named("to_key", "kv_cache.convert_pages")},
    "GatherOptions": {**each("layout cumulative_lengths seq_offset head_indices zero_fill",
                             by_name("kv_cache.gather_pa_kv_cache")),
                      "scales": named("key_cache", "kv_cache.gather_pa_kv_cache")},
    "MoeGatingInputs": each("logits bias finished", by_name("moe.moe_gating")),
    "MoeGatingOutputs": {**each("topk_ids topk_weights", RESULT), "scores": named("return_scores", "moe.moe_gating")},
    "MoeGatingOptions": {**each("scores renormalise routed_scaling_factor eps", by_name("moe.moe_gating", "moe.moe_gating_backward")),
                         **each("num_groups kept_groups group_score nan_is_error", by_name("moe.moe_gating"))},
    "MoeGatingBackwardInputs": each("logits topk_ids grad_topk_weights grad_scores", by_name("moe.moe_gating_backward")),
    "MoeRoutingOutputs": each("row_of_slot slot_of_row expert_tokens", RESULT),
    "MoeRoutingOptions": each("capacity expert_begin expert_end cumulative_ends", by_name("moe.moe_routing")),
    "MoeFinalizeInputs": {**each("expanded row_of_slot topk_weights bias topk_ids",
                                 by_name("moe.moe_finalize", "moe.moe_finalize_backward")),
                          **each("skip1 skip2", by_name("moe.moe_finalize"))},
    "MoeFinalizeGradients": each("expanded topk_weights bias", RESULT),
    "GroupedMatmulOptions": {**each("bias activation residual batch_invariant x_scales out_scales smooth_scales",
                                    by_name("matmul.grouped_matmul")),
                             "activations": named("int8_activations", "matmul.grouped_matmul")},
    "GroupedSwigluQuantOptions": each("bias smooth_scales", by_name("matmul.grouped_matmul_swiglu_quant")),
    "ContextOptions": {"num_threads": by_name("_core.Context"),
                       "isa": by_name("_core.Context"),
                       **each("cache bf16_product", "for tests and benches; OPST_BF16 sets the product for a process"),
                       **each("interrupted", "every Context asks Python for signals")},
    "MatmulNodeOptions": each("bias activation residual dtype activations", GRAPH),
    "MoeLayerNodeOptions": each("top_k gating activations", GRAPH),
    "MoeLayerInputs": {**each("x logits gate_bias finished topk_ids topk_weights residual", by_name(LAYER)),
                       "experts": lambda field: [(LAYER, "gate_up"), (LAYER, "down")],
                       "shared": lambda field: [(LAYER, "shared_gate_up"), (LAYER, "shared_down")]},
    "MoeExperts": {**each("gate_up down gate_up_bias down_bias", by_name(LAYER, "moe.moe_layer_backward")), "up": by_name(LAYER)},
    "MoeSharedExpert": {name: named(f"shared_{name}", LAYER) for name in ("gate_up", "down", "up", "gate")},
    "MoeLayerOutputs": {"out": by_name(LAYER), **each("topk_ids topk_weights expert_tokens", named("return_routes", LAYER))},
    "MoeLayerOptions": {**each("top_k activation batch_invariant num_experts expert_begin expert_end", by_name(LAYER)),
                        "activations": named("int8_activations", LAYER),
                        "gating": lambda field: [(LAYER, name) for name in fields_of("MoeGatingOptions")]},
    "MoeLayerGradients": each("x logits topk_weights gate_up down gate_up_bias down_bias shared_gate_up shared_down shared_gate", RESULT),
    "CommunicatorOptions": {"timeout_seconds": by_name("mc2.create_threads", "mc2.join", "mc2.from_group", "mc2.from_mpi4py"),
                            "staging_bytes": by_name("mc2.create_threads", "mc2.create_memory", "mc2.from_group", "mc2.from_mpi4py"),
                            "shared_bytes": by_name("mc2.create_memory", "mc2.from_group", "mc2.from_mpi4py"),
                            "direct_stores": by_name("mc2.create_threads", "mc2.join", "mc2.from_group", "mc2.from_mpi4py")},
    "Mc2Options": {"bias": by_name(*PRODUCTS), "x_scales": by_name(PRODUCTS[0], *PRODUCTS[2:]), "residual": by_name(*SUMS),
                   "activations": named("int8_activations", *PRODUCTS), "rows": by_name(*PRODUCTS[:4]),
                   "inputs": by_name(PRODUCTS[1]), "exchanged": by_name(*PRODUCTS[1:3]), "tile_rows": by_name(*PRODUCTS)},
    "HeadShardOptions": each("rows heads tile_rows", by_name(*HEADS)),
    "RingAttentionOptions": each("softmax_scale causal window_left window_right softcap order rows tile_rows", by_name(*RING)),
    "RingAttentionInputs": each("query key value", by_name(*RING)),
    "ExpertShardOptions": each("experts tile_rows", by_name(DISPATCH, COMBINE, SHARED_LAYER, *GROUPED)),
    "MoeDispatchOutputs": {"rows": named("out", DISPATCH, TO_FFN), **each("expert_tokens rank_tokens", RESULT)},
    "MoeCombineInputs": each("rows topk_ids topk_weights residual", by_name(COMBINE, TO_ATTENTION)),
    "GroupedExchangeOptions": {"shards": named("experts", *GROUPED), "bias": by_name(*GROUPED),
                               "activations": named("int8_activations", *GROUPED),
                               **each("activation x_scales exchanged", by_name(GROUPED[0]))},
    "AttentionFfnOptions": each("attention_ranks num_experts experts tile_rows", by_name(TO_FFN, TO_ATTENTION)),
    "AttentionToFfnInputs": each("x topk_ids weight bias", by_name(TO_FFN)),
    "FfnToAttentionInputs": {"combine": named("rows", TO_ATTENTION), **each("weight bias", by_name(TO_ATTENTION))},
    "LayerNormNodeOptions": each("eps weight bias", GRAPH),
}


def fields_of(struct):
    """Names of a struct's fields, from the headers."""
    for header in sorted(HEADERS.glob("*.h")):
        found = re.search(rf"^struct {struct} {{\n(.*?)^}};", header.read_text(encoding="utf-8"), re.M | re.S)
        if found:
            body = re.sub(r"//.*", "", found.group(1))
            return [name for statement in body.split(";") if "(" not in statement.split("=")[0]
                    for name in re.findall(r"(?:[>\w]\s+|,\s*)(\w+)\s*(?==|$|,)", re.sub(r"=\s*(\{.*?\}|[^,]*)", "=",
                                                                                         statement.strip()))]
    raise AssertionError(f"no struct {struct} in include/opst")


def test_the_parser_reads_fields():
    assert fields_of("AttentionSaved") == ["out", "softmax_lse", "softmax_max", "softmax_sum", "grad_out", "grad_lse"]
    assert len(fields_of("AttentionOptions")) == 16 and fields_of("LayerNormNodeOptions") == ["eps", "weight", "bias"]


@pytest.mark.parametrize("struct", LIST)
def test_every_option_is_reachable_or_named_as_not(struct):
    assert sorted(fields_of(struct)) == sorted(LIST[struct])
    for field, where in LIST[struct].items():
        if isinstance(where, str):
            continue
        for function, parameter in where(field):
            assert parameter in parameters_of(function), f"{struct}.{field}: {function} lacks {parameter}"


def parameters_of(function):
    module, name = function.split(".", 1)
    found = operator.attrgetter(name)(importlib.import_module(f"ops_transformer.{module}"))
    if isinstance(found, type) and not hasattr(found, "_fields"):  # of the extension module, whose signatures are in its texts
        return re.findall(r"(\w+):", found.__init__.__doc__)
    return (*inspect.signature(found).parameters, *MORE.get(function, ()))


def test_every_struct_of_options_is_in_the_list():
    kinds = "Options|Inputs|Outputs|Gradients|Saved|Parts|Pattern|BlockMask|Experts?"
    found = {name for header in HEADERS.glob("*.h")
             for name in re.findall(rf"^struct (\w*(?:{kinds})) {{", header.read_text("utf-8"), re.M)}
    assert found == set(LIST)


def test_options_and_tensors_of_a_call_are_those_of_the_core():
    dropout = set(fields_of("DropoutOptions"))
    mask = {f"block_mask_{name}" for name in fields_of("BlockMask")}
    sizes = {f"block_mask_{name}" for name in ("block_q", "block_kv")}
    sizes_of_lists = {"sparse_block_size"}
    assert set(_attention.Options._fields) == (set(fields_of("AttentionOptions")) - {"dropout"}) | dropout | sizes | sizes_of_lists
    assert set(_attention.Tensors._fields) == (set(fields_of("AttentionInputs")) - {"block_mask"}) | (mask - sizes)

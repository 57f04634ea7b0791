"""The device's own limits, which strict calls check: one function for each family, by the names of the arguments."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

import torch
from torch import Tensor

from ._arguments import LARGEST, head_dim_of, kv_heads_of, lengths_of, totals

Arguments = Dict[str, Any]
LIMITS: Dict[str, Callable[[str, Arguments], None]] = {}
_HALVES = (torch.float16, torch.bfloat16)


def _limits(*names: str) -> Callable[[Callable[[str, Arguments], None]], Callable[[str, Arguments], None]]:
    def register(function: Callable[[str, Arguments], None]) -> Callable[[str, Arguments], None]:
        for name in names:
            LIMITS[name] = function
        return function

    return register


def _refuse(what: str, got: Any, limit: str) -> None:
    raise ValueError(f"strict: {what} is {got}, but the device takes {limit}")


def _span(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _refuse(what, value, f"{low} to {high}")


def _multiple(what: str, value: int, of: int) -> None:
    if value % of:
        _refuse(what, value, f"multiples of {of}")


def _dtypes(name: str, tensor: Any, allowed: Sequence[torch.dtype]) -> None:
    if isinstance(tensor, Tensor) and tensor.dtype not in allowed:
        _refuse(f"the dtype of {name}", tensor.dtype, " or ".join(str(dtype) for dtype in allowed))


def _one_of(what: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        _refuse(what, value, "one of " + ", ".join(map(str, allowed)))


def _upper_triangle(name: str, mask: Tensor, shapes: Sequence[Sequence[int]]) -> None:
    """A compressed mask: its shape, and that its strict upper triangle is what it hides."""
    if list(mask.shape) not in [list(shape) for shape in shapes]:
        _refuse(f"the shape of {name}", list(mask.shape), "a mask of 2048 x 2048 in this sparse_mode")
    square = mask.reshape(2048, 2048).bool()
    if not bool((square == torch.ones_like(square).triu(1)).all()):
        raise ValueError(f"strict: {name} is not 1 on its strict upper triangle and 0 elsewhere, but the device takes that one alone in "
                         "this sparse_mode (1 hides)")


@_limits("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3", "npu_fusion_attention_grad",
         "npu_fusion_attention_grad_v2", "npu_fusion_attention_grad_v3")
def _training(name: str, a: Arguments) -> None:
    query, key, value, layout, heads = a["query"], a["key"], a["value"], a["input_layout"], a["head_num"]
    for what in ("query", "key", "value"):
        _dtypes(what, a[what], (*_HALVES, torch.float32))
    if not query.dtype == key.dtype == value.dtype:
        _refuse("the dtype of key and value", f"{key.dtype} and {value.dtype}", f"that of query, {query.dtype}")
    if layout not in ("BSH", "SBH", "BSND", "BNSD", "TND"):
        return
    dim = head_dim_of(query, layout, heads)
    _span("head_num", heads, 1, 256)
    _span("D of query", dim, 1, 768)
    kv_heads = kv_heads_of(key, layout, dim)
    value_dim = value.shape[-1] // kv_heads if "H" in layout else value.shape[-1]
    if value_dim > dim:
        _refuse("D of value", value_dim, f"at most that of key, {dim}")
    if kv_heads < 1 or heads % kv_heads:
        _refuse("head_num", heads, f"multiples of the {kv_heads} heads of key")
    if layout == "TND":
        _span("the sequences of actual_seq_qlen", len(a["actual_seq_qlen"] if a["actual_seq_qlen"] is not None else ()), 1, 2048)
        _span("T of query", query.shape[0], 1, 2**20)
    else:
        _span("B", query.shape[layout.index("B")], 1, 2 * 2**20)
        for what in ("query", "key"):
            _span(f"S of {what}", a[what].shape[layout.index("S")], 1, 2**20)
    mask, mode = a["atten_mask"], a["sparse_mode"]
    if mask is not None:
        _dtypes("atten_mask", mask, (torch.bool, torch.uint8))
        if mode in (2, 3, 4, 7, 8):
            _upper_triangle("atten_mask", mask, ((2048, 2048),))
        elif mode == 6 and list(mask.shape) != [3072, 2048]:
            _refuse("the shape of atten_mask", list(mask.shape), "[3072, 2048] in sparse_mode 6")
        elif mode in (0, 1) and layout != "TND":
            sizes = query.shape[layout.index("S")], key.shape[layout.index("S")]
            batch = query.shape[layout.index("B")]
            _one_of("the shape of atten_mask", tuple(mask.shape), ((batch, heads, *sizes), (batch, 1, *sizes), (1, 1, *sizes), sizes))
        elif mode in (0, 1):
            longest = [max(column) for column in zip(*_sizes(a))]
            if list(mask.shape) != longest:
                _refuse("the shape of atten_mask", list(mask.shape), f"{longest} in TND, the longest queries and keys")
        if mode in (0, 4, 7, 8):
            _window(a, mode)
    if mask is not None and mode in (5, 6):
        _prefix(a, mode)
    if a["pse"] is not None and layout == "TND" and any(0 in pair for pair in _sizes(a)):
        _refuse("pse", "given beside a sequence of no tokens", "none there")


def _prefix(a: Arguments, mode: int) -> None:
    """Columns that all rows see, of every sequence: below the diagonal of its first row they would change nothing."""
    layout, prefix = a["input_layout"], a["prefix"] if a["prefix"] is not None else ()
    if mode == 5 and layout == "TND":
        _refuse("input_layout", layout, "others in sparse_mode 5")
    _span("the length of prefix", len(prefix), 1, 32)
    for i, (columns, (queries, keys)) in enumerate(zip(prefix, _sizes(a) * (1 if layout == "TND" else len(prefix)))):
        _span(f"the prefix of sequence {i}", columns, 0 if queries > keys else keys - queries, keys)


def _sizes(a: Arguments) -> List[Tuple[int, int]]:
    """(queries, keys) of every sequence of TND, or the one pair of the others."""
    layout = a["input_layout"]
    if layout == "TND":
        return list(zip(*(lengths_of(totals(name, a[name])) for name in ("actual_seq_qlen", "actual_seq_kvlen"))))
    queries, keys = (a[name].shape[layout.index("S")] for name in ("query", "key"))
    return [(queries, keys)]


def _window(a: Arguments, mode: int) -> None:
    """Sides of a band that are negative, or too short for the modes 7 and 8, as section 1.1 has it of every sequence."""
    first, second = ("pre_tockens", "next_tockens") if "pre_tockens" in a else ("pre_tokens", "next_tokens")
    pre, following = a[first], a[second]
    sizes = [pair for pair in _sizes(a) if 0 not in pair]
    if pre + following < 0:
        _refuse(f"{first} + {second}", pre + following, "sums from 0 on")
    for queries, keys in sizes if mode == 0 else sizes[-1:] if mode == 7 else sizes[:1] if mode == 8 else ():
        if mode == 0 and pre <= -queries:
            _refuse(first, pre, f"more than -{queries}, where a sequence has {queries} queries")
        if mode == 0 and following <= -keys:
            _refuse(second, following, f"more than -{keys}, where a sequence has {keys} keys")
        if mode in (7, 8) and pre < keys:
            _refuse(first, pre, f"{keys} or more in sparse_mode {mode}, where the band's sequence has {keys} keys")
        if mode == 7 and following > 0:
            _refuse(second, following, "0 or less in sparse_mode 7")


_PRE = ("pre_tokens", "next_tokens")


@_limits("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2", "npu_prompt_flash_attention", "npu_incre_flash_attention")
def _inference(name: str, a: Arguments) -> None:
    query, key = a["query"], a["key"]
    first = key[0] if isinstance(key, (list, tuple)) else key
    heads = a["num_query_heads"] if "num_query_heads" in a else a["num_heads"]
    kv_heads = a["num_key_value_heads"] or heads
    layout = a["input_layout"].partition("_")[0]
    _dtypes("query", query, (*_HALVES, torch.int8))
    _dtypes("key", first, (*_HALVES, torch.int8, torch.int32))
    for what, tensor in (("query", query), ("key", first)):
        if not tensor.is_contiguous():
            _refuse(what, f"of strides {list(tensor.stride())}", "contiguous tensors")
    _span("the heads of query", heads, 1, 256)
    _multiple("the heads of query", heads, max(kv_heads, 1))
    _span("the query heads of a key head", heads // max(kv_heads, 1), 1, 64)
    if layout in ("BSH", "BSND", "BNSD", "TND", "NTD"):
        dim = head_dim_of(query, layout, heads)
        _span("D", dim, 1, 512)
        batch = 1 if layout in ("TND", "NTD") else query.shape[0]
        _span("B", batch, 1, 128 if dim % 16 else 65536)
    mask, mode = a.get("atten_mask"), a.get("sparse_mode", 0)
    if mask is not None:
        _dtypes("atten_mask", mask, (torch.bool, torch.uint8, torch.int8))
        if mode in (2, 3, 4):
            _upper_triangle("atten_mask", mask, ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)))
    if a.get("block_table") is not None:
        _dtypes("block_table", a["block_table"], (torch.int32,))
        size = a["block_size"]
        _span("block_size", size, 16, 512)
        _multiple("block_size", size, 16)
    for what in _PRE:
        if abs(a.get(what, 0)) > LARGEST:
            _refuse(what, a[what], "integers of 32 bits")
    _of_small_integers(a, first, layout)
    if mask is not None and layout in ("BSH", "BSND", "BNSD") and not isinstance(key, (list, tuple)) and a.get("block_table") is None:
        axis = layout.index("S")
        _int8_results(a, query.shape[axis], first.shape[axis])


def _of_small_integers(a: Arguments, key: Tensor, layout: str) -> None:
    """How int8 and int4 keys and values are scaled."""
    first, second = ("key_quant_mode", "value_quant_mode") if "key_quant_mode" in a else ("key_antiquant_mode", "value_antiquant_mode")
    if key.dtype not in (torch.int8, torch.int32) or first not in a or layout not in ("BSH", "BSND", "BNSD"):
        return
    modes = a[first], a[second]
    if modes[0] != modes[1] and modes != (0, 1):
        _refuse(second, modes[1], f"that of key, {modes[0]}" + (", or 1" if modes[0] == 0 else ""))
    if a["query"].shape[layout.index("S")] > 1 and modes[0] > 1:
        _refuse(first, modes[0], "0 or 1 for more than one query")


def _int8_results(a: Arguments, queries: int, keys: int) -> None:
    """An output scale beside rows that see no key: no offset, and no side below 0 in mode 4."""
    scale, offset = ("quant_scale_out", "quant_offset_out") if "quant_scale_out" in a else ("quant_scale2", "quant_offset2")
    mode, pre, following = a.get("sparse_mode", 0), a.get("pre_tokens", LARGEST), a.get("next_tokens", LARGEST)
    if a.get(scale) is None:
        return
    if mode == 4 and min(pre, following) < 0:
        _refuse("pre_tokens or next_tokens", min(pre, following), f"0 or more in sparse_mode 4 beside {scale}")
    some_row_is_empty = {0: queries - keys - pre > 0 or following < 0, 3: keys < queries, 4: following + keys - queries < 0}
    if a.get(offset) is not None and some_row_is_empty.get(mode, False):
        _refuse(offset, "given where a row sees no key", "none there")


@_limits("npu_sparse_flash_attention")
def _sparse(name: str, a: Arguments) -> None:
    _dtypes("query", a["query"], _HALVES)
    if a["query"].shape[-1] != 512:
        _refuse("D of query", a["query"].shape[-1], "512 (beside ropes of 64)")
    _one_of("the heads of query", a["query"].shape[-2], (1, 2, 4, 8, 16, 32, 64, 128))
    _one_of("sparse_block_size", a["sparse_block_size"], (1, 2, 4, 8, 16, 32, 64, 128))


@_limits("npu_lightning_indexer")
def _indexer(name: str, a: Arguments) -> None:
    _dtypes("query", a["query"], _HALVES)
    if a["query"].shape[-1] != 128:
        _refuse("D of query", a["query"].shape[-1], "128")
    _span("the heads of query", a["query"].shape[-2], 1, 64)
    if not 1 <= a["sparse_count"] <= 2048:
        _one_of("sparse_count", a["sparse_count"], range(3072, 8193, 1024))


@_limits("npu_block_sparse_attention")
def _blocks(name: str, a: Arguments) -> None:
    _dtypes("query", a["query"], _HALVES)
    _one_of("D of query", a["query"].shape[-1], (64, 128))
    _multiple("the key columns of block_shape", a["block_shape"][1], 128)
    if a["query"].dtype == torch.bfloat16 and a["inner_precise"] != 0:
        _refuse("inner_precise", a["inner_precise"], "0 with bfloat16")


@_limits("npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k_softmax_v2")
def _gating(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], (*_HALVES, torch.float32))
    _span("k", a["k"], 1, min(a["x"].shape[-1], 1024))


@_limits("npu_moe_gating_top_k")
def _gating_groups(name: str, a: Arguments) -> None:
    experts, groups = a["x"].shape[-1], a["group_count"]
    _span("the experts of x", experts, 1, 2048)
    _multiple("the experts of x", experts, groups)
    each = experts // groups
    if each <= 2:
        _refuse("the experts of a group", each, "more than 2")
    _span("the experts of all groups, each rounded up to 32", (each + 31) // 32 * 32 * groups, 1, 2048)
    _span("k", a["k"], 1, a["k_group"] * each)


@_limits("npu_moe_compute_expert_tokens")
def _expert_tokens(name: str, a: Arguments) -> None:
    _dtypes("sorted_expert_for_source_row", a["sorted_expert_for_source_row"], (torch.int32,))
    _span("num_expert", a["num_expert"], 1, 2048)


@_limits("npu_moe_init_routing_v2", "npu_moe_init_routing_quant")
def _routing(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], (*_HALVES, torch.float32, torch.int8))
    _dtypes("expert_idx", a["expert_idx"], (torch.int32,))
    _span("expert_num", a["expert_num"], 1, 5120 if a.get("expert_tokens_num_type") == 2 else 10240)
    start, end = a.get("active_expert_range") or (0, a["expert_num"])
    if not 0 <= start <= end <= a["expert_num"]:
        _refuse("active_expert_range", [start, end], f"parts of 0 to expert_num = {a['expert_num']}")
    if a["drop_pad_mode"] == 1:
        _span("expert_capacity", a["expert_capacity"], 1, a["x"].shape[0] - 1)


@_limits("npu_grouped_matmul")
def _groups(name: str, a: Arguments) -> None:
    for what in ("x", "weight"):
        _span(f"the tensors of {what}", len(a[what]), 1, 128)
        for tensor in a[what]:
            _dtypes(what, tensor, (*_HALVES, torch.float32, torch.int8, torch.int32))
            _span(f"the last dimension of {what}", tensor.shape[-1], 1, 65535)
    if isinstance(a["group_list"], Tensor):
        _dtypes("group_list", a["group_list"], (torch.int64,))
        _span("the groups", a["group_list"].shape[0], 1, 1024)


@_limits("npu_moe_re_routing")
def _re_routing(name: str, a: Arguments) -> None:
    _dtypes("tokens", a["tokens"], (*_HALVES, torch.int8))
    _span("H of tokens", a["tokens"].shape[-1], 1, 16383)


@_limits("npu_grouped_matmul_swiglu_quant", "npu_grouped_matmul_swiglu_quant_v2")
def _gated_groups(name: str, a: Arguments) -> None:
    weight = a["weight"] if isinstance(a["weight"], Tensor) else a["weight"][0]
    for what, tensor in (("x", a["x"]), ("weight", weight)):
        _dtypes(what, tensor, (torch.int8,))
    _span("N of weight", weight.shape[-1], 1, 10240)
    _span("K of x", a["x"].shape[-1], 1, 65535)
    _span("the groups", weight.shape[0], 1, 1024)


@_limits("npu_grouped_matmul_finalize_routing")
def _added_groups(name: str, a: Arguments) -> None:
    _span("the rows of x", a["x"].shape[0], 1, 131072)
    experts, k, n = a["w"].shape
    _span("the experts of w", experts, 1, 256)
    _multiple("k of w", k, 16)
    _multiple("n of w", n, 32)
    if n < 256:
        _refuse("n of w", n, "256 or more")
    if a["shared_input"] is not None:
        _span("the rows of shared_input", a["shared_input"].shape[0], 1, 2048)


@_limits("npu_ffn")
def _blocks_of_experts(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], (*_HALVES, torch.int8))
    first, second = a["weight1"].shape[-2], a["weight2"].shape[-2]
    _span("K of weight1", first, 1, 65535)
    _span("K of weight2", second, 1, 65535)
    if a["weight2"].shape[-1] != first:
        _refuse("N of weight2", a["weight2"].shape[-1], f"K of weight1, {first}")
    for what in ("expert_tokens", "expert_tokens_index"):
        if a[what] is not None:
            _span(f"the length of {what}", len(a[what]), 1, 256)


@_limits("npu_dequant_swiglu_quant")
def _dequantised_gate(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], (*_HALVES, torch.int32))
    if a["x"].dtype == torch.int32 and a["activation_scale"] is None:
        _refuse("activation_scale", None, "one for each row of an int32 x")
    if a["group_index"] is not None:
        _dtypes("group_index", a["group_index"], (torch.int64,))
        _span("2H", a["x"].shape[-1], 2, 2 * 10496)
        _multiple("2H", a["x"].shape[-1], 64)


@_limits("npu_swiglu_quant")
def _gate_quant(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], (*_HALVES, torch.float32))
    _span("the last dimension of x", a["x"].shape[-1], 2, 8192)
    if a["dst_type"] is not None and a["dst_type"] is getattr(torch, "quint4x2", None):
        _multiple("the last dimension of x", a["x"].shape[-1], 4)


@_limits("npu_dynamic_quant")
def _quant(name: str, a: Arguments) -> None:
    _dtypes("input", a["input"], _HALVES)
    if a["input"].dim() < 2:
        _refuse("the dimensions of input", a["input"].dim(), "2 or more")


@_limits("npu_quant_matmul")
def _quant_product(name: str, a: Arguments) -> None:
    for what in ("x1", "x2", "scale"):
        if a[what].numel() == 0:
            _refuse(what, list(a[what].shape), "no empty tensors")
        if what != "scale":
            _span(f"the last dimension of {what}", a[what].shape[-1], 1, 65535)


@_limits("npu_swiglu")
def _gate(name: str, a: Arguments) -> None:
    if a["self"].numel() == 0:
        _refuse("self", list(a["self"].shape), "no empty tensors")


@_limits("npu_interleave_rope")
def _dealt_rotary(name: str, a: Arguments) -> None:
    _dtypes("x", a["x"], _HALVES)
    _one_of("D", a["x"].shape[-1], (64,))


@_limits("npu_mrope")
def _rotary_of_positions(name: str, a: Arguments) -> None:
    step = 16 if a["query"].dtype == torch.float32 else 32
    _multiple("head_size", a["head_size"], step)
    _multiple("rotary_dim of cos_sin_cache", a["cos_sin_cache"].shape[-1], step)


@_limits("npu_rotary_mul")
def _rotary(name: str, a: Arguments) -> None:
    _span("D", a["self"].shape[-1], 2, 894)


@_limits("npu_apply_rotary_pos_emb")
def _rotary_pair(name: str, a: Arguments) -> None:
    _one_of("D", a["query"].shape[-1], (64, 128))


@_limits("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2", "npu_kv_rmsnorm_rope_cache_v2_functional")
def _latent(name: str, a: Arguments) -> None:
    _one_of("the columns of kv", a["kv"].shape[-1], (576,) if a["v"] is None else (192,))


@_limits("npu_attention_update")
def _update(name: str, a: Arguments) -> None:
    _span("the parts", len(a["lse"]), 1, 16)
    width = a["local_out"][0].shape[-1]
    _span("H", width, 8, 512)
    _multiple("H", width, 8)


@_limits("npu_mm_all_reduce_base", "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base", "npu_matmul_all_to_all", "npu_all_to_all_matmul")
def _over_ranks(name: str, a: Arguments) -> None:
    x = a["self"] if "self" in a else a["x1"]
    _dtypes("self" if "self" in a else "x1", x, (*_HALVES, torch.int8))
    if name in ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"):
        _one_of("world_size", a["world_size"], (2, 4, 8, 16, 32))
        _span("k of self", x.shape[-1], 256, 65534)
        if x.dtype == torch.int8:
            _one_of("comm_mode of int8", a["comm_mode"], ("aiv",))
        _multiple("m of self", x.shape[0], a["world_size"] if name == "npu_mm_reduce_scatter_base" else 1)
    elif name == "npu_mm_all_reduce_base":
        _span("k of x1", x.shape[-1], 1, 65535)
        for what in ("x1", "x2"):
            if a[what].numel() == 0:
                _refuse(what, list(a[what].shape), "no empty tensors")
    else:
        _one_of("world_size", a["world_size"], (2, 4, 8, 16))
        _span("k of x2", a["x2"].shape[0], 1, 65535)
        columns = name == "npu_matmul_all_to_all"
        _multiple("H2 of x2" if columns else "BS of x1", a["x2"].shape[1] if columns else x.shape[0], a["world_size"])


@_limits("npu_alltoallv_gmm", "npu_gmm_alltoallv")
def _experts_over_ranks(name: str, a: Arguments) -> None:
    weight, ranks = a["gmm_weight"], a["ep_world_size"]
    _dtypes("gmm_x", a["gmm_x"], _HALVES)
    _one_of("ep_world_size", ranks, (8, 16, 32, 64, 128))
    _span("the experts of gmm_weight", weight.shape[0], 1, 32)
    _span("the experts of all ranks", weight.shape[0] * ranks, 1, 256)
    for what, size in zip(("N1" if a["trans_gmm_weight"] else "H1", "H1" if a["trans_gmm_weight"] else "N1"), weight.shape[1:]):
        _span(f"{what} of gmm_weight", size, 1, 65535)
    if a["mm_x"] is not None:
        _span("H2 of mm_x", a["mm_x"].shape[-1], 1, 12288)


@_limits("npu_moe_distribute_dispatch", "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine", "npu_moe_distribute_combine_v2")
def _rows_to_experts(name: str, a: Arguments) -> None:
    x = "x" if "x" in a else "expand_x"
    second, ranks, shared, of_shared = name.endswith("_v2"), a["ep_world_size"], a["shared_expert_num"], a["shared_expert_rank_num"]
    _dtypes(x, a[x], (*_HALVES, torch.int32) if second and x == "x" else _HALVES)
    _one_of("tp_world_size", a["tp_world_size"], (0, 1))
    _one_of("expert_shard_type", a["expert_shard_type"], (0,))
    _span("shared_expert_num", shared, 0, 4)
    if shared:
        _multiple("shared_expert_rank_num", of_shared, shared)
    (tokens, top_k), routed = a["expert_ids"].shape, a["moe_expert_num"]
    _span("moe_expert_num", routed, 1, 1024 if second else 512)
    _span("K of expert_ids", top_k, 1, 16 if second else 8)
    if a[x].dtype != torch.int32:
        _span(f"H of {x}", a[x].shape[1], *((1024, 8192) if second else (7168, 7168)))
    if second:
        _span("ep_world_size", ranks, 2, 768)
        _span("BS of expert_ids", tokens, 1, 512)
        _span("the local experts of all ranks", routed // max(ranks - of_shared, 1) * ranks, 1, 2048)
    else:
        _one_of("ep_world_size", ranks, (8, 16, 32, 64, 128, 144, 256, 288))
        if of_shared:
            _multiple("ep_world_size", ranks, of_shared)
    _multiple("moe_expert_num", routed, max(ranks - of_shared, 1))

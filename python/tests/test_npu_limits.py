"""ops_transformer.npu: limits of the device outside attention, which strict calls alone refuse; the list of rules and their tests."""

import ast
import pathlib

import pytest
from conftest import import_torch

torch = import_torch()

import ops_transformer.npu as npu  # noqa: E402

HERE = pathlib.Path(__file__).parent


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


I8, I32, I64, F32 = torch.int8, torch.int32, torch.int64, torch.float32
LATENT = (zeros(1, 1, 1, 96), torch.ones(32).half(), zeros(1, 1, 1, 64), zeros(1, 1, 1, 64), zeros(1, 1, dtype=I64), zeros(1, 1, 2, 64), zeros(1, 1, 2, 32))
LIMITS = {  # section, function: arguments, what is said
    "3.3 npu_attention_update, parts": (([zeros(2, dtype=F32)] * 17, [zeros(2, 8)] * 17, 1), {}, "the parts is 17, but the device takes 1 to 16"),
    "3.3 npu_attention_update, H": (([zeros(2, dtype=F32)], [zeros(2, 12)], 1), {}, "H is 12, but the device takes multiples of 8"),
    "4.1 npu_sparse_flash_attention, D": ((zeros(1, 2, 4, 16), *[zeros(1, 3, 1, 16)] * 2, zeros(1, 2, 1, 1, dtype=I32), 1.0), dict(attention_mode=2),
                                          "D of query is 16, but the device takes 512"),
    "4.1 npu_sparse_flash_attention, heads": ((zeros(1, 2, 3, 512), *[zeros(1, 3, 1, 512)] * 2, zeros(1, 2, 1, 1, dtype=I32), 1.0), dict(attention_mode=2),
                                              "the heads of query is 3, but the device takes one of 1, 2, 4"),
    "4.2 npu_lightning_indexer, D": ((zeros(1, 2, 2, 16), zeros(1, 3, 1, 16), zeros(1, 2, 2)), {}, "D of query is 16, but the device takes 128"),
    "4.2 npu_lightning_indexer, count": ((zeros(1, 2, 2, 128), zeros(1, 3, 1, 128), zeros(1, 2, 2)), dict(sparse_count=2049), "sparse_count is 2049"),
    "4.3 npu_block_sparse_attention, D": ((zeros(1, 2, 4, 16), *[zeros(1, 2, 4, 16)] * 2, zeros(1, 2, 1, 1, dtype=I8), [4, 128]),
                                          dict(q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=2), "D of query is 16"),
    "4.3 npu_block_sparse_attention, columns": ((zeros(1, 2, 4, 64), *[zeros(1, 2, 4, 64)] * 2, zeros(1, 2, 1, 1, dtype=I8), [4, 64]),
                                                dict(q_input_layout="BNSD", kv_input_layout="BNSD", num_key_value_heads=2), "the key columns of block_shape is 64"),
    "5.1 npu_moe_compute_expert_tokens, experts": ((zeros(2, dtype=I32), 2049), {}, "num_expert is 2049, but the device takes 1 to 2048"),
    "5.1 npu_moe_gating_top_k_softmax, k": ((zeros(1, 1100), None, 1025), {}, "k is 1025, but the device takes 1 to 1024"),
    "5.1 npu_moe_gating_top_k_softmax_v2, k": ((zeros(1, 1100),), dict(k=1025), "k is 1025, but the device takes 1 to 1024"),
    "5.1 npu_moe_gating_top_k, groups": ((zeros(3, 8), 2), dict(group_count=4), "the experts of a group is 2, but the device takes more than 2"),
    "5.1 npu_moe_gating_top_k, k": ((zeros(3, 16), 9), dict(group_count=2), "k is 9, but the device takes 1 to 8"),
    "5.2 npu_moe_init_routing_v2, experts": ((zeros(2, 4), zeros(2, 1, dtype=I32)), dict(expert_num=10241), "expert_num is 10241"),
    "5.2 npu_moe_init_routing_v2, pairs": ((zeros(2, 4), zeros(2, 1, dtype=I32)), dict(expert_num=5121, expert_tokens_num_type=2), "expert_num is 5121"),
    "5.2 npu_moe_init_routing_v2, range": ((zeros(2, 4), zeros(2, 1, dtype=I32)), dict(expert_num=4, active_expert_range=[1, 5]),
                                           r"active_expert_range is \[1, 5\], but the device takes parts of 0 to expert_num = 4"),
    "5.2 npu_moe_init_routing_quant, capacity": ((zeros(2, 4), zeros(2, 1, dtype=I32)), dict(expert_num=4, drop_pad_mode=1, expert_capacity=2),
                                                 "expert_capacity is 2, but the device takes 1 to 1"),
    "5.3 npu_moe_re_routing, H": ((zeros(1, 16384), torch.ones(1, 1, dtype=I32)), {}, "H of tokens is 16384, but the device takes 1 to 16383"),
    "6.1 npu_grouped_matmul, group_list": (([zeros(2, 4)], [zeros(1, 4, 4)]), dict(group_list=torch.tensor([2], dtype=I32), group_type=0),
                                           "the dtype of group_list is torch.int32"),
    "6.1 npu_grouped_matmul, lists": (([zeros(2, 4)] * 129, [zeros(4, 4)] * 129), dict(group_type=-1), "the tensors of x is 129"),
    "6.2 npu_grouped_matmul_swiglu_quant, N": ((zeros(1, 1, dtype=I8), zeros(1, 1, 10242, dtype=I8), torch.ones(1, dtype=I64), torch.ones(1, 10242),
                                                torch.ones(1)), {}, "N of weight is 10242, but the device takes 1 to 10240"),
    "6.2 npu_grouped_matmul_finalize_routing, n": ((zeros(1, 16, dtype=I8), zeros(1, 16, 128, dtype=I8), torch.ones(1, dtype=I64)),
                                                   dict(scale=torch.ones(1, 128), row_index=zeros(1, dtype=I64), output_bs=1), "n of w is 128, but the device takes 256"),
    "6.2 npu_grouped_matmul_finalize_routing, k": ((zeros(1, 8, dtype=I8), zeros(1, 8, 256, dtype=I8), torch.ones(1, dtype=I64)),
                                                   dict(scale=torch.ones(1, 256), row_index=zeros(1, dtype=I64), output_bs=1), "k of w is 8, but the device takes multiples of 16"),
    "6.3 npu_swiglu, empty": ((zeros(0, 4),), {}, r"self is \[0, 4\], but the device takes no empty tensors"),
    "6.3 npu_swiglu_quant, 2N": ((zeros(1, 8194),), {}, "the last dimension of x is 8194, but the device takes 2 to 8192"),
    "6.3 npu_swiglu_quant, int4": ((zeros(1, 18),), dict(dst_type=torch.quint4x2), "the last dimension of x is 18, but the device takes multiples of 4"),
    "6.3 npu_dequant_swiglu_quant, groups": ((zeros(1, 32),), dict(group_index=torch.ones(1, dtype=I64)), "2H is 32, but the device takes multiples of 64"),
    "6.3 npu_dequant_swiglu_quant, scale": ((zeros(1, 32, dtype=I32),), dict(weight_scale=torch.ones(1, 32)), "activation_scale is None"),
    "6.3 npu_dynamic_quant, dtype": ((zeros(2, 4, dtype=F32),), {}, "the dtype of input is torch.float32"),
    "6.3 npu_dynamic_quant, dimensions": ((zeros(4),), {}, "the dimensions of input is 1, but the device takes 2 or more"),
    "6.4 npu_quant_matmul, empty": ((zeros(0, 4, dtype=I8), zeros(4, 4, dtype=I8), torch.ones(4)), {}, r"x1 is \[0, 4\], but the device takes no empty"),
    "6.4 npu_ffn, N2": ((zeros(2, 4), zeros(4, 8), zeros(8, 6), "relu"), {}, "N of weight2 is 6, but the device takes K of weight1, 4"),
    "6.4 npu_ffn, dtype": ((zeros(2, 4, dtype=F32), zeros(4, 8), zeros(8, 4), "relu"), {}, "the dtype of x is torch.float32"),
    "7.2 npu_rotary_mul, D": ((zeros(1, 1, 1, 896), zeros(1, 1, 1, 896), zeros(1, 1, 1, 896)), {}, "D is 896, but the device takes 2 to 894"),
    "7.2 npu_apply_rotary_pos_emb, D": ((zeros(1, 1, 1, 32),) * 4, {}, "D is 32, but the device takes one of 64, 128"),
    "7.2 npu_interleave_rope, D": ((zeros(1, 1, 1, 32), zeros(1, 1, 1, 32), zeros(1, 1, 1, 32)), {}, "D is 32, but the device takes one of 64"),
    "7.2 npu_mrope, head_size": ((zeros(1, dtype=I64), zeros(1, 48), zeros(1, 48), zeros(4, 32), 48), {}, "head_size is 48, but the device takes multiples of 32"),
    "7.3 npu_kv_rmsnorm_rope_cache, columns": (LATENT, {}, "the columns of kv is 96, but the device takes one of 576"),
}


@pytest.mark.parametrize("what", LIMITS)
def test_0_1_strict_limits(what):
    """Sections' limits (S): a strict call names them; the same call is taken outside."""
    arguments, more, message = LIMITS[what]
    name = what.partition(",")[0].split()[1]
    with pytest.raises(ValueError, match=f"{name}: strict: {message}"):
        getattr(npu, name)(*arguments, **more, strict=True)
    with npu.strict(), pytest.raises(ValueError, match=message):
        getattr(npu, name)(*arguments, **more)
    if what in ELSEWHERE:
        with pytest.raises(ValueError, match=ELSEWHERE[what]):
            getattr(npu, name)(*arguments, **more)
    else:
        getattr(npu, name)(*arguments, **more)


ELSEWHERE = {  # what no call takes
    "5.1 npu_moe_gating_top_k, k": "npu_moe_gating_top_k: ",
    "5.2 npu_moe_init_routing_v2, range": "npu_moe_init_routing_v2: ",
    "6.3 npu_swiglu_quant, int4": "npu_swiglu_quant: the result has 9 columns, must have a multiple of 8",
}


# ---- the list of rules -----------------------------------------------------------------------------------------------


def rules(text):
    """{name of a test: its rule} of lines SECTION NAME: what; and the functions of lines SECTION functions: names."""
    found, functions = {}, set()
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, what = line.partition(": ")
        section, name = head.split()
        if name == "functions":
            functions.update(what.split())
        else:
            assert what and f"test_{section.replace('.', '_')}_{name}" not in found, line
            found[f"test_{section.replace('.', '_')}_{name}"] = what
    return found, functions


def names_in(paths):
    """The names of tests in files."""
    return {node.name for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")}


def unmatched(listed, tests):
    """Rules without a test, and tests named after a section that no rule has."""
    named = {name for name in tests if name[5:6].isdigit() or name.startswith("test_cases_")}
    return sorted(set(listed) - tests), sorted(named - set(listed))


def test_every_rule_has_a_test():
    listed, functions = rules((HERE / "npu_rules.txt").read_text(encoding="utf-8"))
    files = sorted(HERE.glob("test_npu_*.py"))
    assert unmatched(listed, names_in(files)) == ([], [])
    assert functions == {name for name in npu.__all__ if "npu_" in name}
    called = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in functions if f"npu.{name}(" not in called and f"npu.{name}," not in called and f'"{name}' not in called
            and f"npu.{name}]" not in called] == []


def test_the_list_is_able_to_fail():
    listed, functions = rules("# a comment\n1.1 functions: a b\n1.1 one: what\n2.2 two: what\ncases three: what\n")
    assert functions == {"a", "b"} and unmatched(listed, {"test_1_1_one", "test_3_1_four", "test_other"}) == (["test_2_2_two", "test_cases_three"], ["test_3_1_four"])
    with pytest.raises(AssertionError):
        rules("1.1 one: what\n1.1 one: again\n")

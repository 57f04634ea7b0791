"""Mixtures of experts: made of the demo model they compute what it computes; random small ones, what transformers computes."""

import importlib.util
import pathlib

import numpy as np
import pytest
from conftest import assert_near, import_torch
from test_model import model_path

gguf = pytest.importorskip("gguf")
from ops_transformer import Model  # noqa: E402

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "make_mixture.py"
TEXT = "The capital of France is Paris, a city of two million people on the river Seine. It has been the seat of kings."
PROMPT = "Name three animals that live in the sea."


def make_mixture(*arguments):
    spec = importlib.util.spec_from_file_location("make_mixture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def dense():
    model = Model(model_path(), max_context=128)
    return model.logits(TEXT), model.perplexity(TEXT), model.generate(PROMPT, chat=True, max_tokens=24)


@pytest.mark.parametrize("kind", [("copies", "--experts", 4, "--used", 2), ("slices", "--experts", 8), ("shared", "--experts", 8)])
def test_mixtures_of_the_demo_model_answer_as_it_does(dense, kind, tmp_path):
    out = tmp_path / "mixture.gguf"
    make_mixture(model_path(), out, "--kind", *kind)
    model = Model(out, max_context=128)
    out.unlink()
    logits, perplexity, answer = dense
    got = model.logits(TEXT)
    assert np.abs(got - logits).max() <= 2e-3  # of about 20: other orders of the same sums, through 30 layers
    assert not np.array_equal(got, logits)     # it did go another way
    assert abs(model.perplexity(TEXT) / perplexity - 1) <= 1e-4
    assert model.generate(PROMPT, chat=True, max_tokens=24) == answer


def test_a_slice_at_the_wrong_expert_is_seen(dense, tmp_path):
    """The checks above can fail: the up projections of two experts change places."""
    out = tmp_path / "mixture.gguf"
    make_mixture(model_path(), out, "--kind", "slices")
    reader = gguf.GGUFReader(out, "r+")
    up = next(t for t in reader.tensors if t.name == "blk.7.ffn_up_exps.weight").data
    up[[2, 5]] = up[[5, 2]].copy()
    del reader, up
    assert np.abs(Model(out, max_context=128).logits(TEXT) - dense[0]).max() > 0.1
    out.unlink()


def test_what_cannot_be_cut_is_said(tmp_path):
    with pytest.raises(SystemExit, match="1536 columns in blocks of 32, which are not 5 equal slices|not 5 equal slices"):
        make_mixture(model_path(), tmp_path / "x.gguf", "--kind", "slices", "--experts", 5)
    with pytest.raises(SystemExit, match="5 of 4 experts cannot be used"):
        make_mixture(model_path(), tmp_path / "x.gguf", "--kind", "copies", "--experts", 4, "--used", 5)


# --- Random small models

SIZES = dict(vocab_size=258, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False)
EXPERTS, USED, SIZE, SHARED = 6, 2, 48, 80


def byte_tokens():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + i) for i, byte in enumerate(others)}}
    return ["<|end|>"] + [names[byte] for byte in range(256)] + ["aa"]


def mixtral(transformers):
    return "llama", transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **SIZES, intermediate_size=SIZE, num_local_experts=EXPERTS, num_experts_per_tok=USED))


def qwen2_moe(transformers, norm=False):
    return "qwen2moe", transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(
        **SIZES, intermediate_size=SHARED, moe_intermediate_size=SIZE, shared_expert_intermediate_size=SHARED,
        num_experts=EXPERTS, num_experts_per_tok=USED, norm_topk_prob=norm))


def qwen3_moe(transformers, norm=True):
    # A head size that is not hidden_size / heads.
    return "qwen3moe", transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, intermediate_size=SHARED, moe_intermediate_size=SIZE, num_experts=EXPERTS,
        num_experts_per_tok=USED, norm_topk_prob=norm))


def pairs_from_halves(weight, heads):
    """Rows of query or key as files of the llama architecture have them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path, arch, model):
    config, state = model.config, {k: v.detach().numpy().astype(np.float32) for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    if arch != "llama":
        writer.add_expert_feed_forward_length(SIZE)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(SHARED)
    if arch == "qwen3moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = byte_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(0)

    put = lambda name, array: writer.add_tensor(name, np.ascontiguousarray(array))  # noqa: E731
    put("token_embd.weight", state["model.embed_tokens.weight"])
    put("output.weight", state["lm_head.weight"])
    put("output_norm.weight", state["model.norm.weight"])
    for i in range(config.num_hidden_layers):
        of, blk = f"model.layers.{i}.", f"blk.{i}."
        put(blk + "attn_norm.weight", state[of + "input_layernorm.weight"])
        put(blk + "ffn_norm.weight", state[of + "post_attention_layernorm.weight"])
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        for what in "qkv":
            weight = state[of + f"self_attn.{what}_proj.weight"]
            if arch == "llama" and what in heads:
                weight = pairs_from_halves(weight, heads[what])
            put(blk + f"attn_{what}.weight", weight)
            if arch == "qwen2moe":
                put(blk + f"attn_{what}.bias", state[of + f"self_attn.{what}_proj.bias"])
            if arch == "qwen3moe" and what in heads:
                put(blk + f"attn_{what}_norm.weight", state[of + f"self_attn.{what}_norm.weight"])
        put(blk + "attn_output.weight", state[of + "self_attn.o_proj.weight"])
        gate_up = state[of + "mlp.experts.gate_up_proj"]
        assert gate_up.shape == (EXPERTS, 2 * SIZE, config.hidden_size)
        put(blk + "ffn_gate_exps.weight", gate_up[:, :SIZE])
        put(blk + "ffn_up_exps.weight", gate_up[:, SIZE:])
        put(blk + "ffn_down_exps.weight", state[of + "mlp.experts.down_proj"])
        put(blk + "ffn_gate_inp.weight", state[of + "mlp.gate.weight"])
        if arch == "qwen2moe":
            for what in ("gate", "up", "down"):
                put(blk + f"ffn_{what}_shexp.weight", state[of + f"mlp.shared_expert.{what}_proj.weight"])
            put(blk + "ffn_gate_inp_shexp.weight", state[of + "mlp.shared_expert_gate.weight"][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, qwen3_moe, lambda t: qwen2_moe(t, norm=True), lambda t: qwen3_moe(t, norm=False)])
def test_logits_are_those_of_transformers(make, tmp_path):
    torch = import_torch()
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(5)
    arch, model = make(transformers)
    model = model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases and norms too, and routers that prefer
            kept = 0.5 * torch.randn_like(parameter) + (1 if "norm" in name else 0)
            parameter.copy_(kept if parameter.dim() == 1 else torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        tokens = torch.randint(0, SIZES["vocab_size"], (1, 40))
        want = model(tokens).logits[0].numpy()
    write(tmp_path / "random.gguf", arch, model)
    got = Model(tmp_path / "random.gguf", max_context=64).logits(tokens[0].tolist())
    assert_near(got, want, factor=10)
    assert np.abs(want).max() > 1

"""ops_transformer.hf: models of the package transformers with random weights, ours beside its eager attention: logits, gradients
of all parameters, generated tokens; and no mask where a rule does."""

import warnings

import pytest
from conftest import import_torch

torch = import_torch()

transformers = pytest.importorskip("transformers", reason="transformers is not installed (OPST_TEST_TORCH=1 installs it)")

from ops_transformer import hf  # noqa: E402

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = dict(SIZES, num_key_value_heads=2)
NARROW = dict(GROUPED, head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LENGTH, PADDING = 17, 5

DECODERS = {
    "Llama": GROUPED, "Arcee": GROUPED, "Granite": GROUPED, "StableLm": GROUPED, "SmolLM3": GROUPED, "Nemotron": GROUPED,
    "Olmo": GROUPED, "Olmo2": GROUPED, "Cohere": GROUPED, "Apertus": GROUPED, "Qwen3": NARROW, "Gemma": NARROW, "Helium": NARROW,
    "Glm": NARROW, "Glm4": NARROW, "SeedOss": NARROW, "Phi": SIZES, "GPTNeoX": SIZES, "Persimmon": SIZES,
    "GPT2": dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    "OPT": dict(SIZES, ffn_dim=48, word_embed_proj_dim=32),
    # Sliding windows, the score cap of Gemma 2, the sinks of gpt-oss.
    "Mistral": dict(GROUPED, sliding_window=6), "Ministral": dict(NARROW, sliding_window=6), "Phi3": dict(GROUPED, sliding_window=6),
    "Starcoder2": dict(GROUPED, sliding_window=6), "Olmo3": dict(GROUPED, sliding_window=6),
    "Cohere2": dict(GROUPED, sliding_window=6), "Exaone4": dict(GROUPED, sliding_window=6, sliding_window_pattern=2),
    "Qwen2": dict(GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "Gemma2": dict(NARROW, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=3.0),
    "Gemma3Text": dict(NARROW, sliding_window=6, query_pre_attn_scalar=8),
    "GptOss": dict(NARROW, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
                   layer_types=["sliding_attention", "full_attention"]),
    # Experts; keys and values of different widths.
    "Mixtral": dict(GROUPED, num_local_experts=4), "Qwen3Moe": dict(NARROW, **EXPERTS),
    "Qwen2Moe": dict(GROUPED, shared_expert_intermediate_size=16, **EXPERTS),
    "DeepseekV3": dict(SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                       v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                       moe_intermediate_size=16, first_k_dense_replace=1, n_shared_experts=1),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    hf.register()


@pytest.fixture
def calls(monkeypatch):
    """Keyword options of each call that our attention gets."""
    seen = []
    inner = hf.flash_attention
    monkeypatch.setattr(hf, "flash_attention", lambda *args, **options: seen.append(options) or inner(*args, **options))
    return seen


def randomised(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sink" in name:
            torch.nn.init.normal_(parameter, std=1.0 if "sink" in name else 0.3)
    return model.eval()


def step(model, implementation, chosen, **inputs):
    """Chosen logits, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    logits = model(**inputs).logits
    logits = logits if chosen is None else logits[chosen]
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model, chosen=None, **inputs):
    want, want_gradients = step(model, "eager", chosen, **inputs)
    got, gradients = step(model, "ops_transformer", chosen, **inputs)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert gradients.keys() == want_gradients.keys()
    # Some are 0 but for rounding (a key's bias), so all are measured by the largest.
    scale = max(gradient.abs().max() for gradient in want_gradients.values())
    for name, gradient in want_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-4 * min(scale, gradient.abs().max() + 1e-3 * scale), name


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name, calls):
    config = getattr(transformers, f"{name}Config")(**DECODERS[name])
    config._attn_implementation = "eager"
    model = randomised(transformers.AutoModelForCausalLM.from_config(config))
    tokens = torch.randint(3, 97, (2, LENGTH))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, :PADDING] = 0

    compare(model, input_ids=tokens)
    assert calls and all("mask" not in options and "bias" not in options for options in calls)
    windows = {options.get("window_left") for options in calls}
    assert (windows != {None}) == (DECODERS[name].get("sliding_window") is not None)

    calls.clear()
    compare(model, padding.bool(), input_ids=tokens, attention_mask=padding)
    assert calls and all(options["mask"].shape == (2, 1, 1, LENGTH) for options in calls)

    texts = []
    for implementation in ("eager", "ops_transformer"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            texts.append(model.generate(input_ids=tokens, attention_mask=padding, max_new_tokens=10, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)


def test_encoder(calls):
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = randomised(transformers.BertForMaskedLM(config))
    tokens, padding = torch.randint(3, 97, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    compare(model, input_ids=tokens)
    assert calls and not any("mask" in options or options["causal"] for options in calls)
    padding[1, 9:] = 0
    compare(model, padding.bool(), input_ids=tokens, attention_mask=padding)


def test_encoder_and_decoder():
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0)
    model = randomised(transformers.BartForConditionalGeneration(config))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, 9:] = 0
    compare(model, input_ids=torch.randint(3, 97, (2, LENGTH)), attention_mask=padding, decoder_input_ids=torch.randint(3, 97, (2, 7)))


def test_position_bias():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0)
    model = randomised(transformers.T5ForConditionalGeneration(config))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, 9:] = 0
    compare(model, input_ids=torch.randint(3, 97, (2, LENGTH)), attention_mask=padding, decoder_input_ids=torch.randint(3, 97, (2, 7)))


def test_what_no_rule_says(calls):
    """A static cache, packed sequences and a mask of the caller's own."""
    model = randomised(transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**GROUPED, sliding_window=6)))
    tokens = torch.randint(3, 97, (1, LENGTH))
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
    compare(model, input_ids=tokens, position_ids=positions)
    own = torch.rand(1, 1, LENGTH, LENGTH) < 0.6
    own |= torch.eye(LENGTH, dtype=torch.bool)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = model(input_ids=tokens, attention_mask=own).logits
        model.set_attn_implementation("ops_transformer")
        calls.clear()
        got = model(input_ids=tokens, attention_mask=own).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert all(options["mask"].shape == own.shape for options in calls)
    texts = []
    for implementation in ("eager", "ops_transformer"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            texts.append(model.generate(input_ids=tokens, max_new_tokens=10, do_sample=False, cache_implementation="static", pad_token_id=0))
    assert torch.equal(*texts)


def test_dropout_repeats():
    config = transformers.LlamaConfig(**GROUPED, attention_dropout=0.4)
    model = randomised(transformers.AutoModelForCausalLM.from_config(config)).train()
    model.set_attn_implementation("ops_transformer")
    tokens = torch.randint(3, 97, (1, LENGTH))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(input_ids=tokens).logits)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_attention_weights_that_are_asked_for_and_not_kept_are_warned_of():
    """GPT-2 takes the keyword away before the attention function sees it."""
    ids = torch.arange(6)[None]
    for name in ("Llama", "GPT2", "OPT", "GPTNeoX", "Mixtral"):
        for config, options in (({}, {"output_attentions": True}), ({"output_attentions": True}, {})):
            config = getattr(transformers, f"{name}Config")(**DECODERS[name], **config)
            config._attn_implementation = "ops_transformer"
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with pytest.warns(UserWarning, match='output_attentions=True gives None for them; attn_implementation="eager" has them'):
                model(ids, **options)
        config = getattr(transformers, f"{name}Config")(**DECODERS[name])
        config._attn_implementation = "ops_transformer"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids, output_hidden_states=True)

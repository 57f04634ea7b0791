"""Models of the package transformers, with random weights: the same logits and gradients with the switch on."""

import pytest
from conftest import assert_near, import_torch

torch = import_torch()

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa_operator as operator  # noqa: E402

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config), {}


def bert():
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation="sdpa")
    padding = torch.ones(2, 13, dtype=torch.long)
    padding[1, 8:] = 0
    return transformers.BertForMaskedLM(config), {"attention_mask": padding}


def bart():
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0, attn_implementation="sdpa")
    return transformers.BartForConditionalGeneration(config), {"decoder_input_ids": torch.randint(5, 97, (2, 7))}


@pytest.mark.parametrize("make", [llama, bert, bart])
def test_logits_and_gradients(make, monkeypatch):
    torch.manual_seed(2)
    model, options = make()
    tokens = torch.randint(5, 97, (2, 13))
    calls = []
    forward = operator._forward
    monkeypatch.setattr(operator, "_forward", lambda *a: calls.append(1) or forward(*a))

    def step():
        model.zero_grad()
        logits = model(input_ids=tokens, **options).logits
        logits.square().sum().backward()
        return [logits] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = step()
    with ot.sdpa():
        got = step()
        with torch.no_grad():
            assert_near(model(input_ids=tokens, **options).logits.numpy(), want[0].detach().numpy(), factor=10)
    assert calls  # ours has run
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert_near(a.detach().numpy(), b.detach().numpy(), factor=10)

"""Who computes a call of torch's scaled_dot_product_attention: the switch, explain, and what is left to torch."""

import inspect
import warnings

import numpy as np
import pytest
from conftest import between_elements, import_torch

torch = import_torch()

import torch.nn.functional as F  # noqa: E402
from sdpa import assert_same, heads, ours, theirs  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402
from ops_transformer import _torch_sdpa as attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


def test_the_switch_nests_and_is_taken_back(monkeypatch):
    before = F.scaled_dot_product_attention
    with ot.sdpa():
        with ot.sdpa():
            assert F.scaled_dot_product_attention is ours
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is before
    with pytest.raises(KeyError), ot.sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is before


def test_explain_is_called_as_what_it_explains():
    told, asked = inspect.signature(ot.explain), inspect.signature(ours)
    assert list(told.parameters.values()) == list(asked.parameters.values())
    assert not hasattr(ot.explain, "__signature__")  # what a static checker reads is what there is
    with pytest.raises(TypeError, match="explain.*missing.*'key'"):
        ot.explain(heads(1, 1, 2, 8))


def test_explain():
    q = heads(2, 4, 64, 32, grad=True)
    told = ot.explain(q, q, q, is_causal=True)
    assert told.path == "ops_transformer" and ("flash" in told.plan or "standard" in told.plan)
    assert ot.explain(q, q, q, dropout_p=1.0).path == "ops_transformer"
    assert ot.explain(q, q, q, attn_mask=torch.ones(64, 64, dtype=torch.bool), dropout_p=0.5).plan
    wide = heads(1, 1, 64, 800)
    for arguments, path, why in [
        ((wide, wide, q[:1, :1]), "torch", "768"),
        ((q.to(torch.complex64),) * 3, "torch", "complex64"),
        ((q, q.double(), q), "torch", "dtype"),
        ((q.to_sparse(),) * 3, "torch", "sparse"),
        ((q, q[:, :3], q[:, :3]), "refused", "fit together"),
        ((q, q, q, torch.ones(63, 64, dtype=torch.bool)), "refused", "attn_mask [63, 64]"),
        ((q, q, q, None, 1.5), "refused", "dropout_p is 1.5"),
    ]:
        told = ot.explain(*arguments)
        assert told.path == path and why in told.reason and str(told).startswith(path)


def test_a_custom_scale_is_taken_in_double():
    q, k, v = (heads(1, 2, 9, 8, dtype=torch.float64) for _ in "qkv")
    got, want = ours(q, k, v, scale=0.1), theirs(q, k, v, scale=0.1)
    assert (got - want).abs().max() < 1e-14
    assert (ours(q, k, v, scale=float(np.float32(0.1))) - want).abs().max() > 1e-11  # so that the bound means something


def test_what_is_not_covered_goes_to_torch_with_one_warning():
    q = heads(1, 1, 4, 800)
    attention._warned.clear()
    with pytest.warns(UserWarning, match="goes to torch: head_dim 800"):
        out = ours(q, q, q)
    assert_same(out, theirs(q, q, q))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(q, q, q)


@pytest.mark.filterwarnings("ignore:ops_transformer.*lies at an address between elements")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask"])
def test_tensors_between_elements_go_to_torch(dtype, which):
    given = dict(zip(("query", "key", "value"), (heads(1, 2, 5, 8, dtype=dtype) for _ in "qkv")), attn_mask=heads(5, 5, dtype=dtype))
    between = {**given, which: between_elements(given[which])}
    told = ot.explain(**between)
    assert (told.path, told.reason) == ("torch", f"{which} lies at an address between elements")
    attention._warned.clear()
    with pytest.warns(UserWarning, match=f"goes to torch: {which} lies at an address between elements"):
        assert_same(ours(**between), theirs(**given))
    with ot.sdpa():
        assert_same(F.scaled_dot_product_attention(**between), theirs(**given))
    for tensors in (given, between):
        for tensor in tensors.values():
            tensor.requires_grad_()
    got = torch.autograd.grad(ours(**between).sum(), list(between.values()))
    for gradient, want in zip(got, torch.autograd.grad(theirs(**given).sum(), list(given.values()))):
        assert_same(gradient, want, factor=8.0)
    if which != "attn_mask":  # the shortest way
        between.pop("attn_mask"), given.pop("attn_mask")
        with torch.no_grad():
            assert_same(ours(**between), theirs(**given))
    # Nothing is there to be read.
    none = between_elements(heads(1, 2, 5, 8, dtype=dtype))[:0]
    assert ot.explain(none, none, none).path == "ops_transformer"


def test_tensors_between_elements_that_torch_chooses():
    q, weight = heads(1, 2, 5, 8, grad=True), heads(1, 2, 5, 8)
    (got,) = torch.autograd.grad(ours(q, q, q), q, between_elements(weight))
    (want,) = torch.autograd.grad(ours(q, q, q), q, weight)
    assert torch.equal(got, want)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    q, mask = q.detach(), heads(5, 5)
    assert torch.equal(compiled(between_elements(q), q, q, between_elements(mask)), ours(q, q, q, mask))

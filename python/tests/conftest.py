"""Fixtures of the package's tests, and the reference: attention's equation in NumPy, in float64."""

import importlib.util
import os
import pathlib
import tempfile

# Nothing is left in the tree. Read when hypothesis is imported.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "ops_transformer_hypothesis"))

import numpy as np  # noqa: E402
import pytest  # noqa: E402


def required(what):
    """Whether OPST_REQUIRE makes the want of `what` a failure."""
    return what in os.environ.get("OPST_REQUIRE", "").split(",")


def pytest_configure(config):
    """What OPST_REQUIRE names is there, or no test runs: a skip for want of it would pass without a word."""
    for name in filter(None, os.environ.get("OPST_REQUIRE", "").split(",")):
        if name == "model":
            there = pathlib.Path(os.environ.get("OPST_MODEL", "")).is_file()
        else:
            there = importlib.util.find_spec(name) is not None
        if not there:
            raise pytest.UsageError(f"OPST_REQUIRE names {name}, which is not "
                                    + ("at OPST_MODEL" if name == "model" else "installed"))


def between_elements(tensor):
    """A torch tensor of the same values at an address between elements."""
    import torch

    memory = bytearray(tensor.numel() * tensor.element_size() + 1)
    found = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1).view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % tensor.element_size() != 0
    return found


def import_torch():
    """torch, or a skip of the test or the file that asks."""
    if required("torch"):
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="torch is not installed (OPST_TEST_TORCH=1 installs it)")


@pytest.fixture(scope="session")
def torch():
    return import_torch()


@pytest.fixture
def seeded(torch):
    torch.manual_seed(3)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def attention_reference(q, k, v, mask=None, bias=None, scale=None):
    """[batch, heads, length, head_dim], float64. mask: True = visible. Rows that see no key give 0.

    Returns out, and the weights [batch, heads, query_len, kv_len].
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + np.asarray(bias, dtype=np.float64)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return weights @ v, weights


def attention_gradients(q, k, v, grad_out, **options):
    """(grad_query, grad_key, grad_value) of the reference, float64."""
    q, k, v, g = (np.asarray(x, dtype=np.float64) for x in (q, k, v, grad_out))
    scale = options.get("scale") or q.shape[-1] ** -0.5
    out, weights = attention_reference(q, k, v, **options)
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    full_k, full_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    grad_weights = np.einsum("bhid,bhjd->bhij", g, full_v)
    grad_scores = weights * (grad_weights - (g * out).sum(-1, keepdims=True)) * scale
    grad_q = np.einsum("bhij,bhjd->bhid", grad_scores, full_k)
    grad_k = np.einsum("bhij,bhid->bhjd", grad_scores, q)
    grad_v = np.einsum("bhij,bhid->bhjd", weights, g)
    gather = lambda x: x.reshape(x.shape[0], kv_heads, group, *x.shape[2:]).sum(axis=2)  # noqa: E731
    return grad_q, gather(grad_k), gather(grad_v)


# Error allowed against float64, relative to the largest element.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_near(got, want, dtype="float32", factor=1.0):
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    bound = TOLERANCE[dtype] * factor * max(1.0, np.abs(want).max(initial=0))
    assert np.abs(got - want).max(initial=0) <= bound

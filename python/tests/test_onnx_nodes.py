"""The test vectors of ONNX for attention, norms, rotary embedding and softmax, out of the package onnx, through this package.

onnx carries a model of one node, inputs and outputs for each case. All outputs of all cases are compared.
"""

import re
import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed (scripts/requirements-test.txt)")

from ops_transformer import rowwise  # noqa: E402
from ops_transformer.flash_attention import attention_weights, flash_attention  # noqa: E402


def attributes_of(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def attention(node, inputs):
    q, k, v, mask, past_key, past_value, lengths = inputs + [None] * (7 - len(inputs))
    a = attributes_of(node)
    flat = q.ndim == 3
    if flat:
        q, k, v = (x.reshape(*x.shape[:2], a[f"{n}_num_heads"], -1).swapaxes(1, 2) for x, n in ((q, "q"), (k, "kv"), (v, "kv")))
    if past_key is not None:
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    options = {"softmax_scale": a.get("scale"), "softcap": a.get("softcap", 0.0)}
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    if a.get("is_causal", 0):
        right = 0  # a window never shows a key behind
    # Query i stands at key i + past: so many keys more on its right, so many less on its left.
    past = 0 if past_key is None else past_key.shape[2]
    if left >= 0:
        options["window_left"] = left - past
    if right >= 0:
        options["window_right"] = right + past
    if lengths is not None:  # the last query at the last key of its sequence
        options["kv_lengths"], options["alignment"] = lengths, "bottom_right"
    if mask is not None:
        missing = k.shape[2] - mask.shape[-1]
        if missing > 0 and mask.shape[-1] != 1:
            hidden = False if mask.dtype == np.bool_ else -np.inf
            mask = np.concatenate([mask, np.full((*mask.shape[:-1], missing), hidden, mask.dtype)], -1)
        if mask.dtype == np.bool_:
            options["mask"] = mask
        else:
            options["bias"] = mask
    out = flash_attention(q, k, v, **options)
    if flat:
        out = np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape[0], out.shape[2], -1)
    stage = ("scaled", "capped", "scores", "weights")[a.get("qk_matmul_output_mode", 0)]
    return {0: out, 1: k, 2: v, 3: attention_weights(q, k, stage=stage, **options)}


def by_rows(x, axis, *parameters):
    """x and its parameters as rows of what lies behind `axis`."""
    width = int(np.prod(x.shape[axis:]))
    return x.reshape(-1, width), *(None if p is None else np.ascontiguousarray(np.broadcast_to(p, x.shape[axis:])).reshape(width)
                                   for p in parameters)


def rms_norm(node, inputs):
    a, (x, weight) = attributes_of(node), inputs
    axis = a.get("axis", -1) % x.ndim
    rows, weight = by_rows(x, axis, weight)
    return {0: rowwise.rms_norm(rows, weight, eps=a.get("epsilon", 1e-5)).reshape(x.shape)}


def layer_norm(node, inputs):
    a = attributes_of(node)
    x, weight, bias = inputs + [None] * (3 - len(inputs))
    axis = a.get("axis", -1) % x.ndim
    rows, weight, bias = by_rows(x, axis, weight, bias)
    out, *statistics = rowwise.layer_norm(rows, weight, bias, eps=a.get("epsilon", 1e-5), return_statistics=True)
    shape = (*x.shape[:axis], *(1,) * (x.ndim - axis))
    return {0: out.reshape(x.shape), 1: statistics[0].reshape(shape), 2: statistics[1].reshape(shape)}


def rotary(node, inputs):
    a = attributes_of(node)
    x, cos, sin, positions = inputs + [None] * (4 - len(inputs))
    flat = x.ndim == 3
    tokens = x.reshape(*x.shape[:2], a["num_heads"], -1) if flat else x.swapaxes(1, 2)  # [batch, length, heads, dim]
    style = "pairs" if a.get("interleaved", 0) else "halves"
    rows = np.ascontiguousarray(tokens).reshape(-1, *tokens.shape[2:])
    if positions is None:
        out = rowwise.rope(rows, cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1]), style=style)
    else:
        out = rowwise.rope_cached(rows, positions.reshape(-1), cos, sin, style=style)
    out = out.reshape(tokens.shape)
    return {0: out.reshape(x.shape) if flat else out.swapaxes(1, 2)}


def softmax(node, inputs):
    axis = attributes_of(node).get("axis", -1)
    x = np.moveaxis(inputs[0], axis, -1)
    out = rowwise.softmax(np.ascontiguousarray(x).reshape(-1, x.shape[-1])).reshape(x.shape)
    return {0: np.moveaxis(out, -1, axis)}


OPERATORS = {"Attention": attention, "RMSNormalization": rms_norm, "LayerNormalization": layer_norm,
             "RotaryEmbedding": rotary, "Softmax": softmax}

def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        tests = load_model_tests(kind="node")
    chosen = {}
    for test in tests:
        nodes = test.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in OPERATORS and nodes[0].domain == "":
            chosen[re.sub("^test_", "", test.name)] = test
    return chosen


CASES = cases()


def test_there_are_cases():
    assert len(CASES) >= 140


@pytest.mark.parametrize("name", sorted(CASES))
def test_node(name):
    test = CASES[name]
    node = test.model.graph.node[0]
    for inputs, outputs in test.data_sets:
        given = iter(inputs)
        in_place = [next(given) if word else None for word in node.input]
        expected = iter(outputs)
        wanted = {i: next(expected) for i, word in enumerate(node.output) if word}
        got = OPERATORS[node.op_type](node, in_place)
        for i in wanted:
            narrow = "float16" in str(wanted[i].dtype)  # float16 and bfloat16
            coarse = 1.6e-2 if "bfloat16" in str(wanted[i].dtype) else 2e-3
            np.testing.assert_allclose(np.asarray(got[i], np.float64), np.asarray(wanted[i], np.float64),
                                       rtol=coarse if narrow else 1e-4, atol=coarse if narrow else 1e-6)

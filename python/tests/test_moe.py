"""Gating, routing and the ways of the tokens against NumPy in float64."""

import numpy as np
import pytest

from ops_transformer import Context, Tagged, moe

RANDOM = np.random.default_rng(5)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def test_gating_is_softmax_then_top_k():
    logits = RANDOM.standard_normal((37, 60), np.float32)
    scores = softmax(logits.astype(np.float64))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :6]
    ids, weights = moe.moe_gating(logits, 6)
    assert ids.dtype == np.int32 and (ids == order).all()
    np.testing.assert_allclose(weights, np.take_along_axis(scores, order, 1), rtol=1e-5)
    got = moe.moe_gating(logits, 6, renormalise=True, routed_scaling_factor=2.5, return_scores=True)
    assert (got.topk_ids == order).all()
    np.testing.assert_allclose(got.topk_weights, 2.5 * softmax(np.take_along_axis(logits.astype(np.float64), order, 1)), rtol=1e-5)
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5)
    assert (moe.moe_gating(logits.astype(np.float16), 6, context=Context(3))[0] == np.argsort(
        -logits.astype(np.float16), axis=1, kind="stable")[:, :6]).all()


def test_gating_with_bias_and_groups():
    """The form of DeepSeek-V3."""
    logits, bias = RANDOM.standard_normal((20, 32), np.float32), RANDOM.standard_normal(32, np.float32)
    s = 1 / (1 + np.exp(-logits.astype(np.float64)))
    c = (s + bias).reshape(20, 8, 4)
    best = np.argsort(-np.sort(c, axis=2)[:, :, -2:].sum(axis=2), axis=1)[:, :3]
    kept = np.full_like(c, -np.inf)
    np.put_along_axis(kept, best[:, :, None], np.take_along_axis(c, best[:, :, None], 1), 1)
    order = np.argsort(-kept.reshape(20, 32), axis=1)[:, :5]
    ids, weights = moe.moe_gating(logits, 5, scores="sigmoid", bias=bias, renormalise=True, num_groups=8, kept_groups=3,
                              group_score="top2_sum")
    assert (ids == order).all()
    chosen = np.take_along_axis(s, order, 1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-5)
    done = np.arange(20) % 3 == 0
    ids, weights = moe.moe_gating(logits, 5, finished=done)
    assert (ids[done] == -1).all() and (weights[done] == 0).all() and (ids[~done] >= 0).all()


def test_gradients_are_those_of_torch():
    torch = pytest.importorskip("torch")
    logits, g = RANDOM.standard_normal((7, 12), np.float32), RANDOM.standard_normal((7, 3), np.float32)
    for scores in ("softmax", "sigmoid"):
        for renormalise in (False, True):
            ids, _ = moe.moe_gating(logits, 3, scores=scores)
            x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
            s = torch.softmax(x, 1) if scores == "softmax" else torch.sigmoid(x)
            w = torch.gather(s, 1, torch.from_numpy(ids.astype(np.int64)))
            (w / w.sum(1, keepdim=True) if renormalise else w).backward(torch.from_numpy(g).double())
            got = moe.moe_gating_backward(logits, ids, g, scores=scores, renormalise=renormalise)
            np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6)


def test_a_layer_of_experts():
    """Routed, multiplied group by group and combined: what a loop over tokens gives."""
    x, logits = RANDOM.standard_normal((50, 16), np.float32), RANDOM.standard_normal((50, 6), np.float32)
    experts, shared = RANDOM.standard_normal((6, 16, 16), np.float32), RANDOM.standard_normal((50, 16), np.float32)
    ids, weights = moe.moe_gating(logits, 2, renormalise=True)
    want = shared + sum(weights[:, k, None] * np.einsum("tf,tfg->tg", x, experts[ids[:, k]]) for k in range(2))
    for cumulative in (False, True):
        rows, slots, counts = moe.moe_routing(ids, 6, cumulative_ends=cumulative)
        ends = counts if cumulative else np.cumsum(counts)
        assert counts.dtype == np.int64 and ends[-1] == 100
        expanded = moe.moe_permute(x, slots, 2)
        out = np.concatenate([part @ weight for part, weight in zip(np.split(expanded, ends[:-1]), experts)])
        np.testing.assert_allclose(moe.moe_finalize(out, rows, weights, skip1=shared), want, rtol=1e-4, atol=1e-4)
    assert (moe.moe_compute_expert_tokens(np.sort(ids.ravel()), 6) == ends).all()


def test_capacity_and_ranges():
    ids = [[1], [1], [0], [1], [-1]]
    got = moe.moe_routing(ids, 3, capacity=2)
    assert got.row_of_slot.ravel().tolist() == [2, 3, 0, -1, -1]
    assert got.slot_of_row.tolist() == [2, -1, 0, 1, -1, -1] and got.expert_tokens.tolist() == [1, 3, 0]
    part = moe.moe_routing(ids, 3, expert_begin=1, expert_end=2, rows=2)
    assert part.row_of_slot.ravel().tolist() == [0, 1, -1, -1, -1]
    assert part.slot_of_row.tolist() == [0, 1] and part.expert_tokens.tolist() == [3]
    x = np.arange(5, dtype=np.int8)[:, None] + 1
    assert moe.moe_permute(x, got.slot_of_row, 1).ravel().tolist() == [3, 0, 1, 2, 0, 0]


def test_gradients_of_finalize():
    rows, weights = np.array([[2, 0], [-1, 1]]), RANDOM.standard_normal((2, 2), np.float32)
    expanded, g = RANDOM.standard_normal((4, 5), np.float32), RANDOM.standard_normal((2, 5), np.float32)
    bias, ids = RANDOM.standard_normal((3, 5), np.float32), np.array([[0, 2], [2, -1]])
    grads = moe.moe_finalize_backward(g, expanded, rows, weights, bias=bias, topk_ids=ids)
    zero = np.zeros(5)
    np.testing.assert_allclose(grads.expanded, [weights[0, 1] * g[0], weights[1, 1] * g[1], weights[0, 0] * g[0], zero], rtol=1e-6)
    np.testing.assert_allclose(grads.bias, [weights[0, 0] * g[0], zero, weights[0, 1] * g[0] + weights[1, 0] * g[1]], rtol=1e-5)
    terms = [[expanded[2] + bias[0], expanded[0] + bias[2]], [bias[2], expanded[1]]]
    np.testing.assert_allclose(grads.topk_weights, [[g[t] @ term for term in terms[t]] for t in range(2)], rtol=1e-4)
    assert moe.moe_finalize_backward(g, expanded, rows).topk_weights is None


def test_bf16_is_taken_as_it_is():
    bits = (RANDOM.standard_normal((9, 8), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    ids, weights = moe.moe_gating(Tagged(bits, "bf16"), 3)
    want = moe.moe_gating(values, 3)
    assert (ids == want[0]).all() and (weights == want[1]).all() and weights.dtype == np.float32


REFUSED = [
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), 4), "moe_gating: topk_ids dim 1 .top_k. is 4, but the choice is among 3 experts"),
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), -1), "moe_gating: top_k is -1, must not be negative"),
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), 1, scores="relu"), 'moe_gating: scores is "relu", must be one of softmax, sigmoid'),
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), 1, routed_scaling_factor=-1e300),
     r"^moe_gating: routed_scaling_factor is -1e\+300, but must be a number of float32, at most 3.4028235e38"),
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), 1, eps=2.0**128), r"^moe_gating: eps is 3.40\d+e\+38, but must be a number of float32"),
    (lambda: moe.moe_gating(np.ones((2, 3), "f4"), 1, routed_scaling_factor=np.inf), "routed_scaling_factor is inf, but must be finite"),
    (lambda: moe.moe_gating_backward(np.ones((2, 3), "f4"), [[0], [1]], np.ones((2, 1), "f4"), routed_scaling_factor=1e39),
     r"^moe_gating_backward: routed_scaling_factor is 1e\+39, but must be a number of float32"),
    (lambda: moe.moe_gating(np.ones(3, "f4"), 1), r"moe_gating: logits must be \[tokens, num_experts\], but its shape is \[3\]"),
    (lambda: moe.moe_routing([[3]], 3), r"moe_routing: topk_ids\[0, 0\] is 3, but there are 3 experts"),
    (lambda: moe.moe_routing([[0]], 3, capacity=0), "moe_routing: capacity is 0, must be at least 1, or None"),
    (lambda: moe.moe_routing([[0]], 3, expert_begin=2, expert_end=1), r"moe_routing: the range of experts is \[2, 1\)"),
    (lambda: moe.moe_permute(np.ones((2, 3), "f4"), [2], 1), r"moe_permute: slot_of_row\[0\] is 2, but there are 2 slots"),
    (lambda: moe.moe_compute_expert_tokens([1, 0], 2), r"moe_compute_expert_tokens: sorted_ids\[1\] is 0, but must be at least sorted_ids\[0\] = 1"),
    (lambda: moe.moe_finalize(np.ones((2, 3), "f4"), [[2]]), r"moe_finalize: row_of_slot\[0, 0\] is 2, but there are 2 rows"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Block masks and torch: gradients against the equation under the dense mask, compilers, and memory that is shared."""

import numpy as np
import pytest
from block_masks import drawn
from conftest import import_torch
from test_attention_torch import check, leaves, reference

torch = import_torch()

from ops_transformer import _torch_attention  # noqa: E402
from ops_transformer.flash_attention import BlockMask, flash_attention, flash_attention_grad, flash_attention_score  # noqa: E402
from ops_transformer.kv_cache import paged_attention  # noqa: E402

SHAPES = (2, 4, 10, 6), (2, 2, 14, 6), (2, 2, 14, 3)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def masked(batch=1, heads=1, dtype=np.int64, as_torch=True):
    """(BlockMask, dense mask for four heads) of blocks of 4 queries and 3 keys, for SHAPES."""
    mask, seen = drawn(np.random.default_rng(3), batch, heads, 10, 14, 4, 3, dtype=dtype)
    if as_torch:
        mask = BlockMask(torch.from_numpy(mask.row_offsets), torch.from_numpy(mask.columns), 4, 3)
    return mask, torch.from_numpy(seen).repeat_interleave(4 // heads, 1)


@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("as_torch", [True, False])
def test_values_and_gradients(batch, heads, as_torch):
    inputs = leaves(torch, *SHAPES, (10, 14), (4,))
    for dtype in (np.int32, np.int64):
        mask, seen = masked(batch, heads, dtype, as_torch)
        check(torch, lambda q, k, v, b, s: flash_attention(q, k, v, return_lse=True, block_mask=mask, bias=b, sinks=s, causal=True),
              lambda q, k, v, b, s: reference(torch, q, k, v, mask=seen, bias=b, sinks=s, causal=True), inputs)
        assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, block_mask=mask, window_left=6), inputs[:3])


def test_score_and_its_grad_function():
    inputs = leaves(torch, *SHAPES)
    mask, seen = masked(2, 4)

    def ours(q, k, v):
        return flash_attention_score(q, k, v, input_layout="BNSD", block_mask=mask)[:1]

    check(torch, ours, lambda *x: reference(torch, *x, mask=seen)[:1], inputs)
    q, k, v = (x.detach() for x in inputs)
    grad_out = torch.randn(2, 4, 10, 3, dtype=torch.float64)
    out, top, total = flash_attention_score(q, k, v, input_layout="BNSD", block_mask=mask)
    got = flash_attention_grad(q, k, v, grad_out, top, total, out, input_layout="BNSD", block_mask=mask)
    want = torch.autograd.grad(ours(*inputs)[0], inputs, grad_out)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # of max and sum, and of their logarithm


def test_gradients_of_pages():
    q, keys, values = leaves(torch, (1, 2, 10, 6), (7, 2, 2, 6), (7, 2, 2, 3))
    mask, seen = masked()
    table = torch.randperm(7)[None]

    def theirs(q, keys, values):
        k, v = (x[table[0]].flatten(0, 1).transpose(0, 1)[None] for x in (keys, values))
        return reference(torch, q, k, v, mask=seen[:, :2])[:1]

    check(torch, lambda q, k, v: (paged_attention(q, k, v, table, [14], causal=False, block_mask=mask),), theirs, [q, keys, values])


def test_lists_of_numpy_and_torch_share_memory():
    (offsets, columns, *_), _ = masked(as_torch=False)
    for name, array in (("block_mask_row_offsets", offsets), ("block_mask_columns", columns)):
        assert _torch_attention.to_tensor(name, array).data_ptr() == array.ctypes.data
        tensor = torch.from_numpy(array)
        assert _torch_attention.to_tensor(name, tensor) is tensor
        array.flags.writeable = False
        assert (_torch_attention.to_tensor(name, array).numpy() == array).all()


def test_a_mask_that_is_changed_before_backward_is_an_error():
    inputs, (mask, _) = leaves(torch, *SHAPES), masked()
    out = flash_attention(*inputs, block_mask=mask)
    mask.columns.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compile_takes_the_mask_as_an_argument_and_as_it_is():
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    for as_torch in (True, False):
        mask, _ = masked(1, 4, as_torch=as_torch)
        want = flash_attention(*inputs, block_mask=mask)
        weight = torch.randn_like(want)
        gradients = torch.autograd.grad(want, inputs, weight)
        given = torch.compile(lambda q, k, v, m: flash_attention(q, k, v, block_mask=m), fullgraph=as_torch, backend="aot_eager")
        held = torch.compile(lambda q, k, v: flash_attention(q, k, v, block_mask=mask), fullgraph=as_torch,  # noqa: B023
                             backend="aot_eager")
        for got in (given(*inputs, mask), held(*inputs)):
            assert torch.equal(got, want)
            assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(got, inputs, weight), gradients))


def test_what_is_refused_with_gradients_is_refused_by_the_same_names():
    inputs, (mask, _) = leaves(torch, *SHAPES), masked()
    for wrong, kind, message in ((mask._replace(columns=mask.columns.double()), TypeError, "block_mask.columns must be integers"),
                                 (mask._replace(row_offsets=None), TypeError, "block_mask.row_offsets must be integers"),
                                 (mask._replace(columns=mask.columns + 5), ValueError, r"block_mask.columns\["),
                                 (mask._replace(block_q=5), ValueError, "block_mask.row_offsets dim 2 is 4, but must be 3"),
                                 (mask._replace(columns=mask.columns.to("meta")), TypeError, "device meta"),
                                 ((1, 2), TypeError, r"block_mask is \(1, 2\) \(tuple\), must be a BlockMask")):
        for q in (inputs[0], inputs[0].detach()):
            with pytest.raises(kind, match=f"^flash_attention.*: .*{message}"):
                flash_attention(q, *inputs[1:], block_mask=wrong)


def test_builders_take_torch_tensors():
    dense = torch.rand(20, 30) < 0.1
    mask, same = BlockMask.from_mask(dense, 4, 4), BlockMask.from_mask(dense.numpy(), 4, 4)
    assert all((a == b).all() for a, b in zip(mask[:2], same[:2]))
    documents = torch.tensor([0, 7, 20])
    mask, same = (BlockMask.from_pattern(20, 20, block_q=4, block_kv=4, documents=x) for x in (documents, documents.tolist()))
    assert all((a == b).all() for a, b in zip(mask[:2], same[:2]))
    answer = BlockMask.from_predicate(lambda q, k: torch.from_numpy(q) >= torch.from_numpy(k), 20, 20, 4, 4)
    assert answer.partial.columns.tolist() == [0, 1, 2, 3, 4] and len(answer.block_mask.columns) == 15
    held = BlockMask(torch.from_numpy(mask.row_offsets), torch.from_numpy(mask.columns), 4, 4)
    assert held.text() == mask.text() and (held.expanded(20, 20) == mask.expanded(20, 20)).all()
    assert isinstance(np.asarray(held.columns), np.ndarray)

"""What torch's machinery sees of attention: compilers, transforms, modes, checkpoints, autocast, the Context of a call."""

import subprocess
import sys

import numpy as np
import pytest

from ops_transformer import kv_cache
from ops_transformer.flash_attention import BlockMask, flash_attention, flash_attention_grad, flash_attention_score
from ops_transformer.kv_cache import paged_attention


@pytest.fixture(autouse=True)
def _seeded(request):
    if "torch" in request.fixturenames:
        request.getfixturevalue("torch").manual_seed(0)


CALLS = {
    "flash_attention": lambda q, k, v: flash_attention(q, k, v, causal=True, window_left=9),
    "flash_attention_score": lambda q, k, v: flash_attention_score(q, k, v, input_layout="BNSD", keep_prob=0.8, seed=3)[0],
    "lse": lambda q, k, v: flash_attention(q, k, v, return_lse=True)[1],
    "block_mask": lambda q, k, v: flash_attention(q, k, v, block_mask=BlockMask([[[0, 1, 3, 3]]], [1, 0, 1], 2, 4)),
    "paged_attention": lambda q, k, v: paged_attention(q[:1], k[0].unflatten(1, (2, 4)).permute(1, 2, 0, 3),
                                                       v[0].unflatten(1, (2, 4)).permute(1, 2, 0, 3), [[1, 0]], [7]),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def inputs_of(torch, dtype=None):
    shapes = (2, 2, 5, 6), (2, 2, 8, 6), (2, 2, 8, 3)
    return [torch.randn(shape, dtype=dtype or torch.float64, requires_grad=True) for shape in shapes]


def test_gradcheck(torch, call):
    assert torch.autograd.gradcheck(call, inputs_of(torch))
    assert torch.autograd.gradcheck(call, inputs_of(torch), check_batched_grad=True)


def test_compile_of_the_whole_graph(torch, call):
    inputs = inputs_of(torch, torch.float32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(*inputs), compiled(*inputs)
    assert torch.equal(want, got) and want.stride() == got.stride()
    weight = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(want, inputs, weight), torch.autograd.grad(got, inputs, weight)):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), want)


def test_compile_takes_a_new_seed_and_ends_without_a_new_graph(torch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 2, 8, 4)
    drop = torch.compile(lambda x, seed: flash_attention(x, x, x, keep_prob=0.5, seed=seed), fullgraph=True, backend=backend)
    for seed in (11, 12, 13, 14):
        assert torch.equal(drop(x, seed), flash_attention(x, x, x, keep_prob=0.5, seed=seed))
    assert len(graphs) <= 2
    t = torch.randn(9, 2, 4)
    ends = torch.compile(lambda t, ends: flash_attention_score(t, t, t, input_layout="TND", actual_seq_qlen=ends,
                                                               actual_seq_kvlen=ends)[0], fullgraph=True, backend=backend)
    for numbers in ([3, 9], [5, 9]):
        want = flash_attention_score(t, t, t, input_layout="TND", actual_seq_qlen=numbers, actual_seq_kvlen=numbers)[0]
        assert torch.equal(ends(t, torch.tensor(numbers)), want)


def test_compile_in_a_process_that_has_not_called_it_before(torch):
    code = """
import torch
from ops_transformer.flash_attention import flash_attention
q = torch.randn(1, 2, 5, 4, requires_grad=True)
call = lambda q: flash_attention(q, q, q, causal=True)
out = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
assert torch.equal(out, call(q))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compile_of_the_gradients_function(torch):
    q, k, v, go = (torch.randn(2, 2, 6, 4) for _ in range(4))

    def gradients(q, k, v, go):
        out, largest, total = flash_attention_score(q, k, v, input_layout="BNSD")
        return flash_attention_grad(q, k, v, go, largest, total, out, input_layout="BNSD", wanted=("key", "query"))

    got = torch.compile(gradients, fullgraph=True, backend="aot_eager")(q, k, v, go)
    for a, b in zip(got, gradients(q, k, v, go)):
        assert torch.allclose(a, b, atol=1e-6)
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="requires gradients"):
        gradients(q, k, v, go)


def test_tensors_whose_memory_does_not_hold_their_values(torch):
    from torch.nn.attention.bias import causal_upper_left

    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    for plain in (False, True):
        x = q.detach() if plain else q
        for bad, message in ((x.to_sparse(), "sparse"), (torch.nested.nested_tensor([torch.randn(3, 4)]), "nested")):
            for call in (lambda: flash_attention(x, x, bad), lambda: flash_attention_score(bad, x, x, input_layout="BNSD")):
                with pytest.raises(TypeError, match=f"flash_attention.*{message}.*a dense tensor of the host's memory is needed"):
                    call()
        with pytest.raises(TypeError, match="bias is a torch.nn.attention.bias.CausalBias, whose memory need not hold its values"):
            flash_attention(x, x, x, bias=causal_upper_left(5, 5))
        with pytest.raises(TypeError, match="flash_attention: q .*(None|array)"):
            flash_attention(None, x, x)
    meta = torch.empty(1, 2, 5, 4, device="meta")
    assert flash_attention(meta, meta, meta).shape == meta.shape


def test_checkpoint_retain_graph_and_strided_gradients(torch, call):
    from torch.utils.checkpoint import checkpoint

    inputs = inputs_of(torch)
    out = call(*inputs)
    weight = torch.randn(*out.shape[::-1], dtype=out.dtype).permute(*range(out.dim() - 1, -1, -1))
    first = torch.autograd.grad(out, inputs, weight, retain_graph=True, allow_unused=True)
    for other in (torch.autograd.grad(out, inputs, weight.contiguous(), allow_unused=True),
                  torch.autograd.grad(checkpoint(call, *inputs, use_reentrant=False), inputs, weight, allow_unused=True),
                  torch.autograd.grad(call(*inputs), inputs, torch.ones((), dtype=out.dtype).expand(out.shape) * 0 + weight,
                                      allow_unused=True)):
        for a, b in zip(first, other):
            assert (a is None and b is None) or torch.equal(a, b)
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones((), dtype=out.dtype).expand(out.shape), allow_unused=True)


def test_no_grad_inference_mode_and_what_needs_no_gradient(torch, call):
    inputs = inputs_of(torch)
    want = call(*inputs)
    assert want.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = call(*inputs)
        assert not got.requires_grad and torch.equal(got, want)
    only_key = [x.detach().requires_grad_(i == 1) for i, x in enumerate(inputs)]
    grad = torch.autograd.grad(call(*only_key).sum(), only_key[1])[0]
    assert torch.allclose(grad, torch.autograd.grad(want.sum(), inputs[1])[0])


def test_transforms_of_torch_func(torch, call):
    inputs = inputs_of(torch)
    loss = lambda *x: (call(*x) ** 2).sum()  # noqa: E731
    want = torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)
    plain = [x.detach() for x in inputs]
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*plain)
    assert all(torch.allclose(a, torch.zeros_like(a) if b is None else b) for a, b in zip(got, want))
    many = [torch.stack([x, 2 * x, x - 1]) for x in plain]
    mapped = torch.func.vmap(call)(*many)
    for i in range(3):
        assert torch.allclose(mapped[i], call(*(x[i] for x in many)))
    jacobian = torch.autograd.functional.jacobian(lambda q: call(q, *plain[1:]), plain[0], vectorize=True)
    assert torch.allclose(jacobian, torch.autograd.functional.jacobian(lambda q: call(q, *plain[1:]), plain[0]))


def test_forward_mode_and_second_derivatives_are_refused(torch, call):
    q, k, v = (x.detach() for x in inputs_of(torch))
    with pytest.raises(NotImplementedError, match="forward-mode derivatives of attention are not implemented"):
        torch.func.jvp(lambda q: call(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        call(torch.autograd.forward_ad.make_dual(q, q), k, v)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of attention are not implemented"):
        grad.sum().backward()


def test_views_with_the_negative_bit(torch):
    z = torch.complex(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)).conj()
    x = z.imag
    assert x.is_neg()
    assert torch.equal(flash_attention(x, x, x), flash_attention(x.clone(), x.clone(), x.clone()))
    assert torch.equal(flash_attention_score(x, x, x, input_layout="BNSD")[0], flash_attention(x.clone(), x.clone(), x.clone()))


def test_autocast_is_that_of_torchs_attention(torch):
    q, k, v = inputs_of(torch, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(q, k.bfloat16(), v)
        score = flash_attention_score(q, k, v, input_layout="BNSD").attention_out
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == score.dtype == want.dtype == torch.bfloat16
    assert torch.allclose(out.float(), want.float(), atol=2e-2) and torch.equal(out, score)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and k.grad is not None


def test_a_context_computes_forward_and_backward(torch):
    from ops_transformer import Context

    inputs = inputs_of(torch)
    context = Context(num_threads=1)
    want = torch.autograd.grad(flash_attention(*inputs).sum(), inputs)
    got = torch.autograd.grad(flash_attention(*inputs, context=context).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    x = inputs[0].detach()
    attend = lambda q: flash_attention(q[None], q[None], q[None], context=context)  # noqa: E731
    assert torch.equal(torch.func.vmap(attend)(x)[1], attend(x[1]))
    used = context.workspace_bytes
    big = torch.randn(1, 4, 512, 64, requires_grad=True)
    with torch.profiler.profile():
        out = flash_attention(big, big, big, context=context)
        forward = context.workspace_bytes
        out.sum().backward()
    assert context.workspace_bytes > forward > used
    with pytest.raises(Exception, match="context is given, but a call that is compiled"):
        torch.compile(attend, fullgraph=True, backend="eager")(x[0])


def test_a_module_of_the_users_trains(torch):
    class Block(torch.nn.Module):
        def __init__(self, attend):
            super().__init__()
            self.projection, self.out, self.attend = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16), attend

        def forward(self, x):
            q, k, v = self.projection(x).unflatten(-1, (3, 4, 4)).unbind(2)
            return self.out(self.attend(q, k, v).flatten(2))

    def torchs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    losses = []
    x, target = torch.randn(2, 10, 16), torch.randn(2, 10, 16)
    for attend in (torchs, lambda q, k, v: flash_attention_score(q, k, v, next_tokens=0).attention_out):
        torch.manual_seed(1)
        model = Block(attend)
        optimiser = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(5):
            optimiser.zero_grad()
            loss = ((model(x) - target) ** 2).mean()
            loss.backward()
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.dim() > 1)
            optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_cache_whose_layout_has_no_gradients(torch):
    keys, values = kv_cache.new_pages(2, 32, 1, 8, layout="panel32", like=torch.empty(0))
    query = torch.randn(1, 1, 1, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="^paged_attention: query requires gradients, but key_cache is pages of layout panel32"):
        paged_attention(query, keys, values, [[0]], [5], layout="panel32")
    assert paged_attention(query.detach(), keys, values, [[0]], [5], layout="panel32").shape == (1, 1, 1, 8)


def test_integers_of_every_width_are_the_same_lengths(torch):
    q = torch.randn(2, 2, 4, 8, requires_grad=True)
    want = flash_attention(q, q, q, kv_lengths=[3, 2])
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        lengths = torch.tensor([3, 2], dtype=dtype)
        assert torch.equal(flash_attention(q, q, q, kv_lengths=lengths), want)
        assert torch.equal(flash_attention(q.detach(), q.detach(), q.detach(), kv_lengths=lengths), want)
    with pytest.raises(TypeError, match="kv_lengths must be integers .*complex64"):
        flash_attention(q, q, q, kv_lengths=torch.tensor([3, 2], dtype=torch.complex64))
    ends = torch.tensor([2.5, 4.0])
    tokens = torch.randn(4, 2, 8, requires_grad=True)
    with torch.profiler.profile(), pytest.raises(TypeError, match="actual_seq_qlen must be integers"):
        flash_attention_score(tokens, tokens, tokens, input_layout="TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
    for lengths in ([3, 2], np.array([3, 2]), torch.tensor([3, 2], dtype=torch.int16)):
        assert torch.equal(torch.compile(lambda q: flash_attention(q, q, q, kv_lengths=lengths), backend="eager")(q), want)  # noqa: B023
    # A compiler's lists are not cut off either; dynamo reports what it was told in an error of its own.
    with pytest.raises(Exception):
        torch.compile(lambda q: flash_attention(q, q, q, kv_lengths=[2.5, 3.7]), fullgraph=True, backend="eager")(q)


def test_a_paged_call_writes_into_out_while_a_profiler_looks_on(torch):
    query, pages = torch.randn(2, 2, 4, 8), [torch.randn(4, 4, 2, 8) for _ in range(2)]
    given = (*pages, np.array([[0, 1], [2, 3]]), [8, 5])
    want = paged_attention(query, *given)
    minus = torch.complex(query, -query).conj().imag  # equal to query, with the negative bit
    for asked in (query, minus):
        out = torch.empty_like(query)
        with torch.profiler.profile():
            assert paged_attention(asked, *given, out=out) is out
        assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="paged_attention: out is given, but"):
        paged_attention(query.clone().requires_grad_(), *given, out=out)

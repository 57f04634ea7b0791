"""The reported cases of scaled_dot_product_attention by number."""

import mmap
import os
import threading
import warnings

import numpy as np
import pytest
from conftest import assert_near, attention_reference, import_torch

torch = import_torch()

from sdpa import assert_same, heads, in_double, ours, theirs  # noqa: E402

import ops_transformer.torch as ot  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("length, row", [(6, 5), (130, 129)])
def test_case_b01_b08_fully_masked_row(length, row):
    q, k, v = heads(1, 2, length, 8, grad=True), *(heads(1, 2, length + 4, 8, grad=True) for _ in "kv")
    mask = torch.ones(length, length + 4, dtype=torch.bool).tril()
    mask[row] = False
    out = ours(q, k, v, attn_mask=mask, scale=0.125)
    assert (out[:, :, row] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, row] == 0).all()
    keep = [i for i in range(length) if i != row]
    shorter = torch.autograd.grad(ours(q[:, :, keep], k, v, attn_mask=mask[keep], scale=0.125).sum(), (k, v))
    assert_same(grads[1], shorter[0])
    assert_same(grads[2], shorter[1])


def test_case_b02_float_masks_are_added():
    q, k, v = (heads(1, 1, 8, 8) for _ in "qkv")
    m = torch.zeros(8, 8)
    m[:4, :4] = torch.rand(4, 4) * 0.9 + 0.05
    results = [ours(q, k, v, attn_mask=x) for x in (m, m.bool().float(), m.bool())]
    plain = ours(q, k, v)
    assert_same(results[0][:, :, 4:], plain[:, :, 4:])
    assert_same(results[1][:, :, 4:], plain[:, :, 4:])
    assert (results[2][:, :, 4:] == 0).all()
    assert all(r.isfinite().all() for r in results) and not torch.allclose(results[0], results[1])


def test_case_b03_first_tile_fully_masked():
    q, k, v = (heads(1, 1, 441, 64, grad=True) for _ in "qkv")
    mask = torch.zeros(441, 441)
    mask[:, :128] = torch.finfo(torch.float32).min
    out = ours(q, k, v, attn_mask=mask)
    assert_same(out, ours(q, k[:, :, 128:], v[:, :, 128:]))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][:, :, :128] == 0).all() and (grads[2][:, :, :128] == 0).all()


def test_case_b05_band_of_infinities():
    q, v = torch.zeros(1, 1, 640, 4, requires_grad=True), torch.ones(1, 1, 640, 4)
    i, j = torch.arange(640)[:, None], torch.arange(640)[None]
    mask = torch.zeros(640, 640).masked_fill(~((i - j >= 0) & (i - j < 10)), -torch.inf)
    out = ours(q, q, v, attn_mask=mask)
    assert (out == 1).all()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("stored", [None, 1e10, float("nan")])
def test_case_b06_masked_bytes_never_matter(stored):
    q = torch.arange(8.0).reshape(1, 2, 4)
    k, v = q.clone(), q.clone()
    if stored is not None:
        k[0, 1, 0] = stored
        v[0, 1, 0] = stored
    mask = torch.tensor([[True, False], [True, False]])
    assert torch.equal(ours(q, k, v, attn_mask=mask), torch.arange(4.0).expand(1, 2, 4))


def test_case_b12_true_means_visible():
    q, v = torch.zeros(1, 1, 4, 1), torch.tensor([1.0, 2, 4, 8]).reshape(1, 1, 4, 1)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    out = ours(q, q, v, attn_mask=mask).flatten()
    assert torch.allclose(out, torch.tensor([1, 1.5, 7 / 3, 3.75])) and torch.equal(out, ours(q, q, v, is_causal=True).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("value_dim", [8, 6])  # torch's math path, which takes 6, refuses the pair that its flash kernel has
def test_case_b14_a_mask_and_is_causal_both_apply(dtype, kind, value_dim):
    q, k, v = (heads(2, 3, *size, dtype=dtype, grad=True) for size in ((5, 8), (7, 8), (7, value_dim)))
    mask = torch.rand(5, 7) < 0.6 if kind == "bool" else torch.randn(5, 7, dtype=dtype)
    tril = torch.ones(5, 7, dtype=torch.bool).tril()
    both = mask & tril if kind == "bool" else mask.masked_fill(~tril, -torch.inf)
    out, want = ours(q, k, v, mask, is_causal=True), theirs(q, k, v, both)
    assert_same(out, want)
    for got, reference in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v))):
        assert_same(got, reference, factor=6)
    assert ot.explain(q, k, v, mask, is_causal=True).path == "ops_transformer"


def test_case_b15_mask_dtypes():
    q, k, v = (heads(1, 8, 64, 32, dtype=torch.bfloat16) for _ in "qkv")
    plain = ours(q, k, v)
    for mask in (torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bool)):
        out = ours(q, k, v, attn_mask=mask)
        assert out.dtype == torch.bfloat16
        assert_same(out, plain)
    # 256 + 1/2 has no bf16: an f32 mask is not rounded to it first.
    fine = torch.full((64, 64), 256.0)
    fine[:, 0] = 256.5
    assert_same(ours(q * 0, k, v, attn_mask=fine), in_double(theirs, q * 0, k, v, attn_mask=fine).bfloat16())
    with pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(q, k, v, attn_mask=torch.zeros(64, 64, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 7), (3, 1, 7), (3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_case_b16_mask_shapes(shape, kind):
    q, k, v = heads(2, 3, 5, 4), heads(2, 1, 7, 4), heads(2, 1, 7, 4)
    mask = torch.rand(shape) < 0.6 if kind == "bool" else torch.randn(shape)
    full = mask.expand(2, 3, 5, 7)
    want = ours(q, k, v, attn_mask=full.contiguous())
    assert torch.equal(ours(q, k, v, attn_mask=full), want)
    assert torch.equal(ours(q, k, v, attn_mask=mask), want)
    assert_same(want, in_double(theirs, q, k.expand(2, 3, 7, 4), v.expand(2, 3, 7, 4), attn_mask=full).float())
    assert torch.equal(ours(q, k, v, attn_mask=torch.ones(shape, dtype=torch.bool)), ours(q, k, v))


def test_case_b17_is_causal_is_top_left():
    v = torch.tensor([1.0, 2, 4, 8, 16]).reshape(1, 1, 5, 1)
    q = torch.zeros(1, 1, 5, 1)
    assert ours(q[:, :, :2], q, v, is_causal=True).flatten().tolist() == [1, 1.5]
    assert ours(q, q[:, :, :2], v[:, :, :2], is_causal=True).flatten().tolist() == [1, 1.5, 1.5, 1.5, 1.5]


def test_case_b27_bf16_blocks():
    x = heads(1, 2, 600, 80, dtype=torch.bfloat16)
    blocks = [(0, 128), (128, 256), (256, 384), (543, 600)]
    mask = torch.zeros(600, 600, dtype=torch.bool)
    for begin, end in blocks:
        mask[begin:end, begin:end] = True
    out = ours(x, x, x, attn_mask=mask)
    for begin, end in blocks:
        part = x[:, :, begin:end]
        assert_same(out[:, :, begin:end], in_double(theirs, part, part, part).bfloat16())
    assert (out[:, :, 384:543] == 0).all()


def test_case_b32_zero_sizes():
    for b, h, length, keys, d in [(2, 2, 3, 0, 8), (2, 2, 0, 5, 8), (0, 2, 3, 5, 8), (2, 0, 3, 5, 8), (1, 1, 0, 0, 8)]:
        for causal in (False, True):
            out = ours(heads(b, h, length, d), heads(b, h, keys, d), heads(b, h, keys, 6), is_causal=causal)
            assert out.shape == (b, h, length, 6) and (out == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours(heads(1, 1, 3, 0), heads(1, 1, 5, 0), heads(1, 1, 5, 2)).shape == (1, 1, 3, 2)
        for shape in [(7, 9, 0, 7), (0, 0, 2, 0)]:
            other = (shape[0], 7 if shape[1] else 0, 13, shape[3])
            try:
                ours(heads(*shape), heads(*other), heads(*other))
            except (RuntimeError, ValueError):
                pass


def test_case_b34_f16_logits():
    q = torch.full((1, 1, 1, 192), 20.0, dtype=torch.float16)
    k = torch.full((1, 1, 2, 192), 20.0, dtype=torch.float16)
    k[:, :, 1] = 19.5
    v = torch.tensor([1.0, 2.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    assert ours(q, k, v).item() == 1
    assert ours(q[..., :128] * 12.8, k[..., :128] * 12.8, v).item() == 1


@pytest.mark.parametrize("level", ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_case_b38_b90_bf16_at_every_level(level):
    from ops_transformer import Context
    from ops_transformer.flash_attention import flash_attention

    q, k, v = (heads(2, 4, 64, 64, dtype=torch.bfloat16) for _ in "qkv")
    context = Context(isa=level)
    if context.isa != level:
        pytest.skip(f"this processor has no {level}")
    want = in_double(theirs, q, k, v)
    assert_same(flash_attention(q, k, v, context=context), want.bfloat16())


def untouched(elements, dtype):
    """Memory that takes no room until it is written."""
    no_reserve = 0x4000  # MAP_NORESERVE, which the module mmap does not name
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_case_b43_strides_beyond_32_bits(axis):
    shape = [1, 1, 3, 8]
    shape[axis] = 3
    values = [heads(*shape) for _ in "qkv"]
    stride = [64, 64, 8, 1]
    stride[axis] = 1_100_000_000  # the third begins behind 2^31
    far = []
    for value in values:
        tensor = untouched(2 * stride[axis] + 100, torch.float32).as_strided(shape, stride)
        tensor.copy_(value)
        far.append(tensor.requires_grad_())
    near = [value.requires_grad_() for value in values]
    outs = [ours(*tensors, is_causal=True) for tensors in (far, near)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out, tensors in zip(outs, (far, near))]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_case_b45_rows_of_a_mask_beyond_32_bits(dtype):
    keys = 200
    stride = (2**32 + 64) // dtype.itemsize
    mask = untouched(stride + keys, dtype).as_strided((2, keys), (stride, 1))
    mask.copy_(torch.rand(2, keys) < 0.5)
    q, k, v = heads(1, 2, 2, 8, grad=True), heads(1, 2, keys, 8), heads(1, 2, keys, 8)
    got, want = ours(q, k, v, attn_mask=mask), ours(q, k, v, attn_mask=mask.clone())
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (got, want)))


def test_case_b39_inner_stride():
    base = heads(1, 2, 8, 16)
    q = base.transpose(2, 3)
    same = q.contiguous()
    mask = (torch.rand(16, 32) < 0.7)[:, ::2]
    value = heads(1, 2, 8, 16).transpose(2, 3)  # one tensor as keys and values is read in place by more rows
    assert torch.equal(ours(q, q, value, attn_mask=mask), ours(same, same, value.contiguous(), attn_mask=mask.contiguous()))


def test_case_b40_v_as_a_view_of_bsnd():
    q, k, vh = heads(1, 16, 62, 128, dtype=torch.bfloat16), heads(1, 16, 62, 128, dtype=torch.bfloat16), heads(1, 62, 2048, dtype=torch.bfloat16)
    v = vh.view(1, 62, 16, 128).transpose(1, 2)
    assert torch.equal(ours(q, k, v), ours(q, k, v.contiguous()))


def test_case_b42_strides_of_grad_out():
    q, k, v = (heads(2, 2, 49, 32, grad=True) for _ in "qkv")
    grad = torch.randn(2, 2, 49, 32)
    out = ours(q, k, v)
    permuted = grad.transpose(1, 2).contiguous().transpose(1, 2)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), permuted, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    one = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones(2, 2, 49, 32))
    assert all(torch.equal(a, b) for a, b in zip(one, ones))


@pytest.mark.parametrize("hq, hk", [(33, 2), (3, 2), (2, 4), (2, 0)])
def test_case_b47_heads_that_do_not_divide(hq, hk):
    with pytest.raises(RuntimeError, match="do not fit together"):
        ours(heads(1, hq, 4, 8), heads(1, hk, 4, 8), heads(1, hk, 4, 8), enable_gqa=True)


def test_case_b48_gqa_with_a_mask_per_head():
    q, k, v = heads(3, 8, 8, 64, dtype=torch.float16), *(heads(3, 2, 8, 64, dtype=torch.float16) for _ in "kv")
    full_k, full_v = (x.repeat_interleave(4, 1) for x in (k, v))
    for mask in (torch.rand(3, 8, 8, 8) < 0.7, torch.randn(3, 8, 8, 8, dtype=torch.float16)):
        assert_same(ours(q, k, v, attn_mask=mask, enable_gqa=True), ours(q, full_k, full_v, attn_mask=mask))
    with pytest.raises(RuntimeError):
        ours(q, k, v)


@pytest.mark.parametrize("width", [24, 48, 1])
def test_case_b52_the_output_is_as_wide_as_value(width):
    q, k, v = heads(1, 1, 16, 32), heads(1, 1, 16, 32), heads(1, 1, 16, width)
    out = ours(q, k, v)
    assert out.shape == (1, 1, 16, width)
    assert_near(out.numpy(), attention_reference(q.numpy(), k.numpy(), v.numpy())[0])


def test_case_b56_dropout():
    q, k = heads(1, 2, 64, 32), heads(1, 2, 64, 32)
    v = torch.ones(1, 2, 64, 32)

    def drop(p, seed):
        torch.manual_seed(seed)
        return ours(q, k, v, dropout_p=p)

    assert torch.equal(drop(0.5, 1), drop(0.5, 1)) and not torch.equal(drop(0.5, 1), drop(0.5, 2))
    mean = torch.stack([drop(0.5, seed) for seed in range(20)]).mean().item()
    assert abs(mean - 1) < 0.02
    # With one column for each key the zeros are the weights that were dropped.
    weights = ours(q, k, torch.eye(64).expand(1, 2, 64, 64), dropout_p=0.25)
    assert abs((weights == 0).float().mean().item() - 0.25) < 0.02
    kept = weights / in_double(theirs, q, k, torch.eye(64).expand(1, 2, 64, 64)).float()
    assert torch.allclose(kept[weights > 0], torch.tensor(1 / 0.75), rtol=1e-4)
    before = torch.get_rng_state()
    assert torch.equal(ours(q, k, v), ours(q, k, v)) and torch.equal(before, torch.get_rng_state())
    w = v.clone().requires_grad_()
    out = ours(q, k, w, dropout_p=1.0)
    assert (out == 0).all() and (torch.autograd.grad(out.sum(), w)[0] == 0).all()
    for p in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match="dropout_p"):
            ours(q, k, v, dropout_p=p)


def test_case_b57_dropout_keeps_memory_linear():
    q = heads(1, 1, 32768, 8)

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = peak()
    ours(q, q, q, dropout_p=0.1)
    assert peak() - before < 64 << 20  # the score matrix alone would be 4 GiB


def test_case_b91_memory_stands_still():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    lengths = np.random.default_rng(1).integers(16, 256, 150)
    sizes = []
    for n in lengths:
        q = heads(2, 2, int(n), 32)
        ours(q, q, q)
        sizes.append(resident())
    assert max(sizes[60:]) - sizes[60] < 5 << 20


# ---- threads and processes --------------------------------------------------------------------------------------------


def test_threads_at_once_beside_torch_in_one_process():
    q = heads(1, 4, 96, 32)
    want = ours(q, q, q)
    wrong = []

    def work():
        for _ in range(10):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            if not torch.equal(ours(q, q, q), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_case_b87_fork_after_use_of_both():
    q = heads(1, 4, 200, 64, grad=True)

    def step():
        return torch.autograd.grad(ours(q, q, q, is_causal=True).square().sum(), q)[0]

    want = step()
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # torch's own threads do not outlive a fork
        os._exit(0 if torch.equal(step(), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


class OneAttentionEach(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        q = torch.full((1, 2, 70, 16), float(index))
        return ours(q, q, q)


def test_case_b87_workers_of_a_data_loader():
    ours(*(heads(1, 2, 70, 16) for _ in "qkv"))
    for loaded in torch.utils.data.DataLoader(OneAttentionEach(), num_workers=2, timeout=300):
        assert torch.equal(loaded, loaded.mean().expand_as(loaded))

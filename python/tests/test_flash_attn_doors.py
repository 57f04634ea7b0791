"""ops_transformer.flash_attn: signatures, what is refused, padding helpers, install(), torch.compile."""

import inspect
import sys

import pytest
from conftest import import_torch

torch = import_torch()

import ops_transformer.flash_attn as facade  # noqa: E402
from ops_transformer.flash_attn import bert_padding as padding  # noqa: E402

# Names, order and defaults, as flash_attn 2.8 documents them.
SHARED = ("dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
          "return_attn_probs=False")
SIGNATURES = {
    "flash_attn_func": f"q k v {SHARED}",
    "flash_attn_kvpacked_func": f"q kv {SHARED}",
    "flash_attn_qkvpacked_func": f"qkv {SHARED}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {SHARED} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {SHARED}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {SHARED}",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
                               "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
                               "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    found = []
    for parameter in inspect.signature(getattr(facade, name)).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        default = "" if parameter.default is parameter.empty else f"={parameter.default}".replace(" ", "")
        found.append(parameter.name + default)
    assert found == SIGNATURES[name].split()
    assert name in facade.__all__


def new(*sizes, dtype=torch.float32):
    return torch.randn(*sizes).to(dtype)


def dense(**changes):
    return {"q": new(2, 5, 4, 16), "k": new(2, 7, 2, 16), "v": new(2, 7, 2, 16), **changes}


def starts(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


def varlen(**changes):
    return {"q": new(5, 4, 16), "k": new(7, 2, 16), "v": new(7, 2, 16), "cu_seqlens_q": starts(0, 2, 5), "cu_seqlens_k": starts(0, 3, 7),
            "max_seqlen_q": 3, "max_seqlen_k": 4, **changes}


def cached(**changes):
    return {"q": new(2, 1, 4, 16), "k_cache": new(3, 8, 2, 16), "v_cache": new(3, 8, 2, 16), **changes}


def appended(**changes):
    return cached(k=new(2, 1, 2, 16), v=new(2, 1, 2, 16), cache_seqlens=4, **changes)


BF16 = torch.bfloat16
REFUSED = [
    # What all have in common, and dense tensors.
    ("func", dense(q=[1.0]), TypeError, "q is a list, must be a torch tensor"),
    ("func", dense(k=None), TypeError, "k is None, must be a torch tensor"),
    ("func", dense(q=new(5, 4, 16)), ValueError, "q has 3 dimensions [5, 4, 16], must have 4: [batch, seqlen, nheads, headdim]"),
    ("func", dense(k=new(1, 7, 2, 16), v=new(1, 7, 2, 16)), ValueError, "k.shape[0] (batch) is 1, but q has 2"),
    ("func", dense(v=new(2, 6, 2, 16)), ValueError, "v.shape[1] (seqlen) is 6, but k has 7"),
    ("func", dense(v=new(2, 7, 1, 16)), ValueError, "v has 1 heads, but k has 2"),
    ("func", dense(k=new(2, 7, 3, 16), v=new(2, 7, 3, 16)), ValueError, "q has 4 heads, which is no multiple of the 3 heads of k"),
    ("func", dense(k=new(2, 7, 2, 8)), ValueError, "k has headdim 8, but q has 16"),
    ("func", dense(q=torch.ones(2, 5, 4, 16, dtype=torch.int32)), ValueError,
     "q has dtype torch.int32, must be float16, bfloat16, float32 or float64"),
    ("func", dense(v=new(2, 7, 2, 16, dtype=BF16)), ValueError, "v has dtype torch.bfloat16, but q has torch.float32: they must be of one dtype"),
    ("func", dense(dropout_p=1.0), ValueError, "dropout_p is 1.0, must be at least 0 and below 1"),
    ("func", dense(dropout_p=-0.1), ValueError, "dropout_p is -0.1, must be at least 0 and below 1"),
    ("func", dense(dropout_p="0.1"), TypeError, "dropout_p is '0.1' (str), must be a number"),
    ("func", dense(causal=1), TypeError, "causal is 1 (int), must be True or False"),
    ("func", dense(softmax_scale=float("nan")), ValueError, "softmax_scale"),
    ("func", dense(softcap=-1.0), ValueError, "softcap is -1, must be 0 or positive"),
    ("func", dense(window_size=(-2, 0)), ValueError, "window_size is (-2, 0): its left side is -2, must be -1 (open) or a number of keys"),
    ("func", dense(window_size=(1, -7)), ValueError, "window_size is (1, -7): its right side is -7, must be -1 (open) or a number of keys"),
    ("func", dense(window_size=3), TypeError, "window_size is 3, must be two integers (left, right)"),
    ("func", dense(window_size=(1.5, 0)), TypeError, "window_size is (1.5, 0), must be two integers (left, right)"),
    ("func", dense(alibi_slopes=new(3)), ValueError, "alibi_slopes has shape [3], must be [nheads] = [4] or [batch, nheads] = [2, 4]"),
    ("func", dense(alibi_slopes=new(4, dtype=BF16)), ValueError, "alibi_slopes has dtype torch.bfloat16, must be float32"),
    ("func", dense(alibi_slopes=[1.0]), TypeError, "alibi_slopes is a list, must be a torch tensor"),
    ("func", dense(alibi_slopes=new(4).requires_grad_()), RuntimeError, "requires gradients"),
    ("kvpacked_func", {"q": new(2, 5, 4, 16), "kv": new(2, 7, 3, 2, 16)}, ValueError,
     "kv.shape[2] is 3, must be 2: [batch, seqlen, 2, nheads_k, headdim]"),
    ("kvpacked_func", {"q": new(2, 5, 4, 16), "kv": new(1, 7, 2, 2, 16)}, ValueError, "kv.shape[0] (batch) is 1, but q has 2"),
    ("qkvpacked_func", {"qkv": new(2, 7, 2, 2, 16)}, ValueError, "qkv.shape[2] is 2, must be 3: [batch, seqlen, 3, nheads, headdim]"),
    # Sequences one after the other.
    ("varlen_func", varlen(q=new(1, 5, 4, 16)), ValueError, "q has 4 dimensions [1, 5, 4, 16], must have 3: [total, nheads, headdim]"),
    ("varlen_func", varlen(cu_seqlens_q=[0, 2, 5]), TypeError, "cu_seqlens_q is a list, must be a torch tensor"),
    ("varlen_func", varlen(cu_seqlens_q=new(3)), ValueError, "cu_seqlens_q has dtype torch.float32, must be int32"),
    ("varlen_func", varlen(cu_seqlens_q=starts(0, 2, 5)[None]), ValueError, "cu_seqlens_q has shape [1, 3], must be [batch + 1]"),
    ("varlen_func", varlen(cu_seqlens_q=starts()), ValueError, "cu_seqlens_q is empty, must be [batch + 1]"),
    ("varlen_func", varlen(cu_seqlens_q=starts(1, 2, 5)), ValueError, "cu_seqlens_q[0] is 1, must be 0"),
    ("varlen_func", varlen(cu_seqlens_q=starts(0, 3, 2)), ValueError, "cu_seqlens_q[2] is 2, less than cu_seqlens_q[1] = 3"),
    ("varlen_func", varlen(cu_seqlens_k=starts(0, 3, 7, 7)), ValueError, "cu_seqlens_k has 4 numbers, but cu_seqlens_q has 3"),
    ("varlen_func", varlen(cu_seqlens_q=starts(0, 3, 6)), ValueError, "cu_seqlens_q[2] is 6, but q has 5 rows"),
    ("varlen_func", varlen(max_seqlen_k=3), ValueError, "max_seqlen_k is 3, but sequence 1 of cu_seqlens_k has 4"),
    ("varlen_func", varlen(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1, must not be negative"),
    ("varlen_func", varlen(max_seqlen_q=3.0), TypeError, "max_seqlen_q is 3.0 (float), must be an integer"),
    ("varlen_func", varlen(block_table=starts(0, 1)[None]), ValueError,
     "k has 3 dimensions [7, 2, 16], must have 4: [num_blocks, page_block_size, nheads_k, headdim]"),
    ("varlen_func", varlen(k=new(2, 4, 2, 16), v=new(2, 4, 2, 16), block_table=starts(0, 1)[None]), ValueError,
     "block_table has shape [1, 2], must be [batch, max_num_blocks_per_seq] with batch = 2"),
    ("varlen_func", varlen(k=new(2, 4, 2, 16), v=new(2, 4, 2, 16), block_table=starts(0, 1)[:, None], dropout_p=0.1, return_attn_probs=True),
     NotImplementedError, "return_attn_probs with dropout_p and a block_table is not implemented"),
    ("varlen_kvpacked_func", {"q": new(5, 4, 16), "kv": new(7, 2, 2, 16), "cu_seqlens_q": starts(0, 5), "cu_seqlens_k": starts(0, 8),
                              "max_seqlen_q": 5, "max_seqlen_k": 8}, ValueError, "cu_seqlens_k[1] is 8, but kv has 7 rows"),
    ("varlen_qkvpacked_func", {"qkv": new(7, 3, 2, 16), "cu_seqlens": starts(0, 7), "max_seqlen": 6}, ValueError,
     "max_seqlen is 6, but sequence 0 of cu_seqlens has 7"),
    # Caches.
    ("with_kvcache", cached(k=new(2, 1, 2, 16)), ValueError, "v is None, but the other one is given: they go together"),
    ("with_kvcache", cached(k=new(2, 1, 2, 16), v=new(2, 1, 2, 16)), ValueError,
     "cache_seqlens is None, but k and v are given: it says where they are written"),
    ("with_kvcache", cached(cache_seqlens=9), ValueError, "cache_seqlens[0] is 9, must be from 0 to 8"),
    ("with_kvcache", cached(cache_seqlens=starts(3, -1)), ValueError, "cache_seqlens[1] is -1, must be from 0 to 8"),
    ("with_kvcache", cached(cache_seqlens=starts(3)), ValueError, "cache_seqlens has shape [1], must be an int, or [batch] = [2]"),
    ("with_kvcache", cached(cache_seqlens=new(2)), ValueError, "cache_seqlens has dtype torch.float32, must be int32"),
    ("with_kvcache", cached(cache_seqlens=[3, 4]), TypeError, "cache_seqlens is [3, 4] (list), must be an integer"),
    ("with_kvcache", appended(cache_batch_idx=starts(0, 3)), ValueError, "cache_batch_idx[1] is 3, must be from 0 to 2, a sequence of k_cache"),
    ("with_kvcache", cached(k_cache=new(1, 8, 2, 16), v_cache=new(1, 8, 2, 16)), ValueError,
     "k_cache.shape[0] (batch_cache) is 1, but q has batch 2"),
    ("with_kvcache", cached(cache_batch_idx=starts(0, 1), block_table=starts(0, 1)[:, None]), ValueError,
     "cache_batch_idx and block_table are both given"),
    ("with_kvcache", cached(v_cache=new(3, 9, 2, 16)), ValueError, "v_cache.shape[1] (seqlen) is 9, but k_cache has 8"),
    ("with_kvcache", {**appended(), "cache_seqlens": 8}, ValueError,
     "cache_seqlens[0] is 8, must be from 0 to 7: 1 new tokens behind it, and a sequence of the cache holds 8"),
    ("with_kvcache", {**appended(), "k": new(2, 1, 1, 16)}, ValueError, "k.shape[2] (nheads_k) is 1, but k_cache has 2"),
    ("with_kvcache", {**appended(), "v": new(2, 2, 2, 16)}, ValueError, "v.shape[1] (seqlen_new) is 2, but k has 1"),
    ("with_kvcache", {**appended(), "k": new(1, 1, 2, 16)}, ValueError, "k.shape[0] (batch) is 1, but q has 2"),
    ("with_kvcache", {**appended(), "k": new(2, 1, 2, 16, dtype=BF16)}, ValueError, "k has dtype torch.bfloat16, but k_cache has torch.float32"),
    ("with_kvcache", {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in appended().items()}, ValueError,
     "k has dtype torch.float64, but tokens are appended in float16, bfloat16 or float32 only"),
    ("with_kvcache", appended(block_table=starts(0, 3)[:, None]), ValueError, "block_table[1][0] is 3, must be from 0 to 2, a block of k_cache"),
    ("with_kvcache", appended(rotary_cos=new(8, 8)), ValueError, "rotary_sin is None, but the other one is given: they go together"),
    ("with_kvcache", cached(rotary_cos=new(8, 8), rotary_sin=new(8, 8)), ValueError,
     "rotary_cos and rotary_sin are given, but k and v are not: the cache's keys are rotated already"),
    ("with_kvcache", appended(rotary_cos=new(8, 9), rotary_sin=new(8, 9)), ValueError,
     "rotary_cos.shape[1] is 9, so rotary_dim is 18, but headdim is 16"),
    ("with_kvcache", appended(rotary_cos=new(4, 8), rotary_sin=new(4, 8)), ValueError,
     "rotary_cos.shape[0] (seqlen_ro) is 4, but the last token is the 5th"),
    ("with_kvcache", appended(rotary_cos=new(8, 8), rotary_sin=new(8, 4)), ValueError, "rotary_sin.shape[1] (rotary_dim / 2) is 4, but rotary_cos has 8"),
    ("with_kvcache", appended(rotary_cos=new(8, 8, dtype=BF16), rotary_sin=new(8, 8)), ValueError,
     "rotary_cos has dtype torch.bfloat16, must be that of q, torch.float32"),
    ("with_kvcache", appended(cache_leftpad=starts(0, 6)), ValueError, "cache_leftpad[1] is 6, must be from 0 to 5, where the sequence ends"),
    ("with_kvcache", cached(num_splits=0.5), TypeError, "num_splits is 0.5 (float), must be an integer"),
    ("with_kvcache", {**appended(), "q": new(2, 1, 4, 16).requires_grad_()}, RuntimeError,
     "k and v are written into the cache, which has no gradients, but an argument requires them"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number):
    name, arguments, kind, message = REFUSED[number]
    name = f"flash_attn_{name}"
    before = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(kind) as caught:
        getattr(facade, name)(**arguments)
    assert str(caught.value).startswith(f"{name}: ") and message in str(caught.value), caught.value
    for key, x in before.items():  # nothing was written
        assert torch.equal(x.nan_to_num(), arguments[key].nan_to_num())


def test_two_seeds_of_dropout_and_the_same_one():
    q = torch.ones(1, 16, 2, 8)
    def call():
        return facade.flash_attn_func(q, q, torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(1)), 0.5)
    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    assert torch.equal(call(), first) and not torch.equal(first, second)


def test_statistics_have_gradients():
    q, k, v = (new(1, n, 2, 8).double().requires_grad_() for n in (3, 5, 5))
    assert torch.autograd.gradcheck(lambda *x: facade.flash_attn_func(*x, causal=True, window_size=(2, -1), return_attn_probs=True)[:2], (q, k, v))


def test_compile_sees_one_operator():
    q, k, v = (new(2, n, 2, 16).requires_grad_() for n in (5, 7, 7))
    at = starts(0, 2, 5)
    for call in (lambda q, k, v: facade.flash_attn_func(q, k, v, causal=True, window_size=(3, -1)),
                 lambda q, k, v: facade.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), softcap=4.0),
                 lambda q, k, v: facade.flash_attn_varlen_func(q[0], k[0, :5], v[0, :5], at, at, 3, 3, causal=True)):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for one, other in zip(*(torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (call, compiled))):
            assert torch.equal(one, other)


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the operators of torch that run in a block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_no_input_is_copied():
    """Every operator of a call gives views, but attention itself and those of short lists of integers."""
    q, k, v, qkv = new(2, 5, 4, 16), new(2, 7, 2, 16), new(2, 7, 2, 16), new(2, 5, 3, 2, 16)
    at = starts(0, 2, 5)
    views = {"transpose", "unbind", "select", "slice", "alias", "detach", "unsqueeze", "permute"}
    integers = {"arange", "diff", "full", "add", "lt", "gt", "any", "bitwise_or", "sub", "cat", "new_zeros", "zeros", "_local_scalar_dense", "any",
                "__or__", "narrow", "_to_copy", "is_nonzero", "copy", "lift_fresh", "eq"}
    for call, more in ((lambda: facade.flash_attn_func(q, k, v, causal=True), set()),
                       (lambda: facade.flash_attn_qkvpacked_func(qkv, softcap=3.0), set()),
                       (lambda: facade.flash_attn_varlen_qkvpacked_func(qkv[0], at, 3), set()),
                       (lambda: facade.flash_attn_varlen_func(q[0], k, v, at, at, 3, 3, block_table=starts(0, 1)[:, None]), integers),
                       (lambda: facade.flash_attn_with_kvcache(q, k, v, cache_seqlens=3), integers)):
        with Recorded() as recorded:
            call()
        assert "attention" in recorded.names
        assert set(recorded.names) - {"attention"} <= views | more, recorded.names


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_unpad_and_pad():
    states = new(2, 4, 3, 5).double().requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    rows, indices, at, longest, used = padding.unpad_input(states, mask.bool())
    assert indices.tolist() == [0, 1, 5, 6, 7] and indices.dtype == torch.int64
    assert at.tolist() == [0, 2, 5] and at.dtype == torch.int32 and longest == 3 and used.tolist() == [2, 3]
    assert torch.equal(rows, torch.cat([states[0, :2], states[1, 1:]]))
    back = padding.pad_input(rows, indices, 2, 4)
    assert torch.equal(back, states * mask[..., None, None])
    assert torch.autograd.gradcheck(lambda x: padding.pad_input(padding.unpad_input(x, mask)[0].sin(), indices, 2, 4), (states,))


def test_unused_rows_are_kept():
    states = new(1, 4, 2)
    rows, indices, at, longest, used = padding.unpad_input(states, torch.tensor([[1, 0, 0, 1]]), torch.tensor([[0, 1, 0, 0]]))
    assert indices.tolist() == [0, 1, 3] and at.tolist() == [0, 3] and longest == 3 and used.tolist() == [2]
    assert used.dtype == torch.int32 and torch.equal(rows, states[0, [0, 1, 3]])


def test_concatenated_sequences():
    states = new(2, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, at, longest = padding.unpad_input_for_concatenated_sequences(states, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11] and at.tolist() == [0, 2, 5, 11] and longest == 6
    assert torch.equal(rows, states.flatten(0, 1)[indices])


def test_first_axis():
    values, indices = new(3, 2).double().requires_grad_(), torch.tensor([4, 0, 2])
    put = padding.index_put_first_axis(values, indices, 5)
    assert torch.equal(put[indices], values) and not put[[1, 3]].any()
    assert torch.equal(padding.index_first_axis(put, indices), values)
    assert torch.autograd.gradcheck(lambda x: padding.index_put_first_axis(x, indices, 5), (values,))
    assert torch.autograd.gradcheck(lambda x: padding.index_first_axis(x, torch.tensor([0, 0, 2])), (values,))


@pytest.mark.parametrize("call, message", [
    (lambda: padding.unpad_input(new(2, 4), torch.ones(2, 3).int()),
     "unpad_input: attention_mask has shape [2, 3], but hidden_states says [batch, seqlen] = [2, 4]"),
    (lambda: padding.unpad_input(new(2, 4), torch.ones(2, 4)), "unpad_input: attention_mask has dtype torch.float32, must be bool or an integer"),
    (lambda: padding.unpad_input(new(2, 4), torch.full((2, 4), 2)), "unpad_input: attention_mask has 2, must be 0 or 1"),
    (lambda: padding.unpad_input(new(1, 2), torch.ones(1, 2).int(), torch.ones(1, 2).int()),
     "unpad_input: attention_mask + unused_mask has 2, must be 0 or 1"),
    (lambda: padding.unpad_input(new(4), torch.ones(4).int()), "unpad_input: hidden_states has 1 dimensions [4], must have 2 or more"),
    (lambda: padding.pad_input(new(2, 3), torch.tensor([0, 8]), 2, 4), "pad_input: indices has 8, but the result has 8 rows"),
    (lambda: padding.pad_input(new(2, 3), torch.tensor([0]), 2, 4), "pad_input: indices has 1 rows, but values has 2"),
    (lambda: padding.index_first_axis(new(2, 3), torch.tensor([-1])), "index_first_axis: indices has -1, but input has 2 rows"),
    (lambda: padding.index_first_axis(new(2, 3), new(2)), "index_first_axis: indices is torch.float32 [2], must be int32 or int64 [count]"),
    (lambda: padding.unpad_input_for_concatenated_sequences(new(1, 3), torch.tensor([[2, 2, 0]])),
     "unpad_input_for_concatenated_sequences: attention_mask_in_length[0] sums to 4, but hidden_states has seqlen 3"),
    (lambda: padding.unpad_input_for_concatenated_sequences(new(1, 3), torch.tensor([[2, -2, 0]])),
     "unpad_input_for_concatenated_sequences: attention_mask_in_length has -2, must not be negative"),
])
def test_padding_refuses(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


# ---- install ---------------------------------------------------------------------------------------------------------


def test_install_is_flash_attn_for_a_block():
    with facade.install():
        import flash_attn
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
        from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
        import importlib.util

        assert flash_attn_func is facade.flash_attn_func and flash_attn.flash_attn_with_kvcache is facade.flash_attn_with_kvcache
        assert flash_attn.bert_padding.pad_input is padding.pad_input
        assert importlib.util.find_spec("flash_attn") is not None and flash_attn.__version__.startswith("2.")
        with pytest.raises(ModuleNotFoundError, match="flash_attn.layers"):
            import flash_attn.layers.rotary  # noqa: F401
        with facade.install():
            pass
        assert "flash_attn" in sys.modules
    assert not any(name.partition(".")[0] == "flash_attn" for name in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        import flash_attn  # noqa: F401,F811


def test_install_without_a_block_holds():
    installation = facade.install()
    with facade.install() as same:
        assert same is installation
    assert "flash_attn" in sys.modules
    installation.undo()
    installation.undo()
    assert "flash_attn" not in sys.modules


def test_another_flash_attn_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("its = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="flash_attn can be imported here, so its name is not taken: import ops_transformer.flash_attn"):
        facade.install()
    import flash_attn

    assert flash_attn.its == 1
    del sys.modules["flash_attn"]

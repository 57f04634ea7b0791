"""Every function with a value of a wrong kind for every argument: the message names function and argument, in our words."""

import inspect
import signal
import sys

import numpy as np
import pytest

import ops_transformer
from ops_transformer import Tagged, flash_attention, kv_cache, matmul, moe, quant, rowwise

X = np.ones((2, 4), np.float32)
Q = np.ones((1, 1, 4, 8), np.float32)
ROWS = np.ones((2, 1, 4), np.float32)
TABLE = np.ones((2, 2), np.float32)
BLOCKS = np.zeros((2, 34), np.uint8)


def pages():
    return kv_cache.new_pages(4, 8, 1, 4)


def rope_scatter():
    return (ROWS, ROWS, ROWS, TABLE, TABLE, [0, 1], *pages())


def int_stack():
    return matmul.pack_int_stack(np.ones((2, 6, 4), np.int8), np.ones((2, 6, 1), np.float32))


EXPERTS = np.ones((4, 6, 4), np.float32), np.ones((4, 4, 3), np.float32)

# Arguments with which each function works. Those with defaults are tried on top of them.
WORKING = {
    "rowwise.rms_norm": lambda: (X, X[0]), "rowwise.add_rms_norm": lambda: (X, X, X[0]),
    "rowwise.rms_norm_backward": lambda: (X, X, X[0]), "rowwise.layer_norm": lambda: (X,),
    "rowwise.layer_norm_backward": lambda: (X, X), "rowwise.softmax": lambda: (X,), "rowwise.softmax_backward": lambda: (X, X),
    "rowwise.rope_table": lambda: ([0, 1], 2), "rowwise.rope": lambda: (ROWS, TABLE, TABLE),
    "rowwise.rope_cached": lambda: (ROWS, [0, 1], TABLE, TABLE), "rowwise.swiglu": lambda: (X,),
    "rowwise.swiglu_backward": lambda: (X[:, :2], X), "rowwise.add": lambda: (X, X),
    "matmul.pack": lambda: (X,), "matmul.pack_blocks": lambda: (BLOCKS, "q8_0", 2, 32),
    "matmul.pack_int": lambda: (np.ones((2, 4), np.int8),), "matmul.matmul": lambda: (X, X),
    "matmul.matmul_backward": lambda: (np.ones((2, 2), np.float32), X, X),
    "matmul.matmul_int": lambda: (X, matmul.pack_int(np.ones((2, 4), np.int8))),
    "matmul.pack_stack": lambda: (X[None],), "matmul.pack_blocks_stack": lambda: (BLOCKS, "q8_0", 2, 1, 32),
    "matmul.pack_int_stack": lambda: (np.ones((2, 3, 4), np.int8), np.ones((2, 3, 1), np.float32)),
    "matmul.grouped_matmul": lambda: (X, X[None], [2]),
    "matmul.grouped_matmul_swiglu_quant": lambda: (np.ones((2, 4), np.int8), X[:, 0], int_stack(), [1, 1]),
    "matmul.grouped_matmul_backward": lambda: (np.ones((2, 2), np.float32), X, X[None], [2]),
    "matmul.plan": lambda: (X, X), "matmul.lookup_rows": lambda: (matmul.pack(X), [0]), "matmul.read_ahead": lambda: (matmul.pack(X),),
    "quant.quantize": lambda: (X,), "quant.dequantize": lambda: quant.quantize(X)[:2], "quant.dynamic_quant": lambda: (X,),
    "quant.dequantize_blocks": lambda: (BLOCKS, "q8_0", 2, 32), "quant.lookup_rows": lambda: (BLOCKS, "q8_0", 2, 32, [0]),
    "kv_cache.new_pages": lambda: (4, 8, 1, 4), "kv_cache.scatter_pa_kv_cache": lambda: (ROWS, ROWS, [0, 1], *pages()),
    "kv_cache.rope_scatter_pa_kv_cache": rope_scatter, "kv_cache.convert_pages": lambda: (*kv_cache.new_pages(1, 32, 1, 4), *kv_cache.new_pages(1, 32, 1, 4, layout="panel32")),
    "kv_cache.gather_pa_kv_cache": lambda: (*pages(), [[0]], [1]),
    "kv_cache.paged_attention": lambda: (np.ones((1, 1, 1, 4), np.float32), *pages(), [[0]], [1]),
    "moe.moe_gating": lambda: (X, 1), "moe.moe_gating_backward": lambda: (X, [[0], [1]], X[:, :1]), "moe.moe_routing": lambda: ([[0], [1]], 2),
    "moe.moe_compute_expert_tokens": lambda: ([0, 1], 2), "moe.moe_permute": lambda: (X, [0, 1], 1),
    "moe.moe_layer": lambda: (X, *EXPERTS, X, 1), "moe.moe_layer_backward": lambda: (X, X, *EXPERTS, X, 1),
    "moe.moe_finalize": lambda: (X, [[0], [1]]), "moe.moe_finalize_backward": lambda: (X, X, [[0], [1]]),
    "flash_attention.flash_attention": lambda: (Q, Q, Q),
    "flash_attention.lightning_indexer": lambda: (Q, Q, np.ones((1, 1, 4), np.float32), 2),
    "flash_attention.sparse_flash_attention": lambda: (Q, Q, Q, np.zeros((1, 4, 1, 1), np.int32)),
    "flash_attention.tree_mask": lambda: ([-1, 0],),
    "flash_attention.merge_attention": lambda: (np.ones((2, 1, 4), np.float32), np.ones((2, 1), np.float32)),
}
# Those have tests of their own, or take anything.
ELSEWHERE = {"flash_attention_score", "flash_attention_grad", "attention_weights", "pack_drop_mask", "dropout_mask"}
ANYTHING = {"like"}
WRONG = [object(), 1j, {"a": 1}]


def functions():
    for module in (flash_attention, kv_cache, matmul, moe, quant, rowwise):
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)):
                yield f"{module.__name__.split('.')[-1]}.{name}"


def test_every_function_is_in_the_list():
    assert {name for name in functions() if name.split(".")[1] not in ELSEWHERE} == set(WORKING)


@pytest.mark.parametrize("name", WORKING)
def test_wrong_kinds_are_named(name):
    module, word = name.split(".")
    function = getattr(getattr(ops_transformer, module), word)
    parameters = {key: parameter for key, parameter in inspect.signature(function).parameters.items()
                  if parameter.kind is not parameter.VAR_KEYWORD}
    rows = WORKING[name]()
    function(*rows)
    for index, argument in enumerate(parameters):
        if argument in ANYTHING:
            continue
        for wrong in WRONG:
            args, more = list(rows), {}
            if index < len(args):
                args[index] = wrong
            else:
                more[argument] = wrong
            with pytest.raises((TypeError, ValueError)) as caught:
                function(*args, **more)
            text = str(caught.value)
            assert "incompatible function arguments" not in text, (argument, text)
            assert word in text and argument in text, (argument, text)


def test_tags_that_say_nothing():
    bits = np.ones((2, 4), np.uint16)
    for wrong in (Tagged(bits, 3), Tagged(None, "bf16"), Tagged("text", "bf16"), Tagged(bits, "f8")):
        with pytest.raises((TypeError, ValueError), match="^softmax: x ") as caught:
            rowwise.softmax(wrong)
        assert "incompatible" not in str(caught.value)


def test_classes_name_theirs():
    pool = kv_cache.BlockPool(4)
    for call, words in ((lambda: kv_cache.BlockPool(2.5), "BlockPool: num_blocks is 2.5"),
                        (lambda: pool.allocate("2"), "BlockPool.allocate: count is '2'"),
                        (lambda: pool.fork([0.5]), "BlockPool.fork: blocks"), (lambda: pool.free("a"), "BlockPool.free: blocks"),
                        (lambda: pool.references(1j), "BlockPool.references: block is 1j"),
                        (lambda: pool.prepare_write(None), "BlockPool.prepare_write: block is None"),
                        (lambda: ops_transformer.Context(num_threads=1.5), "Context: num_threads is 1.5"),
                        (lambda: ops_transformer.Context(isa=3), "Context: isa is 3"),
                        (lambda: ops_transformer.set_num_threads("4"), "set_num_threads: num_threads is '4'")):
        with pytest.raises(TypeError, match=words) as caught:
            call()
        assert "incompatible" not in str(caught.value)
    with pytest.raises(ValueError, match="BlockPool.allocate: count is"):
        pool.allocate(2**70)
    for call, words in ((lambda: pool.fork([[0, 1]]), r"BlockPool.fork: blocks must be one row of block ids, but its shape is \[1, 2\]"),
                        (lambda: pool.free(0), r"BlockPool.free: blocks must be one row of block ids, but its shape is \[\]")):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.filterwarnings("ignore:nanobind")
def test_a_pool_that_was_never_made_says_so():
    pool = kv_cache.BlockPool.__new__(kv_cache.BlockPool)
    for call, name in ((lambda: pool.num_free, "num_free"), (lambda: pool.num_blocks, "num_blocks"), (pool.allocate, "allocate"),
                       (lambda: pool.free([0]), "free"), (lambda: pool.references(0), "references")):
        with pytest.raises(TypeError, match=f"^BlockPool.{name}: this BlockPool was never made"):
            call()


@pytest.mark.parametrize("dtype, words", [(">f4", r"has dtype >f4, float32 in the byte order"), (">i8", "has dtype >i8, int64 in the byte"),
                                          (object, "has dtype object"), ("M8[s]", r"has dtype datetime64\[s\]"),
                                          (np.longdouble, "has dtype " + str(np.dtype(np.longdouble))), ("S4", r"has dtype \|S4"),
                                          (np.complex64, "has dtype complex64"), ([("a", "f4")], "has dtype .*'a'")])
def test_dtypes_that_are_not_taken_are_named(dtype, words):
    if np.dtype(dtype) == np.float64:
        pytest.skip("long double is double here")
    for call, argument in ((rowwise.softmax, "softmax: x "), (matmul.pack, "pack: weight ")):
        with pytest.raises((TypeError, ValueError), match=argument + words):
            call(np.zeros((2, 4), dtype))


def test_rows_of_different_lengths_are_named():
    with pytest.raises(ValueError, match="gather_pa_kv_cache: block_table must have rows of one length, but row 0 is 2 long and row 2 is 1 long"):
        kv_cache.gather_pa_kv_cache(*pages(), [[0, 1], [2, 3], [2]], [3, 3, 3])
    with pytest.raises(ValueError, match="block_table must have rows of one length, but row 0 is 1 long and row 1 is a number"):
        kv_cache.gather_pa_kv_cache(*pages(), [[0], 1], [3, 3])


def test_results_that_no_memory_holds_are_named():
    wide = np.lib.stride_tricks.as_strided(X, (2**30, 2**30), (0, 0))
    for call, words in ((lambda: rowwise.softmax(wide), r"softmax: a result of f32 \[1073741824, 1073741824\]"),
                        (lambda: quant.dequantize_blocks(BLOCKS, "q8_0", 2**40, 2**40), r"dequantize_blocks: a result of f32 \[1099511627776, "),
                        (lambda: kv_cache.gather_pa_kv_cache(*pages(), [[0]], [2**55]), r"gather_pa_kv_cache: a result of f32 \[36028797018963968, 1, 4\]"),
                        (lambda: kv_cache.new_pages(2**30, 32, 32, 64), r"new_pages: a result of f32 \[1073741824, 32, 32, 64\]")):
        with pytest.raises(MemoryError, match=words):
            call()


@pytest.mark.parametrize("layout", ["norm", "panel32"])
def test_pages_that_nobody_can_count_are_refused(layout):
    for sizes in ((2**40, 2**20, 2**20, 1), (2**20, 2**20, 2**20, 2**20), (2**62, 32, 1, 1), (2**40, 32, 1, 1, 2**40)):
        with pytest.raises(MemoryError, match=f"new_pages: num_blocks {sizes[0]} .* block_size {sizes[1]} .* num_kv_heads {sizes[2]} "
                                              f".* head_dim {sizes[-1]} "):
            kv_cache.new_pages(*sizes, layout=layout)


# ---- what the fuzz target found --------------------------------------------------------------------------------------


# Without CPython's limit of digits such a number has a text, of which a message shows the beginning.
HUGE = "an integer of 16610 bits" if 0 < getattr(sys, "get_int_max_str_digits", int)() <= 5000 else "1" + "0" * 56 + "..."


@pytest.mark.parametrize("call, kind, words", [
    (lambda: rowwise.rope_table([0], 10**5000), ValueError, f"rope_table: half is {HUGE}"),
    (lambda: rowwise.rope_table([10**5000], 2), ValueError, f"rope_table: positions holds {HUGE} as element 0"),
    (lambda: rowwise.softmax(X, 10**5000), TypeError, f"softmax: scale is {HUGE}"),
    (lambda: rowwise.rope(ROWS, TABLE, TABLE, style="\udc80"), ValueError, "rope: style is '\\udc80', must be a text of whole characters"),
    (lambda: kv_cache.new_pages(4, -1, 1, 4), ValueError, "new_pages: block_size is -1, must not be negative"),
    (lambda: kv_cache.new_pages(4, 0, 1, 4), RuntimeError, "new_pages: page layout norm: block_size is 0, but must be >= 1"),
    (lambda: flash_attention.flash_attention(Q, Q, np.float32(1)), ValueError, "flash_attention: v must have the dimensions of k"),
    (lambda: kv_cache.paged_attention(Q, *pages()[:1], np.float32(1), [[0]], [1]), ValueError, "paged_attention: value_cache must be pages"),
    (lambda: flash_attention.flash_attention_score(Q, Q, Q, padding_mask=np.zeros((2, 1), bool), mask=np.ones((3, 1, 1, 1), bool)),
     ValueError, "flash_attention_score: padding_mask [2, 1] and mask [3, 1, 1, 1] are of different problems"),
    (lambda: flash_attention.pack_drop_mask([[True], [True, False]]), TypeError, "pack_drop_mask: keep must be an array of bool"),
    (lambda: flash_attention.pack_drop_mask(X), TypeError, "pack_drop_mask: keep has dtype float32, must be bool"),
    (lambda: flash_attention.flash_attention_grad(Q, Q, Q, Q, attention_out=Q, softmax_lse=Q[..., 0], wanted=3), TypeError,
     "flash_attention_grad: wanted is 3, must be names"),
    (lambda: flash_attention.flash_attention_grad(Q, Q, Q, Q, attention_out=Q, softmax_lse=Q[..., 0], wanted=(Q,)), ValueError,
     "flash_attention_grad: wanted has"),
    (lambda: flash_attention.dropout_mask(2**50, 1, 1, 1, 0.5), MemoryError, "dropout_mask: "),
    (lambda: matmul.lookup_rows(matmul.pack(X), np.broadcast_to(np.int8(1), (2**59,))), MemoryError, "lookup_rows: "),
    # The copy is asked for first: to look at them all would take years.
    (lambda: matmul.lookup_rows(matmul.pack(X), np.broadcast_to(np.uint64(1), (2**59,))), MemoryError, "lookup_rows: "),
    (lambda: matmul.pack_blocks([BLOCKS, BLOCKS], "q8_0", np.broadcast_to(np.int64(2), (2**59,)), 32), ValueError,
     "pack_blocks: rows must be 2 numbers"),
    (lambda: matmul.lookup_rows(matmul.pack(X), range(2**62)), MemoryError, "lookup_rows: indices holds more integers than memory does"),
    (lambda: matmul.lookup_rows(matmul.pack(X), np.array([0, 2**63], np.uint64)), ValueError, "lookup_rows: indices holds 9223372036854775808"),
])
def test_what_nobody_means_is_refused_in_words(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind and str(error.value).startswith(words)


@pytest.mark.parametrize("member", ["dtype", "shape", "__array__", "__index__", "__float__", "__array_interface__"])
@pytest.mark.parametrize("raised", [AssertionError, KeyError, RuntimeError, BufferError])
def test_what_a_foreign_object_raises_is_refused_as_its_kind(member, raised):
    def fail(self, *_, **__):
        raise raised("a fault of its own")

    method = member in ("__array__", "__index__", "__float__")
    thing = type("Foreign", (), {member: fail if method else property(fail)})()
    for call in (lambda: rowwise.softmax(thing), lambda: rowwise.softmax(X, thing), lambda: rowwise.rope_table(thing, 2),
                 lambda: rowwise.rope_table([thing], 2), lambda: rowwise.rope_table([0], thing),
                 lambda: flash_attention.flash_attention(Q, Q, Q, mask=thing), lambda: flash_attention.pack_drop_mask(thing),
                 lambda: flash_attention.attention_weights(Q, Q, sinks=thing),
                 lambda: rowwise.softmax(X, out=thing), lambda: rowwise.rope(ROWS, TABLE, TABLE, inverse=thing)):
        with pytest.raises(TypeError):
            call()


def test_tagged_bytes_are_packed_as_the_flags_that_they_are():
    keep = np.arange(16).reshape(1, 1, 2, 8) % 3 == 0
    want = flash_attention.pack_drop_mask(keep)
    assert (flash_attention.pack_drop_mask(Tagged(keep.view(np.uint8), "bool")) == want).all()


def test_tags_of_what_is_no_flags_are_refused():
    def fail(self, *_, **__):
        raise KeyError("a fault of its own")

    foreign = type("Foreign", (), {"__array__": fail})()
    for wrong in (None, "text", np.zeros((1, 1, 2, 8)), np.zeros((1, 1, 2, 8), np.uint16), [[1], [1, 2]], foreign):
        with pytest.raises(TypeError, match="^pack_drop_mask: keep (has dtype .*, must be uint8 or bool|must be an array of bool)"):
            flash_attention.pack_drop_mask(Tagged(wrong, "bool"))


class Late(ValueError):
    """Of a caller, who waits for this one."""


def test_what_a_handler_raises_arrives_as_what_it_is():
    def late(*_):
        raise Late("no more time")

    q = np.ones((1, 1, 2**17, 64), np.float32)
    old = signal.signal(signal.SIGALRM, late)
    try:
        with pytest.raises(ValueError) as caught:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            flash_attention.flash_attention(q, q, q)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert type(caught.value) is Late and str(caught.value) == "no more time"


def test_statistics_of_rows_without_elements_are_nan():
    x = np.ones((3, 0), np.float32)
    for statistics in (rowwise.layer_norm(x, return_statistics=True)[1:], rowwise.rms_norm(x, x[0], return_rstd=True)[1:],
                       rowwise.add_rms_norm(x, x, x[0], return_rstd=True)[2:]):
        assert all(numbers.shape == (3,) and np.isnan(numbers).all() for numbers in statistics)

"""What is taken as integers, as an option and as memory: nothing is cast, cut off or detached without a word."""

import ctypes

import numpy as np
import pytest

from ops_transformer import kv_cache, matmul, quant, rowwise
from ops_transformer._arrays import int64, integers
from ops_transformer._core import View

NO_INTEGERS = [
    [2.7], [1, 2.0], [True], [1, False], np.array([1.0]), np.array([True]), [None], "12", b"12", None, [2**63], [-(2**63) - 1],
    np.array([2**63], np.uint64), np.ma.array([1, 2], mask=[False, True]), [[1, 2], [3]], [1j], {1, 2}, ["1"],
]
INTEGERS = [
    [3, 1], (3, 1), range(3, 0, -2), np.array([3, 1], np.int8), np.array([3, 1], np.uint16), np.array([3, 1], ">i4"),
    [np.int32(3), np.uint8(1)], np.ma.array([3, 1]), np.array([3, 1], np.uint64), (ctypes.c_int * 2)(3, 1), memoryview(b"\3\1"),
]


@pytest.mark.parametrize("values", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused_by_name(values):
    with pytest.raises((TypeError, ValueError), match="^slots .*"):
        integers(values, "slots")
    with pytest.raises((TypeError, ValueError), match="^rope_table: positions "):
        rowwise.rope_table(values, 2)


@pytest.mark.parametrize("values", INTEGERS, ids=repr)
def test_integers_of_any_kind_keep_their_values(values):
    assert integers(values).dtype in ("i32", "i64") and int64(values).dtype == "i64"
    cos, _ = rowwise.rope_table(values, 1)
    assert np.allclose(np.asarray(cos).ravel(), np.cos([3, 1]))


def test_arrays_of_32_and_64_bits_are_not_copied():
    for dtype in (np.int32, np.int64):
        array = np.arange(5, dtype=dtype)
        assert integers(array[::2]).strides == (2,)
    assert integers([]).shape == (0,) and integers([[]]).shape == (1, 0)


def test_every_list_of_integers_goes_through_the_one_conversion():
    keys, values = kv_cache.new_pages(4, 8, 1, 4)
    row = np.ones((1, 1, 4), np.float32)
    with pytest.raises(TypeError, match="scatter_pa_kv_cache: slot_mapping .* 2.7"):
        kv_cache.scatter_pa_kv_cache(row, row, [2.7], keys, values)
    for name, arguments in (("block_table", ([[0.5]], [1])), ("kv_lengths", ([[0]], [1.9])), ("kv_lengths", ([[0]], [True]))):
        with pytest.raises(TypeError, match=f"gather_pa_kv_cache: {name}"):
            kv_cache.gather_pa_kv_cache(keys, values, *arguments)
    with pytest.raises(TypeError, match="gather_pa_kv_cache: head_indices"):
        kv_cache.gather_pa_kv_cache(keys, values, [[0]], [1], head_indices=[0.0])
    with pytest.raises(TypeError, match="gather_pa_kv_cache: seq_offset"):
        kv_cache.gather_pa_kv_cache(keys, values, [[0]], [1], seq_offset=[0.5])
    with pytest.raises(TypeError, match="lookup_rows: indices"):
        quant.lookup_rows(np.zeros((2, 34), np.uint8), "q8_0", 2, 32, [0.5])
    with pytest.raises(TypeError, match="lookup_rows: indices"):
        matmul.lookup_rows(matmul.pack(np.ones((2, 4), np.float32)), [1.5])
    with pytest.raises(TypeError, match="rope_cached: positions"):
        rowwise.rope_cached(row, [0.5], np.ones((1, 2), np.float32), np.ones((1, 2), np.float32))


def test_options_of_another_kind_are_refused_by_name():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="rms_norm: eps is 'a' .*a number"):
        rowwise.rms_norm(x, x[0], "a")
    with pytest.raises(TypeError, match="rms_norm: eps is True .*a number"):
        rowwise.rms_norm(x, x[0], True)
    with pytest.raises(TypeError, match="quantize: bits is 8.0 .*an integer"):
        quant.quantize(x, bits=8.0)
    with pytest.raises(TypeError, match="rope_table: half is float32 2.5|rope_table: half is np.float32"):
        rowwise.rope_table([0], np.float32(2.5))
    with pytest.raises(ValueError, match="rope_table: half is 9223372036854775808, must be from"):
        rowwise.rope_table([0], 2**63)
    with pytest.raises(TypeError, match="gather_pa_kv_cache: zero_fill is 1"):
        kv_cache.gather_pa_kv_cache(*kv_cache.new_pages(1, 1, 1, 1), [[0]], [1], zero_fill=1)
    with pytest.raises(TypeError, match="matmul: activation is None"):
        matmul.matmul(x, x, activation=None)
    with pytest.raises(TypeError, match="matmul_int: weight is .*call matmul.matmul"):
        matmul.matmul_int(x, matmul.pack(x))
    with pytest.raises(TypeError, match="matmul: weight is a PackedIntWeight"):
        matmul.matmul(x, matmul.pack_int(np.ones((2, 4), np.int8)))
    with pytest.raises(TypeError, match="rms_norm: weight is None"):
        rowwise.rms_norm(x, None)
    # NumPy's own numbers and truths are taken.
    assert (rowwise.rms_norm(x, x[0], np.float32(0)) == 1).all()
    assert quant.quantize(x, bits=np.int64(8), zero_points=np.bool_(False))[2] is None


def test_masked_arrays(rng):
    x = rng.standard_normal((2, 4), dtype=np.float32)
    hidden = np.ma.array(x, mask=x > 10)
    assert (rowwise.softmax(hidden) == rowwise.softmax(x)).all()
    hidden[0, 1] = np.ma.masked
    with pytest.raises(ValueError, match=r"softmax: x is a masked array .*filled"):
        rowwise.softmax(hidden)


def test_exporters_without_strides(rng):
    four = (ctypes.c_float * 4)(1, 2, 3, 4)
    assert (np.asarray(rowwise.add(four, four)) == [2, 4, 6, 8]).all()
    assert View((ctypes.c_float * 4 * 2)()).strides == (4, 1)
    assert View(memoryview(b"abcd")).shape == (4,) and View(bytearray(2)).read_only is False
    with pytest.raises((TypeError, ValueError)):
        View((ctypes.c_char_p * 2)())


def test_scalars_are_refused_with_their_shape():
    one = np.array(1.0, np.float32)
    row = np.ones((1, 4), np.float32)
    for call in (lambda: matmul.matmul(one, row), lambda: matmul.matmul(row, one), lambda: quant.quantize(one),
                 lambda: quant.dynamic_quant(one), lambda: quant.dequantize(one, row), lambda: rowwise.softmax(one),
                 lambda: rowwise.swiglu(one), lambda: rowwise.rope_table(3, 2), lambda: rowwise.rope_table(one, 2),
                 lambda: kv_cache.gather_pa_kv_cache(*kv_cache.new_pages(1, 1, 1, 1), [[0]], 1),
                 lambda: matmul.matmul_backward(row, row, one)):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_sixteen_bits_without_a_meaning():
    with pytest.raises(ValueError, match="add: a has dtype uint16.*Tagged"):
        rowwise.add(np.ones(4, np.uint16), np.ones(4, np.float32))


def test_torch_tensors_that_are_more_than_their_memory(torch):
    z = torch.complex(torch.ones(2, 4), torch.ones(2, 4)).conj().imag
    assert z.is_neg()
    assert (quant.dequantize(*quant.quantize(z)) == -1).all()
    needs = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="quantize: x requires gradients"):
        quant.quantize(needs)
    with torch.no_grad():
        assert quant.quantize(needs)[0].shape == (2, 4)
    for tensor, words in ((torch.ones(2, 4, device="meta"), "meta"), (torch.eye(4).to_sparse(), "to_dense"),
                          (torch.nested.nested_tensor([torch.ones(4)]), "nested"),
                          (torch.ones(2, 4).as_subclass(type("Odd", (torch.Tensor,), {})), "Odd")):
        with pytest.raises(TypeError, match=f"quantize: x is .*{words}"):
            quant.quantize(tensor)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match="rope_table: positions .*torch|rope_table: positions .*(float32|bool)"):
            rowwise.rope_table(torch.ones(2, dtype=dtype), 2)
    assert rowwise.rope_table(torch.ones(2, dtype=torch.int16), 2)[0].shape == (2, 2)


def test_writing_counts_a_new_version(torch):
    cache = [torch.zeros(4, 8, 1, 4) for _ in "kv"]
    before = cache[0]._version
    kv_cache.scatter_pa_kv_cache(torch.ones(1, 1, 4), torch.ones(1, 1, 4), [0], *cache)
    assert cache[0]._version > before
    with pytest.raises(RuntimeError, match="out requires gradients"):
        rowwise.add(torch.ones(4), torch.ones(4), out=torch.ones(4, requires_grad=True))




def test_strides_of_one_element_and_of_none_mean_nothing():
    row = np.ones((1, 4), np.float32)
    assert (rowwise.softmax(row[::-1]) == 0.25).all()
    assert (matmul.matmul(row[::-1], row[::-1]) == 4).all()
    none = np.zeros((0, 8), np.float32)
    assert quant.quantize(none, bits=4)[0].shape == (0, 4) and quant.quantize(none)[0].shape == (0, 8)
    assert quant.dynamic_quant(none, bits=4)[0].shape == (0, 4)
    assert quant.dequantize(np.zeros((0, 4), np.uint8), np.zeros((0, 1), np.float32)).shape == (0, 8)
    packed = matmul.pack_int(np.zeros((0, 4), np.uint8), np.zeros((0, 1), np.float32))
    assert matmul.matmul_int(np.ones((2, 8), np.float32), packed).shape == (2, 0)
    assert quant.dequantize_blocks(np.zeros((0, 34), np.uint8), "q8_0", 0, 32).shape == (0, 32)
    assert quant.lookup_rows(np.zeros((1, 34), np.uint8), "q8_0", 1, 32, []).shape == (0, 32)
    assert matmul.pack_blocks(np.zeros((0, 34), np.uint8), "q8_0", 0, 32).n == 0

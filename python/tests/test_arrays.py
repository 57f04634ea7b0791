"""Which arrays are taken, that none is copied, and what is refused in which words."""

import array
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import assert_near, attention_reference

import ops_transformer
from ops_transformer import Context, Tagged
from ops_transformer._core import View
from ops_transformer.flash_attention import flash_attention, flash_attention_score


def random(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def test_a_view_shares_memory_and_strides(rng):
    base = random(rng, 2, 6, 8)
    view = View(base[:, ::2, 1:5])
    assert (view.shape, view.strides, view.dtype, view.read_only) == ((2, 3, 4), (48, 16, 1), "f32", False)
    assert View(np.broadcast_to(base[0], (5, 6, 8))).strides[0] == 0
    assert View(array.array("f", [1, 2, 3])).shape == (3,)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_of_ml_dtypes(rng, name):
    """NumPy calls one of them void, the other a float."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from ops_transformer.kv_cache import paged_attention, scatter_pa_kv_cache

    k, v, q = random(rng, 5, 2, 16), random(rng, 5, 2, 16), random(rng, 1, 2, 1, 16)
    keys, values = (np.zeros((2, 4, 2, 16), getattr(ml_dtypes, name)) for _ in range(2))
    scatter_pa_kv_cache(k, v, range(5), keys, values, layout="norm")
    assert (keys.reshape(8, 2, 16)[:5] == k.astype(keys.dtype)).all()
    wide = [x.astype(np.float32) for x in (keys, values)]
    table = [[0, 1]]
    got = paged_attention(q, keys, values, table, [5], layout="norm")
    assert np.abs(got - paged_attention(q, *wide, table, [5], layout="norm")).max() < 1e-5


def test_bfloat16_of_ml_dtypes_and_tagged_bits(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (random(rng, 1, 2, 33, 16).astype(ml_dtypes.bfloat16) for _ in range(3))
    out = flash_attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    assert_near(out, attention_reference(q, k, v)[0], "bfloat16")
    bits = [Tagged(x.view(np.uint16), "bf16") for x in (q, k, v)]
    tagged = flash_attention(*bits)
    assert isinstance(tagged, Tagged) and tagged.dtype == "bf16"
    assert (tagged.array == out.view(np.uint16)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_strided_inputs_give_the_bits_of_contiguous_ones(rng, dtype):
    base = rng.standard_normal((2, 21, 3, 40)).astype(dtype)
    q = base.transpose(0, 2, 1, 3)[..., ::2]
    assert not q.flags.c_contiguous
    value = rng.standard_normal((2, 21, 3, 40)).astype(dtype).transpose(0, 2, 1, 3)[..., ::2]
    out = flash_attention(q, q, value, causal=True)
    same = np.ascontiguousarray(q)
    assert (out == flash_attention(same, same, np.ascontiguousarray(value), causal=True)).all()


def test_read_only_inputs_are_taken_and_read_only_outputs_refused(rng):
    from ops_transformer._arrays import view
    from ops_transformer._core import AttentionCall

    q = random(rng, 1, 1, 4, 8)
    q.flags.writeable = False
    assert View(q).read_only
    assert np.isfinite(flash_attention(q, q, q)).all()
    with pytest.raises(ValueError, match="out is read-only"):
        AttentionCall(view(q), view(q), view(q)).forward(ops_transformer.default_context(), view(q))


def test_case_b39_negative_strides_are_refused(rng):
    q = random(rng, 1, 2, 8, 16)
    with pytest.raises(ValueError, match="query.*stride"):
        flash_attention(q[..., ::-1], q, q)


def test_addresses_and_strides_between_elements_are_refused():
    bytes_ = np.zeros(200, np.uint8)
    for dtype in ("f4", "f8", "f2", "i4"):
        between = np.ndarray((3, 4), dtype, bytes_, 1)
        with pytest.raises(ValueError, match="an address that is no multiple of its elements' [248] bytes"):
            View(between)
        assert View(between[:0]).shape == (0, 4)  # nothing to read
    with pytest.raises(ValueError, match="^softmax: x cannot be taken: the array lies at an address"):
        ops_transformer.rowwise.softmax(np.ndarray((3, 4), "f4", bytes_, 1))
    with pytest.raises(ValueError, match=r"^softmax: x has strides of \[22, 4\] bytes, must be multiples of its elements' 4"):
        ops_transformer.rowwise.softmax(np.ndarray((3, 4), "f4", bytes_, 0, (22, 4)))
    with pytest.raises(ValueError, match="address"):
        ops_transformer.rowwise.softmax(Tagged(np.ndarray((3, 4), "u2", bytes_, 1), "bf16"))


def test_errors_carry_the_text_of_the_core(rng):
    q, k = random(rng, 1, 2, 5, 8), random(rng, 1, 2, 5, 16)
    with pytest.raises(ValueError, match=r"flash_attention_forward: key dim 3 \(head_dim\) is 16.*8"):
        flash_attention(q, k, k)
    with pytest.raises(ValueError, match="complex64|complex 64|complex64"):
        flash_attention(q.astype(np.complex64), q, q)
    with pytest.raises(ValueError, match="uint16"):
        View(np.zeros(3, np.uint16))
    with pytest.raises(TypeError, match="an array is needed"):
        flash_attention("text", q, q)
    with pytest.raises(ValueError, match="isa"):
        Context(isa="avx1024")


def test_every_level_of_this_processor_agrees(rng):
    q, k, v = random(rng, 1, 4, 70, 24), random(rng, 1, 2, 90, 24), random(rng, 1, 2, 90, 24)
    want = attention_reference(q, k, v)[0]
    levels = ["generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
    for level in levels[: levels.index(ops_transformer.default_context().isa) + 1]:
        assert_near(flash_attention(q, k, v, context=Context(num_threads=2, isa=level)), want)


def test_threads_call_at_once(rng):
    q = random(rng, 1, 4, 128, 32)
    want = flash_attention(q, q, q, causal=True)
    wrong = []

    def work():
        for _ in range(20):
            if not (flash_attention(q, q, q, causal=True) == want).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_while_an_operator_does():
    q = np.zeros((1, 4, 6000, 64), np.float32)
    flash_attention(q[:, :, :8], q[:, :, :8], q[:, :, :8])
    ticks, done = [], threading.Event()

    def work():
        flash_attention(q, q, q)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        ticks.append(1)
    thread.join()
    assert len(ticks) > 3


def test_a_fork_after_use(rng):
    q = random(rng, 1, 4, 300, 64)
    want = flash_attention(q, q, q)
    child = os.fork()
    if child == 0:
        os._exit(0 if (flash_attention(q, q, q) == want).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_importing_is_light():
    program = ("import sys, time, numpy; t = time.process_time(); import ops_transformer.flash_attention; "
               "print(time.process_time() - t, 'torch' in sys.modules)")
    seconds, torch_too = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert torch_too == "False"
    print(f"import: {float(seconds):.3f} s")


def test_the_package_is_typed():
    folder = pathlib.Path(ops_transformer.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_core.pyi").exists()


def test_number_of_threads(rng):
    q = random(rng, 1, 2, 200, 64)
    want = flash_attention_score(q, q, q, input_layout="BNSD")
    ops_transformer.set_num_threads(1)
    try:
        assert ops_transformer.default_context().num_threads == 1
        got = flash_attention_score(q, q, q, input_layout="BNSD")
        assert all((a == b).all() for a, b in zip(got, want))
    finally:
        ops_transformer.set_num_threads(0)


JAX = """
import jax, numpy as np
from ops_transformer._arrays import view
from ops_transformer.flash_attention import flash_attention

rng = np.random.default_rng(7)
arrays = [jax.numpy.asarray(rng.standard_normal((1, 2, 33, 16), dtype=np.float32)) for _ in "qkv"]
assert view(arrays[0]).read_only and np.asarray(arrays[0]).ctypes.data == arrays[0].unsafe_buffer_pointer()
out = flash_attention(*arrays, causal=True)
assert type(out) is np.ndarray and (out == flash_attention(*map(np.asarray, arrays), causal=True)).all()
halves = [a.astype(jax.numpy.bfloat16) for a in arrays]
assert view(halves[0]).dtype == "bf16"
rounded = flash_attention(*(np.asarray(a, dtype=np.float32) for a in halves), causal=True)
assert np.abs(flash_attention(*halves, causal=True).astype(np.float32) - rounded).max() < 2e-2
print("agrees")
"""


def test_arrays_of_jax():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    # In a process of its own: JAX's threads do not like this one's forks.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    assert subprocess.check_output([sys.executable, "-c", JAX], text=True, env=environment) == "agrees\n"

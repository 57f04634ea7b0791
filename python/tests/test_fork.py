"""fork() at any moment, while other threads are inside calls: what the child calls ends, with the same results."""

import os
import signal
import threading
import warnings

import numpy as np
import pytest
from conftest import required

import ops_transformer
from ops_transformer.flash_attention import flash_attention
from ops_transformer.matmul import matmul

FORKS = 200


def fork_under_load(in_parent, in_child, forks=FORKS):
    """`in_parent` runs on two other threads all the time, `in_child` in `forks` children."""
    stop = threading.Event()
    errors = []

    def load():
        try:
            while not stop.is_set():
                in_parent()
        except BaseException as error:  # shown by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(forks):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads is the point
                pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(30)  # a child that hangs ends here
                    code = 0 if in_child() else 2
                finally:
                    os._exit(code)
            status = os.waitpid(pid, 0)[1]
            assert status == 0, f"fork {number}: status {status}"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_operators():
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 2, 24, 16)).astype("f4") for _ in range(3))
    x, w = (random.standard_normal((24, 16)).astype("f4") for _ in range(2))
    attended, product = np.array(flash_attention(q, k, v)), np.array(matmul(x, w))

    def call():
        return np.array_equal(flash_attention(q, k, v), attended) and np.array_equal(matmul(x, w), product)

    def right():
        assert call()

    fork_under_load(right, call)


def test_set_num_threads():
    """The default Context has a lock of Python's."""
    fork_under_load(lambda: ops_transformer.set_num_threads(2), lambda: ops_transformer.set_num_threads(2) is None, 100)


def test_model():
    path = os.environ.get("OPST_MODEL", "")
    if not os.path.isfile(path):
        assert not required("model"), "OPST_REQUIRE names the model, but OPST_MODEL is no file"
        pytest.skip("the model file is not there (OPST_MODEL)")
    model = ops_transformer.Model(path, max_context=64)
    right = model.generate("Once", max_tokens=2)

    def in_child():
        return model.generate("Once", max_tokens=2) == right

    fork_under_load(lambda: model.generate("Once upon a time", max_tokens=8), in_child, forks=5)
    assert in_child()

"""Ranks as threads, for tests of ops_transformer.npu between ranks."""

import threading

import numpy as np
import pytest
import torch

import ops_transformer.npu as npu
from ops_transformer import mc2

worlds = pytest.mark.parametrize("world", (1, 2, 3))


def on_ranks(world, call):
    """What call(rank) gives on each rank, all in threads, with the group "ep"; the first error that a rank ran into."""
    results, errors = [None] * world, []

    def work(rank, communicator):
        npu.register_group("ep", communicator)
        try:
            results[rank] = call(rank)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        finally:
            npu.unregister_group("ep")

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(mc2.create_threads(world, timeout_seconds=20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def draws(seed, count, *shape):
    """Arrays of float32."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def tensors(arrays):
    return [torch.from_numpy(array) for array in arrays]

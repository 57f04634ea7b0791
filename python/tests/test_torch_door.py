"""The questions that are asked of torch tensors before their memory is read."""

import pytest
from conftest import import_torch

torch = import_torch()

import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ops_transformer import _torch_door as door  # noqa: E402


class Seen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def complex_part():
    return torch.complex(torch.ones(2, 4), torch.ones(2, 4)).conj().imag


TENSORS = {  # name: (tensor, whether it is its bytes, part of why none could be)
    "plain": (lambda: torch.ones(2, 4), True, None),
    "strided": (lambda: torch.ones(4, 2).t()[:, ::2], True, None),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2, 4)), True, None),
    "requires gradients": (lambda: torch.ones(2, 4, requires_grad=True), True, None),
    "empty": (lambda: torch.ones(0, 4), True, None),
    "bool": (lambda: torch.ones(2, 4, dtype=torch.bool), True, None),
    "negative": (lambda: torch.ones(2, 4)._neg_view(), False, None),
    "imaginary part": (complex_part, False, None),
    "zero": (lambda: torch._efficientzerotensor((2, 4)), False, None),
    "conjugate": (lambda: torch.ones(2, 4, dtype=torch.complex64).conj(), False, None),
    "sparse": (lambda: torch.ones(2, 4).to_sparse(), False, "torch.sparse_coo"),
    "csr": (lambda: torch.ones(2, 4).to_sparse_csr(), False, "torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 4)]), False, "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged), False, "NestedTensor"),
    "meta": (lambda: torch.ones(2, 4, device="meta"), False, "meta"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8), False, "int_repr"),
    "subclass": (lambda: torch.ones(2, 4).as_subclass(Subclass), False, "Subclass"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_its_bytes(name):
    make, plain, why = TENSORS[name]
    tensor = make()
    assert door.has_plain_bytes(tensor) == door.is_plain(tensor) == door.is_plain(None, tensor) == plain
    if why is None:
        assert door.why_no_bytes(tensor) is None
        memory = door.bytes_of(tensor, "f", "x")
        assert door.has_plain_bytes(memory) and (memory is tensor) == plain
        assert torch.equal(memory, tensor) if name != "conjugate" else torch.equal(memory, tensor.resolve_conj())
    else:
        with pytest.raises(TypeError, match=f"f: x is .*{why}.*host's memory"):
            door.bytes_of(tensor, "f", "x")


def test_inference_tensors_are_their_bytes():
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert door.is_plain(tensor) and not door.records(tensor)
    assert door.is_plain(tensor)


def test_who_watches():
    x = torch.ones(2)
    assert door.watcher() is None and door.is_plain(x) and not door.overridden(x)
    seen = {}

    def look(y):
        seen.setdefault(name, door.watcher())  # torch.jit.trace runs it again to compare
        return y * 1

    for name, run in [("torch.func", lambda: torch.func.vmap(look)(x)), ("torch.jit", lambda: torch.jit.trace(look, x)),
                      ("torch.func ", lambda: torch.func.grad(lambda y: look(y).sum())(x))]:
        run()
        assert name.strip() in seen[name]
    with Dispatched():
        assert "TorchDispatchMode" in door.watcher() and not door.is_plain(x)
    with torch.profiler.profile():
        assert "profiler" in door.watcher() and not door.is_plain(x)
    assert torch.compile(lambda y: y + (door.watcher() is not None), backend="eager", fullgraph=True)(x).tolist() == [2, 2]
    assert door.watcher() is None


def test_who_overrides():
    x, other = torch.ones(2), torch.ones(2).as_subclass(Subclass)
    assert door.overridden(x, other) and not door.overridden(x, torch.nn.Parameter(x), None, 3)
    with Seen():
        assert door.overridden(x) and not door.is_plain(x)
    with torch.device("meta"):  # a default device is a mode for torch, and changes no operator
        assert not door.overridden(x) and door.overridden(x, other) and door.is_plain(x)
        with Seen():
            assert door.overridden(x)


def test_tangents_and_gradients():
    x = torch.ones(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert door.has_tangent(x, dual) and not door.is_plain(dual) and door.is_plain(x)
    assert not door.has_tangent(dual)
    w = torch.ones(2, requires_grad=True)
    assert door.records(x, None, w) and not door.records(x, w.detach())
    with torch.no_grad():
        assert not door.records(w)


def test_batched_tensors_have_no_bytes():
    from torch._vmap_internals import _vmap  # what is_grads_batched uses

    def look(y):
        assert not door.has_plain_bytes(y) and not door.is_plain(y)
        with pytest.raises(TypeError, match="transform of torch.func"):
            door.bytes_of(y, "f", "x")
        return y * 1

    for transform in (torch.func.vmap, _vmap):
        transform(look)(torch.ones(3, 2))


def test_what_is_written_into_counts_as_changed():
    from ops_transformer._arrays import output

    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    squared = (w * x).square()
    output(x)
    assert x._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with pytest.raises(RuntimeError, match="out requires gradients"):
        output(w)

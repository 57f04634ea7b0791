"""ggml's flash_attn_ext, llama.cpp's attention, and the graphs of its operators, through the C interface of the prebuilt
libraries of libggml-python. (Its experts are in mixture.py.)

Keys and values lie as a llama.cpp cache has them, in f32, f16 or bf16; queries and the output are f32. The wheel is built for
AVX2, whatever the processor has: a ggml that the user builds is faster where there is AVX-512.
"""

import ctypes
import importlib.util
import os

import torch

from . import cases
from .calls import Call, NoSuchCall, visible

_TYPES = {torch.float32: 0, torch.float16: 1, torch.int32: 26, torch.bfloat16: 30}  # enum ggml_type


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def _load():
    """(libggml-base, libggml-cpu) with the types of what is called."""
    folder = os.path.join(importlib.util.find_spec("libggml").submodule_search_locations[0], "lib64")
    base, cpu = (ctypes.CDLL(os.path.join(folder, f"libggml-{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in ("base", "cpu"))
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    for library, name, result, arguments in (
            (base, "ggml_init", pointer, [_InitParams]), (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_4d", pointer, [pointer, number, size, size, size, size]),
            (base, "ggml_view_2d", pointer, [pointer, pointer, size, size, ctypes.c_size_t, ctypes.c_size_t]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [real] * 3), (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_mul_mat_id", pointer, [pointer] * 4), (base, "ggml_swiglu_split", pointer, [pointer] * 3),
            (base, "ggml_mul", pointer, [pointer] * 3), (base, "ggml_add", pointer, [pointer] * 3),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (base, "ggml_backend_graph_compute", number, [pointer, pointer]), (base, "ggml_backend_free", None, [pointer]),
            (cpu, "ggml_backend_cpu_init", pointer, []), (cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, number])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


class Graph:
    """Tensors in `size` bytes of memory and the operators on them; once finish() has been told the last one, run() computes it."""

    def __init__(self, size):
        self.base, self.cpu = _load()
        self.context = self.base.ggml_init(_InitParams(size + (1 << 20), None, False))
        if not self.context:
            raise MemoryError(f"ggml_init of {size} bytes failed")

    def tensor(self, t):
        """A copy of a torch tensor of up to 4 dimensions. ggml counts them from the innermost."""
        made = self.base.ggml_new_tensor_4d(self.context, _TYPES[t.dtype], *reversed((1,) * (4 - t.dim()) + tuple(t.shape)))
        t = t.contiguous()  # held until it has been copied
        ctypes.memmove(self.base.ggml_get_data(made), t.data_ptr(), t.numel() * t.element_size())
        return made

    def op(self, name, *arguments):
        return getattr(self.base, f"ggml_{name}")(self.context, *arguments)

    def finish(self, result, shape):
        """self.out is then where run() leaves `result`, float32 of this shape."""
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, result)
        memory = (ctypes.c_float * shape.numel()).from_address(self.base.ggml_get_data(result))
        self.out = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        return self

    def run(self):
        if self.base.ggml_backend_graph_compute(self.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")

    def __del__(self):
        if hasattr(self, "backend"):
            self.base.ggml_backend_free(self.backend)
        if getattr(self, "context", None):
            self.base.ggml_free(self.context)


def _attention(case, query, key, value, mask):
    """One flash_attn_ext, ready to be computed."""
    given = [t for t in (query, key, value, mask) if t is not None]
    graph = Graph(query.numel() * 4 + sum(t.numel() * t.element_size() for t in given))
    tensors = [graph.tensor(t) for t in given] + [None] * (mask is None)
    cap = cases.SOFTCAP if "softcap" in case.words else 0.0
    result = graph.op("flash_attn_ext", *tensors, case.head_dim**-0.5, 0.0, cap)
    return graph.finish(result, torch.Size((case.batch, case.query_len, case.heads, case.value_head_dim)))


class Ggml:
    name, package, words = "ggml", "libggml-python", {"causal", "window", "bool_mask", "softcap", "paged"}

    def prepare(self, case, inputs):
        # What its assertions, which end the process, are about.
        if case.head_dim != case.value_head_dim or case.head_dim % 32:
            raise NoSuchCall("has no such head_dim here")
        seen, mask = visible(case, inputs.mask), None
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, -torch.inf)
        graph = _attention(case, inputs.query.float(), inputs.key, inputs.value, mask)
        return Call(graph.run, lambda _: (graph.out.transpose(1, 2).to(inputs.query.dtype),), kept=graph)

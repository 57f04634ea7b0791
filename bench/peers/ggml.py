"""ggml's flash_attn_ext, llama.cpp's attention, through the C interface of the prebuilt libraries of libggml-python.

Keys and values lie as a llama.cpp cache has them, in f32, f16 or bf16; queries and the output are f32. The wheel is built for
AVX2, whatever the processor has: a ggml that the user builds is faster where there is AVX-512.
"""

import ctypes
import importlib.util
import os

import torch

from . import cases
from .calls import Call, NoSuchCall, visible

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type


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
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [real] * 3), (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (base, "ggml_backend_graph_compute", number, [pointer, pointer]), (base, "ggml_backend_free", None, [pointer]),
            (cpu, "ggml_backend_cpu_init", pointer, []), (cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, number])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


class _Graph:
    """One flash_attn_ext, ready to be computed."""

    def __init__(self, case, query, key, value, mask):
        self.base, cpu = _load()
        given = [t for t in (query, key, value, mask) if t is not None]
        size = query.numel() * 4 + sum(t.numel() * t.element_size() for t in given)
        self.context = self.base.ggml_init(_InitParams(size + (1 << 20), None, False))
        tensors = [self._tensor(t) for t in given] + [None] * (mask is None)
        cap = cases.SOFTCAP if "softcap" in case.words else 0.0
        result = self.base.ggml_flash_attn_ext(self.context, *tensors, case.head_dim**-0.5, 0.0, cap)
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, result)
        shape = case.batch, case.query_len, case.heads, case.value_head_dim
        memory = (ctypes.c_float * query.numel()).from_address(self.base.ggml_get_data(result))
        self.out = torch.frombuffer(memory, dtype=torch.float32).view(shape).transpose(1, 2)
        self.backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())

    def _tensor(self, t):
        made = self.base.ggml_new_tensor_4d(self.context, _TYPES[t.dtype], *reversed(t.shape))
        ctypes.memmove(self.base.ggml_get_data(made), t.contiguous().data_ptr(), t.numel() * t.element_size())
        return made

    def run(self):
        if self.base.ggml_backend_graph_compute(self.backend, self.graph):
            raise RuntimeError("ggml_backend_graph_compute failed")

    def __del__(self):
        if hasattr(self, "backend"):
            self.base.ggml_backend_free(self.backend)
            self.base.ggml_free(self.context)


class Ggml:
    name, package, words = "ggml", "libggml-python", {"causal", "window", "bool_mask", "softcap", "paged"}

    def prepare(self, case, inputs):
        # What its assertions, which end the process, are about.
        if case.head_dim != case.value_head_dim or case.head_dim % 32:
            raise NoSuchCall("has no such head_dim here")
        seen, mask = visible(case, inputs.mask), None
        if not seen.all():
            mask = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, -torch.inf)
        graph = _Graph(case, inputs.query.float(), inputs.key, inputs.value, mask)
        return Call(graph.run, lambda _: (graph.out.to(inputs.query.dtype),), kept=graph)

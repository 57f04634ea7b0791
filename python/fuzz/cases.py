"""One case for each public function of rowwise, matmul, quant and kv_cache: a call that mostly makes sense.

A case draws its sizes, dtypes and options and gives a Call; `Draw` puts the surprises into the arrays. CASES has them all.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import hostile
import numpy as np
from draws import Draw
from judge import Call, Made

from ops_transformer import kv_cache, matmul, quant, rowwise

CASES: Dict[str, Callable[[Draw], Call]] = {}


def case(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
    CASES[function.__name__] = function
    return function


def given(**arguments: Any) -> Dict[str, Any]:
    """The arguments without those that are None and may be left out."""
    return {name: value for name, value in arguments.items() if value is not None}


# ---- rowwise ---------------------------------------------------------------------------------------------------------


def _rows(d: Draw) -> List[int]:
    shape = [d.size(1, 4) for _ in range(d.integer(0, 3))]
    return [d.outward(1, 5), *shape[1:]] if shape else shape


def out_of(d: Draw, like: Any, dtype: str, shape: List[int]) -> Any:
    """None, an array to write into, or an input once more."""
    what = d.integer(0, 5)
    if what > 2:
        return None
    return d.aliased(like) if what == 0 else d.array(dtype, shape, written=True)


_EPS = (1e-5, 1e-6, 0.0, 1, 0.1)


def _keeps_digits(eps: Any) -> bool:
    """Whether a row of equal elements has a result: without eps its variance, rounding alone, is divided by."""
    return isinstance(eps, (int, float)) and eps > 1e-7


def _norm(d: Draw):
    shape = [*_rows(d), d.size(1, 70)]
    x = d.real()
    return shape, x, d.pick((x, "f32"))


@case
def rms_norm(d: Draw) -> Call:
    shape, x, w = _norm(d)
    tensor = d.array(x, shape)
    return Call(rowwise.rms_norm, given(x=tensor, weight=d.array(w, shape[-1:]), eps=d.option(_EPS), out=out_of(d, tensor, x, shape),
                                        return_rstd=d.option((False, True))))


@case
def add_rms_norm(d: Draw) -> Call:
    shape, x, w = _norm(d)
    return Call(rowwise.add_rms_norm, given(a=d.array(x, shape), b=d.array(x, shape), weight=d.array(w, shape[-1:]),
                                            eps=d.option(_EPS), return_rstd=d.option((False, True))))


@case
def rms_norm_backward(d: Draw) -> Call:
    shape, x, w = _norm(d)
    return Call(rowwise.rms_norm_backward, given(grad_out=d.array(x, shape), x=d.array(x, shape), weight=d.array(w, shape[-1:]),
                                                 eps=d.option(_EPS), grad_sum=d.maybe(lambda: d.array(x, shape))))


@case
def layer_norm(d: Draw) -> Call:
    (shape, x, w), eps = _norm(d), d.option(_EPS)
    tensor = d.array(x, shape)
    return Call(rowwise.layer_norm, given(x=tensor, weight=d.maybe(lambda: d.array(w, shape[-1:])),
                                          bias=d.maybe(lambda: d.array(w, shape[-1:])), eps=eps,
                                          return_statistics=d.option((False, True)), out=out_of(d, tensor, x, shape)),
                compared=_keeps_digits(eps))


@case
def layer_norm_backward(d: Draw) -> Call:
    (shape, x, w), eps = _norm(d), d.option(_EPS)
    return Call(rowwise.layer_norm_backward, given(grad_out=d.array(x, shape), x=d.array(x, shape),
                                                   weight=d.maybe(lambda: d.array(w, shape[-1:])), eps=eps),
                compared=_keeps_digits(eps))


@case
def softmax(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    tensor = d.array(x, shape)
    return Call(rowwise.softmax, given(x=tensor, scale=d.option((1.0, 0.125, 2)), out=out_of(d, tensor, x, shape)))


@case
def softmax_backward(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    return Call(rowwise.softmax_backward, given(grad_out=d.array(x, shape), out=d.array(x, shape), scale=d.option((1.0, 0.125))))


def _sections(d: Draw, half: int) -> Any:
    first = d.integer(0, half)
    second = d.integer(0, half - first)
    third = half - first - second
    return d.option(((first, second, third, False), rowwise.RopeSections(first, second, third), [first, second, third],
                     rowwise.RopeSections(half - half // 3 * 2, half // 3, half // 3, True), (half, 0, 0, True), (1, 2), (1, 2, 3, 4)))


@case
def rope_table(d: Draw) -> Call:
    tokens, half = d.size(1, 20), d.size(1, 20)
    sections = d.maybe(lambda: _sections(d, half), 4)
    shape = (3, tokens) if sections is not None else (tokens,)
    positions = d.integers([d.integer(0, 100000) for _ in range(int(np.prod(shape)))], shape)
    return Call(rowwise.rope_table, given(positions=positions, half=d.option((half,)), theta=d.option((10000.0, 500.0, 1)),
                                          sections=sections), tolerance=1e-6)


def _rope(d: Draw):
    tokens, heads, half = d.size(1, 20), d.size(1, 3), d.size(1, 20)
    return tokens, heads, half, d.real(), [tokens, heads, 2 * half + d.pick((0, 0, 1, 3))]


@case
def rope(d: Draw) -> Call:
    tokens, _, half, x, shape = _rope(d)
    tensor = d.array(x, shape)
    return Call(rowwise.rope, given(x=tensor, cos=d.array("f32", (tokens, half)), sin=d.array("f32", (tokens, half)),
                                    style=d.option(("halves", "pairs")), inverse=d.option((False, True)), out=out_of(d, tensor, x, shape)))


@case
def rope_cached(d: Draw) -> Call:
    tokens, _, half, x, shape = _rope(d)
    tensor, positions, cache = d.array(x, shape), d.integer(1, 30), d.pick((x, "f32"))
    sections = d.maybe(lambda: _sections(d, half), 4)
    where = (3, tokens) if sections is not None else (tokens,)
    indices = [d.integer(0, positions - (0 if d.wildly(16) else 1)) for _ in range(int(np.prod(where)))]
    return Call(rowwise.rope_cached, given(
        x=tensor, positions=d.integers(indices, where), cos_cache=d.array(cache, (positions, half)),
        sin_cache=d.array(cache, (positions, half)), style=d.option(("halves", "pairs")), inverse=d.option((False, True)),
        sections=sections, out=out_of(d, tensor, x, shape)))


@case
def swiglu(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    if d.coin():
        gate = d.array(x, shape)
        return Call(rowwise.swiglu, given(gate=gate, up=d.array(x, shape), out=out_of(d, gate, x, shape)))
    gate = d.array(x, [*shape[:-1], 2 * shape[-1]])
    return Call(rowwise.swiglu, given(gate=gate, swapped=d.option((False, True)),
                                      out=d.maybe(lambda: d.array(x, shape, written=True), 3)))


@case
def swiglu_backward(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    if d.coin():
        return Call(rowwise.swiglu_backward, given(grad_out=d.array(x, shape), gate=d.array(x, shape), up=d.array(x, shape)))
    return Call(rowwise.swiglu_backward, given(grad_out=d.array(x, shape), gate=d.array(x, [*shape[:-1], 2 * shape[-1]]),
                                               swapped=d.option((False, True))))


@case
def add(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    a = d.array(x, shape)
    return Call(rowwise.add, given(a=a, b=d.array(x, shape), out=out_of(d, a, x, shape)))


# ---- matmul and quant ------------------------------------------------------------------------------------------------

BLOCKS = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144),
           "q5_k": (256, 176), "q6_k": (256, 210)}
ACTIVATIONS = ("none", "none", "silu", "gelu_erf", "gelu_tanh", "swiglu", "swiglu_swapped")


def blocks_of(d: Draw):
    """(blocks, format, rows, cols) of a GGUF matrix. Small bytes keep the 16-bit scales in them small."""
    name = d.pick(tuple(BLOCKS))
    values, size = BLOCKS[name]
    rows, cols = d.size(1, 20), values * d.integer(1, 2)
    return d.array("u8", (rows * (cols // values) * size,), low=0, high=60), d.option((name,)), rows, cols


@case
def pack_blocks(d: Draw) -> Call:
    blocks, name, rows, cols = blocks_of(d)
    if d.rarely(3):
        return Call(matmul.pack_blocks, given(blocks=d.pick(([], [None, 1], ["text"], [b"bytes"] * 2, [np.zeros(0, np.uint8)])), format=name,
                                              rows=d.integers([d.integer(0, 16) for _ in range(d.integer(0, 2))]), cols=d.option((cols,))))
    return Call(matmul.pack_blocks, given(blocks=blocks, format=name, rows=d.option((rows,)), cols=d.option((cols,))))


@case
def pack(d: Draw) -> Call:
    return Call(matmul.pack, given(weight=d.array(d.real("f64"), (d.size(1, 40), d.size(1, 40)))))


def int_matrix(d: Draw, rows: Any, groups: int, k: int, bits: int):
    """(q, scales, zeros) of a matrix of so many rows, or of a stack [E, rows]."""
    rows = rows if isinstance(rows, list) else [rows]
    q = d.array("u8", (*rows, k // 2), low=0, high=255) if bits == 4 else d.array("i8", (*rows, k), low=-128, high=127)
    return q, d.array("f32", (*rows, groups)), d.maybe(lambda: d.array("i8", (*rows, groups), low=-5, high=5))


@case
def pack_int(d: Draw) -> Call:
    groups = d.pick((1, 2, 4))
    q, scales, zeros = int_matrix(d, d.size(1, 20), groups, groups * 2 * d.size(1, 20), d.pick((4, 8)))
    return Call(matmul.pack_int, given(q=q, scales=d.pick((scales, scales, None)), zeros=zeros))


@case
def matmul_(d: Draw) -> Call:
    m, n, k = d.pick((1, 2, 3, 17, d.outward(1, 40))), 2 * d.size(1, 30), d.pick((1, 7, 32, 64, 130))
    x = d.real("f64")
    activation = d.option(ACTIVATIONS)
    tolerance = None
    if d.rarely(4):
        blocks, name, n, k = blocks_of(d)
        x, n, weight = "f32", n, Made(Call(matmul.pack_blocks, given(blocks=blocks, format=name, rows=n, cols=k)))
    else:
        weight = d.array(x if x == "f64" else d.pick((x, "f32", "bf16", "f16")), (n, k))
        weight = d.pick((weight, Made(Call(matmul.pack, given(weight=weight)))))
    columns = n // 2 if isinstance(activation, str) and activation.startswith("swiglu") else n
    scales = d.option((False, False, False, True))
    if scales is True:
        tolerance = 0.03
    return Call(matmul.matmul, given(
        x=d.array(x, (m, k)), weight=weight, bias=d.maybe(lambda: d.array(x, (n,))), activation=activation,
        residual=d.maybe(lambda: d.array(x, (m, columns)), 3), int8_activations=d.option((False, False, True)),
        batch_invariant=d.option((False, True)), out_scales=scales,
        out=d.maybe(lambda: d.array("i8" if scales is True else x, (m, columns), written=True))), tolerance=tolerance)


@case
def matmul_backward(d: Draw) -> Call:
    m, n, k, x = d.outward(1, 30), d.size(1, 30), d.size(1, 40), d.real("f64")
    return Call(matmul.matmul_backward, given(grad_out=d.array(x, (m, n)), x=d.array(x, (m, k)), weight=d.array(x, (n, k))))


@case
def matmul_int(d: Draw) -> Call:
    m, n, groups = d.outward(1, 20), d.size(1, 20), d.pick((1, 2, 4))
    k, integers = groups * 2 * d.integer(1, 20), d.coin()
    q, scales, zeros = int_matrix(d, n, groups, k, d.pick((4, 8)))
    weight = Made(Call(matmul.pack_int, d.pick((given(q=q, scales=scales, zeros=zeros), given(q=q)))))
    x = d.real()
    dtype = d.option((None, None, "f32", "i32", "bf16", "f16"))
    kind = dtype if isinstance(dtype, str) and dtype in ("f32", "i32", "bf16", "f16") else "f32" if integers else x
    activation = d.option(("none", "none", "none", *ACTIVATIONS))
    columns = n // 2 if isinstance(activation, str) and activation.startswith("swiglu") else n
    scales = d.option((False, False, False, True))
    if scales is True:
        dtype, kind = None, "i8"
    return Call(matmul.matmul_int, given(
        x=d.array("i8" if integers else x, (m, k), low=-128, high=127), weight=d.option((weight,)), dtype=dtype,
        x_scales=d.maybe(lambda: d.array("f32", (m,))) if integers else None,
        bias=d.maybe(lambda: d.array(d.pick(("f32", "i32")), (n,), high=100)), activation=activation, out_scales=scales,
        residual=d.maybe(lambda: d.array("f32", (m, columns)), 3),
        out=d.maybe(lambda: d.array(kind, (m, columns), written=True), 3)), tolerance=0.03 if scales is True else None)


@case
def matmul_lookup_rows(d: Draw) -> Call:
    n, k = d.integer(1, 20), d.pick((1, 7, 32, 64))
    if d.coin():
        blocks, name, n, k = blocks_of(d)
        weight = Made(Call(matmul.pack_blocks, given(blocks=blocks, format=name, rows=n, cols=k)))
    else:
        weight = Made(Call(matmul.pack, given(weight=d.array(d.real(), (n, k)))))
    where = d.integers([d.integer(0, max(n - (0 if d.wildly(16) else 1), 0)) for _ in range(d.size(1, 9))])
    return Call(matmul.lookup_rows, given(weight=weight, indices=where, like=d.maybe(lambda: hostile.draw(d), 8)), tolerance=0.0)


@case
def quant_lookup_rows(d: Draw) -> Call:
    blocks, name, rows, cols = blocks_of(d)
    where = d.integers([d.integer(0, max(rows - (0 if d.wildly(16) else 1), 0)) for _ in range(d.size(1, 9))])
    return Call(quant.lookup_rows, given(blocks=blocks, format=name, rows=d.option((rows,)), cols=d.option((cols,)), indices=where),
                tolerance=0.0)


@case
def dequantize_blocks(d: Draw) -> Call:
    blocks, name, rows, cols = blocks_of(d)
    return Call(quant.dequantize_blocks, given(blocks=blocks, format=name, rows=d.option((rows,)), cols=d.option((cols,))), tolerance=0.0)


@case
def quantize(d: Draw) -> Call:
    rows, groups, bits = d.outward(1, 20), d.pick((1, 2, 4)), d.pick((4, 8))
    cols = groups * 2 * d.size(1, 20)
    arguments = given(x=d.array(d.real(), (rows, cols)), bits=d.option((bits,)))
    if d.coin():
        arguments.update(given(groups=d.option((groups,)), zero_points=d.option((False, True))))
    else:  # static, where groups and zero_points may say what the arrays are
        zeros = d.maybe(lambda: d.array("i8", (rows, groups), low=-5, high=5))
        arguments.update(given(scales=d.array("f32", (rows, groups)), zeros=zeros, groups=d.maybe(lambda: d.option((1, groups)), 4),
                               zero_points=d.maybe(lambda: d.option((False, zeros is not None)), 4)))
    return Call(quant.quantize, arguments, tolerance=0.0, given_back=("scales", "zeros"))


@case
def dequantize(d: Draw) -> Call:
    groups = d.pick((1, 2, 4))
    q, scales, zeros = int_matrix(d, d.outward(1, 20), groups, groups * 2 * d.size(1, 20), d.pick((4, 8)))
    return Call(quant.dequantize, given(q=q, scales=scales, zeros=zeros), tolerance=0.0)


@case
def dynamic_quant(d: Draw) -> Call:
    shape, x, _ = _norm(d)
    shape[-1] += shape[-1] % 2
    return Call(quant.dynamic_quant, given(x=d.array(x, shape), bits=d.option((4, 8)),
                                           smooth_scales=d.maybe(lambda: d.array("f32", shape[-1:]))), tolerance=0.0)


# ---- kv_cache --------------------------------------------------------------------------------------------------------


class Cache:
    """Sizes of a paged cache, and its arrays."""

    def __init__(self, d: Draw) -> None:
        self.layout = d.pick(("norm", "norm", "panel32"))
        self.dtype = d.real()
        self.num_blocks, self.heads, self.dim = d.size(1, 6), d.size(1, 3), 2 * d.integer(1, 16)
        self.value_dim = d.pick((self.dim, 2 * d.integer(1, 16)))
        self.block_size = 32 if self.layout == "panel32" or d.coin() else d.integer(1, 20)
        self.slots = self.num_blocks * self.block_size

    def pages(self, d: Draw, written: bool, layout: str = "", dtype: str = "") -> List[Any]:
        layout, dtype = layout or self.layout, dtype or self.dtype
        shapes = kv_cache._core.page_shapes(layout, dtype, self.num_blocks, self.block_size, self.heads, self.dim, self.value_dim)
        return [d.array(dtype, shape, written=written) for shape in shapes]

    def indices(self, d: Draw, count: int) -> Any:
        last = self.slots - (0 if d.wildly(16) else 1)
        return d.integers([d.integer(-1, max(last, -1)) for _ in range(count)])


@case
def new_pages(d: Draw) -> Call:
    c = Cache(d)
    return Call(kv_cache.new_pages, given(
        num_blocks=d.option((c.num_blocks,)), block_size=d.option((c.block_size,)), num_kv_heads=d.option((c.heads,)),
        head_dim=d.option((c.dim,)), value_head_dim=d.option((None, c.value_dim)), dtype=d.option((c.dtype,)),
        layout=d.option((c.layout,)), like=d.maybe(lambda: d.array(d.real(), (2,)))), takes_context=False)


def _tokens(d: Draw, c: Cache, count: int) -> Dict[str, Any]:
    x = d.pick((c.dtype, "f32"))
    keys, values = c.pages(d, written=True)
    return given(key=d.array(x, (count, c.heads, c.dim)), value=d.array(x, (count, c.heads, c.value_dim)),
                 slot_mapping=c.indices(d, count), key_cache=keys, value_cache=values, layout=d.option((c.layout,)))


@case
def scatter_pa_kv_cache(d: Draw) -> Call:
    return Call(kv_cache.scatter_pa_kv_cache, _tokens(d, Cache(d), d.size(1, 20)))


@case
def rope_scatter_pa_kv_cache(d: Draw) -> Call:
    c, count, heads = Cache(d), d.size(1, 20), d.size(1, 3)
    half, x = d.integer(1, c.dim // 2), c.dtype
    query = d.array(x, (count, heads, c.dim))
    return Call(kv_cache.rope_scatter_pa_kv_cache, given(
        query=query, cos=d.array("f32", (count, half)), sin=d.array("f32", (count, half)), **_tokens(d, c, count),
        query_weight=d.maybe(lambda: d.array("f32", (c.dim,))), key_weight=d.maybe(lambda: d.array("f32", (c.dim,))),
        eps=d.option(_EPS), style=d.option(("halves", "pairs")), out=out_of(d, query, x, [count, heads, c.dim])))


@case
def convert_pages(d: Draw) -> Call:
    c = Cache(d)
    to = d.pick(("norm", "panel32")) if c.block_size == 32 else "norm"
    dtype = d.real()
    (a, b), (e, f) = c.pages(d, False), c.pages(d, True, to, dtype)
    return Call(kv_cache.convert_pages, given(from_key=a, from_value=b, to_key=e, to_value=f, from_layout=d.option((c.layout,)),
                                              to_layout=d.option((to,))), tolerance=0.0)


@case
def gather_pa_kv_cache(d: Draw) -> Call:
    c, batch, columns = Cache(d), d.size(1, 3), d.size(1, 3)
    lengths = [d.integer(0, columns * c.block_size) for _ in range(batch)]
    cumulative = d.option((False, False, True))
    given_lengths = [0, *np.cumsum(lengths).tolist()] if cumulative is True else lengths
    keys, values = c.pages(d, False)
    table = [d.integer(-1 if d.wildly(16) else 0, max(c.num_blocks - 1, 0)) for _ in range(batch * columns)]
    return Call(kv_cache.gather_pa_kv_cache, given(
        key_cache=keys, value_cache=values, block_table=d.integers(table, (batch, columns)), kv_lengths=d.integers(given_lengths),
        seq_offset=d.maybe(lambda: d.integers([d.integer(0, 3) for _ in range(batch)]), 4),
        head_indices=d.maybe(lambda: d.integers([d.integer(0, max(c.heads - 1, 0)) for _ in range(d.integer(0, 3))]), 4),
        cumulative_lengths=cumulative, zero_fill=d.option((False, True)), layout=d.option((c.layout,))), tolerance=0.0)


@case
def block_pool(d: Draw) -> Call:
    pool = kv_cache.BlockPool(8)
    pool.allocate(d.integer(0, 8))
    state = lambda: (pool.num_free, [pool.references(block) for block in range(8)])  # noqa: E731
    what = d.pick(("fork", "free", "prepare_write", "references", "allocate"))
    argument = {"fork": "blocks", "free": "blocks", "allocate": "count"}.get(what, "block")
    value = d.integers([d.integer(0, 8) for _ in range(d.integer(0, 4))]) if argument == "blocks" else d.option((0, 1, 3, 7, 8))
    return Call(getattr(pool, what), {argument: value}, state=state, takes_context=False)

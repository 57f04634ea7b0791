"""The cases of attention: flash_attention, its calling form of FlashAttentionScore, gradients, pages, weights, merging."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import hostile
import numpy as np
from cases import Cache, case, given
from draws import Draw, Operand, to_numbers
from judge import GENERIC, Call, Made

from ops_transformer import flash_attention
from ops_transformer._layouts import shape_of_out
from ops_transformer.kv_cache import paged_attention

UNBOUNDED = flash_attention.UNBOUNDED
_ALIGNMENTS = ("top_left", "bottom_right")


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    value_dim: int


def _sizes(d: Draw) -> Sizes:
    kv_heads, dim = d.size(1, 3), d.pick((1, 2, 7, 8, 16, 40))
    return Sizes(d.size(1, 3), kv_heads * d.size(1, 3), kv_heads, d.pick((1, d.outward(1, 40))), d.size(1, 70), dim,
                 d.pick((dim, dim, 5, 24)))


def _dtypes(d: Draw):
    """(of query, key and value, of bias and the like)."""
    x = d.real("f64")
    return x, "f64" if x == "f64" else "f32"


def _ends(d: Draw, batch: int, total: int, start: int = 0) -> List[int]:
    ends = sorted(d.integer(0, min(total, 2**31)) for _ in range(batch))
    if d.wildly(16):
        ends.reverse()
    if ends and d.coin():
        ends[-1] = min(total, 2**31)
    return [0, *ends] if start else ends


def _broadcast(d: Draw, s: Sizes) -> List[int]:
    return [d.pick((s.batch, 1)), d.pick((s.heads, 1)), d.pick((s.q_len, 1)), s.kv_len]


def _drop_mask(d: Draw, s: Sizes) -> Any:
    bits = s.batch * s.heads * s.q_len * s.kv_len
    return d.array("u8", (min((bits + 7) // 8, 2**20),), high=255)


def _block_mask(d: Draw, s: Sizes) -> Any:
    """A BlockMask of drawn lists; None where the sizes are extreme."""
    if d.wildly(20):
        return hostile.draw(d)
    block_q, block_kv = (d.pick((1, 3, 8, 16, 64)) for _ in range(2))
    rows, columns = -(-s.q_len // block_q), -(-s.kv_len // block_kv)
    if rows > 100:
        return None
    shape, listed, offsets = (d.pick((1, s.batch)), d.pick((1, s.kv_heads, s.heads)), rows + 1), [], []
    for _ in range(shape[0] * shape[1]):
        offsets.append(len(listed))
        for _ in range(rows):
            listed += [j for j in range(columns) if d.coin()]
            offsets.append(len(listed))
    return Made(Call(flash_attention.BlockMask, given(
        row_offsets=d.integers(offsets, shape), columns=d.integers(listed), block_q=d.option((block_q,)),
        block_kv=d.option((block_kv,))), takes_context=False))


def _inputs(d: Draw, s: Sizes, x: str, narrow: str, varlen: bool) -> Dict[str, Any]:
    """Tensors beside query, key and value, by the names of flash_attention."""
    scores = _broadcast(d, s)
    return given(
        mask=d.maybe(lambda: d.array("bool", scores), 6), bias=d.maybe(lambda: d.array(d.pick((narrow, x)), scores), 6),
        alibi_slopes=d.maybe(lambda: d.array(narrow, (s.heads,)), 8), sinks=d.maybe(lambda: d.array(narrow, (s.heads,)), 8),
        prefix=d.maybe(lambda: d.integers([d.integer(0, 4) for _ in range(s.batch)]), 8),
        block_mask=d.maybe(lambda: _block_mask(d, s), 6),
        kv_lengths=None if varlen else d.maybe(lambda: d.integers([d.integer(0, s.kv_len) for _ in range(s.batch)]), 8))


def _tree(d: Draw, s: Sizes, varlen: bool) -> Dict[str, Any]:
    """Words for trees of all queries, or for chains of one token."""
    if s.q_len > 64 or not d.rarely(8):
        return {}
    words = [d.pick((-1, 1, d.integer(0, 2 ** min(s.q_len, 60) - 1))) for _ in range((1 if varlen else s.batch) * s.q_len)]
    return given(tree_mask=d.integers(words, (s.q_len,) if varlen else (s.batch, s.q_len)))


def _numbers(d: Draw, names: str) -> Dict[str, Any]:
    """A few options, by the names of flash_attention; `names`: the function's own for some of them."""
    usual = {
        "softmax_scale": (None, 0.3, 1, -1.0, 0.0), "softcap": (0.0, 5.0, 1), "keep_prob": (1.0, 0.9, 0.5), "seed": (0, 1, 2**63, 7),
        "offset": (0, 3), "window_left": (UNBOUNDED, 0, 3, -1, 50), "window_right": (UNBOUNDED, 0, 5, -2), "bias_scale": (1.0, 0.5),
        "alibi_form": ("linear", "square_root"), "alibi_query_start": (0, 5), "alibi_key_start": (0, 2), "alignment": _ALIGNMENTS,
        "first_query": (0, 2), "first_key": (0, 3), "first_head": (0, 1), "total_heads": (0, 9),
        "path": ("automatic", "standard", "flash"), "block_q": (0, 16, 1, 64), "block_kv": (0, 32, 1, 64)}
    taken = {name: d.option(values) for name, values in usual.items() if d.rarely(6)}
    own = {"score": {"softmax_scale": "scale_value", "window_left": "pre_tokens", "window_right": "next_tokens"},
           "paged": {"softmax_scale": "scale_value"}}.get(names, {})
    return {own.get(name, name): value for name, value in taken.items() if value is not None}


@case
def flash_attention_(d: Draw) -> Call:
    s, (x, narrow) = _sizes(d), _dtypes(d)
    varlen = d.rarely(4)
    if varlen:
        shapes = [(s.q_len, s.heads, s.dim), (s.kv_len, s.kv_heads, s.dim), (s.kv_len, s.kv_heads, s.value_dim)]
        starts = {"cu_seqlens_q": d.integers(_ends(d, s.batch, s.q_len, 1)), "cu_seqlens_k": d.integers(_ends(d, s.batch, s.kv_len, 1))}
        if d.wildly(8):
            starts.popitem()
    else:
        shapes = [(s.batch, s.heads, s.q_len, s.dim), (s.batch, s.kv_heads, s.kv_len, s.dim), (s.batch, s.kv_heads, s.kv_len, s.value_dim)]
        starts = {}
    q, k, v = (d.array(x, shape) for shape in shapes)
    return Call(flash_attention.flash_attention, {
        **given(q=q, k=k, v=v), **starts, **_inputs(d, s, x, narrow, varlen),
        **_tree(d, s, varlen), **_numbers(d, ""),
        **given(causal=d.option((False, True)), return_lse=d.option((False, True)), drop_mask=d.maybe(lambda: _drop_mask(d, s), 12))})


# ---- FlashAttentionScore ---------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    sizes: Sizes
    layout: str
    dtype: str
    narrow: str
    arguments: Dict[str, Any]

    def shape(self, width: int) -> List[int]:
        s = self.sizes
        query = (s.q_len, s.heads, s.dim) if self.layout == "TND" else (s.batch, s.heads, s.q_len, s.dim)
        return list(shape_of_out(self.layout, query, width))

    def rows(self) -> List[int]:
        s = self.sizes
        return [s.heads, s.q_len] if self.layout == "TND" else [s.batch, s.heads, s.q_len]


def _problem(d: Draw) -> Problem:
    s, (x, narrow), layout = _sizes(d), _dtypes(d), d.pick(("BNSD", "BSND", "BSH", "SBH", "TND"))
    p = Problem(s, layout, x, narrow, {})
    keys = Problem(s._replace(heads=s.kv_heads, q_len=s.kv_len), layout, x, narrow, {})
    varlen = layout == "TND"
    arguments = given(query=d.array(x, p.shape(s.dim)), key=d.array(x, keys.shape(s.dim)), value=d.array(x, keys.shape(s.value_dim)),
                      input_layout=d.option((layout,)))
    if "H" in layout or d.rarely(6):
        arguments.update(attn_head_num=d.option((s.heads,)), kv_head_num=d.option((s.kv_heads,)))
    arguments.update(given(attn_dim_per_head=d.option((None, None, s.dim))))
    if varlen or d.wildly(20):
        arguments.update(actual_seq_qlen=d.integers(_ends(d, s.batch, s.q_len)), actual_seq_kvlen=d.integers(_ends(d, s.batch, s.kv_len)))
    arguments.update(_inputs(d, s, x, narrow, varlen))
    arguments.update(given(
        padding_mask=d.maybe(lambda: d.array(d.pick(("bool", "u8", "i32")), (s.batch, s.kv_len)), 8),
        drop_mask=d.maybe(lambda: _drop_mask(d, s), 12)))
    arguments.update(_numbers(d, "score"))
    return Problem(s, layout, x, narrow, arguments)


@case
def flash_attention_score(d: Draw) -> Call:
    return Call(flash_attention.flash_attention_score, _problem(d).arguments)


def _forward(p: Problem) -> Optional[Any]:
    """What the forward call gives of copies; None where it is refused."""
    try:
        arguments = {name: value.clone() if isinstance(value, Operand) and value.is_small() else value
                     for name, value in p.arguments.items()}
        return flash_attention.flash_attention_score(**arguments, context=GENERIC)
    except Exception:  # what it may raise is the forward case's question
        return None


def _plain(result: Any) -> Optional[np.ndarray]:
    """Numbers for an array to hold; bfloat16 as float32."""
    return None if result is None else to_numbers(result)


@case
def flash_attention_grad(d: Draw) -> Call:
    p = _problem(d)
    s = p.sizes
    out = _forward(p)
    wanted = [name for name in ("query", "key", "value") if d.coin()]
    wanted += [name for name in ("bias", "sinks") if name in p.arguments and d.coin()]
    saved = given(grad_out=d.array(p.dtype, p.shape(s.value_dim)),
                  attention_out=d.array(p.dtype, p.shape(s.value_dim), values=_plain(out and out.attention_out)))
    top, total = (_plain(out and part) for part in (out or (None,) * 3)[1:])
    if d.coin():
        with np.errstate(all="ignore"):
            lse = None if out is None else top + np.log(total)
        statistics = {"softmax_lse": None if lse is None else lse.astype(np.float64 if p.narrow == "f64" else np.float32)}
        saved["softmax_lse"] = d.array(p.narrow, p.rows(), values=statistics["softmax_lse"])
        saved.update(given(grad_lse=d.maybe(lambda: d.array(p.narrow, p.rows()))))
    else:
        statistics = {"softmax_max": top, "softmax_sum": total}
        saved.update({name: d.array(p.narrow, p.rows(), values=numbers) for name, numbers in statistics.items()})
    if d.wildly(8) and len(saved) > 2:
        saved.popitem()
    if d.coin():
        saved["wanted"] = d.option((tuple(wanted), wanted))
    # Repeated elements hold other statistics, with which a gradient is any number.
    as_computed = out is not None and all(_holds(saved.get(name), want) for name, want in statistics.items())
    return Call(flash_attention.flash_attention_grad, {**p.arguments, **given(**saved)}, compared=as_computed)


def _holds(operand: Any, numbers: np.ndarray) -> bool:
    if not isinstance(operand, Operand):
        return True
    return operand.dtype in ("f32", "f64") and operand.is_small() and np.array_equal(operand.numbers(), numbers, equal_nan=True)


# ---- pages, weights, merging -----------------------------------------------------------------------------------------


@case
def paged_attention_(d: Draw) -> Call:
    c, s = Cache(d), _sizes(d)
    group = d.size(1, 3)
    s = s._replace(heads=c.heads * group, kv_heads=c.heads, dim=c.dim, value_dim=c.value_dim)
    columns = d.size(1, 3)
    s = s._replace(kv_len=columns * c.block_size)
    x = d.pick((c.dtype, "f32"))
    keys, values = c.pages(d, False)
    varlen = d.rarely(3)
    shape = [s.q_len, s.heads, s.dim] if varlen else [s.batch, s.heads, s.q_len, s.dim]
    table = [d.integer(-1 if d.wildly(16) else 0, max(c.num_blocks - (0 if d.wildly(16) else 1), 0)) for _ in range(s.batch * columns)]
    inputs = _inputs(d, s, x, "f32", True)
    return Call(paged_attention, {
        **given(query=d.array(x, shape), key_cache=keys, value_cache=values, block_table=d.integers(table, (s.batch, columns)),
                kv_lengths=d.integers([d.integer(0, s.kv_len) for _ in range(s.batch)])),
        **inputs, **_tree(d, s, varlen), **_numbers(d, "paged"),
        **given(causal=d.option((True, False)), layout=d.option((c.layout,)), return_lse=d.option((False, True)),
                return_statistics=d.option((False, False, True)), shared_prefix=d.option((-1, 0, *((c.block_size, 3) if d.wildly(8) else ()))),
                actual_seq_qlen=d.integers(_ends(d, s.batch, s.q_len)) if varlen else None,
                out=d.maybe(lambda: d.array(x, [*shape[:-1], s.value_dim], written=True), 3))})


@case
def lightning_indexer(d: Draw) -> Call:
    s, (x, narrow) = _sizes(d), (d.real(), d.real())
    varlen_q, keys = d.rarely(3), d.pick(("dense", "dense", "varlen", "pages"))
    batch = d.pick((s.batch, 1)) if varlen_q and keys == "dense" else s.batch
    arguments: Dict[str, Any] = {"count": d.option((s.kv_len, 1, 3, 40))}
    block_size, columns = d.size(1, 9), d.size(1, 3)
    kv_len = block_size * columns if keys == "pages" else s.kv_len
    shapes = {"dense": (batch, s.kv_heads, s.kv_len, s.dim), "varlen": (s.kv_len, s.kv_heads, s.dim),
              "pages": (batch * columns, block_size, s.kv_heads, s.dim)}
    if varlen_q:
        query, weights = (s.q_len, s.heads, s.dim), (s.q_len, s.heads)
        arguments["cu_seqlens_q"] = d.integers(_ends(d, batch, s.q_len, 1))
    else:
        query, weights = (batch, s.heads, s.q_len, s.dim), (batch, s.heads, s.q_len)
        arguments["query_lengths"] = d.maybe(lambda: d.integers([d.integer(0, s.q_len) for _ in range(batch)]), 4)
    if keys == "varlen":
        arguments["cu_seqlens_k"] = d.integers(_ends(d, batch, s.kv_len, 1))
    elif keys == "pages":
        table = [d.integer(-1 if d.wildly(16) else 0, max(batch * columns - 1, 0)) for _ in range(batch * columns)]
        arguments["block_table"] = d.integers(table, (batch, columns))
    if keys == "pages" or (keys == "dense" and d.rarely(4)):
        arguments["kv_lengths"] = d.integers([d.integer(0, kv_len) for _ in range(batch)])
    # Scores that rounding alone parts may come in another order at another level.
    return Call(flash_attention.lightning_indexer, given(
        query=d.array(x, query), key=d.array(x, shapes[keys]), weights=d.array(narrow, weights), causal=d.option((True, False)),
        return_values=d.option((False, True)), values_dtype=d.option(("f32", "bf16", "f16")),
        block_q=d.option((0, 1, 5)), block_kv=d.option((0, 1, 20)), **arguments), compared=False)


@case
def attention_weights(d: Draw) -> Call:
    s, (x, narrow) = _sizes(d), _dtypes(d)
    options = _numbers(d, "")
    for name in ("path", "block_q", "block_kv"):
        options.pop(name, None)
    return Call(flash_attention.attention_weights, {
        **given(q=d.array(x, (s.batch, s.heads, s.q_len, s.dim)), k=d.array(x, (s.batch, s.kv_heads, s.kv_len, s.dim)),
                causal=d.option((False, True)), stage=d.option(("scaled", "capped", "scores", "weights"))),
        **_inputs(d, s, x, narrow, False), **options}, compared="alibi_slopes" not in options)


@case
def merge_attention(d: Draw) -> Call:
    parts, rows = d.size(1, 4), [d.outward(1, 6), *(d.size(1, 4) for _ in range(d.integer(0, 2)))]
    x, narrow = _dtypes(d)
    width, dtype = d.size(1, 40), d.option((None, None, "f32", "bf16", "f16", "f64"))
    both = d.coin()
    statistics = ("softmax_max", "softmax_sum") if both else ("softmax_lse",)
    arguments = given(attention_out=d.array(x, [parts, *rows, width]), dtype=dtype,
                      **{name: d.array(narrow, [parts, *rows]) for name in statistics})
    if d.wildly(10):
        arguments.pop(statistics[0], None)
    call = Call(flash_attention.merge_attention, arguments, compared=not both)  # a random sum may be negative
    if not d.rarely(3):
        return call
    kind = dtype if isinstance(dtype, str) and dtype in ("f32", "bf16", "f16", "f64") else x
    written = [d.array(kind, [*rows, width], written=True),
               *(d.array(narrow, rows, written=True) if name in statistics else None
                 for name in ("softmax_lse", "softmax_max", "softmax_sum"))]
    # Operands in a tuple are the judge's to watch by names of their own.
    accumulate = d.option((False, True))
    return Call(merge_into, given(**arguments, accumulate=accumulate, attention_out_given=written[0], softmax_lse_given=written[1],
                                  softmax_max_given=written[2], softmax_sum_given=written[3]), compared=call.compared)


def merge_into(attention_out: Any, attention_out_given: Any = None, softmax_lse_given: Any = None, softmax_max_given: Any = None,
               softmax_sum_given: Any = None, **arguments: Any) -> Any:
    """merge_attention with the four parts of `out` as arguments of their own."""
    return flash_attention.merge_attention(
        attention_out, **arguments, out=(attention_out_given, softmax_lse_given, softmax_max_given, softmax_sum_given))


merge_into.__qualname__ = "merge_attention"


@case
def block_mask_from_mask(d: Draw) -> Call:
    mask = d.array("bool", [d.size(1, 3) for _ in range(d.integer(0, 2))] + [d.size(1, 40), d.size(1, 70)])
    if isinstance(mask, Operand) and not mask.is_small():
        mask = np.ones((3, 4), bool)  # one of 2^33 repeated rows would be looked through
    return Call(flash_attention.BlockMask.from_mask, given(
        mask=mask, block_q=d.option((1, 3, 16)), block_kv=d.option((1, 3, 16))), takes_context=False)


@case
def block_mask_from_pattern(d: Draw) -> Call:
    kv_len = d.size(1, 200)
    numbers = {"window_left": (None, 0, 20), "window_right": (None, 0, 7), "dilation": (1, 3), "global_tokens": (0, 9), "stride": (0, 16),
               "random": (0, 2), "seed": (0, 7, 2**63), "causal": (False, True), "alignment": _ALIGNMENTS, "block_q": (1, 8, 64),
               "block_kv": (1, 8, 64)}
    # Of extreme sizes the answer is a matter of memory and minutes.
    return Call(flash_attention.BlockMask.from_pattern, given(
        query_len=d.size(1, 200), kv_len=kv_len, heads=d.size(1, 3), documents=d.maybe(lambda: d.integers(_ends(d, 3, kv_len, 1)), 4),
        **{name: d.option(values) for name, values in numbers.items() if d.rarely(3)}), takes_context=False)


@case
def block_mask_from_predicate(d: Draw) -> Call:
    answer = hostile.draw(d)
    predicate = d.pick((lambda q, k: q >= k, lambda q, k: abs(q - k) < 9, lambda q, k: k < 7, lambda q, k: q - k, lambda q, k: answer))
    return Call(flash_attention.BlockMask.from_predicate, given(
        predicate=answer if d.wildly(20) and not callable(answer) else predicate, query_len=d.size(0, 40), kv_len=d.size(0, 70), block_q=d.option((1, 8, 64)),
        block_kv=d.option((1, 8, 64))), takes_context=False)


@case
def dropout_mask(d: Draw) -> Call:
    s = _sizes(d)
    return Call(flash_attention.dropout_mask, given(
        batch=d.option((s.batch,)), num_heads=d.option((s.heads,)), query_len=d.option((s.q_len,)), kv_len=d.option((s.kv_len,)),
        keep_prob=d.option((1.0, 0.5, 1)), **{name: d.option((0, 1, 2**40, 2**63)) for name in
                                              ("seed", "offset", "first_query", "first_key", "first_head", "total_heads") if d.rarely(3)}),
        takes_context=False)


@case
def tree_mask(d: Draw) -> Call:
    batch, queries = d.size(1, 3), d.size(1, 9)
    parents = [d.integer(-1, i - 1) for _ in range(batch) for i in range(queries)]
    return Call(flash_attention.tree_mask, given(parents=d.integers(parents, (batch, queries))), takes_context=False)


@case
def pack_drop_mask(d: Draw) -> Call:
    s = _sizes(d)
    return Call(flash_attention.pack_drop_mask, given(keep=d.array("bool", (s.batch, s.heads, min(s.q_len, 40), s.kv_len))),
                takes_context=False)


@case
def scaled_dot_product_attention(d: Draw) -> Call:
    """torch's function in our form; what is not ours torch refuses, in its words and kinds."""
    if hostile.torch is None or not d.with_torch:
        return flash_attention_(d)
    import ops_transformer.torch as ot

    s, (x, _) = _sizes(d), _dtypes(d)
    s = s._replace(q_len=min(s.q_len, 40))
    return Call(ot.scaled_dot_product_attention, given(
        query=d.array(x, (s.batch, s.heads, s.q_len, s.dim)), key=d.array(x, (s.batch, s.kv_heads, s.kv_len, s.dim)),
        value=d.array(x, (s.batch, s.kv_heads, s.kv_len, s.value_dim)),
        attn_mask=d.maybe(lambda: d.array(d.pick(("bool", x)), _broadcast(d, s)), 4), is_causal=d.option((False, True)),
        scale=d.option((None, None, 0.3)), enable_gqa=d.option((True, False))), names=False, takes_context=False)

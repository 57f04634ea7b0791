"""The layouts of FlashAttentionScore as views [batch, N, length, D], of views of the core and of torch tensors alike.

    BNSD  [batch, N, length, D]        BSND  [batch, length, N, D]
    BSH   [batch, length, N * D]       SBH   [length, batch, N * D]
    TND   [tokens, N, D]               sequences one after the other, without padding; stays [tokens, N, D]
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from ._core import View

LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")


def _split(tensor: Any, heads: int) -> Any:
    """Dimension 2 of heads * D elements as [heads, D]."""
    if isinstance(tensor, View):
        return tensor.split(2, heads)
    return tensor.unflatten(2, (heads, tensor.shape[2] // heads))


def _exchanged(tensor: Any, a: int, b: int) -> Any:
    return tensor.transposed(a, b) if isinstance(tensor, View) else tensor.transpose(a, b)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f'input_layout is "{layout}", must be one of {", ".join(LAYOUTS)}')


def heads_first(name: str, tensor: Any, layout: str, num_heads: Optional[int]) -> Any:
    """[batch, N, length, D], or TND as it is: the same memory."""
    shape = tensor.shape
    if len(shape) != len(layout):
        raise ValueError(f"input_layout {layout} means {len(layout)} dimensions, but {name} has {len(shape)}: {list(shape)}")
    if "H" in layout:
        if num_heads is None or num_heads < 1:
            raise ValueError(f"input_layout {layout} needs attn_head_num, the number of heads, for {name}")
        if shape[2] % num_heads:
            raise ValueError(f"input_layout {layout}: dimension 2 of {name} is {shape[2]}, which is not "
                             f"attn_head_num = {num_heads} heads of one size")
        tensor = _split(tensor, num_heads)
    if layout == "SBH":
        tensor = _exchanged(tensor, 0, 1)
    return tensor if layout in ("BNSD", "TND") else _exchanged(tensor, 1, 2)


def from_heads_first(tensor: Any, layout: str) -> Any:
    """A torch tensor [batch, N, length, D] in the layout; no copy where its memory is in that order."""
    if layout in ("BNSD", "TND"):
        return tensor
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    tensor = tensor.transpose(1, 2)
    return tensor if layout == "BSND" else tensor.flatten(2)


def shape_of_out(layout: str, query: Sequence[int], width: int) -> Tuple[int, ...]:
    """The shape, in the layout, of a result for a query [batch, N, length, D] or TND."""
    if layout == "TND":
        return (query[0], query[1], width)
    batch, heads, length, _ = query
    return {"BNSD": (batch, heads, length, width), "BSND": (batch, length, heads, width),
            "BSH": (batch, length, heads * width), "SBH": (length, batch, heads * width)}[layout]


# ---- layouts that contradict the shapes ------------------------------------------------------------------------------


def _seen_as(shape: Sequence[int], layout: str, heads: Optional[int]) -> Optional[Tuple[int, int, int, int]]:
    """(batch, N, length, D) of a shape read as a layout."""
    if len(shape) != len(layout) or layout == "TND":
        return None
    if layout in ("BNSD", "BSND"):
        return tuple(shape[layout.index(axis)] for axis in "BNSD")
    if not heads or shape[2] % heads:
        return None
    return (shape[layout.index("B")], heads, shape[layout.index("S")], shape[2] // heads)


def layouts_that_fit(query: Sequence[int], key: Sequence[int], value: Sequence[int], num_heads: Optional[int],
                     num_kv_heads: Optional[int], head_dim: Optional[int]) -> List[str]:
    """Those that query, key and value can have together, and with the numbers that were given."""
    found = []
    for layout in LAYOUTS:
        q, k, v = (_seen_as(shape, layout, heads) for shape, heads in
                   ((query, num_heads), (key, num_kv_heads), (value, num_kv_heads)))
        if q is None or k is None or v is None:
            continue
        fits = q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[3] == k[3] and k[1] > 0 and q[1] % k[1] == 0
        wanted = (num_heads in (None, q[1]), num_kv_heads in (None, k[1]), head_dim in (None, q[3]))
        if fits and all(wanted):
            found.append(layout)
    return found


def hint(layout: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], num_heads: Optional[int],
         kv_head_num: Optional[int], head_dim: Optional[int]) -> str:
    """What to write instead, for the end of a message; empty where nothing is known."""
    if layout in ("BSH", "SBH") and num_heads and kv_head_num is None and len(query) == len(key) == 3:
        each = query[2] // num_heads
        if query[2] % num_heads == 0 and 0 < key[2] < query[2] and each and key[2] % each == 0:
            return (f"; key has {key[2]} elements a token, which are {key[2] // each} heads of query's {each}: say "
                    f"kv_head_num={key[2] // each}")
    # Heads of keys are those of the query only where the layout does not show them.
    fitting = layouts_that_fit(query, key, value, num_heads,
                               kv_head_num or (num_heads if len(query) == 3 else None), head_dim)
    if not fitting or layout in fitting:
        return ""
    return f"; these shapes fit input_layout {' and '.join(fitting)}"

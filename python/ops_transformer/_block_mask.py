"""Block masks: which pairs of a query block and a key block attention computes. Their type, their builders, their pictures."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple, Union

import numpy as np

from . import _core
from ._arrays import _unmasked, integer_array, integers, is_torch, short, view
from ._block_picture import characters, gray, png, shares
from ._calls import _kind_of, checked, public

_INTEGER = _kind_of("int")
_PAIRS = 1 << 20  # of a query and a key that a predicate is asked for at once: 8 MiB for each array of integers that it makes


class BlockMask(NamedTuple):
    """Which pairs of a query block and a key block are computed: attention costs what it sees. A CSR matrix.

        row_offsets  int32 or int64 [batch or 1, num_heads or num_kv_heads or 1, query blocks + 1]; a size of 1 repeats
        columns      int32 or int64 [any size]: entries row_offsets[b, h, i] to row_offsets[b, h, i + 1] - 1 are the key blocks
                     that query block i sees, ascending, each once
        block_q, block_kv
                     queries and keys of a block, any numbers; the last blocks may be shorter

    NumPy arrays or torch tensors, of any strides >= 0, read where they are. A block mask hides, as a bool mask does, beside all else
    that hides keys (causal, windows, mask ..): `flash_attention(q, k, v, block_mask=mask)`, and so every function of attention.
    Query blocks are those of query_len (sequences end to end: at least those of the longest one), key blocks those of kv_len; key
    blocks behind a shorter sequence's keys show nothing. A query block may have no key block: its rows give 0.

    from_pattern, from_mask and from_predicate build masks; text and png show one; expanded is the bool mask that it stands for.
    Blocks of 64 and more are as fast as their share of the dense call. Errors name block_mask.row_offsets or block_mask.columns, the
    index and both values, before anything is written.
    """

    row_offsets: Any
    columns: Any
    block_q: int
    block_kv: int

    @staticmethod
    @public
    def from_pattern(query_len: int, kv_len: int, *, block_q: int = 64, block_kv: int = 64, heads: int = 1,
                     alignment: str = "top_left", causal: bool = False, window_left: Optional[int] = None,
                     window_right: Optional[int] = None, dilation: int = 1, global_tokens: int = 0, stride: int = 0,
                     random: int = 0, seed: int = 0, documents: Any = None) -> "BlockMask":
        """Every pair of blocks in which the pattern shows a pair of tokens. Query i is at position p = i ("top_left", the default,
        as of flash_attention) or p = i + kv_len - query_len ("bottom_right") and sees key j where any of these shows it, or if
        none of them is asked for, every key:

            window     p - window_left <= j <= p + window_right, and p - j a multiple of dilation; one side given: the other is 0
            global     j < global_tokens, or p < global_tokens            (Longformer: tokens that all see, and that see all)
            stride     p - j a multiple of `stride`                       (Sparse Transformers)
            random     j in one of `random` key blocks, drawn anew for each query block and head             (BigBird)

        and where all of these hold, if asked for: causal, j <= p; documents, j and p in the same [documents[n], documents[n + 1])
        of the ascending integers `documents` (from 0 to kv_len).

        A block is shown whole: a query may see more of it than the pattern says. What is finer, options of attention hide (causal,
        window_left, mask). heads: rows of their own, which only random blocks tell apart; the same `seed` draws the same blocks on
        every machine. Gives int64 arrays of NumPy. Source: Child et al., "Generating Long Sequences with Sparse Transformers"
        (2019); Beltagy et al., "Longformer" (2020); Zaheer et al., "Big Bird" (2020).
        """
        if alignment not in ("top_left", "bottom_right"):
            raise ValueError(f'alignment is "{alignment}", must be one of top_left, bottom_right')
        rows = None if documents is None else integers(documents, "documents")
        return _built("make_block_mask", block_q, block_kv, query_len, kv_len, block_q, block_kv, heads,
                      alignment == "bottom_right", causal, window_left, window_right, dilation, global_tokens, stride, random,
                      seed, rows)

    @staticmethod
    @public
    def from_mask(mask: Any, block_q: int, block_kv: int) -> "BlockMask":
        """Every pair of blocks in which a bool mask shows something.

        mask bool (true: visible) [query_len, kv_len], [heads, query_len, kv_len] or [batch, heads, query_len, kv_len], of any
        strides >= 0. Attention needs the mask beside it (mask=mask), unless it is made of whole blocks. Gives int64 arrays of
        NumPy.
        """
        return _built("block_mask_of", block_q, block_kv, view(mask, "mask"), block_q, block_kv)

    @staticmethod
    @public
    def from_predicate(predicate: Any, query_len: int, kv_len: int, block_q: int, block_kv: int) -> "PredicateMask":
        """The blocks of a function predicate(q_index, k_index) -> bool (true: visible) of int64 arrays [n, 1] and [1, m], whose
        result broadcasts to [n, m]: lambda q, k: (q >= k) & (document[q] == document[k]). The indices are those of queries and
        keys in their sequence, from 0. It is asked for at most 2^20 pairs at once, and for every pair once: no
        [query_len, kv_len] array exists.

        Users of torch's flex_attention expect exactly the predicate: its kernel calls mask_mod again inside blocks that are seen in
        part. A block mask shows a block whole. So the answer has two lists, as flex has:

            block_mask  every block in which some pair is seen: nothing visible is lost
            partial     those of them in which some pair is hidden

        Without partial blocks the answer itself is taken as block_mask=, and is exact. With partial ones attention refuses it, as
        it would show too much: pass block_mask=answer.block_mask beside what hides the rest, which is an option where there is one
        (causal, window_left, kv_lengths ..) and else the dense mask=predicate(np.arange(query_len)[:, None], np.arange(kv_len)).
        Smaller blocks, or blocks that end where the predicate changes (documents padded to whole blocks), have fewer partial ones.
        """
        if not callable(predicate):
            raise TypeError(f"predicate is {short(predicate)} ({type(predicate).__name__}), must be a function of (q_index, "
                            "k_index)")
        for name, size, least in (("query_len", query_len, 0), ("kv_len", kv_len, 0), ("block_q", block_q, 1),
                                  ("block_kv", block_kv, 1)):
            if size < least:
                raise ValueError(f"{name} is {size}, must be at least {least}")
        found: Tuple[list, list] = ([], [])
        counts: Tuple[list, list] = ([], [])
        for some, every in _strips(predicate, query_len, kv_len, block_q, block_kv):
            for n, seen in enumerate((some, some & ~every)):
                found[n].append(np.nonzero(seen)[1])
                counts[n].append(seen.sum(axis=1))
        return PredicateMask(*(BlockMask(np.concatenate([[0], *counts[n]]).astype(np.int64).cumsum().reshape(1, 1, -1),
                                         np.concatenate([np.empty(0, np.int64), *found[n]]), block_q, block_kv) for n in (0, 1)))

    @public
    def expanded(self, query_len: int, kv_len: int) -> np.ndarray:
        """The bool mask (true: visible) that this stands for, [batch or 1, heads or 1, query_len, kv_len]: for small sizes."""
        offsets, columns, num_columns = _lists(self, kv_len)
        blocks = -(-query_len // self.block_q)
        if query_len < 0 or offsets.shape[2] != blocks + 1:
            raise ValueError(f"block_mask.row_offsets dim 2 is {offsets.shape[2]}, but must be {blocks + 1}: {blocks} blocks of "
                             f"{self.block_q} queries, of query_len = {query_len}")
        seen = np.zeros((*offsets.shape[:2], blocks, num_columns), bool)
        for at in np.ndindex(*seen.shape[:3]):
            seen[at][columns[offsets[at]:offsets[(*at[:2], at[2] + 1)]]] = True
        return seen[:, :, np.arange(query_len) // self.block_q][..., np.arange(kv_len) // self.block_kv]

    @public
    def text(self, kv_len: Optional[int] = None, *, batch: int = 0, head: int = 0, most: int = 96) -> str:
        """One head's mask in characters: # for a block that is seen, . for one that is hidden; where there are more than `most`
        rows or columns, a character stands for several blocks, + where some of them are seen. The first line tells sizes.
        kv_len: of the keys; without it the last column that is listed is the last block."""
        return _text(self, None, kv_len, batch, head, most)

    @public
    def png(self, path: Any = None, kv_len: Optional[int] = None, *, batch: int = 0, head: int = 0, side: int = 512) -> bytes:
        """The same as a PNG file of about `side` pixels: black blocks are seen, white ones hidden, gray pixels stand for several
        blocks of which some are seen. Gives the file's bytes, and writes them to `path` if there is one."""
        return _png(self, None, path, kv_len, batch, head, side)


class PredicateMask(NamedTuple):
    """What BlockMask.from_predicate gives."""

    block_mask: BlockMask  # of every block in which the predicate shows a pair
    partial: BlockMask  # of those in which it hides one, too

    @public
    def text(self, kv_len: Optional[int] = None, *, batch: int = 0, head: int = 0, most: int = 96) -> str:
        """BlockMask.text, with + for blocks that are seen in part."""
        return _text(self.block_mask, self.partial, kv_len, batch, head, most)

    @public
    def png(self, path: Any = None, kv_len: Optional[int] = None, *, batch: int = 0, head: int = 0, side: int = 512) -> bytes:
        """BlockMask.png, with gray for blocks that are seen in part."""
        return _png(self.block_mask, self.partial, path, kv_len, batch, head, side)


# ---- as an option of attention ---------------------------------------------------------------------------------------


def option_parts(function: str, value: Any) -> Tuple[Dict[str, Any], Dict[str, int]]:
    """(tensors, numbers) of the option block_mask, by the names of _attention.Tensors and Options."""
    if isinstance(value, PredicateMask):
        of_parts, of_all = (len(mask.columns) for mask in (value.partial, value.block_mask))
        if of_parts:
            raise ValueError(f"{function}: block_mask is of a predicate that shows {of_parts} of {of_all} blocks only in part, and "
                             "attention would show them whole: pass block_mask=answer.block_mask beside what hides the rest "
                             "(mask=, causal=True ..)")
        value = value.block_mask
    if not isinstance(value, BlockMask):
        raise TypeError(f"{function}: block_mask is {short(value)} ({type(value).__name__}), must be a BlockMask of row_offsets, "
                        "columns, block_q, block_kv")
    return ({"block_mask_row_offsets": value.row_offsets, "block_mask_columns": value.columns},
            {f"block_mask_{name}": checked(function, f"block_mask.{name}", _INTEGER, size)
             for name, size in (("block_q", value.block_q), ("block_kv", value.block_kv))})


# ---- builders --------------------------------------------------------------------------------------------------------


def _built(builder: str, block_q: int, block_kv: int, *arguments: Any) -> BlockMask:
    """The core's mask, and its errors in the names of Python's arguments."""
    try:
        return BlockMask(*getattr(_core, builder)(*arguments), block_q, block_kv)
    except (ValueError, MemoryError) as error:
        text = str(error).replace(f"{builder}: ", "", 1)
        raise type(error)(f"global_tokens{text[len('global'):]}" if text.startswith("global is") else text) from None


def _cuts(first: int, count: int, block: int) -> np.ndarray:
    """Where blocks begin among elements first to first + count - 1; the first of them begins, or goes on, at 0."""
    return np.maximum(np.arange(first - first % block, first + count, block) - first, 0)


def _answer(predicate: Callable[[Any, Any], Any], queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """bool [queries, keys]."""
    given, shape = predicate(queries[:, None], keys[None]), (len(queries), len(keys))
    try:
        seen = np.asarray(given.detach().numpy() if is_torch(given) else _unmasked(given, given, "the answer of predicate"))
    except Exception as error:  # NumPy's, torch's, or the object's own
        raise TypeError(f"predicate gave {short(given)}, must be bool that broadcasts to {list(shape)}: {error}") from None
    if seen.dtype != np.bool_ or seen.ndim > 2 or any(n not in (1, m) for n, m in zip(seen.shape[::-1], shape[::-1])):
        raise ValueError(f"predicate gave {seen.dtype} {list(seen.shape)}, must be bool that broadcasts to {list(shape)}")
    return np.broadcast_to(seen, shape)


def _strips(predicate: Any, query_len: int, kv_len: int, block_q: int, block_kv: int) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """(some, every) of some query blocks after the other, bool [query blocks, key blocks]: whether any, and whether all pairs of
    the blocks are seen. Whole blocks where a piece of _PAIRS pairs has room for them, else several pieces of one."""
    rows = max(1, _PAIRS // max(kv_len, 1))
    width = max(1, _PAIRS // rows)
    strip = max(block_q, rows - rows % block_q)
    for first in range(0, query_len, strip):
        end = min(first + strip, query_len)
        some = np.zeros((-(-(end - first) // block_q), -(-kv_len // block_kv)), bool)
        every = ~some
        for q in range(first, end, rows):
            height = min(rows, end - q)
            tops = _cuts(q - first, height, block_q)
            for k in range(0, kv_len, width):
                seen = _answer(predicate, np.arange(q, q + height), np.arange(k, min(k + width, kv_len)))
                lefts = _cuts(k, seen.shape[1], block_kv)
                for total, join in ((some, np.logical_or), (every, np.logical_and)):
                    of_rows = np.stack([join.reduce(seen[a:b], axis=0) for a, b in zip(tops, (*tops[1:], height))])
                    top, left = (q - first) // block_q, k // block_kv
                    block = total[top:top + len(tops), left:left + len(lefts)]
                    join(block, join.reduceat(of_rows, lefts, axis=1), out=block)
        yield some, every


# ---- pictures --------------------------------------------------------------------------------------------------------


def _lists(mask: BlockMask, kv_len: Optional[int]) -> Tuple[np.ndarray, np.ndarray, int]:
    """(row_offsets, columns, key blocks) as NumPy's arrays, after the questions that attention asks of a mask."""
    arrays = []
    for name, dims, size_name in (("row_offsets", 3, "block_q"), ("columns", 1, "block_kv")):
        array, size = getattr(mask, name), getattr(mask, size_name)
        arrays.append(integer_array(array.detach().numpy() if is_torch(array) else array, f"block_mask.{name}"))
        if arrays[-1].ndim != dims:
            raise ValueError(f"block_mask.{name} has rank {arrays[-1].ndim}, must be {dims}")
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"block_mask.{size_name} is {short(size)}, must be an integer of at least 1")
    offsets, columns = arrays
    if offsets.shape[2] == 0:
        raise ValueError("block_mask.row_offsets dim 2 is 0, must be query blocks + 1")
    if kv_len is not None and kv_len < 0:
        raise ValueError(f"kv_len is {kv_len}, must not be negative")
    num_columns = int(columns.max(initial=-1)) + 1 if kv_len is None else -(-kv_len // mask.block_kv)
    for name, array, most in (("row_offsets", offsets, columns.size), ("columns", columns, num_columns - 1)):
        wrong = np.argwhere((array < 0) | (array > most))
        if len(wrong):
            at = tuple(wrong[0])
            raise ValueError(f"block_mask.{name}{''.join(f'[{i}]' for i in at)} is {array[at]}, must be 0 to {most}")
    falls = np.argwhere(np.diff(offsets, axis=2) < 0)
    if len(falls):
        b, h, i = (int(n) for n in falls[0])
        raise ValueError(f"block_mask.row_offsets[{b}][{h}][{i + 1}] is {offsets[b, h, i + 1]}, less than the one before it, "
                         f"{offsets[b, h, i]}")
    return offsets, columns, num_columns


def _shares(mask: BlockMask, partial: Optional[BlockMask], kv_len: Optional[int], batch: int, head: int, most: Tuple[str, int]):
    """(first line of a picture, share of each cell) of one head; half of a partial block is seen."""
    name, number = most
    if number < 1:
        raise ValueError(f"{name} is {number}, must be at least 1")
    offsets, columns, num_columns = _lists(mask, kv_len)
    for name, n, size in (("batch", batch, offsets.shape[0]), ("head", head, offsets.shape[1])):
        if not 0 <= n < size:
            raise ValueError(f"{name} is {n}, but block_mask.row_offsets has {size}")
    row = offsets[batch, head]
    seen = columns[row[0]:row[-1]]
    step, share = shares(row, seen, np.ones(len(seen)), num_columns, number)
    if partial is not None:
        less, of_less, _ = _lists(partial, kv_len)
        row_less = less[batch, head]
        of_head = of_less[row_less[0]:row_less[-1]]
        share -= shares(row_less, of_head, np.full(len(of_head), 0.5), num_columns, number)[1]
    line = f"{len(row) - 1} x {num_columns} blocks of {mask.block_q} queries and {mask.block_kv} keys"
    return line + (f", {step} x {step} to a character" if step > 1 else ""), share


def _text(mask: BlockMask, partial: Optional[BlockMask], kv_len: Optional[int], batch: int, head: int, most: int) -> str:
    line, share = _shares(mask, partial, kv_len, batch, head, ("most", most))
    return f"{line}\n{characters(share)}"


def _png(mask: BlockMask, partial: Optional[BlockMask], path: Union[str, "os.PathLike[str]", None], kv_len: Optional[int],
         batch: int, head: int, side: int) -> bytes:
    data = png(gray(_shares(mask, partial, kv_len, batch, head, ("side", side))[1], side))
    if path is not None:
        with open(path, "wb") as file:
            file.write(data)
    return data

"""Builders of block masks, pair by pair, and their pictures, pixel by pixel."""

import struct
import zlib

import numpy as np
import pytest
from block_masks import SMALL, blocks, dense, drawn, table_of

from ops_transformer import Tagged
from ops_transformer.flash_attention import BlockMask, PredicateMask

# ---- builders --------------------------------------------------------------------------------------------------------


def pattern(query_len, kv_len, *, alignment="top_left", causal=False, window_left=None, window_right=None, dilation=1,
            global_tokens=0, stride=0, documents=None):
    """The definition, pair by pair: bool [query_len, kv_len]."""
    p, j = np.arange(query_len)[:, None] + (kv_len - query_len if alignment == "bottom_right" else 0), np.arange(kv_len)
    shown = []
    if window_left is not None or window_right is not None:
        shown.append((j >= p - (window_left or 0)) & (j <= p + (window_right or 0)) & ((p - j) % dilation == 0))
    if global_tokens:
        shown.append((j < global_tokens) | (p < global_tokens))
    if stride:
        shown.append((p - j) % stride == 0)
    seen = np.logical_or.reduce(shown) if shown else np.ones((query_len, kv_len), bool)
    if causal:
        seen = seen & (j <= p)
    if documents is not None:
        of_p, of_j = (np.where((x < documents[0]) | (x >= documents[-1]), -1, np.searchsorted(documents, x, "right"))
                      for x in (p, j))
        seen = seen & (of_p == of_j) & (of_j >= 0)
    return seen


PATTERNS = {
    "everything": {}, "causal": dict(causal=True), "window": dict(window_left=9), "both_sides": dict(window_left=3, window_right=20),
    "longformer": dict(causal=True, window_left=12, global_tokens=5), "global": dict(global_tokens=20), "strided": dict(stride=11),
    "strided_and_window": dict(causal=True, stride=16, window_left=15), "dilated": dict(window_left=30, dilation=7),
    "documents": dict(documents=[0, 3, 20, 20, 41, 57]), "documents_in_part": dict(documents=[4, 30], causal=True),
    "bottom_right": dict(alignment="bottom_right", causal=True, window_left=4)}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_the_blocks_of_the_pairs_that_they_show(name):
    for query_len, kv_len in ((57, 57), (20, 57), (57, 20)):
        options = dict(PATTERNS[name])
        if "documents" in options:
            options["documents"] = [min(n, kv_len) for n in options["documents"]]
        for block_q, block_kv in ((1, 1), (8, 8), (5, 16)):
            mask = BlockMask.from_pattern(query_len, kv_len, block_q=block_q, block_kv=block_kv, **options)
            assert isinstance(mask, BlockMask) and mask[2:] == (block_q, block_kv)
            assert mask.row_offsets.dtype == mask.columns.dtype == np.int64
            seen = pattern(query_len, kv_len, **options)
            table = np.array([[seen[i:i + block_q, j:j + block_kv].any() for j in range(0, kv_len, block_kv)]
                              for i in range(0, query_len, block_q)])
            assert (table_of(mask, blocks(kv_len, block_kv))[0, 0] == table).all()


def test_random_blocks_belong_to_a_seed():
    make = lambda **more: BlockMask.from_pattern(640, 640, random=3, heads=2, **more)  # noqa: E731
    first = table_of(make(seed=2**63), 10)
    assert (first == table_of(make(seed=2**63), 10)).all() and (first != table_of(make(seed=5), 10)).any()
    assert (first.sum(-1) == 3).all() and (first[0, 0] != first[0, 1]).any()
    causal = table_of(make(seed=1, causal=True), 10)
    assert not np.triu(causal[0, 0], 1).any() and (causal.sum(-1) == np.minimum(np.arange(10) + 1, 3)).all()


def test_arrays_of_builders_live_as_long_as_they_are_held():
    columns = BlockMask.from_pattern(4096, 4096, window_left=63).columns
    for _ in range(20):
        BlockMask.from_pattern(4096, 4096, global_tokens=64)
    assert columns[:3].tolist() == [0, 0, 1] and columns.flags.writeable


def test_from_a_dense_mask(rng):
    for shape in ((33, 50), (2, 33, 50), (3, 2, 33, 50)):
        fine = rng.random(shape) < 0.02
        mask = BlockMask.from_mask(fine, 8, 16)
        whole = fine.reshape((1,) * (4 - fine.ndim) + shape)
        want = np.zeros((*whole.shape[:2], 5, 4), bool)
        for b, h, i, j in np.ndindex(*want.shape):
            want[b, h, i, j] = whole[b, h, 8 * i:8 * i + 8, 16 * j:16 * j + 16].any()
        assert (mask.expanded(33, 50) == dense(want, 33, 50, 8, 16)).all()
        turned = BlockMask.from_mask(np.asfortranarray(fine), 8, 16)
        assert all((a == b).all() for a, b in zip(mask[:2], turned[:2]))
    bits = BlockMask.from_mask(Tagged(fine.astype(np.uint8) * 255, "bool"), 8, 16)
    assert all((a == b).all() for a, b in zip(mask[:2], bits[:2]))


PREDICATES = {
    "causal": lambda q, k: q >= k, "window": lambda q, k: np.abs(q - k) < 9, "documents": lambda q, k: q // 17 == k // 17,
    "columns": lambda q, k: k < 20, "rows": lambda q, k: q % 5 == 0, "everything": lambda q, k: np.bool_(True),
    "nothing": lambda q, k: np.zeros((len(q), k.size), bool)}


@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize("pairs", [1, 50, 1 << 20])
def test_predicates_tell_whole_blocks_from_partial_ones(monkeypatch, name, pairs):
    monkeypatch.setattr("ops_transformer._block_mask._PAIRS", pairs)
    for query_len, kv_len, block_q, block_kv in ((57, 70, 8, 16), (40, 40, 5, 5), (9, 70, 64, 1), (0, 5, 2, 2), (5, 0, 2, 2)):
        asked = np.zeros((query_len, kv_len), int)

        def predicate(q, k):
            assert q.shape[1:] == (1,) and k.shape[:1] == (1,) and q.dtype == k.dtype == np.int64
            assert len(q) * k.size <= pairs
            asked[q, k] += 1
            return PREDICATES[name](q, k)

        answer = BlockMask.from_predicate(predicate, query_len, kv_len, block_q, block_kv)
        assert isinstance(answer, PredicateMask) and (asked == 1).all()
        seen = np.broadcast_to(PREDICATES[name](np.arange(query_len)[:, None], np.arange(kv_len)), (query_len, kv_len))
        for i, j in np.ndindex(blocks(query_len, block_q), blocks(kv_len, block_kv)):
            pair = seen[block_q * i:block_q * (i + 1), block_kv * j:block_kv * (j + 1)]
            some, part = (table_of(mask, blocks(kv_len, block_kv))[0, 0, i, j] for mask in answer)
            assert some == pair.any() and part == (pair.any() and not pair.all())


# ---- pictures --------------------------------------------------------------------------------------------------------


def pixels_of(data):
    """The gray pixels of a PNG file, read by its definition."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(data):
        size, = struct.unpack(">I", data[at:at + 4])
        kind, content = data[at + 4:at + 8], data[at + 8:at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size:at + 12 + size])[0] == zlib.crc32(kind + content)
        chunks.append((kind, content))
        at += 12 + size
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[0][1])
    assert form == [8, 0, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, width + 1)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:]


def test_pictures_in_characters():
    assert SMALL.text(10) == "3 x 4 blocks of 2 queries and 3 keys\n  #.#.\n  .#..\n  ##..\n"
    assert SMALL.text(head=1) == "3 x 4 blocks of 2 queries and 3 keys\n  ....\n  ....\n  ...#\n"
    assert SMALL.text(most=2) == "3 x 4 blocks of 2 queries and 3 keys, 2 x 2 to a character\n  ++\n  #.\n"
    answer = BlockMask.from_predicate(lambda q, k: q >= k, 6, 6, 2, 2)
    assert answer.text() == "3 x 3 blocks of 2 queries and 2 keys\n  +..\n  #+.\n  ##+\n"
    assert BlockMask.from_pattern(0, 0).text() == "0 x 0 blocks of 64 queries and 64 keys\n"


def test_pictures_in_pixels(tmp_path):
    path = tmp_path / "mask.png"
    data = SMALL.png(path, 10, side=8)
    assert path.read_bytes() == data
    got = pixels_of(data)
    assert got.shape == (8, 10) and (got[0] == 160).all() and (got[:, -1] == 160).all()  # two pixels a block, and the frame
    assert (got[1:-1, 1:-1] == 255 * (SMALL.expanded(6, 10)[0, 0, ::2, ::3] == 0).repeat(2, 0).repeat(2, 1)).all()
    answer = BlockMask.from_predicate(lambda q, k: q >= k, 6, 6, 2, 2)
    assert pixels_of(answer.png(side=3))[1:-1, 1:-1].tolist() == [[103, 255, 255], [0, 103, 255], [0, 0, 103]]
    many = BlockMask.from_pattern(64 * 300, 64 * 300, window_left=0)
    got = pixels_of(many.png(side=100))[1:-1, 1:-1]
    assert got.shape == (100, 100) and (np.diag(got) < 255).all() and (got < 255).sum() == 100


def test_expanded(rng):
    mask, seen = drawn(rng, 2, 3, block_q=7, block_kv=9)
    assert (mask.expanded(50, 70) == seen).all()

"""A block mask as a picture, of characters or of gray pixels. Pure functions of NumPy's arrays."""

from __future__ import annotations

import struct
import zlib
from typing import Tuple

import numpy as np

_SEEN_AT_ALL = 48  # gray levels below white of a pixel of which anything is seen, so that no block disappears


def shares(offsets: np.ndarray, columns: np.ndarray, weights: np.ndarray, num_columns: int, most: int) -> Tuple[int, np.ndarray]:
    """(step, share) of rows offsets[i] to offsets[i + 1] of columns: the part of each step x step blocks that is seen, 0 to 1, in
    at most `most` rows and columns. weights: how much of each entry's block is seen."""
    sizes = len(offsets) - 1, num_columns
    step = max(1, -(-max(sizes) // most))
    cells = [-(-size // step) for size in sizes]
    rows = np.repeat(np.arange(sizes[0]), np.diff(offsets))
    counts = np.bincount(rows // step * cells[1] + columns // step, weights, minlength=cells[0] * cells[1]).reshape(cells)
    heights, widths = (np.minimum(step, size - step * np.arange(count)) for size, count in zip(sizes, cells))
    return step, counts / np.outer(heights, widths)


def characters(share: np.ndarray) -> str:
    """A line for each row: # seen, + seen in part, . hidden."""
    marks = np.where(share == 0, ".", np.where(share == 1, "#", "+"))
    return "".join("  " + "".join(row) + "\n" for row in marks)


def gray(share: np.ndarray, side: int) -> np.ndarray:
    """uint8 pixels, black where all is seen and white where nothing is, about `side` of them wide or high, in a gray frame."""
    each = max(1, side // max(1, *share.shape))
    dark = np.where(share > 0, _SEEN_AT_ALL + (255 - _SEEN_AT_ALL) * share, 0)
    pixels = (255 - np.rint(dark)).astype(np.uint8).repeat(each, axis=0).repeat(each, axis=1)
    return np.pad(pixels, 1, constant_values=160)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of gray pixels uint8 [height, width] (ISO/IEC 15948)."""
    height, width = pixels.shape
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # in front of each row its filter, 0: the bytes as they are

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of gray, not interlaced
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")

#!/usr/bin/env python3
"""Writes dequantized.txt: quantised blocks and their values according to the package gguf (0.19.0), an independent decoder.

    pip install gguf==0.19.0 && python3 make_dequantized.py > dequantized.txt

One line per row: format, bytes of the blocks in hexadecimal, bits of the f32 values in hexadecimal.
"""

import struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

BLOCKS_PER_ROW = 2
SCALES = [0x3C00, 0xBC00, 0x0000, 0x8000, 0x0001, 0x03FF, 0x8001, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x2E66]
# Offsets of the factor of the minimum (0: there is none) and of the factor of the values.
LAYOUTS = {
    GGMLQuantizationType.Q4_0: (0, 0),
    GGMLQuantizationType.Q5_0: (0, 0),
    GGMLQuantizationType.Q5_1: (2, 0),
    GGMLQuantizationType.Q6_K: (0, 208),
    GGMLQuantizationType.Q4_K: (2, 0),
    GGMLQuantizationType.Q5_K: (2, 0),
}


def rows(format_, random):
    for index in range(len(SCALES)):
        blocks = b""
        for block in range(BLOCKS_PER_ROW):
            scale = SCALES[index] if block == 0 else random.integers(0, 0x7C00) | random.integers(0, 2) << 15
            other = SCALES[(index * 5 + 3) % len(SCALES)] if block == 0 else random.integers(0, 0x7C00)
            if format_ == GGMLQuantizationType.Q8_0:
                values = random.integers(0, 256, 32, dtype=np.uint8)
                values[:4] = [0x80, 0x7F, 0, 0xFF]
                blocks += struct.pack("<H", int(scale)) + values.tobytes()
            elif format_ == GGMLQuantizationType.Q4_1:
                values = random.integers(0, 256, 16, dtype=np.uint8)
                values[:3] = [0x0F, 0xF0, 0]
                blocks += struct.pack("<HH", int(scale), int(other)) + values.tobytes()
            elif format_ in LAYOUTS:
                before, offset = LAYOUTS[format_]
                size = GGML_QUANT_SIZES[format_][1]
                values = random.integers(0, 256, size, dtype=np.uint8)
                values[offset : offset + 2] = np.frombuffer(struct.pack("<H", int(scale)), np.uint8)
                if before:
                    values[before : before + 2] = np.frombuffer(struct.pack("<H", int(other)), np.uint8)
                blocks += values.tobytes()
            else:
                blocks += struct.pack("<HH", int(scale), int(other))
        yield blocks


def main():
    random = np.random.default_rng(20240)
    for format_ in (GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, *LAYOUTS):
        for blocks in rows(format_, random):
            with np.errstate(all="ignore"):
                values = quants.dequantize(np.frombuffer(blocks, np.uint8), format_)
            bits = values.astype("<f4").view("<u4").reshape(-1)
            print(format_.name.lower(), blocks.hex(), "".join(f"{b:08x}" for b in bits))


main()

#!/usr/bin/env python3
"""A context of 65,536 tokens answered from 2048 of them: an indexer selects keys, attention reads these alone.

The cache is that of multi-head latent attention: one row of 512 + 64 numbers for each token, whose first 512 are its value
as well, and beside it a row of 128 numbers for the indexer. 8 queries of 16 heads look for some tokens each. The answer is
compared with attention over all keys; it differs by what the keys that were left out weigh.

    pip install .
    python examples/select_keys.py

Prints seconds and bytes of both, and exits with 1 where an answer differs by more than 1e-3.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from ops_transformer import set_num_threads
from ops_transformer.flash_attention import flash_attention, lightning_indexer, sparse_flash_attention

WIDTH, VALUES, INDEX_WIDTH = 576, 512, 128
HEADS, INDEX_HEADS, QUERIES, WANTED = 16, 16, 8, 4
LARGEST_DIFFERENCE = 1e-3


def make_context(rng, tokens):
    """(keys, index keys, queries, index queries): each query points at WANTED tokens of its own, in both spaces."""
    keys = rng.standard_normal((1, 1, tokens, WIDTH), np.float32)
    project = rng.standard_normal((WIDTH, INDEX_WIDTH), np.float32) / np.sqrt(np.float32(WIDTH))
    wanted = [rng.choice(tokens - QUERIES, WANTED, replace=False) for _ in range(QUERIES)]
    towards = np.stack([keys[0, 0, chosen].sum(0) for chosen in wanted])  # [QUERIES, WIDTH]
    noise = rng.standard_normal((1, HEADS, QUERIES, WIDTH), np.float32)
    index_queries = np.broadcast_to(towards @ project, (1, INDEX_HEADS, QUERIES, INDEX_WIDTH)).copy()
    return keys, keys @ project, towards + noise, index_queries


def timed(call, repeats):
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--count", type=int, default=2048, help="keys to select")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--quick", action="store_true", help="8192 tokens, 1024 keys, one call of each")
    arguments = parser.parse_args()
    tokens, count, repeats = (8192, 1024, 1) if arguments.quick else (arguments.tokens, arguments.count, 5)
    if arguments.threads > 0:
        set_num_threads(arguments.threads)

    keys, index_keys, queries, index_queries = make_context(np.random.default_rng(1), tokens)
    weights = np.ones((1, INDEX_HEADS, QUERIES), np.float32)
    values = keys[..., :VALUES]
    best, index_seconds = timed(lambda: lightning_indexer(index_queries, index_keys, weights, count), repeats)
    answer, sparse_seconds = timed(lambda: sparse_flash_attention(queries, keys, values, best), repeats)
    dense, dense_seconds = timed(lambda: flash_attention(queries, keys, values, causal=True, alignment="bottom_right"), repeats)

    difference = float(np.abs(answer - dense).max())
    row = WIDTH * keys.itemsize
    print(f"{tokens} tokens, {QUERIES} queries of {HEADS} heads, {count} keys selected for each")
    print(f"  indexer            {index_seconds * 1e3:8.2f} ms   reads {index_keys.nbytes / 2**20:7.1f} MiB")
    print(f"  selected keys      {sparse_seconds * 1e3:8.2f} ms   reads {QUERIES * count * row / 2**20:7.1f} MiB")
    print(f"  all keys           {dense_seconds * 1e3:8.2f} ms   reads {tokens * row / 2**20:7.1f} MiB")
    print(f"  largest difference {difference:.1e}, of values up to {float(np.abs(dense).max()):.1f}")
    return 0 if difference <= LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())

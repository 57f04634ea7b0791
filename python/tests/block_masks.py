"""Block masks for tests: tables of visible blocks, their CSR, and the dense mask that they stand for."""

import numpy as np

from ops_transformer.flash_attention import BlockMask

# Two heads of three query blocks and four key blocks.
SMALL = BlockMask(np.array([[[0, 2, 3, 5], [5, 5, 5, 6]]]), np.array([0, 2, 1, 0, 1, 3]), 2, 3)


def blocks(n, size):
    return -(-n // size)


def lists_of(table, block_q, block_kv, dtype=np.int64):
    """The CSR of a table of visible blocks, bool [batch, heads, query blocks, key blocks]."""
    offsets, columns = np.zeros((*table.shape[:2], table.shape[2] + 1), dtype), []
    for b, h in np.ndindex(*table.shape[:2]):
        offsets[b, h, 0] = len(columns)
        for i, row in enumerate(table[b, h]):
            columns += [j for j, seen in enumerate(row) if seen]
            offsets[b, h, i + 1] = len(columns)
    return BlockMask(offsets, np.array(columns, dtype), block_q, block_kv)


def dense(table, query_len, kv_len, block_q, block_kv):
    return table.repeat(block_q, axis=2)[:, :, :query_len].repeat(block_kv, axis=3)[..., :kv_len]


def drawn(rng, batch=1, heads=1, query_len=50, kv_len=70, block_q=16, block_kv=16, density=0.4, dtype=np.int64):
    """(BlockMask, dense mask [batch, heads, query_len, kv_len]) of random blocks; the second query block sees none."""
    table = rng.random((batch, heads, blocks(query_len, block_q), blocks(kv_len, block_kv))) < density
    table[:, :, 1:2] = False
    return lists_of(table, block_q, block_kv, dtype), dense(table, query_len, kv_len, block_q, block_kv)


def table_of(mask, num_columns):
    """The table of a mask of one batch and any heads; columns ascend."""
    offsets = np.asarray(mask.row_offsets)
    table = np.zeros((1, offsets.shape[1], offsets.shape[2] - 1, num_columns), bool)
    for h, i in np.ndindex(*table.shape[1:3]):
        row = np.asarray(mask.columns)[offsets[0, h, i]:offsets[0, h, i + 1]]
        assert (np.diff(row) > 0).all()
        table[0, h, i, row] = True
    return table

"""What the kernel of matrix products is told: see product_kernel.py, which writes it, and blocked.py, which calls it."""

from __future__ import annotations

SYMBOL = "treadle_multiply"
BLOCK = 16
"""Outputs of a block: as many as a vector has lanes."""
INPUTS = 32
"""The number of inputs is a multiple of this: pairs are turned 16 at a time."""
SIZES = (1, 2, 4, 8, 12, 16, 20, 24)
"""Rows of a tile; the rest of a tile that is not full is computed for nothing."""

# The words of a job. Threads count the first two up.
THREADS = 0
NEXT = 1
NUM_ITEMS = 2
ITEMS = 3  # [num_items, ITEM_WORDS]
TILES = 4  # [num_tiles, TILE_WORDS]
PAIRS = 5  # inputs / 2
WEIGHTS = 6
GATES = 7  # weights of the same shape, for KIND_GATED
BIAS = 8  # [out] float32, or 0
ROWS = 9  # what is multiplied
ROW_BYTES = 10
OUT = 11
OUT_ROW_BYTES = 12
OTHER = 13  # [rows, out]: what is added, or multiplied by
OTHER_ROW_BYTES = 14
KIND = 15
SCRATCH = 16
SCRATCH_BYTES = 17  # of each thread
JOB_WORDS = 18

KIND_PLAIN, KIND_SWISH, KIND_PLUS, KIND_TIMES, KIND_GATED, KIND_SUMS = range(6)
"""What follows a product: nothing; x * sigmoid(x); a sum; a product by element; another product by the swish of this one's; or
nothing, not even rounding: the sums are stored in float32, the others' results in bfloat16."""

# What a thread takes at once: some tiles, which it packs, and some blocks of outputs.
FIRST_TILE, NUM_TILES, FIRST_BLOCK, LAST_BLOCK = range(4)
ITEM_WORDS = 4

FIRST_ROW, NUM_ROWS, SIZE, PACKED_AT = range(4)
"""Of a tile: its rows, the index of its size, and the offset of its packed rows."""
TILE_WORDS = 4

PACKED = 2 * SIZES[-1] * 4 * BLOCK
"""Where packed rows begin in a thread's scratch, behind the sums of a tile and of its gates."""

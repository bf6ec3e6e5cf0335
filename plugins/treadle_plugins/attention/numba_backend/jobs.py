"""What a call tells the kernels: arrays of int64 words, addresses among them. Floats are written as their bits."""

from __future__ import annotations

# Every job. The threads count these two up: how many are at work, and what is to be done next.
THREADS = 0
NEXT = 1
HEADS = 2  # [kv_heads, HEAD_WORDS], of the layer
BLOCK_SIZE = 3

# A job of attention
NUM_TASKS = 4
TASKS = 5  # [num_tasks, TASK_WORDS]
SCRATCH = 6
QUERIES = 7
QUERY_TOKEN_BYTES = 8
QUERY_HEAD_BYTES = 9
OUT = 10  # [tokens, heads, head_dim]
NUM_HEADS = 11  # of queries
TABLES = 12
WINDOW = 13
SLOPES = 14  # [heads] float32, for distances, in powers of 2
SCALE = 15  # float32, to powers of 2
CAP = 16  # 0 or 1
CAP_IN = 17  # float32
CAP_OUT = 18  # float32
PARTS = 19  # states of segments that are joined later
SETS = 20  # [num_sets, SET_WORDS], of parts
PLACES = 21  # where the parts of each set lie among all
COUNTERS = 22  # [num_sets], how many parts are done
ATTEND_WORDS = 23

# A job of writing: keys, then values
WRITTEN_TOKENS = 4
WRITTEN_HEADS = 5
BLOCKS = 6  # [tokens]
OFFSETS = 7  # [tokens]
KEY_SOURCE = 8
VALUE_SOURCE = 11
SOURCE = 0
SOURCE_TOKEN_BYTES = 1
SOURCE_HEAD_BYTES = 2
WRITE_WORDS = 14

# What is said of a KV head of a layer: its keys, then its values
KEY_SIDE = 0
VALUE_SIDE = 8
ADDRESS = 0  # of what it has in block 0
BLOCK_BYTES = 1  # from block to block
PACKED = 2  # 0 or 1
ROW_BYTES = 3  # from token to token
SCALES = 4  # [head_dim] float32, static ones
MINIMA = 5
FACTORS = 6  # [head_dim] float32, for turning
CENTERS = 7
HEAD_WORDS = 16

# A task of attention: a few query tokens and query heads of one KV head, some segments of the context. The tokens belong to one
# sequence, or to several that have the segment in the same blocks, before all of the tokens.
TOKEN = 0  # the first query token, within the step
COUNT = 1
HEAD = 2
QUERY_HEAD = 3  # the first query head
GROUP = 4  # query heads
TABLE = 5  # where the sequence's block table starts
POSITION = 6  # of the first query token
FROM = 7  # first segment
TO = 8  # behind the last segment
NUM_SETS = 9  # sets that this task computes one part of each for; 0 when this is all there is to see
SET = 10  # the first of them
STATES = 11  # place of this task's states among the parts
TASK_WORDS = 12

# A set of parts, the states of one segment each, for a few query tokens of one sequence: TOKEN to GROUP as a task has them
NUM_PARTS = 5
FIRST_PLACE = 6  # among the places: where the set's own start, one for each part, in order
SET_WORDS = 7

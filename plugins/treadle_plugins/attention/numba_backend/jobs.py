"""What a call tells the kernels: arrays of int64 words, addresses among them. Floats are written as their bits."""

from __future__ import annotations

# Every job. The threads count these two up: how many are at work, and what is to be done next.
THREADS = 0
NEXT = 1

# A job of attention
NUM_TASKS = 2
TASKS = 3  # [num_tasks, TASK_WORDS]
SCRATCH = 4
QUERIES = 5
QUERY_TOKEN_BYTES = 6
QUERY_HEAD_BYTES = 7
OUT = 8  # [tokens, heads, head_dim]
KEYS = 9
KEY_BLOCK_BYTES = 10
KEY_HEAD_BYTES = 11
VALUES = 12
VALUE_BLOCK_BYTES = 13
VALUE_HEAD_BYTES = 14
TABLES = 15
BLOCK_SIZE = 16
WINDOW = 17
SLOPES = 18  # [heads] float32, for distances, in powers of 2
SCALE = 19  # float32, to powers of 2
CAP = 20  # 0 or 1
CAP_IN = 21  # float32
CAP_OUT = 22  # float32
PARTS = 23  # states of segments that are joined later
COUNTERS = 24  # for each set of parts, how many are done
NUM_HEADS = 25
JOB_WORDS = 26

# A task of attention: a few query tokens of one sequence, one KV head, some segments of the context
TOKEN = 0  # the first query token, within the step
COUNT = 1
HEAD = 2
TABLE = 3  # where the sequence's block table starts
POSITION = 4  # of the first query token
FROM = 5  # first segment
TO = 6  # behind the last segment
NUM_PARTS = 7  # tasks that share these queries; 1 when this is all of it
PART = 8  # place of this task's states among the parts
FIRST_PART = 9  # place of the first such task's states
COUNTER = 10
TASK_WORDS = 11

# A job of writing: keys, then values
WRITTEN_TOKENS = 2
WRITTEN_HEADS = 3
BLOCKS = 4  # [tokens]
OFFSETS = 5  # [tokens]
KEY_SIDE = 6
VALUE_SIDE = 12
SOURCE = 0
SOURCE_TOKEN_BYTES = 1
SOURCE_HEAD_BYTES = 2
TARGET = 3
TARGET_BLOCK_BYTES = 4
TARGET_HEAD_BYTES = 5
WRITE_WORDS = 18

"""prefix.hash_chain: a block is found by the hash of its tokens and of the block before it.

    key 0 = hash(isolation key, tokens of block 0)      key 1 = hash(key 0, tokens of block 1)      ...

A key stands for the whole prefix up to its block. Since blocks that follow an evicted one leave the index with it, a key that is
known means that all keys before it are known, so the longest match is found by bisection. Hashes may collide: the core compares
tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from treadle import Request, StashKey, Step, hookimpl

KEYS: StashKey[list[int]] = StashKey()


class HashChain:
    """A map from the hash of a prefix to its last block."""

    def __init__(self) -> None:
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    @hookimpl
    def match_prefix(self, step: Step, request: Request) -> list[int]:
        """The longest known prefix that leaves at least one token to compute."""
        size = step.pool.block_size
        keys = self._keys(request, size, (request.num_tokens - 1) // size)
        length = bisect_left(keys, True, key=lambda key: key not in self._block_of)
        # where hashes collide, the core stops at the first block that is not what it is taken for
        return list(dict.fromkeys(self._block_of[key] for key in keys[:length] if key in self._block_of))

    @hookimpl
    def blocks_filled(self, step: Step, block_ids: Sequence[int]) -> None:
        """They can be found from now on."""
        for block_id in block_ids:
            record = step.pool.record(block_id)
            if record is None:
                continue
            before = record.isolation_key if record.parent is None else self._key_of[record.parent.block_id]
            key = hash((before, record.tokens))
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """They cannot be found any more."""
        for block_id in block_ids:
            key = self._key_of.pop(block_id, None)
            if key is not None and self._block_of.get(key) == block_id:
                del self._block_of[key]

    def _keys(self, request: Request, size: int, num_blocks: int) -> list[int]:
        """Keys of the first `num_blocks` blocks; each is computed once in a request's life."""
        keys = request.stash.get(KEYS, [])
        if not keys:
            request.stash[KEYS] = keys
        for place in range(len(keys), num_blocks):
            before = keys[-1] if keys else request.isolation_key
            keys.append(hash((before, request.token_ids(place * size, (place + 1) * size))))
        return keys[:num_blocks]

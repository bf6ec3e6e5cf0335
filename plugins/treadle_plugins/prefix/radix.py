"""prefix.radix: a tree of blocks, compared by their tokens. Nothing is hashed together, so nothing can collide.

The method is that of SGLang's RadixAttention (Zheng et al., 2024), with whole blocks as edges.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from treadle import Request, Step, hookimpl

Tokens = tuple[int, ...]


class Node:
    """A block, by the tokens that lead to it."""

    __slots__ = ("block_id", "children", "parent", "tokens")

    def __init__(self, block_id: int | None, parent: Node | None, tokens: Tokens) -> None:
        self.block_id = block_id
        self.parent = parent
        self.tokens = tokens
        self.children: dict[Tokens, Node] = {}


class Root(Node):
    """Where the tree of an isolation key begins. It holds no block."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        super().__init__(None, None, ())
        self.key = key


class Radix:
    """One tree for each isolation key that has an indexed block."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Root] = {}
        self._node_of: dict[int, Node] = {}

    @hookimpl
    def match_prefix(self, step: Step, request: Request) -> list[int]:
        """Walk down as long as the next block's tokens are there."""
        size = step.pool.block_size
        node: Node | None = self._roots.get(request.isolation_key)
        found: list[int] = []
        while node is not None and len(found) < (request.num_tokens - 1) // size:
            start = len(found) * size
            node = node.children.get(request.token_ids(start, start + size))
            if node is not None and node.block_id is not None:
                found.append(node.block_id)
        return found

    @hookimpl
    def blocks_filled(self, step: Step, block_ids: Sequence[int]) -> None:
        """They hang below the block that comes before them."""
        for block_id in block_ids:
            record = step.pool.record(block_id)
            if record is None:
                continue
            if record.parent is None:
                parent: Node = self._roots.setdefault(record.isolation_key, Root(record.isolation_key))
            else:
                parent = self._node_of[record.parent.block_id]
            node = Node(block_id, parent, record.tokens)
            parent.children[record.tokens] = node
            self._node_of[block_id] = node

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """They, and with them all below, are cut off."""
        for block_id in block_ids:
            node = self._node_of.pop(block_id, None)
            if node is not None and node.parent is not None and node.parent.children.get(node.tokens) is node:
                del node.parent.children[node.tokens]
                if isinstance(node.parent, Root) and not node.parent.children:
                    del self._roots[node.parent.key]

"""What the torch executor asks of a forward pass, and what it offers to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Attend(Protocol):
    """Attention of one pass, over the pool."""

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] for `queries` of that shape; to be called once for each layer.

        `keys` and `values` are [tokens, kv_heads, head_dim], already rotated, and are stored first. All three may be
        views whose rows lie apart; within a row they are contiguous. Scale, window, ALiBi and soft cap are those with
        which the model itself attended at start-up.
        """
        ...


@runtime_checkable
class PackedForward(Protocol):
    """A model's forward pass over packed tokens: those of all sequences behind one another, without padding."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocabulary]: sums in float32 that are never rounded to 16 bits, which tie the best tokens by chance.

        `token_ids` and `positions` are [tokens], int64, in range; `rows` are indices into the tokens, in any order,
        some perhaps twice, perhaps none.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Facts for `treadle explain`: what computes the pass, what was replaced, what was not and why."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the weights that it keeps, those that are shared counted once."""
        ...

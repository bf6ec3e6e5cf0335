"""One step's packed tokens: the index tensors that every layer's attention shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of one step, one work's behind the other's, without padding.

    T tokens, S sequences (one for each work), R logit rows. Tensors are int64 and lie on the model's device; the
    tuples hold the same numbers on the host, so that no loop over sequences has to wait for the device. Ragged arrays
    are flat, with S + 1 bounds: those of sequence `s` are `flat[bounds[s] : bounds[s + 1]]`.
    """

    block_size: int
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T], within the token's sequence
    slot_blocks: torch.Tensor  # [T], the block that takes the token's KV
    slot_offsets: torch.Tensor  # [T], its place within that block
    sequence_starts: torch.Tensor  # [S], position of the first of the sequence's tokens in this step
    sequence_contexts: torch.Tensor  # [S], tokens that its last query sees: start + number of tokens
    token_bounds: torch.Tensor  # [S + 1]
    tables: torch.Tensor  # [sum of blocks], block ids, only those that hold context
    table_bounds: torch.Tensor  # [S + 1]
    logit_rows: torch.Tensor  # [R], indices into T
    starts: tuple[int, ...]  # [S]
    contexts: tuple[int, ...]  # [S]
    bounds: tuple[int, ...]  # [S + 1], same as token_bounds

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.bounds[-1]

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.starts)


def ragged_arange(lengths: torch.Tensor) -> torch.Tensor:
    """0, 1, ... `lengths[0] - 1`, 0, 1, ... `lengths[1] - 1`, ..., on the device of `lengths`."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total, device=lengths.device) - (ends - lengths).repeat_interleave(lengths, output_size=total)

"""For tests of whole engines, the reference: what transformers itself answers, and what an engine chose its tokens from."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from support.tiny import tiny_config, tiny_model
from treadle import KVFormat, hookimpl
from treadle.plan import Work
from treadle_plugins.attention.reference import requantized_keys, requantized_values
from treadle_plugins.attention.spec import AttentionBackend
from treadle_plugins.models import load as loading


class Reference(NamedTuple):
    """Greedy tokens of transformers' own `generate`, and the smallest gap of the two best logits on the way."""

    tokens: tuple[int, ...]
    gap: float


def reference_of(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, eos_token_ids: Sequence[int] = ()) -> Reference:
    """Continue `prompt`, alone and in one piece, by up to `num_tokens` tokens; the token that ends it is the last."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits[0] for logits in out.logits]).float().topk(2, dim=1).values
    return Reference(tuple(out.sequences[0, len(prompt) :].tolist()), float((best[:, 0] - best[:, 1]).min()))


def save_tiny(family: str, folder: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a tiny random model of `family` to `folder`, as users have theirs, and return it for comparison."""
    model = tiny_model(tiny_config(family, **changes), seed=seed)
    model.save_pretrained(folder)
    return model


class ModelCache:
    """Loaded models, kept for tests that make one engine after another."""

    def __init__(self) -> None:
        self._kept: dict[object, loading.LoadedModel] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, an executor that loads a model which was loaded before gets a copy."""
        original = loading.load

        def load(*choice: Any) -> loading.LoadedModel:
            if choice not in self._kept:
                self._kept[choice] = original(*choice)
            return replace(self._kept[choice], model=copy.deepcopy(self._kept[choice].model))

        loading.load = load  # type: ignore[assignment]  # the executor passes no names
        try:
            yield
        finally:
            loading.load = original


class LogitsRecorder:
    """A plugin that keeps the logits from which each token of each request was chosen."""

    name = "logits_recorder"

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, torch.Tensor]] = {}

    @hookimpl
    def process_logits(self, logits: torch.Tensor, works: Sequence[Work]) -> None:
        """Keep a copy; nothing is changed."""
        for row, work in zip(logits, works, strict=True):
            self._rows.setdefault(work.request_id, {})[work.start + len(work.tokens)] = row.clone()

    def of(self, request_id: str) -> torch.Tensor:
        """[tokens, vocabulary], in order of position; of a position that was computed twice the last."""
        rows = self._rows[request_id]
        return torch.stack([rows[position] for position in sorted(rows)])


def attend_requantized(
    form: KVFormat,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,  # transformers hands one in
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, over all tokens at once, with keys and values as they come back from `form`."""
    keys = requantized_keys(form, module.layer_idx, key[0].transpose(0, 1)).transpose(0, 1)
    values = requantized_values(form, module.layer_idx, value[0].transpose(0, 1)).transpose(0, 1)
    group = query.shape[1] // key.shape[1]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query[0] @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    places = torch.arange(keys.shape[1])
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (others.get("sliding_window") or 10**9))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)[None], None


class Poisoner:
    """A plugin that fills every slot of the pool with NaN, or with garbage, before it is used."""

    name = "poisoner"

    def __init__(self, garbage: bool = False) -> None:
        self._garbage = garbage
        self.num_filled = 0
        self.backend: AttentionBackend | None = None

    @hookimpl(wrapper=True)
    def attention(self) -> Generator[None, Any, Any]:
        """Fill what the backend makes room for."""
        self.backend = backend = yield
        allocate = backend.allocate

        def poisoned(num_blocks: int) -> None:
            allocate(num_blocks)
            backend.poison()
            if self._garbage:
                self._fill(backend.tensors())
            self.num_filled += 1

        backend.allocate = poisoned
        return backend

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors:
            # finite in any precision, and far from what belongs there
            tensor.copy_(torch.randint(1, 90, tensor.shape, generator=generator).to(tensor.dtype))

"""What `treadle calibrate` finds out: runs the model over a text twice. Imports torch.

First with KV kept whole, for statistics; they give the balance and the static scales. Then again, with the codec that is asked
about attending in the shadow, once for keys alone and once for values alone: heads whose outputs are far off are outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from treadle import Engine, KVFormat, ModelInfo, SamplingParams
from treadle.contracts import KeyBalance
from treadle.errors import ConfigError
from treadle.registry import SLOTS
from treadle.settings import BlockSettings, Settings
from treadle_plugins.quantize.calibrate import LEAST_TOKENS
from treadle_plugins.quantize.calibration_file import Calibration, Head, HeadReport, Ranges, Table
from treadle_plugins.quantize.formats import CodecSettings
from treadle_plugins.quantize.int4 import Int4, Int4Settings
from treadle_plugins.quantize.recording import LayerStatistics, Recording, RecordingBackend

_DIGITS = 6
"""Significant digits that are kept of a number."""
_SMALLEST = 1e-4
"""Channels whose keys or queries are smaller than this share of the head's largest are balanced as if they had it."""
_LEFT_ALONE = ("execute", "quantize")
"""Slots whose strategy matters here, as do the executor's; the others serve one request after another, with their defaults."""


@dataclass(frozen=True)
class Limits:
    """How much is computed, and how many heads may be named."""

    max_tokens: int
    chunk: int
    """Tokens of one request."""
    max_share: float
    """Most heads to keep whole, as a share of all."""
    threshold: float
    """An outlier's error, in medians."""


def find(configure: Callable[[Sequence[str]], Settings], text: str, limits: Limits) -> Calibration:
    """Run the configured model over `text`. `configure` gives the configuration under further overrides.

    Raises ConfigError for a text that is too short, a model without tokenizer, and scores that cannot be compared.
    """
    settings = configure(())
    recording = Recording()
    with Engine(configure(_overrides(settings, limits)), [recording]) as engine:
        if engine.tokenizer is None:
            raise ConfigError(f"model {engine.info.model.name!r} has no tokenizer: calibrate needs one that reads its text")
        prompts = _cut(engine.tokenizer.encode(text), limits, engine.info.model)
        asked, wants_balance = _asked(settings, engine.info.model)
        assert recording.backend is not None, "the engine asked for attention when it started"
        recording.backend.gather()
        _run(engine, prompts)
        gathered = recording.backend.statistics
        assert gathered is not None, "statistics were gathered"
        balance = _balance(gathered, centered=recording.backend.spec.soft_cap is None)
        if wants_balance and asked.key_bits is not None:
            asked = replace(asked, key_balance=balance)
        _compare(recording, asked)
        _run(engine, prompts)
        return _judged(engine.info.model, recording.backend, gathered, balance, asked, limits)


def _overrides(settings: Settings, limits: Limits) -> list[str]:
    """KV whole, no reuse, and one request at a time."""
    blocks = settings.choices["allocate"].settings
    block_size = blocks.block_size if isinstance(blocks, BlockSettings) else 64
    changes = [f"{slot.name}={slot.default}" for slot in SLOTS if slot.name not in _LEFT_ALONE]
    return [*changes, "prefix=none", "quantize=none", f"pool.num_blocks={limits.chunk // block_size + 2}"]


def _cut(tokens: Sequence[int], limits: Limits, model: ModelInfo) -> list[list[int]]:
    """Requests of at most `chunk` tokens each."""
    chunk = min(limits.chunk, model.max_length - 1)
    tokens = tokens[: limits.max_tokens]
    prompts = [list(tokens[first : first + chunk]) for first in range(0, len(tokens), chunk)]
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(f"the text has {len(tokens)} tokens; at least {LEAST_TOKENS} are needed, some thousands are better")
    return prompts


def _asked(settings: Settings, model: ModelInfo) -> tuple[KVFormat, bool]:
    """The codec of the configuration without any calibration, else int4; and whether keys are balanced for it."""
    choice = settings.choices["quantize"]
    if not isinstance(choice.settings, CodecSettings):
        return Int4(Int4Settings()).quantize(model), True
    names = [name for name in type(choice.settings).model_fields if name.endswith("granularity")]
    changes = {"calibration": None, "whole_heads": (), "whole_layers": ()} | dict.fromkeys(names, "token_head")
    strategy = choice.factory(choice.settings.model_copy(update=changes))
    form: KVFormat = strategy.quantize(model)
    return form, choice.settings.balance


def _run(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    for completion in engine.generate(prompts, SamplingParams(max_tokens=1), ahead=1):
        if completion.error is not None:
            raise completion.error


def _compare(recording: Recording, asked: KVFormat) -> None:
    assert recording.backend is not None, "the engine asked for attention when it started"
    alone = {
        "keys": replace(asked, value_bits=None, value_group=None, value_symmetric=True),
        "values": replace(asked, key_bits=None, key_group=None, key_symmetric=True, key_balance=None),
    }
    recording.backend.compare({name: recording.backend_for(form) for name, form in alone.items()})


def _judged(
    model: ModelInfo,
    backend: RecordingBackend,
    gathered: Sequence[LayerStatistics],
    balance: KeyBalance,
    asked: KVFormat,
    limits: Limits,
) -> Calibration:
    keys, values = backend.shadows["keys"].relative, backend.shadows["values"].relative
    whole_heads, whole_keys = outliers(keys, values, limits)
    heads = [(layer, head) for layer in range(model.num_layers) for head in range(model.num_kv_heads)]
    bounds = [Ranges(low=_table([s.lows[i] for s in gathered]), high=_table([s.highs[i] for s in gathered])) for i in (0, 1)]
    return Calibration(
        model=model.name,
        fingerprint=model.fingerprint,
        kv_format=asked.name,
        num_tokens=gathered[0].num_tokens,
        whole_heads=whole_heads,
        whole_keys=whole_keys,
        factors=balance.factors,
        centers=balance.centers,
        keys=bounds[0],
        values=bounds[1],
        heads=tuple(
            HeadReport(layer=layer, head=head, key_error=_short(keys[layer, head]), value_error=_short(values[layer, head]))
            for layer, head in heads
        ),
    )


def outliers(keys: torch.Tensor, values: torch.Tensor, limits: Limits) -> tuple[tuple[Head, ...], tuple[Head, ...]]:
    """Heads to keep whole, and heads whose keys alone are to be kept, by errors [layers, kv_heads]: the worst ones first."""
    by_keys, by_values = (errors / errors.median().clamp_min(1e-12) for errors in (keys, values))
    worst = torch.maximum(by_keys, by_values)
    order = worst.flatten().argsort(descending=True, stable=True)[: int(limits.max_share * keys.numel())]
    named = [divmod(place, keys.shape[1]) for place in order.tolist()]
    named = [head for head in named if worst[head] > limits.threshold]
    both = tuple(head for head in named if by_values[head] > limits.threshold)
    return both, tuple(head for head in named if head not in both)


def _balance(gathered: Sequence[LayerStatistics], centered: bool) -> KeyBalance:
    """Where keys vary little and queries are large, errors weigh most: each channel is scaled so that both are alike."""
    centers = [layer.key_sum / layer.num_tokens * centered for layer in gathered]
    factors = []
    for layer, center in zip(gathered, centers, strict=True):
        keys = _floored((layer.key_squares / layer.num_tokens - center.square()).clamp_min(0).sqrt())
        queries = _floored((layer.query_squares / layer.num_tokens).sqrt())
        ratio = (keys / queries).sqrt()
        factors.append(ratio / ratio.mean(-1, keepdim=True))
    return KeyBalance(_table(factors), _table(centers) if centered else None)


def _floored(sizes: torch.Tensor) -> torch.Tensor:
    largest = sizes.amax(-1, keepdim=True)
    return torch.where(largest > 0, torch.maximum(sizes, largest * _SMALLEST), 1.0)


def _table(layers: Sequence[torch.Tensor]) -> Table:
    return tuple(tuple(tuple(map(_short, channels)) for channels in layer.tolist()) for layer in layers)


def _short(number: float | torch.Tensor) -> float:
    return float(f"{float(number):.{_DIGITS}g}")

"""What is checked of a model before it may answer: an architecture that cannot be served is an error at start-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from treadle.contracts import KVFormat, ModelInfo
from treadle.errors import ModelError
from treadle.plan import Work
from treadle.sampling_params import SamplingParams
from treadle_plugins.attention.spec import AttentionSpec
from treadle_plugins.execute.torch_executor.interface import LayerFacts
from treadle_plugins.execute.torch_executor.passes import Survey
from treadle_plugins.forward.spec import PackedForward

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference of logits, relative to their norm, that rounding may explain between chunks and one piece."""
PROBE_TOKENS = 6
PROBE_SEQUENCES = 2


def check_positions(model: PreTrainedModel, info: ModelInfo) -> None:
    """Refuse rotary embeddings that turn by a pass's longest sequence: a token's KV would depend on its neighbours."""
    config = model.config
    given = getattr(config, "rope_parameters", None) or {}
    per_layer = [entry for entry in given.values() if isinstance(entry, Mapping)] or [given]
    for entry in per_layer:
        kind = entry.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        length = entry.get("original_max_position_embeddings") or config.max_position_embeddings
        if info.max_length > length:
            raise ModelError(
                f"model {info.name!r} uses {kind!r} rotary positions, which change with the longest sequence "
                f"of a pass beyond {length} tokens; set the model's maximum length (now {info.max_length}) "
                f"to {length} or less"
            )


def spec_of(facts: Mapping[int, LayerFacts], info: ModelInfo, block_size: int, kv_format: KVFormat, device: str) -> AttentionSpec:
    """What the layers' facts ask of an attention backend."""
    first = facts[0]
    windows = [fact.how.window for fact in facts.values() if fact.how.window is not None]
    caps = [fact.how.soft_cap for fact in facts.values() if fact.how.soft_cap is not None]
    return AttentionSpec(
        device=device,
        dtype=str(first.dtype).removeprefix("torch."),
        kv_format=kv_format,
        block_size=block_size,
        num_layers=info.num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        alibi=first.how.alibi_slopes is not None,
        window=min(windows, default=None),
        soft_cap=caps[0] if caps else None,
    )


def check_facts(facts: Mapping[int, LayerFacts], info: ModelInfo) -> None:
    """Every layer must attend through the interface, once, all with the same heads, and as `info` says."""
    if sorted(facts) != list(range(info.num_layers)):
        raise ModelError(
            f"model {info.name!r} has {info.num_layers} layers, but attention was asked for in layers {sorted(facts)}: "
            "an architecture with other layers than causal attention is not supported"
        )
    shapes = {fact[:4] for fact in facts.values()}
    if len(shapes) > 1:
        raise ModelError(f"model {info.name!r} has layers of different heads or precisions, not supported: {shapes}")
    if facts[0].num_kv_heads != info.num_kv_heads or facts[0].head_dim != info.head_dim:
        raise ModelError(
            f"model {info.name!r} was described with {info.num_kv_heads} KV heads of {info.head_dim}, "
            f"but attends with {facts[0].num_kv_heads} of {facts[0].head_dim}"
        )


def check_packing(
    logits_of: Callable[[Sequence[Work]], torch.Tensor], info: ModelInfo, block_size: int, dtype: torch.dtype
) -> None:
    """Refuse a model whose answer changes with what is packed beside it, or with how it is cut into chunks.

    That is so when a layer carries something from token to token outside attention, such as a recurrent state.
    `logits_of` computes works over PROBE_SEQUENCES x ceil(PROBE_TOKENS / block_size) blocks.
    """
    per_sequence = -(-PROBE_TOKENS // block_size)
    tables = [tuple(range(n * per_sequence, (n + 1) * per_sequence)) for n in range(PROBE_SEQUENCES)]
    tokens, one, other = (tuple((f * n + f) % info.vocab_size for n in range(PROBE_TOKENS)) for f in (11, 7, 5))
    greedy, half = SamplingParams(), PROBE_TOKENS // 2

    def beside(neighbour: tuple[int, ...]) -> torch.Tensor:
        first = [
            Work("neighbour", 0, neighbour[:half], tables[0], None),
            Work("probe", 0, tokens[:half], tables[1], None),
        ]
        logits_of(first)
        rest = Work("neighbour", half, neighbour[half:], tables[0], greedy)
        return logits_of([rest, Work("probe", half, tokens[half:], tables[1], greedy)])[-1]

    alone = logits_of([Work("probe", 0, tokens, tables[0], greedy)])[-1]
    chunked = beside(one)
    neighbours, chunks = _difference(beside(other), chunked), _difference(alone, chunked)
    # rounding follows shapes, so it hardly explains a difference that comes from the neighbour's tokens alone
    most = _TOLERANCE.get(dtype, 0.2)
    if not (neighbours <= most / 20 and chunks <= most):
        raise ModelError(
            f"model {info.name!r} gives other logits for the same tokens beside another sequence (relative difference "
            f"{neighbours:.3g}) or in chunks ({chunks:.3g}): an architecture that carries more than KV from token to "
            "token is not supported"
        )


def check_forward(forward: PackedForward, survey: Survey, other: Survey, dtype: torch.dtype) -> None:
    """Refuse a forward pass that computes something else than the model itself does."""
    most = _TOLERANCE.get(dtype, 0.2)
    name = forward.describe().get("forward", type(forward).__name__)
    if sorted(other.attended) != sorted(survey.attended):
        raise ModelError(f"forward pass {name!r} attends in layers {sorted(other.attended)}, the model in {len(survey.attended)}")
    pairs = [
        (f"{part} of layer {layer}", getattr(other.attended[layer], part), tensor)
        for layer, own in survey.attended.items()
        for part, tensor in own._asdict().items()
    ]
    for what, got, expected in [*pairs, ("logits", other.logits, survey.logits)]:
        if got.shape != expected.shape or not _difference(got.float(), expected.float()) <= most:
            raise ModelError(
                f"forward pass {name!r} computes other {what} than the model itself does (relative difference "
                f"{_shape_or_difference(got, expected)}, at most {most} is rounding); set execute.forward='plain'"
            )


def _shape_or_difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    if got.shape != expected.shape:
        return f"of shapes {tuple(got.shape)} and {tuple(expected.shape)}"
    return f"{_difference(got.float(), expected.float()):.3g}"


def _difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).norm() / reference.norm().clamp_min(1e-30))

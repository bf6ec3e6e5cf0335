"""From a model's files to weights, tokenizer and the facts that the core needs. Imports torch and transformers."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from treadle.contracts import ModelInfo
from treadle.errors import ModelError, TreadleError
from treadle.logs import get_logger
from treadle_plugins.models import gguf_file
from treadle_plugins.models.check import CONFIG, check, weights_digest
from treadle_plugins.models.source import ModelSource
from treadle_plugins.models.tokenizer import HFTokenizer, as_ids

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length")
_LENGTH_WITHOUT_LIMIT = 2048
_ONE_AT_A_TIME = threading.Lock()  # quiet() and read_once() change other libraries' globals and put them back

log = get_logger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Weights in evaluation mode without gradients, the tokenizer, and the facts about both."""

    model: PreTrainedModel
    tokenizer: HFTokenizer | None
    """None when the model's files hold no vocabulary: such a model deals in token ids only."""
    info: ModelInfo


def load(source: ModelSource, dtype: torch.dtype, device: str = "cpu", attn_implementation: str = "treadle") -> LoadedModel:
    """Load `source` in the precision `dtype` onto `device`.

    `attn_implementation` must be known to transformers when this is called. Code that a model brings is never run.
    Raises ModelError, naming the file, for weights that are cut off, damaged or incomplete and for a model that cannot
    be loaded.
    """
    check(source)
    with _ONE_AT_A_TIME, _named(source), _quiet():
        if source.kind == "gguf":
            model, tokenizer, eos = _load_gguf(source.path, dtype, attn_implementation)
        else:
            model, tokenizer, eos = _load_directory(source.path, dtype, attn_implementation)
        model.requires_grad_(False).eval()
        if device != "cpu":
            model.to(device)
        wrapped = None if tokenizer is None else HFTokenizer(tokenizer)
    info = _describe(source, model, wrapped, eos)
    log.info("model_loaded", model=info.name, origin=source.origin, dtype=str(dtype), device=device)
    return LoadedModel(model=model, tokenizer=wrapped, info=info)


_Parts = tuple[PreTrainedModel, PreTrainedTokenizerBase | None, set[int]]


def _load_directory(folder: Path, dtype: torch.dtype, attn_implementation: str) -> _Parts:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, use_safetensors=True, output_loading_info=True, **_common(dtype, attn_implementation)
    )
    _refuse_incomplete(folder, report)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        log.warning("model_without_tokenizer", path=str(folder), looked_for=_VOCABULARIES)
        return model, None, set()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return model, tokenizer, set()


def _load_gguf(path: Path, dtype: torch.dtype, attn_implementation: str) -> _Parts:
    with gguf_file.read_once() as reader_of:
        reader = reader_of(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **_common(dtype, attn_implementation),
        )
        _refuse_incomplete(path, report)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        gguf_file.mend_tokenizer(tokenizer, reader)
        names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return model, tokenizer, {token for name in names for token in as_ids(gguf_file.field(reader, name))}


def _common(dtype: torch.dtype, attn_implementation: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "local_files_only": True,
        "trust_remote_code": False,
    }


def _refuse_incomplete(path: Path, report: dict[str, Any]) -> None:
    """transformers fills weights that the files lack with random numbers and only warns."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = sorted(str(item) for item in report.get(kind) or ())
        if found:
            raise ModelError(
                f"{path} is no whole model: {kind.replace('_', ' ')}: {', '.join(found[:3])}"
                f"{f' and {len(found) - 3} more' if len(found) > 3 else ''}. "
                f"Fetch it again, or check that its weights belong to its {CONFIG}"
            )
    if report.get("unexpected_keys"):
        log.warning("weights_unused", path=str(path), names=sorted(report["unexpected_keys"])[:3])


@contextmanager
def _named(source: ModelSource) -> Iterator[None]:
    """Turn what any library raises while it loads `source` into a ModelError that names it."""
    try:
        yield
    except TreadleError:
        raise
    except ImportError as error:
        raise ModelError(f"{source.path} cannot be loaded: {error}. Install treadle[cpu] or treadle[gpu]") from error
    except Exception as error:  # damaged files make the libraries raise nearly anything; all of it concerns this model
        raise ModelError(f"{source.path} ({source.origin}) cannot be loaded: {_reason(source, error)}") from error


def _reason(source: ModelSource, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        cure = "choose a model whose architecture transformers knows"
        return f"it needs code that its folder brings (auto_map in {CONFIG}), which is never run; {cure}"
    lines = str(error).strip().splitlines() or ["no reason given"]
    cure = ". Fetch it again if it worked before" if source.kind == "gguf" else ""
    return f"{type(error).__name__}: {' '.join(lines[:3])}{cure}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal, and put its settings back afterwards."""
    settings = transformers_logging
    level, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()


def _describe(source: ModelSource, model: PreTrainedModel, tokenizer: HFTokenizer | None, eos: set[int]) -> ModelInfo:
    config: Any = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    generation = getattr(model, "generation_config", None)
    ends = eos | as_ids(config.eos_token_id) | as_ids(getattr(generation, "eos_token_id", None))
    ends |= set() if tokenizer is None else tokenizer.eos_token_ids()
    vocab_size = int(config.vocab_size)
    identity = f"{source.name}\n{weights_digest(source)}\n{model.dtype}"
    return ModelInfo(
        name=source.name,
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=vocab_size,
        max_length=_max_length(source, config),
        eos_token_ids=frozenset(token for token in ends if 0 <= token < vocab_size),
        dtype_bytes=model.dtype.itemsize,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:32],
    )


def _max_length(source: ModelSource, config: Any) -> int:
    """Most tokens that the model's positions allow; models without a limit, such as BLOOM, get a moderate one."""
    for name in _LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    log.warning("model_length_unknown", model=source.name, looked_for=_LENGTHS, using=_LENGTH_WITHOUT_LIMIT)
    return _LENGTH_WITHOUT_LIMIT

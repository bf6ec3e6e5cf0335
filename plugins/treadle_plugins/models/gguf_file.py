"""What loading a GGUF file through transformers needs beyond transformers: speed, and the tokenizer mended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers import modeling_gguf_pytorch_utils as loader

from treadle.logs import get_logger

_DIGITS_ALONE = ("smollm",)
"""Values of `tokenizer.ggml.pre` whose rule to split digits one by one transformers drops."""
_KEPT_WHOLE = ("default", "gpt-2", "llama-bpe", "llama3", "qwen2", "qwen35")
"""Values whose rules transformers is known to keep."""

log = get_logger(__name__)


class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf is not typed
    """Reads from a plain view of the mapped file: slicing np.memmap itself takes several times as long."""

    @property
    def data(self) -> Any:
        """Bytes of the file."""
        return self._view

    @data.setter
    def data(self, mapped: Any) -> None:
        self._view = mapped.view(np.ndarray)


@contextmanager
def read_once() -> Iterator[Callable[[Path], Any]]:
    """Within the block, a GGUF file is parsed once and its tensor names are mapped once; yields the reader of a file.

    transformers parses the file anew for settings, weights and tokenizer, at over 2 s each, and builds the same map of
    names for every submodule. So the two functions that it looks up in `gguf` remember their results until the block
    ends; its progress bar, which heeds no setting, is off. The caller sees to it that one thread is here at a time.
    """
    reader = functools.cache(PlainReader)
    with ExitStack() as swaps:
        swaps.enter_context(_swapped(gguf, "GGUFReader", reader))
        swaps.enter_context(_swapped(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)))
        swaps.enter_context(_swapped(loader, "tqdm", lambda items, **_options: items))
        yield lambda path: reader(str(path))


@contextmanager
def _swapped(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def field(reader: Any, name: str) -> Any:
    """Value of a metadata field of a GGUF file, None when it has none of that name."""
    found = reader.get_field(name)
    return None if found is None else found.contents()


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase, reader: Any) -> None:
    """Give `tokenizer` back the rules of the GGUF file that transformers did not carry over.

    A SmolLM tokenizer splits digits one by one; without that "1234" becomes tokens that the model saw in no number.
    """
    rules = field(reader, "tokenizer.ggml.pre")
    if rules in _DIGITS_ALONE:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    elif rules is not None and rules not in _KEPT_WHOLE:
        advice = "compare its tokens with the original tokenizer's"
        log.warning("gguf_tokenizer_rules_unchecked", rules=rules, advice=advice)

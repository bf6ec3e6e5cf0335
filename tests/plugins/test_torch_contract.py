"""The torch executor and the tokenizers of models keep the same contracts as all others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle import Executor
from treadle.testing.suites import ExecutorSuite, TokenizerSuite
from treadle.text import Tokenizer

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from support.tiny import tiny_config, tiny_executor, tiny_model  # noqa: E402  # after the skips
from treadle_plugins.models.tokenizer import HFTokenizer  # noqa: E402  # after the skips


class TestTorch(ExecutorSuite):
    @pytest.fixture(params=["llama", "mistral", "gpt2", "bloom"])
    def make_executor(self, request: pytest.FixtureRequest) -> Callable[[], Executor]:
        return lambda: tiny_executor(tiny_model(tiny_config(request.param)))


class TestHFTokenizer(TokenizerSuite):
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")  # noqa: S106  # no secret
        fast.chat_template = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
        return HFTokenizer(fast)

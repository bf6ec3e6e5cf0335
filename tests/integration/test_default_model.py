"""The default model as users get it: found or fetched, loaded, and right."""

from __future__ import annotations

import time
from typing import Any

import pytest

from treadle_plugins.models.fetch import GGUF_SHA256, default_cache_dir, find_cached, sha256_of
from treadle_plugins.models.resolve import resolve
from treadle_plugins.models.source import DEFAULT_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from treadle_plugins.models.load import LoadedModel, load  # noqa: E402  # after the skips

pytestmark = pytest.mark.model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, a tab\t, three lines\n\n\nand the end ",
    "1234 and 3.14159, 2026-11-29, ½ and ٣٤٥",
    "Žluťoučký kůň úpěl ďábelské ódy",
    "日本語のテキスト、한국어, العربية, עברית",
    "🐎 👩‍👩‍👧 🇪🇺 e\u0301 \u200b",
    "def f(x):\n    return {'a': x[0]**2}  # comment",
    "Don't you'll I'm they've",
    "It 's . A , sentence ! with ? spaces",
    "\x00\x01\x7f\u0085\ufffd",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    started = time.perf_counter()
    model = load(resolve(DEFAULT_NAME), torch.bfloat16, attn_implementation="sdpa")
    print(f"default model found and loaded in {time.perf_counter() - started:.1f} s")
    return model


def test_it_answers_a_question(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = torch.tensor([prompt])
    model: Any = loaded.model
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    text = loaded.tokenizer.decode(answer[0, ids.shape[1] :].tolist())
    assert "Paris" in text
    assert int(answer[0, -1]) in loaded.info.eos_token_ids


def test_its_facts(loaded: LoadedModel) -> None:
    info = loaded.info
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (30, 3, 64)
    assert (info.vocab_size, info.max_length, info.dtype_bytes) == (49152, 8192, 2)
    assert info.eos_token_ids == {2}
    model: Any = loaded.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rope_parameters["rope_theta"] == 100000.0


def test_digits_stand_alone(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode("1234")
    assert [loaded.tokenizer.decode([token]) for token in ids] == ["1", "2", "3", "4"]
    assert len(loaded.tokenizer.encode("in 2026")) == 6  # "in", " ", and four digits


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(loaded: LoadedModel, text: str) -> None:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text


def test_nothing_is_put_before_a_prompt(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("") == []
    assert not set(loaded.tokenizer.encode("Hello")) & loaded.info.eos_token_ids


def test_it_is_verified_in_the_cache_every_time(loaded: LoadedModel) -> None:
    source = resolve(DEFAULT_NAME)
    if source.kind == "directory":
        pytest.skip(f"the default model came from the {source.origin}, which verifies its files itself")
    started = time.perf_counter()
    assert find_cached(default_cache_dir()) == source.path
    print(f"digest checked in {time.perf_counter() - started:.2f} s")
    assert sha256_of(source.path) == GGUF_SHA256

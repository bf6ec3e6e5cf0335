"""The default model through an engine with default settings, as a user's first program has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from treadle import Engine, FinishReason, SamplingParams  # noqa: E402  # after the skips
from treadle_plugins.execute.torch import _multiplies_bf16  # noqa: E402

pytestmark = pytest.mark.model
TOPICS = ("rain", "bread", "the number 7", "looms", "a cat", "chess")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(pool={"memory": "256MiB"}) as made:
        yield made


def chat(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat([{"role": "user", "content": text}])
    assert ids is not None
    return ids


def test_it_answers(engine: Engine) -> None:
    facts = engine.describe()
    assert facts["precision"] == ("bfloat16" if torch.cuda.is_available() or _multiplies_bf16() else "float32")
    completion = engine.submit(chat(engine, "What is the capital of France?"), SamplingParams(max_tokens=32)).result()
    print(f"{facts}: {completion.text!r}")
    assert completion.text is not None
    assert "Paris" in completion.text
    assert completion.finish_reason is FinishReason.STOP


def test_many_at_once_from_several_threads(engine: Engine) -> None:
    """The engine steps on a thread of its own; each caller streams its own answer."""
    texts: dict[str, str] = {}

    def ask(topic: str) -> None:
        handle = engine.submit(chat(engine, f"Write one sentence about {topic}."), SamplingParams(max_tokens=24))
        texts[topic] = "".join(chunk.text for chunk in handle.stream())
        assert texts[topic] == handle.result().text

    engine.start()
    threads = [threading.Thread(target=ask, args=(topic,)) for topic in TOPICS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts[topic] for topic in TOPICS)

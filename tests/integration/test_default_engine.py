"""The default model through an engine with default settings, as a user's first program has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.examples import CLEAR, EXAMPLES, QUESTION, Example  # noqa: E402  # after the skips
from support.reference import LogitsRecorder  # noqa: E402
from treadle import Engine, FinishReason, SamplingParams  # noqa: E402
from treadle_plugins.execute.torch import _multiplies_bf16  # noqa: E402
from treadle_plugins.forward.fused import blocked, linear  # noqa: E402

pytestmark = pytest.mark.model
TOPICS = ("rain", "bread", "the number 7", "looms", "a cat", "chess")


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorder() -> LogitsRecorder:
    return LogitsRecorder()


@pytest.fixture(scope="module", params=["as it is", "tiles", "no kernel"])
def engine(request: pytest.FixtureRequest, recorder: LogitsRecorder) -> Iterator[Engine]:
    """As this processor multiplies, as one with tiles (AMX) does, and as one does where our own kernel is not there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiles":
            patch.setattr(linear, "beats_onednn", lambda: False)
        if request.param == "no kernel":
            patch.setattr(blocked, "host_products", lambda: None)
        with Engine.load(plugins=[recorder], pool={"memory": "256MiB"}) as made:
            yield made


def chat(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat([{"role": "user", "content": text}])
    assert ids is not None
    return ids


def test_it_answers(engine: Engine) -> None:
    facts = engine.describe()
    assert facts["precision"] == ("bfloat16" if torch.cuda.is_available() or _multiplies_bf16() else "float32")
    completion = engine.submit(chat(engine, QUESTION), SamplingParams(max_tokens=32)).result()
    print(f"{facts}: {completion.text!r}")
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}: {example.prompt}")
def test_examples_of_the_docs_have_clear_margins(engine: Engine, recorder: LogitsRecorder, example: Example) -> None:
    assert f'"{example.prompt}"' in (ROOT / example.page).read_text(encoding="utf-8")
    prompt = chat(engine, example.prompt) if example.chat else example.prompt
    handle = engine.submit(prompt, SamplingParams(max_tokens=example.num_tokens))
    assert handle.result().text == example.answer
    best = recorder.of(handle.id).topk(2, dim=1).values
    margins = [round(float(margin), 2) for margin in best[:, 0] - best[:, 1]]
    print(f"{example.prompt!r}: the best token leads by {margins}")
    assert len(margins) == example.num_tokens
    assert min(margins) > CLEAR


def test_a_narrow_question_is_answered_all_the_same(engine: Engine, recorder: LogitsRecorder) -> None:
    """Its first token leads by 0.08 in float32. Rounded to bfloat16 at 25 it tied, and the answer never ended."""
    handle = engine.submit(chat(engine, "What is the capital of France?"), SamplingParams(max_tokens=32))
    text = handle.result().text
    logits = recorder.of(handle.id)[0]
    best = logits.topk(2).values
    print(f"leads by {float(best[0] - best[1]):.3f} at {float(best[0]):.1f}: {text!r}")
    assert not torch.equal(logits, logits.bfloat16().float())
    assert text == "The capital of France is Paris."


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

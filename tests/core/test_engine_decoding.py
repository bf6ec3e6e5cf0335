"""Decoding: drafted tokens, and all that ends an answer: stop tokens, end of text, stop strings, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from treadle import FinishReason, Request, SamplingParams
from treadle.errors import InvalidRequest, PluginError
from treadle.plan import Outcome, StepPlan
from treadle.testing import FakeExecutor, drain_checked, expected_tokens

PROMPT = list(range(1, 21))


def _expected(params: SamplingParams, executor: FakeExecutor, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return expected_tokens(prompt, params, executor.model)


# --- drafts ---------------------------------------------------------------------------------------------------------------------


def _oracle(num_right: int, num_wrong: int, executor: FakeExecutor) -> Any:
    """Drafts the next `num_right` tokens rightly, then some wrong ones."""

    def draft(request: Request, most: int) -> list[int]:
        prompt = request.token_ids(0, request.prompt_length)
        answer = expected_tokens(prompt, SamplingParams(max_tokens=200), executor.model)
        drafts = list(answer[request.num_output : request.num_output + num_right])
        return [*drafts, *[996 - d for d in range(num_wrong)]][:most]

    def propose(step: object, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [draft(request, limit) for request, limit in zip(requests, most, strict=True)]

    return propose


@pytest.mark.parametrize("drafted", [(0, 1), (0, 5), (1, 0), (3, 0), (3, 3), (20, 0), (40, 4)])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 7}, {"budget": {"strategy": "decode_first", "max_tokens": 6}}])
def test_drafts_change_how_fast_tokens_come_never_which(
    drafted: tuple[int, int], options: Any, build: Any, plugin_with: Any, assert_right: Any
) -> None:
    executor = FakeExecutor()
    plugin = plugin_with("propose", _oracle(*drafted, executor), name="oracle")
    engine = build(plugin, executor=executor, **options)
    handles = [engine.submit([n] * (10 + 7 * n), SamplingParams(max_tokens=21 + n)) for n in range(3)]
    handles += [engine.submit([1] * 17, SamplingParams(max_tokens=1))]
    drain_checked(engine)
    assert_right(handles)
    if drafted[0] == 20 and not options:
        assert len(executor.plans) <= 4, "many tokens a pass"
    assert any(work.num_drafted for plan in executor.plans for work in plan.works)


def test_a_draft_never_leads_beyond_the_end(build: Any, plugin_with: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    answer = expected_tokens(PROMPT, SamplingParams(max_tokens=30), executor.model)
    engine = build(plugin_with("propose", _oracle(8, 0, executor)), executor=executor)
    stopping = [
        engine.submit(PROMPT, SamplingParams(max_tokens=30, stop_token_ids=(answer[5],))),
        engine.submit(PROMPT, SamplingParams(max_tokens=7)),
    ]
    drain_checked(engine)
    assert [handle.result().token_ids for handle in stopping] == [answer[:6], answer[:7]]
    assert [handle.result().finish_reason for handle in stopping] == [FinishReason.STOP, FinishReason.LENGTH]


def test_drafted_blocks_are_indexed_only_when_their_tokens_are_known(build: Any, plugin_with: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    engine = build(plugin_with("propose", _oracle(0, 12, executor)), executor=executor)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    drain_checked(engine)
    again = engine.submit([*PROMPT, *first.result().token_ids], SamplingParams(max_tokens=4))
    drain_checked(engine)
    assert_right([first, again])
    assert again.result().num_cached_tokens == 48


def test_no_draft_is_asked_for_during_prefill(build: Any, plugin_with: Any, assert_right: Any) -> None:
    asked: list[tuple[int, int]] = []

    def propose(step: object, requests: Sequence[Request], most: Sequence[int]) -> None:
        asked.extend((request.num_pending, limit) for request, limit in zip(requests, most, strict=True))

    engine = build(plugin_with("propose", propose), budget={"strategy": "decode_first", "max_tokens": 8})
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=4))
    drain_checked(engine)
    assert_right([handle])
    # the last token is sampled from the one before: with one to come, nothing is left to draft
    assert asked == [(1, 2), (1, 1)]


def test_drafts_are_asked_for_once_a_step_for_all_in_decode(build: Any, plugin_with: Any, assert_right: Any) -> None:
    asked: list[list[str]] = []

    def propose(step: object, requests: Sequence[Request], most: Sequence[int]) -> list[list[int] | None]:
        asked.append([request.id for request in requests])
        return [None if place else [1, 2][:limit] for place, limit in enumerate(most)]

    engine = build(plugin_with("propose", propose))
    handles = [engine.submit([n] * 5, SamplingParams(max_tokens=6), request_id=f"r{n}") for n in range(3)]
    drain_checked(engine)
    assert_right(handles)
    assert asked[0] == ["r0", "r1", "r2"]
    assert len(asked) <= 5


def _raises(**_: Any) -> Any:
    raise ZeroDivisionError


def _lazy_drafts(step: object, requests: Sequence[Request], most: object) -> list[Iterator[int] | None]:
    return [(1 // 0 for _ in range(2)) if request.id == "guilty" else None for request in requests]


@pytest.mark.parametrize(("function", "ended"), [(_raises, {"guilty", "beside"}), (_lazy_drafts, {"guilty"})])
def test_drafts_that_fail_end_those_whom_they_are_about(
    function: Any, ended: set[str], build: Any, plugin_with: Any, assert_right: Any
) -> None:
    engine = build(plugin_with("propose", function))
    handles = [
        engine.submit([n] * 5, SamplingParams(max_tokens=6), request_id=name) for n, name in enumerate(("guilty", "beside"))
    ]
    handles.append(engine.submit([9] * 40, SamplingParams(max_tokens=1)))
    drain_checked(engine)
    assert_right([handle for handle in handles if handle.id not in ended])
    for handle in handles[: len(ended)]:
        error = handle.result().error
        assert isinstance(error, PluginError)
        assert (error.plugin, error.hook) == ("culprit", "propose")


# --- ends -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def answer(executor: FakeExecutor) -> tuple[int, ...]:
    """What the prompt's answer is as long as nothing ends it."""
    return _expected(SamplingParams(max_tokens=40), executor)


def test_a_stop_token_ends_and_is_kept(build: Any, executor: FakeExecutor, answer: tuple[int, ...]) -> None:
    engine = build(executor=executor)
    completion = engine.submit(PROMPT, SamplingParams(max_tokens=40, stop_token_ids=(answer[7], answer[20]))).result()
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == answer[:8]


def test_end_of_text_ends_unless_it_is_ignored(build: Any, answer: tuple[int, ...]) -> None:
    executor = FakeExecutor(eos_token_ids=[answer[3], answer[9]])
    engine = build(executor=executor)
    ended = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    ignored = engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    both = engine.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(answer[3],)))
    drain_checked(engine)
    assert ended.result().token_ids == both.result().token_ids == answer[:4]
    assert ignored.result().token_ids == answer
    reasons = [handle.result().finish_reason for handle in (ended, ignored, both)]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]


@pytest.mark.parametrize("min_tokens", [1, 3, 4, 5, 12])
def test_min_tokens_keeps_stops_from_counting(min_tokens: int, build: Any, answer: tuple[int, ...]) -> None:
    executor = FakeExecutor(eos_token_ids=[answer[3]])
    params = SamplingParams(max_tokens=40, min_tokens=min_tokens, stop_token_ids=(answer[1],))
    completion = build(executor=executor).submit(PROMPT, params).result()
    assert completion.token_ids == _expected(params, executor)
    assert len(completion.token_ids) >= min_tokens


class Liberal(FakeExecutor):
    """Samples stop tokens also before `min_tokens`, as a model that does not know of it would."""

    def run(self, plan: StepPlan) -> Outcome:
        free = [w._replace(sampling=w.sampling and SamplingParams()) for w in plan.works]
        return super().run(StepPlan(plan.step, tuple(free), plan.swap_out, plan.swap_in))


def test_a_stop_token_that_comes_before_min_tokens_ends_nothing(build: Any, answer: tuple[int, ...]) -> None:
    engine = build(executor=Liberal())
    early = SamplingParams(max_tokens=10, min_tokens=6, stop_token_ids=(answer[2],))
    late = SamplingParams(max_tokens=10, min_tokens=2, stop_token_ids=(answer[2],))
    handles = [engine.submit(PROMPT, params) for params in (early, late)]
    drain_checked(engine)
    assert [handle.result().token_ids for handle in handles] == [answer[:10], answer[:3]]


def test_sampling_depends_on_seed_and_position_alone(build: Any) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    alone = build().submit(PROMPT, params).result().token_ids
    engine = build(num_blocks=8)
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=30)) for n in range(3)] + [engine.submit(PROMPT, params)]
    drain_checked(engine)
    assert handles[-1].result().token_ids == alone
    assert engine.submit(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=6)).result().token_ids != alone


# --- text -----------------------------------------------------------------------------------------------------------------------


class Letters:
    """Token n is the n-th letter; 26 is a space."""

    alphabet = "abcdefghijklmnopqrstuvwxyz "

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.alphabet[token] for token in token_ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> None:
        return None


@pytest.fixture
def lettered() -> FakeExecutor:
    return FakeExecutor(vocab_size=27, tokenizer=Letters())


@pytest.fixture
def text(lettered: FakeExecutor) -> str:
    """The answer to `say it` without any stop."""
    tokens = _expected(SamplingParams(max_tokens=40), lettered, Letters().encode("say it"))
    return Letters().decode(tokens)


def test_a_text_prompt_is_encoded_and_the_answer_decoded(build: Any, lettered: FakeExecutor, text: str) -> None:
    completion = build(executor=lettered).submit("say it", SamplingParams(max_tokens=40)).result()
    assert completion.prompt_token_ids == tuple(Letters().encode("say it"))
    assert completion.text == text


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_and_is_cut_off(length: int, build: Any, lettered: FakeExecutor, text: str) -> None:
    stop = text[10 : 10 + length]
    engine = build(executor=lettered)
    handle = engine.submit("say it", SamplingParams(max_tokens=40, stop=(stop, "nowhere to be found")))
    streamed = "".join(chunk.text for chunk in handle.stream())
    completion = handle.result()
    at = text.index(stop)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == streamed == text[:at]
    assert len(completion.token_ids) == at + length, "no token behind the stop string is computed for the answer"


def test_a_stop_string_before_min_tokens_counts_as_text(build: Any, lettered: FakeExecutor, text: str) -> None:
    params = SamplingParams(max_tokens=20, min_tokens=15, stop=(text[4:6],))
    completion = build(executor=lettered).submit("say it", params).result()
    at = text.find(text[4:6], 13)
    assert completion.text == (text[:20] if at < 0 or at + 2 > 20 else text[:at])


def test_a_stop_tokens_text_is_left_out(build: Any, lettered: FakeExecutor, text: str) -> None:
    token = Letters().encode(text[6])[0]
    completion = build(executor=lettered).submit("say it", SamplingParams(max_tokens=40, stop_token_ids=(token,))).result()
    assert completion.token_ids[-1] == token
    assert completion.text == text[: text.index(text[6])]


def test_stop_strings_and_drafts_together(build: Any, lettered: FakeExecutor, text: str, plugin_with: Any) -> None:
    engine = build(plugin_with("propose", _oracle(6, 0, lettered)), executor=lettered)
    completion = engine.submit("say it", SamplingParams(max_tokens=40, stop=(text[10:13],))).result()
    at = text.index(text[10:13])
    assert completion.text == text[:at]
    assert len(completion.token_ids) == at + 3


def test_a_text_without_a_tokenizer_is_refused(build: Any) -> None:
    engine = build()
    with pytest.raises(InvalidRequest, match=r"'hello'.*token ids"):
        engine.submit("hello")
    with pytest.raises(InvalidRequest, match=r"stop=\('x',\) needs a tokenizer.*stop_token_ids"):
        engine.submit([1], SamplingParams(stop=("x",)))
    assert engine.submit([1], SamplingParams(max_tokens=1)).result().text is None

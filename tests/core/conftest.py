"""What the tests of the core share: engines with the fake executor, and the truth to compare their tokens with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from treadle import Completion, Engine, FinishReason, Handle, SamplingParams, hookimpl
from treadle.hookspecs import Hooks
from treadle.registry import Offer, Registry
from treadle.settings import load
from treadle.testing import FakeExecutor, drain_checked, expected_tokens, make_engine

Build = Callable[..., Engine]


@pytest.fixture(scope="session")
def registry() -> Registry:
    """What is installed, read once: reading entry points takes longer than most tests."""
    return Registry.installed()


@pytest.fixture
def engines() -> list[Engine]:
    """Those that `build` made."""
    return []


@pytest.fixture
def build(registry: Registry, engines: list[Engine]) -> Iterator[Build]:
    """Make engines as `make_engine` does, or from settings of any kind (`values`); they are proved and closed after the test."""

    def make(*plugins: object, values: dict[str, Any] | None = None, **options: Any) -> Engine:
        options.setdefault("registry", registry)
        if values is None:
            engines.append(make_engine(*plugins, **options))
        else:
            small = {"execute": "simulated", "pool": {"num_blocks": 64}, "allocate": {"block_size": 16}}
            settings = load(environment=False, registry=options["registry"], values={**small, **values})
            engines.append(Engine(settings, [FakeExecutor(), *plugins]))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.check_integrity()
        assert engine.kv_cache.pool.num_used == 0


@pytest.fixture
def truth(engines: list[Engine]) -> Callable[[Handle], tuple[int, ...]]:
    """What a request must generate: computed from its prompt without pool, cache or batch."""

    def compute(handle: Handle) -> tuple[int, ...]:
        request = handle.request
        engine = next(engine for engine in engines if engine._loop is handle._loop)
        return expected_tokens(request.token_ids(0, request.prompt_length), request.params, engine.info.model)

    return compute


@pytest.fixture
def assert_right(truth: Callable[[Handle], tuple[int, ...]]) -> Callable[[Sequence[Handle]], list[Completion]]:
    """Each of these requests came to its natural end with the right tokens."""

    def check(handles: Sequence[Handle]) -> list[Completion]:
        done = [handle.result(60) for handle in handles]
        for handle, completion in zip(handles, done, strict=True):
            assert completion.error is None, f"{handle.id}: {completion.error!r}"
            assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), handle.id
            assert completion.token_ids == truth(handle), handle.id
        return done

    return check


@pytest.fixture
def serve(build: Build, assert_right: Callable[[Sequence[Handle]], list[Completion]]) -> Callable[..., list[Completion]]:
    """Serve prompts together, prove the books after each step, and check every token."""

    def run(*plugins: object, prompts: Sequence[Sequence[int]], max_tokens: int = 4, **options: Any) -> list[Completion]:
        engine = build(*plugins, **options)
        handles = [engine.submit(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
        drain_checked(engine)
        return assert_right(handles)

    return run


@pytest.fixture(scope="session")
def plugin_with() -> Callable[..., object]:
    """Make a plugin of one hook: `plugin_with("admit", lambda step, request: ...)`. A wrapper's function gets `answer`, too."""

    def make(hook: str, function: Callable[..., Any], *, name: str = "culprit", wrapper: bool = False) -> object:
        names = list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]
        given = ", ".join(f"{arg}={arg}" for arg in names)
        if wrapper:
            given = f"answer=(yield), {given}"
        scope: dict[str, Any] = {"function": function}
        # pluggy reads the names of arguments from the code itself
        exec(f"def {hook}({', '.join(['self', *names])}): return function({given})", scope)  # noqa: S102  # see above
        return type("Culprit", (), {hook: hookimpl(wrapper=wrapper)(scope[hook]), "name": name})()

    return make


@pytest.fixture
def offered(registry: Registry) -> Callable[..., Registry]:
    """The installed registry with more in it: `offered(plugin_a=Class, admit_b=Class)`."""

    def make(**factories: Any) -> Registry:
        kinds = [(*name.split("_", 1), factory) for name, factory in factories.items()]
        return registry.with_offers(Offer(kind, name, "test 1.0", partial(_identity, f)) for kind, name, f in kinds)

    return make


def _identity(value: object) -> object:
    return value


@pytest.fixture
def executor() -> FakeExecutor:
    """A fake executor with its plans on record."""
    return FakeExecutor()

"""The suite for codecs with a backend of their own: a codec passes, and what breaks the contract is caught by the test for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from treadle import KVFormat, ModelInfo, hookimpl
from treadle.testing.suites.executors import Driver

pytest.importorskip("torch")
pytest.importorskip("transformers")

from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec  # after the skips
from treadle_plugins.attention.torch_backend import TorchAttention  # as above
from treadle_plugins.execute.torch_executor.suites import BLOCK, CodecSuite  # as above

FORM = KVFormat(8, 8, scheme="woven")


class Woven(TorchAttention):
    """The reference backend under another name."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, kv_format=replace(spec.kv_format, scheme="linear")))


class Codec:
    form = FORM
    backend: type[TorchAttention] = Woven

    @hookimpl
    def quantize(self, model: ModelInfo) -> KVFormat:
        return self.form

    @hookimpl
    def attention(self, spec: AttentionSpec) -> AttentionBackend | None:
        return self.backend(spec) if spec.kv_format.scheme == self.form.scheme else None


class TestWoven(CodecSuite):
    @pytest.fixture
    def strategy(self) -> Codec:
        return Codec()


class OfLinearScheme(Codec):
    form = KVFormat(8, 8)


class AnswersAlways(Codec):
    @hookimpl
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        return self.backend(spec)


class Understating(Woven):
    def block_bytes(self) -> int:
        return super().block_bytes() - 1


class Early(Woven):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.allocate(1)


class Incomplete(Codec):
    @hookimpl
    def attention(self, spec: AttentionSpec) -> Any:
        return object()


class Stepping(Woven):
    """Scales what it stores by what is stored in the same step."""

    def write(self, layer: int, keys: Any, values: Any, batch: Any) -> None:
        super().write(layer, keys / len(keys), values, batch)


def codec_of(kind: type[TorchAttention]) -> Codec:
    codec = Codec()
    codec.backend = kind
    return codec


CASES: Sequence[tuple[Codec, str]] = (
    (OfLinearScheme(), "test_its_format_is_its_own"),
    (AnswersAlways(), "test_other_formats_are_passed_on"),
    (Incomplete(), "test_the_backend_is_one"),
    (codec_of(Early), "test_the_backend_is_one"),
    (codec_of(Understating), "test_what_it_says_of_its_memory_is_so"),
)


@pytest.mark.parametrize(("codec", "test"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_breach_is_caught_by_the_test_that_is_there_for_it(codec: Codec, test: str) -> None:
    spec = AttentionSpec("cpu", "float32", codec.quantize(ModelInfo("tiny", 3, 2, 16, 300, 256)), BLOCK, 3, 4, 2, 16)
    suite = CodecSuite()
    given = (spec,) if test == "test_its_format_is_its_own" else (codec, spec)
    with pytest.raises(AssertionError):
        getattr(suite, test)(*given)


def test_what_depends_on_the_step_is_caught() -> None:
    suite = CodecSuite()
    make = CodecSuite.make_executor.__wrapped__(suite, codec_of(Stepping))  # type: ignore[attr-defined]  # a fixture, by pytest
    with pytest.raises(AssertionError, match="in chunks of"):
        suite.test_chunks_make_no_difference(Driver(make()))

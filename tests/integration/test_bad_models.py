"""Models that cannot be used: a named error that says what would work, nothing left behind, and the next engine runs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import reference_of, save_tiny  # noqa: E402
from support.tiny import tiny_config, tiny_model  # noqa: E402
from treadle import Engine, FinishReason, SamplingParams, hookimpl  # noqa: E402  # after the skips
from treadle.errors import ConfigError, EngineStopped, ExecutionError, ModelError  # noqa: E402

PROMPT = [5, 6, 7, 8, 9]
Spoil = Callable[[Path], None]


def load(model: Path | str, *plugins: object, **values: Any) -> Engine:
    execute = {"strategy": "torch", "dtype": "float32", "offline": True}
    return Engine.load(plugins=plugins, model=str(model), execute=execute, pool={"num_blocks": 8}, **values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves an engine's thread behind; files that are left open are warnings, and these are errors."""
    yield
    gc.collect()
    assert "treadle" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("smolm2-135m-instruct", ["'smolm2-135m-instruct'", "did you mean 'smollm2-135m-instruct'?"]),
        ("no/such/folder", ["'no/such/folder'", "does not exist", "What works"]),
        ("nobody-at-all/no-model", ["'nobody-at-all/no-model'", "as a name on the hub", "What works"]),
        ("weights.gguf", ["'weights.gguf'", "does not exist", "What works"]),
        ("", ["model=''", "What works"]),
    ],
)
def test_unknown_models(name: str, parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load(name)
    for part in parts:
        assert part in str(caught.value)


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def scramble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:60] = b"x" * 52
    path.write_bytes(bytes(content))


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text()[:40])


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_architecture(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"model_type": "llama"', '"model_type": "nobody_knows"'))


def other_weights(folder: Path) -> None:
    tiny_model(tiny_config("gpt2")).save_pretrained(folder.parent / "other")
    (folder.parent / "other" / "model.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (cut_weights, "is damaged"),
        (scramble_header, "is damaged"),
        (drop_weights, "holds no weights"),
        (cut_config, "is damaged"),
        (drop_config, "without config.json"),
        (another_architecture, "nobody_knows"),
        (other_weights, "missing keys"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_corrupt_folders(folder: Path, spoil: Spoil, part: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=part) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(36), b"GGUF\x03\0\0\0" + b"\xff" * 64, b"not a model" * 9])
def test_gguf_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_real_gguf_file_cut_off(tmp_path: Path, share: float) -> None:
    pytest.importorskip("gguf")
    from treadle_plugins.models.resolve import resolve
    from treadle_plugins.models.source import DEFAULT_NAME

    source = resolve(DEFAULT_NAME)
    if source.kind != "gguf":
        pytest.skip(f"the default model is no GGUF file here: it came from the {source.origin}")
    content = source.path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_the_next_engine_runs(folder: Path) -> None:
    """Failures in between leave nothing behind that would disturb it."""
    good = (folder / "model.safetensors").read_bytes()
    truth = reference_of(tiny_model(tiny_config("llama")), PROMPT, 6).tokens
    for _ in range(2):
        cut_weights(folder)
        with pytest.raises(ModelError):
            load(folder)
        (folder / "model.safetensors").write_bytes(good)
        with load(folder) as engine:
            assert engine.submit(PROMPT, SamplingParams(max_tokens=6)).result().token_ids == truth


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"pool": {"memory": 1000}}, "no block fits the pool"),
        ({"pool": {"num_blocks": 10**9}}, "no room for 24576000000000 bytes of KV pool"),
        ({"execute": {"strategy": "torch", "device": "cuda:99"}}, "execute.device='cuda:99' cannot be used here"),
        ({"execute": {"strategy": "torch", "dtype": "float64"}}, "float64"),
    ],
)
def test_settings_that_do_not_fit_the_machine(folder: Path, values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Engine.load(model=str(folder), **values)


def test_nan_in_the_weights_ends_whom_it_touches(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    truth = reference_of(model, PROMPT, 12).tokens
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    model.save_pretrained(tmp_path)
    assert 299 not in truth
    with load(tmp_path, allocate={"block_size": 16}) as engine:
        bad = [engine.submit([299, *PROMPT]), engine.submit([*PROMPT * 4, 299])]
        good = engine.submit(PROMPT, SamplingParams(max_tokens=12))
        for handle in bad:
            completion = handle.result()
            assert completion.finish_reason is FinishReason.ERROR
            assert isinstance(completion.error, ExecutionError)
            assert "NaN" in str(completion.error)
            assert handle.id in str(completion.error)
        assert good.result().token_ids == truth
        # blocks that hold NaN are used again
        again = [engine.submit([*PROMPT, n], SamplingParams(max_tokens=40)) for n in range(8)]
        assert all(handle.result().finish_reason is FinishReason.LENGTH for handle in again)
        engine.check_integrity()


def tensors() -> dict[int, Any]:
    """Every tensor that is alive, by its identity."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}


def made_since(before: dict[int, Any]) -> list[weakref.ref[Any]]:
    return [weakref.ref(tensor) for name, tensor in tensors().items() if name not in before]


def alive(references: list[weakref.ref[Any]]) -> list[Any]:
    gc.collect()
    return [reference() for reference in references if reference() is not None]


def test_closing_gives_the_model_back(folder: Path) -> None:
    before = tensors()
    engine = load(folder).start()
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=200))
    made = made_since(before)
    assert made
    engine.close()
    engine.close()
    assert not alive(made)
    assert handle.result().finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    with pytest.raises(EngineStopped):
        engine.submit(PROMPT)


class Spoilsport:
    """Finds fault with the engine when everything is loaded."""

    def __init__(self) -> None:
        self._before = tensors()
        self.made: list[weakref.ref[Any]] = []

    @hookimpl
    def engine_started(self) -> None:
        self.made = made_since(self._before)
        raise ConfigError("this plugin does not like it here")


def test_a_failure_after_loading_gives_the_model_back(folder: Path) -> None:
    plugin = Spoilsport()
    with pytest.raises(ConfigError, match="does not like it here") as caught:
        load(folder, plugin)
    assert plugin.made
    caught.value.__traceback__ = None
    del caught
    assert not alive(plugin.made)

"""Each codec in whole engines: the tokens of a plain model that attends over requantized keys and values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.reference import ModelCache, Poisoner, attend_requantized, save_tiny  # noqa: E402
from support.tiny import VOCAB_SIZE  # noqa: E402
from treadle import Engine, KVFormat, SamplingParams, hookimpl  # noqa: E402  # after the skips
from treadle.errors import ConfigError  # noqa: E402
from treadle.testing.traffic import Tally  # noqa: E402

BLOCK_SIZE, NUM_TOKENS = 16, 8
PLAIN = "requantized"
"""Name of the plain attention with transformers."""
NEAR = 2e-2
"""Where the two best logits lie closer than this, a code that rounding turned may turn the choice."""
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"strategy": "int8"},
    "int4": {"strategy": "int4"},
    "int4, one scale": {"strategy": "int4", "group": "head", "symmetric": True, "rotation": "none"},
    "K4V8": {"strategy": "mixed", "key_bits": 4, "value_bits": 8, "rotation": 8},
    "K8V4": {"strategy": "mixed"},
    "keys only": {"strategy": "mixed", "key_bits": 4, "value_bits": "whole"},
    "heads kept": {"strategy": "int4", "whole_heads": [[0, 1], [1, 0]], "whole_layers": [2]},
}
FAMILIES = ("llama", "qwen2", "mistral", "gpt2")
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
each_family = pytest.mark.parametrize("family", FAMILIES)


class Reference(NamedTuple):
    """Greedy tokens, and how far apart the two best logits were for each."""

    tokens: list[int]
    gaps: list[float]


class Models:
    """Tiny models in folders, engines of them, and the plain model that they are compared with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shelf = ModelCache()
        self._plain_models: dict[str, Any] = {}

    def folder(self, family: str) -> Path:
        path = self._folder / family
        if not path.exists():
            save_tiny(family, path)
        return path

    def engine(self, family: str, codec: dict[str, Any], *plugins: object, **values: Any) -> Engine:
        settings = {
            "model": str(self.folder(family)),
            "execute": {"strategy": "torch", "dtype": "float32"},
            "allocate": {"block_size": BLOCK_SIZE},
            "pool": {"num_blocks": 200},
            "quantize": codec,
        } | values
        with self._shelf.in_use():
            return Engine.load(plugins=plugins, **settings)

    def _plain(self, family: str) -> Any:
        if family not in self._plain_models:
            transformers.AttentionInterface.register(PLAIN, attend_requantized)
            transformers.AttentionMaskInterface.register(PLAIN, lambda *_, **__: None)
            load = transformers.AutoModelForCausalLM.from_pretrained
            self._plain_models[family] = load(self.folder(family), attn_implementation=PLAIN).eval()
        return self._plain_models[family]

    def continue_plainly(self, family: str, form: KVFormat, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Reference:
        """Each token from a pass over all of them, without any pool: attention over requantized rows."""
        model = self._plain(family)
        transformers.AttentionInterface.register(PLAIN, partial(attend_requantized, form))
        tokens, found = list(prompt), Reference([], [])
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            found.tokens.append(int(best.indices[0]))
            found.gaps.append(float(best.values[0] - best.values[1]))
            tokens.append(found.tokens[-1])
        return found


def agrees(tokens: Sequence[int], reference: Reference) -> bool:
    """Whether all tokens are the same, up to one that was a near tie."""
    pairs = zip(tokens, reference.tokens, reference.gaps, strict=True)
    return next((gap < NEAR for got, exact, gap in pairs if got != exact), True)


def prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)  # noqa: S311  # only has to look varied
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@each_family
@each_codec
def test_the_tokens_of_the_contiguous_reference_over_a_poisoned_pool(models: Models, family: str, codec: dict[str, Any]) -> None:
    asked = prompts(range(BLOCK_SIZE, 2 * BLOCK_SIZE)) if family == "llama" else prompts([1, BLOCK_SIZE, 41])
    poisoner = Poisoner(garbage=family == "qwen2")
    with models.engine(family, codec, poisoner) as engine:
        form = engine.info.kv_format
        got = [done.raise_for_error().token_ids for done in engine.generate(asked, PARAMS)]
    assert form.name != "whole"
    assert poisoner.num_filled
    references = [models.continue_plainly(family, form, prompt) for prompt in asked]
    assert all(agrees(tokens, reference) for tokens, reference in zip(got, references, strict=True))
    same = sum(list(tokens) == reference.tokens for tokens, reference in zip(got, references, strict=True))
    assert same >= len(asked) * 0.8


@each_codec
def test_the_same_prompt_three_times_with_the_cache_on(models: Models, codec: dict[str, Any]) -> None:
    asked = prompts([BLOCK_SIZE * 3 + 5])[0]
    tally = Tally()
    with models.engine("llama", codec, tally, prefix="hash_chain") as engine:
        got = [engine.submit(asked, PARAMS).result().raise_for_error().token_ids for _ in range(3)]
        reference = models.continue_plainly("llama", engine.info.kv_format, asked)
    assert tally["matched"] == 2 * 3
    assert all(agrees(tokens, reference) for tokens in got)
    assert got[1] == got[2]


@each_codec
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_tiny_pool_under_churn(models: Models, codec: dict[str, Any], preempt: str) -> None:
    asked = prompts([5, 16, 17, 30, 33, 47, 48, 20, 64, 3], seed=11)
    asked += [prompt[:32] + extra for prompt, extra in zip(asked[5:7], prompts([4, 9], seed=12), strict=True)]
    tally = Tally()
    pool = {"num_blocks": 7, "swap_memory": 10_000_000 if preempt == "swap" else 0}
    values: dict[str, Any] = {"pool": pool, "preempt": preempt, "budget": {"max_tokens": 24}, "prefix": "radix"}
    with models.engine("llama", codec, Poisoner(garbage=False), tally, **values) as engine:
        got = [done.raise_for_error().token_ids for done in engine.generate(asked, PARAMS)]
        engine.check_integrity()
        form = engine.info.kv_format
    assert tally["preempted"]
    assert tally["evicted"]
    assert preempt == "recompute" or tally["swapped"]
    references = [models.continue_plainly("llama", form, prompt) for prompt in asked]
    assert all(agrees(tokens, reference) for tokens, reference in zip(got, references, strict=True))


@each_codec
def test_the_pool_is_as_large_as_the_format_says(models: Models, codec: dict[str, Any]) -> None:
    memory = 1_000_000
    with models.engine("llama", codec, pool={"memory": memory}) as engine:
        info = engine.info
        block = info.kv_format.bytes_per_token(info.model) * info.block_size
        assert info.num_blocks == memory // block
        whole = KVFormat().bytes_per_token(info.model) * info.block_size
        assert info.num_blocks > memory // whole


class Stranger:
    """A strategy of somebody else's, whose format the built-in backends read."""

    name = "stranger"

    def __init__(self, form: KVFormat) -> None:
        self._form = form

    @hookimpl(tryfirst=True)  # in front of the slot's own strategy
    def quantize(self) -> KVFormat:
        return self._form


def test_a_strangers_format_that_can_be_read(models: Models) -> None:
    form = KVFormat(2, 8, key_group=4, key_symmetric=False, rotation=4)
    asked = prompts([20])[0]
    with models.engine("llama", {"strategy": "none"}, Stranger(form)) as engine:
        got = engine.submit(asked, PARAMS).result().raise_for_error().token_ids
    assert agrees(got, models.continue_plainly("llama", form, asked))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (KVFormat(8, 8, scheme="lattice"), "torch: KV scheme 'lattice' is not 'linear'"),
        (KVFormat(5, 8), "torch: keys: 5 bits are none"),
    ],
)
def test_a_strangers_format_that_nobody_reads_is_an_error_at_start_up(models: Models, form: KVFormat, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        models.engine("llama", {"strategy": "none"}, Stranger(form))

"""Measures one row of `treadle codec-table`. Imports torch."""

from __future__ import annotations

import hashlib
import json
import math
import pydoc_data.topics
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import click
import torch

from treadle import Completion, Engine, SamplingParams, hookimpl
from treadle.cli import Common
from treadle.settings import load
from treadle_plugins.bench.codec_table import load_rows
from treadle_plugins.bench.passes import Passes

SEQUENCE = 1024
"""Tokens of one sequence of the text."""
KL_SEQUENCES = 4
"""Of these the distributions of every token are compared."""
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 50, 48, 32
CALIBRATION_CHARACTERS = 40_000
"""From the end of the text, which is not measured."""
PLANTED_SHARE = 10
"""One KV head in so many gets outliers."""
PLANTED_PAIRS, PLANTED_FACTOR = 2, 32.0
"""Channel pairs of such a head, and the factor on their keys: a power of two, so that the model's function stays bit for bit."""
POOL_MEMORY = 1 << 30


def reference_text() -> str:
    """Python's language reference, as `help()` shows it: in every CPython, the same for one version."""
    topics = cast("Mapping[str, str]", pydoc_data.topics.topics)
    return "\n\n".join(topics[name] for name in sorted(topics))


class Saver:
    """A plugin that writes the model to a folder before it is used, with outliers planted when asked to."""

    name = "saver"

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders

    @hookimpl(tryfirst=True)  # before others pack or replace what is to be written
    def prepare_model(self, model: Any) -> None:
        """Write it as it is, then with outliers; the weights in use stay as they were."""
        kept = {name: value.clone() for name, value in model.state_dict().items() if ".q_proj." in name or ".k_proj." in name}
        model.save_pretrained(self._folders["base"])
        plant(model)
        model.save_pretrained(self._folders["planted"])
        model.load_state_dict(kept, strict=False)


@torch.no_grad()
def plant(model: Any) -> None:
    """Multiply pairs of key channels of a few heads, divide the queries that meet them. Rope turns channel i with i + D / 2."""
    draw = random.Random(20261130)  # noqa: S311  # which heads, not secrets
    config = model.config
    kv_heads, dim = config.num_key_value_heads, getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    heads = [(layer, head) for layer in range(config.num_hidden_layers) for head in range(kv_heads)]
    group = config.num_attention_heads // kv_heads
    for layer, head in draw.sample(heads, len(heads) // PLANTED_SHARE):
        attention = model.model.layers[layer].self_attn
        for pair in draw.sample(range(dim // 2), PLANTED_PAIRS):
            for channel in (pair, pair + dim // 2):
                for parameter in attention.k_proj.parameters():
                    parameter[head * dim + channel] *= PLANTED_FACTOR
                for query in range(head * group, (head + 1) * group):
                    for parameter in attention.q_proj.parameters():
                        parameter[query * dim + channel] /= PLANTED_FACTOR


class Bench:
    """Rows in a folder, and what they are measured with."""

    def __init__(self, folder: Path, common: Common, num_tokens: int) -> None:
        self._folder, self._common = folder, common
        self._num_sequences = num_tokens // SEQUENCE
        self._path = folder / "rows.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """All that were measured."""
        return load_rows(self._path)

    def row(self, model: str, codec: str) -> dict[str, Any] | None:
        """That row; None when it was not measured yet."""
        return next((row for row in self.rows() if (row["model"], row["codec"]) == (model, codec)), None)

    def measure(self, model: str, codec: str, quantize: Mapping[str, Any], calibrations: Mapping[str, Sequence[str]]) -> None:
        """Measure the row and keep it; the row `none` comes first."""
        if codec != "none" and self.row(model, "none") is None:
            self.measure(model, "none", {"strategy": "none"}, calibrations)
        settings = dict(quantize)
        if "calibration" in settings:
            settings["calibration"] = self._calibration(model, settings["calibration"], calibrations)
        passes = Passes()
        with self._engine(model, settings, passes) as engine:
            info = engine.info
            form = info.kv_format
            heads = [(layer, head) for layer in range(info.model.num_layers) for head in range(info.model.num_kv_heads)]
            keys, both = (sum(keeps(*head) for head in heads) for keeps in (form.keeps_keys, form.keeps_values))
            row = {
                "model": model,
                "codec": codec,
                "format": form.name,
                "whole": "" if codec == "none" else f"{both} + {keys - both} keys" if keys else "0",
                "bytes_per_token": form.bytes_per_token(info.model),
                "pool_tokens": info.num_blocks * info.block_size,
                "text": self._tokens["sha256"],
                **self._perplexity(engine, passes, model, codec),
                **self._agreement(engine, model, codec),
            }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _perplexity(self, engine: Engine, passes: Passes, model: str, codec: str) -> dict[str, Any]:
        """Of the text in sequences of its own each; and the distance of distributions from those of the row `none`."""
        ids: list[int] = self._tokens["ids"]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        total, count, kl_sum, kl_max, kl_count = 0.0, 0, 0.0, 0.0, 0
        for place in range(self._num_sequences):
            prompt = ids[place * SEQUENCE : (place + 1) * SEQUENCE]
            done = engine.submit(prompt, params).result().raise_for_error()
            total -= sum(entry.logprob for entry in done.prompt_logprobs)
            count += len(done.prompt_logprobs)
            if place < KL_SEQUENCES:
                kl = self._divergence(passes, self._folder / f"{model}-{place}.pt", codec)
                kl_sum, kl_max, kl_count = kl_sum + float(kl.sum()), max(kl_max, float(kl.max())), kl_count + len(kl)
        return {"perplexity": math.exp(total / count), "kl_mean": kl_sum / kl_count, "kl_max": kl_max}

    def _divergence(self, passes: Passes, path: Path, codec: str) -> torch.Tensor:
        """[rows]: KL of the reference's distributions and the last pass's, in nats. The row `none` writes the reference."""
        got: torch.Tensor = passes.logits.float().log_softmax(-1)
        if codec == "none":
            torch.save(got.half(), path)
        exact = torch.load(path).float().log_softmax(-1)
        if exact.shape != got.shape:
            raise RuntimeError(f"{path} was made with other settings: {tuple(exact.shape)} logits, now {tuple(got.shape)}")
        divergence: torch.Tensor = (exact.exp() * (exact - got)).sum(-1)
        return divergence

    def _agreement(self, engine: Engine, model: str, codec: str) -> dict[str, Any]:
        """Greedy continuations against those of the row `none`: the share before the first difference."""
        ids: list[int] = self._tokens["ids"]
        first = self._num_sequences * SEQUENCE
        prompts = [ids[first + n * PROMPT_TOKENS : first + (n + 1) * PROMPT_TOKENS] for n in range(NUM_PROMPTS)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        outputs = [list(_checked(done).token_ids) for done in engine.generate(prompts, params)]
        path = self._folder / f"{model}-greedy.json"
        if codec == "none":
            path.write_text(json.dumps(outputs), encoding="utf-8")
        same = [_same_start(one, other) for one, other in zip(outputs, json.loads(path.read_text("utf-8")), strict=True)]
        return {"same_tokens": sum(same) / (NUM_PROMPTS * OUTPUT_TOKENS), "identical": sum(n == OUTPUT_TOKENS for n in same)}

    def _engine(self, model: str, quantize: Mapping[str, Any], *plugins: object) -> Engine:
        overrides = [f"model={self._models[model]}", f"pool.memory={POOL_MEMORY}", "prefix=none", "admit=continuous"]
        overrides += [f"admit.max_batch_size={NUM_PROMPTS}", f"budget.max_tokens={2 * NUM_PROMPTS * PROMPT_TOKENS}"]
        values = {"quantize": {name: str(value) if isinstance(value, Path) else value for name, value in quantize.items()}}
        return Engine(load(self._common.path, [*self._common.all_overrides, *overrides], values=values), plugins)

    @cached_property
    def _models(self) -> Mapping[str, Path]:
        """Folders of the configured model and of its planted twin; made the first time."""
        folders = {name: self._folder / name for name in ("base", "planted")}
        if all((folder / "done").exists() for folder in folders.values()):
            return folders
        with Engine(load(self._common.path, self._common.all_overrides), [Saver(folders)]) as engine:
            tokenizer: Any = engine.tokenizer
            text = reference_text()
            ids = tokenizer.encode(text[:-CALIBRATION_CHARACTERS])
            digest = hashlib.sha256(text.encode()).hexdigest()
            (self._folder / "tokens.json").write_text(json.dumps({"sha256": digest, "ids": ids}), encoding="utf-8")
            (self._folder / "calibration.txt").write_text(text[-CALIBRATION_CHARACTERS:], encoding="utf-8")
            for folder in folders.values():
                tokenizer.tokenizer.save_pretrained(folder)
                (folder / "done").touch()
        return folders

    @cached_property
    def _tokens(self) -> Mapping[str, Any]:
        """Token ids of the text, and its digest."""
        assert self._models, "made together with the models"
        tokens: Mapping[str, Any] = json.loads((self._folder / "tokens.json").read_text("utf-8"))
        return tokens

    def _calibration(self, model: str, kind: str, calibrations: Mapping[str, Sequence[str]]) -> Path:
        """The calibration of a model; made the first time."""
        output = self._folder / f"{model}-{kind}.json"
        if not output.exists():
            command: click.Command = self._common.registry.find("command", "calibrate", "codec-table").load()
            config = ["--config", self._common.path] if self._common.path else []
            common = [item for text in self._common.all_overrides for item in ("--set", text)]
            args = [str(self._folder / "calibration.txt"), "--output", str(output), "--set", f"model={self._models[model]}"]
            command.main([*args, *config, *common, *calibrations[kind]], standalone_mode=False)
        return output


def _checked(done: Completion) -> Completion:
    return done.raise_for_error()


def _same_start(one: Sequence[int], other: Sequence[int]) -> int:
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))

"""What the torch executor refuses at start-up, and what it says of itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pluggy
import pytest
import torch
import transformers

from support.tiny import (
    VOCAB_SIZE,
    StillClock,
    info_of,
    tiny_config,
    tiny_executor,
    tiny_model,
)
from treadle.contracts import Executor, KVFormat, PoolSpec
from treadle.errors import ConfigError, ExecutionError, ModelError
from treadle.plan import StepPlan
from treadle_plugins.attention.spec import AttentionSpec, choose
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.executor import build
from treadle_plugins.execute.torch_executor.hookspecs import TorchExecutorHooks

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "s_aux"),
        (
            "Llama4TextConfig",
            {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 16},
            "chunks of 16 tokens",
        ),
        ("LlamaConfig", {"is_causal": False}, "looks ahead"),
        (
            "JambaConfig",
            {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
            "not every layer",
        ),
    ],
)
def test_unusual_attention_is_refused(kind: str, changes: dict[str, Any], problem: str) -> None:
    model = tiny_model(getattr(transformers, kind)(**SIZES, **changes))
    with pytest.raises(ModelError, match=problem):
        tiny_executor(model)


def test_a_model_without_the_interface_is_refused() -> None:
    model = tiny_model(transformers.MptConfig(vocab_size=VOCAB_SIZE, d_model=64, n_heads=4, n_layers=2))
    info = dataclasses.replace(info_of(tiny_model(tiny_config("llama"))), name="mpt")
    with pytest.raises(ModelError, match="MptForCausalLM does not use transformers' attention interface"):
        build(model, info, None, choose_attention=lambda spec: None, clock=StillClock())


def test_a_recurrent_state_is_refused() -> None:
    state = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
    executor = tiny_executor(tiny_model(transformers.FalconH1Config(**SIZES, **state)))
    with pytest.raises(ModelError, match="carries more than KV"):
        executor.open_pool(PoolSpec(16, KVFormat(), 4, 0))


def test_rotary_positions_that_change_with_the_batch_are_refused_beyond_their_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tiny_config("llama", max_position_embeddings=64, rope_parameters=rope)
    with pytest.raises(ModelError, match="64 or less"):
        tiny_executor(tiny_model(config), max_length=128)
    tiny_executor(tiny_model(config), max_length=64)


def test_a_wrong_description_is_refused() -> None:
    model = tiny_model(tiny_config("llama"))
    info = dataclasses.replace(info_of(model), num_kv_heads=4)
    with pytest.raises(ModelError, match="described with 4 KV heads of 16, but attends with 2 of 16"):
        build(model, info, None, choose_attention=lambda spec: None, clock=StillClock())


def test_pool_sizes() -> None:
    executor = tiny_executor(tiny_model(tiny_config("llama")))
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4
    size = executor.open_pool(PoolSpec(16, KVFormat(), None, 5 * block_bytes + 1, swap_bytes=3 * block_bytes))
    assert (size.num_blocks, size.num_swap_blocks) == (5, 3)
    with pytest.raises(ConfigError, match=f"takes {block_bytes} bytes"):
        executor.open_pool(PoolSpec(16, KVFormat(), None, block_bytes - 1))
    with pytest.raises(ConfigError, match="no room for"):
        executor.open_pool(PoolSpec(16, KVFormat(), 2**40, 0))


def test_nobody_can_attend() -> None:
    executor = tiny_executor(tiny_model(tiny_config("llama")))
    with pytest.raises(ConfigError, match="torch: keys: 3 bits are none of 8, 4, 2"):
        executor.open_pool(PoolSpec(16, KVFormat(key_bits=3, value_bits=8), 4, 0))
    model = tiny_model(tiny_config("llama"))
    silent = build(model, info_of(model), None, choose_attention=lambda spec: None, clock=StillClock())
    with pytest.raises(ConfigError, match="no attention backend can"):
        silent.open_pool(PoolSpec(16, KVFormat(), 4, 0))


def test_the_spec_tells_what_the_model_does() -> None:
    seen: list[AttentionSpec] = []

    def watch(spec: AttentionSpec) -> Any:
        seen.append(spec)
        return choose([TorchAttention], spec)

    for family in ("mistral", "bloom"):
        model = tiny_model(tiny_config(family), torch.bfloat16)
        executor = build(model, info_of(model), None, choose_attention=watch, clock=StillClock())
        executor.open_pool(PoolSpec(32, KVFormat(), 4, 0))
    mistral, bloom = seen
    assert (mistral.num_heads, mistral.num_kv_heads, mistral.head_dim, mistral.num_layers) == (4, 2, 16, 3)
    assert (mistral.device, mistral.dtype, mistral.block_size) == ("cpu", "bfloat16", 32)
    assert (mistral.window, mistral.alibi, bloom.window, bloom.alibi) == (12, False, None, True)


def test_life_cycle() -> None:
    prepared: list[Any] = []
    model = tiny_model(tiny_config("llama"))
    executor = build(
        model,
        info_of(model),
        None,
        choose_attention=lambda spec: choose([TorchAttention], spec),
        clock=StillClock(),
        prepare_model=prepared.append,
    )
    assert isinstance(executor, Executor)
    assert prepared == [model]
    with pytest.raises(ExecutionError, match="open_pool"):
        executor.run(StepPlan(0, ()))
    executor.open_pool(PoolSpec(16, KVFormat(), 4, 0))
    assert executor.run(StepPlan(0, ())).tokens == ()
    facts = {"architecture": "LlamaForCausalLM", "device": "cpu", "precision": "float32", "attention": "torch"}
    assert executor.describe() == facts | {"forward": "transformers"}
    executor.close()
    with pytest.raises(ExecutionError, match="close"):
        executor.run(StepPlan(0, ()))


def test_hookspecs_are_told_apart_by_pluggy() -> None:
    manager = pluggy.PluginManager("treadle")
    manager.add_hookspecs(TorchExecutorHooks)
    hooks = {name: vars(manager.hook)[name].spec for name in ("attention", "prepare_model", "forward", "process_logits")}
    assert [bool(spec.opts["firstresult"]) for spec in hooks.values()] == [True, False, True, False]
    assert [list(spec.argnames) for spec in hooks.values()] == [
        ["spec"],
        ["model", "settings"],
        ["model", "plain", "settings"],
        ["logits", "works"],
    ]

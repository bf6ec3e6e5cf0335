"""Weights, tokenizer and facts from folders and GGUF files; what is damaged or incomplete is an error with its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from treadle.errors import ModelError
from treadle_plugins.models.resolve import resolve
from treadle_plugins.models.source import ModelSource

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from treadle_plugins.models.load import LoadedModel, load  # noqa: E402  # after the skips

SHARED = {"vocab_size": 320, "eos_token_id": [0, 2], "bos_token_id": None}


def configs() -> dict[str, Any]:
    llama = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return {
        "llama": transformers.LlamaConfig(**llama, intermediate_size=64, max_position_embeddings=128, **SHARED),
        "gpt2": transformers.GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=96, **SHARED),
        "bloom": transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=32, **SHARED),
    }


def make_folder(path: Path, family: str = "llama", with_tokenizer: bool = True) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs()[family])
    model.save_pretrained(path)
    if with_tokenizer:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        end = {"eos_token": "<|endoftext|>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **end)
        fast.save_pretrained(path)
    return path


def load_from(path: Path, dtype: Any = torch.float32) -> LoadedModel:
    return load(resolve(str(path)), dtype, attn_implementation="eager")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("family", "facts"),
    [("llama", (2, 2, 8, 128)), ("gpt2", (3, 2, 16, 96)), ("bloom", (2, 4, 8, 2048))],
)
def test_the_facts_of_each_family(tmp_path: Path, family: str, facts: tuple[int, ...]) -> None:
    loaded = load_from(make_folder(tmp_path / family, family), torch.bfloat16)
    info = loaded.info
    assert (info.num_layers, info.num_kv_heads, info.head_dim, info.max_length) == facts
    assert (info.vocab_size, info.dtype_bytes, info.eos_token_ids) == (320, 2, frozenset({0, 2}))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("1 žába")) == "1 žába"


def test_the_weights_are_those_of_the_files(llama: Path) -> None:
    weights = safetensors_torch.load_file(llama / "model.safetensors")
    loaded = load_from(llama).model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_the_fingerprint_follows_weights_precision_and_name(llama: Path, tmp_path: Path) -> None:
    same = load_from(llama).info.fingerprint
    assert load_from(llama).info.fingerprint == same
    assert load_from(llama, torch.bfloat16).info.fingerprint != same
    changed = Path(shutil.copytree(llama, tmp_path / "changed"))
    weights = safetensors_torch.load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    safetensors_torch.save_file(weights, changed / "model.safetensors", {"format": "pt"})
    source = ModelSource(str(llama), "directory", changed, "directory")
    assert load(source, torch.float32, attn_implementation="eager").info.fingerprint != same


def test_a_model_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", with_tokenizer=False)
    with capture_logs() as logs:
        assert load_from(folder).tokenizer is None
    assert "model_without_tokenizer" in [entry["event"] for entry in logs]


def test_nothing_is_printed_and_settings_of_transformers_stay(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging  # after the skips

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_from(llama)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    printed = capfd.readouterr()
    assert "Loading weights" not in printed.out + printed.err


def damage(folder: Path, **changes: Any) -> Path:
    """Change entries of config.json."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return folder


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "broken"))


def test_weights_cut_off_between_resolve_and_load_are_an_error(broken: Path) -> None:
    source = resolve(str(broken))
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(source, torch.float32, attn_implementation="eager")


def test_a_weight_that_is_missing_is_an_error(broken: Path) -> None:
    weights = safetensors_torch.load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors_torch.save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no whole model: missing keys: model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        load_from(broken)
    assert str(broken) in str(caught.value)


def test_weights_that_do_not_fit_the_settings_are_an_error(broken: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_from(damage(broken, intermediate_size=48))
    assert str(broken) in str(caught.value)


def test_weights_of_a_smaller_model_than_the_settings_say_are_an_error(broken: Path) -> None:
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.2\..* and \d+ more"):
        load_from(damage(broken, num_hidden_layers=4))


def test_an_unknown_architecture_is_an_error(broken: Path) -> None:
    with pytest.raises(ModelError, match="nonesuch") as caught:
        load_from(damage(broken, model_type="nonesuch"))
    assert str(broken) in str(caught.value)


def test_code_that_a_model_brings_is_not_run(broken: Path) -> None:
    (broken / "evil.py").write_text(f"open({str(broken / 'ran')!r}, 'w')")
    damage(broken, model_type="nonesuch", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(ModelError, match="needs code that its folder brings"):
        load_from(broken)
    assert not (broken / "ran").exists()


def test_a_damaged_tokenizer_is_an_error(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError) as caught:
        load_from(broken)
    assert str(broken) in str(caught.value)


def test_a_device_that_is_not_there_is_an_error(llama: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(resolve(str(llama)), torch.float32, device="nonesuch", attn_implementation="eager")


def make_gguf(path: Path, rules: str = "smollm", without: str = "") -> Path:
    """A llama of one layer in a GGUF file; the tensor `without` is left out."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|endoftext|>", "<|turn_end|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "12", "34"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["1 2", "3 4"])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    loaded = load_from(make_gguf(tmp_path / "m.gguf"), torch.bfloat16)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    info = loaded.info
    assert (info.num_layers, info.num_kv_heads, info.head_dim, info.max_length) == (1, 2, 8, 64)
    assert (info.dtype_bytes, info.eos_token_ids) == (2, frozenset({0, 1}))
    model: Any = loaded.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert "GGUF tensors" not in capfd.readouterr().err


def test_digits_are_split_where_the_gguf_file_says_so(tmp_path: Path) -> None:
    mended = load_from(make_gguf(tmp_path / "a.gguf")).tokenizer
    kept = load_from(make_gguf(tmp_path / "b.gguf", rules="gpt-2")).tokenizer
    assert mended is not None
    assert kept is not None
    assert len(mended.encode("1234")) == 4
    assert len(kept.encode("1234")) == 2
    assert mended.decode(mended.encode("a1234 b")) == "a1234 b"


def test_rules_that_nobody_checked_are_logged(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", rules="nonesuch")
    with capture_logs() as logs:
        load_from(path)
    assert [entry["rules"] for entry in logs if entry["event"] == "gguf_tokenizer_rules_unchecked"] == ["nonesuch"]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_a_gguf_file_that_is_cut_off_is_an_error(tmp_path: Path, share: float) -> None:
    path = make_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match="Fetch it again") as caught:
        load_from(path)
    assert str(path) in str(caught.value)
    assert gguf.GGUFReader.__name__ == "GGUFReader"


def test_garbage_behind_a_gguf_header_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 500)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load_from(path)


@pytest.mark.parametrize("tensor", ["blk.0.ffn_up", "output_norm", "token_embd"])
def test_a_gguf_file_that_lacks_a_tensor_is_an_error(tmp_path: Path, tensor: str) -> None:
    path = make_gguf(tmp_path / "m.gguf", without=tensor)
    with pytest.raises(ModelError, match="no whole model: missing keys") as caught:
        load_from(path)
    assert str(path) in str(caught.value)
